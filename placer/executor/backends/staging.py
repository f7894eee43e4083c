"""Staged and cached rows get entries of an arena's row cache before their step."""

import torch
from torch import Tensor

from placer.executor.backends.tier_kernels import TierKernels
from placer.executor.lookups.row_runs import Runs, SortedSlots, find_runs
from placer.executor.memory.access import Resolved, Ticket, Window
from placer.executor.memory.arena import Arena
from placer.executor.memory.layout import ArenaSpec
from placer.executor.memory.tiers import TieredRows
from placer.executor.phases import phase


class Staging:
    """Copies a step's rows to HBM where they are staged or cached.

    Nowhere does preparing a step take more memory: arrays of its lookups are let go of as soon
    as they can be.

    Parameters
    ----------
    kernels : TierKernels
    window : Window
        The steps that are open.
    device : torch.device
    """

    def __init__(self, kernels: TierKernels, window: Window, device: torch.device) -> None:
        self._kernels, self._window, self._device = kernels, window, device
        self._edges: dict[ArenaSpec, Tensor] = {}

    def stage(
        self, index: int, arena: Arena, all_slots: list[Tensor], ticket: Ticket, training: bool
    ) -> tuple[Runs, Tensor, Tensor]:
        """Give the rows of an arena's lookups entries of its row cache.

        Its slots are taken out of `all_slots`, which are by arena.

        Returns
        -------
        The lookups by row, the place of each lookup, and that of each run.
        """
        with phase("sort"):
            runs, ordered = find_runs(all_slots[index])
        all_slots[index] = all_slots[index].new_empty(0)
        with phase("stage"):
            resolved = self._find(arena, runs, ordered)
            slots, counts = _slots_and_counts(resolved, runs, ordered)
            run_of = ordered.run
            del ordered
            entries = self._resolve(index, arena, slots, counts, ticket)
            del slots, counts
            ticket.resolved[index] = resolved
            if training and arena.row_cache is not None:
                arena.row_cache.mark_dirty(entries)
            _move_to_entries(resolved, entries, arena.spec.home)
            del entries
            # By adding to zeros, for which the order need not be int64.
            places = torch.zeros_like(resolved.run_places)
            places.index_add_(0, runs.order, resolved.run_places.index_select(0, run_of))
        return runs, places, resolved.run_places

    def _find(self, arena: Arena, runs: Runs, ordered: SortedSlots) -> Resolved:
        """Which runs are of staged and cached rows; places as if none were in the row cache."""
        spec, last_lookup = arena.spec, runs.lookups - 1
        entries = 0 if arena.row_cache is None else arena.row_cache.entries
        # Runs are in the order of slots, so those of staged and cached rows are neighbours.
        edges = torch.searchsorted(ordered.slots, self._edges_of(spec).to(ordered.slots.dtype))
        run_of_edge = ordered.run.index_select(0, edges.clamp(max=last_lookup))
        first, last = torch.where(edges <= last_lookup, run_of_edge, runs.count).unbind()
        run_places = places_of(spec, entries, ordered.slots.index_select(0, runs.firsts))
        most = min(runs.lookups, spec.cache_shares[-1].part.stop - spec.home)
        return Resolved(run_places, first, last, most)

    def _resolve(
        self, index: int, arena: Arena, slots: Tensor, counts: Tensor, ticket: Ticket
    ) -> Tensor:
        """The entry of each row, −1 for those that have none, once rows have been moved."""
        row_cache, home, window = arena.row_cache, arena.spec.home, self._window
        assert row_cache is not None, "arenas with staged or cached rows have one"
        barred = window.in_place(index, slots, ticket, row_cache, home)
        found = row_cache.resolve(slots, counts, ticket.number, window.oldest, barred)
        with phase("write-back"):  # One kernel moves rows both ways, for a link has two lanes.
            self._kernels.exchange(matrices(arena), found.moves)
        return found.entries

    def _edges_of(self, spec: ArenaSpec) -> Tensor:
        """First slot of staged and cached rows and the end of them, on the device."""
        edges = self._edges.get(spec)
        if edges is None:
            edges = torch.tensor([spec.home, spec.cache_shares[-1].part.stop], device=self._device)
            self._edges[spec] = edges
        return edges


def tiered_rows(rows: object) -> TieredRows:
    """The rows, which are in tiers."""
    assert isinstance(rows, TieredRows), "arenas of this backend are in tiers"
    return rows


def matrices(arena: Arena) -> list[TieredRows]:
    """Weights, and state where there is any."""
    return [tiered_rows(rows) for rows in (arena.weights, arena.state) if rows is not None]


def _slots_and_counts(
    resolved: Resolved, runs: Runs, ordered: SortedSlots
) -> tuple[Tensor, Tensor]:
    """Slot and number of lookups of each staged and cached row; the largest and 0 behind them."""
    numbers = resolved.runs()
    valid = numbers < resolved.last
    numbers.clamp_(max=runs.lookups - 1)
    starts = runs.starts.index_select(0, numbers)
    counts = runs.starts.index_select(0, numbers.add_(1)).sub_(starts).mul_(valid)
    slots = ordered.slots.index_select(0, starts.clamp_(max=runs.lookups - 1))
    return slots.masked_fill_(~valid, torch.iinfo(slots.dtype).max), counts


def _move_to_entries(resolved: Resolved, entries: Tensor, home: int) -> None:
    """Note that runs of rows that have an entry of the row cache are there."""
    if not resolved.most:
        return
    places = resolved.run_places
    number = torch.arange(places.numel(), dtype=torch.int32, device=places.device)
    moved = (number >= resolved.first) & (number < resolved.last)
    entry = entries.index_select(0, number.sub_(resolved.first).clamp_(0, resolved.most - 1))
    moved &= entry >= 0
    places.copy_(torch.where(moved, entry.add_(home).to(places.dtype), places))


def places_of(spec: ArenaSpec, entries: int, slots: Tensor) -> Tensor:
    """Places of slots in an arena with a row cache of so many entries, of rows that are not in it.

    −1 for those that the host pools.
    """
    places = torch.where(slots < spec.home, slots, slots + entries) if entries else slots
    if spec.host_start == spec.rows:
        return places
    return torch.where(slots < spec.host_start, places, -1)
