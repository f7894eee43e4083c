"""Caches to compare with the executor's: LRU, and the set-associative cache of FBGEMM.

Each is a `BatchCache` and takes a training step at a time, as embedding
caches work: a row hits if it was there before the step, however often the step reads it, and
stays until the step is over. Every tie has a rule, so that a trace always gives the same hits.
"""

from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from placer.errors import DataError, PlanError

Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

WAYS = 32
"""Rows of a set of FBGEMM's cache: the threads of a warp, which look at a set together."""

_EMPTY = -1


class BatchCache(Protocol):
    """A cache of rows that takes a batch at a time.

    Attributes
    ----------
    capacity, held : int
        Rows that it has room for, and those that it holds.
    """

    capacity: int
    held: int

    def step(self, rows: Int, counts: Int) -> Bool:
        """Return which rows were there before this batch's rows enter.

        `rows` are distinct and ascending, from 0 on; `counts` are the lookups of each.
        """
        ...

    def holds(self, rows: Int) -> Bool:
        """Return which rows are there now."""
        ...


class LruBatchCache:
    """LRU by step: evicts the row whose last step is longest ago.

    Rows are let in in the order in which the step names them, as long as there is a row that
    the step does not read itself. Of the rows of one step, those that it named last make room
    first: where rows are ranks, the coldest.

    Parameters
    ----------
    capacity : int
        Rows that it holds.
    rows : int
        Rows that there are; they are numbered from 0.

    Attributes
    ----------
    held, admitted : int
        Rows that it holds, and those that the last step let in.

    Raises
    ------
    PlanError
        If it has no room for a row.
    """

    def __init__(self, capacity: int, rows: int) -> None:
        _require_room(capacity)
        self.capacity = capacity
        self.held = self.admitted = 0
        self._step = 0
        # 4 bytes a row; which rows are held, and the step that read each last.
        self._last_step = np.full(rows, _EMPTY, dtype=np.int32)
        # The rows of past steps, oldest first. Those that were read again since are stale, and
        # are passed over when the log is read: so a step costs what it reads, not what is held.
        self._log: deque[tuple[int, Int]] = deque()
        self._logged = 0

    def step(self, rows: Int, counts: Int) -> Bool:
        """See `BatchCache`; `counts` are ignored."""
        _require_rows(rows, self._last_step.size)
        hit: Bool = self._last_step[rows] != _EMPTY
        self._last_step[rows[hit]] = self._step
        missing = np.flatnonzero(~hit)
        room = self.capacity - self.held
        others = self.held - (rows.size - missing.size)
        evicted = min(max(0, missing.size - room), others)
        self._evict(evicted)
        admitted = missing[: room + evicted]
        self._last_step[rows[admitted]] = self._step
        self.admitted = admitted.size
        self.held += admitted.size - evicted
        self._remember(rows[self._last_step[rows] == self._step])
        self._step += 1
        return hit

    def holds(self, rows: Int) -> Bool:
        """See `BatchCache`."""
        held: Bool = self._last_step[rows] != _EMPTY
        return held

    def _evict(self, number: int) -> None:
        """Evict the rows of the oldest steps."""
        while number:
            step, logged = self._log.popleft()
            self._logged -= logged.size
            held = logged[self._last_step[logged] == step]
            kept = max(0, held.size - number)
            self._last_step[held[kept:]] = _EMPTY
            number -= held.size - kept
            if kept:
                self._log.appendleft((step, held[:kept]))
                self._logged += kept

    def _remember(self, rows: Int) -> None:
        """Log a step's rows; drop what is stale once that is most of the log."""
        self._log.append((self._step, rows))
        self._logged += rows.size
        if self._logged > 2 * self.capacity + rows.size:
            fresh = ((step, old[self._last_step[old] == step]) for step, old in self._log)
            self._log = deque((step, old) for step, old in fresh if old.size)
            self._logged = sum(old.size for _, old in self._log)


