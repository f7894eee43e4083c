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
    """Lookups sorted by slot, and the runs of equal slots among them.

    Attributes
    ----------
    slots : shape (lookups,)
        Sorted; a run of −1 may lead, which is nobody's.
    order : int64, shape (lookups,)
        Which lookup stands at each sorted position. Equal slots keep the batch's order.
    starts : int32, shape (lookups + 1,)
        Sorted position where each run starts; the run after the last starts at the end.
        Beyond that the values mean nothing.
    run : int32, shape (lookups,)
        The run that each sorted position belongs to.
    count : int32, shape (1,)
        Number of runs, on the device.
    covering : int32, shape (blocks,)
        Start of the run that holds position ``b · CHUNK``, for each block b of `CHUNK` positions.
    long_starts : int32, shape (blocks,)
        Start of the long run that begins in each block, at most one; −1 where none does.
    """

    slots: Tensor
    order: Tensor
    starts: Tensor
    run: Tensor
    count: Tensor
    covering: Tensor
    long_starts: Tensor

    @property
    def lookups(self) -> int:
        """Number of lookups."""
        return self.slots.numel()

    @property
    def blocks(self) -> int:
        """Number of blocks of `CHUNK` sorted positions."""
        return self.covering.numel()


def find_runs(slots: Tensor) -> Runs:
    """Sort a step's slots, shape (lookups,), and find the runs."""
    ordered, order = torch.sort(slots, stable=True)
    lookups, device = slots.numel(), slots.device
    first = torch.ones(lookups, dtype=torch.bool, device=device)
    torch.ne(ordered[1:], ordered[:-1], out=first[1:])
    run = torch.cumsum(first, 0, dtype=torch.int32) - 1
    position = torch.arange(lookups, dtype=torch.int32, device=device)
    # Positions that start no run are all written behind the end, where nobody looks.
    starts = torch.full((lookups + 2,), lookups, dtype=torch.int32, device=device)
    target = torch.where(first, run.long(), lookups + 1)
    starts.scatter_(0, target, position)
    count = run[-1:] + 1 if lookups else torch.zeros(1, dtype=torch.int32, device=device)

    blocks = -(-lookups // CHUNK)
    started = torch.where(first, position, -1)
    # The run goes on CHUNK positions later: it is long.
    goes_on = torch.zeros(lookups, dtype=torch.bool, device=device)
    if lookups > CHUNK:
        goes_on[:-CHUNK] = ordered[CHUNK:] == ordered[:-CHUNK]
    long_starts = _block_max(torch.where(goes_on, started, -1), blocks)
    last_started = _block_max(started, blocks)
    before = torch.cummax(last_started, 0).values if blocks else last_started
    block_starts = position[::CHUNK]
    earlier = torch.cat([block_starts[:1], before[:-1]])
    covering = torch.where(first[::CHUNK], block_starts, earlier)
    return Runs(ordered, order, starts[: lookups + 1], run, count, covering, long_starts)


def _block_max(values: Tensor, blocks: int) -> Tensor:
    """Largest value of each block of `CHUNK` positions, at least −1."""
    padded = torch.nn.functional.pad(values, (0, blocks * CHUNK - values.numel()), value=-1)
    return padded.view(blocks, CHUNK).amax(1)
