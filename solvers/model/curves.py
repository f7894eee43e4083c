"""Cost curves of shards: keep the latest, weigh them, find tables that share them, price them.

Shards are rated at prices of a byte of HBM (`prices_of`).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from cost_models import ColdHome, CostCurve, ShardingOption, TableShard
from placer.problem import Problem
from solvers.model.knapsack import BYTES, GPU_S, Float, Int, costs_of

if TYPE_CHECKING:
    from solvers.model.instance import Instance

T = TypeVar("T", bound=CostCurve | Float)

_MOST_POINTS = 3_000_000
"""Number of points of all curves kept, about 100 bytes each. Priced costs are far smaller and all
kept."""

_PRICED_TABLES = 500
"""With more tables, an even sample sets the prices."""

_COARSE_RATIO = 2.0
_FINE_RATIO = 1.08
_FINE_SPAN = 8.0
"""Prices are dense around the one at which whole tables fill all HBM, up to this factor."""

_LEAST_WORTH = 1e-30
"""Bytes of HBM are worth nothing if worth this much less than others."""


class Latest(OrderedDict[tuple[object, ...], T]):
    """A mapping that keeps the latest curves or costs, as many as have `_MOST_POINTS` points."""

    _points = 0

    def __setitem__(self, key: tuple[object, ...], value: T) -> None:
        """Add a new entry; drop the oldest ones if there are too many points."""
        super().__setitem__(key, value)
        self._points += _points_of(value)
        while self._points > _MOST_POINTS and len(self) > 1:
            _, oldest = self.popitem(last=False)
            self._points -= _points_of(oldest)


def _points_of(value: CostCurve | Float) -> int:
    return value.hot_rows.size if isinstance(value, CostCurve) else value.shape[1]


def weighed(
    curve: CostCurve, weights: Float, host_share: float, peers: int, dram_price: float
) -> CostCurve:
    """Return a curve whose `gpu_s` weighs phases, the host's time shared by its GPUs, and DRAM."""
    gpu_s, split_s = weights @ curve.phase_s, float(weights @ curve.split_phase_s)
    drive_s = curve.drive_s_of_phases
    if drive_s is not None:  # Drives are not part of the delay.
        drive_s = (1 - host_share) * (weights[: len(drive_s)] @ drive_s)
    if host_share:
        gpu_s = (1 - host_share) * gpu_s + host_share * peers * curve.dram_s
        split_s *= 1 - host_share
    if dram_price:
        gpu_s += dram_price * curve.dram_bytes
    return replace(curve, gpu_s=gpu_s, split_s=split_s, drive_s=drive_s)


def curve_at(curve: CostCurve, hot_rows: Int) -> CostCurve:
    """Return a curve with points at other numbers of hot rows, on the lines between its points."""

    def between(values: Float) -> Float:
        return np.interp(hot_rows, curve.hot_rows, values)

    return replace(
        curve,
        hot_rows=hot_rows,
        gpu_s=between(curve.gpu_s),
        dram_s=between(curve.dram_s),
        hbm_bytes=between(curve.hbm_bytes),
        dram_bytes=between(curve.dram_bytes),
        gpu_s_of_phases=np.stack([between(phase_s) for phase_s in curve.phase_s]),
        split_s_of_phases=curve.split_phase_s,
    )


def alike_tables(problem: Problem) -> list[int]:
    """Return for each table the first table that differs from it in names at most.

    Such tables have equal sharding options and equal costs. Tables with counts from a log have no
    other table like them: comparing all counts would take longer than it saves.
    """
    first: dict[object, int] = {}
    constraints, alike = problem.constraints, []
    group_of = {name: group for group in constraints.together for name in group}
    for number, profile in enumerate(problem.profile):
        key: object = number
        if profile.counts is None:
            features = tuple(replace(one, name="") for one in profile.table.features)
            key = (
                replace(profile.table, name="", features=features),
                profile.cdf.ranks.tobytes(),
                profile.cdf.shares.tobytes(),
                profile.locality,
                profile.hit_rates,
                problem.growing.get(profile.name),
                constraints.rule_of(profile.name) if constraints else None,
                group_of.get(profile.name),
            )
        alike.append(first.setdefault(key, number))
    return alike


