"""Find any assignment that fits, by reducing the bytes that devices lack.

Place tables one by one, the largest first. Each takes the option and the GPUs that leave the fewest
bytes without room, and among equals the fastest option. While a device is overfull, take off some
of its tables and some others and place them again in another order (ruin and recreate; Schrimpf et
al. 2000, doi:10.1006/jcph.1999.6413).

A GPU needs HBM for the buffers of its shards. Cold rows need memory of the GPU's host, or HBM that
is left on its GPUs.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.model.instance import Block, Instance, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, DRAM_BYTES, GPU_S, Bool, Float

_RUINS = 200
"""Place tables again this many times."""

_MOST_TABLES = 3
"""Take off this many tables of an overfull device at a time, and as many others."""

_MOST_SHARDS = 8


class _Way(NamedTuple):
    """A way to shard a table, or tables that stay together. One GPU serves each block."""

    blocks: list[Block]
    least_bytes: Float  # Shape (blocks,): least bytes of HBM of a block.
    # Shape (2, blocks): bytes of DRAM of its other rows; what these would take in HBM, as some are
    # narrow in DRAM alone.
    cold_bytes: Float
    replicas: tuple[TableShard, ...]  # Rows that every GPU holds besides.
    replica_bytes: Float  # Shape (gpus,): bytes of HBM that these take.
    work_s: float  # GPU seconds with all useful rows in HBM.

    @property
    def bytes(self) -> float:
        """Bytes on all devices together."""
        return float((self.least_bytes + self.cold_bytes[0]).sum() + self.replica_bytes.sum())


def make_room(
    instance: Instance, options: Sequence[Sequence[ShardingOption]], seed: int, clock: Clock
) -> Assignment | None:
    """Return an assignment that fits, however slow; None if none is found.

    `options` has the options of each table that may fit.
    """
    tables = [TableShard(table) for table in range(instance.tables)]
    groups = instance.blocks(tables)
    ways: list[list[_Way]] = [[] for _ in groups]
    for number in sorted(range(len(groups)), key=lambda n: -_bytes_of(instance, groups[n])):
        # Costing all ways of thousands of tables takes minutes, so small tables may get few.
        is_late = clock.left_s < 0 or clock.stopped
        ways[number] = _ways(instance, groups[number], options, only_whole=is_late)
    size = [min(way.bytes for way in of) for of in ways]
    rng, room = random.Random(seed), _Room(instance, ways)
    if not all(room.place(number) for number in sorted(range(len(ways)), key=lambda n: -size[n])):
        return None
    for _ in range(_RUINS):
        over = room.overfull()
        if not over.any() or clock.left_s < 0 or clock.stopped:
            break
        kept, over_bytes = room.homes.copy(), room.total_over_bytes
        there = [n for n, (_, gpus) in room.homes.items() if over[gpus].any()]
        others = [n for n in room.homes if n not in there]
        chosen = rng.sample(there, min(len(there), rng.randint(1, _MOST_TABLES)))
        chosen += rng.sample(others, min(len(others), rng.randint(0, _MOST_TABLES)))
        for number in chosen:
            room.take_off(number)
        rng.shuffle(chosen)
        for number in chosen:
            room.place(number)
        if room.total_over_bytes > over_bytes:
            for number in chosen:
                room.take_off(number)
            for number in chosen:
                room.put(number, *kept[number])
    if room.overfull().any():
        return None
    pairs = [
        (shard, gpu)
        for way, gpus in room.homes.values()
        for block, gpu in zip(way.blocks, gpus, strict=True)
        for shard in block
    ]
    replicas = [replica for way, _ in room.homes.values() for replica in way.replicas]
    return Assignment.of(instance, pairs, replicas)


def _bytes_of(instance: Instance, group: Block) -> int:
    """Return the bytes of a group's tables."""
    profiles = instance.problem.profile.tables
    return sum(profiles[shard.table].table.total_bytes for shard in group)


