"""A file of blocks of records with checksums."""

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from placer.errors import PlacerError
from placer.executor.cold.block_queue import Array
from placer.units import format_bytes

_PAGE_BYTES, _ZEROS_BYTES = 4096, 4 << 20
_CHECK_BYTES = 4


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
