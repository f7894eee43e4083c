"""Find the target and the row of each id, for lookups, checkpoints and initial weights.

Each rank keeps a few numbers per slice for this, and the ids that a row order lists.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.errors import PlanMismatchError
from placer.executor.distributed.division import ColumnSlice, RowSlice
from placer.executor.lookups.batch_reads import tensors_of
from placer.plan.plan import Plan
from placer.tables import Table

_LONGEST_PERIOD = 1 << 22
"""Longest period of a mix of strides, as each rank keeps a table of one period."""


@dataclass(frozen=True, slots=True, eq=False)
class RankOrder:
    """A row order on the computing device; see `placer.plan.plan.Ranks`."""

    # The listed ids, sorted, and their row ranks: int32 or int64.
    ascending: Tensor
    ranks: Tensor

    @classmethod
    def of(cls, listed: npt.NDArray[np.int64], rows: int, device: torch.device) -> "RankOrder":
        """Return the row order of a table that lists these ids, hottest first."""
        ascending, ranks = torch.sort(torch.from_numpy(listed))
        kind = _kind(rows)
        return cls(ascending.to(device, kind), ranks.to(device, kind))

    def ranks_of(self, ids: Tensor) -> Tensor:
        """Return the row ranks of ids, int64. Unlisted ids follow all listed ids, in id order."""
        listed = self.ascending.numel()
        below = torch.searchsorted(self.ascending, ids.to(self.ascending.dtype))
        at = below.clamp(max=listed - 1)
        known = self.ascending[at] == ids
        return torch.where(known, self.ranks[at].long(), ids.long() + listed - below)


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """Maps each row of a column slice to one of several row slices, and to the row in its target.

    The starts and ends of slices divide rows into segments. Within a segment, owners repeat with a
    period: the least common multiple of the strides.
    """

    # For each segment: its first row, the period of its owners, and their start in `owners`.
    segment_starts: Tensor
    periods: Tensor
    offsets: Tensor
    owners: Tensor  # Slice of each row of a period, int32; −1 for none.
    # For each slice: row r is row ``bases + (r − starts) / steps`` of its target.
    starts: Tensor
    steps: Tensor
    bases: Tensor
    targets: Tensor

    @classmethod
    def of(
        cls, rows: int, slices: Sequence[tuple[RowSlice, int, int]], device: torch.device
    ) -> "Router":
        """Make a router from slices, each with its target and its first row in the target."""
        # Slices of one stride make one segment, with their first and last few rows included.
        by_step: dict[int, list[RowSlice]] = defaultdict(list)
        for part, _, _ in slices:
            by_step[part.step].append(part)
        spans: dict[RowSlice, tuple[int, int]] = {}
        for step, parts in by_step.items():
            firsts = sorted({0, *(part.start for part in parts)})
            ends = sorted({rows, *(part.stop for part in parts)})
            for part in parts:
                first = firsts[bisect_right(firsts, part.start - step)]
                spans[part] = first, ends[bisect_right(ends, part.members[-1] + step) - 1]
        edges = {0, rows, *chain.from_iterable(spans.values())}
        segment_starts = [*sorted(end for end in edges if 0 <= end <= rows)]
        periods, offsets, owners = [], [0], []
        for low, high in pairwise(segment_starts):
            active = [
                (index, part)
                for index, (part, _, _) in enumerate(slices)
                if spans[part][0] <= low and high <= spans[part][1]
            ]
            span = min(math.lcm(*(part.step for _, part in active)), high - low)
            if span > _LONGEST_PERIOD:
                strides = sorted({part.step for _, part in active})
                raise PlanMismatchError(
                    f"shards with strides {strides} repeat every {span} rows only; "
                    "use the same stride for all shards of a table"
                )
            owner = np.full(span, -1, dtype=np.int32)
            for index, part in active:
                owner[part.first_from(low) - low :: part.step] = index
            owners.append(owner)
            periods.append(span)
            offsets.append(offsets[-1] + span)
        kind = _kind(rows)

        def numbers(values: Sequence[int], dtype: torch.dtype = kind) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        joined = np.concatenate(owners) if owners else np.zeros(0, np.int32)
        return cls(
            numbers(segment_starts[:-1]),
            numbers(periods),
            numbers(offsets[:-1]),
            torch.from_numpy(joined).to(device),
            numbers([part.start for part, _, _ in slices]),
            numbers([part.step for part, _, _ in slices]),
            numbers([base for _, _, base in slices]),
            numbers([target for _, target, _ in slices], torch.int32),
        )

    def slices_of(self, ranks: Tensor) -> Tensor:
        """Return the index of the slice of each row rank, int64; −1 for none."""
        if self.periods.numel() == 1:
            return self.owners[(ranks % self.periods).long()].long()
        segment = (
            torch.searchsorted(self.segment_starts, ranks.to(self.segment_starts.dtype), right=True)
            - 1
        )
        within = (ranks - self.segment_starts[segment]) % self.periods[segment]
        return self.owners[(self.offsets[segment] + within).long()].long()

    def route(self, ranks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target of each row rank, and its row there; both int64, shape (n,)."""
        owner = self.slices_of(ranks)
        local = self.bases[owner] + (ranks - self.starts[owner]) // self.steps[owner]
        return self.targets[owner].long(), local.long()


