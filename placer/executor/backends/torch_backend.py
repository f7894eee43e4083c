"""Plain PyTorch: runs wherever torch does."""

import torch
from torch import Tensor

from placer.executor.arena import Arena, FlatRows
from placer.executor.backends._base import Backend, sources_of
from placer.executor.rule import Rule, apply_rule, row_sums, runs
from placer.executor.step import ArenaStep


class TorchBackend(Backend):
    """`torch.nn.functional.embedding_bag` both ways.

    Called ``torch`` it reads one flat arena in place. Called ``staged``, what CUDA uses,
    every tier has memory of its own, from which the distinct rows of a step are copied
    to the computing device, and to which they return when they have been updated.
    """

    def __init__(self, name: str = "torch") -> None:
        self.name = name

    def forward(self, arena: Arena, step: ArenaStep, weights: Tensor | None) -> Tensor:
        rows = arena.weights
        if isinstance(rows, FlatRows) and rows.data.dtype == torch.float32:
            table, index = rows.data, step.slots
        else:
            slots, index = torch.unique(step.slots, return_inverse=True)
            table = rows.read(slots).float()
        return torch.nn.functional.embedding_bag(
            index,
            table,
            step.offsets,
            mode="sum",
            per_sample_weights=weights,
            include_last_offset=True,
        )

    def update(
        self,
        arena: Arena,
        step: ArenaStep,
        gradients: Tensor,
        weights: Tensor | None,
        rule: Rule,
    ) -> None:
        order, slots, starts = runs(step.slots)
        sources = sources_of(step)[order]
        sorted_weights = None if weights is None else weights[order]
        apply_rule(rule, arena, slots, row_sums(gradients, sources, sorted_weights, starts))
