"""Memory for blocks of a file during reads and writes, and a cache of recent blocks."""

import mmap

import numpy as np

from placer.executor.cold.block_queue import DEPTH, Array

_MOST_BYTES, _MOST_SHARE = 256 << 20, 1 / 8
"""Limits of the cache: bytes, and share of a file's blocks. A row that is read for a batch is
written back when another row takes its cache entry, about ten batches later."""


class KeptBlocks:
    """Memory slots for blocks of a file, as they are on the drive; for one thread at a time.

    Parameters
    ----------
    blocks, block_bytes : int
        Number and size of the file's blocks.

    Attributes
    ----------
    content : array
        uint8 ``[slots, block_bytes]``, of whole pages, as ``O_DIRECT`` requires.
    """

    def __init__(self, blocks: int, block_bytes: int) -> None:
        most = min(_MOST_BYTES // block_bytes, int(_MOST_SHARE * blocks))
        # 2 · `DEPTH` slots are for blocks that do not stay. Of the others, 2 · `DEPTH` may be in
        # use while `DEPTH` more are needed.
        slots = 2 * DEPTH + max(3 * DEPTH, most)
        # Private, so that forked processes do not see later blocks.
        memory = mmap.mmap(-1, slots * block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.content: Array = np.frombuffer(memory, np.uint8).reshape(slots, block_bytes)
        self._in_use = np.zeros(slots, np.bool_)
        self._block_in = np.full(slots, -1, np.int64)
        self._slot_of = np.full(blocks, -1, np.int32)
        self._next = 0

    def use(self, blocks: Array, passing: Array, which: int) -> tuple[Array, Array]:
        """Return slots for at most `DEPTH` blocks, and whether each slot has its block already.

        Parameters
        ----------
        blocks : array
        passing : array of bool
            Blocks that are not kept.
        which : {0, 1}
            Set of slots for these blocks; later calls with this number reuse it.
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
        """Drop all blocks."""
        self._in_use.fill(False)
        self._block_in.fill(-1)
        self._slot_of.fill(-1)

    def _longest_kept(self, count: int) -> Array:
        """Return the next `count` slots in turn, skipping slots in use."""
        staying = len(self.content) - 2 * DEPTH
        turn = (self._next + np.arange(count + 2 * DEPTH)) % staying
        free = np.flatnonzero(~self._in_use[2 * DEPTH + turn])[:count]
        if count:
            self._next = int(turn[free[-1]]) + 1
        return 2 * DEPTH + turn[free]
