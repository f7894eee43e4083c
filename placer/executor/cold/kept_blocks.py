"""Blocks that were read lately, so that a row that is written back needs no second read."""

import threading

import numpy as np

from placer.executor.cold.block_queue import DEPTH, Array

_MOST_BYTES, _MOST_SHARE = 64 << 20, 1 / 16
"""Of a file's blocks that are kept, and of all of them. Fewer are where batches read fewer."""

_WRITES = 4
"""After so many writes blocks make room for others. A row that is read for a batch is written when
rows of the batch after the next are read, and both in calls of at most 8,192 rows."""


class KeptBlocks:
    """Copies of blocks of a file as they are on the drive; for any number of threads.

    Nothing is kept that was read while others wrote: it may be older than what is there now.

    Parameters
    ----------
    blocks, block_bytes : int
        Of the file.
    """

    def __init__(self, blocks: int, block_bytes: int) -> None:
        most_bytes = min(_MOST_BYTES, int(_MOST_SHARE * blocks * block_bytes))
        parts = max(1, most_bytes // (DEPTH * block_bytes))
        self._content = [np.empty((0, block_bytes), np.uint8)] * parts
        self._kept = [np.empty(0, np.int64)] * parts
        self._kept_at = np.full(parts, -2 * _WRITES)
        self._place_of = np.full(blocks, -1, np.int32)
        self.clock = 0
        """Rises when a write begins and when it ends, so that it is odd in between."""
        self._lock = threading.Lock()

    def tick(self) -> None:
        """Note that a write begins, or has ended."""
        with self._lock:
            self.clock += 1

    def keep(self, blocks: Array, content: Array, began: int) -> None:
        """Keep blocks, at most `DEPTH`, of a read that began when the clock was so."""
        with self._lock:
            free = np.flatnonzero(self._kept_at <= self.clock - 2 * _WRITES)
            if began != self.clock or began % 2 or not free.size or not blocks.size:
                return
            part = free[0]
            gone = self._kept[part]
            self._place_of[gone[self._place_of[gone] // DEPTH == part]] = -1
            self._kept[part], self._kept_at[part] = blocks, self.clock
            self._place_of[blocks] = part * DEPTH + np.arange(blocks.size)
            if len(self._content[part]) < blocks.size:
                self._content[part] = content.copy()
            else:
                self._content[part][: blocks.size] = content

    def take(self, blocks: Array, into: Array) -> Array:
        """Copy the blocks that are here, and let go of them: they are written next.

        Returns which they are, as numbers of `blocks` and of rows of `into`.
        """
        with self._lock:
            part, place = np.divmod(self._place_of[blocks], DEPTH)
            self._place_of[blocks] = -1
            for one in np.unique(part[part >= 0]):
                here = np.flatnonzero(part == one)
                into[here] = self._content[one][place[here]]
            return np.flatnonzero(part >= 0)
