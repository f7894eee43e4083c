"""`Staging` in Triton: a handful of kernels for what takes a hundred PyTorch operators."""

import torch
from torch import Tensor

from placer.executor.backends.staging import Staging
from placer.executor.backends.triton import cache_kernels
from placer.executor.backends.triton.launches import TritonKernels
from placer.executor.lookups.row_runs import Runs, SortedSlots
from placer.executor.memory.access import Resolved, Window
from placer.executor.memory.directory import Resolution
from placer.executor.memory.layout import ArenaSpec
from placer.executor.memory.row_cache import IN_PLACE, RowCache

_BLOCK = 1024
_WARPS = 4


class FusedStaging(Staging):
    """Finds the same rows and gives them the same entries as `Staging`, and stops at their number.

    Parameters
    ----------
    kernels : TritonKernels
    window : Window
    device : torch.device
    """

    def __init__(self, kernels: TritonKernels, window: Window, device: torch.device) -> None:
        super().__init__(kernels, window, device)
        self._triton = kernels

    def _run(self, kernel: object, size: int, *arguments: object, **options: object) -> None:
        """Launch over at most `size` elements, which a fixed number of programs shares."""
        grid = self._triton.shared(-(-size // _BLOCK), _WARPS)
        self._triton.run(kernel, grid, *arguments, **options, BLOCK=_BLOCK, num_warps=_WARPS)

    def _run_places(
        self, spec: ArenaSpec, entries: int, runs: Runs, ordered: SortedSlots
    ) -> Tensor:
        places = torch.empty_like(ordered.slots)
        self._run(
            cache_kernels.place_runs, runs.lookups,
            ordered.slots, runs.starts, runs.count, spec.home, spec.host_start, entries, places,
        )  # fmt: skip
        return places

    def _slots_and_counts(
        self, resolved: Resolved, runs: Runs, ordered: SortedSlots
    ) -> tuple[Tensor, Tensor]:
        slots = ordered.slots.new_empty(resolved.most)
        counts = torch.empty_like(slots, dtype=torch.int32)
        self._run(
            cache_kernels.read_rows, resolved.most,
            ordered.slots, runs.starts, resolved.first, resolved.last, slots, counts,
        )  # fmt: skip
        return slots, counts

    def _resolve(
        self,
        row_cache: RowCache,
        home: int,
        resolved: Resolved,
        slots: Tensor,
        counts: Tensor,
        others: list[Resolved],
        ticket: int,
    ) -> Resolution:
        held, most = row_cache.directory, resolved.most
        entries = torch.empty_like(counts)
        wanted = torch.zeros_like(counts, dtype=torch.uint8)
        rows = (resolved.first, resolved.last)
        row_cache.fade()
        size = held.slots.numel()
        self._run(
            cache_kernels.find_rows, most,
            *rows, slots, counts, held.sorted_slots, held.sorted_entries, size,
            held.last_used, held.priority, held.counters, entries, wanted, ticket,
            COUNTED=row_cache.policy == "lfu", BITS=size.bit_length(),
        )  # fmt: skip
        for theirs in others:
            self._run(
                cache_kernels.bar_rows, theirs.most,
                theirs.first, theirs.last, theirs.run_places, home + row_cache.entries,
                row_cache.entries, *rows, slots, wanted, BITS=most.bit_length(),
            )  # fmt: skip
        order, available = row_cache.evictable(ticket, self._window.oldest)
        turns = torch.cumsum(wanted, 0, dtype=torch.int32)
        incoming = slots.new_empty(min(most, row_cache.entries))
        lookups = torch.empty_like(incoming, dtype=torch.int32)
        self._run(
            cache_kernels.admit_rows, most,
            *rows, slots, counts, wanted, turns, available, order, entries, incoming, lookups,
            held.counters[IN_PLACE:],
        )  # fmt: skip
        number = torch.minimum(turns[-1], available)
        moves = row_cache.admit(incoming, lookups, order, number, ticket)
        del wanted, turns, order, incoming, lookups
        row_cache.sort()
        return Resolution(entries, moves)

    def _move_to_entries(
        self, resolved: Resolved, entries: Tensor, row_cache: RowCache, home: int, training: bool
    ) -> None:
        self._run(
            cache_kernels.move_to_entries, resolved.most,
            resolved.first, resolved.last, entries, home, resolved.run_places,
            row_cache.directory.dirty.view(torch.uint8), TRAINED=training,
        )  # fmt: skip

    def _places(self, runs: Runs, run_of: Tensor, run_places: Tensor) -> Tensor:
        places = torch.empty_like(run_places)
        self._triton.run(
            cache_kernels.place_lookups, (-(-runs.lookups // _BLOCK),),
            runs.order, run_of, run_places, places, runs.lookups, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
        return places
