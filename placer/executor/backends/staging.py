"""Staged and cached rows get entries of an arena's row cache before their step."""

import torch
from torch import Tensor

from placer.executor.backends.tier_kernels import TierKernels
from placer.executor.lookups.batch_reads import keep_until_used
from placer.executor.lookups.row_runs import Runs, SortedSlots, find_runs
from placer.executor.memory.access import Access, HostReads, Resolved, Ticket, Window
from placer.executor.memory.arena import Arena
from placer.executor.memory.directory import Moves, Resolution
from placer.executor.memory.layout import ArenaSpec
from placer.executor.memory.row_cache import RowCache
from placer.executor.memory.tiers import TieredRows
from placer.executor.phases import phase
from placer.executor.streams import recorded


class Staging:
    """Copies a step's rows to HBM where they are staged or cached.

    Nowhere does preparing a step take more memory: arrays of its lookups are let go of as soon
    as they can be.

    Rows move on a stream of their own. They are bound by the link, and all else here by HBM:
    rows of one batch can be found while those of the one before it are under way.

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
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # First: a few programs take what the others leave, and keep the link busy.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def stage(
        self,
        index: int,
        arena: Arena,
        all_slots: list[Tensor],
        ticket: Ticket,
        training: bool,
        host: HostReads | None = None,
    ) -> Access:
        """Give rows of an arena's lookups entries of its row cache, and say where all then are.

        Its slots are taken out of `all_slots`, which are by arena. `host` are the rows that the
        host pools.
        """
        row_cache, home = arena.row_cache, arena.spec.home
        assert row_cache is not None, "arenas with staged or cached rows have one"
        with phase("sort"):
            runs, ordered = find_runs(all_slots[index])
        all_slots[index] = all_slots[index].new_empty(0)
        with phase("stage"):
            resolved = self._cold_runs(arena.spec, row_cache, runs, ordered)
            slots, counts = self._slots_and_counts(resolved, runs, ordered)
            run_of = ordered.run
            del ordered
            others = self._window.others(arena.spec, ticket)
            found = self._resolve(row_cache, home, resolved, slots, counts, others, ticket.number)
            del slots, counts
            moved = self._exchange(arena, found.moves)
            entries = found.entries
            del found
            ticket.resolved[arena.spec] = resolved
            self._move_to_entries(resolved, entries, row_cache, home, training)
            del entries
            places = self._places(runs, run_of, resolved.run_places)
        return Access(ticket, places, runs, resolved.run_places, host, moved)

    def _cold_runs(
        self, spec: ArenaSpec, row_cache: RowCache, runs: Runs, ordered: SortedSlots
    ) -> Resolved:
        """Which runs are of staged and cached rows; places as if none were in the row cache."""
        last_lookup = runs.lookups - 1
        # Runs are in the order of slots, so those of staged and cached rows are neighbours.
        edges = torch.searchsorted(ordered.slots, self._edges_of(spec).to(ordered.slots.dtype))
        run_of_edge = ordered.run.index_select(0, edges.clamp(max=last_lookup))
        first, last = torch.where(edges <= last_lookup, run_of_edge, runs.count).unbind()
        run_places = self._run_places(spec, row_cache.entries, runs, ordered)
        most = min(runs.lookups, spec.cache_shares[-1].part.stop - spec.home)
        return Resolved(run_places, first, last, most)

    def _exchange(self, arena: Arena, moves: Moves) -> torch.cuda.Event | None:
        """Start to move rows; when they have moved."""
        with phase("write-back"):  # One kernel moves rows both ways, for a link has two lanes.
            if self._stream is None:
                self._kernels.exchange(matrices(arena), moves)
                return None
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            keep_until_used(moves, self._stream)
            with torch.cuda.stream(self._stream):
                self._kernels.exchange(matrices(arena), moves)
                return recorded()

    # What follows does the same in Triton, in `FusedStaging`.

    def _run_places(
        self, spec: ArenaSpec, entries: int, runs: Runs, ordered: SortedSlots
    ) -> Tensor:
        """The place of each run, as if none were in the row cache."""
        return places_of(spec, entries, ordered.slots.index_select(0, runs.firsts))

    def _slots_and_counts(
        self, resolved: Resolved, runs: Runs, ordered: SortedSlots
    ) -> tuple[Tensor, Tensor]:
        """Slot and lookups of each staged and cached row; the largest and 0 behind them."""
        numbers = resolved.runs()
        valid = numbers < resolved.last
        numbers.clamp_(max=runs.lookups - 1)
        starts = runs.starts.index_select(0, numbers)
        counts = runs.starts.index_select(0, numbers.add_(1)).sub_(starts).mul_(valid)
        slots = ordered.slots.index_select(0, starts.clamp_(max=runs.lookups - 1))
        return slots.masked_fill_(~valid, torch.iinfo(slots.dtype).max), counts

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
        """The entry of each row, −1 for those that have none, once rows have been moved.

        Rows that one of the `others`, steps that are open, reads in place have to stay there: that
        step will update the row in host memory, and a copy made before would be old.
        """
        barred: Tensor | None = None
        for theirs in others:
            if not theirs.most:
                continue
            here = _read_in_place(theirs, slots, row_cache, home)
            barred = here if barred is None else barred | here
        return row_cache.resolve(slots, counts, ticket, self._window.oldest, barred)

    def _move_to_entries(
        self, resolved: Resolved, entries: Tensor, row_cache: RowCache, home: int, training: bool
    ) -> None:
        """Note that rows that have an entry are there, and trained ones newer than originals."""
        if training:
            row_cache.mark_dirty(entries)
        if not resolved.most:
            return
        places = resolved.run_places
        number = torch.arange(places.numel(), dtype=torch.int32, device=places.device)
        moved = (number >= resolved.first) & (number < resolved.last)
        entry = entries.index_select(0, number.sub_(resolved.first).clamp_(0, resolved.most - 1))
        moved &= entry >= 0
        places.copy_(torch.where(moved, entry.to(places.dtype).add_(home), places))

    def _places(self, runs: Runs, run_of: Tensor, run_places: Tensor) -> Tensor:
        """The place of each lookup, in the batch's order."""
        # By adding to zeros, for which the order need not be int64.
        places = torch.zeros_like(run_places)
        return places.index_add_(0, runs.order, run_places.index_select(0, run_of))

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


