"""Many reads and writes of a file's blocks at once, by Linux's asynchronous I/O (``io_submit``).

It keeps hundreds of requests with the drive and takes neither threads nor a call of Python for each
block. It waits within `submit` for a file that is not open with ``O_DIRECT``. Containers often
forbid the newer io_uring.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placer.errors import BackendError

Array = NDArray[Any]

READ, WRITE = 0, 1  # As `io_submit` numbers them.
DEPTH = 256
"""Requests at once: drives want 32 to 128, and the others wait while earlier ones are checked."""

# Numbers of the system calls io_setup, io_destroy, io_submit and io_getevents.
_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
_REQUEST = np.dtype(  # struct iocb of linux/aio_abi.h.
    "<u8, <u8, <u2, <i2, <u4, <u8, <u8, <i8, <u8, <u8"
)
_REQUEST.names = (
    *("slot", "key", "operation", "priority", "file"),
    *("address", "bytes", "offset", "reserved", "flags"),
)
_EVENT = np.dtype([("slot", "<u8"), ("request", "<u8"), ("moved", "<i8"), ("more", "<i8")])


class BlockQueue:
    """Slots, each with the buffer of a block that is read or written; for one thread at a time.

    Attributes
    ----------
    buffers : array
        uint8 ``[DEPTH, block_bytes]``, of whole pages, as ``O_DIRECT`` asks.
    in_flight : int
        Requests that have not ended.
    """

    def __init__(self, file: int, block_bytes: int) -> None:
        memory = mmap.mmap(-1, DEPTH * block_bytes)
        self.buffers: Array = np.frombuffer(memory, np.uint8).reshape(DEPTH, block_bytes)
        self.in_flight = 0
        self._free = np.arange(DEPTH)
        self._requests = np.zeros(DEPTH, _REQUEST)
        self._requests["slot"] = np.arange(DEPTH)
        self._requests["file"] = file
        self._requests["bytes"] = block_bytes
        self._requests["address"] = self.buffers.ctypes.data + np.arange(DEPTH) * block_bytes
        self._places = self._requests.ctypes.data + np.arange(DEPTH) * _REQUEST.itemsize
        self._events = np.empty(DEPTH, _EVENT)
        self._context = ctypes.c_ulong()
        try:
            setup, destroy, self._submit, self._getevents = _CALLS[platform.machine()]
            _call(setup, DEPTH, ctypes.byref(self._context))
        except (KeyError, OSError) as error:
            raise BackendError(
                f"this system has no asynchronous I/O for us ({error}); raise fs.aio-max-nr "
                "(sysctl), or plan without drives"
            ) from error
        weakref.finalize(self, _destroy, destroy, self._context)

    def take(self, most: int) -> Array:
        """Return slots that are free, and reserve them."""
        slots, self._free = self._free[:most], self._free[most:]
        return slots

    def release(self, slots: Array) -> None:
        """Free slots."""
        self._free = np.concatenate((self._free, slots))

    def submit(self, operation: int, slots: Array, offsets: Array) -> None:
        """Begin to read or write the blocks at offsets of the file."""
        self._requests["operation"][slots] = operation
        self._requests["offset"][slots] = offsets
        places = self._places[slots]
        while places.size:
            begun = _call(self._submit, self._context, places.size, places.ctypes.data)
            self.in_flight += begun
            places = places[begun:]

    def wait(self) -> tuple[Array, Array]:
        """Wait for some requests: their slots, and of each the bytes moved or minus its errno."""
        least, place = (self.in_flight + 3) // 4, self._events.ctypes.data
        ended = self._events[: _call(self._getevents, self._context, least, DEPTH, place, None)]
        self.in_flight -= ended.size
        return ended["slot"].astype(np.int64), ended["moved"].copy()

    def drain(self) -> None:
        """Wait until no request uses a buffer, after an error too, and free all slots."""
        while self.in_flight:
            self.wait()
        self._free = np.arange(DEPTH)


_system = ctypes.CDLL(None, use_errno=True).syscall
_system.restype = ctypes.c_long


def _call(number: int, *values: Any) -> int:
    """Call the system, again when a signal comes in between; OSError if that fails."""
    longs = [ctypes.c_long(value) if isinstance(value, int) else value for value in values]
    while (result := _system(ctypes.c_long(number), *longs)) < 0:
        if (code := ctypes.get_errno()) != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return int(result)


def _destroy(number: int, context: ctypes.c_ulong) -> None:
    with contextlib.suppress(OSError):  # A forked process does not have it.
        _call(number, context)
