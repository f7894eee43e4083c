"""Where each row of each table lies in the executor's memory: the plan, laid out.

A table is cut into *column slices* at every column boundary of its shards. All column slices of one
element type, width and optimizer share one *arena*, a ``[rows, width]`` matrix in which
the rows of each device and tier are one contiguous range, so that one pass over an arena
serves all its tables and both tiers. A row of an arena is a *slot*.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.errors import CapacityError, PlanMismatchError
from placer.executor.memory.row_cache import CacheRange
from placer.plan.plan import Plan
from placer.plan.shard import Lookup, Memory, Shard
from placer.plan.verify import violations
from placer.tables import DType, OptimizerName, Table


@dataclass(frozen=True, slots=True)
class ArenaKey:
    """What column slices must have in common to share an arena.

    `row_cut` marks tables under row-wise Adagrad with several column slices, here or elsewhere:
    their state needs the gradient of the whole row, so they are updated table by table.
    """

    dtype: DType
    width: int
    optimizer: OptimizerName
    row_cut: bool


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots ``start..stop`` of an arena: the rows on one tier of one device, read one way.

    `device` is the device whose memory it is: the host for ``dram``.
    """

    device: str
    tier: Memory
    lookup: Lookup
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class CacheShare:
    """Entries of HBM that a shard adds to its arena's row cache on the device that serves it."""

    device: str
    part: CacheRange


@dataclass(frozen=True, slots=True, eq=False)
class ArenaSpec:
    """Shape of an arena and who holds which range of it.

    Attributes
    ----------
    key : ArenaKey
    rows : int
        Slots. Those in HBM come first, then staged and cached rows, those read in place, and
        those that the host pools.
    ranges : tuple of SlotRange
    cache_shares : tuple of CacheShare
        Shards whose rows are staged or cached.
    slot_map : int32 or int64
        The id → slot maps of the arena's column slices, one after the other.
    """

    key: ArenaKey
    rows: int
    ranges: tuple[SlotRange, ...]
    cache_shares: tuple[CacheShare, ...]
    slot_map: Tensor

    @property
    def home(self) -> int:
        """Number of slots in HBM."""
        return sum(part.stop - part.start for part in self.ranges if part.tier == "hbm")

    @property
    def host_start(self) -> int:
        """First of the slots that the host pools; `rows` where it pools none.

        The optimizer state of a row that is cut by columns needs all its column slices at once, so
        there the host's rows are read in place like others.
        """
        if self.key.row_cut:
            return self.rows
        pooled = [part.start for part in self.ranges if part.lookup == "host"]
        return min(pooled, default=self.rows)


@dataclass(frozen=True, slots=True)
class Follows:
    """Slots that follow ids: those below `edge` by ``near + id``, the others by ``far + id``.

    So a table in id order that is whole, or cut once into hot and cold rows, needs no map.
    """

    near: int
    edge: int
    far: int


@dataclass(frozen=True, slots=True, eq=False)
class ArenaSlice:
    """A range of columns of a table, and the slot of each of its rows.

    Attributes
    ----------
    table : str
    cols : (start, stop)
    arena : int
        Index of the arena that holds it.
    rows : int
        Rows of the table.
    follows : Follows
        How slots follow ids, where they do.
    map_start : int
        Where the column slice's part of the arena's `slot_map` starts; −1 if slots follow ids.
    slots : int32 or int64, shape (rows,), or None
        That part, a view; None if slots follow ids.
    """

    table: str
    cols: tuple[int, int]
    arena: int
    rows: int
    follows: Follows
    map_start: int
    slots: Tensor | None

    def slots_of(self, ids: Tensor) -> Tensor:
        """Slots of ids, int64."""
        if self.slots is None:
            follows = self.follows
            near, far = ids.long() + follows.near, ids.long() + follows.far
            return torch.where(ids < follows.edge, near, far)
        return self.slots.index_select(0, ids).long()


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """All arenas of a plan and the column slices of each table, from left to right."""

    arenas: tuple[ArenaSpec, ...]
    column_slices: dict[str, tuple[ArenaSlice, ...]]


def check_plan(plan: Plan) -> None:
    """Check the map before anything is touched.

    Raises
    ------
    PlanMismatchError
        If shards do not cover every table once, name unknown tables, …; names each.
    CapacityError
        If a device would hold more than it has; names it, the bytes asked and available.
    """
    found = violations(plan)
    if found:
        text = "; ".join(violation.message for violation in found)
        if all(violation.rule == "capacity" for violation in found):
            raise CapacityError(f"{text}; plan for the memory that there is")
        raise PlanMismatchError(f"the plan cannot be trained with: {text}")


