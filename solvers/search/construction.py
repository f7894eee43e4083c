"""A first assignment: cut tables for a step time, put shards on GPUs, largest first."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from solvers.bounds.lagrangian import LagrangianBound
from solvers.model.assignment import Assignment
from solvers.model.instance import Instance, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, DRAM_BYTES, GPU_S

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
    """Cut tables for a step time of `target_s` and pack them; None if no GPU has room.

    Shards with buffers of at most half a GPU's HBM pack best. Where so many do not fit,
    hosts are balanced by the rows that they and their GPUs hold, as well as GPUs by time;
    then shards may be as large as a GPU; then buffers are balanced; then, for hosts short of
    memory, tables are cut small and all their rows balanced; at last, for
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
    """Tables cut as given on the GPUs that would be done first, or have the most HBM left.

    `price` of a byte of HBM decides how many rows of each shard a GPU is taken to hold.
    """
    replicas = [r for table, option in enumerate(options) if (r := instance.replica(table, option))]
    shards = [p for table, option in enumerate(options) for p in instance.shards(table, option)]
    blocks = instance.blocks(shards)
    kinds = np.array(instance.kind_of_gpu)
    price_index = int(np.searchsorted(-instance.prices, -price, side="right")) - 1
    costs = {
        block: np.array(
            [
                sum((instance.priced_costs(p, gpu)[:, price_index] for p in block), np.zeros(5))
                for gpu in instance.kinds
            ]
        )
        for block in blocks
    }
    priced = {
        block: sum(
            (instance.priced_costs(p, instance.kinds[0])[:, [0, -1]] for p in block),
            np.zeros((5, 2)),
        )
        for block in blocks
    }
    floors = {block: float(both[BYTES, 0]) for block, both in priced.items()}
    sizes = {
        "time": {block: float(cost[0, GPU_S]) for block, cost in costs.items()},
        "hosts": {block: float(cost[0, GPU_S]) for block, cost in costs.items()},
        "buffers": floors,
        "rows": {block: float(both[BYTES, 1]) for block, both in priced.items()},
    }[balanced]
    base = np.array(
        [
            sum((instance.priced_costs(r, gpu)[:, 0] for r in replicas), np.zeros(5))
            for gpu in instance.kinds
        ]
    )
    load = base[kinds, GPU_S]
    capacity = instance.hbm_bytes - base[kinds, BYTES]
    hbm, least, taken = capacity.copy(), np.zeros(instance.gpus), np.zeros(instance.gpus)
    dram, hosts = instance.dram_bytes.copy(), np.array(instance.host_of_gpu)
    # What a host and its GPUs can hold in all, and how much of that rows will take.
    rows = {block: float((both[DRAM_BYTES] + both[BYTES])[0]) for block, both in priced.items()}
    room = dram + np.bincount(hosts, capacity, dram.size)
    held, full = np.zeros(dram.size), max(1e-9, sum(rows.values()) / float(room.sum()))
    evenly_s = max(1e-12, float(load.mean()) + sum(sizes.values()) / instance.gpus)
    used: dict[int, list[int]] = {}
    pairs: list[tuple[TableShard, int]] = []
    for block in sorted(blocks, key=lambda b: (-sizes[b], b)):
        cost, floor = costs[block][kinds], floors[block]
        # HBM that a GPU lacks makes a shard slower, not impossible: prefer room, and
        # insist on the buffers alone.
        allowed = least + floor <= capacity
        if balanced == "hosts":
            allowed &= (held + rows[block] <= room)[hosts]
        elif balanced != "rows":  # Else cold rows are counted when HBM has been filled.
            allowed &= cost[:, DRAM_BYTES] <= dram[hosts]
        short = np.maximum(0.0, cost[:, BYTES] - hbm) * price
        # The time when the GPU would be done: GPUs need not be alike.
        filled = taken - capacity
        if balanced in ("time", "hosts"):
            filled = load + short + cost[:, GPU_S]
        if balanced == "hosts":
            share = (held + rows[block]) / room / full
            filled = np.maximum(filled / evenly_s, share[hosts])
        for shard in block:
            allowed[used.get(shard.table, [])] = False
            mask = instance.allowed(shard.table)
            if mask is not None:
                allowed &= mask
            if shard.option.blocked:
                allowed &= np.arange(instance.gpus) == shard.row_slice
        score = np.where(allowed, filled, np.inf)
        gpu = int(np.argmin(score))
        if not np.isfinite(score[gpu]):
            return None
        for shard in block:
            pairs.append((shard, gpu))
            if shard.option.shard_count > 1:
                used.setdefault(shard.table, []).append(gpu)
        load[gpu] += cost[gpu, GPU_S] + short[gpu]
        hbm[gpu] -= cost[gpu, BYTES]
        least[gpu] += floor
        taken[gpu] += sizes[block]
        dram[hosts[gpu]] -= cost[gpu, DRAM_BYTES]
        held[hosts[gpu]] += rows[block]
    return Assignment.of(instance, pairs, replicas)


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
