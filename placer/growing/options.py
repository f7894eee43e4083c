"""What is said of a table that grows, and what its keys did."""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Interval

from placer.errors import PlanMismatchError
from placer.tables import Count

Int = npt.NDArray[np.int64]
Eviction = Literal["lfu", "lru"]

MOST_ADMISSION = 255
MOST_CAPACITY = 2**31 - 64
"""Row numbers have 32 bits."""

OPEN_OVER_RANKS = 2
"""Steps that are always taken to be open where ranks share a table: those during which a batch is
sent ahead."""

_SLOTS_PER_KEY = 1.5
SKETCH_ROWS, SKETCH_CELLS = 4, 32
"""The shape of a block of the sketch that counts keys without a row: two lines of a cache."""


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
    26144
    """

    capacity: Annotated[int, Ge(1)]
    admission: Annotated[int, Interval(ge=1, le=MOST_ADMISSION)] = 1
    eviction: Eviction = "lfu"
    ttl: Count = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("capacity", 1, MOST_CAPACITY),
            ("admission", 1, MOST_ADMISSION),
            ("ttl", 0, 2**31 - 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)):
                raise PlanMismatchError(f"{name} {value!r} is no whole number")
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

    def sketch_blocks(self, part: int = 0, parts: int = 1) -> range:
        """Return the blocks that count the waiting keys of a part; neighbours may share one."""
        blocks = -(-self.capacity // SKETCH_CELLS) * (self.admission > 1)
        return range(part * blocks // parts, -(-(part + 1) * blocks // parts))

    @property
    def nbytes(self) -> int:
        """Bytes of the key map in host memory."""
        sketch = SKETCH_ROWS * SKETCH_CELLS * len(self.sketch_blocks())
        return 4 * self.slot_count + 16 * self.rows + sketch

    @property
    def copy_nbytes(self) -> int:
        """Bytes of the copy that a GPU has which finds keys: slots, keys, and reads of rows."""
        return 4 * self.slot_count + 13 * self.rows


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
