"""Fitting the learned cost model to measured step times of whole plans.

AutoShard (arXiv:2208.06399) and DreamShard (arXiv:2210.02023) sum over the tables of a
GPU what a network says of each, and fit the sum to measured times. Here a network says what each
table's lookups, rows and bytes cost, as factors of calibrated constants, and the sum is the step
equation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cost_models.learned.network import BOUND, NOT_NEGATIVE, TRAINED, Networks, shapes
from placer.errors import DataError

Float = npt.NDArray[np.float64]

MEMBERS = 5
"""Members of the ensemble, each of which is stopped by the fifth that it was not fitted to."""

LEAST_GROUPS = 2 * MEMBERS
"""Workloads that a data set needs at least: two to stop each member."""

_EPOCHS = 1500
_PATIENCE = 150
_LEARNING_RATE = 3e-3
_LEVEL_PENALTY = 1e-3
_FACTOR_PENALTY = 1e-3
"""Of squared logarithms: constants stay as calibrated where measurements say nothing of them."""

_OUTLIER = 0.15
"""Log errors beyond this count less than their square."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A measured plan: what its devices do, and how long the step took.

    Attributes
    ----------
    group : str
        The workload; plans of one workload are fitted to, or held out, together.
    free, monotone : float64, shapes (tables, features)
    parts_s : float64, shape (devices, tables, k)
        Seconds of each device for each table by the calibrated constants, in parts.
    fixed_s : float64, shape (devices,)
        What each device takes besides: arenas, and the step, as calibrated.
    step_s : float
        Measured time of the slowest device.
    """

    group: str
    free: Float
    monotone: Float
    parts_s: Float
    fixed_s: Float
    step_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """Trained networks, and how wrong each member is about workloads that it was not fitted to.

    Attributes
    ----------
    networks : Networks
    log_errors : float64, shape (examples,)
        log(predicted / measured) of each example, by the member that did not see it.
    base_log_errors : float64, shape (examples,)
        The same of the calibrated constants.
    epochs : int
    """

    networks: Networks
    log_errors: Float
    base_log_errors: Float
    epochs: int


def train(
    examples: Sequence[Example],
    *,
    seed: int = 0,
    epochs: int = _EPOCHS,
    on_epoch: Callable[[int, float], None] | None = None,
) -> Fit:
    """Fit an ensemble to measured plans: robust squares of log(predicted / measured), by Adam.

    Outliers count little (Cauchy's loss, as in the fit of constants), as other load makes some
    times too long.

    The workloads are divided into as many parts as there are members. A member is not fitted to
    its own part, and keeps the weights with which it was best there. So all measurements count,
    and members differ where these say little.

    Parameters
    ----------
    on_epoch : callable, optional
        Called every 50 epochs with the epoch and the root mean square log error on held-out parts.

    Raises
    ------
    DataError
        If there are too few workloads, or a time is not positive.
    """
    _check(examples)
    torch.manual_seed(seed)
    data = _Batch.of(examples)
    held_out = _parts(examples, seed)
    parameters = _initial(data, examples[0].parts_s.shape[2], seed)
    trained = [parameters[name].requires_grad_() for name in TRAINED]
    optimizer = torch.optim.Adam(trained, lr=_LEARNING_RATE)
    fitted = (~held_out).double()
    best = _Best.of(parameters, len(examples))
    epoch = 0
    for epoch in range(epochs + 1):
        error, penalty = data.log_errors(parameters)
        best.keep(epoch, parameters, error.detach(), held_out)
        if on_epoch is not None and epoch % 50 == 0:
            on_epoch(epoch, float(best.losses.mean().sqrt()))
        if epoch - best.epoch > _PATIENCE:
            break
        # Members have no weight in common, so their sum trains each by itself.
        total = ((_robust(error) * fitted).sum(1) / fitted.sum(1) + penalty).sum()
        optimizer.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            for name in NOT_NEGATIVE:
                parameters[name].clamp_(min=0)
    kept = parameters | best.weights
    networks = Networks(**{name: value.detach().float().numpy() for name, value in kept.items()})
    with torch.no_grad():
        base = data.base_log_errors()
    unseen = best.log_errors[held_out.int().argmax(0), torch.arange(len(examples))]
    return Fit(networks, unseen.numpy(), base.numpy(), epoch)


@dataclass(slots=True, eq=False)
class _Best:
    """Each member's weights, loss and log errors of the epoch with its least held-out loss."""

    weights: dict[str, Tensor]
    losses: Tensor
    log_errors: Tensor
    epoch: int = 0

    @classmethod
    def of(cls, parameters: dict[str, Tensor], examples: int) -> "_Best":
        return cls(
            {name: parameters[name].detach().clone() for name in TRAINED},
            torch.full((MEMBERS,), torch.inf, dtype=torch.float64),
            torch.zeros(MEMBERS, examples, dtype=torch.float64),
        )

    def keep(
        self, epoch: int, parameters: dict[str, Tensor], log_errors: Tensor, held_out: Tensor
    ) -> None:
        """Keep the members that are better than ever before."""
        loss = (_robust(log_errors) * held_out).sum(1) / held_out.sum(1)
        better = loss < self.losses * (1 - 1e-4)
        if better.any():
            self.epoch = epoch
            self.losses = torch.where(better, loss, self.losses)
            self.log_errors[better] = log_errors[better]
            for name in TRAINED:
                self.weights[name][better] = parameters[name].detach()[better]


def _robust(log_errors: Tensor) -> Tensor:
    """About the square of small errors; beyond `_OUTLIER` it grows ever more slowly."""
    return _OUTLIER**2 * torch.log1p((log_errors / _OUTLIER).square())


def _check(examples: Sequence[Example]) -> None:
    groups = {example.group for example in examples}
    if len(groups) < LEAST_GROUPS:
        raise DataError(
            f"{len(groups)} measured workloads are too few to learn from; "
            f"measure at least {LEAST_GROUPS}"
        )
    for example in examples:
        if not (np.isfinite(example.step_s) and example.step_s > 0):
            raise DataError(
                f"workload {example.group}: a measured step takes {example.step_s} s; "
                "times must be positive"
            )


def _parts(examples: Sequence[Example], seed: int) -> Tensor:
    """Which examples each member is not fitted to, bool of shape (members, examples)."""
    groups = sorted({example.group for example in examples})
    order = np.random.default_rng(seed).permutation(len(groups))
    part = {groups[at]: place % MEMBERS for place, at in enumerate(order.tolist())}
    mine = torch.tensor([part[example.group] for example in examples])
    return torch.arange(MEMBERS)[:, None] == mine


def _initial(data: "_Batch", units: int, seed: int) -> dict[str, Tensor]:
    """Parameters of members whose factors are all 1, whatever the features are."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.cat((data.free, data.monotone), 1)
    scale = x.std(0)
    # A feature that never varied has no scale of its own: 1 measures how far other values are.
    scale = torch.where(scale > 1e-6, scale, torch.ones_like(scale))
    parameters = {"mean": x.mean(0), "scale": scale, "low": x.amin(0), "high": x.amax(0)}
    sizes = shapes(MEMBERS, units)
    for name in TRAINED:
        size = sizes[name]
        values = torch.zeros(size, dtype=torch.float64)
        if name in ("w1", "w2", "u", "v"):
            bound = size[1] ** -0.5
            values.uniform_(-bound, bound, generator=generator)
        if name in NOT_NEGATIVE:
            values = values.abs()
        parameters[name] = values
    return parameters


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """All examples as tensors: their tables one below the other, and their devices.

    Attributes
    ----------
    free, monotone : float64, shapes (r, features)
        Of all tables of all examples.
    parts_s : float64, shape (e, k)
    row, device : int64, shape (e,)
        Table and device of each of `parts_s`.
    fixed_s : float64, shape (d,)
        What each device takes besides.
    example : int64, shape (d,)
        Example of each device.
    measured_log : float64, shape (examples,)
    """

    free: Tensor
    monotone: Tensor
    parts_s: Tensor
    row: Tensor
    device: Tensor
    fixed_s: Tensor
    example: Tensor
    measured_log: Tensor

    @classmethod
    def of(cls, examples: Sequence[Example]) -> "_Batch":
        parts_s, row, device, example = [], [], [], []
        rows = devices = 0
        for number, one in enumerate(examples):
            for busy in one.parts_s:
                served = np.flatnonzero(busy.any(axis=1))
                parts_s.append(busy[served])
                row.append(rows + served)
                device.append(np.full(served.size, devices))
                example.append(number)
                devices += 1
            rows += len(one.free)
        return cls(
            torch.from_numpy(np.concatenate([one.free for one in examples])),
            torch.from_numpy(np.concatenate([one.monotone for one in examples])),
            torch.from_numpy(np.concatenate(parts_s)),
            torch.from_numpy(np.concatenate(row)),
            torch.from_numpy(np.concatenate(device)),
            torch.from_numpy(np.concatenate([one.fixed_s for one in examples])),
            torch.tensor(example),
            torch.tensor([np.log(one.step_s) for one in examples], dtype=torch.float64),
        )

    def log_errors(self, parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """log(predicted / measured) by member and example, and each member's penalty."""
        x = (torch.cat((self.free, self.monotone), 1) - parameters["mean"]) / parameters["scale"]
        edge = self.free.shape[1]
        known, skew = x[:, :edge], x[:, edge:]
        hidden = (known @ parameters["w1"] + parameters["b1"]).relu()
        hidden = (hidden @ parameters["w2"] + parameters["b2"]).relu()
        rising = (known @ parameters["u"] + skew @ parameters["v"] + parameters["c"]).tanh()
        moved = BOUND * (hidden @ parameters["w3"] + rising @ parameters["w"]).tanh()
        level = parameters["level"]
        factors = (level[:, None, :] + moved).exp()
        penalty = _LEVEL_PENALTY * level.square().mean(1)
        penalty = penalty + _FACTOR_PENALTY * moved.square().mean((1, 2))
        return self._steps(factors).log() - self.measured_log, penalty

    def base_log_errors(self) -> Tensor:
        """log(predicted / measured) of the calibrated constants, shape (examples,)."""
        calibrated = torch.ones(1, len(self.free), self.parts_s.shape[1], dtype=torch.float64)
        return (self._steps(calibrated).log() - self.measured_log)[0]

    def _steps(self, factors: Tensor) -> Tensor:
        """Predicted step times by member and example, from factors by member and table."""
        members = factors.shape[0]
        costs = (factors[:, self.row] * self.parts_s).sum(2)
        times = self.fixed_s.repeat(members, 1).index_add(1, self.device, costs)
        steps = factors.new_zeros(members, len(self.measured_log))
        owner = self.example.expand(members, -1)
        # A step without any work still has a logarithm.
        return steps.scatter_reduce(1, owner, times, "amax").clamp(min=1e-12)
