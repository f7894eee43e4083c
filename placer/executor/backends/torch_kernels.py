"""Kernels over two memories in plain PyTorch: for any device, and to compare others with.

They wait for the device where a size depends on data.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from placer.executor.backends.tier_kernels import RowReads, SegmentTable
from placer.executor.memory.directory import Moves
from placer.executor.memory.tiers import TieredRows
from placer.executor.optimizers.rule import Rule, apply_rule, row_sums


class TorchKernels:
    """See `placer.executor.backends.tier_kernels.TierKernels`."""

    name = "tiered"

    def translate(
        self, ids: Tensor, segments: SegmentTable, slot_map: Tensor, out: Tensor, fault: Tensor
    ) -> None:
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
        distinct, index = torch.unique(places, return_inverse=True)
        table = rows.hbm.new_zeros((distinct.numel(), rows.hbm.shape[1]), dtype=torch.float32)
        held = int((distinct < 0).sum())
        table[held:] = rows.at(distinct[held:]).float()
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

    def weight_gradients(
        self, rows: TieredRows, places: Tensor, bags: Tensor, gradients: Tensor, out: Tensor
    ) -> None:
        out.zero_()
        here = torch.nonzero(places >= 0).squeeze(1)
        read = rows.at(places[here]).float()
        out[here] = (read * gradients.index_select(0, bags[here])).sum(1)

    def squares(self, reads: RowReads, out: Tensor) -> None:
        sums = _sums(reads)
        out[: sums.shape[0]] = (sums * sums).sum(1)

    def update(
        self,
        weights: TieredRows,
        state: TieredRows | None,
        reads: RowReads,
        rule: Rule,
        mean_squares: Tensor | None = None,
    ) -> None:
        sums = _sums(reads)
        here = torch.nonzero(reads.places[: sums.shape[0]] >= 0).squeeze(1)
        apply_rule(
            rule,
            _ByPlace(weights),
            None if state is None else _ByPlace(state),
            reads.places[here],
            sums[here],
            None if mean_squares is None else mean_squares[here],
        )

    def exchange(self, matrices: Sequence[TieredRows], moves: Moves) -> None:
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


@dataclass(frozen=True, slots=True, eq=False)
class _ByPlace:
    """Rows read and written by place."""

    rows: TieredRows

    def read(self, slots: Tensor) -> Tensor:
        return self.rows.at(slots)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        self.rows.write_places(slots, rows)


def _sums(reads: RowReads) -> Tensor:
    """The summed gradient of each run, those at place −1 included."""
    starts = reads.runs.starts[: int(reads.runs.count)].long()
    return row_sums(reads.gradients, reads.sources.long(), reads.scales, starts)
