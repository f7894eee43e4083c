"""Assign each row of a plan's tables to a slot of an arena, the executor's memory.

A table is divided into *column slices* at every column boundary of its shards. All slices of one
dtype, width and optimizer share an *arena*, a ``[rows, width]`` matrix. The rows of each device and
tier are one contiguous range of it, so one pass over an arena serves all its tables and tiers. A
row of an arena is a *slot*.

The division of tables over processes and the simulator use the same order of rows. The simulator's
counts equal the executor's only if both break ties between rows alike.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.errors import CapacityError, PlanMismatchError
from placer.plan.fields import Lookup, Memory, Shard
from placer.plan.memory import home_of
from placer.plan.plan import Plan, knows_hot_rows, listed_ids, warm_members
from placer.plan.verify import violations
from placer.tables import ColdDType, DType, OptimizerName, Table

Part = TypeVar("Part")

LOOKUP_ORDER: dict[Lookup, int] = {"device": 0, "staged": 1, "cached": 2, "uva": 3, "host": 4}
"""Order of rows in an arena: in HBM, staged, cached, read in place, pooled by the host."""


@dataclass(frozen=True, slots=True)
class ArenaKey:
    """The properties that column slices must share to be in one arena.

    `splits_rows` marks tables with row-wise Adagrad and several column slices, in any process.
    Their state needs the gradient of the whole row, so they are updated table by table. `stored`
    marks column slices with records, which no kernel reads (`placer.executor.cold_store`).
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


@dataclass(frozen=True, slots=True)
class SlotRange:
    """The slots ``start..stop`` of a shard; hottest first if it is staged or cached."""

    start: int
    stop: int
    # Entries that the shard adds to the row cache. A shard with `cache_rows` is cached.
    staging_rows: int
    cache_rows: int
    # Initial rows of the cache, hottest first, counted from `start`; by default the first rows of
    # the range.
    warm: npt.NDArray[np.int64] | None = field(default=None, compare=False)
    # Whether the plan has a row order, so that the first rows are the hottest.
    is_ordered: bool = True
    device: str = ""  # The device that reads the rows and has the cache entries in its HBM.
    memory: Memory = "dram"  # The memory of the rows themselves.
    dtype: ColdDType | None = None  # Their dtype there; None is the table's dtype.
    lookup: Lookup = "staged"
    home: str = ""  # The device with this memory: the host for ``dram`` and ``ssd``.


