"""Costs of sharding options at several prices of HBM, and which options a bound needs.

A *stand-in* is the whole table with its rows split freely and without the limit of one GPU's
memory, plus `CostModel.sharding_overhead_s`. Every way to cut the table costs at least that. See
"Sharding options that need no look" in docs/bounds.md.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from cost_models import ANY_SHARE, CostCurve
from solvers.model.instance import Instance, ShardingOption, TableShard
from solvers.model.knapsack import PHASES, Float

_SLICES = 4
"""Number of row slices that are costed besides the last."""


@dataclass(frozen=True, slots=True)
class OptionCosts:
    """Sharding options of a table with times, and costs at several prices."""

    options: tuple[ShardingOption, ...]
    longest_s: Float  # Shape (options,): least time of the slowest shard.
    replica_s: Float  # Shape (options,): part of it that every GPU spends on replicas.
    priced_s: Float  # Shape (options, prices): least time plus price × bytes, summed over shards.
    # The last options are stand-ins: for all ways to cut a table in each of these options.
    stood_for: tuple[int, ...] = ()

    @property
    def own(self) -> int:
        """Number of options that are not stand-ins."""
        return len(self.options) - len(self.stood_for)

    def enough_from_s(self, price: int) -> float:
        """Return the step time from which dividing the table gains nothing, at price `price`.

        Infinite if dividing may gain at any step time.
        """
        priced_s, uncut = self.priced_s[:, price], list(self.stood_for)
        if (priced_s[uncut] > priced_s[self.own :]).any():
            return float("inf")
        return float(self.longest_s[uncut].max(initial=0.0))


class OptionPricer:
    """Costs sharding options, each shard on its best kind of GPU.

    - `prices`, shape (m,): price of a byte of HBM, in seconds.
    - `dram_prices`, shape (m,): price of a byte of DRAM, one for each of `prices`.
    - `server_shares`, shape (m,): worth of a server's second, in seconds of a GPU. Its memory is
      free.
    - `limit_s`: seconds that a shard's rows on a drive may take.
    """

    def __init__(
        self,
        instance: Instance,
        prices: Float,
        dram_prices: Float,
        server_shares: Float,
        limit_s: float,
    ) -> None:
        self.instance = instance
        self.prices, self.dram_prices = prices, dram_prices
        self.server_shares, self.limit_s = server_shares, limit_s
        # Column slices of one width share a curve, in all of a table's options.
        self._least = lru_cache(256)(self._of_curve)
        kinds = np.array(instance.kind_of_gpu)
        every = range(len(instance.kinds))
        self.most_of_kind = [float(instance.hbm_bytes[kinds == kind].max()) for kind in every]

    def every(self, table: int) -> OptionCosts:
        """Return the costs of every sharding option of a table."""
        options = self.instance.options_of(table)
        return _joined(options, [self._costs(table, option) for option in options])

    def uncut(self, table: int, extra_s: float) -> OptionCosts:
        """Return costs of options without a cut, with caches, and of stand-ins for all others.

        A stand-in stands for options with the same replicas and lookup of cold rows.

        `extra_s`: least cost of cutting a table.
        """
        instance, options = self.instance, self.instance.options_of(table)
        cut = {_way(one) for one in options if one.shard_count > 1 and one.cold != "cached"}
        known = [one for one in options if one.shard_count == 1 or one.cold == "cached"]
        stood_for = [n for n, one in enumerate(known) if _way(one) in cut]
        if len(stood_for) < len(cut):
            return self.every(table)
        costs = [self._costs(table, option) for option in known]
        for number in stood_for:
            free = self._replicas(table, known[number])[1] + extra_s
            for shard in instance.shards(table, known[number]):
                free = free + self._free(shard)
            replica_s = costs[number][1]
            costs.append((replica_s, replica_s, free))  # Its shards may be arbitrarily short.
        every = (*known, *(known[number] for number in stood_for))
        return _joined(every, costs, tuple(stood_for))

    def promising(self, table: int, uncut: OptionCosts, least_s: float) -> OptionCosts:
        """Return the options that may be the cheapest in a step of at least `least_s` seconds.

        If a stand-in of `uncut` is cheaper than every known option at some price, cost the options
        that it stands for; otherwise keep the stand-in.
        """
        known = list(zip(uncut.longest_s, uncut.replica_s, uncut.priced_s, strict=True))
        costs = dict(zip(uncut.options, known[: uncut.own], strict=False))
        cut = [option for option in self.instance.options_of(table) if option not in costs]
        left: list[int] = []
        for place in sorted(range(uncut.own, len(known)), key=lambda n: uncut.priced_s[n].min()):
            short = [priced_s for longest_s, _, priced_s in costs.values() if longest_s <= least_s]
            if short and (uncut.priced_s[place] >= np.min(short, axis=0)).all():
                left.append(place)
                continue
            way = _way(uncut.options[place])
            costs |= {one: self._costs(table, one) for one in cut if _way(one) == way}
        options = (*costs, *(uncut.options[place] for place in left))
        stood_for = tuple(uncut.stood_for[place - uncut.own] for place in left)
        return _joined(options, [*costs.values(), *(known[place] for place in left)], stood_for)

    def _costs(self, table: int, option: ShardingOption) -> tuple[float, float, Float]:
        """Return seconds of an option's longest shard and replicas, and its costs at each price."""
        instance = self.instance
        replica_s, priced = self._replicas(table, option)
        shards = instance.shards(table, option)
        if not shards:
            return replica_s, replica_s, priced
        longest_s = 0.0
        for shard, count in distinct_shards(shards):
            time_s, priced_s = self._best(shard)
            longest_s, priced = max(longest_s, time_s), priced + count * priced_s
        return replica_s + longest_s, replica_s, priced

    def _best(self, shard: TableShard) -> tuple[float, Float]:
        """Return the least time, and time + price × bytes at each price, on the best GPU kind."""
        instance, least_of_kinds = self.instance, []
        is_open = shard.option.home.drive_share == ANY_SHARE
        for gpu, most in zip(instance.kinds, self.most_of_kind, strict=True):
            curve = (instance.free_curve if is_open else instance.curve)(shard, gpu)
            least_of_kinds.append(self._least(curve, most, instance.is_gpu(gpu)))
        return min(time_s for time_s, _ in least_of_kinds), np.min(
            [p for _, p in least_of_kinds], axis=0
        )

    def _of_curve(self, curve: CostCurve, most: float, is_gpu: bool) -> tuple[float, Float]:
        if is_gpu:
            return least(curve, most, self.prices, self.dram_prices, self.limit_s)
        time_s, priced_s = least(curve, most, np.zeros(1), np.zeros(1))
        return time_s, priced_s * self.server_shares

    def roughly(self, table: int) -> Float:
        """Estimate the least cost of a whole table at each price."""
        instance, least_s = self.instance, np.full_like(self.prices, np.inf)
        for option in instance.options_of(table):
            if option.shard_count == 1:
                priced_s = self._replicas(table, option)[1]
                for shard in instance.shards(table, option):
                    priced_s = priced_s + self._free(shard)
                least_s = np.minimum(least_s, priced_s)
        return least_s

    def _free(self, shard: TableShard) -> Float:
        """Return a lower bound of time + price × bytes of a shard, however it is divided.

        It leaves out what dividing adds, the cost of splits, and the limit of one GPU.
        """
        priced_s = []
        for one, gpu in product({shard, shard.stand_in()}, self.instance.kinds):
            curve = self.instance.free_curve(one, gpu)
            if not self.instance.is_gpu(gpu):
                priced_s.append(self.server_shares * curve.gpu_s[0])
                continue
            hbm_s = self.prices[:, None] * curve.hbm_bytes
            cold_s = cold_costs(curve, self.dram_prices)
            points_s = curve.gpu_s + hbm_s + cold_s
            priced_s.append(points_s.min(axis=1))
            if one.is_stand_in:  # Any rows may be in HBM: take those that pay.
                priced_s.append(points_s[:, 0] + np.diff(points_s).clip(max=0.0).sum(axis=1))
        lowest: Float = np.min(priced_s, axis=0)
        return lowest

    def _replicas(self, table: int, option: ShardingOption) -> tuple[float, Float]:
        """Return the time of replicas on the best GPU, and their cost on all GPUs together."""
        instance, least_s, total = self.instance, 0.0, np.zeros_like(self.prices)
        for shard in instance.replicas(table, option):
            curves = [instance.curve(shard, gpu) for gpu in instance.kinds]
            least_s = min(float(curve.gpu_s[0]) for curve in curves)
            for curve, count in zip(curves, np.bincount(instance.kind_of_gpu), strict=True):
                total += count * (curve.gpu_s[0] + self.prices * curve.hbm_bytes[0])
        return least_s, total


