"""Where each row of each table lies in the executor's memory: the plan, laid out.

A table is cut into *strips* at every column boundary of its shards. All strips of one
element type, width and optimizer share one *arena*, a ``[rows, width]`` matrix in which
the rows of each device and tier are one contiguous range, so that one pass over an arena
serves all its tables and both tiers. A row of an arena is a *slot*.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.errors import CapacityError, PlanMismatchError
from placer.plan.plan import Memory, Plan, Shard
from placer.plan.verify import violations
from placer.tables import DType, OptimizerName, Table


@dataclass(frozen=True, slots=True)
class ArenaKey:
    """What strips must have in common to share an arena.

    `row_cut` marks tables under row-wise Adagrad with several strips: their state needs
    the gradient of the whole row, so they are updated table by table.
    """

    dtype: DType
    width: int
    optimizer: OptimizerName
    row_cut: bool


@dataclass(frozen=True, slots=True)
class SlotRange:
    """Slots ``start..stop`` of an arena: the rows on one tier of one device.

    `device` is the device whose memory it is: the host for ``dram``.
    """

    device: str
    tier: Memory
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class ArenaSpec:
    """Shape of an arena and who holds which range of it.

    `slot_map` joins the id → slot maps of the arena's strips, int32 where that is enough.
    """

    key: ArenaKey
    rows: int
    ranges: tuple[SlotRange, ...]
    slot_map: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Strip:
    """A range of columns of a table, and the slot of each of its rows.

    Attributes
    ----------
    table : str
    cols : (start, stop)
    arena : int
        Index of the arena that holds it.
    rows : int
        Rows of the table.
    base : int
        Slot of id 0 where slots follow ids.
    map_start : int
        Where the strip's part of the arena's `slot_map` starts; −1 if slots follow ids.
    slots : int32 or int64, shape (rows,), or None
        That part, a view; None where the slot of an id is ``base + id``.
    """

    table: str
    cols: tuple[int, int]
    arena: int
    rows: int
    base: int
    map_start: int
    slots: Tensor | None

    def slots_of(self, ids: Tensor) -> Tensor:
        """Slots of ids, int64."""
        if self.slots is None:
            return ids.long() + self.base
        return self.slots.index_select(0, ids).long()


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """All arenas of a plan and the strips of each table, from left to right."""

    arenas: tuple[ArenaSpec, ...]
    strips: dict[str, tuple[Strip, ...]]


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


def lay_out(plan: Plan, optimizers: dict[str, OptimizerName], device: torch.device) -> Layout:
    """Assign a slot to every row of every strip.

    A replicated shard is held once: in one process its copies would stay equal at every
    step, so more of them would cost memory and updates and show nothing.
    """
    pieces: dict[ArenaKey, list[_Piece]] = defaultdict(list)
    owners: dict[ArenaKey, list[tuple[Table, tuple[int, int]]]] = defaultdict(list)
    for table in plan.tables:
        shards = plan.shards_by_table[table.name]
        edges = sorted({0, table.dim, *(edge for shard in shards for edge in shard.cols)})
        for cols in pairwise(edges):
            key = _arena_key(table, cols, len(edges) - 1, optimizers[table.name])
            owners[key].append((table, cols))
            pieces[key].extend(
                _Piece(table, cols, shard.rows, shard.row_count, *_home(plan, shard))
                for shard in shards
                if shard.cols[0] <= cols[0] and cols[1] <= shard.cols[1]
            )
    arenas = []
    strips: dict[str, list[Strip]] = {table.name: [] for table in plan.tables}
    for index, (key, members) in enumerate(pieces.items()):
        ranges, starts = _ranges(members)
        rows = ranges[-1].stop if ranges else 0
        kind = torch.int32 if rows < 2**31 else torch.int64
        maps: list[Tensor] = [torch.empty(0, dtype=kind)]
        drawn = []
        mapped = 0
        for table, cols in owners[key]:
            base, slots = _slot_map(plan, table, starts[table.name, cols])
            drawn.append((table, cols, base, -1 if slots is None else mapped))
            if slots is not None:
                maps.append(slots.to(kind))
                mapped += table.rows
        slot_map = torch.cat(maps).to(device)
        arenas.append(ArenaSpec(key, rows, ranges, slot_map))
        for table, cols, base, first in drawn:
            view = None if first < 0 else slot_map[first : first + table.rows]
            strips[table.name].append(Strip(table.name, cols, index, table.rows, base, first, view))
    ordered = {
        name: tuple(sorted(parts, key=lambda strip: strip.cols)) for name, parts in strips.items()
    }
    return Layout(tuple(arenas), ordered)


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a shard within a strip."""

    table: Table
    cols: tuple[int, int]
    ranks: tuple[int, int, int]
    row_count: int
    device: str
    tier: Memory


def _arena_key(
    table: Table, cols: tuple[int, int], strips: int, optimizer: OptimizerName
) -> ArenaKey:
    row_cut = optimizer == "rowwise_adagrad" and strips > 1
    return ArenaKey(table.dtype, cols[1] - cols[0], optimizer, row_cut)


def _home(plan: Plan, shard: Shard) -> tuple[str, Memory]:
    """The device in whose memory the executor keeps a shard, and the tier."""
    device = shard.devices[0]
    gpu = plan.topology.gpus_by_id.get(device)
    if shard.memory == "hbm" or gpu is None:
        return device, shard.memory
    return gpu.host, shard.memory


def _ranges(
    pieces: list[_Piece],
) -> tuple[tuple[SlotRange, ...], dict[tuple[str, tuple[int, int]], list[tuple[_Piece, int]]]]:
    """Slots of each device and tier, and the pieces of each strip with their first slots."""
    starts: dict[tuple[str, tuple[int, int]], list[tuple[_Piece, int]]] = defaultdict(list)
    ranges: list[SlotRange] = []
    slot = 0
    for piece in sorted(pieces, key=lambda piece: (piece.tier != "hbm", piece.device)):
        starts[piece.table.name, piece.cols].append((piece, slot))
        stop = slot + piece.row_count
        if ranges and (ranges[-1].device, ranges[-1].tier) == (piece.device, piece.tier):
            ranges[-1] = SlotRange(piece.device, piece.tier, ranges[-1].start, stop)
        else:
            ranges.append(SlotRange(piece.device, piece.tier, slot, stop))
        slot = stop
    return tuple(ranges), starts


def _slot_map(
    plan: Plan, table: Table, starts: list[tuple[_Piece, int]]
) -> tuple[int, Tensor | None]:
    """Slot of id 0, and the slot of each id where that is not ``base + id``."""
    held = [(piece, slot) for piece, slot in starts if piece.row_count]
    in_id_order = plan.order_of(table.name).kind == "id"
    if not held:
        return 0, None
    if in_id_order and len(held) == 1:
        return held[0][1], None
    ids = _ids_by_rank(plan, table)
    slots = np.empty(table.rows, dtype=np.int64)
    for piece, slot in held:
        start, stop, step = piece.ranks
        slots[ids[start:stop:step]] = np.arange(slot, slot + piece.row_count)
    return 0, torch.from_numpy(slots)


def _ids_by_rank(plan: Plan, table: Table) -> npt.NDArray[np.int64]:
    """Id of each rank: the listed ids first, then all others in id order."""
    if plan.order_of(table.name).kind == "id":
        return np.arange(table.rows)
    hot = plan.hot_ids[table.name]
    cold = np.ones(table.rows, dtype=bool)
    cold[hot] = False
    return np.concatenate([hot, np.flatnonzero(cold)])