def _ways(
    instance: Instance,
    group: Block,
    options: Sequence[Sequence[ShardingOption]],
    *,
    only_whole: bool,
) -> list[_Way]:
    """Return ways to shard a group: all options of one table, or several whole tables.

    `only_whole`: leave out options that divide a table, if it has others.
    """
    if len(group) == 1:
        table = group[0].table
        # Cached rows stay in DRAM, even if HBM has room.
        every = [option for option in options[table] if option.cold != "cached"] or options[table]
        rows = instance.rows(table)
        few = [option for option in every if _is_coarse(option)]
        copies = [option for option in every if option.replicated_rows == rows]
        if only_whole:
            few = [option for option in few if option.shard_count == 1] or few
        return [
            _way(instance, [(shard,) for shard in instance.shards(table, o)], [(table, o)])
            for o in (few + copies if few else every)
        ]
    least = [
        min(
            (TableShard(table, option) for option in instance.options_of(table)),
            key=lambda shard: instance.costs_at(shard, 0, 0)[BYTES],
        )
        for table, *_ in group
    ]
    return [_way(instance, [tuple(least)], [(shard.table, shard.option) for shard in least])]


def _way(
    instance: Instance, blocks: list[Block], options: Sequence[tuple[int, ShardingOption]]
) -> _Way:
    """Return the way to shard tables, given by number, by their options."""
    least, cold = np.zeros(len(blocks)), np.zeros((2, len(blocks)))
    for number, block in enumerate(blocks):
        for shard in block:
            costs = instance.costs_at(shard, instance.kinds[0], 0)
            least[number] += costs[BYTES]
            cold[:, number] += costs[DRAM_BYTES] * np.array((1.0, _widening(instance, shard)))
    replicas = tuple(one for of in options for one in instance.replicas(*of))
    replica_bytes = np.zeros(instance.gpus)
    for one in replicas:
        replica_bytes += [instance.costs_at(one, g, 0)[BYTES] for g in range(instance.gpus)]
    work_s = sum(float(instance.option_costs_at(*of, -1)[GPU_S]) for of in options if blocks)
    return _Way(blocks, least, cold, replicas, replica_bytes, work_s)


def _widening(instance: Instance, shard: TableShard) -> float:
    """Return how many times as many bytes a cold row of a shard takes in HBM."""
    table, dtype = instance.problem.profile.tables[shard.table].table, shard.option.home.dtype
    return table.bytes_per_row() / table.bytes_per_row(dtype=dtype) if dtype else 1.0


