"""Arenas: the rows of one element type, optimizer and width that a GPU serves, and what they take.

One kernel of a GPU serves an arena, in however many shards, and rows that are staged or cached
share one row cache. Gradients of all replicated rows are added up at once. What that takes belongs
to no shard: it comes on top of what shards cost.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from placer.tables import DType, OptimizerName, Table

Float = npt.NDArray[np.float64]

Arena = tuple[DType, OptimizerName, int]
"""Element type, optimizer and width of rows."""


class ArenaLoad(NamedTuple):
    """What a step of a GPU does in one arena, or in a shard of it."""

    lookups: float = 0.0  # Of a step, however their rows are read.
    cached_rows: int = 0  # Rows that are staged or cached, read by the step or not.
    pooled_lookups: float = 0.0  # Those of `lookups` in groups of which the host pools some rows.
    replicated: bool = False  # Whether other GPUs hold any of the rows too.

    def joined(self, other: "ArenaLoad") -> "ArenaLoad":
        """Return the sum of both, as one arena."""
        return ArenaLoad(
            self.lookups + other.lookups,
            self.cached_rows + other.cached_rows,
            self.pooled_lookups + other.pooled_lookups,
            self.replicated or other.replicated,
        )


class ArenaCosts(NamedTuple):
    """Seconds of each phase that arenas take besides their launches; of shape (phases,) each.

    None is negative.
    """

    cached_s: Float  # Of an arena with staged or cached rows.
    # Of each lookup there that may be of such a row: an executor makes room to look up as many rows
    # as the step has lookups in the arena, or as many as there are such rows if fewer.
    cached_lookup_s: Float
    # Of each lookup in an arena of which the host pools rows: it goes through all of them. Those of
    # the same group pay for themselves (`UnitCosts.pooled_lookup_s`), and not here.
    pooled_lookup_s: Float
    # Of a GPU that holds any replicated rows, however many: the collectives that add their
    # gradients up.
    replicas_s: Float

    def seconds(self, loads: Iterable[ArenaLoad]) -> Float:
        """Return what these arenas take together, shape (phases,)."""
        cached = located = pooled = replicated = 0.0
        for load in loads:
            if load.cached_rows:
                cached += 1.0
                located += min(load.lookups, load.cached_rows)
            if load.pooled_lookups:
                pooled += max(0.0, load.lookups - load.pooled_lookups)
            replicated = max(replicated, float(load.replicated))
        total: Float = (
            cached * self.cached_s
            + located * self.cached_lookup_s
            + pooled * self.pooled_lookup_s
            + replicated * self.replicas_s
        )
        return total


def arena_of(table: Table, width: int) -> Arena:
    """Return the arena of a shard of a table with so many columns."""
    return table.dtype, table.optimizer, width
