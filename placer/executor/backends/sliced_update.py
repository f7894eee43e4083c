"""What an update needs of a table whose rows have several column slices."""

from dataclasses import dataclass

import torch
from torch import Tensor

from placer.executor.lookups.steps import ArenaStep
from placer.executor.memory.arena import Arena
from placer.executor.optimizers.rule import Rule


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