class _Room:
    """Bytes used on GPUs and hosts while tables are placed."""

    def __init__(self, instance: Instance, ways: Sequence[Sequence[_Way]]) -> None:
        self.instance, self.ways = instance, ways
        self.hosts = np.array(instance.host_of_gpu)
        self.on_gpu = np.array([instance.is_gpu(gpu) for gpu in range(instance.gpus)])
        self.least, self.cold = np.zeros(instance.gpus), np.zeros((2, instance.gpus))
        self.homes: dict[int, tuple[_Way, list[int]]] = {}

    def _over_bytes(self, least: Float, cold: Float) -> tuple[Float, Float]:
        """Return bytes that each GPU and each host lacks, given the GPUs' bytes, shape (gpus,)."""
        of_gpu, in_dram = self._divided(least, cold)
        return of_gpu, np.maximum(0.0, self._beyond_dram(in_dram))

    def _divided(self, least: Float, cold: Float) -> tuple[Float, Float]:
        """Return each GPU's bytes beyond its HBM, and of its cold rows in DRAM, shape (gpus,)."""
        spare = self.instance.hbm_bytes - least
        in_dram = cold[0] - np.clip(spare, 0.0, cold[1]) * (cold[0] / np.maximum(cold[1], 1.0))
        return np.maximum(0.0, -spare), in_dram

    def _beyond_dram(self, in_dram: Float) -> Float:
        """Return each host's bytes in DRAM minus its memory; negative where some is left."""
        dram = self.instance.dram_bytes
        return np.bincount(self.hosts, in_dram, dram.size) - dram

    def _lacking_with(self, least: Float, cold: Float, more: float, rows: Float) -> Float:
        """Return what all devices lack together if a block goes to each GPU, shape (gpus,)."""
        of_gpu, in_dram = self._divided(least, cold)
        gpu_with, in_dram_with = self._divided(least + more, cold + rows[:, None])
        of_host = self._beyond_dram(in_dram)
        # A block changes only its GPU and that GPU's host.
        host, host_with = of_host[self.hosts], of_host[self.hosts] + in_dram_with - in_dram
        change = gpu_with - of_gpu + np.maximum(0.0, host_with) - np.maximum(0.0, host)
        lacking: Float = of_gpu.sum() + np.maximum(0.0, of_host).sum() + change
        return lacking

    @property
    def total_over_bytes(self) -> float:
        """Return the bytes that all devices lack together."""
        return float(sum(over.sum() for over in self._over_bytes(self.least, self.cold)))

    def overfull(self) -> Bool:
        """Return whether each GPU or its host lacks room, shape (gpus,)."""
        of_gpu, of_host = self._over_bytes(self.least, self.cold)
        overfull: Bool = (of_gpu > 0) | (of_host > 0)[self.hosts]
        return overfull

    def place(self, number: int) -> bool:
        """Place a table in the best way; false if there is none."""
        best: tuple[tuple[float, ...], _Way, list[int]] | None = None
        for way in self.ways[number]:
            found = self._spread(way)
            if found is None:
                continue
            over_bytes, fullest, gpus = found
            key = over_bytes, max(0.0, fullest - 1.0), way.work_s, fullest
            if best is None or key < best[0]:
                best = key, way, gpus
        if best is not None:
            self.put(number, best[1], best[2])
        return best is not None

    def _spread(self, way: _Way) -> tuple[float, float, list[int]] | None:
        """Return the GPU of each block that leaves the fewest bytes lacking, then the most room."""
        instance = self.instance
        least, cold = self.least + way.replica_bytes, self.cold.copy()
        gpus: list[int] = []
        fullest = 0.0
        for block, more, rows in zip(way.blocks, way.least_bytes, way.cold_bytes.T, strict=True):
            open_ = instance.open_gpus(block)
            open_[gpus] = False
            if any(shard.option.home.drive_share for shard in block):
                open_ &= self.on_gpu  # Servers have no drive.
            if not open_.any():
                return None
            lacking = self._lacking_with(least, cold, more, rows)
            share = (least + more + cold[0] + rows[0]) / np.maximum(1.0, instance.hbm_bytes)
            key = np.where(open_, lacking + np.minimum(0.5, share * 1e-6), np.inf)
            gpu = int(key.argmin())
            gpus.append(gpu)
            least[gpu] += more
            cold[:, gpu] += rows
            fullest = max(fullest, least[gpu] / max(1.0, instance.hbm_bytes[gpu]))
        return sum(float(o.sum()) for o in self._over_bytes(least, cold)), fullest, gpus

    def put(self, number: int, way: _Way, gpus: list[int]) -> None:
        """Place a table in this way."""
        self.homes[number] = way, gpus
        self.least += way.replica_bytes
        self.least[gpus] += way.least_bytes
        self.cold[:, gpus] += way.cold_bytes

    def take_off(self, number: int) -> None:
        """Undo `put`."""
        way, gpus = self.homes.pop(number)
        self.least -= way.replica_bytes
        self.least[gpus] -= way.least_bytes
        self.cold[:, gpus] -= way.cold_bytes


def _is_coarse(option: ShardingOption) -> bool:
    """Return whether an option is worth trying if only room matters."""
    if option.replicated_rows or option.shard_count > _MOST_SHARDS:
        return False
    even = len(set(option.column_widths)) <= 1
    return len(option.column_widths) == 2 or (
        even and option.row_slices & (option.row_slices - 1) == 0
    )
