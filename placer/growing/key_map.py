"""Which row of a table has which key, while keys come and go."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from placer.errors import BackendError, CheckpointError, PlanMismatchError

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


class KeyCounts(NamedTuple):
    """Counters since the beginning, of lookups or of rows.

    Attributes
    ----------
    hits, misses : int
        Lookups whose key had a row, and all others.
    waiting, refused : int
        Misses that row 0 served: keys that were not read often enough yet, and those for which no
        row could be taken back, as open steps read all of them.
    admitted, evicted, expired : int
        Rows given to a key, and taken back for another one or after `Growing.ttl`.
    """

    hits: int
    misses: int
    waiting: int
    refused: int
    admitted: int
    evicted: int
    expired: int

    @property
    def hit_rate(self) -> float:
        """Share of lookups whose key had a row; 0 without lookups."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def live(self) -> int:
        """Keys that have rows now."""
        return self.admitted - self.evicted - self.expired


class StepRows(NamedTuple):
    """Rows of a step's keys, and those among them that had another key before."""

    rows: Int
    reused: Int


class KeyMap:
    """Gives the rows of one table to keys, in the order in which they are read.

    Deterministic: the same steps give the same rows. As long as there are free rows, and with
    `admission` 1, keys have rows 1, 2, … in the order of their first reading.

    Parameters
    ----------
    growing : Growing

    Raises
    ------
    BackendError
        If Numba is not installed.

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

    def __init__(self, growing: Growing) -> None:
        self.growing = growing
        kernels = self._kernels
        self._slots = np.zeros(growing.slot_count, np.int32)
        self._rows = np.zeros(growing.rows, kernels.RECORD)
        self._state = np.zeros(kernels.PLACES, np.int64)
        width = growing.capacity if growing.admission > 1 else 1
        self._sketch = np.zeros((kernels.SKETCH_ROWS, width), np.uint8)

    @cached_property
    def _kernels(self) -> Any:
        try:
            from placer.growing import kernels
        except ImportError as error:
            raise BackendError(
                "tables that grow need Numba: pip install 'embedding-placer[cpu]'"
            ) from error
        return kernels

    def read(self, keys: Int, open_steps: int = 1) -> StepRows:
        """Make one step: find the row of each key, and give rows to new ones.

        Parameters
        ----------
        keys : int64, shape (lookups,)
        open_steps : int
            How many steps before this one are still open; their rows keep their keys.
        """
        growing, kernels = self.growing, self._kernels
        rows, reused = np.empty(keys.size, np.int64), np.empty(keys.size, np.int64)
        count = kernels.read(
            np.ascontiguousarray(keys),
            rows,
            reused,
            self._slots,
            self._rows,
            self._state,
            self._sketch,
            growing.capacity,
            growing.admission,
            growing.eviction == "lfu",
            growing.ttl,
            _FORGET_READS * growing.capacity,
            self._state[kernels.STEP] + 1 - open_steps,
        )
        return StepRows(rows, reused[:count])

    def find(self, keys: Int) -> Int:
        """Find the row of each key, 0 where it has none; nothing is counted."""
        rows = np.empty(keys.size, np.int64)
        self._kernels.find(np.ascontiguousarray(keys), rows, self._slots, self._rows)
        return rows

    @property
    def counts(self) -> KeyCounts:
        """Return the counters since the beginning."""
        first = self._kernels.HITS
        return KeyCounts(*(int(value) for value in self._state[first:]))

    def live(self) -> tuple[Int, Int]:
        """Return all keys that have rows, and these rows, ascending: int64, shape (keys,) each."""
        used = int(self._state[self._kernels.USED])
        rows = 1 + np.flatnonzero(self._rows["step"][1 : used + 1] >= 0)
        return self._rows["key"][rows], rows

    def state(self) -> dict[str, Int]:
        """Return all that the next steps depend on, to be saved: int64 arrays by `STATE`."""
        records = self._rows[: int(self._state[self._kernels.USED]) + 1].copy()
        sketch = np.pad(self._sketch.reshape(-1), (0, -self._sketch.size % 8))
        rows = records.view(np.int64).reshape(records.size, -1)
        return dict(zip(self.STATE, (rows, self._state.copy(), sketch.view(np.int64)), strict=True))

    def load_state(self, state: dict[str, Int]) -> None:
        """Go on where another map of the same table was.

        Raises
        ------
        CheckpointError
            If it is of a map with another capacity or admission, or damaged.
        """
        kernels, growing = self._kernels, self.growing
        rows, counts, sketch = (np.ascontiguousarray(state[name], np.int64) for name in self.STATE)
        known = self.state()
        used = int(counts[kernels.USED]) if counts.shape == known["counts"].shape else -1
        fits = 0 <= used <= growing.capacity and (
            sketch.shape == known["sketch"].shape
            and rows.shape == (used + 1, known["rows"].shape[1])
            # Kernels follow these unchecked.
            and 0 <= counts[kernels.SKETCH] < self._sketch.shape[1]
            and counts[[kernels.HAND, kernels.SWEEP]].min() >= 0
        )
        if fits:
            records = rows.reshape(-1).view(kernels.RECORD)
            free = np.append(records["key"][1:][records["step"][1:] < 0], counts[kernels.FREE])
            fits = free.min() >= 0 and free.max() <= used
        if not fits:
            raise CheckpointError(
                f"saved keys are not of a table with capacity {growing.capacity:,} and admission "
                f"{growing.admission}, or are damaged"
            )
        self._rows[: used + 1], self._state[:] = records, counts
        self._rows[used + 1 :] = 0
        self._sketch[:] = sketch.view(np.uint8)[: self._sketch.size].reshape(self._sketch.shape)
        self._slots[:] = 0
        kernels.fill_slots(self._slots, self._rows, used)
