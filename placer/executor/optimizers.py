"""Optimizers that update each row of a step from its summed gradient, and stochastic rounding.

Rounding to the nearest loses every update of a bfloat16 weight below 1/512 of it. Stochastic
rounding rounds up with a probability equal to the relative distance from the lower neighbour, so
the weight is right on average. Gupta et al. 2015, "Deep learning with limited numerical
precision", ICML (arXiv:1502.02551); Zamirai et al. 2020, arXiv:2010.06192, for bfloat16.

A hash of the weight's float32 value and of the number of the update decides. So there is no
generator state to save, and rounding does not depend on the row's place, on the order of updates,
or on a restart.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from placer.errors import PlanMismatchError
from placer.tables import OptimizerName, Table

Rounding = Literal["nearest", "stochastic"]

_SMALLEST_NORMAL = 2.0**-14
"""Smallest normal float16. Below it, neighbours have a constant distance."""


def rounding_of(tables: Iterable[Table], rounding: Rounding = "stochastic") -> Rounding:
    """Return `rounding` if a table has 16-bit weights, otherwise "nearest"."""
    halves = any(table.dtype != "float32" for table in tables)
    return rounding if halves else "nearest"


def random_bits(values: Tensor, updates: Tensor) -> Tensor:
    """Return 32 random bits for each value.

    ``mix(bits of the value XOR mix(updates + 1))``, with `mix` the 32-bit finalizer
    "lowbias32" of C. Wellons' hash prospector (https://github.com/skeeto/hash-prospector).

    `values` are float32. `updates`, int64, shape (), or one for each value: number of the update,
    of which only the lowest 32 bits matter. The result is int32.
    """
    # Conversion to int32 keeps the lower half of an int64 on every device.
    key = _mix((updates + 1).to(torch.int32))
    return _mix(values.view(torch.int32) ^ key)


def _mix(x: Tensor) -> Tensor:
    # Multiplication wraps around. `>>` copies the sign bit, so masks remove the copies.
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


def stochastic_round(values: Tensor, dtype: torch.dtype, updates: Tensor) -> Tensor:
    """Round up or down at random, so that the mean is the value. It never waits for the device.

    Random bits are added to the mantissa bits that `dtype` lacks, and the sum is truncated, so that
    a carry rounds up. Values of `dtype`, infinity and NaN stay unchanged.

    `values` are float32, contiguous; they stay unchanged if that is `dtype`. `updates`, on their
    device, seeds the random bits: see `random_bits`.
    """
    if dtype == torch.float32:
        return values
    lost = 16 if dtype == torch.bfloat16 else 13  # Bits of the mantissa that dtype lacks.
    bits = random_bits(values, updates) & ((1 << lost) - 1)
    magnitude = values.abs()
    if dtype == torch.bfloat16:
        rounded = _truncated(magnitude, bits, lost)
    else:
        # Add the smallest normal number to tiny values, so that their neighbours have the same
        # distance as in float16.
        lift = (magnitude < _SMALLEST_NORMAL).to(values.dtype) * _SMALLEST_NORMAL
        rounded = _truncated(magnitude + lift, bits, lost) - lift
    rounded = torch.where(values.isfinite(), rounded.copysign(values), values)
    return rounded.to(dtype)


def _truncated(magnitude: Tensor, bits: Tensor, lost: int) -> Tensor:
    """Add bits to the lowest `lost` bits, then set these bits to zero."""
    return ((magnitude.view(torch.int32) + bits) & -(1 << lost)).view(torch.float32)


@dataclass(frozen=True, slots=True)
class Defaults:
    """Default constants of an optimizer."""

    lr: float
    eps: float
    betas: tuple[float, float] = (0.9, 0.999)


DEFAULTS: Mapping[OptimizerName, Defaults] = {
    "sgd": Defaults(lr=1e-3, eps=0.0),
    "adagrad": Defaults(lr=1e-2, eps=1e-10),
    "rowwise_adagrad": Defaults(lr=1e-2, eps=1e-8),
    "adam": Defaults(lr=1e-3, eps=1e-8),
}
"""Defaults of `torch.optim.SGD`, `Adagrad` and `SparseAdam`, and of FBGEMM's row-wise Adagrad."""


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """An optimizer and its constants.

    The rules for rows that a step reads, with g the sum of a row's gradients over the step:

    - ``sgd``: ``w −= lr · g``
    - ``adagrad``: ``sum += g²``, ``w −= lr · g / (√sum + eps)``
    - ``rowwise_adagrad``: the same with one ``sum += mean(g²)`` per row.
    - ``adam``: ``m += (1 − β₁)(g − m)``, ``v += (1 − β₂)(g² − v)``,
      ``w −= lr · √(1 − β₂ᵗ) / (1 − β₁ᵗ) · m / (√v + eps)``, where t counts all steps, even
      those that did not read the row. A row that is read with g = 0 still moves by m.

    Adagrad: Duchi, Hazan and Singer 2011, JMLR 12; row-wise: Gupta et al. 2014,
    "Training highly multiclass classifiers", JMLR 15; Adam: Kingma and Ba 2015,
    arXiv:1412.6980, in the form at the end of its section 2. eps stands where
    `torch.optim.Adagrad` and `torch.optim.SparseAdam` have it.
    """

    optimizer: OptimizerName
    lr: Tensor  # Float32, shape (): a tensor, so that captured CUDA graphs see changes.
    eps: float
    updates: Tensor  # Int64, shape (): number of updates including this one: Adam's t.
    # Decay rates of Adam's averages of g and g².
    beta1: float = 0.9
    beta2: float = 0.999
    # Whether weights of half precision are rounded up or down at random, or to the nearest.
    stochastic: bool = False

    def step_size(self) -> Tensor:
        """Return the factor of a row's direction: lr, with bias corrections for Adam.

        float32, shape (). It never waits for the device. Computed in float64, because
        ``1 − 0.999`` keeps only four digits in float32.
        """
        if self.optimizer != "adam":
            return self.lr
        t = self.updates.double()
        corrections = (1 - self.beta2**t).sqrt() / (1 - self.beta1**t)
        return (self.lr * corrections).float()


