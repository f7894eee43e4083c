"""What a backend does in a step, and what all of them share: plain PyTorch in two memories.

A step's rows are located before it runs: ids become slots, rows that are staged or cached are
copied to entries in HBM, and every lookup gets the *place* where its row then is. Forward
and update see places alone, so that staging, caching and reading in place differ in nothing
but what happens here, and results are bit-equal between them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from placer.executor.backends.cold_rows import exchange_records, note_in_place
from placer.executor.backends.faults import Faults
from placer.executor.backends.host_pooling import HostPooling
from placer.executor.backends.sliced_update import SlicedUpdate, SliceReads
from placer.executor.backends.torch_kernels import (
    RowReads,
    SegmentTable,
    TorchKernels,
    in_one_piece,
    places_of,
)
from placer.executor.growing_keys import GrowingKeys
from placer.executor.local.hit_rates import LookupCounts
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import ArenaReads, FeatureRead, keep_until_used
from placer.executor.lookups.row_runs import Runs, SortedSlots
from placer.executor.lookups.steps import ArenaStep, Moved, Resolved, Ticket, Window
from placer.executor.memory.arena import Arena, allocate
from placer.executor.memory.directory import Moves
from placer.executor.memory.layout import ArenaSpec
from placer.executor.memory.row_cache import RowCache
from placer.executor.names import Policy
from placer.executor.optimizers.rule import Rule
from placer.executor.phases import phase
from placer.executor.streams import recorded
from placer.growing import Growing
from placer.tables import Table

_SEGMENT_TABLES = 16
"""So many shapes of batches are remembered."""


class Backend(TorchKernels):
    """Reads and updates one arena at a time. Results do not depend on it but for rounding.

    All backends are deterministic: sums run in the order of the lookups, on any number of threads.
    This one is plain PyTorch, and others override what they compute in another way.

    Nowhere does preparing a step take more memory than where staged and cached rows get entries:
    arrays of its lookups are let go of as soon as they can be. Rows move on a stream of their
    own. They are bound by the link, and all else here by HBM: rows of one batch can be found
    while those of the one before it are under way.

    Parameters
    ----------
    device : torch.device
    policy : {"lfu", "rank"}
        Which cached rows are evicted first.
    host : Backend or None
        What the CPU pools with, for rows whose lookup is ``host``. None where all rows are in the
        host's memory and are read in place, whatever their lookup.

    Attributes
    ----------
    name : str
    in_one_memory : bool
    can_be_captured : bool
        Whether steps over rows in HBM wait for nothing, so that they can be CUDA graphs.
    is_written : bool
        Whether rows may have been read or written by others than prepared steps, so that a batch
        that is found on another stream waits for them.
    counts : LookupCounts
        Nothing is counted where all rows are in one memory.
    """

    def __init__(
        self, device: torch.device, policy: Policy = "lfu", host: "Backend | None" = None
    ) -> None:
        self.name = "torch" if host is None else "tiered"
        self.in_one_memory = host is None
        self.can_be_captured = False
        self.is_written = True
        self.counts = LookupCounts(device)
        self._host = HostPooling(host or self)
        self._device, self._policy = device, policy
        self._window = Window()
        self._faults = Faults(device)
        # Batches of one shape share their segment tables, which are on the device already.
        self._segment_table = lru_cache(_SEGMENT_TABLES)(partial(SegmentTable.of, device))
        self._edges: dict[ArenaSpec, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # First: a few programs take what the others leave, and keep the link busy.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def allocate(self, spec: ArenaSpec, drive: Path | None = None) -> Arena:
        """Return zeroed memory for an arena; `drive` is the folder of rows on a drive."""
        return allocate(spec, self._device, None if self.in_one_memory else self._policy, drive)

    def key_maps(
        self, growing: Mapping[str, Growing], tables: Mapping[str, Table], seed: int | None
    ) -> GrowingKeys:
        """Return the key maps of tables that grow."""
        return GrowingKeys(growing, tables, seed)

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Let rows move only once what is queued on a stream is done."""
        if self._stream is not None:
            self._stream.wait_stream(stream)

    def prepare(
        self,
        arenas: Sequence[Arena],
        batch: BagBatch,
        features: Sequence[FeatureRead],
        reads: Sequence[ArenaReads],
        training: bool,
        fault: Tensor | None = None,
    ) -> tuple[ArenaStep, ...]:
        """Find a batch's rows; `training` says that a backward pass may follow.

        `fault` is lowered to the place of the first bad id; with it, the caller has it watched.

        Raises
        ------
        DataError
            If an id is no row of its table. A device is not waited for: a later call
            raises for its faults.
        """
        found = self.new_fault() if fault is None else fault
        with phase("map"):
            slots = [
                self._slots(batch.ids, arena.spec, read, found)
                for arena, read in zip(arenas, reads, strict=True)
            ]
            if fault is None:
                self.watch(found, batch, features)
        if self.in_one_memory:
            return tuple(map(ArenaStep, reads, slots))
        ticket = self._window.open()
        self.counts.begin()
        return tuple(
            self._located(index, arena, read, slots, ticket, training)
            for index, (arena, read) in enumerate(zip(arenas, reads, strict=True))
        )

    def new_fault(self) -> Tensor:
        """Return int64, shape (1,), above all places of a batch."""
        return self._faults.new()

    def watch(self, fault: Tensor, batch: BagBatch, features: Sequence[FeatureRead]) -> None:
        """Raise for a batch's bad ids, if it had any: now on a CPU, at a later batch on a GPU."""
        self._faults.poll()
        self._faults.watch(fault, batch, features)

    def forward(self, arena: Arena, step: ArenaStep, weights: Tensor | None) -> Tensor:
        """Sum of each bag's rows, each times its weight: float32, shape (bags, width)."""
        out = torch.empty((step.reads.bags, arena.spec.key.width), device=self._device)
        step.wait_for_rows(self._device)
        if step.reads.bags:
            scales = None if weights is None else weights.detach().contiguous()
            self.pool(arena.weights, step.places, step.reads.offsets, scales, out)
        if step.host is not None:
            self._host.forward(arena, step.host, weights, out)
        return out

    def join(self, arena: Arena, gradients: Sequence[Tensor]) -> Tensor:
        """Return gradients of an arena's bags from its segments': float32, (bags, width).

        No copy is made of those that lie one after the other, as those of rows that were joined do.
        """
        whole = in_one_piece(gradients)
        if whole is not None:
            return whole
        # One kernel, where a copy for each segment would start as many.
        return torch.cat([torch.empty((0, arena.spec.key.width), device=self._device), *gradients])

    def update(
        self,
        arena: Arena,
        step: ArenaStep,
        gradients: Tensor,
        weights: Tensor | None,
        rule: Rule,
    ) -> None:
        """Sum the gradients of each row and apply the rule once to it.

        `gradients` are of the bags: float32, shape (bags, width), contiguous.
        """
        runs, places = step.runs, step.run_places
        if runs is None or places is None:
            runs, ordered = self._sort(step.places)
            places = ordered.slots.index_select(0, runs.firsts)
        scales = None if weights is None else weights.detach().index_select(0, runs.order)
        sources = self.sorted_bags(step.reads, runs) if step.sources is None else step.sources
        row_reads = RowReads(runs, places, sources, scales, gradients)
        self.update_rows(arena.weights, arena.state, row_reads, rule)
        if step.host is not None:
            self._host.update(arena, step.host, gradients, weights, rule)

    def sorted_bags(self, reads: ArenaReads, runs: Runs) -> Tensor:
        """Return the bag of each lookup in the order of the runs, int32."""
        return self.bags_of_lookups(reads).index_select(0, runs.order)

    def sliced_update(self, column_slices: Sequence[SliceReads]) -> SlicedUpdate:
        """Row-wise Adagrad of one table whose rows are spread over several column slices.

        The state grows by mean(g²) over the whole row, so all column slices are summed before one
        is updated. The same lookups read every column slice, hence the order of one serves all.
        """
        runs, _ = self._sort(column_slices[0].of(column_slices[0].step.slots))
        first = runs.order.index_select(0, runs.firsts)
        parts: list[Tensor] = []
        updates: list[tuple[Arena, RowReads, Rule]] = []
        for reads in column_slices:
            places = reads.of(reads.step.places).index_select(0, first)
            sources, scales = reads.of(reads.sources)[runs.order], None
            if reads.weights is not None:
                scales = reads.of(reads.weights).detach()[runs.order]
            row_reads = RowReads(runs, places, sources, scales, reads.gradients)
            updates.append((reads.arena, row_reads, reads.rule))
            own = torch.zeros(runs.lookups, device=self._device)
            self.squares(row_reads, own)
            if self.in_one_memory:
                parts.append(own[: int(runs.count)])
            else:  # A device holds two of them at most.
                parts = [parts[0].add_(own)] if parts else [own]
        squares = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        return SlicedUpdate(self, updates, squares)

    def weight_gradients(self, arena: Arena, step: ArenaStep, gradients: Tensor) -> Tensor:
        """Gradient of each lookup's weight, its row · its bag's gradient: shape (lookups,)."""
        out = torch.empty(step.reads.lookups, device=self._device)
        self.dot_rows(arena.weights, step.places, self.bags_of_lookups(step.reads), gradients, out)
        if step.host is not None:
            self._host.weight_gradients(arena, step.host, gradients, out)
        return out

    def open_step(self) -> Ticket:
        """Return the ticket of a step whose rows have been found without `prepare`."""
        return self._window.open()

    def is_open(self, ticket: Ticket | None) -> bool:
        """Return whether a step's backward pass may still come."""
        return self._window.is_open(ticket)

    def finish(self, steps: Sequence[ArenaStep]) -> None:
        """The rows of a step have been updated, or will not be."""
        for step in steps:
            if step.ticket is not None:
                self._window.close(step.ticket)

    def _slots(self, ids: Tensor, spec: ArenaSpec, reads: ArenaReads, fault: Tensor) -> Tensor:
        kind = torch.int64 if self.in_one_memory else spec.kind
        slots = torch.empty(reads.lookups, dtype=kind, device=self._device)
        if reads.lookups:
            table = self._segment_table(
                tuple(
                    (
                        segment.batch[0],
                        segment.lookups[0],
                        segment.lookups[1] - segment.lookups[0],
                        segment.columns.rows,
                        segment.columns.follows.near,
                        segment.columns.follows.edge,
                        segment.columns.follows.far,
                        segment.columns.map_start,
                    )
                    for segment in reads.segments
                )
            )
            self.translate(ids.contiguous(), table, spec.slot_map, slots, fault)
        return slots

    def _sort(self, slots: Tensor) -> tuple[Runs, SortedSlots]:
        with phase("sort"):
            return self.find_runs(slots)

    def _located(
        self,
        index: int,
        arena: Arena,
        reads: ArenaReads,
        all_slots: list[Tensor],
        ticket: Ticket,
        training: bool,
    ) -> ArenaStep:
        """Find where the rows of an arena's lookups are, and copy staged and cached ones to HBM.

        `all_slots` are by arena; those of one with a row cache are taken out.
        """
        spec, slots = arena.spec, all_slots[index]
        self.counts.add(slots, spec, reads, arena.row_cache)
        host = runs = run_places = None
        if spec.host_start < spec.rows and reads.lookups:
            host = self._host.reads(slots, reads.offsets, spec.host_start)
        # Where rows have several column slices, the lookups of their tables are sorted by slot.
        kept = slots if spec.key.splits_rows else slots.new_empty(0)
        if arena.row_cache is not None and reads.lookups:
            del slots
            places, runs, run_places, moved = self.stage(
                index, arena, arena.row_cache, all_slots, ticket, training
            )
            return ArenaStep(reads, places, kept, ticket, runs, run_places, host, moved)
        if training and not spec.key.splits_rows:
            runs, ordered = self._sort(slots)
            run_places = self.places_of_runs(spec, 0, runs, ordered)
            del ordered
        return ArenaStep(reads, places_of(spec, 0, slots), kept, ticket, runs, run_places, host)

    def stage(
        self,
        index: int,
        arena: Arena,
        row_cache: RowCache,
        all_slots: list[Tensor],
        ticket: Ticket,
        training: bool,
    ) -> tuple[Tensor, Runs, Tensor, Moved]:
        """Give staged and cached rows entries of the arena's row cache.

        Its slots are taken out of `all_slots`, which are by arena.

        Returns
        -------
        The place of each lookup; the lookups by row; the place of each row; and when the rows have
        moved there, where that takes time.
        """
        home = arena.spec.home
        runs, ordered = self._sort(all_slots[index])
        all_slots[index] = all_slots[index].new_empty(0)
        with phase("stage"):
            resolved = self._cold_runs(arena.spec, row_cache, runs, ordered)
            slots, counts = self.slots_and_counts(resolved, runs, ordered)
            run_of = ordered.run
            del ordered
            others, oldest = self._window.others(arena.spec, ticket), self._window.oldest
            found = self.resolve(
                row_cache, home, resolved, slots, counts, others, ticket.number, oldest
            )
            del slots, counts
            moved = self._move(arena, found.moves)
            entries = found.entries
            del found
            note_in_place(arena, resolved, entries, ticket, self._window)
            ticket.resolved[arena.spec] = resolved
            self.move_to_entries(resolved, entries, row_cache, home, training)
            del entries
            places = self.places_of_lookups(runs, run_of, resolved.run_places)
        return places, runs, resolved.run_places, moved

    def _cold_runs(
        self, spec: ArenaSpec, row_cache: RowCache, runs: Runs, ordered: SortedSlots
    ) -> Resolved:
        """Return which runs are of staged and cached rows, with places outside the row cache."""
        first, last = self.edges_of_cold_runs(spec, runs, ordered)
        run_places = self.places_of_runs(spec, row_cache.entries, runs, ordered)
        most = min(runs.lookups, spec.cache_ranges[-1].stop - spec.home)
        return Resolved(run_places, first, last, most)

    def edges_of_cold_runs(
        self, spec: ArenaSpec, runs: Runs, ordered: SortedSlots
    ) -> tuple[Tensor, Tensor]:
        """Return the first run of staged and cached rows and the run behind the last, int32, 0-d.

        Lookups of the arena's rows in HBM, which come before them, are counted.
        """
        edges = self._edges.get(spec)  # On the device already.
        if edges is None:
            bounds = [0, spec.home, spec.cache_ranges[-1].stop]
            edges = self._edges[spec] = torch.tensor(bounds, device=self._device)
        # Runs are in the order of slots, so those of staged and cached rows are neighbours.
        edges = torch.searchsorted(ordered.slots, edges.to(ordered.slots.dtype))
        self.counts.home += edges[1] - edges[0]
        run_of_edge = ordered.run.index_select(0, edges[1:].clamp(max=runs.lookups - 1))
        first, last = torch.where(edges[1:] < runs.lookups, run_of_edge, runs.count).unbind()
        return first, last

    def _move(self, arena: Arena, moves: Moves) -> Moved:
        """Start to move rows; when they have moved."""
        matrices = [rows for rows in (arena.weights, arena.state) if rows is not None]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            keep_until_used(moves, self._stream)
        if arena.store is not None:
            move = partial(exchange_records, arena.store, matrices, moves)
            return arena.store.start(partial(self._moved, move))
        with phase("write-back"):  # One kernel moves rows both ways, for a link has two lanes.
            return self._moved(partial(self.exchange, matrices, moves))

    def _moved(self, move: Callable[[], None]) -> torch.cuda.Event | None:
        """Move rows on their stream; when they have moved."""
        if self._stream is None:
            move()
            return None
        with torch.cuda.stream(self._stream):
            move()
            return recorded()
