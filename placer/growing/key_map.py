"""Which row of a table has which key, while keys come and go."""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from placer.errors import BackendError, CheckpointError, PlanMismatchError
from placer.growing.key_counts import KeyCounts
from placer.growing.saved_state import fits

Int = npt.NDArray[np.int64]
Eviction = Literal["lfu", "lru"]

MOST_ADMISSION = 255
_MOST_CAPACITY = 2**31 - 64
"""Row numbers have 32 bits."""

_SLOTS_PER_KEY = 1.5
_FORGET_READS = 10
"""Reads of keys without a row are halved after ten times as many lookups as there are rows, as in
TinyLFU (Einziger, Friedman and Manes 2017, doi:10.1145/3149371)."""


@dataclass(frozen=True, slots=True)
class Growing:
    """How a table gives its rows to keys.

    Attributes
    ----------
    capacity : int
        Keys that have rows at a time. The table has one row more: row 0 is read by all other keys.
    admission : int
        A key gets a row when it is read for the n-th time, 1 to 255.
    eviction : {"lfu", "lru"}
        Which of 16 keys loses its row when there is no free one: the one that the fewest steps
        have read, of late, and of these the one that was read longest ago; or that alone. The next
        16 are those of the rows that follow.
    ttl : int
        Steps after which a key that was not read loses its row; 0: never.

    Raises
    ------
    PlanMismatchError
        If a value is out of range.

    Examples
    --------
    >>> Growing(capacity=1000, admission=2).nbytes
    26048
    """

    capacity: int
    admission: int = 1
    eviction: Eviction = "lfu"
    ttl: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("capacity", 1, _MOST_CAPACITY),
            ("admission", 1, MOST_ADMISSION),
            ("ttl", 0, 2**31 - 1),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise PlanMismatchError(f"{name} {value} is not within {least} to {most:,}")
        if self.eviction not in get_args(Eviction):
            raise PlanMismatchError(
                f"eviction {self.eviction!r} is none of {', '.join(get_args(Eviction))}"
            )

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.capacity + 1

    @property
    def slot_count(self) -> int:
        """Slots of the hash table."""
        return int(self.capacity * _SLOTS_PER_KEY) + 8

    @property
    def nbytes(self) -> int:
        """Bytes of the key map in host memory."""
        return 4 * self.slot_count + 16 * self.rows + 4 * self.capacity * (self.admission > 1)


class StepRows(NamedTuple):
    """Rows of a step's keys; those among them that had another key before, and their keys now."""

    rows: Int
    reused: Int
    new_keys: Int


def parts_of(keys: Int, parts: int) -> Int:
    """Return which of so many key maps has each key: the same in every process, by a hash.

    Examples
    --------
    >>> parts_of(np.array([8, 16, 24, -1]), 4)
    array([2, 3, 3, 1])
    """
    found = np.empty(keys.size, np.int64)
    _kernels().parts_of(np.ascontiguousarray(keys), found, parts)
    return found


