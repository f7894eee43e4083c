"""Kernels over two memories in plain PyTorch: what other backends compute in other ways.

They wait for the device where a size depends on data.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from placer.executor.lookups.batch_reads import ArenaReads
from placer.executor.lookups.row_runs import Runs, SortedSlots, find_runs
from placer.executor.lookups.steps import Resolved
from placer.executor.memory.arena import TieredRows
from placer.executor.memory.directory import Moves, Resolution
from placer.executor.memory.layout import ArenaSpec
from placer.executor.memory.row_cache import RowCache
from placer.executor.optimizers.rule import Rule, row_sums, updated


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTable:
    """Where the ids of an arena's lookups are and how they become slots.

    Attributes
    ----------
    table : int64, shape (segments, 8), on the computing device
        Columns: first id within the batch, first lookup within the arena's step, number of
        lookups, rows of the table, `near`, `edge` and `far` of its `Follows`, and where the
        table's part of the arena's slot map starts (−1 where slots follow ids).
    longest : int
        Lookups of the longest segment.
    """

    table: Tensor
    longest: int

    @classmethod
    def of(cls, device: torch.device, rows: tuple[tuple[int, ...], ...]) -> "SegmentTable":
        """Copy the rows of a table to the device, without waiting for it."""
        data = torch.tensor(rows)
        if device.type == "cuda":
            data = data.pin_memory().to(device, non_blocking=True)
        return cls(data, max(row[2] for row in rows))


@dataclass(frozen=True, slots=True, eq=False)
class RowReads:
    """Which gradients each row of a step sums, for one arena.

    Attributes
    ----------
    runs : Runs
    places : shape (lookups,)
        The place of each run, by run; −1 for a run that is nobody's. Beyond the number of runs
        the values mean nothing.
    sources : int32 or int64, shape (lookups,)
        The row of the gradients that each sorted lookup adds.
    scales : float32, shape (lookups,), or None
        Weight of each sorted lookup.
    gradients : float32, shape (bags, width), contiguous
    """

    runs: Runs
    places: Tensor
    sources: Tensor
    scales: Tensor | None
    gradients: Tensor

    def sums(self) -> Tensor:
        """Return each run's summed gradient, runs at place −1 included; wait for the device."""
        starts = self.runs.starts[: int(self.runs.count)].long()
        return row_sums(self.gradients, self.sources.long(), self.scales, starts)


