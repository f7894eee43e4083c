"""Which copies of rows are in HBM: the row caches of one module, step by step.

The directory is the executor's own (`RowCache`), without rows behind it. It resolves the same
steps in the same order, so ties fall alike, and counts are equal to the row.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from placer.executor.memory.cache_range import CacheRange
from placer.executor.memory.row_cache import RowCache
from placer.executor.names import Policy
from placer.simulator.parts import Part

Int = npt.NDArray[np.int64]


@dataclass(slots=True)
class OpenSteps:
    """The steps of a module whose rows must stay where they are.

    Attributes
    ----------
    number : int
        Steps so far.
    tickets : list of int
        Those that are open, the oldest first.
    """

    number: int = 0
    tickets: list[int] = field(default_factory=list)

    def open(self) -> int:
        """Begin a step."""
        self.tickets.append(self.number)
        self.number += 1
        return self.tickets[-1]

    def close(self, ticket: int) -> None:
        """End a step: its rows may move."""
        self.tickets.remove(ticket)

    @property
    def oldest(self) -> int:
        """The oldest open step."""
        return self.tickets[0]


@dataclass(frozen=True, slots=True, eq=False)
class Resolved:
    """A step's hits, copies and reads in place; int64, shape (parts of the row cache,)."""

    hit_lookups: Int
    hit_rows: Int
    staged_rows: Int
    in_place_lookups: Int
    in_place_rows: Int
    written_back_rows: Int
    needed: int


class ArenaRowCache:
    """The entries that the parts of one arena share.

    Parameters
    ----------
    parts : list of Part
        In the order of their slots.
    policy : {"lfu", "rank"}
        Which rows of the cached parts are kept.
    """

    def __init__(self, parts: list[Part], policy: Policy) -> None:
        self._starts = np.array([part.slot for part in parts] + [_end(parts[-1])], dtype=np.int64)
        ranges = [
            CacheRange(
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
        self, slots: Int, counts: Int, ticket: int, oldest: int, *, updates: bool
    ) -> Resolved:
        """Give entries to the rows of a step.

        Parameters
        ----------
        slots : int64, shape (rows,)
            Distinct, ascending.
        counts : int64, shape (rows,)
            Lookups of each.
        ticket, oldest : int
            Number of the step, and of the oldest that is open.
        updates : bool
            Whether the step's copies become newer than their originals.
        """
        needed = slots.size + sum(
            slots.size and theirs.size - _common(theirs, slots) for theirs, _ in self._open.values()
        )
        edges = np.searchsorted(slots, self._starts)
        hit, in_place, moved, outgoing = self._resolve_row_cache(slots, counts, ticket, oldest)
        self.held = min(self.entries, self.held + int(moved))
        written = np.diff(np.searchsorted(np.sort(outgoing), self._starts))
        if updates:
            self._row_cache.mark_dirty(self._last_entries)
        self._open[ticket] = slots, slots[in_place]
        rows = np.diff(edges)
        hit_rows, in_place_rows = _sums(hit, edges), _sums(in_place, edges)
        return Resolved(
            _sums(np.where(hit, counts, 0), edges),
            hit_rows,
            rows - hit_rows - in_place_rows,
            _sums(np.where(in_place, counts, 0), edges),
            in_place_rows,
            written,
            int(needed),
        )

    def close(self, ticket: int) -> None:
        """End a step: its rows may move."""
        self._open.pop(ticket, None)

    def _resolve_row_cache(
        self, slots: Int, counts: Int, ticket: int, oldest: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], int, Int]:
        rows = torch.from_numpy(slots.astype(self._kind))
        times = torch.from_numpy(counts.astype(np.int32))
        barred = None
        kept = [theirs for _, theirs in self._open.values() if theirs.size]
        if kept:
            mask = np.zeros(slots.size, dtype=bool)
            for theirs in kept:
                mask |= _among(slots, theirs)
            barred = torch.from_numpy(mask)
        hit = (self._row_cache.find(rows) >= 0).numpy()
        resolution = self._row_cache.resolve(rows, times, ticket, oldest, barred)
        self._last_entries = resolution.entries
        outgoing = resolution.moves.outgoing.numpy()
        in_place = (resolution.entries < 0).numpy()
        return hit, in_place, int(resolution.moves.count), outgoing[outgoing >= 0]


def _end(part: Part) -> int:
    return part.slot + part.row_count


def _sums(values: npt.NDArray[np.generic], edges: npt.NDArray[np.integer]) -> Int:
    """Sums of values between edges, shape (edges − 1,)."""
    running = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    sums: Int = np.diff(running[edges])
    return sums


def _among(values: Int, sorted_others: Int) -> npt.NDArray[np.bool_]:
    place = np.minimum(np.searchsorted(sorted_others, values), sorted_others.size - 1)
    return np.asarray(sorted_others[place] == values)


def _common(ascending: Int, others: Int) -> int:
    """How many members two sorted sets share."""
    if not ascending.size or not others.size:
        return 0
    return int(np.count_nonzero(_among(others, ascending)))
