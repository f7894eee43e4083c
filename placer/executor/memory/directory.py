"""The data of a row cache: its directory, a step's moves of rows, and its counters."""

from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Rows to copy into and out of cache entries before a step."""

    # Int32, shape (most,): the entry of each move; −1 after the last move. Entries are distinct.
    entries: Tensor
    incoming: Tensor  # Int32 or int64, shape (most,): slot of the row to copy into the entry.
    # Int32 or int64, shape (most,): slot of the row to write back first; −1 if the entry was free
    # or its row is unchanged.
    outgoing: Tensor
    count: Tensor  # Int32, shape (1,): number of moves.


@dataclass(frozen=True, slots=True, eq=False)
class Directory:
    """The state of each cache entry, and of an extra entry that takes writes for no entry."""

    # Int32 or int64, shape (entries + 1,): the slot in each entry; the dtype's largest value if the
    # entry is free.
    slots: Tensor
    last_used: Tensor  # Int32, shape (entries + 1,): the last step that read the entry.
    # Float32, shape (entries + 1,): cached rows of lowest priority are evicted first.
    priority: Tensor
    dirty: Tensor  # Bool, shape (entries + 1,): whether the copy is newer than the row itself.
    # Shape (entries + 1,): the slots in ascending order, for searches, and their entries; −1 if
    # free.
    sorted_slots: Tensor
    sorted_entries: Tensor
    counters: Tensor  # Int64: counts in the order of `RowCacheStats`.

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors without the counters."""
        parts = (self.slots, self.last_used, self.priority, self.dirty)
        return sum(part.nbytes for part in (*parts, self.sorted_slots, self.sorted_entries))


@dataclass(frozen=True, slots=True, eq=False)
class Resolution:
    """The entries of a step's rows after its moves."""

    entries: Tensor  # Int32, shape (rows,): entry of each row; −1 for rows without an entry.
    moves: Moves


@dataclass(frozen=True, slots=True)
class RowCacheStats:
    """Counts of a row cache since the last reset."""

    # Lookups of staged and cached rows, and lookups of rows with an entry before the step.
    lookups: int = 0
    hit_lookups: int = 0
    # The same with each row counted once per step.
    rows: int = 0
    hit_rows: int = 0
    in_place_rows: int = 0  # Rows that got no entry.
    written_back_rows: int = 0  # Evicted rows that had been updated.

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
