"""Optimizers that update each row of a step from its summed gradient."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from placer.errors import PlanMismatchError
from placer.executor.optimizers.rounding import stochastic_round
from placer.tables import OptimizerName


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
    # Whether weights of half precision are rounded up or down at random
    # (`placer.executor.optimizers.rounding`) instead of to the nearest.
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
    for name, value in (("lr", lr), ("eps", eps)):
        if not 0 <= float(value) < math.inf:
            raise PlanMismatchError(f"{name} {value} must be a number of at least 0")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise PlanMismatchError(f"betas {tuple(betas)} must be two and lie within 0..1, 1 excluded")


def row_sums(gradients: Tensor, sources: Tensor, weights: Tensor | None, starts: Tensor) -> Tensor:
    """Return the sum of the gradients of each run of lookups, weighted by `weights`.

    - `gradients`, float32, shape (bags, width).
    - `sources`, int32 or int64, shape (lookups,): the bag of each lookup; lookups are sorted by
      slot.
    - `weights`, float32, shape (lookups,), or None.
    - `starts`, int64, shape (runs,): start of each run of equal slots.

    The result is float32, shape (runs, width).
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

    - `weights`, float32, float16 or bfloat16, shape (rows, width).
    - `state`, float32, shape (rows,), (rows, width) or (rows, 2 · width), or None: see
      `placer.executor.memory.arena.state_shape`.
    - `gradients`, float32, shape (rows, width): sum of each row's gradients over the step.
    - `mean_square`, float32, shape (rows,), or None: mean of g² over whole rows for row-wise
      Adagrad, if `weights` are column slices of rows.

    The results have the dtypes and shapes of weights and state.
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
