"""Which copies of rows are in HBM: the row caches of one module, step by step.

The directory is the executor's own (`RowCache`), without rows behind it. It resolves the same
steps in the same order, so ties fall alike, and counts are equal to the row.
"""

import numpy as np
import numpy.typing as npt
import torch

from placer.executor.memory.row_cache import RowCache
from placer.executor.memory.slot_range import SlotRange
from placer.executor.names import Policy
from placer.simulator.parts import Part

Int = npt.NDArray[np.int64]


class ArenaRowCache:
    """The entries that the parts of one arena share; `parts` are in the order of their slots."""

    def __init__(self, parts: list[Part], policy: Policy) -> None:
        self._starts = np.array([part.slot for part in parts] + [_end(parts[-1])], dtype=np.int64)
        ranges = [
            SlotRange(
                part.slot,
                _end(part),
                part.staging_rows,
                part.cache_rows,
                part.warm,
                part.is_ordered,
            )
            for part in parts
        ]
        self._row_cache = RowCache(ranges, 0, "cpu", policy)
        self._kind = np.int32 if self._starts[-1] < np.iinfo(np.int32).max else np.int64
        self.entries = self._row_cache.entries
        self.held = sum(min(part.cache_rows, part.row_count) for part in parts)
        """Entries that hold a row."""
        # Slots of open steps, and those of them that such a step reads in place.
        self._open: dict[int, tuple[Int, Int]] = {}

    def resolve(
        self, slots: Int, times: Int, ticket: int, oldest: int, *, updates: bool
    ) -> tuple[int, dict[str, Int]]:
        """Give entries to the rows of a step.

        `slots` are distinct and ascending, `times` the lookups of each. `ticket` numbers the step,
        `oldest` is the oldest that is open. `updates` says whether the step's copies become newer
        than their originals. Returns the distinct rows of the open steps; and of each part the
        step's hits, copies and reads in place, by their names in `PartCounts`.
        """
        needed = slots.size + sum(
            slots.size and theirs.size - _common(theirs, slots) for theirs, _ in self._open.values()
        )
        barred = None
        kept = [theirs for _, theirs in self._open.values() if theirs.size]
        if kept:
            barred = torch.from_numpy(np.logical_or.reduce([_among(slots, one) for one in kept]))
        rows = torch.from_numpy(slots.astype(self._kind))
        hit = (self._row_cache.find(rows) >= 0).numpy()
        resolution = self._row_cache.resolve(
            rows, torch.from_numpy(times.astype(np.int32)), ticket, oldest, barred
        )
        outgoing = resolution.moves.outgoing.numpy()
        in_place = (resolution.entries < 0).numpy()
        self.held = min(self.entries, self.held + int(resolution.moves.count))
        if updates:
            self._row_cache.mark_dirty(resolution.entries)
        self._open[ticket] = slots, slots[in_place]
        edges = np.searchsorted(slots, self._starts)
        hit_rows, in_place_rows = _sums(hit, edges), _sums(in_place, edges)
        written = np.searchsorted(np.sort(outgoing[outgoing >= 0]), self._starts)
        return int(needed), {
            "hit_lookups": _sums(np.where(hit, times, 0), edges),
            "hit_rows": hit_rows,
            "staged_rows": np.diff(edges) - hit_rows - in_place_rows,
            "in_place_lookups": _sums(np.where(in_place, times, 0), edges),
            "in_place_rows": in_place_rows,
            "written_back_rows": np.diff(written),
        }

    def close(self, ticket: int) -> None:
        """End a step: its rows may move."""
        self._open.pop(ticket, None)


def _end(part: Part) -> int:
    return part.slot + part.row_count


def _sums(values: npt.NDArray[np.generic], edges: npt.NDArray[np.integer]) -> Int:
    """Return sums of values between edges, shape (edges − 1,)."""
    running = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    sums: Int = np.diff(running[edges])
    return sums


def _among(values: Int, sorted_others: Int) -> npt.NDArray[np.bool_]:
    place = np.minimum(np.searchsorted(sorted_others, values), sorted_others.size - 1)
    return np.asarray(sorted_others[place] == values)


def _common(ascending: Int, others: Int) -> int:
    """Return how many members two sorted sets share."""
    if not ascending.size or not others.size:
        return 0
    return int(np.count_nonzero(_among(others, ascending)))
