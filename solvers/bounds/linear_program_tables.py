"""What one table can do: its sharding options, their shards, and all numbers of hot rows of these.

A curve is linear between its points, so that the least of a price-weighted sum over all
numbers of hot rows is at one of them, or at the edge of what a GPU has room or time for.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models import CostCurve
from solvers.bounds.linear_program_devices import DeviceGroups
from solvers.model import knapsack
from solvers.model.instance import Instance, ShardingOption, TableShard
from solvers.model.knapsack import costs_of

Float = npt.NDArray[np.float64]

BYTES, GPU_S, DRAM_S, DRAM_BYTES = range(4)
"""Rows of points."""

_COSTS = [knapsack.BYTES, knapsack.GPU_S, knapsack.DRAM_S, knapsack.DRAM_BYTES]

_INSIDE = 1 + 1e-9
"""What is full may be so much fuller, for rounding: it makes bounds lower."""

_SLICES = 4
"""Row slices that are looked at besides the last."""


@dataclass(frozen=True, slots=True)
class Part:
    """Shards that cost the same: how many, and their points, shape (4, m), on each group.

    DeviceGroups that cannot serve them are left out.
    """

    times: int
    points: dict[int, Float]


@dataclass(frozen=True, slots=True)
class TableChoice:
    """A sharding option: its longest shard, replicas on one GPU of each group, and shards."""

    longest_s: float
    replica_s: Float
    replica_bytes: Float
    parts: tuple[Part, ...]

    @property
    def points(self) -> int:
        """Number of points of all shards."""
        return sum(mine.shape[1] for part in self.parts for mine in part.points.values())


class TableChoices:
    """The sharding options of a table that a plan faster than `upper_s` can use."""

    def __init__(
        self, instance: Instance, groups: DeviceGroups, table: int, upper_s: float
    ) -> None:
        self.instance = instance
        self.groups = groups
        self.table = table
        self.upper_s = upper_s
        allowed = instance.allowed(table)
        self.serving = {
            group: number
            for group, members in enumerate(groups.gpus)
            if (number := sum(allowed is None or bool(allowed[gpu]) for gpu in members))
        }

    def of_options(self, options: Iterable[ShardingOption]) -> list[TableChoice]:
        """The choices of these sharding options; options that no fast plan can use are left out."""
        choices = [self._option(option) for option in options]
        return [choice for choice in choices if choice is not None]

    def whole_suffices(self, least_s: float) -> bool:
        """Whether whole tables may stand for all options, and one GPU serves this one in time."""
        options = self.instance.options_of(self.table)
        whole = [option for option in options if option.shard_count == 1]
        if {(c.replicated_rows, c.cold) for c in options} - {
            (c.replicated_rows, c.cold) for c in whole
        }:
            return False
        # Of shards with caches one may be read in place, another be all in HBM.
        if any(option.cold == "cached" and option.shard_count > 1 for option in options):
            return False
        # Shards that have to be in one tier are not a part of the whole table in one.
        if any(
            not np.isfinite(self._curve(TableShard(self.table, option)).split_s) for option in whole
        ):
            return False
        return any(choice.longest_s <= least_s for choice in self.of_options(whole))

    def of_wholes(self, extra_s: float) -> list[TableChoice]:
        """Choices of whole tables, and for each one more that stands for all its finer options.

        That one is the whole table with its rows split freely, and as large as can be. At prices
        that are the same on all GPUs, shards on several do not do better together.
        """
        options = self.instance.options_of(self.table)
        finer = {
            (option.replicated_rows, option.cold) for option in options if option.shard_count > 1
        }
        whole = [option for option in options if option.shard_count == 1]
        choices = self.of_options(whole)
        for option in whole:
            if (option.replicated_rows, option.cold) in finer:
                replica_s, replica_bytes = self._replicas(option)
                points = _stacked(self._curve(TableShard(self.table, option)))
                points[GPU_S] += extra_s
                parts = (Part(1, {0: points}),)
                choices.append(TableChoice(float(replica_s.max()), replica_s, replica_bytes, parts))
        return choices

    def _option(self, option: ShardingOption) -> TableChoice | None:
        """A sharding option; None if a plan that is fast enough cannot use it."""
        replica_s, replica_bytes = self._replicas(option)
        longest_s = float(replica_s.max())
        parts, least_s = [], []
        for shard, times in distinct_shards(self.instance.shards(self.table, option)):
            points = {
                group: curve_points
                for group in self.serving
                if (curve_points := self._points(shard, group, replica_s, replica_bytes)).size
            }
            if not points:
                return None
            parts.append(Part(times, points))
            least_s.append(
                {
                    group: curve_points[GPU_S].min() + replica_s[group]
                    for group, curve_points in points.items()
                }
            )
        if parts:
            times_of = [part.times for part in parts]
            longest_s = max(longest_s, _longest_s(least_s, times_of, self.serving))
        if not longest_s <= self.upper_s or not np.isfinite(longest_s):
            return None
        return TableChoice(longest_s, replica_s, replica_bytes, tuple(parts))

    def _points(
        self, shard: TableShard, group: int, replica_s: Float, replica_bytes: Float
    ) -> Float:
        """The points of a shard that a GPU of a group has room and time for, replicas included."""
        limits = np.full(4, np.inf)
        limits[BYTES] = self.groups.most_hbm_bytes[group] - replica_bytes[group]
        limits[GPU_S] = self.upper_s - replica_s[group]
        limits[DRAM_S] = self.upper_s + self.groups.fixed_s
        limits[DRAM_BYTES] = self.groups.most_dram_bytes[self.groups.host_of[group]]
        return within(self._curve(shard, group), limits)

    def _curve(self, shard: TableShard, group: int = 0) -> CostCurve:
        return self.instance.curve(shard, self.groups.gpus[group][0])

    def _replicas(self, option: ShardingOption) -> tuple[Float, Float]:
        """Time and bytes of replicas on one GPU of each group."""
        replica = self.instance.replica(self.table, option)
        if replica is None:
            return np.zeros(len(self.groups.gpus)), np.zeros(len(self.groups.gpus))
        curves = [self._curve(replica, group) for group in range(len(self.groups.gpus))]
        return np.array([c.gpu_s[0] for c in curves]), np.array([c.hbm_bytes[0] for c in curves])


def distinct_shards(shards: Sequence[TableShard]) -> list[tuple[TableShard, int]]:
    """Shards that cost different amounts, and how many cost as much, or more.

    Column slices of one width are alike. Thin row slices differ only in which of the hottest ranks
    they hold; the last one has the least work and stands for those that are not looked at.
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


