"""What a row cache knows of its entries, what it says of a step, and what it counts."""

from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Rows that change places before a step.

    Attributes
    ----------
    entries : int32, shape (most,)
        The entry of each move; −1 behind the last. No entry comes twice.
    incoming : int32 or int64, shape (most,)
        Slot of the row to read into it.
    outgoing : int32 or int64, shape (most,)
        Slot of the row to write back from it first; −1 where there was none or it is unchanged.
    count : int32, shape (1,)
        How many moves there are.
    """

    entries: Tensor
    incoming: Tensor
    outgoing: Tensor
    count: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Directory:
    """What is known of each entry, and of one more, which takes all writes meant for no entry.

    Attributes
    ----------
    slots : int32 or int64, shape (entries + 1,)
        The slot that each entry holds; the largest there is where it holds none.
    last_used : int32, shape (entries + 1,)
        The last step that read it.
    priority : float32, shape (entries + 1,)
        Cached rows of lowest priority make room first.
    dirty : bool, shape (entries + 1,)
        Whether the row is newer than its original.
    sorted_slots, sorted_entries : shape (entries + 1,)
        The slots in order, for searches, and the entry of each; −1 where it holds nothing.
    counters : int64
        In the order of `RowCacheStats`.
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
        """Bytes of all this, but for the counters."""
        parts = (self.slots, self.last_used, self.priority, self.dirty)
        return sum(part.nbytes for part in (*parts, self.sorted_slots, self.sorted_entries))


@dataclass(frozen=True, slots=True, eq=False)
class Resolution:
    """Where the rows of a step are, once its moves are done.

    Attributes
    ----------
    entries : int32, shape (rows,)
        Entry of each row; −1 for rows that stay in place.
    moves : Moves
    """

    entries: Tensor
    moves: Moves


@dataclass(frozen=True, slots=True)
class RowCacheStats:
    """Lookups of a row cache since its counters were last reset.

    Attributes
    ----------
    lookups, hit_lookups : int
        Lookups of staged and cached rows, and those whose row had an entry before the step.
    rows, hit_rows : int
        The same with each row counted once a step.
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
        """Return both row caches' together."""
        return RowCacheStats(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )

    @property
    def hit_rate(self) -> float | None:
        """Share of lookups that hit; None where there were none."""
        return self.hit_lookups / self.lookups if self.lookups else None

    @property
    def row_hit_rate(self) -> float | None:
        """Share of the steps' distinct rows that hit; None where there were none."""
        return self.hit_rows / self.rows if self.rows else None

    @property
    def in_place_share(self) -> float | None:
        """Share of the steps' distinct rows that got no entry; None where there were none."""
        return self.in_place_rows / self.rows if self.rows else None
