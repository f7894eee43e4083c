"""What an update needs of a table whose rows have several column slices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from placer.executor.backends.torch_kernels import RowReads
from placer.executor.lookups.steps import ArenaStep
from placer.executor.memory.arena import Arena
from placer.executor.optimizers.rule import Rule

if TYPE_CHECKING:
    from placer.executor.backends.backend import Backend


@dataclass(frozen=True, slots=True, eq=False)
class SliceReads:
    """All lookups in one of a table's several column slices.

    Attributes
    ----------
    arena : Arena
    step : ArenaStep
    lookups : list of slice
        Of the arena's step, feature by feature.
    sources : int32
        The row of `gradients` of each lookup of the arena's step.
    gradients : float32, shape (bags of the arena, width)
    weights : float32 or None
        Weight of each lookup of the arena's step.
    rule : Rule
    """

    arena: Arena
    step: ArenaStep
    lookups: list[slice]
    sources: Tensor
    gradients: Tensor
    weights: Tensor | None
    rule: Rule

    def of(self, values: Tensor) -> Tensor:
        """Return values of these lookups, out of those of the arena's step."""
        return torch.cat([values[part] for part in self.lookups])


@dataclass(frozen=True, slots=True, eq=False)
class SlicedUpdate:
    """An update that waits for the mean of g² over whole rows.

    Attributes
    ----------
    backend : Backend
    column_slices : sequence of (Arena, RowReads, Rule)
        What each column slice sums.
    squares : float32, shape (at least runs,)
        Σ g² of the summed gradient of each row that was read, in the order of slots, over the
        column slices at hand.
    """

    backend: "Backend"
    column_slices: Sequence[tuple[Arena, RowReads, Rule]]
    squares: Tensor

    def apply(self, mean_squares: Tensor) -> None:
        """Update all column slices by the mean of g² over whole rows, in the same order."""
        for arena, reads, rule in self.column_slices:
            self.backend.update_rows(arena.weights, arena.state, reads, rule, mean_squares)
