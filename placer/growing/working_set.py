"""Measure working sets: distinct ids of a log in windows, and hit rates with fewer rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from placer.data.log import Log, slice_chunk
from placer.errors import DataError
from placer.growing.key_map import KeyMap
from placer.growing.options import Eviction, Growing, Int

SHARES = 0.01, 0.03, 0.1, 0.3
"""Default capacities, as shares of a table's rows."""

BETWEEN = 0.017, 0.06, 0.2, 0.6
"""Further capacities for ``lfu``, the usual eviction, for choosing capacities more finely."""


@dataclass(frozen=True, slots=True)
class HitRate:
    """The share of lookups with an id that has a row, for a capacity and an eviction."""

    capacity: int  # Most ids that have rows at a time.
    eviction: Eviction
    hit_rate: float  # Over all windows except the first, in which rows are still free.
    # Lowest and highest hit rate of a single window, without the first and an incomplete last one.
    # They show how much the next window may differ. None without such windows.
    of_windows: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Distinct ids and hit rates of one table over the windows of a log."""

    distinct: int  # Number of distinct ids of the whole log.
    distinct_of_windows: tuple[int, ...]  # Number of distinct ids of each window.
    # For each window, the share of lookups with an id that no earlier window has. A vocabulary of
    # all earlier ids would not know them.
    unknown_of_windows: tuple[float, ...]
    whole_windows: int  # Number of complete windows: all, or all except the last.
    # By capacity and eviction. By default, the last is for ``lfu`` with a row for each id.
    hit_rates: tuple[HitRate, ...]


def working_sets(
    log: Log,
    window: int,
    capacities: Mapping[str, Sequence[int]] | None = None,
    *,
    evictions: Sequence[Eviction] = ("lfu", "lru"),
    batch_size: int | None = None,
) -> dict[str, WorkingSet]:
    """Count the ids of each table in windows of consecutive samples, in the log's order.

    Hit rates are exact: a `KeyMap` of each capacity reads the log. This takes about half a
    microsecond per lookup. They mean little for a log with shuffled samples.

    Raises DataError if `window` is less than 1, or the log cannot be read.

    Parameters
    ----------
    log : Log
        A log, as `placer.data.open_log` returns it.
    window : int
        Samples of a window, such as one day's.
    capacities : mapping of table name to sequence of int, optional
        Capacities to measure; by default the shares `SHARES` of the rows, and for ``lfu`` also
        `BETWEEN`.
    evictions : sequence of {"lfu", "lru"}
    batch_size : int
        Samples of a step. Rows that a step reads keep their ids until the next step has ended. By
        default 8,192, or a tenth of the window if that is less. A window's end also ends a step.
    """
    if window < 1:
        raise DataError(f"a window has at least one sample, not {window}")
    tables = {}
    by_default = capacities is None and "lfu" in evictions
    for name, rows in log.tables.items():
        sizes = _shares_of(rows, SHARES) if capacities is None else capacities.get(name, ())
        wanted = [Growing(size, eviction=eviction) for eviction in evictions for size in sizes]
        if by_default:
            wanted += [Growing(size) for size in _shares_of(rows, BETWEEN)]
        tables[name] = _TableCounter(rows, [KeyMap(how) for how in wanted])
    if batch_size is None:
        batch_size = min(8192, -(-window // 10))
    left = window  # Samples until the window ends.
    for chunk in log.chunks(batch_size):
        start = 0
        while start < chunk.samples:
            if not left:
                left = window
                for table in tables.values():
                    table.end_window()
            # A step does not reach into the next window.
            stop = min(start + left, chunk.samples)
            ids: dict[str, list[Int]] = {name: [] for name in tables}
            for feature, bags in slice_chunk(chunk, start, stop).features.items():
                ids[log.feature_tables[feature]].append(bags.ids)
            for name, parts in ids.items():
                if parts:
                    tables[name].add(np.concatenate(parts))
            left, start = left - (stop - start), stop
    return {
        name: table.working_set(by_default, ends_whole=not left) for name, table in tables.items()
    }


def _shares_of(rows: int, shares: Sequence[float]) -> list[int]:
    return [max(1, round(share * rows)) for share in shares]


class _TableCounter:
    def __init__(self, rows: int, maps: list[KeyMap]) -> None:
        # Number of the first and the last window that read each id, from 1 on; 0: none so far.
        self._first, self._last = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        self._windows = [_Window()]
        # For each map, its counts before each window.
        self._maps, self._counts = maps, [[keys.counts] for keys in maps]

    def add(self, ids: Int) -> None:
        """Count the lookups of one step."""
        for keys in self._maps:
            keys.read(ids)
        number, window = len(self._windows), self._windows[-1]
        distinct = np.unique(ids)
        fresh = distinct[self._last[distinct] != number]
        self._last[fresh] = number
        new = fresh[self._first[fresh] == 0]
        self._first[new] = number
        window.new += new.size
        window.distinct += fresh.size
        window.lookups += ids.size
        window.unknown += int(np.count_nonzero(self._first[ids] == number))

    def end_window(self) -> None:
        """Begin the next window."""
        for keys, counts in zip(self._maps, self._counts, strict=True):
            counts.append(keys.counts)
        self._windows.append(_Window())

    def working_set(self, with_all: bool, ends_whole: bool) -> WorkingSet:
        """Return the counts so far; `with_all` adds the hit rate with a row for each id."""
        first = min(1, len(self._windows) - 1)
        whole = len(self._windows) - 1 - (not ends_whole)
        rates = []
        for keys, counts in zip(self._maps, self._counts, strict=True):
            ends = [(one.hits, one.hits + one.misses) for one in (*counts, keys.counts)]
            windows = [
                (hits - a, lookups - b) for (a, b), (hits, lookups) in pairwise(ends[first:])
            ]
            rates.append(_hit_rate(keys.growing.capacity, keys.growing.eviction, windows, whole))
        distinct = int(np.count_nonzero(self._first))
        if with_all and distinct:  # Then only an id's first lookup misses.
            windows = [(one.lookups - one.new, one.lookups) for one in self._windows[first:]]
            rates.append(_hit_rate(distinct, "lfu", windows, whole))
        return WorkingSet(
            distinct,
            tuple(window.distinct for window in self._windows),
            tuple(window.unknown / max(1, window.lookups) for window in self._windows),
            len(self._windows) - (not ends_whole),
            tuple(rates),
        )


def _hit_rate(
    capacity: int, eviction: Eviction, windows: Sequence[tuple[int, int]], whole: int
) -> HitRate:
    """Return the hit rate of windows (hits, lookups), of which the first `whole` are complete."""
    hits, lookups = map(sum, zip(*windows, strict=True))
    rates = [hits / lookups for hits, lookups in windows[: max(0, whole)] if lookups]
    of_windows = (min(rates), max(rates)) if rates else None
    return HitRate(capacity, eviction, hits / max(1, lookups), of_windows)


@dataclass(slots=True)
class _Window:
    distinct: int = 0
    lookups: int = 0
    unknown: int = 0
    new: int = 0
