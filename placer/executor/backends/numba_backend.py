"""Kernels compiled by Numba for float32 arenas in host memory, and the threads that run them.

These threads sleep between kernels. A second OpenMP runtime's threads would spin and take cores
from PyTorch's threads.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from placer.executor.backends import numba_kernels as kernels
from placer.executor.backends.backend import Backend
from placer.executor.backends.torch_kernels import SegmentTable
from placer.executor.lookups.steps import ArenaStep
from placer.executor.memory.arena import Arena, TieredRows
from placer.executor.optimizers import Rule

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


_KINDS = {
    "sgd": kernels.SGD,
    "adagrad": kernels.ADAGRAD,
    "rowwise_adagrad": kernels.ROWWISE_ADAGRAD,
    "adam": kernels.ADAM,
}
_NONE = np.empty(0, np.float32)


class NumbaBackend(Backend):
    """Runs one compiled pass over an arena in each direction, on torch's number of threads.

    All rows are in host memory. PyTorch computes half-precision arenas.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.name = "numba"

    def translate(
        self, ids: Tensor, segments: SegmentTable, slot_map: Tensor, out: Tensor, fault: Tensor
    ) -> None:
        table = segments.table.numpy()
        starts = np.append(table[:, 1], out.numel())
        tables = ids.numpy(), slot_map.numpy(), table, starts, out.numpy()
        for place in run(partial(kernels.translate, *tables), thread_count(out.numel())):
            if place >= 0:
                segment = int(np.searchsorted(starts, place, side="right")) - 1
                fault.clamp_(max=place - int(starts[segment]) + int(table[segment, 0]))

    def pool(
        self, rows: TieredRows, places: Tensor, offsets: Tensor, weights: Tensor | None, out: Tensor
    ) -> None:
        if rows.hbm.dtype != torch.float32:
            super().pool(rows, places, offsets, weights, out)
            return
        kernel = partial(
            kernels.pool,
            rows.hbm.numpy(),
            places.numpy(),
            offsets.contiguous().numpy(),
            _NONE if weights is None else weights.numpy(),
            out.numpy(),
        )
        run(kernel, thread_count(places.numel()))

    def update(
        self,
        arena: Arena,
        step: ArenaStep,
        gradients: Tensor,
        weights: Tensor | None,
        rule: Rule,
    ) -> None:
        rows, reads = arena.weights.hbm, step.reads
        fits = kernels.sorts(len(rows), reads.lookups, reads.bags)
        if rows.dtype != torch.float32 or not fits:
            super().update(arena, step, gradients, weights, rule)
            return
        state = _NONE.reshape(0, 0)
        if arena.state is not None:
            state = arena.state.hbm.view(rows.shape[0], -1).numpy()
        kernel = partial(
            kernels.update,
            rows.numpy(),
            state,
            step.places.numpy(),
            reads.offsets.contiguous().numpy(),
            gradients.numpy(),
            _NONE if weights is None else weights.detach().contiguous().numpy(),
            _KINDS[rule.optimizer],
            # Subtract in float64, as 1 − float32(0.999) is wrong in its fifth digit.
            tuple(
                np.float32(value)
                for value in (float(rule.step_size()), rule.eps, 1 - rule.beta1, 1 - rule.beta2)
            ),
        )
        run(kernel, thread_count(reads.lookups))
