"""What a backend does: sums of rows forward, summed gradients and updates backward."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import ArenaReads, ArenaStep, FeatureRead
from placer.executor.memory.arena import Arena
from placer.executor.memory.layout import ArenaSpec
from placer.executor.optimizers.rule import Rule


@dataclass(frozen=True, slots=True, eq=False)
class SliceReads:
    """One feature's lookups in one of a table's several column slices.

    Attributes
    ----------
    arena : Arena
    step : ArenaStep
    lookups : slice
        Of the arena's step.
    sources : int32
        The row of `gradients` of each lookup.
    gradients : float32, shape (bags of the arena, width)
    weights : float32 or None
        Weight of each lookup.
    rule : Rule
    """

    arena: Arena
    step: ArenaStep
    lookups: slice
    sources: Tensor
    gradients: Tensor
    weights: Tensor | None
    rule: Rule

    @property
    def slots(self) -> Tensor:
        """Slots of the lookups."""
        return self.step.slots[self.lookups]


class SlicedUpdate(Protocol):
    """An update that waits for the mean of g² over whole rows.

    Attributes
    ----------
    squares : float32, shape (at least runs,)
        Σ g² of the summed gradient of each row that was read, in the order of slots, over the
        column slices at hand.
    """

    squares: Tensor

    def apply(self, mean_squares: Tensor) -> None:
        """Update all column slices by the mean of g² over whole rows, in the same order."""
        ...


class Backend(ABC):
    """Kernels over one arena at a time. Results do not depend on the backend but for rounding.

    All are deterministic: sums run in the order of the lookups, on any number of threads.
    """

    name: str

    @abstractmethod
    def allocate(self, spec: ArenaSpec) -> Arena:
        """Zeroed memory for an arena."""

    @abstractmethod
    def prepare(
        self,
        arenas: Sequence[Arena],
        batch: BagBatch,
        features: Sequence[FeatureRead],
        reads: Sequence[ArenaReads],
        training: bool,
    ) -> tuple[ArenaStep, ...]:
        """Find a batch's rows; `training` says that a backward pass may follow.

        Raises
        ------
        DataError
            If an id is no row of its table. A device is not waited for: a later call
            raises for its faults.
        """

    @abstractmethod
    def forward(self, arena: Arena, step: ArenaStep, weights: Tensor | None) -> Tensor:
        """Sum of each bag's rows, each times its weight: float32, shape (bags, width)."""

    def join(self, arena: Arena, step: ArenaStep, gradients: Sequence[Tensor]) -> Tensor:
        """Gradients of an arena's bags from those of its segments: float32, (bags, width)."""
        joined = torch.empty((step.reads.bags, arena.spec.key.width), device=step.slots.device)
        for segment, gradient in zip(step.reads.segments, gradients, strict=True):
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

    @abstractmethod
    def sliced_update(self, column_slices: Sequence[Sequence[SliceReads]]) -> SlicedUpdate:
        """Row-wise Adagrad of one table whose rows are spread over several column slices.

        The state grows by mean(g²) over the whole row, so all column slices are summed before one
        is updated. The same lookups read every column slice, hence the order of one serves all.
        """

    @abstractmethod
    def weight_gradients(self, arena: Arena, step: ArenaStep, gradients: Tensor) -> Tensor:
        """Gradient of each lookup's weight, its row · its bag's gradient: shape (lookups,)."""

    def finish(self, steps: Sequence[ArenaStep]) -> None:  # noqa: B027  most have nothing to do
        """The rows of a step have been updated, or will not be."""
