"""What a backend does: sums of rows forward, summed gradients and updates backward."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from placer.executor.arena import Arena
from placer.executor.layout import ArenaSpec
from placer.executor.rule import Rule
from placer.executor.step import ArenaStep, FeatureRead, Segment, check_ids


class Backend(ABC):
    """Kernels over one arena at a time. Results do not depend on the backend but for rounding.

    All are deterministic: sums run in the order of the lookups, on any number of threads.
    """

    name: str

    def translate(
        self,
        ids: Tensor,
        features: Sequence[FeatureRead],
        arena: ArenaSpec,
        segments: Sequence[Segment],
    ) -> Tensor:
        """Slots, int64, of the lookups of an arena's segments.

        Raises
        ------
        DataError
            If an id is no row of its table.
        """
        slots = [ids[:0].long()]
        for segment in segments:
            part = ids[slice(*segment.batch)]
            check_ids(part, features[segment.feature])
            slots.append(segment.strip.slots_of(part))
        return torch.cat(slots)

    @abstractmethod
    def forward(self, arena: Arena, step: ArenaStep, weights: Tensor | None) -> Tensor:
        """Sum of each bag's rows, each times its weight: float32, shape (bags, width)."""

    def join(self, arena: Arena, step: ArenaStep, gradients: Sequence[Tensor]) -> Tensor:
        """Gradients of an arena's bags from those of its segments: float32, (bags, width)."""
        joined = torch.empty((step.bags, arena.spec.key.width), device=step.slots.device)
        for segment, gradient in zip(step.segments, gradients, strict=True):
            joined[slice(*segment.bags)] = gradient
        return joined

    @abstractmethod
    def update(
        self,
        arena: Arena,
        step: ArenaStep,
        gradients: Tensor,
        weights: Tensor | None,
        rule: Rule,
    ) -> None:
        """Sum the gradients of each row and apply the rule once to it.

        `gradients` are of the bags: float32, shape (bags, width), contiguous.
        """

    def weight_gradients(self, arena: Arena, step: ArenaStep, gradients: Tensor) -> Tensor:
        """Gradient of each lookup's weight, its row · its bag's gradient: shape (lookups,)."""
        rows = arena.weights.read(step.slots).float()
        return (rows * gradients.index_select(0, sources_of(step))).sum(1)


def sources_of(step: ArenaStep) -> Tensor:
    """The bag of each lookup."""
    bags = torch.arange(step.bags, device=step.offsets.device)
    return bags.repeat_interleave(step.offsets.diff(), output_size=step.slots.numel())
