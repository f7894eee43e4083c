"""Candidates of a table: one way to place it each.

The shards of a candidate come in units that are placed as a whole: a shard on any rank, the row
blocks of a host on the ranks of any host in their order, or the shards of all ranks.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Candidates of a table whose shards are placed in the same way."""

    span: int  # Ranks of a unit: 1, those of a host or several, or all.
    same_host: bool  # Whether all units must be on the ranks of one host.
    distinct: bool  # Whether all units must be on different ranks.
    seconds: Float  # Shape (candidates, units, span): time of each shard, in any unit.
    tier_bytes: Float  # Shape (candidates, units, span, tiers).
    sources: list[Any]  # What each candidate was made of.
    # Shape (ranks,): ranks that units of one shard may be on; all by default.
    allowed: Bool | None = None

    @property
    def units(self) -> int:
        """Units of a candidate."""
        return int(self.seconds.shape[1])

    @property
    def is_loose(self) -> bool:
        """Whether each unit is one shard that may be on any rank, whatever the others are on."""
        bound = self.same_host or self.distinct or self.allowed is not None
        return self.span == 1 and not bound

    def worthwhile(self, memory: Float) -> "Group | None":
        """Return the candidates that fit and that no other one is as good as; None if none fits.

        `memory`, shape (ranks, tiers): bytes of each rank.
        """
        fitting = self._only(self._fitting(memory))
        return fitting._only(fitting._undominated()) if fitting.sources else None

    def _only(self, kept: Bool) -> "Group":
        return replace(
            self,
            seconds=self.seconds[kept],
            tier_bytes=self.tier_bytes[kept],
            sources=[self.sources[number] for number in np.flatnonzero(kept).tolist()],
        )

    def _fitting(self, memory: Float) -> Bool:
        """Return which candidates have all units fit on some ranks, each by itself."""
        slots = len(memory) // self.span
        room = memory[: slots * self.span].reshape(slots, 1, 1, self.span, -1)
        fits = (self.tier_bytes <= room).all(axis=(3, 4)).any(axis=0)
        return np.asarray(np.all(fits, axis=1))

    def _undominated(self) -> Bool:
        """Return which candidates no other one is as good as in time and all memory."""
        values = np.concatenate(
            (
                self.seconds.sum((1, 2))[:, None],
                self.seconds.max((1, 2))[:, None],
                self.tier_bytes.sum((1, 2)),
                self.tier_bytes.max((1, 2)),
            ),
            axis=1,
        )
        values, first = np.unique(values, axis=0, return_index=True)
        as_good = np.asarray((values[:, None] <= values[None]).all(axis=2))
        np.fill_diagonal(as_good, False)
        kept = np.zeros(len(self.sources), dtype=bool)
        kept[first[~as_good.any(axis=0)]] = True
        return kept
