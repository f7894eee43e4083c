"""Threads: how many a step is worth, and those that kernels without Python's lock run on.

The latter sleep between kernels. The threads of a second OpenMP runtime would spin, and take the
cores from PyTorch's.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeVar

import torch

MIN_LOOKUPS = 4096
"""Lookups of a thread below which waking it costs more than it saves."""

STEP_S_PER_THREAD = 0.1
"""Work of a step for which one more thread pays, in seconds of one core.

Measured on two cores: of steps of 5 ms and 30 ms (1,024 and 8,192 samples through layers of 64 and
32) two threads took 3.3 times the processor time of one, as PyTorch's wait by spinning, of 0.2 s
1.4 times, of 1.5 s 1.2 times. Beside other processes two were up to five times as slow.
"""

Result = TypeVar("Result")


def threads_for(step_s: float) -> int:
    """Threads that a step of so much work keeps busy: at most those that torch may use.

    >>> threads_for(0.02)
    1
    """
    return max(1, min(torch.get_num_threads(), int(step_s / STEP_S_PER_THREAD)))


@contextmanager
def using_threads(threads: int) -> Iterator[None]:
    """Compute on so many threads, and then on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
    """Return the threads of a process: a fork does not inherit its parent's threads."""
    return ThreadPoolExecutor(count, thread_name_prefix=f"placer-{process}")
