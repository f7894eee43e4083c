"""Temporary arrays in memory that is used again, step after step."""

import ctypes
import functools
import platform

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_MOST = (1 << 31) - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process use memory again that it has freed, however large the arrays were.

    By default glibc asks the system anew for each array of more than 32 MiB, and gives the pages
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