@dataclass(frozen=True, eq=False)
class ArenaSpec:
    """Shape of an arena, and the shard of each range of slots."""

    key: ArenaKey
    # Number of slots. Rows in HBM come first, then staged, cached, read in place, and pooled by the
    # host.
    rows: int
    ranges: tuple[SlotRange, ...]  # The ranges of all shards with rows, by slot.
    # Int32 or int64: the id → slot maps of the arena's column slices, concatenated.
    slot_map: Tensor

    @cached_property
    def cache_ranges(self) -> tuple[SlotRange, ...]:
        """Ranges of staged or cached rows."""
        return tuple(part for part in self.ranges if part.lookup in ("staged", "cached"))

    @cached_property
    def kind(self) -> torch.dtype:
        """Integer dtype of slots and of places, which are slots shifted by the cache entries."""
        entries = sum(part.staging_rows + part.cache_rows for part in self.cache_ranges)
        return torch.int32 if self.rows + entries < 2**31 else torch.int64

    @cached_property
    def home(self) -> int:
        """Number of slots in HBM."""
        return sum(part.stop - part.start for part in self.ranges if part.memory == "hbm")

    @cached_property
    def stored(self) -> int:
        """Number of slots whose rows are records: all staged and cached slots, or none."""
        return self.cache_ranges[-1].stop - self.home if self.key.stored else 0

    @cached_property
    def host_start(self) -> int:
        """First slot that the host pools; `rows` if it pools none.

        If rows have several column slices, the optimizer state may need all slices at once. So
        these rows are read in place instead.
        """
        if self.key.splits_rows:
            return self.rows
        pooled = [part.start for part in self.ranges if part.lookup == "host"]
        return min(pooled, default=self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class ArenaSlice:
    """A range of columns of a table, and the slot of each of its rows."""

    table: str
    cols: tuple[int, int]
    arena: int  # Index of the arena.
    rows: int  # Rows of the table.
    # ``near``, ``edge`` and ``far``: without `slots`, the slot of an id is ``near + id`` below
    # ``edge``, and ``far + id`` from there on. So a table in id order that is whole, or divided
    # once into hot and cold rows, needs no map.
    follows: tuple[int, int, int]
    # Start of the column slice's part of the arena's `slot_map`; −1 if slots follow ids.
    map_start: int
    # Int32 or int64, shape (rows,): a view of this part; None if slots follow ids.
    slots: Tensor | None

    def slots_of(self, ids: Tensor) -> Tensor:
        """Return the slots of ids, int64."""
        if self.slots is None:
            near, edge, far = self.follows
            return torch.where(ids < edge, ids.long() + near, ids.long() + far)
        return self.slots.index_select(0, ids).long()


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """All arenas of a plan and the column slices of each table, arena by arena."""

    arenas: tuple[ArenaSpec, ...]
    column_slices: dict[str, tuple[ArenaSlice, ...]]

    def of_tables(self, names: Iterable[str]) -> tuple["Layout", tuple[int, ...]]:
        """Return the layout of some tables, and the indices of its arenas in this layout."""
        slices = {name: self.column_slices[name] for name in names}
        held = sorted({columns.arena for parts in slices.values() for columns in parts})
        place = {arena: at for at, arena in enumerate(held)}
        moved = {
            name: tuple(replace(columns, arena=place[columns.arena]) for columns in parts)
            for name, parts in slices.items()
        }
        return Layout(tuple(self.arenas[arena] for arena in held), moved), tuple(held)


def check_is_plan(plan: object) -> None:
    """Raise PlanMismatchError if `plan` is no Plan, such as None of a search that found none."""
    if not isinstance(plan, Plan):
        hint = "a search that finds no plan says why in SolveResult.termination"
        raise PlanMismatchError(
            f"plan must be of type Plan, not {type(plan).__name__} "
            f"({'Plan.load reads a file' if plan is not None else hint})"
        )


def check_plan(plan: Plan) -> None:
    """Raise CapacityError or PlanMismatchError if the plan violates a rule."""
    check_is_plan(plan)
    faults = violations(plan)
    if faults:
        text = "; ".join(violation.message for violation in faults)
        if all(violation.rule == "capacity" for violation in faults):
            raise CapacityError(f"{text}; plan for the memory that there is")
        raise PlanMismatchError(f"the plan cannot be trained with: {text}")


def lay_out(
    plan: Plan,
    optimizers: Mapping[str, OptimizerName],
    device: torch.device,
    sliced_elsewhere: Collection[str] = (),
) -> Layout:
    """Assign a slot to every row of every column slice.

    Tables in `sliced_elsewhere` have further columns in other processes.

    A replicated shard gets slots once. In one process its copies would always be equal, so they
    would only cost memory and updates.
    """
    by_arena: dict[ArenaKey, list[SlicedColumns]] = defaultdict(list)
    for columns in slice_columns(plan, optimizers, sliced_elsewhere):
        by_arena[columns.key].append(columns)
    arenas = []
    column_slices: dict[str, list[ArenaSlice]] = {table.name: [] for table in plan.tables}
    for index, (key, members) in enumerate(by_arena.items()):
        ranges, starts = _ranges(plan, members)
        rows = ranges[-1].stop if ranges else 0
        kind = torch.int32 if rows < 2**31 else torch.int64
        places = [
            _slots(plan, columns.table, own) for columns, own in zip(members, starts, strict=True)
        ]
        mapped = [slots.to(kind) for _, slots in places if slots is not None]
        slot_map = torch.cat([torch.empty(0, dtype=kind), *mapped]).to(device)
        arenas.append(ArenaSpec(key, rows, ranges, slot_map))
        first = 0
        for columns, (follows, slots) in zip(members, places, strict=True):
            table, start, view = columns.table, -1, None
            if slots is not None:
                start, first = first, first + table.rows
                view = slot_map[start:first]
            column_slices[table.name].append(
                ArenaSlice(table.name, columns.cols, index, table.rows, follows, start, view)
            )
    return Layout(tuple(arenas), {name: tuple(parts) for name, parts in column_slices.items()})


_Starts = list[tuple[tuple[int, int, int], int]]
"""Slices of a table's rows, and their first slots."""


def _ranges(
    plan: Plan, members: Sequence[SlicedColumns]
) -> tuple[tuple[SlotRange, ...], list[_Starts]]:
    """Return the ranges of slots of all shards with rows, and the same by column slice.

    Parts with equal sort keys keep the plan's order.
    """
    starts: list[_Starts] = [[] for _ in members]
    ranges: list[SlotRange] = []
    slot = 0
    parts = [(number, part) for number, columns in enumerate(members) for part in columns.shards]
    for number, part in sorted(parts, key=lambda pair: pair[1].order):
        if part.shard.row_count:
            starts[number].append((part.shard.rows, slot))
            ranges.append(slot_range(plan, part, slot))
            slot = ranges[-1].stop
    return tuple(ranges), starts


def slot_range(plan: Plan, part: ArenaShard, start: int) -> SlotRange:
    """Return the slots of a shard from `start` on."""
    shard, warm = part.shard, None
    if shard.lookup in ("staged", "cached"):
        warm = warm_members(plan, shard.table, shard.rows)
    return SlotRange(
        start,
        start + shard.row_count,
        shard.staging_rows,
        shard.cache_rows,
        warm,
        knows_hot_rows(plan, shard.table),
        shard.devices[0],
        shard.memory,
        shard.dtype,
        shard.lookup,
        part.home,
    )


def _slots(plan: Plan, table: Table, starts: _Starts) -> tuple[tuple[int, int, int], Tensor | None]:
    """Return the formula of slots from ids, or the slot of each id if no formula fits."""
    held = sorted(starts)
    in_a_row = all(step == 1 for (_, _, step), _ in held)
    if plan.order_of(table.name).kind == "id" and in_a_row and len(held) <= 2:
        bases = [slot - start for (start, _, _), slot in held] or [0]
        edge = held[0][0][1] if held else table.rows
        return (bases[0], edge, bases[-1]), None
    listed = listed_ids(plan, table.name)
    by_rank = np.concatenate([listed, np.delete(np.arange(table.rows), listed)])
    slots = np.empty(table.rows, dtype=np.int64)
    for (start, stop, step), slot in held:
        members = by_rank[start:stop:step]
        slots[members] = np.arange(slot, slot + members.size)
    return (0, table.rows, 0), torch.from_numpy(slots)
