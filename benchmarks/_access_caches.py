"""LRU and LFU as caches are studied: one access after the other, the second to a row hits.

`_batch_caches` has those that take a training step at a time. Every tie has a rule, so
that a trace always gives the same hits, compiled by numba or not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LruCache:
    """Holds the rows that were read last; the one read longest ago makes room."""

    capacity: int

    def replay(self, keys: npt.ArrayLike) -> Bool:
        """Which accesses hit, starting empty; bool of the shape of `keys`, which is (n,)."""
        dense, distinct = _dense(keys)
        links = np.full(distinct + 1, distinct, dtype=np.int64)
        held = np.zeros(distinct, dtype=np.bool_)
        return _replayed(_lru_hits, dense, self.capacity, links, links.copy(), held)


@dataclass(frozen=True, slots=True)
class LfuCache:
    """Holds the rows that were read most often since they came in.

    Of those read least often, the one read longest ago makes room. A row that left and comes
    back starts over: its earlier accesses are forgotten.

    Notes
    -----
    One list of rows for each count, as in K. Shah, A. Mitra and D. Matani, "An O(1) algorithm
    for implementing the LFU cache eviction scheme", 2010 (arXiv:2110.11602).
    """

    capacity: int

    def replay(self, keys: npt.ArrayLike) -> Bool:
        """Which accesses hit, starting empty; bool of the shape of `keys`, which is (n,)."""
        dense, distinct = _dense(keys)
        most = int(np.bincount(dense, minlength=1).max())
        # Behind the rows stands the head of each count's list, linked to itself.
        links = np.arange(distinct + most + 1, dtype=np.int64)
        counts = np.zeros(distinct, dtype=np.int64)
        return _replayed(_lfu_hits, dense, self.capacity, links, links.copy(), counts)


def _dense(keys: npt.ArrayLike) -> tuple[npt.NDArray[np.signedinteger], int]:
    """Keys as numbers from 0 on, and a number that all are below."""
    given = np.asarray(keys)
    if given.dtype in (np.int32, np.int64) and given.size:
        largest = int(given.max())
        if int(given.min()) >= 0 and largest < given.size:
            return given, largest + 1
    distinct, dense = np.unique(given, return_inverse=True)
    return dense.astype(np.int64, copy=False), distinct.size


def _replayed(
    loop: Callable[..., None], keys: npt.NDArray[np.signedinteger], capacity: int, *state: Any
) -> Bool:
    """The hits that a loop finds: compiled where numba is installed, the same loop where not."""
    hits = np.zeros(keys.size, dtype=np.bool_)
    if find_spec("numba") is not None:
        _compiled(loop)(hits, keys, capacity, *state)
        return hits
    # Single elements of lists are several times as fast as those of arrays.
    found = hits.tolist()
    loop(found, keys.tolist(), capacity, *(part.tolist() for part in state))
    return np.array(found, dtype=np.bool_)


@cache
def _compiled(loop: Callable[..., None]) -> Callable[..., None]:
    import numba

    compiled: Callable[..., None] = numba.njit(cache=True, nogil=True)(loop)
    return compiled


def _lru_hits(hits: Any, keys: Any, capacity: int, before: Any, after: Any, held: Any) -> None:
    """A ring of the rows held, from the one read longest ago on; its head stands last."""
    head = len(held)
    size = 0
    for access in range(len(keys)):
        key = keys[access]
        if held[key]:
            hits[access] = True
            after[before[key]] = after[key]
            before[after[key]] = before[key]
        else:
            if size == capacity:
                oldest = after[head]
                after[head] = after[oldest]
                before[after[oldest]] = head
                held[oldest] = False
            else:
                size += 1
            held[key] = True
        newest = before[head]
        after[newest] = key
        before[key] = newest
        after[key] = head
        before[head] = key


def _lfu_hits(hits: Any, keys: Any, capacity: int, before: Any, after: Any, counts: Any) -> None:
    """A ring for each count, from the row read longest ago on; its head is rows + count."""
    rows = len(counts)
    size = least = 0
    for access in range(len(keys)):
        key = keys[access]
        count = counts[key]
        if count:
            hits[access] = True
            after[before[key]] = after[key]
            before[after[key]] = before[key]
            if count == least and after[rows + count] == rows + count:
                least += 1
        else:
            if size == capacity:
                oldest = after[rows + least]
                after[rows + least] = after[oldest]
                before[after[oldest]] = rows + least
                counts[oldest] = 0
            else:
                size += 1
            least = 1
        counts[key] = count + 1
        head = rows + count + 1
        newest = before[head]
        after[newest] = key
        before[key] = newest
        after[key] = head
        before[head] = key
