"""How many threads a step is worth, and the threads that compiled kernels run on.

These threads sleep between kernels. Those of a second OpenMP runtime would spin and take cores
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
"""Fewer lookups than this do not pay for waking a thread."""

STEP_S_PER_THREAD = 0.1
"""Work of a step, in seconds of one core, for which one more thread pays.

Measured on two cores, as PyTorch's threads wait by spinning: for steps of 5 and 30 ms two threads
took 3.3 times the processor time of one, for 0.2 s 1.4 times, for 1.5 s 1.2 times. Beside other
processes two threads were up to five times as slow as one.
"""

Result = TypeVar("Result")


def threads_for(step_s: float) -> int:
    """Return how many threads `step_s` seconds of work keep busy, at most those of torch.

    >>> threads_for(0.02)
    1
    """
    return max(1, min(torch.get_num_threads(), int(step_s / STEP_S_PER_THREAD)))


@contextmanager
def using_threads(threads: int) -> Iterator[None]:
    """Compute on `threads` threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def thread_count(lookups: int) -> int:
    """Return the threads for a kernel over so many lookups, at most those of torch."""
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