class TorchKernels:
    """What a backend computes on one arena. All is deterministic; no row is written twice at once.

    Attributes
    ----------
    in_one_memory : bool
        Whether all rows are in the host's memory, so that their places are their slots, int64.
    """

    in_one_memory: bool

    def translate(
        self, ids: Tensor, segments: SegmentTable, slot_map: Tensor, out: Tensor, fault: Tensor
    ) -> None:
        """Slots of an arena's lookups.

        Parameters
        ----------
        ids : int32 or int64, shape (lookups of the batch,)
        segments : SegmentTable
        slot_map : int32 or int64
            Maps of the arena's tables, one after the other (`ArenaSpec.slot_map`).
        out : int32 or int64, shape (lookups of all segments,)
            Receives the slots; −1 for an id that is no row of its table.
        fault : int64, shape (1,)
            Lowered to the first place within the batch of such an id.
        """
        for start, first, lookups, rows, near, edge, far, map_start in segments.table.tolist():
            part = ids[start : start + lookups].long()
            bad = (part < 0) | (part >= rows)
            if bool(bad.any()):
                fault.clamp_(max=start + int(torch.nonzero(bad)[0]))
                part = torch.where(bad, 0, part)
            slots = part + torch.where(part < edge, near, far)
            if map_start >= 0:
                slots = slot_map[map_start : map_start + rows].index_select(0, part)
            out[first : first + lookups] = torch.where(bad, -1, slots)

    def pool(
        self, rows: TieredRows, places: Tensor, offsets: Tensor, weights: Tensor | None, out: Tensor
    ) -> None:
        """Sum each bag's rows, each times its weight, in float32.

        Parameters
        ----------
        rows : TieredRows
            Weights, shape (.., width): float32, float16 or bfloat16.
        places : int32 or int64, shape (lookups,)
            −1 adds nothing.
        offsets : int64, shape (bags + 1,)
        weights : float32, shape (lookups,), or None
        out : float32, shape (bags, width), contiguous
        """
        table, index = rows.hbm, places
        if not self.in_one_memory or table.dtype != torch.float32:
            distinct, index = torch.unique(places, return_inverse=True)
            table = rows.hbm.new_zeros((distinct.numel(), rows.hbm.shape[1]), dtype=torch.float32)
            nobodys = int((distinct < 0).sum())
            table[nobodys:] = rows.at(distinct[nobodys:]).float()
        out.copy_(
            torch.nn.functional.embedding_bag(
                index,
                table,
                offsets,
                mode="sum",
                per_sample_weights=weights,
                include_last_offset=True,
            )
        )

    def dot_rows(
        self, rows: TieredRows, places: Tensor, bags: Tensor, gradients: Tensor, out: Tensor
    ) -> None:
        """Row · gradient of its bag, for each lookup: float32, shape (lookups,); 0 at place −1."""
        out.zero_()
        here = torch.nonzero(places >= 0).squeeze(1)
        read = rows.at(places[here]).float()
        out[here] = (read * gradients.index_select(0, bags[here])).sum(1)

    def squares(self, reads: RowReads, out: Tensor) -> None:
        """Σ g² of the summed gradient of each run, into float32 `out` of shape (lookups,)."""
        sums = reads.sums()
        out[: sums.shape[0]] = (sums * sums).sum(1)

    def update_rows(
        self,
        weights: TieredRows,
        state: TieredRows | None,
        reads: RowReads,
        rule: Rule,
        mean_squares: Tensor | None = None,
    ) -> None:
        """Sum the gradients of each row and apply the rule once to it.

        `state` has shape (..,) for row-wise Adagrad, (.., width) for Adagrad, (.., 2 · width)
        for Adam. `mean_squares`, float32 by run, replaces the mean of g² in row-wise Adagrad,
        where the arena holds only a column slice of the rows.
        """
        sums = reads.sums()
        here = torch.nonzero(reads.places[: sums.shape[0]] >= 0).squeeze(1)
        places = reads.places[here]
        mean_square = None if mean_squares is None else mean_squares[here]
        before = None if state is None else state.at(places)
        rows, after = updated(rule, weights.at(places), before, sums[here], mean_square)
        rows = weights.rounded(places, rows, rule.updates)
        weights.write_places(places, rows)
        if state is not None and after is not None:
            state.write_places(places, after)

    def find_runs(self, slots: Tensor) -> tuple[Runs, SortedSlots]:
        """Sort the slots of a step's lookups and find the runs."""
        return find_runs(slots)

    def bags_of_lookups(self, reads: ArenaReads) -> Tensor:
        """Return the bag of each lookup, int32."""
        return reads.sources()

    def exchange(self, matrices: Sequence[TieredRows], moves: Moves) -> None:
        """Write evicted rows back and read admitted ones, for each matrix (weights, state).

        For each move j below ``moves.count``: entry e of the row cache is row ``home + e`` of
        `hbm`; if ``moves.outgoing[j] >= 0`` it is first copied to row ``outgoing[j] − home``
        of `dram`; then row ``incoming[j] − home`` of `dram` is copied to it.
        """
        moved = torch.nonzero(moves.entries >= 0).squeeze(1)
        entries, incoming, outgoing = (
            part[moved].long() for part in (moves.entries, moves.incoming, moves.outgoing)
        )
        leaves = torch.nonzero(outgoing >= 0).squeeze(1)
        for rows in matrices:
            cold = (outgoing[leaves] - rows.home).to(rows.dram.device)
            leaving = rows.hbm.index_select(0, entries[leaves] + rows.home)
            rows.dram.index_copy_(0, cold, leaving.to(rows.dram.device))
            admitted = rows.dram.index_select(0, (incoming - rows.home).to(rows.dram.device))
            rows.hbm.index_copy_(0, entries + rows.home, admitted.to(rows.hbm.device))

    # What follows finds staged and cached rows, and waits for no device.

    def places_of_runs(
        self, spec: ArenaSpec, entries: int, runs: Runs, ordered: SortedSlots
    ) -> Tensor:
        """Return the place of each run, as if none were in the row cache."""
        return places_of(spec, entries, ordered.slots.index_select(0, runs.firsts))

    def slots_and_counts(
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
        """Return the entry of each row, −1 for those that have none, once rows have been moved.

        Rows that one of the `others`, steps that are open, reads in place have to stay there: that
        step will update the row in host memory, and a copy made before would be old.
        """
        barred: Tensor | None = None
        for theirs in others:
            if not theirs.most:
                continue
            here = _read_in_place(theirs, slots, row_cache, home)
            barred = here if barred is None else barred | here
        return row_cache.resolve(slots, counts, ticket, oldest, barred)

    def move_to_entries(
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

    def places_of_lookups(self, runs: Runs, run_of: Tensor, run_places: Tensor) -> Tensor:
        """Return the place of each lookup, in the batch's order."""
        # By adding to zeros, for which the order need not be int64.
        places = torch.zeros_like(run_places)
        return places.index_add_(0, runs.order, run_places.index_select(0, run_of))


def places_of(spec: ArenaSpec, entries: int, slots: Tensor) -> Tensor:
    """Return places of slots that are not in the arena's row cache, which has so many entries.

    Slots are of `ArenaSpec.kind`. Those that the host pools have place −1.
    """
    places = torch.where(slots < spec.home, slots, slots + entries) if entries else slots
    if spec.host_start == spec.rows:
        return places
    return torch.where(slots < spec.host_start, places, -1)


def _read_in_place(theirs: Resolved, slots: Tensor, row_cache: RowCache, home: int) -> Tensor:
    """Return which of the slots a step reads in place; its slots follow from its places."""
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


def in_one_piece(parts: Sequence[Tensor]) -> Tensor | None:
    """Return matrices that follow one another in memory as one, without a copy; else None."""
    if not parts or not all(part.is_contiguous() for part in parts):
        return None
    end = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.dtype != parts[0].dtype:
            return None
        end += part.nbytes
    if end > parts[0].untyped_storage().data_ptr() + parts[0].untyped_storage().nbytes():
        return None  # Neighbours by chance.
    rows = sum(part.shape[0] for part in parts)
    return parts[0].as_strided((rows, parts[0].shape[1]), (parts[0].shape[1], 1))
