"""Read and write many blocks of a file at once with Linux's asynchronous I/O (``io_submit``).

It keeps hundreds of requests at the drive without threads, and without a Python call per block.
Without ``O_DIRECT``, requests run one after the other. Containers often forbid io_uring.
"""

import ctypes
import errno
import os
import platform
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

READ, WRITE = 0, 1  # As `io_submit` numbers them.
DEPTH = 256
"""Requests of a queue. Drives work best with 32 to 128 at once, and two queues take turns."""

_SETUP, _DESTROY, _SUBMIT, _GETEVENTS = (  # System calls.
    (206, 207, 209, 208) if platform.machine() == "x86_64" else (0, 1, 2, 4)
)


class BlockQueue:
    """Up to `DEPTH` reads or writes of whole memory pages; for one thread at a time."""

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


@contextmanager
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
