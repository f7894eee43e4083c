"""Kernels over HBM and DRAM in plain PyTorch, which other backends override.

They wait for the device if a size depends on data.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from placer.executor.lookups.batch_reads import ArenaReads
from placer.executor.lookups.steps import ArenaStep, Runs
from placer.executor.memory.arena import Arena, TieredRows
from placer.executor.memory.layout import ArenaSpec
from placer.executor.memory.row_cache import Moves
from placer.executor.optimizers import Rule, row_sums, runs, updated
from placer.executor.streams import phase, sent


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTable:
    """The positions of an arena's ids in a batch, and how to translate them to slots."""

    # Int64, shape (segments, 8). Columns: first id in the batch, first lookup in the arena's step,
    # number of lookups, rows of the table, the three numbers of `ArenaSlice.follows`, and start of
    # the table's part of the arena's slot map (−1 if slots follow ids).
    table: Tensor
    longest: int  # Number of lookups of the longest segment.

    @classmethod
    def of(cls, device: torch.device, rows: tuple[tuple[int, ...], ...]) -> "SegmentTable":
        """Copy the rows of a table to the device, without waiting for it."""
        return cls(sent(torch.tensor(rows), device), max(row[2] for row in rows))


@dataclass(frozen=True, slots=True, eq=False)
class RowReads:
    """The gradients that each row of an arena sums in a step."""

    runs: Runs
    # Shape (runs,): the place of each run; −1 for bad ids and for rows that the host pools. Values
    # after the last run mean nothing.
    places: Tensor
    # Int32 or int64, shape (lookups,): the row of `gradients` that each sorted lookup adds.
    sources: Tensor
    scales: Tensor | None  # Float32, shape (lookups,): weight of each sorted lookup.
    gradients: Tensor  # Float32, shape (bags, width).

    def sums(self) -> Tensor:
        """Return each run's summed gradient, even at place −1; waits for the device."""
        starts = self.runs.starts[: int(self.runs.count)].long()
        return row_sums(self.gradients, self.sources.long(), self.scales, starts)


@dataclass(frozen=True, slots=True, eq=False)
class SliceReads:
    """All lookups of one column slice of a table with several."""

    arena: Arena
    step: ArenaStep
    lookups: list[slice]  # Ranges of lookups in the arena's step, by feature.
    sources: Tensor  # Int32: the row of `gradients` of each lookup of the arena's step.
    gradients: Tensor  # Float32, shape (bags of the arena, width).
    weights: Tensor | None  # Float32: weight of each lookup of the arena's step.
    rule: Rule

    def of(self, values: Tensor) -> Tensor:
        """Return the values of these lookups from values of all lookups of the arena's step."""
        return torch.cat([values[part] for part in self.lookups])


class TorchKernels:
    """The kernels of a backend on one arena. They are deterministic, and write each row once."""

    in_one_memory: bool  # Whether all rows are in host memory. Then places are slots, int64.

    def translate(
        self, ids: Tensor, segments: SegmentTable, slot_map: Tensor, out: Tensor, fault: Tensor
    ) -> None:
        """Write the slots of an arena's lookups to `out`; −1 for ids that are no rows.

        `ids` are those of the whole batch, and `slot_map` is that of the `ArenaSpec`. `fault`,
        int64, shape (1,), is lowered to the position in the batch of the first bad id.
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
        """Write the weighted sum of each bag's rows to `out`: float32, (bags, width), contiguous.

        Bag i has the lookups ``offsets[i]..offsets[i + 1]``, with `weights` if there are any.
        Place −1 adds nothing.
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
        """Write row · gradient of the bag of each lookup to `out`, shape (lookups,); 0 at −1."""
        out.zero_()
        here = torch.nonzero(places >= 0).squeeze(1)
        read = rows.at(places[here]).float()
        out[here] = (read * gradients.index_select(0, bags[here])).sum(1)

    def squares(self, reads: RowReads, out: Tensor) -> None:
        """Write Σ g² of each run's summed gradient to `out`: float32, shape (lookups,)."""
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
        """Sum the gradients of each row and apply the rule to it once.

        `mean_squares`, float32 by run, replaces the mean of g² in row-wise Adagrad if the arena
        has only a column slice of the rows. See `Arena` for shapes.
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

    def find_runs(self, slots: Tensor) -> Runs:
        """Sort the slots of a step's lookups, shape (lookups,), and find the runs."""
        with phase("sort"):
            order, _, starts = runs(slots)
        starts = torch.nn.functional.pad(starts.int(), (0, 1), value=slots.numel())
        count = torch.tensor([starts.numel() - 1], dtype=torch.int32, device=slots.device)
        return Runs(order.int(), starts, count, starts[:0], starts[:0])

    def bags_of_lookups(self, reads: ArenaReads) -> Tensor:
        """Return the bag of each lookup, int32.

        It counts the starts of bags, as `repeat_interleave` would need int64 indices.
        """
        bags = torch.zeros(reads.lookups + 1, dtype=torch.int32, device=reads.offsets.device)
        starts = reads.offsets[1:]
        bags.index_add_(0, starts, torch.ones_like(starts, dtype=torch.int32))
        return bags.cumsum_(0)[: reads.lookups]

    def exchange(self, matrices: Sequence[TieredRows], moves: Moves) -> None:
        """Write evicted rows back and read admitted ones, for each matrix (weights, state).

        For each move j below ``moves.count``: entry e of the row cache is row ``home + e`` of
        `hbm`; if ``moves.outgoing[j] >= 0`` it is first copied to row ``outgoing[j] − home``
        of `dram`; then row ``incoming[j] − home`` of `dram` is copied to it.
        """
        entries, incoming, outgoing = (
            part.long() for part in (moves.entries, moves.incoming, moves.outgoing)
        )
        leaves = torch.nonzero(outgoing >= 0).squeeze(1)
        for rows in matrices:
            cold = (outgoing[leaves] - rows.home).to(rows.dram.device)
            leaving = rows.hbm.index_select(0, entries[leaves] + rows.home)
            rows.dram.index_copy_(0, cold, leaving.to(rows.dram.device))
            admitted = rows.dram.index_select(0, (incoming - rows.home).to(rows.dram.device))
            rows.hbm.index_copy_(0, entries + rows.home, admitted.to(rows.hbm.device))


def places_of(spec: ArenaSpec, entries: int, slots: Tensor) -> Tensor:
    """Return the places of slots outside of the arena's row cache, which has `entries` entries.

    Slots have dtype `ArenaSpec.kind`. Slots that the host pools have place −1.
    """
    places = torch.where(slots < spec.home, slots, slots + entries) if entries else slots
    if spec.host_start == spec.rows:
        return places
    return torch.where(slots < spec.host_start, places, -1)


def in_one_piece(parts: Sequence[Tensor]) -> Tensor | None:
    """Join matrices without a copy if they are contiguous in memory; otherwise return None."""
    if not parts or not all(part.is_contiguous() for part in parts):
        return None
    end = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.dtype != parts[0].dtype:
            return None
        end += part.nbytes
    if end > parts[0].untyped_storage().data_ptr() + parts[0].untyped_storage().nbytes():
        return None  # Separate allocations.
    rows = sum(part.shape[0] for part in parts)
    return parts[0].as_strided((rows, parts[0].shape[1]), (parts[0].shape[1], 1))
