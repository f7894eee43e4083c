"""Cold rows on a drive: records of one size in a file, read and written in batches."""

import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import platform
import shutil
import tempfile
import threading
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

from placer.errors import PlacerError
from placer.units import format_bytes

Array = NDArray[Any]

READ, WRITE = 0, 1  # As `io_submit` numbers them.
DEPTH = 256
"""Requests of a queue. Drives work best with 32 to 128 at once, and two queues take turns."""

_SETUP, _DESTROY, _SUBMIT, _GETEVENTS = (  # System calls.
    (206, 207, 209, 208) if platform.machine() == "x86_64" else (0, 1, 2, 4)
)


class BlockQueue:
    """Up to `DEPTH` reads or writes of whole memory pages; for one thread at a time.

    Linux's asynchronous I/O (``io_submit``) keeps hundreds of requests at the drive without
    threads, and without a Python call per block. Without ``O_DIRECT``, requests run one after the
    other. Containers often forbid io_uring.
    """

    def __init__(self) -> None:
        # An iocb of linux/aio_abi.h: number, –, file and operation, address, bytes, offset, –, –.
        self._requests = np.zeros((DEPTH, 8), np.int64)
        self._requests[:, 0] = np.arange(DEPTH)
        self._places = self._requests.ctypes.data + np.arange(DEPTH) * self._requests.strides[0]
        self._events = np.empty((DEPTH, 4), np.int64)  # Number, place of the request, bytes, –.
        self._in_flight = 0
        context = ctypes.c_long()
        _call(_SETUP, DEPTH, ctypes.addressof(context))
        self._context = context.value
        weakref.finalize(self, _system, ctypes.c_long(_DESTROY), context)

    def submit(
        self, operation: int, file: int, block_bytes: int, addresses: Array, offsets: Array
    ) -> None:
        """Start reads or writes of blocks at offsets of a file."""
        requests, places = self._requests[: offsets.size], self._places[: offsets.size]
        requests[:, 2], requests[:, 3] = file << 32 | operation, addresses
        requests[:, 4], requests[:, 5] = block_bytes, offsets
        while places.size:
            begun = _call(_SUBMIT, self._context, places.size, places.ctypes.data)
            self._in_flight += begun
            places = places[begun:]

    def wait(self) -> Iterator[tuple[int, int]]:
        """Wait for all requests; yield the index and the bytes or -errno of failed ones."""
        while most := self._in_flight:
            place = self._events.ctypes.data
            count = _call(_GETEVENTS, self._context, most, most, place, 0)
            self._in_flight -= count
            ended = self._events[:count]
            failed = ended[ended[:, 2] != self._requests[ended[:, 0], 4]]
            yield from failed[:, (0, 2)].tolist()


_idle: dict[int, list[list[BlockQueue]]] = {}


@contextlib.contextmanager
def two_queues() -> Iterator[list[BlockQueue]]:
    """Lend two queues. All files of a process share queues, as the system has few."""
    idle = _idle.setdefault(os.getpid(), [])
    try:
        queues = idle.pop()
    except IndexError:  # Other threads use them all.
        queues = [BlockQueue(), BlockQueue()]
    try:
        yield queues
    finally:  # After an error, requests may still use memory.
        for queue in queues:
            list(queue.wait())
    idle.append(queues)


_system = ctypes.CDLL(None, use_errno=True).syscall
_system.restype = ctypes.c_long


def _call(*values: int) -> int:
    """Make a system call, and repeat it after signals; raise OSError if it fails."""
    while (result := _system(*map(ctypes.c_long, values))) < 0:
        if (code := ctypes.get_errno()) != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return int(result)


_PAGE_BYTES, _ZEROS_BYTES = 4096, 4 << 20
_CHECK_BYTES = 4
_MOST_BYTES, _MOST_SHARE = 256 << 20, 1 / 8
"""Limits of the cache: bytes, and share of a file's blocks. A row that is read for a batch is
written back when another row takes its cache entry, about ten batches later."""