def _read_in_place(theirs: Resolved, slots: Tensor, row_cache: RowCache, home: int) -> Tensor:
    """Which of the slots a step reads in place; its slots follow from its places."""
    runs = theirs.runs()
    valid = runs < theirs.last
    places = theirs.run_places.index_select(0, runs.clamp_(max=theirs.run_places.numel() - 1))
    del runs
    boundary = home + row_cache.entries
    moved = valid & (places < boundary)
    held = row_cache.slots_at((places - home).clamp_(0, row_cache.entries)).to(slots.dtype)
    own = torch.where(moved, held, (places - row_cache.entries).to(slots.dtype))
    own = torch.where(valid, own, torch.iinfo(slots.dtype).max)
    del held
    place = torch.searchsorted(own, slots, out_int32=True).clamp_(max=theirs.most - 1)
    here = own.index_select(0, place) == slots
    return here & (valid & ~moved).index_select(0, place)


def places_of(spec: ArenaSpec, entries: int, slots: Tensor) -> Tensor:
    """Places of slots in an arena with a row cache of so many entries, of rows that are not in it.

    Slots are of `ArenaSpec.kind`.

    −1 for those that the host pools.
    """
    places = torch.where(slots < spec.home, slots, slots + entries) if entries else slots
    if spec.host_start == spec.rows:
        return places
    return torch.where(slots < spec.host_start, places, -1)