def lay_out(
    plan: Plan,
    optimizers: dict[str, OptimizerName],
    device: torch.device,
    cut_elsewhere: Collection[str] = (),
) -> Layout:
    """Assign a slot to every row of every column slice.

    Tables in `cut_elsewhere` have more columns than the plan knows of.

    A replicated shard is held once: in one process its copies would stay equal at every
    step, so more of them would cost memory and updates and show nothing.
    """
    pieces: dict[ArenaKey, list[_Piece]] = defaultdict(list)
    owners: dict[ArenaKey, list[tuple[Table, tuple[int, int]]]] = defaultdict(list)
    for table in plan.tables:
        shards = plan.shards_by_table[table.name]
        edges = sorted({0, table.dim, *(edge for shard in shards for edge in shard.cols)})
        for cols in pairwise(edges):
            is_cut = len(edges) > 2 or table.name in cut_elsewhere
            key = _arena_key(table, cols, is_cut, optimizers[table.name])
            owners[key].append((table, cols))
            pieces[key].extend(
                _Piece(table, cols, shard, _home(plan, shard))
                for shard in shards
                if shard.cols[0] <= cols[0] and cols[1] <= shard.cols[1]
            )
    arenas = []
    column_slices: dict[str, list[ArenaSlice]] = {table.name: [] for table in plan.tables}
    for index, (key, members) in enumerate(pieces.items()):
        ranges, starts = _ranges(members)
        rows = ranges[-1].stop if ranges else 0
        cache_shares = tuple(_cache_shares(starts.values()))
        kind = torch.int32 if rows < 2**31 else torch.int64
        maps: list[Tensor] = [torch.empty(0, dtype=kind)]
        drawn = []
        mapped = 0
        for table, cols in owners[key]:
            follows, slots = _slots(plan, table, starts[table.name, cols])
            drawn.append((table, cols, follows, -1 if slots is None else mapped))
            if slots is not None:
                maps.append(slots.to(kind))
                mapped += table.rows
        slot_map = torch.cat(maps).to(device)
        arenas.append(ArenaSpec(key, rows, ranges, cache_shares, slot_map))
        for table, cols, follows, first in drawn:
            view = None if first < 0 else slot_map[first : first + table.rows]
            column_slices[table.name].append(
                ArenaSlice(table.name, cols, index, table.rows, follows, first, view)
            )
    ordered = {
        name: tuple(sorted(parts, key=lambda columns: columns.cols))
        for name, parts in column_slices.items()
    }
    return Layout(tuple(arenas), ordered)


_ORDER: dict[Lookup, int] = {"device": 0, "staged": 1, "cached": 2, "uva": 3, "host": 4}


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a shard within a column slice; `home` is the device in whose memory it is."""

    table: Table
    cols: tuple[int, int]
    shard: Shard
    home: str

    @property
    def order(self) -> tuple[int, str]:
        """Rows read alike lie side by side, those in HBM first."""
        return _ORDER[self.shard.lookup] if self.shard.memory == "dram" else 0, self.home


_Starts = dict[tuple[str, tuple[int, int]], list[tuple[_Piece, int]]]


def _arena_key(
    table: Table, cols: tuple[int, int], is_cut: bool, optimizer: OptimizerName
) -> ArenaKey:
    row_cut = optimizer == "rowwise_adagrad" and is_cut
    return ArenaKey(table.dtype, cols[1] - cols[0], optimizer, row_cut)


def _home(plan: Plan, shard: Shard) -> str:
    """The device in whose memory the executor keeps a shard."""
    device = shard.devices[0]
    gpu = plan.topology.gpus_by_id.get(device)
    return device if shard.memory == "hbm" or gpu is None else gpu.host


def _ranges(pieces: list[_Piece]) -> tuple[tuple[SlotRange, ...], _Starts]:
    """Slots of each device and tier, and the pieces of each column slice with their first slots."""
    starts: _Starts = defaultdict(list)
    ranges: list[SlotRange] = []
    slot = 0
    for piece in sorted(pieces, key=lambda piece: piece.order):
        starts[piece.table.name, piece.cols].append((piece, slot))
        stop = slot + piece.shard.row_count
        kind = piece.home, piece.shard.memory, piece.shard.lookup
        last = ranges[-1] if ranges else None
        if last is not None and (last.device, last.tier, last.lookup) == kind:
            ranges[-1] = SlotRange(*kind, last.start, stop)
        else:
            ranges.append(SlotRange(*kind, slot, stop))
        slot = stop
    return tuple(ranges), starts


def _cache_shares(column_slices: Iterable[list[tuple[_Piece, int]]]) -> Iterator[CacheShare]:
    """What the staged and cached shards of an arena add to its row cache, in the order of slots."""
    pieces = [
        (start, piece.shard)
        for columns in column_slices
        for piece, start in columns
        if piece.shard.memory == "dram" and piece.shard.lookup in ("staged", "cached")
    ]
    for start, shard in sorted(pieces, key=lambda piece: piece[0]):
        stop = start + shard.row_count
        part = CacheRange(start, stop, shard.staging_rows, shard.cache_rows)
        yield CacheShare(shard.devices[0], part)


def _slots(
    plan: Plan, table: Table, starts: list[tuple[_Piece, int]]
) -> tuple[Follows, Tensor | None]:
    """How slots follow ids, and the slot of each id where they do not."""
    held = sorted((piece.shard.rows, slot) for piece, slot in starts if piece.shard.row_count)
    in_a_row = all(step == 1 for (_, _, step), _ in held)
    if plan.order_of(table.name).kind == "id" and in_a_row and len(held) <= 2:
        bases = [slot - start for (start, _, _), slot in held] or [0]
        edge = held[0][0][1] if held else table.rows
        return Follows(bases[0], edge, bases[-1]), None
    ids = _ids_by_rank(plan, table)
    slots = np.empty(table.rows, dtype=np.int64)
    for (start, stop, step), slot in held:
        members = ids[start:stop:step]
        slots[members] = np.arange(slot, slot + members.size)
    return Follows(0, table.rows, 0), torch.from_numpy(slots)


def _ids_by_rank(plan: Plan, table: Table) -> npt.NDArray[np.int64]:
    """Id of each rank: the listed ids first, then all others in id order."""
    if plan.order_of(table.name).kind == "id":
        return np.arange(table.rows)
    hot = plan.hot_ids[table.name]
    cold = np.ones(table.rows, dtype=bool)
    cold[hot] = False
    return np.concatenate([hot, np.flatnonzero(cold)])
