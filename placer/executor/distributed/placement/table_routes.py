"""Where the rows of each table are: for lookups, checkpoints and initial weights alike."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from placer.executor.distributed.placement.division import ColumnSlice, Target
from placer.executor.distributed.placement.row_routing import RankOrder, Router
from placer.executor.lookups.batch_reads import tensors_of
from placer.plan.order import Ranks
from placer.plan.plan import Plan
from placer.tables import Table


@dataclass(frozen=True, slots=True, eq=False)
class TableRoutes:
    """A table's column slices, from left to right, and its row order where it matters.

    Attributes
    ----------
    table : Table
    column_slices : tuple of ColumnSlice
        Those with the same row slices share their router.
    order : RankOrder or None
        None where rows follow ids, or no column slice is divided by rows.
    """

    table: Table
    column_slices: tuple[ColumnSlice, ...]
    order: RankOrder | None

    def route(self, ids: Tensor, columns: ColumnSlice) -> tuple[Tensor, Tensor]:
        """Index of the target of each id, and its row there; both int64, shape (n,)."""
        if columns.router is None:
            return torch.zeros_like(ids, dtype=torch.int64), ids.long()
        return columns.router.route(ids if self.order is None else self.order.ranks_of(ids))

    def places_by_rank(self, ids: Tensor) -> dict[int, Tensor]:
        """Which of the ids each rank holds, some columns or all: their positions, ascending."""
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
        """Bytes of the routing tables that each rank holds for it."""
        # Column slices may share a router.
        parts = [self.order, *(columns.router for columns in self.column_slices)]
        return sum({id(t): t.nbytes for part in parts for t in tensors_of(part)}.values())


def table_routes(
    plan: Plan, division: Mapping[str, tuple[ColumnSlice, ...]], device: torch.device
) -> dict[str, TableRoutes]:
    """Return the map of each table that has rows."""
    return {
        name: _table_routes(plan, plan.tables_by_name[name], column_slices, device)
        for name, column_slices in division.items()
    }


def ids_of(plan: Plan, target: Target, start: int, stop: int) -> Tensor:
    """Return ids of the rows ``start..stop`` of a target, int64."""
    own = torch.arange(start, stop)
    if target.by_id:
        return own
    ranks = torch.empty_like(own)
    for part, base in zip(target.parts, target.bases, strict=True):
        here = (own >= base) & (own < base + part.count)
        ranks[here] = part.start + (own[here] - base) * part.step
    return torch.from_numpy(Ranks.in_plan(plan, target.table.name).ids(ranks.numpy()))


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
