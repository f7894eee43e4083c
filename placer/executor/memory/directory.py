"""The data of a row cache: its directory, a step's moves of rows, and its counters."""

from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Rows to copy into and out of cache entries before a step.

    Attributes
    ----------
    entries : int32, shape (most,)
        The entry of each move; −1 after the last move. Entries are distinct.
    incoming : int32 or int64, shape (most,)
        Slot of the row to copy into the entry.
    outgoing : int32 or int64, shape (most,)
        Slot of the row to write back first; −1 if the entry was free or its row is unchanged.
    count : int32, shape (1,)
        Number of moves.
    """

    entries: Tensor
    incoming: Tensor
    outgoing: Tensor
    count: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Directory:
    """The state of each cache entry, and of an extra entry that takes writes for no entry.

    Attributes
    ----------
    slots : int32 or int64, shape (entries + 1,)
        The slot in each entry; the dtype's largest value if the entry is free.
    last_used : int32, shape (entries + 1,)
        The last step that read the entry.
    priority : float32, shape (entries + 1,)
        Cached rows of lowest priority are evicted first.
    dirty : bool, shape (entries + 1,)
        Whether the copy is newer than the row itself.
    sorted_slots, sorted_entries : shape (entries + 1,)
        The slots in ascending order, for searches, and their entries; −1 if free.
    counters : int64
        Counts in the order of `RowCacheStats`.
    """

    slots: Tensor
    last_used: Tensor
    priority: Tensor
    dirty: Tensor
    sorted_slots: Tensor
    sorted_entries: Tensor
    counters: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors without the counters."""
        parts = (self.slots, self.last_used, self.priority, self.dirty)
        return sum(part.nbytes for part in (*parts, self.sorted_slots, self.sorted_entries))


@dataclass(frozen=True, slots=True, eq=False)
class Resolution:
    """The entries of a step's rows after its moves.

    Attributes
    ----------
    entries : int32, shape (rows,)
        Entry of each row; −1 for rows without an entry.
    moves : Moves
    """

    entries: Tensor
    moves: Moves


@dataclass(frozen=True, slots=True)
class RowCacheStats:
    """Counts of a row cache since the last reset.

    Attributes
    ----------
    lookups, hit_lookups : int
        Lookups of staged and cached rows, and lookups of rows with an entry before the step.
    rows, hit_rows : int
        The same with each row counted once per step.
    in_place_rows : int
        Rows that got no entry.
    written_back_rows : int
        Evicted rows that had been updated.
    """

    lookups: int = 0
    hit_lookups: int = 0
    rows: int = 0
    hit_rows: int = 0
    in_place_rows: int = 0
    written_back_rows: int = 0

    def __add__(self, other: "RowCacheStats") -> "RowCacheStats":
        """Return the sums of two row caches' counts."""
        return RowCacheStats(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )

    @property
    def hit_rate(self) -> float | None:
        """Share of lookups that hit; None without lookups."""
        return self.hit_lookups / self.lookups if self.lookups else None

    @property
    def in_place_share(self) -> float | None:
        """Share of the steps' distinct rows that got no entry; None without rows."""
        return self.in_place_rows / self.rows if self.rows else None
