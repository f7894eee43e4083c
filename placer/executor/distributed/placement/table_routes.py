"""Where the rows of each table are: for lookups, checkpoints and initial weights alike."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from placer.executor.distributed.placement.division import ColumnSlice, Target
from placer.executor.distributed.placement.row_routing import RankOrder, Router
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

    @property
    def nbytes(self) -> int:
        """Bytes of the routing tables that each rank holds for it."""
        routers = {
            id(s.router): s.router.nbytes for s in self.column_slices if s.router is not None
        }
        return sum(routers.values()) + (0 if self.order is None else self.order.nbytes)


def table_routes(
    plan: Plan, division: Mapping[str, tuple[ColumnSlice, ...]], device: torch.device
) -> dict[str, TableRoutes]:
    """The map of each table that has rows."""
    return {
        name: _table_routes(plan, plan.tables_by_name[name], column_slices, device)
        for name, column_slices in division.items()
    }


def ids_of(plan: Plan, target: Target, rows: range) -> Tensor:
    """Ids of consecutive rows of a target, int64."""
    own = torch.arange(rows.start, rows.stop)
    if target.by_id:
        return own
    ranks = torch.empty_like(own)
    for part, base in zip(target.parts, target.bases, strict=True):
        here = (own >= base) & (own < base + part.count)
        ranks[here] = part.start + (own[here] - base) * part.step
    if plan.order_of(target.table.name).kind == "id":
        return ranks
    order = Ranks.in_plan(plan, target.table.name)
    listed = ranks < order.listed.size
    ids = torch.empty_like(ranks)
    ids[listed] = torch.from_numpy(order.listed)[ranks[listed]]
    ids[~listed] = torch.from_numpy(order.unlisted_ids(ranks[~listed].numpy()))
    return ids


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
