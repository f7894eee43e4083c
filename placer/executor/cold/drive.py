"""Cold rows on a drive: records of one size in a file, read and written in batches."""

import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from placer.errors import PlacerError
from placer.executor.cold.block_file import BlockFile
from placer.executor.cold.block_queue import DEPTH, READ, WRITE, Array, BlockQueue, two_queues
from placer.executor.cold.kept_blocks import KeptBlocks


class DriveRecords:
    """Records of one size in a file on a drive, for the rows of a shard in one process.

    Threads may call it at once; calls run one after the other.

    Parameters
    ----------
    folder : Path
        Folder of the file, made if missing. The file has no name, so it always ends with the
        process.
    rows : int
        Number of records. All space is reserved at once, so a full drive fails here, not later.
    record_bytes : int

    Raises
    ------
    PlacerError
        If the folder cannot be made, or the drive lacks space.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     records = DriveRecords(Path(folder), rows=1000, record_bytes=3)
    ...     records.write(torch.tensor([7]), torch.tensor([[1, 2, 3]], dtype=torch.uint8))
    ...     records.read(torch.tensor([999, 7])).tolist()
    [[0, 0, 0], [1, 2, 3]]
    """

    def __init__(self, folder: Path, rows: int, record_bytes: int) -> None:
        if rows < 0 or record_bytes < 1:
            raise PlacerError(f"{rows} records of {record_bytes} bytes make no file; give others")
        self.rows, self.record_bytes = rows, record_bytes
        self._file = file = BlockFile(folder, rows, record_bytes)
        self._kept = KeptBlocks(-(-rows // file.per_block), file.block_bytes)
        self._lock = threading.Lock()

    def read(self, rows: Tensor) -> Tensor:
        """Read records, as uint8 ``[n, record_bytes]``; records never written are zeros.

        Parameters
        ----------
        rows : Tensor
            int64 ``[n]`` on the CPU, in any order. Rows of one block need one read.
        """
        records = np.empty((rows.numel(), self.record_bytes), np.uint8)
        self._move(READ, rows, records)
        return torch.from_numpy(records)

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Write records.

        Parameters
        ----------
        rows : Tensor
            Distinct, int64 ``[n]`` on the CPU, in any order. A block with other rows too is read
            first, unless it is kept in memory.
        records : Tensor
            uint8 ``[n, record_bytes]`` on the CPU.
        """
        shape = (rows.numel(), self.record_bytes)
        if records.dtype != torch.uint8 or records.shape != shape:
            has = f"{records.dtype} {tuple(records.shape)}"
            raise PlacerError(f"the records to write are {has}; give torch.uint8 {shape}")
        self._move(WRITE, rows, records.numpy())

    def _move(self, operation: int, rows: Tensor, records: Array) -> None:
        file = self._file
        transfer = _Transfer(file, self._kept, operation, rows.numpy(), records)
        with self._lock:
            try:
                # While the CPU checks one queue's blocks, the drive works on the other's.
                with two_queues() as queues:
                    for _ in itertools.zip_longest(*map(transfer.turns, queues, (0, 1))):
                        pass
            except BaseException as error:
                self._kept.forget()
                if not isinstance(error, OSError):
                    raise
                raise PlacerError(
                    f"asynchronous I/O of {file.folder} failed: {error.strerror}; raise its limit "
                    "(sysctl fs.aio-max-nr=1048576), or name a folder of another drive"
                ) from error


class _Transfer:
    """One read or write of records, in the order of the file."""

    def __init__(
        self, file: BlockFile, kept: KeptBlocks, operation: int, rows: Array, records: Array
    ) -> None:
        self._file, self._is_write, self._records = file, operation == WRITE, records
        self._kept = kept
        self._order = np.argsort(rows, kind="stable")
        rows = rows[self._order]
        for row in (*rows[:1], *rows[-1:]):
            if not 0 <= row < file.rows:
                raise PlacerError(f"{file.folder} has rows 0 to {file.rows - 1}, and not {row}")
        twice = rows[1:][np.diff(rows) == 0]
        if twice.size and self._is_write:
            raise PlacerError(f"row {twice[0]} is to be written twice at once; give it once")
        block_of, self._place = np.divmod(rows, file.per_block)
        self._begins = np.flatnonzero(np.diff(block_of, prepend=-1, append=-1))
        self._blocks = block_of[self._begins[:-1]]

    def turns(self, queue: BlockQueue, which: int) -> Iterator[None]:
        """Move every second part of the blocks, from part `which` on; yield while the drive works.

        A part has `DEPTH` blocks, the capacity of a queue.
        """
        file, kept = self._file, self._kept
        shape = (len(kept.content), file.per_block, file.record_bytes)
        cells = as_strided(kept.content, shape, (file.block_bytes, file.record_bytes, 1))
        for first in range(which * DEPTH, self._blocks.size, 2 * DEPTH):
            blocks = self._blocks[first : first + DEPTH]
            begins = self._begins[first : first + DEPTH + 1]
            part, counts = slice(begins[0], begins[-1]), np.diff(begins)
            # Blocks whose rows all move belong to a checkpoint rather than to a batch.
            whole = counts == np.minimum(file.per_block, file.rows - blocks * file.per_block)
            slots, known = kept.use(blocks, whole, which)
            records, cell = self._order[part], (np.repeat(slots, counts), self._place[part])
            old = ~known & ~whole if self._is_write else ~known
            self._submit(queue, READ, slots[old], blocks[old])
            yield
            self._finish(queue, blocks[old], "read")
            for damaged in blocks[old][~file.are_whole(kept.content, slots[old], blocks[old])]:
                raise file.failure(damaged, "is damaged: its checksum is wrong")
            if self._is_write:
                kept.content[slots[whole]] = 0
                cells[cell] = self._records[records]
                checksums = file.checksums(kept.content, slots, blocks)
                kept.content.view("<u4")[slots, -1] = checksums
                self._submit(queue, WRITE, slots, blocks)
                yield
                self._finish(queue, blocks, "written")
            else:
                self._records[records] = cells[cell]
            kept.release(slots)

    def _submit(self, queue: BlockQueue, operation: int, slots: Array, blocks: Array) -> None:
        size = self._file.block_bytes
        addresses = self._kept.content.ctypes.data + slots.astype(np.int64) * size
        queue.submit(operation, self._file.descriptor, size, addresses, blocks * size)

    def _finish(self, queue: BlockQueue, blocks: Array, verb: str) -> None:
        for request, moved in queue.wait():
            why = os.strerror(-moved) if moved < 0 else f"it ended after {moved} bytes"
            raise self._file.failure(blocks[request], f"was not {verb}: {why}")
