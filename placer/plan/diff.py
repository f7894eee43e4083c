"""Compare two plans: count the rows × columns that move between devices and memories.

Rows are matched by id, so plans may have different row orders. Ids that neither row order lists
follow in id order in both plans. Between neighbouring listed ids, rank − id is constant. So two
slices share arithmetic progressions of such ids, which are counted without listing rows (Chinese
remainder theorem).
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from placer.errors import PlanError
from placer.plan.fields import Memory, Shard
from placer.plan.memory import drive_of, home_of
from placer.plan.plan import Int, Plan, Ranks, distinct
from placer.plan.verify import check_shards
from placer.tables import Table
from placer.topology.topology import Topology

Slice = tuple[int, int, int]

TableStatus = Literal["same", "moved", "added", "removed", "reshaped"]

_BLOCK_IDS = 1 << 14


@dataclass(frozen=True, slots=True, order=True)
class Home:
    """A GPU or host that serves rows, and the tier of the rows."""

    device: str
    memory: Memory

    def __str__(self) -> str:
        return f"{self.device} {self.memory}"


@dataclass(frozen=True, slots=True)
class Move:
    """Rows × columns of a table that keep a home, get a new home, or lose a replica.

    The kind is a change of tier, such as ``HBM to DRAM``, or one of three words. ``kept``: source
    and target are equal. ``served elsewhere``: the bytes stay in a host's memory, but another GPU
    reads them. ``dropped``: a replica at `source` is removed, so there is no target. `cells` are
    rows × columns. `size_bytes` counts weights and optimizer state.
    """

    table: str
    kind: str
    source: Home
    target: Home | None
    cells: int
    size_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Bytes to copy to other memory."""
        return 0 if self.kind in ("kept", "served elsewhere", "dropped") else self.size_bytes


@dataclass(frozen=True, slots=True)
class TableDiff:
    """How one table changes.

    A table is ``reshaped`` if rows, dim, dtype or optimizer differ, as `detail` says; then nothing
    else is compared. If cold rows get another type, `detail` says which. `cells` are its rows ×
    columns in the newer plan; for a removed table, in the older plan. `changed_cells` are cells
    whose set of homes (device, tier) differs.
    """

    table: str
    status: TableStatus
    cells: int
    changed_cells: int = 0
    moves: tuple[Move, ...] = ()
    kept: tuple[Move, ...] = ()
    detail: str = ""

    @property
    def moved_bytes(self) -> int:
        """Weights and optimizer state to copy."""
        return sum(move.moved_bytes for move in self.moves)


@dataclass(frozen=True)
class PlanDiff:
    """The differences between an older and a newer plan, table by table."""

    old: Plan
    new: Plan
    tables: tuple[TableDiff, ...]

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Moves of all tables, without kept parts."""
        return tuple(move for table in self.tables for move in table.moves)

    @cached_property
    def changed_cells(self) -> int:
        """Number of rows × columns with other homes, in tables of both plans."""
        return sum(table.changed_cells for table in self.tables)

    @cached_property
    def compared_cells(self) -> int:
        """Number of rows × columns in tables that have the same shape in both plans."""
        return sum(table.cells for table in self.tables if table.status in ("same", "moved"))

    @cached_property
    def moved_bytes(self) -> int:
        """Weights and optimizer state to copy."""
        return sum(table.moved_bytes for table in self.tables)

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes of weights and optimizer state that stay in their memory."""
        return sum(
            move.size_bytes
            for table in self.tables
            for move in (*table.kept, *table.moves)
            if move.target is not None and not move.moved_bytes
        )


def diff(old: Plan, new: Plan) -> PlanDiff:
    """Return what moves from `old` to `new`, table by table. Devices are matched by id.

    A part of a row that gets a new home moves with its weights and optimizer state. For row-wise
    Adagrad, that is one number for each column slice.

    Raises PlanError if a shard is malformed, or a plan does not cover a table exactly once.
    """
    for plan in (old, new):
        check_shards(plan)
    names = dict.fromkeys((*old.tables_by_name, *new.tables_by_name))
    return PlanDiff(old, new, tuple(_table_diff(old, new, name) for name in names))


