"""Host memory: for arenas of exactly the requested bytes, in huge pages, and readable by a GPU;
and for temporary arrays that is used again, step after step."""

import contextlib
import ctypes
import functools
import math
import mmap
import platform
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from placer.errors import BackendError, CapacityError

HUGE_PAGE_BYTES = 2 << 20
"""Smaller arenas fit the cache with ordinary pages."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_MOST = (1 << 31) - 1


def host_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeroed memory of the host, which `device` can address.

    Parameters
    ----------
    shape : tuple of int
    dtype : torch.dtype
    device : torch.device
        Who reads it. For a GPU the memory is locked, registered with CUDA until nobody holds
        the tensor any more, and has all its pages; else pages come with the first write.

    Returns
    -------
    Tensor
        On the CPU. From `HUGE_PAGE_BYTES` on it is a mapping of its own, not a byte longer
        than requested: torch's allocator of pinned memory rounds 20.4 GiB up to 32. In huge pages
        where the system has them: rows are read at random, and with small pages nearly each
        of them misses the TLB too.
    """
    size = math.prod(shape) * dtype.itemsize
    on_gpu = device.type == "cuda"
    if size < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, pin_memory=on_gpu)
    block = _map(size)
    rows = torch.frombuffer(block, dtype=dtype).view(shape)
    if on_gpu:
        # Registering needs every page, and asks for them on one core, which zeroes them one
        # by one. Torch writes with all its threads; that also spreads pages over NUMA nodes.
        rows.zero_()
        _register(block, device)
    return rows


def _map(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return bytes of an anonymous mapping, which ends with the array."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CapacityError(
            f"the host gives no {size:,} bytes of memory ({error}); plan with less dram"
        ) from error
    with contextlib.suppress(OSError):  # A kernel without huge pages; the memory is as good.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def _register(block: np.ndarray[tuple[int], np.dtype[np.uint8]], device: torch.device) -> None:
    """Lock a mapping's pages and let CUDA address them for as long as the array lives."""
    address = block.ctypes.data
    runtime = _runtime()
    with torch.cuda.device(device):
        error = runtime.cudaHostRegister(address, block.nbytes, 0)
    if error != runtime.cudaError.success:
        raise BackendError(
            f"CUDA registers no {block.nbytes:,} bytes of host memory "
            f"({runtime.cudaGetErrorString(error)}); allow more locked memory (ulimit -l), or plan "
            "with less dram"
        )
    # Tied to the array, not to the mapping behind it: an mmap runs such callbacks only after
    # it has returned its pages. A process that ends needs none.
    weakref.finalize(block, _unregister, address, device).atexit = False


def _unregister(address: int, device: torch.device) -> None:
    # Kernels that were launched with the bare address may still be reading.
    torch.cuda.synchronize(device)
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process use memory again that it has freed, however large the arrays were.

    By default glibc asks the system again for each array of more than 32 MiB, and gives the pages
    back with the array (M_MMAP_THRESHOLD in mallopt(3)). A page that is new has to be zeroed and
    mapped, which takes longer than to write what a step writes into it. In exchange the process
    keeps the most memory that it ever had. `placer train` and `placer calibrate` call it; a
    trainer that runs the executor on a CPU may, before its first step.

    Returns
    -------
    bool
        Whether the allocator can be set so: it is glibc's.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _MOST))
