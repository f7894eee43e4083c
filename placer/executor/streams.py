"""Copy tensors between host and device, track CUDA work, name parts of a step, and run threads.

The threads sleep between kernels. A second OpenMP runtime's threads would spin and take cores from
PyTorch's threads.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

Phase = Literal["map", "sort", "stage", "forward", "backward", "update", "write-back"]
"""The parts of a step: ``map`` turns ids into slots, ``sort`` orders the lookups by row, ``stage``
copies cold rows to HBM, ``write-back`` copies them back, ``forward`` pools rows, ``backward``
collects the gradients of pooled rows, and ``update`` applies the optimizer."""

PHASE_PREFIX = "placer: "


def phase(name: Phase) -> AbstractContextManager[object]:
    """Return a context that a running `torch.profiler.profile` records under this name.

    Without a profiler the context does nothing, as a record takes longer than a kernel launch.
    """
    if _profiler_enabled():
        return record_function(PHASE_PREFIX + name)
    return nullcontext()


def recorded() -> torch.cuda.Event:
    """Return an event that completes once all work queued on the current stream so far is done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def start_copy(tensor: Tensor) -> Tensor:
    """Start a copy to pinned host memory; it is complete once the current stream reaches it."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to a device without waiting for the copy."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def on_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host's memory, and wait for the copy.

    The copy is in pinned memory: to other memory a GPU copies at a few percent of its link's rate.
    """
    if tensor.device.type != "cuda":
        return tensor
    copy = start_copy(tensor)
    recorded().synchronize()
    return copy


def indexed(device: torch.device) -> torch.device:
    """Return the device with its index, as tensors report it: ``cuda`` becomes ``cuda:0``."""
    if str(device) == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


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
