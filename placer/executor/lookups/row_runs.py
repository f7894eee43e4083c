"""The lookups of a step grouped by row, as a fused update reads them.

Sorted by slot, the lookups of one row are a *run*, which gets one update. A run may be most of
a batch. So that one program never sums more than `CHUNK` lookups, runs longer than that are
*long* and divided into chunks counted from their own start. Which lookups are summed together
thus depends on their order in the batch alone, never on where rows are: sums are bit-equal
between placements.

Triton's kernels write arrays of fixed sizes, as how many runs there are is known on the device
alone. Plain PyTorch waits for that number, and has no chunks.
"""

from dataclasses import dataclass

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
    starts : int32, shape (runs + 1,), or (lookups + 1,)
        Sorted position where each run starts; the run after the last starts at the end.
        Beyond that the values mean nothing.
    count : int32, shape (1,)
        Number of runs, on the device.
    covering : int32, shape (blocks,)
        The run that holds position ``b · CHUNK``, for each block b of `CHUNK` positions.
    long_runs : int32, shape (blocks,)
        The long run that begins in each block, at most one; −1 where none does. There are no
        blocks where no run is divided.
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
        """Sorted position of each run's first lookup, int32; beyond the last run, any."""
        return self.starts[:-1].clamp(0, max(self.lookups - 1, 0))
