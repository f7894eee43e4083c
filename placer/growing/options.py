"""Options of growing tables, and counters of their keys."""

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
"""Most keys with rows: row numbers have 32 bits."""

MOST_OPEN_STEPS = 64
"""Most steps that count as open, even if the user keeps more outputs without a backward pass."""

OPEN_OVER_RANKS = 2
"""Number of steps that always count as open if ranks share a table: steps during which a batch is
sent ahead."""

_SLOTS_PER_KEY = 1.5
SKETCH_ROWS, SKETCH_CELLS = 4, 32
"""Shape of a block of the sketch, which counts reads of keys without a row: two cache lines."""


@dataclass(frozen=True, slots=True)
class Growing:
    """Options of a growing table: how it gives rows to keys and takes them back.

    Attributes
    ----------
    capacity : int
        Most keys that have rows at a time. The table also has row 0, for all other keys.
    admission : int
        A key gets a row at its read of this number, 1 to 255.
    eviction : {"lfu", "lru"}
        If no row is free, one of 16 keys loses its row. ``lru``: the key that was read longest ago.
        ``lfu``: the key that the fewest recent steps have read; in a tie, the one that was read
        longest ago. The next eviction considers the 16 rows that follow.
    ttl : int
        A key loses its row if this many steps do not read it; 0: never.

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
        """Rows of the table, row 0 included."""
        return self.capacity + 1

    @property
    def slot_count(self) -> int:
        """Slots of the hash table."""
        return int(self.capacity * _SLOTS_PER_KEY) + 8

    def sketch_blocks(self, part: int = 0, parts: int = 1) -> range:
        """Return the sketch blocks for the keys of a part. Neighbouring parts may share a block."""
        blocks = -(-self.capacity // SKETCH_CELLS) * (self.admission > 1)
        return range(part * blocks // parts, -(-(part + 1) * blocks // parts))

    @property
    def nbytes(self) -> int:
        """Bytes of the key map in host memory."""
        sketch = SKETCH_ROWS * SKETCH_CELLS * len(self.sketch_blocks())
        return 4 * self.slot_count + 16 * self.rows + sketch

    @property
    def copy_nbytes(self) -> int:
        """Bytes of a GPU's copy of the key map: slots, keys, and reads of rows."""
        return 4 * self.slot_count + 13 * self.rows


class KeyCounts(NamedTuple):
    """Counters of a key map since the beginning: lookups and rows.

    Attributes
    ----------
    hits, misses : int
        Lookups with a key that had a row, and all other lookups.
    waiting, refused : int
        Misses that row 0 served: the key was not read often enough yet; or no row could be taken
        back, because open steps read all of them.
    admitted, evicted, expired : int
        Rows given to keys; rows taken back for another key; rows taken back after `Growing.ttl`.
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
        """Share of lookups with a key that had a row; 0 without lookups."""
        return self.hits / max(1, self.hits + self.misses)

    @property
    def live(self) -> int:
        """Number of keys that have rows now."""
        return self.admitted - self.evicted - self.expired
