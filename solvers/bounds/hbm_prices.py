"""Estimate prices of memory, and bound steps by a part of the machine alone."""

from functools import cache

import numpy as np

from solvers.bounds.option_costs import OptionPricer
from solvers.model.instance import Instance, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, DRAM_S, GPU_S, Float

_PRICES = 13
"""Number of prices tried around a good one; the bound is flat near its best."""

_PRICE_SPAN = 6.0

_HOST_PRICES, _LEAST_SAVED = 25, 1e-4
"""Number of prices tried for hosts' memory, and the lowest as a share of what a byte of HBM saves
there on average."""

_FIRST_PRICE, _ROUGHLY = 1e-10, (16.0, 16.0, 8.0, 4.0, 2.0, 2.0, 1.4, 1.4, 1.2, 1.1, 1.1, 1.05)
"""First price of a byte of DRAM in seconds, and the factors that change prices, round by round."""


def prices_near_full_hbm(instance: Instance) -> tuple[Float, float]:
    """Return prices of HBM to try, and the bound by the hosts' memory alone.

    At each of the instance's prices, whole tables together take some bytes. The interesting prices
    are around the one at which they fill all HBM.
    """
    hbm_bytes = instance.all_hbm_bytes
    grid = instance.prices
    total = np.zeros((instance.rows_of_costs, grid.size))
    for table in range(instance.tables):
        total += instance.priced_costs(instance.whole(table), instance.kinds[0])
    if total[BYTES].min() > hbm_bytes:  # Some tables need lookups with fewer buffers.
        total = np.sum([_cheapest(instance, table) for table in range(instance.tables)], axis=0)
    price_index = max(0, int(np.searchsorted(total[BYTES], hbm_bytes, side="right")) - 1)
    price = float(grid[min(max(1, price_index + 1), grid.size - 1)])
    staged_s = float(total[DRAM_S, price_index]) / len(instance.dram_bytes)
    busy_s = float(total[GPU_S, price_index]) / instance.gpus
    comparable = instance.sharding_overhead_s is not None and not any(
        option.cold == "cached" and option.shard_count > 1
        for table in range(instance.tables)
        for option in instance.options_of(table)
    )
    dram_s = 0.0
    if staged_s > busy_s / 2 and comparable:
        # The last rows in HBM save a host far less than the average row.
        saved_s = float(total[DRAM_S].max()) / hbm_bytes
        dram_s = _staged_bound(instance, saved_s * np.geomspace(_LEAST_SAVED, 1, _HOST_PRICES))
    return prices_around(price), dram_s


def prices_around(price: float) -> Float:
    """Return prices to try if one is about right: 0 and some around it."""
    if price == 0:
        return np.array([0.0])
    around = np.geomspace(price / _PRICE_SPAN, price * _PRICE_SPAN, _PRICES)
    return np.concatenate(([0.0], around))


