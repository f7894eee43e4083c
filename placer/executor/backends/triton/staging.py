# mypy: disable-error-code="no-untyped-call, type-arg"
"""Launch Triton kernels, compiled or interpreted, and manage row caches with them.

No call waits for the device. If only the device knows the amount of work, a fixed number of
programs share it. So the host knows the size of every launch, and CUDA graphs can capture a step.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from placer.errors import BackendError
from placer.executor import Policy
from placer.executor.backends.backend import Backend
from placer.executor.backends.triton import cache_kernels, lookup_kernels
from placer.executor.lookups.steps import CHUNK, Moved, Runs, Ticket
from placer.executor.memory.arena import Arena
from placer.executor.memory.layout import ArenaSpec
from placer.executor.memory.row_cache import IN_PLACE, WRITTEN_BACK, Moves, RowCache
from placer.executor.streams import phase

RESIDENT_WARPS = 32
"""Warps per multiprocessor, if a fixed number of programs shares the work."""

BLOCK, BLOCK_WARPS = 1024, 4
"""Elements of a program, such as ids to translate, and its number of warps."""


@dataclass(frozen=True, slots=True, eq=False)
class Resolved:
    """The staged and cached rows of a step: a contiguous part of its runs."""

    run_places: Tensor  # Int32 or int64, shape (lookups,): the place of each run.
    # Int32, shape (): the runs ``first..last`` have staged and cached rows.
    first: Tensor
    last: Tensor
    most: int  # Largest possible number of these runs.


class TritonStaging(Backend):
    """The part of the Triton backend that launches kernels and manages row caches."""

    def __init__(
        self, device: torch.device, policy: Policy = "lfu", host: Backend | None = None
    ) -> None:
        super().__init__(device, policy, host)
        self.name = "triton"
        compiled = isinstance(lookup_kernels.pool, triton.JITFunction)
        if device.type == "cpu" and compiled:
            raise BackendError(
                "backend 'triton' on device 'cpu' needs Triton's interpreter: "
                "set TRITON_INTERPRET=1 before Python starts"
            )
        self._multiprocessors = 0
        self.can_be_captured = device.type == "cuda"
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._multiprocessors = properties.multi_processor_count

    def each(self, kernel: object, size: int, *arguments: object, **options: object) -> None:
        """Launch one program for each block of `size` elements, a number that the host knows."""
        grid = (-(-size // BLOCK),)
        self.run(kernel, grid, *arguments, **options, BLOCK=BLOCK, num_warps=BLOCK_WARPS)

    def walk(self, kernel: object, size: int, *arguments: object, **options: object) -> None:
        """Launch a fixed number of programs that share at most `size` elements."""
        grid = self.shared(-(-size // BLOCK), BLOCK_WARPS)
        self.run(kernel, grid, *arguments, **options, BLOCK=BLOCK, num_warps=BLOCK_WARPS)

    def shared(self, tiles: int, warps: int) -> tuple[int]:
        """Return the number of programs that share tiles: the resident ones, or one for each tile.

        The interpreter uses two programs, which is enough to test sharing.
        """
        most = self._multiprocessors * max(1, RESIDENT_WARPS // warps)
        return (min(tiles, most or 2),)

    def run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Launch a kernel, unless its grid is empty."""
        if math.prod(grid):
            on_gpu = self._device.type == "cuda"
            is_other = on_gpu and torch.cuda.current_device() != self._device.index
            # Triton launches on torch's current device.
            with torch.cuda.device(self._device) if is_other else nullcontext():
                # Without fused multiply-add, all kernels round alike, however they are compiled.
                kernel[grid](*arguments, enable_fp_fusion=False, **options)

    def find_runs(self, slots: Tensor) -> Runs:
        return self._sorted(slots)[0]

    def runs_and_places(self, spec: ArenaSpec, slots: Tensor) -> tuple[Runs, Tensor]:
        runs, ordered, _ = self._sorted(slots)
        return runs, self._places_of_runs(spec, 0, runs, ordered)

    def stage(
        self,
        index: int,
        arena: Arena,
        row_cache: RowCache,
        all_slots: list[Tensor],
        ticket: Ticket,
        training: bool,
    ) -> tuple[Tensor, Runs, Tensor, Moved]:
        spec, home = arena.spec, arena.spec.home
        runs, ordered, run_of = self._sorted(all_slots[index])
        all_slots[index] = all_slots[index].new_empty(0)
        with phase("stage"):
            # Find the runs of staged and cached rows, and count the lookups of rows in HBM.
            first, last = runs.count.new_empty(2).unbind()
            stop = spec.cache_ranges[-1].stop
            self.run(
                cache_kernels.find_edges, (1,),
                ordered, run_of, runs.count, runs.lookups, home, stop, first, last,
                self.counts.home, BITS=runs.lookups.bit_length(), num_warps=1,
            )  # fmt: skip
            run_places = self._places_of_runs(spec, row_cache.entries, runs, ordered)
            resolved = Resolved(run_places, first, last, min(runs.lookups, stop - home))
            slots = ordered.new_empty(resolved.most)
            counts = torch.empty_like(slots, dtype=torch.int32)
            self.walk(
                cache_kernels.read_rows, resolved.most,
                ordered, runs.starts, first, last, slots, counts,
            )  # fmt: skip
            del ordered
            others = self.window.others(spec, ticket)
            entries, moves = self._resolve(
                row_cache, home, resolved, slots, counts, others, ticket.number
            )
            del slots, counts
            moved = self._move(arena, moves)
            del moves
            if arena.store is not None:
                known = entries[: int(last - first)]
                arena.store.is_read_in_place = self.window.reads_store(spec, ticket, known)
            ticket.resolved[spec] = resolved
            self._move_to_entries(resolved, entries, row_cache, home, training)
            del entries
            places = torch.empty_like(run_places)
            self.each(
                cache_kernels.place_lookups, runs.lookups,
                runs.order, run_of, run_places, places, runs.lookups,
            )  # fmt: skip
        return places, runs, run_places, moved

    def _sorted(self, slots: Tensor) -> tuple[Runs, Tensor, Tensor]:
        """Return the runs of a step's lookups, the sorted slots, and the run of each of these.

        Slots of −1, for bad ids, come first. Numbers of runs are int32.
        """
        lookups = slots.numel()
        if not lookups:
            order, none = slots.int(), torch.zeros(1, dtype=torch.int32, device=slots.device)
            return Runs(order, none, none, order, order), slots, order
        with phase("sort"):
            ordered, positions = torch.sort(slots, stable=True)
            order, run = (torch.empty_like(slots, dtype=torch.int32) for _ in range(2))
            self.each(lookup_kernels.mark_runs, lookups, ordered, positions, order, run, lookups)
            del positions
            run.cumsum_(0)
            starts, count = run.new_empty(lookups + 1), run.new_empty(1)
            covering = run.new_empty(-(-lookups // CHUNK))
            long_runs, blocks = torch.empty_like(covering), covering.numel()
            of_runs = run, starts, count, covering
            self.each(lookup_kernels.start_runs, lookups, *of_runs, lookups, CHUNK=CHUNK)
            of_blocks = starts, covering, long_runs
            self.each(lookup_kernels.find_long_runs, blocks, *of_blocks, blocks, CHUNK=CHUNK)
        return Runs(order, starts, count, covering, long_runs), ordered, run

    def _places_of_runs(self, spec: ArenaSpec, entries: int, runs: Runs, ordered: Tensor) -> Tensor:
        """Return the place of each run outside of the row cache."""
        places = torch.empty_like(ordered)
        self.walk(
            cache_kernels.place_runs, runs.lookups,
            ordered, runs.starts, runs.count, spec.home, spec.host_start, entries, places,
        )  # fmt: skip
        return places

    def _resolve(
        self,
        row_cache: RowCache,
        home: int,
        resolved: Resolved,
        slots: Tensor,
        counts: Tensor,
        others: Sequence[Resolved],
        ticket: int,
    ) -> tuple[Tensor, Moves]:
        """Do what `RowCache.resolve` does, and bar rows that `others` read in place."""
        held, most = row_cache.directory, resolved.most
        entries = torch.empty_like(counts)
        wanted = torch.zeros_like(counts, dtype=torch.uint8)
        rows = (resolved.first, resolved.last)
        row_cache.fade()
        size, vacant = held.slots.numel(), row_cache.vacant
        self.walk(
            cache_kernels.find_rows, most,
            *rows, slots, counts, held.sorted_slots, held.sorted_entries, size,
            held.last_used, held.priority, held.counters, entries, wanted, ticket,
            COUNTED=row_cache.policy == "lfu", BITS=size.bit_length(),
        )  # fmt: skip
        for theirs in others:
            self.walk(
                cache_kernels.bar_rows, theirs.most,
                theirs.first, theirs.last, theirs.run_places, home + row_cache.entries,
                row_cache.entries, *rows, slots, wanted, BITS=most.bit_length(),
            )  # fmt: skip
        turns = torch.cumsum(wanted, 0, dtype=torch.int32)
        keys, available = entries.new_empty(size), entries.new_zeros(1)
        self.each(
            cache_kernels.order_entries, size,
            held.slots, held.last_used, held.priority, keys, available,
            row_cache.entries, row_cache.cached_start, vacant, ticket, self.window.oldest,
        )  # fmt: skip
        order = torch.sort(keys, stable=True).indices
        leaving = torch.empty_like(held.slots)
        self.each(
            cache_kernels.leaving_slots, size,
            order, held.slots, turns, available, leaving, size, most, vacant,
        )  # fmt: skip
        by_slot = torch.sort(leaving, stable=True).indices
        del keys, leaving
        incoming = slots.new_empty(min(most, row_cache.entries))
        lookups = torch.empty_like(incoming, dtype=torch.int32)
        self.walk(
            cache_kernels.admit_rows, most,
            *rows, slots, counts, wanted, turns, available, order, by_slot, entries,
            incoming, lookups, held.counters[IN_PLACE:],
        )  # fmt: skip
        moves = Moves(
            entries.new_empty(incoming.numel()),
            incoming,
            torch.empty_like(incoming),
            entries.new_zeros(1),
        )
        self.each(
            cache_kernels.fill_entries, incoming.numel(),
            order, by_slot, turns, available, most,
            incoming, row_cache.first_priority(incoming, lookups),
            held.slots, held.last_used, held.priority, held.dirty.view(torch.uint8),
            moves.entries, moves.outgoing, moves.count, held.counters[WRITTEN_BACK:],
            incoming.numel(), row_cache.entries, ticket,
        )  # fmt: skip
        del wanted, turns, order, by_slot, lookups
        row_cache.sort()
        return entries, moves

    def _move_to_entries(
        self, resolved: Resolved, entries: Tensor, row_cache: RowCache, home: int, training: bool
    ) -> None:
        """Set the places of rows with an entry, and mark their copies as changed if training."""
        self.walk(
            cache_kernels.move_to_entries, resolved.most,
            resolved.first, resolved.last, entries, home, resolved.run_places,
            row_cache.directory.dirty.view(torch.uint8), TRAINED=training,
        )  # fmt: skip
