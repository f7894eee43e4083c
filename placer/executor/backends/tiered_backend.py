"""A backend whose tiers have memory of their own: what a GPU needs.

A step's rows are located before it runs: ids become slots, rows that are staged or cached are
copied to entries in HBM, and every lookup gets the *place* where its row then is. Forward
and update see places alone, so that staging, caching and reading in place differ in nothing
but what happens here, and results are bit-equal between them.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from placer.executor.backends.base import Backend, SlicedUpdate, SliceReads
from placer.executor.backends.faults import Faults
from placer.executor.backends.host_pooling import HostPooling
from placer.executor.backends.tier_kernels import RowReads, SegmentTable, TierKernels
from placer.executor.local.hit_rates import LookupCounts
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import ArenaReads, ArenaStep, FeatureRead, Segment
from placer.executor.lookups.row_runs import Runs, find_runs
from placer.executor.memory.access import Access, Ticket, Window
from placer.executor.memory.arena import Arena, tiered_arena
from placer.executor.memory.layout import ArenaSpec
from placer.executor.memory.row_cache import RowCache
from placer.executor.memory.tiers import TieredRows
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
    """

    def __init__(
        self, kernels: TierKernels, host: Backend, device: torch.device, policy: Policy
    ) -> None:
        self.name = kernels.name
        self.counts = LookupCounts(device)
        self._kernels, self._device, self._policy = kernels, device, policy
        self._host = HostPooling(host)
        self._window = Window()
        self._faults = Faults(device)
        self._tables: dict[tuple[tuple[int, ...], ...], SegmentTable] = {}
        self._edges: dict[ArenaSpec, Tensor] = {}

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
        return tuple(
            ArenaStep(read, slot, self._access(index, arena, read, slot, ticket, training))
            for index, (arena, read, slot) in enumerate(zip(arenas, reads, slots, strict=True))
        )

    def forward(self, arena: Arena, step: ArenaStep, weights: Tensor | None) -> Tensor:
        out = torch.empty((step.reads.bags, arena.spec.key.width), device=self._device)
        access = access_of(step)
        if step.reads.bags:
            rows = _tiered(arena.weights)
            scales = None if weights is None else weights.detach().contiguous()
            self._kernels.pool(rows, access.places, step.reads.offsets, scales, out)
        if access.host is not None:
            out.add_(self._host.forward(arena, access.host, weights))
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
        scales = None if weights is None else weights.detach()[runs.order]
        sources = step.reads.sources().to(torch.int32)[runs.order]
        row_reads = RowReads(runs, run_places, sources, scales, gradients)
        state = None if arena.state is None else _tiered(arena.state)
        self._kernels.update(_tiered(arena.weights), state, row_reads, rule)
        if access.host is not None:
            self._host.update(arena, access.host, gradients, weights, rule)

    def sliced_update(self, column_slices: Sequence[Sequence[SliceReads]]) -> SlicedUpdate:
        runs = self._sort(torch.cat([reads.slots for reads in column_slices[0]]))
        first = _first_of(runs)
        squares = torch.zeros(runs.lookups, device=self._device)
        reads: list[tuple[Arena, RowReads, Rule]] = []
        for columns in column_slices:
            places = torch.cat([access_of(part.step).places[part.lookups] for part in columns])
            sources = torch.cat([part.sources for part in columns])[runs.order]
            scales = None
            if columns[0].weights is not None:
                scales = torch.cat([part.weights for part in columns if part.weights is not None])
                scales = scales.detach()[runs.order]
            places = places[runs.order[first]]
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
        rows = _tiered(arena.weights)
        self._kernels.weight_gradients(rows, access.places, sources, gradients, out)
        if access.host is not None:
            out.add_(self._host.weight_gradients(arena, access.host, gradients))
        return out

    def finish(self, steps: Sequence[ArenaStep]) -> None:
        for step in steps:
            access_of(step).ticket.close()

    def _translate(self, ids: Tensor, spec: ArenaSpec, reads: ArenaReads, fault: Tensor) -> Tensor:
        kind = torch.int32 if spec.rows < 2**31 else torch.int64
        slots = torch.empty(reads.lookups, dtype=kind, device=self._device)
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

    def _sort(self, slots: Tensor) -> Runs:
        with phase("sort"):
            return find_runs(slots)

    def _access(
        self,
        index: int,
        arena: Arena,
        reads: ArenaReads,
        slots: Tensor,
        ticket: Ticket,
        training: bool,
    ) -> Access:
        """Find where the rows of an arena's lookups are, and copy staged and cached ones to HBM."""
        spec, row_cache = arena.spec, arena.row_cache
        self.counts.add(slots, spec)
        host = None
        if spec.host_start < spec.rows and reads.lookups:
            host = self._host.reads(slots, reads.offsets)
        runs = run_places = None
        if (training and not spec.key.splits_rows) or row_cache is not None:
            runs = self._sort(slots)
            run_slots = runs.slots[_first_of(runs)]
            run_places = _places(spec, row_cache, run_slots)
        if row_cache is None or runs is None or run_places is None or not reads.lookups:
            return Access(ticket, _places(spec, row_cache, slots), runs, run_places, host)
        with phase("stage"):
            run_places = self._stage(index, arena, row_cache, runs, run_places, ticket, training)
        places = torch.empty_like(run_places)
        places[runs.order] = run_places[runs.run]
        return Access(ticket, places, runs, run_places, host)

    def _stage(
        self,
        index: int,
        arena: Arena,
        row_cache: RowCache,
        runs: Runs,
        run_places: Tensor,
        ticket: Ticket,
        training: bool,
    ) -> Tensor:
        """Give staged and cached rows entries of the row cache; the place of each run."""
        home, stop = arena.spec.home, arena.spec.cache_shares[-1].part.stop
        kind, lookups = runs.slots.dtype, runs.lookups
        # Runs are in the order of slots, so the pooled ones are neighbours.
        edges = torch.searchsorted(runs.slots, self._edges_of(arena.spec).to(kind))
        first, last = torch.where(
            edges < lookups, runs.run[edges.clamp(max=lookups - 1)], runs.count
        ).unbind()
        most = min(lookups, stop - home)
        index_of = first + torch.arange(most, device=self._device)
        valid = index_of < last
        index_of.clamp_(max=lookups - 1)
        starts = runs.starts[index_of]
        own = runs.slots[starts.clamp(max=lookups - 1)]
        slots = torch.where(valid, own, torch.iinfo(kind).max)
        counts = torch.where(valid, runs.starts[index_of + 1] - starts, 0)
        del starts, own, index_of
        barred = self._window.in_place(index, slots, ticket)
        resolution = row_cache.resolve(slots, counts, ticket.number, self._window.oldest, barred)
        ticket.resolved[index] = (slots, resolution.entries)
        with phase("write-back"):  # One kernel moves rows both ways, for a link has two lanes.
            self._kernels.exchange(_matrices(arena), resolution.moves)
        if training:
            row_cache.mark_dirty(resolution.entries)
        # Runs that are not pooled all write behind the end.
        index_of = first + torch.arange(most, device=self._device)
        target = torch.where(valid & (resolution.entries >= 0), index_of, lookups)
        places = torch.nn.functional.pad(run_places, (0, 1))
        return places.scatter_(0, target, (resolution.entries + home).to(places.dtype))[:lookups]

    def _edges_of(self, spec: ArenaSpec) -> Tensor:
        """First pooled slot and the end of them, on the device."""
        edges = self._edges.get(spec)
        if edges is None:
            edges = torch.tensor([spec.home, spec.cache_shares[-1].part.stop], device=self._device)
            self._edges[spec] = edges
        return edges