class KeyMap:
    """Gives the rows of one table to keys, in the order in which they are read.

    Deterministic: the same steps give the same rows. As long as there are free rows, and with
    `admission` 1, keys have rows 1, 2, … in the order of their first reading.

    Several maps can share a table. Each is read with the keys of its part alone, and gives them the
    rows ``1 + part``, ``1 + part + parts``, … in this order.

    Parameters
    ----------
    growing : Growing
        Of the whole table.
    part, parts : int
        Which of so many maps it is; see `parts_of`.

    Attributes
    ----------
    known_steps : int
        So many of the next steps are made already, and their keys only found.

    Raises
    ------
    BackendError
        If Numba is not installed.
    PlanMismatchError
        If there are fewer rows than maps.

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
    """The names of `state`."""

    def __init__(self, growing: Growing, part: int = 0, parts: int = 1) -> None:
        if growing.capacity < parts:
            raise PlanMismatchError(
                f"capacity {growing.capacity} is less than the {parts} ranks that share the table; "
                "each has the keys of its own rows"
            )
        self.growing, self.part, self.parts, self.known_steps = growing, part, parts, 0
        self._kernels = _kernels()
        self._allocate(np.arange(1 + part, growing.rows, parts))

    def _allocate(self, numbers: Int) -> None:
        """Make an empty map with the rows of these numbers, in the order in which it gives them."""
        self._own = replace(self.growing, capacity=numbers.size)
        is_whole = np.array_equal(numbers, np.arange(1, self.growing.rows))
        self._numbers = None if is_whole else np.append(0, numbers).astype(np.int32)
        self._slots = np.zeros(self._own.slot_count, np.uint32)
        self._rows = np.zeros(self._own.rows, self._kernels.RECORD)
        self._state = np.zeros(self._kernels.PLACES, np.int64)
        self._sketch = np.zeros(self._sketch_shape(self.parts), np.uint8)
        self._log = np.zeros(1, np.int64)  # Has no room for what nobody asks.

    def _sketch_shape(self, parts: int) -> tuple[int, int]:
        """Return the shape of the sketch of each of so many maps."""
        growing = self.growing
        width = -(-growing.capacity // parts) if growing.admission > 1 else 1
        return self._kernels.SKETCH_ROWS, width

    def _fits(self, rows: Int, counts: Int, sketch: Int) -> bool:
        shape = self._sketch_shape(len(counts) or 1)
        return fits(rows, counts, sketch, self.growing.capacity, shape, self._kernels)

    def _numbered(self, rows: Int) -> Int:
        """Return rows of the table, from those of this map."""
        return rows if self._numbers is None else self._numbers[rows].astype(np.int64)

    def read(self, keys: Int, open_steps: int = 1) -> StepRows:
        """Make one step: find the row of each key, and give rows to new ones.

        Parameters
        ----------
        keys : int64, shape (lookups,)
        open_steps : int
            How many steps before this one are still open; their rows keep their keys.
        """
        if self.known_steps:
            self.known_steps -= 1
            return StepRows(self._find_again(keys), keys[:0], keys[:0])
        open_since = self._begin_step(keys.size, open_steps, self._own.ttl)
        rows, reused, _ = self._read(np.ascontiguousarray(keys), open_since)
        new_keys = self._rows["key"][reused]
        return StepRows(self._numbered(rows), self._numbered(reused), new_keys)

    def _begin_step(self, lookups: int, open_steps: int, ttl: int) -> int:
        """Begin a step, and return the first one whose rows keep their keys."""
        open_since = int(self._state[self._kernels.STEP]) + 1 - open_steps
        maps = self._slots, self._rows, self._state, self._sketch, self._log
        forget_reads = _FORGET_READS * self._own.capacity
        self._kernels.begin_step(
            lookups, *maps, self._own.admission, ttl, forget_reads, open_since
        )  # fmt: skip
        return open_since

    def _read(
        self, keys: Int, open_since: int, hand: int = 0, limit: int = _MOST_CAPACITY
    ) -> tuple[Int, Int, int]:
        """Read keys up to one that needs a row beyond the limit: rows, those reused, how many."""
        growing, rows, reused = self._own, np.empty_like(keys), np.empty_like(keys)
        maps = self._slots, self._rows, self._state, self._sketch, self._log
        is_lfu = growing.eviction == "lfu"
        count, done = self._kernels.read(
            keys, rows, reused, *maps,
            growing.capacity, growing.admission, is_lfu, open_since, hand, limit,
        )  # fmt: skip
        return rows[:done], reused[:count], done

    def find(self, keys: Int) -> Int:
        """Find the row of each key, 0 where it has none; nothing is counted."""
        rows = np.empty(keys.size, np.int64)
        self._kernels.find(np.ascontiguousarray(keys), rows, self._slots, self._rows)
        return self._numbered(rows)

    def _find_again(self, keys: Int) -> Int:
        """Find what `read` gave to keys of a step, where at most one more has been made since."""
        own = np.empty(keys.size, np.int64)
        self._kernels.find(np.ascontiguousarray(keys), own, self._slots, self._rows)
        records = self._rows[own]
        # A key that no row was left for may have got one in the step behind.
        is_later = records["step"] > self._state[self._kernels.STEP] - self.known_steps
        own[is_later & (records["reads"] == 0)] = 0
        return self._numbered(own)

    @classmethod
    def of(cls, growing: Growing, keys: Int, rows: Int) -> "KeyMap":
        """Make a map that finds these keys in these rows; it gives no rows to others.

        Examples
        --------
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

    def assign(self, keys: Int, rows: Int) -> None:
        """Give each key its row, once `check` allows it, whoever had that before; row 0 is none."""
        self._kernels.assign(keys, rows, self._slots, self._rows, self._state, self._log)

    def check(self, keys: Int, rows: Int) -> None:
        """Raise CheckpointError if a key or a row is listed twice, or there is no such row."""
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
        """Return all keys that have rows, and these rows: int64, shape (keys,) each."""
        used = int(self._state[self._kernels.USED])
        rows = 1 + np.flatnonzero(self._rows["step"][1 : used + 1] >= 0)
        return self._rows["key"][rows], self._numbered(rows)

    def state(self, ahead: int = 0) -> dict[str, Int]:
        """Return all that the next steps depend on, to be saved: int64 arrays by `STATE`.

        Those of all maps of a table, one after the other, are what `load_state` takes. Their shapes
        do not depend on the keys, so that `torch.distributed.checkpoint` reads into them. So many
        of the last steps are `ahead` of the training, and come again: then their keys are found.

        Raises
        ------
        CheckpointError
            If there are such and some lookups of a key may have come before it was admitted.
        """
        ahead += self.known_steps
        if ahead and self.growing.admission > 1:
            raise CheckpointError(
                f"reads of {ahead} steps that are not trained are counted for admission already; "
                "save when the loop over look_ahead has ended, or train without it"
            )
        used = int(self._state[self._kernels.USED])
        rows = np.zeros((self._own.capacity, 3), np.int64)  # Zeros for rows that had no key yet.
        rows[:used, :2] = self._rows[1 : used + 1].view(np.int64).reshape(used, 2)
        rows[:used, 2] = self._numbered(np.arange(1, used + 1))
        sketch = np.pad(self._sketch.reshape(-1), (0, -self._sketch.size % 8))
        counts = np.append(self._state, ahead)
        values = rows, counts[None], sketch.view(np.int64)[None]
        return dict(zip(self.STATE, values, strict=True))

    def load_state(self, state: dict[str, Int]) -> None:
        """Go on where the maps of the same table were.

        Every key has its row again, whatever the number of maps. With as many maps as there were,
        all goes on as it would have; otherwise eviction goes around from the beginning, keys that
        wait for a row are counted again, and the first map has the counters of all.

        Raises
        ------
        CheckpointError
            If it is of a table with another capacity or admission, or damaged; or if some map
            would have no row.
        """
        kernels = self._kernels
        rows, counts, sketch = (np.ascontiguousarray(state[name], np.int64) for name in self.STATE)
        size, width, known_steps = len(rows), kernels.PLACES, 0
        if counts.ndim == 2 and counts.shape[1] == width + 1:  # Else an earlier version's.
            known_steps, counts = int(counts[:, width].max(initial=0)), counts[:, :width]
        if rows.ndim == 2 and rows.shape[1] == 3:
            rows = rows[rows[:, 2] != 0]
        if size not in (len(rows), self.growing.capacity) or not self._fits(rows, counts, sketch):
            raise CheckpointError(
                f"saved keys are not of a table with capacity {self.growing.capacity:,} and "
                f"admission {self.growing.admission}, or are damaged"
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
                f"{sizes.argmin()} of {self.parts}; take fewer ranks"
            )
        self.known_steps = known_steps
        (own,) = (parts == self.part).nonzero()
        if not is_same:
            own = own[numbers[own].argsort()]
        self._allocate(np.append(numbers[own], free[(free - 1) % self.parts == self.part]))
        self._rows[1 : own.size + 1] = records[own]
        if is_same:
            self._state[:] = counts[self.part]
            flat = sketch[self.part].view(np.uint8)[: self._sketch.size]
            self._sketch[:] = flat.reshape(self._sketch.shape)
        else:
            self._go_on(counts, own.size)
        kernels.fill_slots(self._slots, self._rows, own.size, self._log)

    def _go_on(self, counts: Int, used: int) -> None:
        """Set the counters of a map that has rows of several, and chain its free rows."""
        kernels = self._kernels
        self._state[kernels.STEP] = counts[:, kernels.STEP].max()
        self._state[kernels.USED] = used
        chain = np.append(1 + np.flatnonzero(self._rows["step"][1 : used + 1] < 0), 0)
        self._rows["key"][chain[:-1]] = chain[1:]
        self._state[kernels.FREE] = chain[0]
        if self.part == 0:
            self._state[kernels.HITS :] = counts[:, kernels.HITS :].sum(0)


def _kernels() -> Any:
    try:
        from placer.growing import kernels
    except ImportError as error:
        raise BackendError(
            "tables that grow need Numba: pip install 'embedding-placer[cpu]'"
        ) from error
    return kernels
