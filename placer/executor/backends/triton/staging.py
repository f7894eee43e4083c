"""How Triton kernels find a step's staged and cached rows, and give them entries of a row cache."""

from abc import abstractmethod
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from placer.executor.backends.backend import Backend
from placer.executor.lookups.row_runs import Runs, SortedSlots
from placer.executor.lookups.steps import Resolved
from placer.executor.memory.directory import Moves, Resolution
from placer.executor.memory.layout import ArenaSpec
from placer.executor.memory.row_cache import IN_PLACE, WRITTEN_BACK, RowCache


class TritonStaging(Backend):
    """The part of the Triton backend that is about row caches."""

    _cache: ModuleType

    @abstractmethod
    def run(
        self, kernel: object, grid: tuple[int, ...], *arguments: object, **options: object
    ) -> None:
        """Launch so many programs."""

    @abstractmethod
    def each(self, kernel: object, size: int, *arguments: object, **options: object) -> None:
        """Launch over `size` elements, which the host knows."""

    @abstractmethod
    def walk(self, kernel: object, size: int, *arguments: object, **options: object) -> None:
        """Launch over at most `size` elements."""

    def places_of_runs(
        self, spec: ArenaSpec, entries: int, runs: Runs, ordered: SortedSlots
    ) -> Tensor:
        places = torch.empty_like(ordered.slots)
        self.walk(
            self._cache.place_runs, runs.lookups,
            ordered.slots, runs.starts, runs.count, spec.home, spec.host_start, entries, places,
        )  # fmt: skip
        return places

    def edges_of_cold_runs(
        self, spec: ArenaSpec, runs: Runs, ordered: SortedSlots
    ) -> tuple[Tensor, Tensor]:
        first, last = runs.count.new_empty(2).unbind()
        self.run(
            self._cache.find_edges, (1,),
            ordered.slots, ordered.run, runs.count, runs.lookups,
            spec.home, spec.cache_ranges[-1].stop, first, last, self.counts.home,
            BITS=runs.lookups.bit_length(), num_warps=1,
        )  # fmt: skip
        return first, last

    def slots_and_counts(
        self, resolved: Resolved, runs: Runs, ordered: SortedSlots
    ) -> tuple[Tensor, Tensor]:
        slots = ordered.slots.new_empty(resolved.most)
        counts = torch.empty_like(slots, dtype=torch.int32)
        self.walk(
            self._cache.read_rows, resolved.most,
            ordered.slots, runs.starts, resolved.first, resolved.last, slots, counts,
        )  # fmt: skip
        return slots, counts

    def resolve(
        self,
        row_cache: RowCache,
        home: int,
        resolved: Resolved,
        slots: Tensor,
        counts: Tensor,
        others: Sequence[Resolved],
        ticket: int,
        oldest: int,
    ) -> Resolution:
        held, most = row_cache.directory, resolved.most
        entries = torch.empty_like(counts)
        wanted = torch.zeros_like(counts, dtype=torch.uint8)
        rows = (resolved.first, resolved.last)
        row_cache.fade()
        size, vacant = held.slots.numel(), row_cache.vacant
        self.walk(
            self._cache.find_rows, most,
            *rows, slots, counts, held.sorted_slots, held.sorted_entries, size,
            held.last_used, held.priority, held.counters, entries, wanted, ticket,
            COUNTED=row_cache.policy == "lfu", BITS=size.bit_length(),
        )  # fmt: skip
        for theirs in others:
            self.walk(
                self._cache.bar_rows, theirs.most,
                theirs.first, theirs.last, theirs.run_places, home + row_cache.entries,
                row_cache.entries, *rows, slots, wanted, BITS=most.bit_length(),
            )  # fmt: skip
        turns = torch.cumsum(wanted, 0, dtype=torch.int32)
        keys, available = entries.new_empty(size), entries.new_zeros(1)
        self.each(
            self._cache.order_entries, size,
            held.slots, held.last_used, held.priority, keys, available,
            row_cache.entries, row_cache.cached_start, vacant, ticket, oldest,
        )  # fmt: skip
        order = torch.sort(keys, stable=True).indices
        leaving = torch.empty_like(held.slots)
        self.each(
            self._cache.leaving_slots, size,
            order, held.slots, turns, available, leaving, size, most, vacant,
        )  # fmt: skip
        by_slot = torch.sort(leaving, stable=True).indices
        del keys, leaving
        incoming = slots.new_empty(min(most, row_cache.entries))
        lookups = torch.empty_like(incoming, dtype=torch.int32)
        self.walk(
            self._cache.admit_rows, most,
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
            self._cache.fill_entries, incoming.numel(),
            order, by_slot, turns, available, most,
            incoming, row_cache.first_priority(incoming, lookups),
            held.slots, held.last_used, held.priority, held.dirty.view(torch.uint8),
            moves.entries, moves.outgoing, moves.count, held.counters[WRITTEN_BACK:],
            incoming.numel(), row_cache.entries, ticket,
        )  # fmt: skip
        del wanted, turns, order, by_slot, lookups
        ordered, order = torch.sort(held.slots)
        self.each(
            self._cache.store_sorted, size,
            ordered, order, held.sorted_slots, held.sorted_entries, size, vacant,
        )  # fmt: skip
        return Resolution(entries, moves)

    def move_to_entries(
        self, resolved: Resolved, entries: Tensor, row_cache: RowCache, home: int, training: bool
    ) -> None:
        self.walk(
            self._cache.move_to_entries, resolved.most,
            resolved.first, resolved.last, entries, home, resolved.run_places,
            row_cache.directory.dirty.view(torch.uint8), TRAINED=training,
        )  # fmt: skip

    def places_of_lookups(self, runs: Runs, run_of: Tensor, run_places: Tensor) -> Tensor:
        places = torch.empty_like(run_places)
        self.each(
            self._cache.place_lookups, runs.lookups,
            runs.order, run_of, run_places, places, runs.lookups,
        )  # fmt: skip
        return places
