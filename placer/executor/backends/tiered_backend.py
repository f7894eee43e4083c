"""A backend whose tiers have memory of their own: what a GPU needs.

A step's rows are located before it runs: ids become slots, rows that are staged or cached are
copied to entries in HBM, and every lookup gets the *place* where its row then is. Forward
and update see places alone, so that staging, caching and reading in place differ in nothing
but what happens here, and results are bit-equal between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from placer.executor.backends.base import Backend, SlicedUpdate, SliceReads
from placer.executor.backends.faults import Faults
from placer.executor.backends.host_pooling import HostPooling
from placer.executor.backends.staging import Staging, places_of, tiered_rows
from placer.executor.backends.tier_kernels import RowReads, SegmentTable, TierKernels
from placer.executor.local.hit_rates import LookupCounts
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import ArenaReads, ArenaStep, FeatureRead, Segment
from placer.executor.lookups.row_runs import Runs, SortedSlots, find_runs
from placer.executor.memory.access import Access, Ticket, Window
from placer.executor.memory.arena import Arena, tiered_arena
from placer.executor.memory.layout import ArenaSpec
from placer.executor.names import Policy
from placer.executor.optimizers.rule import Rule
from placer.executor.phases import phase

_SEGMENT_TABLES = 16
"""Batches of one shape share their segment tables; so many shapes are remembered."""


class TieredBackend(Backend):
    """HBM and DRAM apart, over one set of kernels.

    Parameters
    ----------
    kernels : TierKernels
    host : Backend
        What the CPU pools with, for rows whose lookup is ``host``.
    device : torch.device
    policy : {"lfu", "rank"}
        Which cached rows are evicted first.
    staging : callable
        What makes the `Staging` of these kernels.
    """

    def __init__(
        self,
        kernels: TierKernels,
        host: Backend,
        device: torch.device,
        policy: Policy,
        staging: Callable[[Any, Window, torch.device], Staging],
    ) -> None:
        self.name = kernels.name
        self.counts = LookupCounts(device)
        self._kernels, self._device, self._policy = kernels, device, policy
        self._host = HostPooling(host)
        self._window = Window()
        self._faults = Faults(device)
        self._tables: dict[tuple[tuple[int, ...], ...], SegmentTable] = {}
        self._staging = staging(kernels, self._window, device)

    def allocate(self, spec: ArenaSpec) -> Arena:
        return tiered_arena(spec, self._device, self._policy)

    def prepare(
        self,
        arenas: Sequence[Arena],
        batch: BagBatch,
        features: Sequence[FeatureRead],
        reads: Sequence[ArenaReads],
        training: bool,
    ) -> tuple[ArenaStep, ...]:
        self._faults.poll()
        with phase("map"):
            fault = self._faults.new()
            slots = [
                self._translate(batch.ids, arena.spec, read, fault)
                for arena, read in zip(arenas, reads, strict=True)
            ]
            self._faults.watch(fault, batch, features)
        ticket = self._window.open()
        self.counts.begin()
        steps = []
        for index, (arena, read) in enumerate(zip(arenas, reads, strict=True)):
            # Kept by update alone, where rows have several column slices.
            kept = slots[index] if arena.spec.key.splits_rows else slots[index].new_empty(0)
            access = self._access(index, arena, read, slots, ticket, training)
            steps.append(ArenaStep(read, kept, access))
        return tuple(steps)

    def forward(self, arena: Arena, step: ArenaStep, weights: Tensor | None) -> Tensor:
        out = torch.empty((step.reads.bags, arena.spec.key.width), device=self._device)
        access = access_of(step)
        if access.moved is not None:
            torch.cuda.current_stream(self._device).wait_event(access.moved)
        if step.reads.bags:
            rows = tiered_rows(arena.weights)
            scales = None if weights is None else weights.detach().contiguous()
            self._kernels.pool(rows, access.places, step.reads.offsets, scales, out)
        if access.host is not None:
            self._host.forward(arena, access.host, weights, out)
        return out

    def update(
        self,
        arena: Arena,
        step: ArenaStep,
        gradients: Tensor,
        weights: Tensor | None,
        rule: Rule,
    ) -> None:
        access = access_of(step)
        runs, run_places = access.runs, access.run_places
        assert runs is not None and run_places is not None, "the step was prepared for training"  # noqa: PT018
        scales = None if weights is None else weights.detach().index_select(0, runs.order)
        sources = step.reads.sources().index_select(0, runs.order)
        row_reads = RowReads(runs, run_places, sources, scales, gradients)
        state = None if arena.state is None else tiered_rows(arena.state)
        self._kernels.update(tiered_rows(arena.weights), state, row_reads, rule)
        if access.host is not None:
            self._host.update(arena, access.host, gradients, weights, rule)

    def sliced_update(self, column_slices: Sequence[Sequence[SliceReads]]) -> SlicedUpdate:
        runs, _ = self._sort(torch.cat([reads.slots for reads in column_slices[0]]))
        first = runs.order.index_select(0, runs.firsts)
        squares = torch.zeros(runs.lookups, device=self._device)
        reads: list[tuple[Arena, RowReads, Rule]] = []
        for columns in column_slices:
            places = torch.cat([access_of(part.step).places[part.lookups] for part in columns])
            sources = torch.cat([part.sources for part in columns])[runs.order]
            scales = None
            if columns[0].weights is not None:
                scales = torch.cat([part.weights for part in columns if part.weights is not None])
                scales = scales.detach()[runs.order]
            places = places.index_select(0, first)
            row_reads = RowReads(runs, places, sources, scales, columns[0].gradients)
            reads.append((columns[0].arena, row_reads, columns[0].rule))
            part_squares = torch.zeros_like(squares)
            self._kernels.squares(row_reads, part_squares)
            squares += part_squares
        return _SlicedUpdate(self._kernels, reads, squares)

    def weight_gradients(self, arena: Arena, step: ArenaStep, gradients: Tensor) -> Tensor:
        out = torch.empty(step.reads.lookups, device=self._device)
        access = access_of(step)
        sources = step.reads.sources()
        rows = tiered_rows(arena.weights)
        self._kernels.weight_gradients(rows, access.places, sources, gradients, out)
        if access.host is not None:
            self._host.weight_gradients(arena, access.host, gradients, out)
        return out

    def finish(self, steps: Sequence[ArenaStep]) -> None:
        for step in steps:
            access_of(step).ticket.close()

    def _translate(self, ids: Tensor, spec: ArenaSpec, reads: ArenaReads, fault: Tensor) -> Tensor:
        slots = torch.empty(reads.lookups, dtype=spec.kind, device=self._device)
        if reads.lookups:
            table = self._segment_table(reads.segments)
            self._kernels.translate(ids.contiguous(), table, spec.slot_map, slots, fault)
        return slots

    def _segment_table(self, segments: Sequence[Segment]) -> SegmentTable:
        """Batches of one shape have the same table, which is then on the device already."""
        rows = tuple(
            (
                segment.batch[0],
                segment.lookups[0],
                segment.lookups[1] - segment.lookups[0],
                segment.columns.rows,
                *astuple(segment.columns.follows),
                segment.columns.map_start,
            )
            for segment in segments
        )
        table = self._tables.pop(rows, None)
        if table is None:
            data = torch.tensor(rows)
            if self._device.type == "cuda":
                data = data.pin_memory().to(self._device, non_blocking=True)
            longest = max(row[2] for row in rows)
            table = SegmentTable(data, longest, segments[-1].lookups[1])
        self._tables[rows] = table  # Now the most recently used.
        if len(self._tables) > _SEGMENT_TABLES:
            del self._tables[next(iter(self._tables))]
        return table

    def _sort(self, slots: Tensor) -> tuple[Runs, SortedSlots]:
        with phase("sort"):
            return find_runs(slots)

    def _access(
        self,
        index: int,
        arena: Arena,
        reads: ArenaReads,
        all_slots: list[Tensor],
        ticket: Ticket,
        training: bool,
    ) -> Access:
        """Find where the rows of an arena's lookups are, and copy staged and cached ones to HBM.

        `all_slots` are by arena.
        """
        spec = arena.spec
        self.counts.add(all_slots[index], spec, reads, arena.row_cache)
        host = runs = run_places = None
        if spec.host_start < spec.rows and reads.lookups:
            host = self._host.reads(all_slots[index], reads.offsets, spec.host_start)
        if arena.row_cache is not None and reads.lookups:
            return self._staging.stage(index, arena, all_slots, ticket, training, host)
        if training and not spec.key.splits_rows:
            runs, ordered = self._sort(all_slots[index])
            run_places = places_of(spec, 0, ordered.slots.index_select(0, runs.firsts))
            del ordered
        return Access(ticket, places_of(spec, 0, all_slots[index]), runs, run_places, host)


@dataclass(slots=True, eq=False)
class _SlicedUpdate:
    """See `SlicedUpdate`; holds what each column slice's kernel sums."""

    kernels: TierKernels
    column_slices: Sequence[tuple[Arena, RowReads, Rule]]
    squares: Tensor

    def apply(self, mean_squares: Tensor) -> None:
        """Update the rows of all column slices."""
        for arena, reads, rule in self.column_slices:
            state = None if arena.state is None else tiered_rows(arena.state)
            self.kernels.update(tiered_rows(arena.weights), state, reads, rule, mean_squares)


def access_of(step: ArenaStep) -> Access:
    """Where `prepare` located the rows of an arena's step."""
    assert step.access is not None, "steps of this backend have it"
    return step.access