def pareto(points: Float) -> Float:
    """Return the points that are faster than all points with fewer bytes, (5 + phases, k).

    >>> pareto(np.array([[3.0, 1.0, 2.0], [0.5, 1.0, 2.0]]))
    array([[1. , 3. ],
           [1. , 0.5]])
    """
    order = np.lexsort((points[GPU_S], points[BYTES]))
    seconds = points[GPU_S, order]
    before = np.concatenate(([np.inf], np.minimum.accumulate(seconds)[:-1]))
    return points[:, order[seconds < before]]


def prices_for(whole: Sequence[Float], hbm_bytes: float) -> Float:
    """Return falling prices of a byte, in seconds, dense around the one at which HBM is full.

    `whole`, sequence of float64, shape (5 + phases, m): costs of whole tables, as `costs_of` has
    them.
    """
    low, high = np.inf, 0.0
    for points in whole:
        more = np.diff(points[BYTES])
        saved = -np.diff(points[GPU_S])
        worth = saved[(more > 0) & (saved > 0)] / more[(more > 0) & (saved > 0)]
        if worth.size:
            low, high = min(low, float(worth.min())), max(high, float(worth.max()))
    least = high * _LEAST_WORTH
    if least < np.finfo(np.float64).tiny * 2:  # Smaller numbers lose digits and become 0.
        return np.array([np.inf, 0.0])
    low = max(low, least)
    steps = int(np.log(high / low) / np.log(_COARSE_RATIO)) + 3
    coarse = np.geomspace(high * 2, low / 2, steps)
    taken = np.zeros(steps)
    for points in whole:
        at = np.argmin(points[GPU_S] + coarse[:, None] * points[BYTES], axis=1)
        taken += points[BYTES, at]
    filling_price = coarse[min(steps - 1, int(np.searchsorted(taken, hbm_bytes)))]
    first, last = (min(max(p, low / 2), high * 2) for p in
                   (filling_price * _FINE_SPAN, filling_price / _FINE_SPAN))  # fmt: skip
    steps = max(2, int(np.log(first / last) / np.log(_FINE_RATIO)) + 1)
    every = np.concatenate((coarse, np.geomspace(first, last, steps)))
    return np.concatenate(([np.inf], np.unique(every)[::-1], [0.0]))


def prices_of(instance: "Instance") -> Float:
    """Return prices of a byte of HBM, in seconds, from infinity down to 0.

    They are dense around the price at which all whole tables together fill all HBM.
    """
    sample = range(0, instance.tables, 1 + instance.tables // _PRICED_TABLES)
    gpu, hbm_bytes = (
        instance.kinds[0],
        float(instance.all_hbm_bytes * len(sample) / instance.tables),
    )
    whole = [costs_of(instance.curve(instance.whole(table), gpu)) for table in sample]
    if sum(float(points[BYTES].min()) for points in whole) > hbm_bytes:
        # Buffers do not fit: some tables need lookups with fewer. Bounds are up to 3% closer.
        whole = [
            pareto(np.hstack([costs_of(instance.curve(s, gpu)) for s in instance.uncut(table)]))
            for table in sample
        ]
    prices = prices_for(whole, hbm_bytes)
    if not instance.lacks_dram:
        return prices
    # A row that leaves HBM may save others the way to the drive, and be worth far more.
    on_drive = ShardingOption(home=ColdHome(1.0))
    driven = [costs_of(instance.curve(TableShard(table, on_drive), gpu)) for table in sample]
    both = np.unique(np.concatenate((prices, prices_for(driven, hbm_bytes))))
    return both[::-1]
