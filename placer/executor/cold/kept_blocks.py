"""Memory for blocks of a file that are being read or written, and for the last ones."""

import mmap

import numpy as np

from placer.executor.cold.block_queue import DEPTH, Array

_MOST_BYTES, _MOST_SHARE = 256 << 20, 1 / 8
"""Of a file's blocks that stay in memory, and of all of them. A row that is read for a batch is
written back when its entry of the row cache is wanted for another, about ten batches later."""


class KeptBlocks:
    """Slots of memory with blocks of a file as they are on the drive; for one thread at a time.

    Parameters
    ----------
    blocks, block_bytes : int
        Of the file.

    Attributes
    ----------
    content : array
        uint8 ``[slots, block_bytes]``, of whole pages, as ``O_DIRECT`` asks.
    """

    def __init__(self, blocks: int, block_bytes: int) -> None:
        most = min(_MOST_BYTES // block_bytes, int(_MOST_SHARE * blocks))
        # Two times `DEPTH` slots for blocks that do not stay; and of the others two times as many
        # may be in use while again `DEPTH` are sought.
        slots = 2 * DEPTH + max(3 * DEPTH, most)
        # Not shared with a process that this one forks, which knows nothing of later blocks.
        memory = mmap.mmap(-1, slots * block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.content: Array = np.frombuffer(memory, np.uint8).reshape(slots, block_bytes)
        self._in_use = np.zeros(slots, np.bool_)
        self._block_in = np.full(slots, -1, np.int64)
        self._slot_of = np.full(blocks, -1, np.int32)
        self._next = 0

    def use(self, blocks: Array, passing: Array, which: int) -> tuple[Array, Array]:
        """Return slots for at most `DEPTH` blocks, and whether their content is there.

        Parameters
        ----------
        blocks : array
        passing : array of bool
            Blocks that do not stay.
        which : {0, 1}
            They get slots that other calls with this number get too.
        """
        slots = self._slot_of[blocks]
        known = slots >= 0
        self._in_use[slots[known]] = True
        passes, stays = np.flatnonzero(passing & ~known), np.flatnonzero(~passing & ~known)
        slots[passes] = which * DEPTH + passes
        slots[stays] = own = self._longest_kept(stays.size)
        gone = self._block_in[own]
        self._slot_of[gone[gone >= 0]] = -1
        self._slot_of[blocks[stays]], self._block_in[own] = own, blocks[stays]
        self._in_use[own] = True
        return slots, known

    def release(self, slots: Array) -> None:
        """Mark slots as free for other blocks."""
        self._in_use[slots] = False

    def forget(self) -> None:
        """Keep no block."""
        self._in_use.fill(False)
        self._block_in.fill(-1)
        self._slot_of.fill(-1)

    def _longest_kept(self, count: int) -> Array:
        """Return slots in turn, but those in use."""
        staying = len(self.content) - 2 * DEPTH
        turn = (self._next + np.arange(count + 2 * DEPTH)) % staying
        free = np.flatnonzero(~self._in_use[2 * DEPTH + turn])[:count]
        if count:
            self._next = int(turn[free[-1]]) + 1
        return 2 * DEPTH + turn[free]
