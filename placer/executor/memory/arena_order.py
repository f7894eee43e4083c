"""Decide which rows share an arena, and their order in it.

The executor's memory layout, the division of tables over processes and the simulator use these
rules. The simulator's counts equal the executor's only if both break ties between rows alike.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from placer.plan.fields import Lookup, Memory, Shard
from placer.plan.memory import home_of
from placer.plan.plan import Plan
from placer.tables import DType, OptimizerName, Table

Part = TypeVar("Part")

LOOKUP_ORDER: dict[Lookup, int] = {"device": 0, "staged": 1, "cached": 2, "uva": 3, "host": 4}
"""Order of rows in an arena: in HBM, staged, cached, read in place, pooled by the host."""


@dataclass(frozen=True, slots=True)
class ArenaKey:
    """The properties that column slices must share to be in one arena.

    `splits_rows` marks tables with row-wise Adagrad and several column slices, in any process.
    Their state needs the gradient of the whole row, so they are updated table by table. `stored`
    marks column slices with records, which no kernel reads (`placer.executor.cold`).
    """

    dtype: DType
    width: int
    optimizer: OptimizerName
    splits_rows: bool
    stored: bool


@dataclass(frozen=True, slots=True)
class ArenaShard:
    """The part of a shard within a column slice."""

    number: int  # Index of the shard in the plan.
    shard: Shard
    home: str  # The device with the shard's memory.

    @property
    def order(self) -> tuple[int, str, Memory, str]:
        """Sort key in an arena: rows with equal lookup kind, memory and dtype become neighbours."""
        shard = self.shard
        lookup = 0 if shard.memory == "hbm" else LOOKUP_ORDER[shard.lookup]
        return lookup, self.home, shard.memory, shard.dtype or ""


@dataclass(frozen=True, slots=True)
class SlicedColumns:
    """A range of a table's columns that no shard's edge divides, and its shards."""

    table: Table
    cols: tuple[int, int]
    key: ArenaKey
    shards: tuple[ArenaShard, ...]


def columns_of(
    table: Table, parts: Collection[tuple[tuple[int, int], Part]]
) -> Iterator[tuple[tuple[int, int], tuple[Part, ...]]]:
    """Divide a table's columns at the edges of all parts; yield each range and its parts.

    `parts` are pairs of a range of columns and any value.

    >>> halves = ((0, 4), "left"), ((4, 8), "right"), ((0, 8), "whole")
    >>> list(columns_of(Table("words", rows=9, dim=8), halves))
    [((0, 4), ('left', 'whole')), ((4, 8), ('right', 'whole'))]
    """
    edges = sorted({0, table.dim, *(edge for cols, _ in parts for edge in cols)})
    for first, last in pairwise(edges):
        yield (
            (first, last),
            tuple(part for cols, part in parts if cols[0] <= first and last <= cols[1]),
        )


def slice_columns(
    plan: Plan, optimizers: Mapping[str, OptimizerName], sliced_elsewhere: Collection[str] = ()
) -> Iterator[SlicedColumns]:
    """Yield the column slices of all tables, table by table, from left to right.

    Tables in `sliced_elsewhere` have further columns in other processes.
    """
    shards_of: dict[str, list[ArenaShard]] = defaultdict(list)
    for number, shard in enumerate(plan.shards):
        home = home_of(plan.topology, shard.devices[0], shard.memory)
        shards_of[shard.table].append(ArenaShard(number, shard, home))
    for table in plan.tables:
        shards = shards_of[table.name]
        column_slices = list(columns_of(table, [(part.shard.cols, part) for part in shards]))
        optimizer = optimizers[table.name]
        sliced = len(column_slices) > 1 or table.name in sliced_elsewhere
        splits_rows = sliced and optimizer == "rowwise_adagrad"
        for (first, last), held in column_slices:
            stored = any(is_stored(part.shard, table) for part in held if part.shard.row_count)
            key = ArenaKey(table.dtype, last - first, optimizer, splits_rows, stored)
            yield SlicedColumns(table, (first, last), key, held)


def has_records(plan: Plan) -> bool:
    """Return true if a shard of the plan has narrow rows, or rows on a drive."""
    tables = plan.tables_by_name
    return any(is_stored(shard, tables[shard.table]) for shard in plan.shards if shard.row_count)


def is_stored(shard: Shard, table: Table) -> bool:
    """Return true if the shard's rows are narrow or on a drive, and so are kept as records."""
    return shard.memory == "ssd" or shard.dtype not in (None, table.dtype)