def check_constants(lr: float, eps: float = 0.0, betas: Sequence[float] = (0.9, 0.999)) -> None:
    """Raise PlanMismatchError if a constant of an optimizer is out of range.

    >>> check_constants(lr=float("nan"))
    Traceback (most recent call last):
    placer.errors.PlanMismatchError: lr nan must be a number of at least 0
    """
    constants: dict[str, Any] = {"lr": lr, "eps": eps}
    for name, value in constants.items():
        if isinstance(value, str) or not 0 <= float(value) < math.inf:
            raise PlanMismatchError(f"{name} {value} must be a number of at least 0")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise PlanMismatchError(f"betas {tuple(betas)} must be two and lie within 0..1, 1 excluded")


def row_sums(gradients: Tensor, sources: Tensor, weights: Tensor | None, starts: Tensor) -> Tensor:
    """Return the sum of the gradients of each run of lookups: float32, shape (runs, width).

    Lookups are sorted by slot. `sources` and `weights` have each lookup's bag, a row of
    `gradients`, and its weight. `starts` has the start of each run of equal slots.
    """
    return torch.nn.functional.embedding_bag(
        sources, gradients, starts.to(sources.dtype), mode="sum", per_sample_weights=weights
    )


def runs(slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort lookups by slot; return the stable order, the distinct slots, and the starts of runs."""
    ordered, order = torch.sort(slots, stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=first[1:])
    starts = torch.nonzero(first).squeeze(1)
    return order, ordered[starts], starts


def updated(
    rule: Rule,
    weights: Tensor,
    state: Tensor | None,
    gradients: Tensor,
    mean_square: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return rows and state after one update. It never waits for the device.

    `gradients` are the sums of each row's gradients over the step: float32, shape (rows, width).
    `mean_square`, float32, shape (rows,), is the mean of g² over whole rows for row-wise Adagrad,
    if `weights` are column slices of rows.
    """
    direction, state = _direction(rule, state, gradients, mean_square)
    result = weights.float().addcmul(direction, rule.step_size(), value=-1)
    if rule.stochastic:
        return stochastic_round(result, weights.dtype, rule.updates), state
    return result.to(weights.dtype), state


def _direction(
    rule: Rule, state: Tensor | None, gradients: Tensor, mean_square: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the direction of a row's update, and its new state."""
    if state is None:
        return gradients, None
    if rule.optimizer == "adam":
        mean, square = state.chunk(2, dim=1)
        mean = mean + (gradients - mean) * (1 - rule.beta1)
        square = square + (gradients * gradients - square) * (1 - rule.beta2)
        return mean / square.sqrt().add_(rule.eps), torch.cat([mean, square], dim=1)
    row_wise = rule.optimizer == "rowwise_adagrad"
    if mean_square is None:
        mean_square = (gradients * gradients).mean(1) if row_wise else gradients * gradients
    state = state + mean_square
    scale = state.sqrt().add_(rule.eps)
    return gradients / (scale.unsqueeze(1) if row_wise else scale), state
