"""Choose the number of threads for a step, and run compiled kernels on threads.

These threads sleep between kernels. A second OpenMP runtime's threads would spin and take cores
from PyTorch's threads.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import TypeVar

import torch

MIN_LOOKUPS = 4096
"""Least lookups of a thread: with fewer, waking it costs more than it gains."""

STEP_S_PER_THREAD = 0.1
"""Seconds of work per step, on one core, for each thread.

PyTorch's threads wait by spinning. Measured on two cores, two threads took 3.3 times the processor
time of one thread in steps of 5 and 30 ms, 1.4 times in 0.2 s, and 1.2 times in 1.5 s. Beside other
processes, two threads were up to five times as slow as one.
"""

Result = TypeVar("Result")


def threads_for(step_s: float) -> int:
    """Return the number of threads for `step_s` seconds of work, at most torch's number.

    >>> threads_for(0.02)
    1
    """
    return max(1, min(torch.get_num_threads(), int(step_s / STEP_S_PER_THREAD)))


@contextmanager
def using_threads(threads: int) -> Iterator[None]:
    """Set torch's number of threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def thread_count(lookups: int) -> int:
    """Return the number of threads for a kernel over `lookups`, at most torch's number."""
    return max(1, min(torch.get_num_threads(), lookups // MIN_LOOKUPS))


def run(kernel: Callable[[int, int], Result], threads: int) -> list[Result]:
    """Call ``kernel(thread, threads)`` on all threads at once; return the results in order."""
    if threads == 1:
        return [kernel(0, 1)]
    workers = _workers(threads - 1, os.getpid())
    others = [workers.submit(kernel, thread, threads) for thread in range(1, threads)]
    return [kernel(0, threads), *(other.result() for other in others)]


@lru_cache(maxsize=1)
def _workers(count: int, process: int) -> ThreadPoolExecutor:
    """Return a process's threads. `process` is in the key, as forks do not inherit threads."""
    return ThreadPoolExecutor(count, thread_name_prefix=f"placer-{process}")