class BlockFile:
    """A file without a name, with all its space reserved. It ends with its process.

    A block is the least multiple of 4 KiB that fits a record and a checksum, and has as many whole
    records as fit. Its last four bytes are a CRC-32 of the bytes before. The CRC starts with the
    block's number and the size of records, so it also detects blocks at a wrong place. A block of
    zeros was never written.
    """

    def __init__(self, folder: Path, rows: int, record_bytes: int) -> None:
        self.folder, self.rows, self.record_bytes = folder, rows, record_bytes
        self.block_bytes = -(-(record_bytes + _CHECK_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        self.per_block = (self.block_bytes - _CHECK_BYTES) // record_bytes
        self.descriptor = _open(folder)
        self.close = weakref.finalize(self, os.close, self.descriptor)
        size = max(1, -(-rows // self.per_block)) * self.block_bytes
        try:
            free = shutil.disk_usage(folder).free
            if free < size:  # Do not fill the disk by trying.
                raise OSError(errno.ENOSPC, f"{format_bytes(free)} are free")
            os.posix_fallocate(self.descriptor, 0, size)
        except OSError as error:
            raise PlacerError(
                f"cannot reserve {format_bytes(size)} in {folder}: {error.strerror}; free "
                "space, name a folder of another drive, or plan with fewer rows there"
            ) from error
        with contextlib.suppress(OSError):  # Some file systems lack direct I/O.
            flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        self._write_zeros(size)

    def _write_zeros(self, size: int) -> None:
        """Write zeros to all blocks in order.

        The first write to reserved space splits an extent of the file system. First writes at
        random places would give one extent per block: slow writes, and minutes to close the file.
        """
        zeros = memoryview(mmap.mmap(-1, _ZEROS_BYTES))
        done = 0
        try:
            while done < size:
                done += os.pwrite(self.descriptor, zeros[: size - done], done)
        except OSError as error:
            raise PlacerError(
                f"cannot write {self.folder}: {error.strerror}; name a folder of another drive"
            ) from error

    def checksums(self, content: Array, slots: Array, blocks: Array) -> Array:
        """Return the right checksums of the blocks in slots of `content`."""
        firsts = (blocks + (self.record_bytes << 16)) & 0xFFFFFFFF
        covered: list[Any] = [content[slot, :-_CHECK_BYTES] for slot in slots.tolist()]
        return np.array(list(map(zlib.crc32, covered, firsts.tolist())), np.uint32)

    def are_whole(self, content: Array, slots: Array, blocks: Array) -> Array:
        """Return whether each block is undamaged: its checksum is right, or it is unwritten."""
        whole: Array = content.view("<u4")[slots, -1] == self.checksums(content, slots, blocks)
        whole[~whole] = ~content[slots[~whole]].any(axis=1)
        return whole

    def failure(self, block: int, what: str) -> PlacerError:
        """Return an error that names a block and its rows."""
        first = block * self.per_block
        last = min(first + self.per_block, self.rows) - 1
        return PlacerError(
            f"block {block} of {self.folder} (rows {first} to {last}) {what}; check the drive "
            "(dmesg, smartctl), and continue from a checkpoint with a new file"
        )


def _open(folder: Path) -> int:
    """Make a folder if it is missing, and open a file without a name in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.dup(file.fileno())
    except OSError as error:
        raise PlacerError(f"cannot write {folder}: {error.strerror}; name another place") from error


class KeptBlocks:
    """Memory slots for blocks of a file, as they are on the drive; for one thread at a time.

    `blocks`, `block_bytes`: number and size of the file's blocks.

    `content`: uint8 ``[slots, block_bytes]``, of whole pages, as ``O_DIRECT`` requires.
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

        `passing`: blocks that are not kept. `which`, {0, 1}: set of slots for these blocks; later
        calls with this number reuse it.
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


class DriveRecords:
    """Records of one size in a file on a drive, for the rows of a shard in one process.

    Threads may call it at once; calls run one after the other.

    Raises PlacerError if the folder cannot be made, or the drive lacks space.

    `folder`: folder of the file, made if missing. The file has no name, so it always ends with the
    process. `rows`: number of records. All space is reserved at once, so a full drive fails here,
    not later.

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
        self._file = file = BlockFile(folder, rows, record_bytes)
        self._kept = KeptBlocks(-(-rows // file.per_block), file.block_bytes)
        self._lock = threading.Lock()

    def read(self, rows: Tensor) -> Tensor:
        """Read records, as uint8 ``[n, record_bytes]``; records never written are zeros.

        `rows`: int64 ``[n]`` on the CPU, in any order. Rows of one block need one read.
        """
        records = np.empty((rows.numel(), self._file.record_bytes), np.uint8)
        self._move(READ, rows, records)
        return torch.from_numpy(records)

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Write records.

        `rows`: distinct, int64 ``[n]`` on the CPU, in any order. A block with other rows too is
        read first, unless it is kept in memory. `records`: uint8 ``[n, record_bytes]`` on the CPU.
        """
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
