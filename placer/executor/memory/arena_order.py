"""The rows that share an arena, and their order in it.

This one rule serves the layout of the executor's memory, the division of tables over processes,
and the simulator, whose counts equal the executor's only if ties between rows fall alike.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from placer.plan.memory import home_of
from placer.plan.plan import Plan
from placer.plan.shard import Lookup, Memory, Shard
from placer.tables import DType, OptimizerName, Table

Part = TypeVar("Part")

LOOKUP_ORDER: dict[Lookup, int] = {"device": 0, "staged": 1, "cached": 2, "uva": 3, "host": 4}
"""Rows in HBM come first, then staged and cached ones, those read in place, those of the host."""


@dataclass(frozen=True, slots=True)
class ArenaKey:
    """What column slices must have in common to share an arena.

    `splits_rows` marks tables under row-wise Adagrad with several column slices, here or elsewhere:
    their state needs the gradient of the whole row, so they are updated table by table. `stored`
    marks those of whose shards some are records, which no kernel reads (`placer.executor.cold`).
    """

    dtype: DType
    width: int
    optimizer: OptimizerName
    splits_rows: bool
    stored: bool = False


@dataclass(frozen=True, slots=True)
class ArenaShard:
    """The part of a shard within a column slice.

    Attributes
    ----------
    number : int
        Of the shard in the plan.
    shard : Shard
    home : str
        The device in whose memory the executor keeps it.
    """

    number: int
    shard: Shard
    home: str

    @property
    def order(self) -> tuple[int, str, Memory, str]:
        """What an arena is sorted by: rows that are read and held alike lie side by side."""
        shard = self.shard
        lookup = 0 if shard.memory == "hbm" else LOOKUP_ORDER[shard.lookup]
        return lookup, self.home, shard.memory, shard.dtype or ""


@dataclass(frozen=True, slots=True)
class SlicedColumns:
    """A range of a table's columns that no shard's edge divides, and the shards that have it."""

    table: Table
    cols: tuple[int, int]
    key: ArenaKey
    shards: tuple[ArenaShard, ...]


def columns_of(
    table: Table, parts: Collection[tuple[tuple[int, int], Part]]
) -> Iterator[tuple[tuple[int, int], tuple[Part, ...]]]:
    """Yield the ranges of columns that no part's edge divides, and the parts that have each.

    Each part comes with its own range of columns.

    Examples
    --------
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
    """Yield the column slices of all tables, table by table and from left to right.

    Tables in `sliced_elsewhere` have more columns than the plan knows of.
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
