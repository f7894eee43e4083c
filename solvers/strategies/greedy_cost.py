"""Greedy by cost: divide what is too much for one GPU, pack by time, fill HBM by saving per byte.

1. The Lagrangian bound says how many row slices each table needs for a given step time; a table
   with a shard that a single phase would wait for gets another option.
2. Slices are packed longest first, each onto the GPU where it adds least to a norm of the phases'
   times, with the hot rows that it would have if all HBM were one memory.
3. Each GPU fills its own HBM with the rows that save most per byte (`solvers.model.knapsack`).
4. Slices move or swap between the slowest GPU and others while that makes it faster.

Steps 2 to 4 run for a few target step times around the bound and a few longest shards, those that
look best first; the best plan is kept.
"""

from solvers.model.instance import Instance
from solvers.strategies._base import Stage, StagedStrategy
from solvers.strategies._stages import cost_greedy


class GreedyCost(StagedStrategy):
    """The strategy of this module's docstring."""

    name = "greedy-cost"

    def stages(self, instance: Instance) -> list[Stage]:
        """The greedy alone."""
        return [Stage("greedy", cost_greedy)]
