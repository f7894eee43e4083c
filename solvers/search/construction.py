"""A first assignment: sharding options for a step time, shards put on GPUs, largest first."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from solvers.bounds.lagrangian import LagrangianBound
from solvers.model.assignment import Assignment
from solvers.model.instance import Arena, Instance, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, DRAM_BYTES, GPU_S, Float

Block = tuple[TableShard, ...]
_Balanced = Literal["time", "hosts", "buffers", "rows"]

_ATTEMPTS: tuple[tuple[float, _Balanced, bool], ...] = (
    (0.5, "time", False),
    (0.5, "hosts", False),
    (1.0, "time", False),
    (1.0, "buffers", False),
    (0.25, "rows", False),
    (1.0, "buffers", True),
)
"""Largest shard, as a share of a GPU's HBM, what GPUs are balanced by, and whether cold rows
are read in the way that needs the fewest buffers."""


def construct(instance: Instance, bound: LagrangianBound, target_s: float) -> Assignment | None:
    """Shard tables for a step time of `target_s` and assign them; None if no GPU has room.

    Shards with buffers of at most half a GPU's HBM pack best. Where so many do not fit,
    hosts are balanced by the rows that they and their GPUs hold, as well as GPUs by time;
    then shards may be as large as a GPU; then buffers are balanced; then, for hosts short of
    memory, tables get small shards and all their rows balanced; at last, for
    GPUs short of memory, cold rows are read as needs the fewest buffers.
    """
    options: list[ShardingOption] = []
    for table in range(instance.tables):
        work = bound.option_for(table, target_s)
        if work is None:
            return None
        options.append(work.option)
    for largest_share, balanced, frugal in _ATTEMPTS:
        if frugal:
            options = [_frugal_option(instance, table) for table in range(instance.tables)]
        fitting = [
            _option_that_fits(instance, table, option, largest_share, balanced == "rows")
            for table, option in enumerate(options)
        ]
        assignment = pack(instance, fitting, bound.price_s_per_byte, balanced)
        if assignment is not None:
            return assignment
    return None


def pack(
    instance: Instance,
    options: Sequence[ShardingOption],
    price: float,
    balanced: _Balanced = "time",
) -> Assignment | None:
    """Tables sharded in these ways, on the GPUs that would be done first or have most HBM left.

    `price` of a byte of HBM decides how many rows of each shard a GPU is taken to hold.
    """
    shards, replicas = instance.sharded(options)
    blocks = instance.blocks(shards)
    loads = _Loads(instance, blocks, replicas, price, balanced)
    for block in sorted(blocks, key=lambda b: (-loads.sizes[b], b)):
        if not loads.put(block):
            return None
    return Assignment.of(instance, loads.pairs, replicas)


class _Loads:
    """Loads of GPUs and hosts while blocks are packed one by one."""

    def __init__(
        self,
        instance: Instance,
        blocks: Sequence[Block],
        replicas: Sequence[TableShard],
        price: float,
        balanced: _Balanced,
    ) -> None:
        self.instance, self.price, self.balanced = instance, price, balanced
        self.kinds = np.array(instance.kind_of_gpu)
        index = instance.price_index(price)
        self.costs = {
            block: np.array(
                [
                    sum(instance.priced_costs(s, gpu)[:, index] for s in block)
                    for gpu in instance.kinds
                ]
            )
            for block in blocks
        }
        ends = {  # With the fewest rows in HBM, and with all.
            block: np.sum(
                [instance.priced_costs(s, instance.kinds[0])[:, [0, -1]] for s in block], axis=0
            )
            for block in blocks
        }
        self.buffers = {block: float(both[BYTES, 0]) for block, both in ends.items()}
        self.rows = {b: float((both[DRAM_BYTES] + both[BYTES])[0]) for b, both in ends.items()}
        time_s = {block: float(cost[0, GPU_S]) for block, cost in self.costs.items()}
        self.sizes = {
            "time": time_s,
            "hosts": time_s,
            "buffers": self.buffers,
            "rows": {block: float(both[BYTES, 1]) for block, both in ends.items()},
        }[balanced]
        base = np.array([instance.replica_costs(replicas, gpu) for gpu in instance.kinds])
        self.load = base[self.kinds, GPU_S]
        self.capacity = instance.hbm_bytes - base[self.kinds, BYTES]
        self.hbm, self.least = self.capacity.copy(), np.zeros(instance.gpus)
        self.taken = np.zeros(instance.gpus)
        self.dram, self.hosts = instance.dram_bytes.copy(), np.array(instance.host_of_gpu)
        # What a host and its GPUs can hold in all, and how much of that rows will take.
        self.room = self.dram + np.bincount(self.hosts, self.capacity, self.dram.size)
        self.held = np.zeros(self.dram.size)
        self.full = max(1e-9, sum(self.rows.values()) / float(self.room.sum()))
        evenly_s = float(self.load.mean()) + sum(self.sizes.values()) / instance.gpus
        self.evenly_s = max(1e-12, evenly_s)
        self.holders: dict[int, list[int]] = {}
        # What the first shard of each arena adds to a GPU's time.
        launch_s = [instance.launches_weighed_s(gpu) for gpu in instance.kinds]
        self.launch_s = np.array(launch_s)[self.kinds]
        self.arenas: dict[Arena, npt.NDArray[np.bool_]] = {}
        for arena in instance.arenas(replicas):
            self.arenas[arena] = np.ones(instance.gpus, dtype=bool)
            self.load += self.launch_s
        self.pairs: list[tuple[TableShard, int]] = []

    def put(self, block: Block) -> bool:
        """Assign a block to the GPU that is then the least full, if any has room for it."""
        cost = self.costs[block][self.kinds]
        # HBM that a GPU lacks makes a shard slower, not impossible: prefer room, and
        # insist on the buffers alone.
        allowed = self.instance.open_gpus(block) & (
            self.least + self.buffers[block] <= self.capacity
        )
        if self.balanced == "hosts":
            allowed &= (self.held + self.rows[block] <= self.room)[self.hosts]
        elif self.balanced != "rows":  # Else cold rows are counted when HBM has been filled.
            allowed &= cost[:, DRAM_BYTES] <= self.dram[self.hosts]
        for shard in block:
            allowed[self.holders.get(shard.table, [])] = False
        short_s = np.maximum(0.0, cost[:, BYTES] - self.hbm) * self.price
        arenas = [self._arena(arena) for arena in self.instance.arenas(block)]
        for present in arenas:
            short_s += np.where(present, 0.0, self.launch_s)
        score = np.where(allowed, self._fullness(block, cost, short_s), np.inf)
        gpu = int(np.argmin(score))
        if not np.isfinite(score[gpu]):
            return False
        for present in arenas:
            present[gpu] = True
        for shard in block:
            self.pairs.append((shard, gpu))
            if shard.option.shard_count > 1:
                self.holders.setdefault(shard.table, []).append(gpu)
        self.load[gpu] += cost[gpu, GPU_S] + short_s[gpu]
        self.hbm[gpu] -= cost[gpu, BYTES]
        self.least[gpu] += self.buffers[block]
        self.taken[gpu] += self.sizes[block]
        self.dram[self.hosts[gpu]] -= cost[gpu, DRAM_BYTES]
        self.held[self.hosts[gpu]] += self.rows[block]
        return True

    def _arena(self, arena: Arena) -> npt.NDArray[np.bool_]:
        """Which GPUs have shards of an arena, shape (GPUs,)."""
        if arena not in self.arenas:
            self.arenas[arena] = np.zeros(self.instance.gpus, dtype=bool)
        return self.arenas[arena]

    def _fullness(self, block: Block, cost: Float, short_s: Float) -> Float:
        """How full each GPU would be with a block, in what GPUs are balanced by."""
        if self.balanced in ("buffers", "rows"):
            taken: Float = self.taken - self.capacity
            return taken
        # The time when the GPU would be done: GPUs need not be alike.
        done_s: Float = self.load + short_s + cost[:, GPU_S]
        if self.balanced == "time":
            return done_s
        share = (self.held + self.rows[block]) / self.room / self.full
        fullest: Float = np.maximum(done_s / self.evenly_s, share[self.hosts])
        return fullest


def _frugal_option(instance: Instance, table: int) -> ShardingOption:
    """The uncut variant of a table that needs the least HBM."""

    def least_hbm(option: ShardingOption) -> float:
        needed = [instance.replica(table, option), *instance.shards(table, option)]
        priced = [instance.priced_costs(p, instance.kinds[0])[BYTES, 0] for p in needed if p]
        return float(sum(priced))

    return min((c for c in instance.options_of(table) if c.shard_count == 1), key=least_hbm)


def _option_that_fits(
    instance: Instance, table: int, option: ShardingOption, largest_share: float, with_rows: bool
) -> ShardingOption:
    """`option`, or one into more row slices if a shard is too large.

    That is, its buffers (and its rows, on demand) take more than `largest_share` of a GPU's
    HBM, or its cold rows fit nowhere.
    """

    def fits(option: ShardingOption) -> bool:
        shards = instance.shards(table, option)
        if not shards:
            return True
        needed = instance.priced_costs(shards[0], instance.kinds[0])
        hbm_bytes = needed[BYTES, -1 if with_rows else 0]
        return bool(
            hbm_bytes <= instance.hbm_bytes.max() * largest_share
            and needed[DRAM_BYTES, 0] <= instance.dram_bytes.max() + instance.hbm_bytes.max()
        )

    if fits(option):
        return option
    finer = [
        c
        for c in instance.options_of(table)
        if not c.column_widths
        and c.shard_count > option.shard_count
        and (c.replicated_rows, c.cold) == (option.replicated_rows, option.cold)
    ]
    for more in finer:
        if fits(more):
            return more
    return finer[-1] if finer else option