def _table_diff(old: Plan, new: Plan, name: str) -> TableDiff:
    before, after = old.tables_by_name.get(name), new.tables_by_name.get(name)
    if after is None:
        assert before is not None, "the name is of one of both"
        return TableDiff(name, "removed", before.rows * before.dim)
    cells = after.rows * after.dim
    if before is None:
        return TableDiff(name, "added", cells)
    shape = [
        f"{what} {getattr(before, what)} → {getattr(after, what)}"
        for what in ("rows", "dim", "dtype", "optimizer")
        if getattr(before, what) != getattr(after, what)
    ]
    if shape:
        return TableDiff(name, "reshaped", cells, detail=", ".join(shape))
    covered = changed = 0
    retyped: dict[str, None] = {}
    moves: dict[tuple[str, Home, Home | None], list[int]] = {}
    for source, target, rows, width in _common_parts(old, new, name):
        covered += rows * width
        was, now = homes_of(source), homes_of(target)
        if set(was) != set(now):
            changed += rows * width
        if source.dtype != target.dtype and {source.memory, target.memory} <= {"dram", "ssd"}:
            retyped[f"cold rows become {target.dtype or after.dtype}"] = None
        for step in _steps_to(old, new, was, now):
            total = moves.setdefault(step, [0, 0])
            total[0] += rows * width
            stays = step[0] in ("kept", "served elsewhere")
            total[1] += rows * _row_bytes(after, source, target, width, stays)
    if covered != cells:
        raise PlanError(
            f"one of the plans does not cover table {name!r} exactly once: {covered} of {cells} "
            "cells are in both; `placer verify` says which and where"
        )
    listed = [Move(name, *key, *moves[key]) for key in sorted(moves, key=str)]
    kept = tuple(move for move in listed if move.kind == "kept")
    others = tuple(move for move in listed if move.kind != "kept")
    status: TableStatus = "moved" if changed else "same"
    return TableDiff(name, status, cells, changed, others, kept, "; ".join(retyped))


def _row_bytes(table: Table, source: Shard, target: Shard, width: int, stays: bool) -> int:
    """Return the bytes of a part of a row with its state: where it stays, or of its copy.

    Only cold rows have types of their own. A copy is in the target's type, or else the source's.
    """
    return table.bytes_per_row(width, target.dtype or (None if stays else source.dtype))


def shared_bytes(old: Plan, new: Plan, table: str) -> dict[tuple[Home, Home], int]:
    """Return bytes of weights and state that each older and newer home share, for one table.

    With replicas, every pair of an older and a newer home counts. Parts of rows that all GPUs of
    the new machine have, before or after, are left out: they are the same for every pair.
    """
    shared: dict[tuple[Home, Home], int] = defaultdict(int)
    every = new.topology.gpus_by_id.keys()
    for source, target, rows, width in _common_parts(old, new, table):
        if len(every) > 1 and (every <= set(source.devices) or every <= set(target.devices)):
            continue
        size = rows * _row_bytes(new.tables_by_name[table], source, target, width, stays=True)
        for was in homes_of(source):
            for now in homes_of(target):
                shared[was, now] += size
    return dict(shared)


def _common_parts(old: Plan, new: Plan, table: str) -> Iterator[tuple[Shard, Shard, int, int]]:
    """Yield pairs of older and newer shards that share cells, with shared rows and columns."""
    shards = old.shards_by_table[table], new.shards_by_table[table]
    orders = Ranks.in_plan(old, table), Ranks.in_plan(new, table)
    common = common_rows(new.tables_by_name[table].rows, *shards, orders)
    for i, j in zip(*np.nonzero(common), strict=True):
        source, target = shards[0][i], shards[1][j]
        yield source, target, int(common[i, j]), shared_columns(source, target)


def homes_of(shard: Shard) -> tuple[Home, ...]:
    """Return the homes of a shard's rows, one for each replica."""
    return tuple(Home(device, shard.memory) for device in shard.devices)


def _location(plan: Plan, home: Home) -> str:
    return home_of(plan.topology, home.device, home.memory)


def host_of(topology: Topology, home: Home) -> str:
    """Return the host of the device that serves rows."""
    gpu = topology.gpus_by_id.get(home.device)
    return home.device if gpu is None else gpu.host


