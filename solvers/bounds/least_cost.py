"""The least cost of a shard at prices of memory, on a GPU with limited HBM."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from cost_models import CostCurve, ShardingOption
from solvers.model.instance import Instance, TableShard
from solvers.model.knapsack import PHASES, Float

_SLICES = 4
"""Number of row slices that are costed besides the last."""


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
        replica = instance.replica(table, option)
        times = list(distinct_shards(instance.shards(table, option)))
        times += [] if replica is None else [(replica, instance.gpus)]
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