class SetAssociativeCache:
    """FBGEMM's cache of rows in host memory, which TorchRec's ``fused_uvm_caching`` uses.

    A row belongs to one set of `WAYS` rows, by a hash of its number. A step first looks all its
    rows up; then those that miss enter, set by set. Under ``lru`` a row takes the place of the
    one whose last step is longest ago, unless that is this step; the smallest row number enters
    first. Under ``lfu`` rows are counted for ever, whether held or not: the row of the highest
    count enters first, and only in place of one that has no higher count. What finds no place
    is read from host memory.

    Parameters
    ----------
    sets : int
        See `cache_sets`.
    rows : int
        Rows that there are, of all tables of the group that share the cache, one after the
        other.
    policy : {"lru", "lfu"}

    Attributes
    ----------
    held, admitted : int
        Rows that it holds, and those that the last step let in.

    Raises
    ------
    PlanError
        If it has no set.

    Notes
    -----
    The hash is the 64-bit finalizer of MurmurHash3, modulo the sets. Where two places are as
    old, or their rows as rarely read, the first of the set is taken; FBGEMM leaves that to its
    sorting network. Facts as of FBGEMM 1.8.0 on NVIDIA GPUs.
    """

    def __init__(self, sets: int, rows: int, policy: Literal["lru", "lfu"] = "lru") -> None:
        _require_room(sets)
        self.policy = policy
        self.capacity = sets * WAYS
        self.held = self.admitted = 0
        self._all_rows = rows
        self._rows = np.full((sets, WAYS), _EMPTY, dtype=np.int64)
        # What decides eviction: of a place, its last step; of a row, its lookups.
        self._last_step = np.full((sets, WAYS) if policy == "lru" else 0, -1, dtype=np.int32)
        self._lookups = np.zeros(rows if policy == "lfu" else 0, dtype=np.int64)
        self._step = 0

    def step(self, rows: Int, counts: Int) -> Bool:
        """See `BatchCache`."""
        _require_rows(rows, self._all_rows)
        sets = set_of(rows, self._rows.shape[0])
        matches = self._rows[sets] == rows[:, None]
        hit: Bool = matches.any(axis=1)
        if self.policy == "lru":
            self._last_step[sets[hit], matches[hit].argmax(axis=1)] = self._step
        else:
            self._lookups[rows] += counts
        self._admit(rows[~hit], sets[~hit])
        self._step += 1
        return hit

    def holds(self, rows: Int) -> Bool:
        """See `BatchCache`."""
        held: Bool = (self._rows[set_of(rows, self._rows.shape[0])] == rows[:, None]).any(axis=1)
        return held

    def _admit(self, rows: Int, sets: Int) -> None:
        """Admit rows that are not held, as far as their sets can evict others."""
        self.admitted = 0
        if not rows.size:
            return
        value = self._lookups[rows] if self.policy == "lfu" else np.zeros_like(rows)
        order = np.lexsort((rows, -value, sets))
        rows, sets, value = rows[order], sets[order], value[order]
        own, segment, sizes = np.unique(sets, return_inverse=True, return_counts=True)
        turn = np.arange(rows.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        held = self._rows[own]
        if self.policy == "lru":
            worth = self._last_step[own].astype(np.int64)
        else:
            worth = np.where(held == _EMPTY, -1, self._lookups[held])
        places = np.argsort(worth, axis=1, kind="stable")
        # The n-th row of a set can only take the n-th place, and a set has no more than it has.
        able = turn < WAYS
        rows, sets, value, turn, segment = (x[able] for x in (rows, sets, value, turn, segment))
        place = places[segment, turn]
        replaced = worth[segment, place]
        enters = replaced < self._step if self.policy == "lru" else replaced <= value
        sets, place = sets[enters], place[enters]
        self.admitted = int(np.count_nonzero(enters))
        self.held += int(np.count_nonzero(self._rows[sets, place] == _EMPTY))
        self._rows[sets, place] = rows[enters]
        if self.policy == "lru":
            self._last_step[sets, place] = self._step


def cache_sets(rows: int, load_factor: float) -> int:
    """Sets that TorchRec's caches of `rows` rows in all have at a load factor: at least one."""
    return max(1, -(-int(rows * load_factor) // WAYS))


def set_of(rows: Int, sets: int) -> Int:
    """The set of each row, int64 of the same shape."""
    mixed = rows.astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(33)
    return (mixed % np.uint64(sets)).astype(np.int64)


FACTORIES: dict[str, Callable[[int, int], BatchCache]] = {
    "lru": LruBatchCache,
    "fbgemm-lru": lambda capacity, rows: SetAssociativeCache(-(-capacity // WAYS), rows, "lru"),
    "fbgemm-lfu": lambda capacity, rows: SetAssociativeCache(-(-capacity // WAYS), rows, "lfu"),
}
"""By name, each made from the rows that it holds and the rows that there are.

FBGEMM's hold whole sets: up to `WAYS` − 1 rows more.
"""


def _require_room(capacity: int) -> None:
    if capacity < 1:
        raise PlanError(f"a cache of {capacity} rows holds nothing; give it at least one")


def _require_rows(rows: Int, limit: int) -> None:
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < limit:
        raise DataError(
            f"rows {int(rows.min())}..{int(rows.max())} of a cache over {limit} rows; number "
            "them from 0 on, or give the cache more"
        )
