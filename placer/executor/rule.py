"""Optimizers that are applied to the summed gradient of each row that a step touched."""

from dataclasses import dataclass

import torch
from torch import Tensor

from placer.executor.arena import Arena
from placer.tables import OptimizerName


@dataclass(frozen=True, slots=True)
class Rule:
    """An optimizer and its constants.

    With g the gradient of a row summed over the whole step:

    - ``sgd``: ``w −= lr · g``
    - ``adagrad``: ``state += g²``, ``w −= lr · g / (√state + eps)``
    - ``rowwise_adagrad``: the same with one ``state += mean(g²)`` for a row.

    Adagrad: Duchi, Hazan and Singer 2011, JMLR 12; row-wise: Gupta et al. 2014,
    "Training highly multiclass classifiers", JMLR 15. eps stands where `torch.optim.Adagrad`
    has it.
    """

    optimizer: OptimizerName
    lr: float
    eps: float


def row_sums(gradients: Tensor, sources: Tensor, weights: Tensor | None, starts: Tensor) -> Tensor:
    """Sum of the gradients of each run of lookups.

    Parameters
    ----------
    gradients : float32, shape (bags, width)
    sources : int64, shape (lookups,)
        The bag that each lookup went to, sorted by slot.
    weights : float32, shape (lookups,), or None
    starts : int64, shape (runs,)
        Where each run of equal slots starts.

    Returns
    -------
    float32, shape (runs, width)
    """
    return torch.nn.functional.embedding_bag(
        sources, gradients, starts, mode="sum", per_sample_weights=weights
    )


def runs(slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lookups by slot: a stable order, the distinct slots, and where each one's run starts."""
    ordered, order = torch.sort(slots, stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=first[1:])
    starts = torch.nonzero(first).squeeze(1)
    return order, ordered[starts], starts


def apply_rule(
    rule: Rule, arena: Arena, slots: Tensor, gradients: Tensor, mean_square: Tensor | None = None
) -> None:
    """Update the rows at distinct `slots` in place.

    `mean_square` is the mean of g² over whole rows, where the arena holds only a strip of
    them.
    """
    step = gradients
    if arena.state is not None:
        row_wise = rule.optimizer == "rowwise_adagrad"
        if mean_square is None:
            mean_square = (gradients * gradients).mean(1) if row_wise else gradients * gradients
        state = arena.state.read(slots) + mean_square
        arena.state.write(slots, state)
        scale = state.sqrt().add_(rule.eps)
        step = gradients / (scale.unsqueeze(1) if row_wise else scale)
    arena.weights.write(slots, arena.weights.read(slots).float().sub_(step, alpha=rule.lr))
