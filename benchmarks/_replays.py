"""Streams of rows through caches: the executor's pool, batch caches, and what bounds them all."""

import heapq
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from _batch_caches import BatchCache

from placer.executor.memory.row_cache import CacheRange, Policy, RowCache

Int = npt.NDArray[np.int64]
Batch = tuple[Int, Int]
"""Distinct rows of a step, ascending, and the lookups of each."""

Step = Callable[[Int, Int], npt.NDArray[np.bool_]]
"""Reads a batch; which of its rows were in HBM before."""


def batches_of(keys: Int, size: int) -> Iterator[Batch]:
    """A stream cut into steps of `size` lookups."""
    for start in range(0, keys.size, size):
        rows, counts = np.unique(keys[start : start + size], return_counts=True)
        yield rows, counts


def pool_step(entries: int, rows: int, policy: Policy) -> Step:
    """The executor's pool over rows numbered by the plan's order, whose hottest it starts with."""
    pool = RowCache([CacheRange(0, rows, 0, entries)], 0, "cpu", policy)
    ticket = 0

    def step(read: Int, counts: Int) -> npt.NDArray[np.bool_]:
        nonlocal ticket
        slots = torch.from_numpy(read.astype(np.int32))
        found: npt.NDArray[np.bool_] = (pool.find(slots) >= 0).numpy()
        pool.resolve(slots, torch.from_numpy(counts.astype(np.int32)), ticket, ticket)
        ticket += 1
        return found

    return step


def cache_step(cache: BatchCache) -> Step:
    """A cache to compare with."""
    return cache.step


def hit_share(step: Step, batches: Iterable[Batch], warm: int) -> float:
    """Share of the lookups that hit after the first `warm` steps."""
    hits = lookups = 0
    for number, (rows, counts) in enumerate(batches):
        found = step(rows, counts)
        if number >= warm:
            hits += int(counts[found].sum())
            lookups += int(counts.sum())
    return hits / lookups


def most_hits(keys: Int, capacity: int) -> int:
    """Hits of the best policy there could be: one that knows all that is to come.

    Belady's MIN (IBM Systems Journal 5(2), 1966, doi:10.1147/sj.52.0078), which keeps the rows
    that are read again soonest. It may choose what it starts with, and need not let a row in
    that it reads: so it bounds static sets and caches alike.

    Parameters
    ----------
    keys : int64, shape (n,)
        From 0 on.
    """
    rows = int(keys.max()) + 1
    order = np.argsort(keys, kind="stable")
    again = np.full(keys.size, keys.size, dtype=np.int64)
    same = keys[order[1:]] == keys[order[:-1]]
    again[order[:-1][same]] = order[1:][same]
    first = np.full(rows, keys.size, dtype=np.int64)
    first[keys[::-1]] = np.arange(keys.size - 1, -1, -1)
    next_read = first.tolist()
    start = np.argsort(first, kind="stable")[:capacity].tolist()
    held = bytearray(rows)
    for row in start:
        held[row] = 1
    # The row held whose next read is furthest off, on top; rows read since are stale.
    furthest = [(-next_read[row], row) for row in start]
    heapq.heapify(furthest)
    hits = 0
    for row, later in zip(keys.tolist(), again.tolist(), strict=True):
        next_read[row] = later
        if held[row]:
            hits += 1
            heapq.heappush(furthest, (-later, row))
            continue
        while furthest and (
            not held[furthest[0][1]] or -furthest[0][0] != next_read[furthest[0][1]]
        ):
            heapq.heappop(furthest)
        if furthest and later < -furthest[0][0]:
            held[heapq.heapreplace(furthest, (-later, row))[1]] = 0
            held[row] = 1
    return hits
