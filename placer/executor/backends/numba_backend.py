"""Kernels compiled by Numba for float32 arenas in host memory."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from placer.executor.backends import numba_kernels as kernels
from placer.executor.backends.backend import Backend
from placer.executor.backends.torch_kernels import SegmentTable
from placer.executor.lookups.steps import ArenaStep
from placer.executor.memory.arena import Arena, TieredRows
from placer.executor.optimizers import Rule
from placer.executor.streams import run, thread_count

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
