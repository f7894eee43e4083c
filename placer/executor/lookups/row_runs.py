"""The lookups of a step grouped by row, as a fused update reads them.

Sorted by slot, the lookups of one row are a *run*, which gets one update. A run may be most of
a batch. So that one program never sums more than `CHUNK` lookups, runs longer than that are
*long* and divided into chunks counted from their own start. Which lookups are summed together
thus depends on their order in the batch alone, never on where rows are: sums are bit-equal
between placements.

All arrays have fixed sizes and nothing here waits for the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 128
"""Lookups that one program sums at most. Smaller chunks balance the programs better, and need
more memory for the chunks' sums: two rows for each `CHUNK` lookups."""


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Which lookups make up each run, by sorted position: 8 bytes a lookup.

    Attributes
    ----------
    order : int32, shape (lookups,)
        Which lookup stands at each sorted position. Equal slots keep the batch's order.
    starts : int32, shape (lookups + 1,)
        Sorted position where each run starts; the run after the last starts at the end.
        Beyond that the values mean nothing.
    count : int32, shape (1,)
        Number of runs, on the device.
    covering : int32, shape (blocks,)
        The run that holds position ``b · CHUNK``, for each block b of `CHUNK` positions.
    long_runs : int32, shape (blocks,)
        The long run that begins in each block, at most one; −1 where none does.
    """

    order: Tensor
    starts: Tensor
    count: Tensor
    covering: Tensor
    long_runs: Tensor

    @property
    def lookups(self) -> int:
        """Number of lookups."""
        return self.order.numel()

    @property
    def blocks(self) -> int:
        """Number of blocks of `CHUNK` sorted positions."""
        return self.covering.numel()

    @property
    def firsts(self) -> Tensor:
        """Sorted position of each run's first lookup, int32, shape (lookups,); beyond them, any."""
        return self.starts[: self.lookups].clamp(0, max(self.lookups - 1, 0))


@dataclass(frozen=True, slots=True, eq=False)
class SortedSlots:
    """The slots of a step in their order, needed only until its rows are located.

    Attributes
    ----------
    slots : shape (lookups,)
        Sorted; a run of −1 may lead, which is nobody's.
    run : int32, shape (lookups,)
        The run that each sorted position belongs to.
    """

    slots: Tensor
    run: Tensor


def find_runs(slots: Tensor) -> tuple[Runs, SortedSlots]:
    """Sort a step's slots, shape (lookups,), and find the runs.

    Arrays of the lookups are as narrow as they can be and are let go of as soon as they can be,
    for a batch's index buffers are mostly these.
    """
    ordered, order = torch.sort(slots, stable=True)
    order = order.int()
    lookups, device = slots.numel(), slots.device
    if not lookups:
        none = torch.zeros(1, dtype=torch.int32, device=device)
        return Runs(order, none, none, order, order), SortedSlots(ordered, order)
    first = torch.ones(lookups, dtype=torch.bool, device=device)
    torch.ne(ordered[1:], ordered[:-1], out=first[1:])
    run = first.int()
    run.cumsum_(0).sub_(1)
    count = run[-1:] + 1
    # Each run's start is added at the run's place, and a zero at each other position's own: so no
    # place is written more than twice, and indices need not be int64, as a scatter's would be.
    position = torch.arange(lookups, dtype=torch.int32, device=device)
    target = torch.where(first, run, position)
    position.mul_(first)
    del first
    starts = torch.zeros(lookups + 1, dtype=torch.int32, device=device)
    starts.index_add_(0, target, position)
    del target, position
    starts.index_add_(0, count, torch.full_like(count, lookups))
    covering = run[::CHUNK].clone()
    runs = Runs(order, starts, count, covering, _long_runs(starts, covering))
    return runs, SortedSlots(ordered, run)


def _long_runs(starts: Tensor, covering: Tensor) -> Tensor:
    """Return the long run that begins in each block, or −1.

    It holds the next block's first position, as may a run that begins there.
    """
    last = torch.full_like(covering[:1], -1)  # No block comes after it, so no long run begins.
    following = torch.cat([covering[1:], last])
    begin = starts.index_select(0, following.clamp(min=0))
    length = starts.index_select(0, following + 1) - begin
    block = torch.arange(covering.numel(), dtype=torch.int32, device=covering.device)
    from_here = begin - block * CHUNK
    here = (from_here >= 0) & (from_here < CHUNK) & (length > CHUNK) & (following >= 0)
    return torch.where(here, following, -1)
