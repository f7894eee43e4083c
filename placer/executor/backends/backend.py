"""The base class of all backends, itself a backend in plain PyTorch.

Before a step runs, its rows are located: ids become slots, staged and cached rows are copied to
entries in HBM, and every lookup gets the *place* of its row. Forward and update use places only. So
staging, caching and reading in place differ only here, and give bit-equal results.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from placer.executor import Policy
from placer.executor.backends import host_pooling
from placer.executor.backends.torch_kernels import (
    RowReads,
    SegmentTable,
    SliceReads,
    TorchKernels,
    in_one_piece,
    places_of,
)
from placer.executor.growing_keys import GrowingKeys
from placer.executor.local.hit_rates import LookupCounts
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import ArenaReads, Faults, FeatureRead, keep_until_used
from placer.executor.lookups.steps import ArenaStep, Moved, Runs, Ticket, Window
from placer.executor.memory.arena import Arena, allocate
from placer.executor.memory.layout import ArenaSpec
from placer.executor.memory.row_cache import Moves, RowCache
from placer.executor.optimizers import Rule
from placer.executor.streams import phase, recorded
from placer.growing import Growing
from placer.tables import Table

_MOVING = threading.Lock()
"""Held while rows move: several threads may look rows up, as those of a server do. All backends
share it, as a backend with a lock of its own could not be copied."""
_SEGMENT_TABLES = 16
"""Number of batch shapes whose segment tables are cached."""


class Backend(TorchKernels):
    """Reads and updates one arena at a time. Results of backends differ by rounding only.

    All backends are deterministic: sums run in the order of the lookups, on any number of threads.
    This class is plain PyTorch, and other backends override some of its methods.

    Arrays of lookups are freed as early as possible, so the peak of memory is where staged and
    cached rows get entries. Rows are copied on a separate stream, because the link limits copies
    and HBM limits other work. So a batch's rows are found while the last batch's rows are copied.

    - `policy`, {"lfu", "rank"}: which cached rows are evicted first.
    - `host`: the backend that pools rows of lookup kind ``host`` on the CPU. None if all rows are
      in host memory and are read in place.
    """

    def __init__(
        self, device: torch.device, policy: Policy = "lfu", host: "Backend | None" = None
    ) -> None:
        self.name = "torch" if host is None else "tiered"
        self.in_one_memory = host is None
        # Whether `sliced_update` gives Σ g² for each lookup. With tiers, the host does not know the
        # number of rows. Ranks with column slices of the same rows must do the same.
        self.sums_by_lookup = host is not None
        # Whether steps over rows in HBM never wait for the device. Then CUDA graphs can run them.
        self.can_be_captured = False
        # Whether something other than a prepared step may have read or written rows. If so, finding
        # a batch on another stream first waits for that.
        self.is_written = True
        self.counts = LookupCounts(device)  # Nothing is counted if all rows are in one memory.
        self._host = host or self
        self._device, self._policy = device, policy
        self.window = Window()  # The open steps, whose backward passes may still come.
        self.faults = Faults(device)
        # Batches of one shape share segment tables, to avoid copies to the device.
        self._segment_table = lru_cache(_SEGMENT_TABLES)(partial(SegmentTable.of, device))
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # High priority, as the copies need few programs, which must keep the link busy.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def allocate(self, spec: ArenaSpec, drive: Path | None = None) -> Arena:
        """Allocate zeroed memory for an arena; `drive` is the folder for rows on a drive."""
        return allocate(spec, self._device, None if self.in_one_memory else self._policy, drive)

    def key_maps(
        self, growing: Mapping[str, Growing], tables: Mapping[str, Table], seed: int | None
    ) -> GrowingKeys:
        """Return the key maps of tables that grow."""
        return GrowingKeys(growing, tables, seed)

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Make later copies of rows wait for the work queued on `stream` now."""
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

        `fault` is lowered to the position of the first bad id. If the caller passes it, the caller
        must also call `faults.watch`.

        Raises DataError if an id is no row of its table. On a GPU a later call raises, to avoid
        waiting.
        """
        found = self.faults.new() if fault is None else fault
        with phase("map"):
            slots = [
                self._slots(batch.ids, arena.spec, read, found)
                for arena, read in zip(arenas, reads, strict=True)
            ]
            if fault is None:
                self.faults.watch(found, batch, features)
        if self.in_one_memory:
            return tuple(map(ArenaStep, reads, slots, slots))
        with _MOVING:
            ticket = self.window.open()
            self.counts.begin()
            return tuple(
                self._located(index, arena, read, slots, ticket, training)
                for index, (arena, read) in enumerate(zip(arenas, reads, strict=True))
            )

    def forward(self, arena: Arena, step: ArenaStep, weights: Tensor | None) -> Tensor:
        """Return the weighted sum of each bag's rows: float32, shape (bags, width)."""
        shape = step.reads.bags, arena.spec.key.width
        out = torch.empty(shape, dtype=torch.float32, device=self._device)
        step.wait_for_rows(self._device)
        if step.reads.bags:
            scales = None if weights is None else weights.detach().contiguous()
            self.pool(arena.weights, step.places, step.reads.offsets, scales, out)
        if step.host is not None:
            host_pooling.add_sums(self._host, arena, step.host, weights, out)
        return out

    def join(self, arena: Arena, gradients: Sequence[Tensor]) -> Tensor:
        """Join the gradients of an arena's segments to those of its bags: float32, (bags, width).

        Gradients that are contiguous in memory are not copied.
        """
        whole = in_one_piece(gradients)
        if whole is not None:
            return whole
        # One kernel for all segments, not one each.
        none = torch.empty((0, arena.spec.key.width), dtype=torch.float32, device=self._device)
        return torch.cat([none, *gradients])

    def update(
        self,
        arena: Arena,
        step: ArenaStep,
        gradients: Tensor,
        weights: Tensor | None,
        rule: Rule,
    ) -> None:
        """Sum the gradients of each row and apply the rule to it once.

        `gradients` are those of the bags: float32, shape (bags, width), contiguous.
        """
        runs, places = step.runs, step.run_places
        if runs is None or places is None:
            runs, places = self.runs_and_places(arena.spec, step.places)
        scales = None if weights is None else weights.detach().index_select(0, runs.order)
        sources = self.sorted_bags(step.reads, runs) if step.sources is None else step.sources
        row_reads = RowReads(runs, places, sources, scales, gradients)
        self.update_rows(arena.weights, arena.state, row_reads, rule)
        if step.host is not None:
            host_pooling.update(self._host, arena, step.host, gradients, weights, rule)

    def sorted_bags(self, reads: ArenaReads, runs: Runs) -> Tensor:
        """Return the bag of each lookup in the order of the runs, int32."""
        return self.bags_of_lookups(reads).index_select(0, runs.order)

    def sliced_update(
        self, column_slices: Sequence[SliceReads]
    ) -> tuple[list[tuple[Arena, RowReads, Rule]], Tensor]:
        """Sum the gradients of a table with several column slices, before its update.

        With row-wise Adagrad the state grows by mean(g²) over the whole row, so `update_rows` must
        wait for the sums of all column slices. The same lookups read every column slice, so they
        are sorted once.

        Return the arguments of `update_rows` for each column slice; and Σ g² of each row's summed
        gradient over these column slices, in the order of slots: float32, shape (runs,), or
        (lookups,) if `sums_by_lookup`.
        """
        runs = self.find_runs(column_slices[0].of(column_slices[0].step.slots))
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
            own = torch.zeros(runs.lookups, dtype=torch.float32, device=self._device)
            self.squares(row_reads, own)
            if self.sums_by_lookup:  # Add at once, to keep at most two tensors.
                parts = [parts[0].add_(own)] if parts else [own]
            else:
                parts.append(own[: int(runs.count)])
        squares = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        return updates, squares

    def weight_gradients(self, arena: Arena, step: ArenaStep, gradients: Tensor) -> Tensor:
        """Return gradients of lookups' weights, row · gradient of the bag: shape (lookups,)."""
        out = torch.empty(step.reads.lookups, dtype=torch.float32, device=self._device)
        self.dot_rows(arena.weights, step.places, self.bags_of_lookups(step.reads), gradients, out)
        if step.host is not None:
            host_pooling.add_weight_gradients(self._host, arena, step.host, gradients, out)
        return out

    def finish(self, steps: Sequence[ArenaStep]) -> None:
        """End a step after its update, or if it gets none."""
        with _MOVING:
            for step in steps:
                if step.ticket is not None:
                    self.window.close(step.ticket)

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
                        *segment.columns.follows,
                        segment.columns.map_start,
                    )
                    for segment in reads.segments
                )
            )
            self.translate(ids.contiguous(), table, spec.slot_map, slots, fault)
        return slots

    def _located(
        self,
        index: int,
        arena: Arena,
        reads: ArenaReads,
        all_slots: list[Tensor],
        ticket: Ticket,
        training: bool,
    ) -> ArenaStep:
        """Find the places of an arena's lookups, and copy staged and cached rows to HBM."""
        spec, slots = arena.spec, all_slots[index]
        self.counts.add(slots, spec, reads, arena.row_cache)
        host = runs = run_places = None
        if spec.host_start < spec.rows and reads.lookups:
            host = host_pooling.reads(slots, reads.offsets, spec.host_start)
        # The update of rows with several column slices sorts their lookups by slot.
        kept = slots if spec.key.splits_rows else slots.new_empty(0)
        if arena.row_cache is not None and reads.lookups:
            del slots
            places, runs, run_places, moved = self.stage(
                index, arena, arena.row_cache, all_slots, ticket, training
            )
            return ArenaStep(reads, places, kept, ticket, runs, run_places, host, moved)
        if training and not spec.key.splits_rows:
            runs, run_places = self.runs_and_places(spec, slots)
        return ArenaStep(reads, places_of(spec, 0, slots), kept, ticket, runs, run_places, host)

    def runs_and_places(self, spec: ArenaSpec, slots: Tensor) -> tuple[Runs, Tensor]:
        """Group lookups by row; return runs and the place of each row, without a row cache."""
        runs = self.find_runs(slots)
        distinct = slots.index_select(0, runs.order.index_select(0, runs.firsts))
        return runs, distinct if self.in_one_memory else places_of(spec, 0, distinct)

    def stage(
        self,
        index: int,
        arena: Arena,
        row_cache: RowCache,
        all_slots: list[Tensor],
        ticket: Ticket,
        training: bool,
    ) -> tuple[Tensor, Runs, Tensor, Moved]:
        """Give entries of the arena's row cache to staged and cached rows.

        Rows that another open step reads in place get no entry. That step will update the row in
        host memory, so a copy made before would be outdated. `all_slots` has the slots by arena.
        Those of this arena may be removed, to free memory.

        Return places of lookups, the lookups grouped by row, places of rows, and `ArenaStep.moved`.
        """
        spec, home, slots = arena.spec, arena.spec.home, all_slots[index]
        runs = self.find_runs(slots)
        with phase("stage"):
            distinct = slots.index_select(0, runs.order.index_select(0, runs.firsts))
            lookups = runs.starts.diff()
            bounds = torch.tensor([0, home, spec.cache_ranges[-1].stop], device=slots.device)
            edges = torch.searchsorted(distinct, bounds.to(distinct.dtype))
            nobodys, first, last = edges.tolist()
            self.counts.home += lookups[nobodys:first].sum()
            rows = distinct[first:last]
            others, oldest = self.window.others(spec, ticket), self.window.oldest
            barred = torch.isin(rows, torch.cat([rows[:0], *others]))
            counts, number = lookups[first:last], ticket.number
            entries, moves = row_cache.resolve(rows, counts, number, oldest, barred)
            moved = self._move(arena, moves)
            ticket.resolved[spec] = rows[entries < 0]
            if arena.store is not None:
                arena.store.is_read_in_place = self.window.reads_store(spec, ticket, entries)
            if training:
                row_cache.mark_dirty(entries)
            run_places = places_of(spec, row_cache.entries, distinct)
            cold = run_places[first:last]
            cold.copy_(torch.where(entries >= 0, entries.to(cold.dtype) + home, cold))
            spread = run_places.repeat_interleave(lookups, output_size=slots.numel())
            places = torch.zeros_like(slots).index_add_(0, runs.order, spread)
        return places, runs, run_places, moved

    def _move(self, arena: Arena, moves: Moves) -> Moved:
        """Start to move rows; return what completes when they are moved."""
        matrices = [rows for rows in (arena.weights, arena.state) if rows is not None]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            keep_until_used(moves, self._stream)
        if arena.store is not None:
            move = partial(host_pooling.exchange_records, arena.store, matrices, moves)
            return arena.store.start(partial(self._moved, move))
        with phase("write-back"):  # One kernel uses both directions of the link.
            return self._moved(partial(self.exchange, matrices, moves))

    def _moved(self, move: Callable[[], None]) -> torch.cuda.Event | None:
        """Move rows on their stream; return an event that completes after that."""
        if self._stream is None:
            move()
            return None
        with torch.cuda.stream(self._stream):
            move()
            return recorded()