def _steps_to(
    old: Plan, new: Plan, was: tuple[Home, ...], now: tuple[Home, ...]
) -> list[tuple[str, Home, Home | None]]:
    """Return the moves of a part of a row from its old homes to its new homes.

    A move has a kind, a source and a target. Homes are only dropped if there is no new home;
    otherwise, they are sources.
    """
    had, has = set(was), set(now)  # A row may have a replica on each of many GPUs.
    steps: list[tuple[str, Home, Home | None]] = [
        ("kept", home, home) for home in now if home in had
    ]
    added = [home for home in now if home not in had]
    if not added:
        return steps + [("dropped", home, None) for home in was if home not in has]
    hosts = new.topology.hosts_by_id
    devices = new.topology.gpus_by_id.keys() | hosts.keys() | set(map(drive_of, hosts))
    # Take a copy of a missing device only if there is no other.
    copies = [home for home in was if _location(old, home) in devices] or was
    at = {_location(old, home): home for home in reversed(copies)}
    on_host = {host_of(old.topology, home): home for home in reversed(copies)}
    for home in added:
        place = _location(new, home)
        # Find the nearest copy: in the same memory, then on the same host.
        near = at.get(place) or on_host.get(host_of(new.topology, home), copies[0])
        kind = f"{near.memory.upper()} to {home.memory.upper()}"
        if place in at:
            kind = "served elsewhere"
        steps.append((kind, near, home))
    return steps


def shared_columns(one: Shard, other: Shard) -> int:
    """Return the number of columns that two shards of a table share."""
    return max(0, min(one.cols[1], other.cols[1]) - max(one.cols[0], other.cols[0]))


def common_rows(
    rows: int, old: Sequence[Shard], new: Sequence[Shard], orders: tuple[Ranks, Ranks]
) -> Int:
    """Return the number of rows that older and newer shards share, shape (old, new).

    It is 0 for shards without common columns."""
    old_ids, new_ids = (order.listed for order in orders)
    common = np.zeros((len(old), len(new)), dtype=np.int64)
    listed = distinct(np.concatenate((old_ids, new_ids)))
    for start in range(0, listed.size, _BLOCK_IDS):
        ids = listed[start : start + _BLOCK_IDS]
        members = []
        for order, shards in zip(orders, (old, new), strict=True):
            ranks, slices = order.ranks(ids), np.array([shard.rows for shard in shards])
            start, stop, step = slices.T[:, :, None]
            inside = (ranks >= start) & (ranks < stop) & ((ranks - start) % step == 0)
            # In float32, for BLAS. Counts in a block are small enough to be exact.
            members.append(inside.astype(np.float32))
        counts = members[0] @ members[1].T
        common += counts.astype(np.int64)
    starts = np.concatenate(([0], listed + 1))
    stops = np.concatenate((listed, [rows]))
    run = starts < stops
    starts, stops = starts[run], stops[run]
    offsets = [order.offsets(starts) for order in orders]
    for i, source in enumerate(old):
        for j, target in enumerate(new):
            if not shared_columns(source, target):
                common[i, j] = 0
            elif source.rows[1] > old_ids.size and target.rows[1] > new_ids.size:
                # Otherwise, one of both only has listed rows.
                common[i, j] += _meeting(starts, stops, offsets, (source.rows, target.rows))
    return common


def _meeting(starts: Int, stops: Int, offsets: Sequence[Int], slices: tuple[Slice, Slice]) -> int:
    """Count the ids within runs starts..stops whose ranks, id + offset, are in both slices."""
    (start, stop, step), (other_start, other_stop, other_step) = slices
    low = np.maximum(np.maximum(starts, start - offsets[0]), other_start - offsets[1])
    high = np.minimum(np.minimum(stops, stop - offsets[0]), other_stop - offsets[1])
    first, second = (start - offsets[0]) % step, (other_start - offsets[1]) % other_step
    divisor = math.gcd(step, other_step)
    rest, period = other_step // divisor, step // divisor * other_step
    apart = second - first
    turns = apart // divisor * pow(step // divisor, -1, rest) % rest if rest > 1 else 0
    meets = first + step * turns
    members = -((meets - high) // period) + ((meets - low) // period)
    return int(members[(apart % divisor == 0) & (low < high)].sum())
