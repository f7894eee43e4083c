"""Threads that kernels without Python's lock run on.

They sleep between kernels. The threads of a second OpenMP runtime would spin, and take the cores
from PyTorch's.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

MIN_LOOKUPS = 4096
"""Lookups of a thread below which waking it costs more than it saves."""

Result = TypeVar("Result")


def thread_count(lookups: int) -> int:
    """Threads for a kernel over so many lookups: at most as many as torch may use."""
    return max(1, min(torch.get_num_threads(), lookups // MIN_LOOKUPS))


def run(kernel: Callable[[int, int], Result], threads: int) -> list[Result]:
    """Call ``kernel(thread, threads)`` for each thread at once; all results, in order."""
    if threads == 1:
        return [kernel(0, 1)]
    workers = _workers(threads - 1, os.getpid())
    others = [workers.submit(kernel, thread, threads) for thread in range(1, threads)]
    return [kernel(0, threads), *(other.result() for other in others)]


@lru_cache(maxsize=1)
def _workers(count: int, process: int) -> ThreadPoolExecutor:
    """The threads of a process: a fork does not inherit its parent's threads."""
    return ThreadPoolExecutor(count, thread_name_prefix=f"placer-{process}")
