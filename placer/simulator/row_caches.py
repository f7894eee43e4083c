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
from placer.simulator.policy import BatchCache, CacheFactory

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
        Of the cached parts, unless they have caches of their own.
    make_cache : CacheFactory, optional
        Makes such a cache for each cached part, which then has no part in the row cache.
    """

    def __init__(self, parts: list[Part], policy: Policy, make_cache: CacheFactory | None) -> None:
        self._starts = np.array([part.slot for part in parts] + [_end(parts[-1])], dtype=np.int64)
        self._caches: dict[int, BatchCache] = {}
        pooled = len(parts)
        if make_cache is not None:
            pooled = sum(part.lookup == "staged" for part in parts)
            self._caches = {
                at: make_cache(part.cache_rows, part.row_count)
                for at, part in enumerate(parts)
                if part.lookup == "cached"
            }
        ranges = [
            CacheRange(
                part.slot,
                _end(part),
                part.staging_rows,
                part.cache_rows,
                part.warm,
                part.is_ordered,
            )
            for part in parts[:pooled]
        ]
        self._pooled, self._parts = pooled, len(parts)
        self._row_cache = RowCache(ranges, 0, "cpu", policy) if ranges else None
        self._kind = np.int32 if self._starts[-1] < np.iinfo(np.int32).max else np.int64
        self.entries = 0 if self._row_cache is None else self._row_cache.entries
        self.entries += sum(cache.capacity for cache in self._caches.values())
        self._in_row_cache = sum(
            min(part.cache_rows, part.row_count) for part in parts[:pooled] if part.cache_rows
        )
        # Slots of open steps, and those of them that such a step reads in place.
        self._open: dict[int, tuple[Int, Int]] = {}

    @property
    def held(self) -> int:
        """Entries that hold a row."""
        return self._in_row_cache + sum(cache.held for cache in self._caches.values())

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
        hit = np.zeros(slots.size, dtype=bool)
        in_place = np.zeros(slots.size, dtype=bool)
        staged = np.zeros(self._parts, dtype=np.int64)
        written = np.zeros(self._parts, dtype=np.int64)
        if self._row_cache is not None:
            own = slice(0, int(edges[self._pooled]))
            hit[own], in_place[own], moved, outgoing = self._resolve_row_cache(
                self._row_cache, slots[own], counts[own], ticket, oldest
            )
            self._in_row_cache = min(self._row_cache.entries, self._in_row_cache + int(moved))
            written[: self._pooled] = np.diff(
                np.searchsorted(np.sort(outgoing), self._starts[: self._pooled + 1])
            )
            if updates:
                self._row_cache.mark_dirty(self._last_entries)
        for at, cache in self._caches.items():
            here = slice(int(edges[at]), int(edges[at + 1]))
            own_slots, held = slots[here] - self._starts[at], cache.held
            hit[here] = cache.step(own_slots, counts[here])
            # A row may have come and gone within the step: then it was read in place.
            in_place[here] = ~hit[here] & ~cache.holds(own_slots)
            entered = own_slots.size - np.count_nonzero(hit[here] | in_place[here])
            # All that a cache holds has been updated, so that whatever leaves is written back.
            written[at] = held + entered - cache.held
        self._open[ticket] = slots, slots[in_place]
        rows = np.diff(edges)
        hit_rows, in_place_rows = _sums(hit, edges), _sums(in_place, edges)
        staged = rows - hit_rows - in_place_rows
        return Resolved(
            _sums(np.where(hit, counts, 0), edges),
            hit_rows,
            staged,
            _sums(np.where(in_place, counts, 0), edges),
            in_place_rows,
            written,
            int(needed),
        )

    def close(self, ticket: int) -> None:
        """End a step: its rows may move."""
        self._open.pop(ticket, None)

    def _resolve_row_cache(
        self, row_cache: RowCache, slots: Int, counts: Int, ticket: int, oldest: int
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
        hit = (row_cache.find(rows) >= 0).numpy()
        resolution = row_cache.resolve(rows, times, ticket, oldest, barred)
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
