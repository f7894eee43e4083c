"""Kernels compiled by Numba for float32 arenas in host memory."""

from collections.abc import Sequence
from dataclasses import astuple
from functools import partial

import numpy as np
import torch
from torch import Tensor

from placer.executor.backends import numba_kernels as kernels
from placer.executor.backends.threads import run, thread_count
from placer.executor.backends.torch_backend import TorchBackend
from placer.executor.lookups.batch_reads import ArenaReads, ArenaStep, FeatureRead, check_ids
from placer.executor.memory.arena import Arena, FlatRows
from placer.executor.memory.layout import ArenaSpec
from placer.executor.optimizers.rule import Rule

_KINDS = {
    "sgd": kernels.SGD,
    "adagrad": kernels.ADAGRAD,
    "rowwise_adagrad": kernels.ROWWISE_ADAGRAD,
    "adam": kernels.ADAM,
}
_NONE = np.empty(0, np.float32)


class NumbaBackend(TorchBackend):
    """One compiled pass over all tables of an arena each way, on as many threads as torch has.

    Half-precision arenas are left to PyTorch.
    """

    name = "numba"

    def _translate(
        self, ids: Tensor, features: Sequence[FeatureRead], arena: ArenaSpec, reads: ArenaReads
    ) -> Tensor:
        segments = reads.segments
        starts = np.array([0, *(segment.lookups[1] for segment in segments)])
        out = torch.empty(int(starts[-1]), dtype=torch.int64)
        if not out.numel():
            return out
        column_slices = [segment.columns for segment in segments]
        tables = (
            ids.contiguous().numpy(),
            arena.slot_map.numpy(),
            np.array([segment.batch[0] for segment in segments]),
            starts,
            np.array([columns.rows for columns in column_slices]),
            np.array([astuple(columns.follows) for columns in column_slices]),
            np.array([columns.map_start for columns in column_slices]),
            out.numpy(),
        )
        for place in run(partial(kernels.translate, *tables), thread_count(out.numel())):
            if place >= 0:
                segment = segments[int(np.searchsorted(starts, place, side="right")) - 1]
                check_ids(ids[slice(*segment.batch)], features[segment.feature])
        return out

    def forward(self, arena: Arena, step: ArenaStep, weights: Tensor | None) -> Tensor:
        rows = _float_rows(arena)
        if rows is None or not step.reads.bags:
            return super().forward(arena, step, weights)
        out = torch.empty((step.reads.bags, rows.shape[1]))
        kernel = partial(
            kernels.pool,
            rows.numpy(),
            step.slots.numpy(),
            step.reads.offsets.contiguous().numpy(),
            _NONE if weights is None else weights.detach().contiguous().numpy(),
            out.numpy(),
        )
        run(kernel, thread_count(step.slots.numel()))
        return out

    def join(self, arena: Arena, step: ArenaStep, gradients: Sequence[Tensor]) -> Tensor:
        joined = torch.empty((step.reads.bags, arena.spec.key.width))
        target = joined.numpy()
        parts = [gradient.numpy() for gradient in gradients]

        def copy(thread: int, threads: int) -> None:
            # NumPy copies without Python's lock.
            for index in range(thread, len(parts), threads):
                target[slice(*step.reads.segments[index].bags)] = parts[index]

        run(copy, thread_count(step.slots.numel()))
        return joined

    def update(
        self,
        arena: Arena,
        step: ArenaStep,
        gradients: Tensor,
        weights: Tensor | None,
        rule: Rule,
    ) -> None:
        rows = _float_rows(arena)
        if rows is None or not kernels.sorts(len(rows), step.reads.lookups, step.reads.bags):
            super().update(arena, step, gradients, weights, rule)
            return
        state = _NONE.reshape(0, 0)
        if isinstance(arena.state, FlatRows):
            state = arena.state.data.view(rows.shape[0], -1).numpy()
        kernel = partial(
            kernels.update,
            rows.numpy(),
            state,
            step.slots.numpy(),
            step.reads.offsets.contiguous().numpy(),
            gradients.numpy(),
            _NONE if weights is None else weights.detach().contiguous().numpy(),
            _KINDS[rule.optimizer],
            # The differences in double: 1 − float32(0.999) is off in its fifth digit.
            tuple(
                np.float32(value)
                for value in (float(rule.step_size()), rule.eps, 1 - rule.beta1, 1 - rule.beta2)
            ),
        )
        run(kernel, thread_count(step.slots.numel()))


def _float_rows(arena: Arena) -> Tensor | None:
    """The arena's matrix, where the kernels can work on it."""
    rows = arena.weights
    if isinstance(rows, FlatRows) and rows.data.dtype == torch.float32:
        return rows.data
    return None
