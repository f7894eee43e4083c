"""Plain PyTorch on the host: runs wherever torch does."""

from collections.abc import Sequence

import torch
from torch import Tensor

from placer.executor.backends.base import Backend, SlicedUpdate, SliceReads
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import ArenaReads, ArenaStep, FeatureRead, check_ids
from placer.executor.memory.arena import Arena, FlatRows, flat_arena
from placer.executor.memory.layout import ArenaSpec
from placer.executor.optimizers.rule import Rule, apply_rule, row_sums, runs
from placer.executor.phases import phase


class TorchBackend(Backend):
    """`torch.nn.functional.embedding_bag` both ways, over flat arenas in host memory.

    Both tiers are the same memory there, so every row is read in place.
    """

    name = "torch"

    def allocate(self, spec: ArenaSpec) -> Arena:
        return flat_arena(spec)

    def prepare(
        self,
        arenas: Sequence[Arena],
        batch: BagBatch,
        features: Sequence[FeatureRead],
        reads: Sequence[ArenaReads],
        training: bool,
    ) -> tuple[ArenaStep, ...]:
        with phase("map"):
            return tuple(
                ArenaStep(read, self._translate(batch.ids, features, arena.spec, read))
                for arena, read in zip(arenas, reads, strict=True)
            )

    def forward(self, arena: Arena, step: ArenaStep, weights: Tensor | None) -> Tensor:
        rows = _flat(arena)
        if rows.data.dtype == torch.float32:
            table, index = rows.data, step.slots
        else:
            slots, index = torch.unique(step.slots, return_inverse=True)
            table = rows.read(slots).float()
        return torch.nn.functional.embedding_bag(
            index,
            table,
            step.reads.offsets,
            mode="sum",
            per_sample_weights=weights,
            include_last_offset=True,
        )

    def update(
        self,
        arena: Arena,
        step: ArenaStep,
        gradients: Tensor,
        weights: Tensor | None,
        rule: Rule,
    ) -> None:
        with phase("sort"):
            order, slots, starts = runs(step.slots)
        sources = step.reads.sources()[order]
        sorted_weights = None if weights is None else weights[order]
        sums = row_sums(gradients, sources, sorted_weights, starts)
        apply_rule(rule, arena.weights, arena.state, slots, sums)

    def sliced_update(self, column_slices: Sequence[Sequence[SliceReads]]) -> SlicedUpdate:
        with phase("sort"):
            order, _, starts = runs(torch.cat([reads.slots for reads in column_slices[0]]))
        sums = []
        for columns in column_slices:
            sources = torch.cat([reads.sources for reads in columns])[order]
            weights = None
            if columns[0].weights is not None:
                weights = torch.cat(
                    [reads.weights for reads in columns if reads.weights is not None]
                )
                weights = weights[order]
            sums.append(row_sums(columns[0].gradients, sources, weights, starts))
        slots = [
            torch.cat([reads.slots for reads in columns])[order][starts]
            for columns in column_slices
        ]
        return _SlicedUpdate([columns[0] for columns in column_slices], slots, sums)

    def weight_gradients(self, arena: Arena, step: ArenaStep, gradients: Tensor) -> Tensor:
        rows = _flat(arena).read(step.slots).float()
        return (rows * gradients.index_select(0, step.reads.sources())).sum(1)

    def _translate(
        self, ids: Tensor, features: Sequence[FeatureRead], arena: ArenaSpec, reads: ArenaReads
    ) -> Tensor:
        """Slots, int64, of an arena's lookups.

        Raises
        ------
        DataError
            If an id is no row of its table.
        """
        slots = [ids[:0].long()]
        for segment in reads.segments:
            part = ids[slice(*segment.batch)]
            check_ids(part, features[segment.feature])
            slots.append(segment.columns.slots_of(part))
        return torch.cat(slots)


class _SlicedUpdate:
    """See `SlicedUpdate`; holds the rows and summed gradients of each column slice."""

    def __init__(
        self, column_slices: Sequence[SliceReads], slots: Sequence[Tensor], sums: Sequence[Tensor]
    ) -> None:
        self._column_slices, self._slots, self._sums = column_slices, slots, sums
        self.squares = torch.stack([(part * part).sum(1) for part in sums]).sum(0)

    def apply(self, mean_squares: Tensor) -> None:
        """Update the rows of all column slices."""
        for columns, slots, sums in zip(self._column_slices, self._slots, self._sums, strict=True):
            arena = columns.arena
            apply_rule(columns.rule, arena.weights, arena.state, slots, sums, mean_squares)


def _flat(arena: Arena) -> FlatRows:
    assert isinstance(arena.weights, FlatRows), "arenas of this backend are flat"
    return arena.weights
