"""`KeyMap`: gives the rows of a growing table to keys, and takes them back."""

from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from placer.errors import CheckpointError, PlanMismatchError
from placer.growing.hashes import compiled, digest_of, parts_of
from placer.growing.options import (
    MOST_CAPACITY,
    MOST_OPEN_STEPS,
    SKETCH_CELLS,
    SKETCH_ROWS,
    Growing,
    Int,
    KeyCounts,
)
from placer.growing.saved_state import fits, sketch_of

_READS = 256
"""A saved count of a row's reads holds two numbers: the remainder by this is the reads of the row,
and the quotient is the row's count in `KeyMap._late`."""
_FORGET_READS = 10
"""Counts of keys without a row are halved after this many lookups per row, as in TinyLFU
(Einziger, Friedman and Manes 2017, doi:10.1145/3149371)."""


class StepRows(NamedTuple):
    """Rows of a step's keys; reused rows, which had another key before; and their new keys."""

    rows: Int
    reused: Int
    new_keys: Int


class Resized(NamedTuple):
    """A map with another capacity; each row's earlier row, or −1; and how many keys it lost."""

    keys: "KeyMap"
    earlier: Int
    dropped: int


class KeyMap:
    """Gives the rows of one table to keys, in the order in which they are read.

    The same steps give the same rows. While there are free rows, and with `admission` 1, keys get
    rows 1, 2, … in the order of their first reads.

    Several maps can share a table. Each map reads only the keys of its part, and gives them the
    rows ``1 + part``, ``1 + part + parts``, … in this order.

    Raises BackendError if Numba is not installed. Raises PlanMismatchError if there are fewer rows
    than maps.

    Parameters
    ----------
    growing : Growing
        Options of the whole table.
    part, parts : int
        Number of this map, and number of maps; see `parts_of`.

    Examples
    --------
    >>> keys = KeyMap(Growing(capacity=2, eviction="lru"))
    >>> keys.read(np.array([900, -7, 900])).rows
    array([1, 2, 1])
    >>> keys.read(np.array([900])).rows
    array([1])
    >>> step = keys.read(np.array([55]))  # The key −7 was read longest ago.
    >>> step.rows, step.reused
    (array([2]), array([2]))
    >>> keys.find(np.array([55, -7]))
    array([2, 0])
    """

    STATE = "rows", "counts", "sketch"
    """Names of the arrays of `state`."""

    def __init__(self, growing: Growing, part: int = 0, parts: int = 1) -> None:
        if growing.capacity < parts:
            raise PlanMismatchError(
                f"capacity {growing.capacity} is less than the {parts} ranks that share the table; "
                "each has the keys of its own rows"
            )
        self.growing, self.part, self.parts = growing, part, parts
        self._allocate(np.arange(1 + part, growing.rows, parts))

    @property
    def _kernels(self) -> Any:
        return compiled()  # Not an attribute, as a module cannot be deep-copied.

    def _allocate(self, numbers: Int) -> None:
        """Make the map empty, with rows of these numbers, which it gives to keys in this order."""
        self._own = replace(self.growing, capacity=numbers.size)
        is_whole = np.array_equal(numbers, np.arange(1, self.growing.rows))
        self._numbers = None if is_whole else np.append(0, numbers).astype(np.int32)
        self._slots = np.zeros(self._own.slot_count, np.uint32)
        self._rows = np.zeros(self._own.rows, self._kernels.RECORD)
        self._state = np.zeros(self._kernels.PLACES, np.int64)
        blocks = self.growing.sketch_blocks(self.part, self.parts)
        self._sketch = np.zeros((len(blocks), SKETCH_ROWS, SKETCH_CELLS), np.uint8)
        # Keys without a row in each of the last steps, which may be repeated.
        self._without: deque[Int] = deque(maxlen=MOST_OPEN_STEPS)
        # `digest_of` each of the last steps; the same for steps that are expected to be repeated.
        self._last: deque[int] = deque(maxlen=MOST_OPEN_STEPS)
        self._coming: deque[int] = deque(maxlen=MOST_OPEN_STEPS)
        # For each lookup to repeat that found no row: the row that its key got afterwards.
        self._late = np.empty(0, np.int64)
        self._log = np.zeros(1, np.int64)  # Too small to log changes: nobody asked for them.

    @property
    def known_steps(self) -> int:
        """Number of next steps that repeat earlier ones: they find keys and change nothing."""
        return len(self._coming)

    def _numbered(self, rows: Int) -> Int:
        """Return the table's rows from numbers of this map's rows."""
        return rows if self._numbers is None else self._numbers[rows].astype(np.int64)

    def read(self, keys: Int, open_steps: int = 1, digest: int | None = None) -> StepRows:
        """Make one step: find the row of each key, and give rows to new ones.

        Parameters
        ----------
        keys : int64, shape (lookups,)
        open_steps : int
            Number of earlier steps that are still open: their rows keep their keys.
        digest : int, optional
            `digest_of` the keys of all maps; by default, of these keys.
        """
        digest = digest_of(keys) if digest is None else digest
        if self._coming and self._coming[0] != digest:
            self.forget()  # The batches differ: no step is repeated.
        if self._coming:
            self._last.append(self._coming.popleft())
            return StepRows(self._find_again(keys), keys[:0], keys[:0])
        open_since = self._begin_step(keys.size, open_steps, self._own.ttl, digest)
        rows, reused, _ = self._read(np.ascontiguousarray(keys), open_since)
        self._without.append(keys[rows == 0])
        new_keys = self._rows["key"][reused]
        return StepRows(self._numbered(rows), self._numbered(reused), new_keys)

    def _begin_step(self, lookups: int, open_steps: int, ttl: int, digest: int) -> int:
        """Begin a step, and return the first open step, from which on rows keep their keys."""
        open_since = int(self._state[self._kernels.STEP]) + 1 - open_steps
        while len(self._without) > open_steps:  # Only open steps may be repeated.
            self._without.popleft()
        self._last.append(digest)
        maps = self._slots, self._rows, self._state, self._sketch, self._log
        forget_reads = _FORGET_READS * self._own.capacity
        self._kernels.begin_step(
            lookups, *maps, self._own.admission, ttl, forget_reads, open_since
        )  # fmt: skip
        return open_since

    def _read(
        self, keys: Int, open_since: int, hand: int = 0, limit: int = MOST_CAPACITY
    ) -> tuple[Int, Int, int]:
        """Read keys up to the first that needs a row beyond `limit`; see `kernels.read`."""
        growing, rows, reused = self._own, np.empty_like(keys), np.empty_like(keys)
        maps = self._slots, self._rows, self._state, self._sketch, self._log
        is_lfu, whole = growing.eviction == "lfu", self.growing
        blocks = whole.sketch_blocks(self.part, self.parts).start, len(whole.sketch_blocks())
        count, done = self._kernels.read(
            keys, rows, reused, *maps, *blocks,
            growing.capacity, growing.admission, is_lfu, open_since, hand, limit,
        )  # fmt: skip
        return rows[:done], reused[:count], done

    def find(self, keys: Int) -> Int:
        """Return the row of each key, 0 if it has none, without counting lookups."""
        return self._numbered(self._find(keys))

    def _find(self, keys: Int) -> Int:
        rows = np.empty(keys.size, np.int64)
        self._kernels.find(np.ascontiguousarray(keys), rows, self._slots, self._rows)
        return rows

    def _find_again(self, keys: Int) -> Int:
        """Return the rows that `read` gave to the keys of a step that is repeated."""
        rows, late = self._find(keys), np.bincount(self._late, minlength=len(self._rows))
        (places,) = (late[rows] > 0).nonzero()
        places = places[rows[places].argsort(kind="stable")]
        starts, sizes = np.unique(rows[places], return_index=True, return_counts=True)[1:]
        places = places[np.arange(places.size) - starts.repeat(sizes) < late[rows[places]]]
        late -= np.bincount(rows[places], minlength=late.size)
        self._late, rows[places] = np.arange(late.size).repeat(late), 0
        self._without.append(keys[rows == 0])
        return self._numbered(rows)

    def give_up(self, steps: int) -> None:
        """Expect the last `steps` steps to be repeated: then their keys are only found.

        If a step has other keys, it and all later steps are new.
        """
        self._late = self._late_with(steps)
        self._coming = deque(self._coming_with(steps), MOST_OPEN_STEPS)

    def forget(self) -> None:
        """Treat the next steps as new, instead of as repeated steps of the saved run."""
        self._late = self._late[:0]
        self._coming.clear()

    def _coming_with(self, steps: int) -> list[int]:
        """Return `_coming` with the last `steps` steps, to be repeated, before it."""
        last = list(self._last)[max(0, len(self._last) - steps) :]
        return [*last, *self._coming][:MOST_OPEN_STEPS]

    def _late_with(self, steps: int) -> Int:
        """Return `_late` with the lookups of the last `steps` steps, to be repeated, added."""
        last = list(self._without)[max(0, len(self._without) - steps) :]
        rows = self._find(np.concatenate([np.empty(0, np.int64), *last]))
        return np.concatenate((self._late, rows[rows > 0]))

    @classmethod
    def of(cls, growing: Growing, keys: Int, rows: Int) -> "KeyMap":
        """Make a map that finds these keys in these rows, and gives no rows to other keys.

        >>> found = KeyMap.of(Growing(capacity=9), keys=np.array([-5, 8]), rows=np.array([4, 2]))
        >>> found.find(np.array([8, 7, -5]))
        array([2, 0, 4])
        """
        made = cls(growing)
        made._rows["step"] = -1
        made._state[made._kernels.USED] = growing.capacity
        made.check(keys, rows)
        made.assign(keys, rows)
        return made

    def resized(self, growing: Growing) -> Resized:
        """Return a map of another capacity for a whole table, with all or the hottest keys.

        A larger map keeps all keys and rows, and behaves like this map until this one is full. A
        smaller map keeps the keys that eviction would take last. Keys keep their rows if the new
        table has these rows.

        >>> keys = KeyMap(Growing(3))
        >>> for read in ([7, 8, 9], [9, 8]):
        ...     _ = keys.read(np.array(read))
        >>> smaller, earlier, dropped = keys.resized(Growing(2))
        >>> smaller.find(np.array([7, 8, 9])), earlier, dropped
        (array([0, 2, 1]), array([0, 3, 2]), 1)
        """
        made, kernels = KeyMap(growing), self._kernels
        is_smaller = growing.capacity < self._own.capacity
        kept = 1 + np.arange(self._state[kernels.USED])
        live = kept[self._rows["step"][kept] >= 0]
        if is_smaller:
            step, reads = self._rows["step"][live], self._rows["reads"][live]
            # Repeated steps need their keys: keep them first.
            is_ahead = step > self._state[kernels.STEP] - self.known_steps
            order = np.lexsort((step, reads * (growing.eviction == "lfu"), is_ahead))
            kept = np.sort(live[order[max(0, live.size - growing.capacity) :]])
        before, dropped = self._numbered(kept), max(0, live.size - growing.capacity)
        rows, is_beyond = before.copy(), before > growing.capacity
        unused = np.setdiff1d(np.arange(1, growing.rows), before)
        rows[is_beyond], unused = np.split(unused, [np.count_nonzero(is_beyond)])
        made._allocate(np.append(rows, unused))
        made._rows[1 : kept.size + 1] = self._rows[kept]
        made._late = 1 + np.searchsorted(kept, self._late[np.isin(self._late, kept)])
        made._state[:] = self._state
        made._coming.extend(self._coming)
        made._state[kernels.SKETCH] = 0
        if is_smaller:
            made._state[[kernels.FREE, kernels.HAND, kernels.SWEEP]] = 0
        made._state[kernels.USED] = kept.size
        made._state[kernels.EVICTED] += dropped
        made._sketch = sketch_of(self._sketch, self.growing, 1, growing, 0, 1)
        kernels.fill_slots(made._slots, made._rows, kept.size, made._log)
        earlier = np.arange(growing.rows)
        earlier[1 if is_smaller else self.growing.rows :] = -1
        earlier[rows] = before
        return Resized(made, earlier, dropped)

    def assign(self, keys: Int, rows: Int) -> None:
        """Give each key its row, taken from any other key; row 0 is none. Call `check` first."""
        self._kernels.assign(keys, rows, self._slots, self._rows, self._state, self._log)

    def check(self, keys: Int, rows: Int) -> None:
        """Raise CheckpointError if a key or row is listed twice, or a row does not exist."""
        given = np.sort(rows[rows != 0])
        is_row = given.size == 0 or (given[0] > 0 and given[-1] < self.growing.rows)
        twice = np.unique(keys).size < keys.size or not np.diff(given).all()
        if keys.dtype != np.int64 or keys.shape != rows.shape or twice or not is_row:
            raise CheckpointError(
                f"keys of a table with capacity {self.growing.capacity:,} are damaged: a key or a "
                "row is there twice, or there is no such row"
            )

    @property
    def counts(self) -> KeyCounts:
        """Return the counters since the beginning."""
        first = self._kernels.HITS
        return KeyCounts(*(int(value) for value in self._state[first:]))

    def live(self) -> tuple[Int, Int]:
        """Return all keys that have rows, and their rows: int64, shape (keys,) each."""
        used = int(self._state[self._kernels.USED])
        rows = 1 + np.flatnonzero(self._rows["step"][1 : used + 1] >= 0)
        return self._rows["key"][rows], self._numbered(rows)

    def state(self, ahead: int = 0) -> dict[str, Int]:
        """Return the state to save, on which the next steps depend: int64 arrays by `STATE`.

        `load_state` takes the concatenated arrays of all maps of a table. Their shapes do not
        depend on the keys, so `torch.distributed.checkpoint` can read into them. The last `ahead`
        steps are ahead of the training and will be repeated: then their keys are only found.
        """
        used = int(self._state[self._kernels.USED])
        rows = np.zeros((self._own.capacity, 3), np.int64)  # Zero for rows that never had a key.
        rows[:used, :2] = self._rows[1 : used + 1].view(np.int64).reshape(used, 2)
        np.add.at(rows[:, 1], self._late_with(ahead) - 1, _READS << 32)
        rows[:used, 2] = self._numbered(np.arange(1, used + 1))
        coming = self._coming_with(ahead)
        counts = np.pad([*self._state, len(coming), *coming], (0, MOST_OPEN_STEPS - len(coming)))
        sketch = self._sketch.reshape(-1, SKETCH_ROWS * SKETCH_CELLS).copy()
        values = rows, counts[None], sketch.view(np.int64)
        return dict(zip(self.STATE, values, strict=True))

    def load_state(self, state: dict[str, Int]) -> None:
        """Load the saved state of all maps of the table.

        Every key has its row again, for any number of maps. With the same number of maps, steps
        continue exactly. Otherwise eviction starts again from the first row, and the first map has
        the counters of all maps.

        Raises CheckpointError if the state is of a table with another capacity or admission, or
        damaged; or if a map would have no row.
        """
        kernels = self._kernels
        rows, counts, sketch = (np.ascontiguousarray(state[name], np.int64) for name in self.STATE)
        size, how = len(rows), self.growing
        if rows.ndim == 2 and rows.shape[1] == 3:
            rows = rows[rows[:, 2] != 0]
        if size not in (len(rows), how.capacity) or not fits(rows, counts, sketch, how, kernels):
            raise CheckpointError(
                f"saved keys are not of a table with capacity {how.capacity:,} and "
                f"admission {how.admission}, or are damaged"
            )
        records, numbers = rows[:, :2].copy().view(kernels.RECORD)[:, 0], rows[:, 2]
        is_same = len(counts) == self.parts
        if is_same:
            parts = np.arange(self.parts).repeat(counts[:, kernels.USED])
        else:
            live = records["step"] >= 0
            parts = np.where(live, parts_of(records["key"], self.parts), (numbers - 1) % self.parts)
        unused = np.ones(self.growing.rows, bool)
        unused[0] = unused[numbers] = False
        (free,) = unused.nonzero()
        sizes = np.bincount(np.append(parts, (free - 1) % self.parts), minlength=self.parts)
        if sizes.min() == 0:
            raise CheckpointError(
                f"capacity {self.growing.capacity:,} leaves no row for the keys of rank "
                f"{sizes.argmin()} of {self.parts}; take fewer ranks, or a larger capacity"
            )
        (own,) = (parts == self.part).nonzero()
        if not is_same:
            own = own[numbers[own].argsort()]
        self._allocate(np.append(numbers[own], free[(free - 1) % self.parts == self.part]))
        self._rows[1 : own.size + 1] = records[own]
        self._late = np.arange(len(self._rows)).repeat(self._rows["reads"] // _READS)
        known = counts[0, kernels.PLACES]
        self._coming.extend(counts[0, kernels.PLACES + 1 :][:known].tolist())
        self._rows["reads"] %= _READS
        cells = sketch.view(np.uint8).reshape(-1, SKETCH_ROWS, SKETCH_CELLS)
        self._sketch = sketch_of(cells, how, len(counts), how, self.part, self.parts)
        if is_same:
            self._state[:] = counts[self.part, : kernels.PLACES]
        else:
            self._go_on(counts, own.size)
        kernels.fill_slots(self._slots, self._rows, own.size, self._log)

    def _go_on(self, counts: Int, used: int) -> None:
        """Set the counters of a map with rows of several saved maps, and chain its free rows."""
        kernels = self._kernels
        self._state[kernels.STEP] = counts[:, kernels.STEP].max()
        self._state[kernels.USED] = used
        chain = np.append(1 + np.flatnonzero(self._rows["step"][1 : used + 1] < 0), 0)
        self._rows["key"][chain[:-1]] = chain[1:]
        self._state[kernels.FREE] = chain[0]
        if self.part == 0:
            self._state[kernels.HITS :] = counts[:, kernels.HITS : kernels.PLACES].sum(0)


def load_table(keys: KeyMap, table: str, state: dict[str, Int]) -> None:
    """Load the saved state of all maps of a table; an error names the table."""
    try:
        keys.load_state(state)
    except CheckpointError as error:
        raise CheckpointError(f"table {table!r}: {error}") from error