def _kind(rows: int) -> torch.dtype:
    return torch.int32 if rows < 2**31 else torch.int64


@dataclass(frozen=True, slots=True, eq=False)
class TableRoutes:
    """A table's column slices, from left to right, and its row order if routes depend on it."""

    table: Table
    column_slices: tuple[ColumnSlice, ...]  # Equal row slices share a router.
    order: RankOrder | None  # None if rows are in id order, or undivided.

    def route(self, ids: Tensor, columns: ColumnSlice) -> tuple[Tensor, Tensor]:
        """Return the index of each id's target, and its row there; both int64, shape (n,)."""
        if columns.router is None:
            return torch.zeros_like(ids, dtype=torch.int64), ids.long()
        return columns.router.route(ids if self.order is None else self.order.ranks_of(ids))

    def places_by_rank(self, ids: Tensor) -> dict[int, Tensor]:
        """Return for each rank the ascending positions of ids with rows or columns on this rank."""
        found: dict[int, list[Tensor]] = defaultdict(list)
        for columns in self.column_slices:
            position, _ = self.route(ids, columns)
            for number, target in enumerate(columns.targets):
                places = torch.nonzero(position == number).squeeze(1)
                for rank in target.holders:
                    found[rank].append(places)
        return {rank: torch.unique(torch.cat(parts)) for rank, parts in found.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the table's routing maps on each rank."""
        # Column slices may share a router.
        parts = [self.order, *(columns.router for columns in self.column_slices)]
        return sum({id(t): t.nbytes for part in parts for t in tensors_of(part)}.values())


def table_routes(
    plan: Plan, division: Mapping[str, tuple[ColumnSlice, ...]], device: torch.device
) -> dict[str, TableRoutes]:
    """Return the routes of each table with rows."""
    return {
        name: _table_routes(plan, plan.tables_by_name[name], column_slices, device)
        for name, column_slices in division.items()
    }


def _table_routes(
    plan: Plan, table: Table, column_slices: tuple[ColumnSlice, ...], device: torch.device
) -> TableRoutes:
    routers: dict[tuple[object, ...], Router] = {}
    mapped = []
    for columns in column_slices:
        router = None
        if len(columns.targets) > 1:
            key = tuple(target.parts for target in columns.targets)
            if key not in routers:
                slices = [
                    (part, index, base)
                    for index, target in enumerate(columns.targets)
                    for part, base in zip(target.parts, target.bases, strict=True)
                ]
                routers[key] = Router.of(table.rows, slices, device)
            router = routers[key]
        mapped.append(replace(columns, router=router))
    order = None
    if routers and plan.order_of(table.name).kind == "profile" and plan.hot_ids[table.name].size:
        order = RankOrder.of(plan.hot_ids[table.name], table.rows, device)
    return TableRoutes(table, tuple(mapped), order)