def _way(option: ShardingOption) -> tuple[object, ...]:
    """Return an option's properties other than its cut."""
    return option.replicated_rows, option.cold, option.home


def _joined(
    options: tuple[ShardingOption, ...],
    costs: list[tuple[float, float, Float]],
    stood_for: tuple[int, ...] = (),
) -> OptionCosts:
    longest_s, replica_s, priced_s = (np.array(each) for each in zip(*costs, strict=True))
    return OptionCosts(options, longest_s, replica_s, priced_s, stood_for)


def least(
    curve: CostCurve, hbm_bytes: float, prices: Float, dram_prices: Float, limit_s: float = np.inf
) -> tuple[float, Float]:
    """Return least time, and least time + price × bytes, of a shard within `hbm_bytes`, in seconds.

    With all or no rows in HBM there is no cost of a split. The result is infinite if not even the
    shard's buffers fit.

    - `prices`, shape (m,): prices of a byte of HBM.
    - `dram_prices`, shape (m,): prices of a byte of DRAM, one for each of `prices`.
    - `limit_s`: seconds that a drive may take.

    The results are a number, and numbers of shape (m,).
    """
    split_s = np.append(curve.split_s, np.zeros(prices.size))
    seconds = np.vstack((curve.gpu_s, cold_costs(curve, dram_prices, limit_s)))
    bytes_, (times, *cold) = points_within(curve, seconds, split_s, hbm_bytes)
    if not bytes_.size:
        return float("inf"), np.full(prices.shape, np.inf)
    priced_s = times + prices[:, None] * bytes_ + np.array(cold)
    return float(times.min()), priced_s.min(axis=1)