@dataclass(slots=True, eq=False)
class _SlicedUpdate:
    """See `SlicedUpdate`; holds what each column slice's kernel sums."""

    kernels: TierKernels
    column_slices: Sequence[tuple[Arena, RowReads, Rule]]
    squares: Tensor

    def apply(self, mean_squares: Tensor) -> None:
        """Update the rows of all column slices."""
        for arena, reads, rule in self.column_slices:
            state = None if arena.state is None else _tiered(arena.state)
            self.kernels.update(_tiered(arena.weights), state, reads, rule, mean_squares)


def access_of(step: ArenaStep) -> Access:
    """Where `prepare` located the rows of an arena's step."""
    assert step.access is not None, "steps of this backend have it"
    return step.access


def _tiered(rows: object) -> TieredRows:
    assert isinstance(rows, TieredRows), "arenas of this backend are in tiers"
    return rows


def _matrices(arena: Arena) -> list[TieredRows]:
    return [_tiered(rows) for rows in (arena.weights, arena.state) if rows is not None]


def _first_of(runs: Runs) -> Tensor:
    """Sorted position of each run's first lookup, shape (lookups,); beyond the runs, any."""
    return runs.starts[: runs.lookups].clamp(max=max(runs.lookups - 1, 0)).long()


def _places(spec: ArenaSpec, row_cache: RowCache | None, slots: Tensor) -> Tensor:
    """Places of slots whose rows are not in the row cache; −1 for those that the host pools."""
    entries = 0 if row_cache is None else row_cache.entries
    places = torch.where(slots < spec.home, slots, slots + entries)
    if spec.host_start == spec.rows:
        return places
    return torch.where(slots < spec.host_start, places, -1)
