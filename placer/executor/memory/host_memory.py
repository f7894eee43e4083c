"""Allocate host memory for arenas, in huge pages and readable by a GPU; and let the allocator reuse
the memory of temporary arrays."""

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
"""Use ordinary pages for smaller arenas, which fit into the CPU's cache."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_MOST = (1 << 31) - 1


def host_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeroed host memory that `device` can address.

    For a GPU, all pages are locked and registered with CUDA until the tensor is freed. Otherwise
    pages are allocated at the first write.

    From `HUGE_PAGE_BYTES` on it is a separate mapping of exactly the requested size, as torch's
    allocator of pinned memory rounds 20.4 GiB up to 32. It uses huge pages if the system has them,
    as random reads of rows in small pages nearly always miss the TLB.
    """
    size = math.prod(shape) * dtype.itemsize
    on_gpu = device.type == "cuda"
    if size < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, pin_memory=on_gpu)
    block = _map(size)
    rows = torch.frombuffer(block, dtype=dtype).view(shape)
    if on_gpu:
        # Registering would allocate and zero all pages on one core. Torch zeroes them with all its
        # threads, which also spreads pages over NUMA nodes.
        rows.zero_()
        _register(block, device)
    return rows


def _map(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bytes of an anonymous mapping, which is freed with the array."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise CapacityError(
            f"the host gives no {size:,} bytes of memory ({error}); plan with less dram"
        ) from error
    with contextlib.suppress(OSError):  # The kernel has no huge pages: use others.
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
    # The callback belongs to the array, as an mmap would call it only after it has freed its pages.
    # At exit it is not needed.
    weakref.finalize(block, _unregister, address, device).atexit = False


def _unregister(address: int, device: torch.device) -> None:
    # Kernels with the raw address may still be reading.
    torch.cuda.synchronize(device)
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process reuse the memory of freed arrays of any size.

    By default, glibc requests new pages for each array of more than 32 MiB, and frees them with the
    array (M_MMAP_THRESHOLD in mallopt(3)). Zeroing and mapping a new page takes longer than a
    step's writes to it. In exchange, the process keeps its peak memory.

    Return whether it worked: it needs glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _MOST))