def cold_costs(curve: CostCurve, dram_prices: Float, limit_s: float = np.inf) -> Float:
    """Return the least cost of rows that are not in HBM, shape (prices, m).

    Without a drive that is their DRAM at each price. If any share may be on the drive, the coldest
    rows are there whose time costs less than their bytes in DRAM, but at most about what the drive
    reads within `limit_s`.
    """
    dram_s = dram_prices[:, None] * curve.dram_bytes
    if curve.drive_s is None:
        return dram_s
    from_here = curve.drive_s - dram_s
    # Also allow the point before the limit: rows between both points may be within it.
    from_here[:, : max(0, int((curve.drive_s > limit_s).sum()) - 1)] = np.inf
    cheapest: Float = np.minimum.accumulate(from_here[:, ::-1], axis=1)[:, ::-1]
    return dram_s + cheapest


def points_within(
    curve: CostCurve, seconds: Float, split_s: Float, hbm_bytes: float
) -> tuple[Float, Float]:
    """Return bytes, shape (k,), and seconds, shape (rows, k), of the part of a curve that fits.

    `seconds`, `split_s`, shapes (rows, m) and (rows,): seconds over the curve, row by row, and the
    seconds that a split adds to each row.
    """
    bytes_ = curve.hbm_bytes
    fits = bytes_ <= hbm_bytes
    ends = [end for end in (0, -1) if fits[end]]
    every_bytes, every_s = [bytes_[ends]], [seconds[:, ends]]
    if np.isfinite(curve.split_s):
        # Include the ends again with a split, for points just beside them.
        every_bytes.append(bytes_[fits] + curve.split_hbm_bytes)
        every_s.append(seconds[:, fits] + split_s[:, None])
        # Between a point that fits and the next, which does not, go to the last byte. (The other
        # way round, the point that fits is better: it has less time and fewer bytes.)
        edges = np.flatnonzero(fits[:-1] & ~fits[1:])
        if edges.size:
            part = (hbm_bytes - bytes_[edges]) / (bytes_[edges + 1] - bytes_[edges])
            more_s = part * (seconds[:, edges + 1] - seconds[:, edges])
            every_bytes.append(np.full(edges.size, hbm_bytes))
            every_s.append(seconds[:, edges] + more_s + split_s[:, None])
    return np.concatenate(every_bytes), np.concatenate(every_s, axis=1)


def waits(instance: Instance, phases: Sequence[int], seconds: float) -> bool:
    """Return whether the slowest GPU spends this long in some phases under any placement.

    Add up the largest tables until they are enough.
    """
    rows, kinds = list(phases), instance.kinds

    def least_s(table: int, option: ShardingOption) -> float:
        """Return the least seconds of an option, on all GPUs together."""
        times = list(distinct_shards(instance.shards(table, option)))
        times += [(replica, instance.gpus) for replica in instance.replicas(table, option)]
        return sum(
            count * min(float(instance.curve(one, gpu).phase_s[rows].sum(0).min()) for gpu in kinds)
            for one, count in times
        )

    # Whole tables give the order, and a sum at which to give up.
    gpu = instance.kinds[0]
    whole = [
        float(instance.priced_costs(instance.whole(table), gpu)[PHASES][rows].sum(axis=0).min())
        for table in range(instance.tables)
    ]
    left_s, rest_s = seconds * instance.gpus, sum(whole)
    for table in np.argsort(whole)[::-1].tolist():
        if left_s <= 0 or left_s > rest_s:  # Enough, or too little even if no table takes less.
            break
        left_s -= min(least_s(table, option) for option in instance.options_of(table))
        rest_s -= whole[table]
    return left_s <= 0


def distinct_shards(shards: Sequence[TableShard]) -> list[tuple[TableShard, int]]:
    """Return shards of different cost, each with the number of shards that cost at least as much.

    Column slices of one width are alike. Thin row slices differ only in which of the hottest rows
    they hold. The last slice has the least work and stands for slices that are not costed.
    """
    if not shards:
        return []
    option = shards[0].option
    slices_of_width = Counter(option.column_widths or (0,))
    slices = [(row_slice, 1) for row_slice in range(min(option.row_slices, _SLICES))]
    if option.row_slices > _SLICES:
        slices.append((option.row_slices - 1, option.row_slices - _SLICES))
    return [
        (
            TableShard(
                shards[0].table,
                option,
                row_slice,
                option.column_widths.index(width) if width else 0,
            ),
            times * same,
        )
        for width, same in slices_of_width.items()
        for row_slice, times in slices
    ]
