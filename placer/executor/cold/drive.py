"""Cold rows on a drive: records of one size in a file, read and written in batches."""

import os
import threading
import weakref
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from placer.errors import PlacerError
from placer.executor.cold.block_file import BlockFile
from placer.executor.cold.block_queue import READ, WRITE, Array, BlockQueue


class DriveRecords:
    """Records of one size in a file on a drive: the rows of a shard, for one process.

    Several threads may read and write at once, also rows that share a block. A row that one thread
    writes while another reads it is read as it was before or after.

    Parameters
    ----------
    path : Path
        A file, which is made if it is not there, and stays with its records. Or a folder: then the
        file has no name, and is gone when it is closed or the process ends, however it ends.
    rows : int
        All their space is reserved at once, so that the drive is full now or never.
    record_bytes : int

    Raises
    ------
    PlacerError
        If there is no such folder or no space, another process has the file open, or it has
        another size.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     records = DriveRecords(Path(folder), rows=1000, record_bytes=3)
    ...     records.write(torch.tensor([7]), torch.tensor([[1, 2, 3]], dtype=torch.uint8))
    ...     records.read(torch.tensor([999, 7])).tolist()
    ...     records.close()
    [[0, 0, 0], [1, 2, 3]]
    """

    def __init__(self, path: Path, rows: int, record_bytes: int) -> None:
        if rows < 0 or record_bytes < 1:
            raise PlacerError(f"{rows} records of {record_bytes} bytes make no file; give others")
        self.rows, self.record_bytes = rows, record_bytes
        self._file = BlockFile(path, rows, record_bytes)
        self._closing = weakref.finalize(self, os.close, self._file.descriptor)
        self._queues: list[BlockQueue] = []
        self._writing = threading.Lock()

    def read(self, rows: Tensor) -> Tensor:
        """Read records; those never written are zeros.

        Parameters
        ----------
        rows : Tensor
            int64 ``[n]`` on the CPU, in any order. Those of one block are read at once.

        Returns
        -------
        Tensor
            uint8 ``[n, record_bytes]``.

        Raises
        ------
        PlacerError
            If a row is out of range, the drive fails, or a block is damaged.
        """
        records = np.empty((rows.numel(), self.record_bytes), np.uint8)
        if self._move(READ, rows, records) is not None:
            # Another thread may have been writing the block.
            with self._writing:
                self._refuse(self._move(READ, rows, records))
        return torch.from_numpy(records)

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Write records; they are on the drive for certain after `flush`.

        Parameters
        ----------
        rows : Tensor
            int64 ``[n]`` on the CPU, distinct, in any order. A block of which not all rows are
            given is read before.
        records : Tensor
            uint8 ``[n, record_bytes]`` on the CPU.

        Raises
        ------
        PlacerError
            If a row is out of range or there twice: nothing is written then. If the drive fails or
            a block is damaged: other blocks may be written.
        """
        shape = (rows.numel(), self.record_bytes)
        if records.dtype != torch.uint8 or records.shape != shape:
            has = f"{records.dtype} {tuple(records.shape)}"
            raise PlacerError(f"the records to write are {has}; give torch.uint8 {shape}")
        with self._writing:
            self._refuse(self._move(WRITE, rows, records.numpy()))

    def flush(self) -> None:
        """Wait until what was written is on the drive."""
        self._check_open()
        try:
            os.fdatasync(self._file.descriptor)
        except OSError as error:
            raise PlacerError(f"cannot write {self._file.path}: {error.strerror}") from error

    def close(self) -> None:
        """Close the file, when nothing reads or writes it any more."""
        self._closing()
        self._queues.clear()

    def _check_open(self) -> None:
        if not self._closing.alive:
            raise PlacerError(f"the records of {self._file.path} are closed; open them again")

    def _move(self, operation: int, rows: Tensor, records: Array) -> int | None:
        """Read or write records; return a block that is damaged, if there is one."""
        self._check_open()
        try:
            queue = self._queues.pop()
        except IndexError:
            queue = BlockQueue(self._file.descriptor, self._file.block_bytes)
        try:
            return _Transfer(self._file, queue, operation, rows.numpy(), records).run()
        except OSError as error:
            raise PlacerError(f"cannot use {self._file.path}: {error.strerror}") from error
        finally:
            queue.drain()
            self._queues.append(queue)

    def _refuse(self, damaged: int | None) -> None:
        if damaged is not None:
            raise self._file.failure(damaged, "is damaged: its checksum is wrong")


class _Transfer:
    """A batch that is read or written: each block of it goes through a slot of a queue."""

    def __init__(
        self, file: BlockFile, queue: BlockQueue, operation: int, rows: Array, records: Array
    ) -> None:
        self._file, self._queue, self._records = file, queue, records
        self._is_write = operation == WRITE
        self._order = np.argsort(rows, kind="stable")
        self._rows = rows[self._order]
        for row in (*self._rows[:1], *self._rows[-1:]):
            if not 0 <= row < file.rows:
                raise PlacerError(f"{file.path} has rows 0 to {file.rows - 1}, and not {row}")
        twice = self._rows[1:][np.diff(self._rows) == 0]
        if twice.size and self._is_write:
            raise PlacerError(f"row {twice[0]} is to be written twice at once; give it once")
        block_of = self._rows // file.per_block
        self._begins = np.flatnonzero(np.diff(block_of, prepend=-1))
        self._counts = np.diff(self._begins, append=rows.size)
        self._blocks = block_of[self._begins]
        shape = (len(queue.buffers), file.per_block, file.record_bytes)
        strides = (file.block_bytes, file.record_bytes, 1)
        self._cells = as_strided(queue.buffers, shape, strides)
        self._held = np.zeros(shape[0], np.int64)  # Which of `blocks` a slot has.
        self._operation = np.zeros(shape[0], np.int64)

    def run(self) -> int | None:
        """Move all blocks; return one that is damaged, and so left as it is."""
        present = np.minimum(
            self._file.per_block, self._file.rows - self._blocks * self._file.per_block
        )
        needs_read = (self._counts < present) | (not self._is_write)
        begun, damaged = 0, None
        while begun < self._blocks.size or self._queue.in_flight:
            slots = self._queue.take(self._blocks.size - begun)
            self._held[slots] = np.arange(begun, begun + slots.size)
            begun += slots.size
            is_read = needs_read[self._held[slots]]
            self._submit(READ, slots[is_read])
            self._queue.buffers[slots[~is_read]] = 0
            self._change(slots[~is_read])
            for block in self._go_on(*self._queue.wait())[:1]:
                damaged = int(block)
        return damaged

    def _submit(self, operation: int, slots: Array) -> None:
        self._operation[slots] = operation
        offsets = self._blocks[self._held[slots]] * self._file.block_bytes
        self._queue.submit(operation, slots, offsets)

    def _go_on(self, slots: Array, moved: Array) -> Array:
        """Take or change the records of blocks that were read; return those that are damaged."""
        is_read = self._operation[slots] == READ
        blocks = self._blocks[self._held[slots]]
        for at in np.flatnonzero(moved != self._file.block_bytes)[:1]:
            why = os.strerror(-moved[at]) if moved[at] < 0 else f"ended after {moved[at]} bytes"
            verb = "read" if is_read[at] else "written"
            raise self._file.failure(int(blocks[at]), f"was not {verb}: {why}")
        self._queue.release(slots[~is_read])
        slots, blocks = slots[is_read], blocks[is_read]
        whole = self._file.are_whole(self._queue.buffers[slots], blocks)
        if self._is_write:
            self._queue.release(slots[~whole])
            self._change(slots[whole])
        else:
            slot_of, in_block, at = self._records_of(slots)
            self._records[at] = self._cells[slot_of, in_block]
            self._queue.release(slots)
        damaged: Array = blocks[~whole]
        return damaged

    def _change(self, slots: Array) -> None:
        """Write records into blocks, and these to the drive."""
        slot_of, in_block, at = self._records_of(slots)
        self._cells[slot_of, in_block] = self._records[at]
        checks = self._file.checksums(self._queue.buffers[slots], self._blocks[self._held[slots]])
        self._queue.buffers.view("<u4")[slots, -1] = checks
        self._submit(WRITE, slots)

    def _records_of(self, slots: Array) -> tuple[Array, Array, Array]:
        """Of each record of the blocks in slots: its slot, place in the block, and in the batch."""
        held = self._held[slots]
        counts = self._counts[held]
        skipped = self._begins[held] - np.cumsum(counts) + counts
        place = np.arange(counts.sum()) + np.repeat(skipped, counts)
        return (
            np.repeat(slots, counts),
            self._rows[place] % self._file.per_block,
            self._order[place],
        )