def constrained_bound(instance: Instance) -> float:
    """Return the bound by pinned and grouped tables alone, without a step's fixed time.

    See "Pinned tables and tables that stay together" in docs/bounds.md.
    """
    if not instance.problem.constraints:
        return 0.0
    is_gpu = np.arange(instance.gpus) < instance.gpus - instance.servers
    limited = []
    for block in instance.blocks(instance.whole(table) for table in range(instance.tables)):
        may_serve = instance.open_gpus(block)
        is_alone = may_serve[is_gpu].any() != may_serve[~is_gpu].any()
        if is_alone and (len(block) > 1 or not may_serve[is_gpu].all()):
            limited.append((block, may_serve))
    if not limited:
        return 0.0
    prices = instance.prices[1:]  # The first is infinite.
    none, extra_s = np.zeros_like(prices), instance.sharding_overhead_s
    pricer = OptionPricer(instance, prices, none, none + 1.0, np.inf)
    hbm_bytes = np.where(is_gpu, instance.hbm_bytes, 0.0)

    def on_server_s(shard: TableShard) -> float:
        kinds = [kind for kind in instance.kinds if not is_gpu[kind]]
        return min(float(instance.curve(shard, kind).gpu_s.min()) for kind in kinds)

    @cache
    def least_s(table: int, on_servers: bool) -> Float:
        if on_servers:  # All rows are in DRAM, which has no price here.
            ways = [[whole] for whole in instance.uncut(table)]
            if extra_s is None:  # Dividing the table may save something.
                ways = [instance.shards(table, option) for option in instance.options_of(table)]
            return none + min(sum(map(on_server_s, shards)) for shards in ways)
        costs = pricer.every(table) if extra_s is None else pricer.uncut(table, extra_s)
        least: Float = costs.priced_s.min(axis=0)
        return least

    work_s = np.array(
        [
            sum(least_s(instance.alike[one.table], not may_serve[is_gpu].any()) for one in block)
            for block, may_serve in limited
        ]
    )
    every = np.array([may_serve for _, may_serve in limited])
    masks, of_block = np.unique(every, axis=0, return_inverse=True)
    of_masks = np.zeros((len(masks), prices.size))
    np.add.at(of_masks, of_block.ravel(), work_s)
    # Add up the tables whose GPUs are all among those of a mask.
    within = masks.astype(np.float32) @ (~masks).T == 0
    of_masks = np.array([of_masks[inner].sum(axis=0) for inner in within.T])
    of_masks -= (masks @ hbm_bytes)[:, None] * prices
    of_masks /= masks.sum(axis=1)[:, None]
    is_group = [len(block) > 1 for block, _ in limited]
    largest = (every * hbm_bytes).max(axis=1)[:, None]
    of_groups = (work_s - largest * prices)[is_group]
    return max(0.0, float(of_masks.max()), float(of_groups.max(initial=0.0)))


def rough_prices(instance: Instance) -> tuple[float, tuple[float, float, float]]:
    """Estimate the bound and the prices that give it, which `_refined` takes as `around`.

    Tables are not cut, and neither one GPU's memory nor the step's time is a limit.
    """
    best_s, around = 0.0, (_FIRST_PRICE, 1.0, 1.0)
    for factor in _ROUGHLY:
        dram_prices, ratios, server_shares = (
            each.ravel()
            for each in np.meshgrid(
                around[0] * factor ** np.arange(-2.0, 3),
                around[1] * factor ** np.arange(-1.0, 2),
                around[2] * factor ** np.arange(-1.0, 2),
            )
        )
        pricer = OptionPricer(instance, dram_prices * ratios, dram_prices, server_shares, np.inf)
        bounds_s = sum(pricer.roughly(table) for table in range(instance.tables))
        bounds_s -= dram_prices * (ratios * instance.all_hbm_bytes + instance.all_dram_bytes.sum())
        bounds_s /= instance.gpus + instance.servers * (server_shares - 1)
        at = int(bounds_s.argmax())
        best_s = max(best_s, float(bounds_s[at]))
        around = float(dram_prices[at]), float(ratios[at]), float(server_shares[at])
    return best_s, around


def _cheapest(instance: Instance, table: int) -> Float:
    """Return the costs of a whole table at each price, with the cheapest lookup of cold rows."""
    gpu, prices = instance.kinds[0], instance.prices[1:]
    ways = np.array([instance.priced_costs(shard, gpu) for shard in instance.uncut(table)])
    worth = ways[:, GPU_S, 1:] + prices * ways[:, BYTES, 1:]
    # The first price is infinite.
    chosen = np.append(ways[:, BYTES, 0].argmin(), worth.argmin(axis=0))
    cheapest: Float = ways[chosen, :, np.arange(chosen.size)].T
    return cheapest


def _staged_bound(instance: Instance, prices: Float) -> float:
    """Return a bound by the reads and writes of the hosts' memory, with one price for all HBM.

    The argument is that for GPUs, with a host's time and its GPUs' HBM. It holds only if whole
    tables stand for all sharding options, so not with caches. Options may replicate rows even where
    a whole table may not be split, so any rows may be in HBM.
    """
    total = -prices * instance.all_hbm_bytes
    for table in range(instance.tables):
        ways = {(option.cold, option.home) for option in instance.options_of(table)}
        curves = [
            instance.free_curve(TableShard(table, ShardingOption(cold=cold, home=home)), gpu)
            for cold, home in sorted(ways)
            for gpu in instance.kinds
        ]
        total += np.min(
            [(c.dram_s + prices[:, None] * c.hbm_bytes).min(axis=1) for c in curves], axis=0
        )
    return max(0.0, float(total.max())) / len(instance.dram_bytes)