def _longest_s(
    least_s: Sequence[dict[int, float]], times: Sequence[int], servers: dict[int, int]
) -> float:
    """A lower limit of the slowest shard's time, as shards of a table need a GPU each.

    Parameters
    ----------
    least_s : sequence of dict
        Time of a shard on each group that can serve it.
    times : sequence of int
        How many such shards there are.
    servers : dict
        GPUs of each group.
    """
    lowest = max(min(mine.values()) for mine in least_s)
    if len(servers) == 1:
        return lowest if sum(times) <= sum(servers.values()) else float("inf")
    for step_s in sorted({t for mine in least_s for t in mine.values() if t >= lowest}):
        # Shards that only some groups serve in time must not be more than their GPUs (Hall).
        able = [frozenset(group for group, t in mine.items() if t <= step_s) for mine in least_s]
        if all(
            sum(n for n, mine in zip(times, able, strict=True) if mine <= some)
            <= sum(servers[group] for group in some)
            for some in {*able, frozenset(servers)}
        ):
            return step_s
    return float("inf")


def _stacked(curve: CostCurve) -> Float:
    """The points of a curve without the costs of splits, shape (4, m)."""
    points = np.empty((4, curve.hot_rows.size))
    points[BYTES], points[GPU_S] = curve.hbm_bytes, curve.gpu_s
    points[DRAM_S], points[DRAM_BYTES] = curve.dram_s, curve.dram_bytes
    return points


def within(curve: CostCurve, limits: Float) -> Float:
    """The corners of the part of a curve that is within limits, shape (4, m), m may be 0.

    The least of any price-weighted sum over that part, for prices of at least 0, is at one of
    them. All or no rows in HBM are without the cost of a split.

    Parameters
    ----------
    limits : float64, shape (4,)
        Of HBM bytes, GPU seconds, DRAM seconds and DRAM bytes.
    """
    loose = (limits * _INSIDE)[:, None]
    points = costs_of(curve)[_COSTS]
    fits = (points <= loose).all(axis=0)
    if fits.all() or curve.hot_rows.size == 1 or not np.isfinite(curve.split_s):
        return points[:, fits]
    # Where the curve, with the cost of a split, crosses a limit between two of its points.
    # (Just beside an end it costs more than there, and crosses no limit that the end meets.)
    inner = _stacked(curve)
    inner[BYTES] += curve.split_hbm_bytes
    inner[GPU_S] += curve.split_s
    edge = [points[:, fits]]
    inside = inner <= limits[:, None]
    for row, limit in enumerate(limits):
        crossed = np.flatnonzero(inside[row, :-1] != inside[row, 1:])
        low, high = inner[:, crossed], inner[:, crossed + 1]
        at = low + (limit - low[row]) / (high[row] - low[row]) * (high - low)
        edge.append(at[:, (at <= loose).all(axis=0)])
    return np.concatenate(edge, axis=1)
