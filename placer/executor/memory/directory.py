"""What a row cache knows of its entries, and what it says of a step."""

from dataclasses import dataclass

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
