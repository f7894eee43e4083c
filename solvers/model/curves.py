"""Keep the latest cost curves of shards, and take one point of a curve."""

from collections import OrderedDict
from dataclasses import replace
from typing import TypeVar

import numpy as np

from cost_models import CostCurve
from solvers.model.knapsack import Float

T = TypeVar("T")

_CURVES = 4096
"""Curves kept at a time; priced costs, which are far smaller, are kept for good."""


class Latest(OrderedDict[tuple[object, ...], T]):
    """The latest curves, or costs, by key."""

    def __setitem__(self, key: tuple[object, ...], value: T) -> None:
        """Keep one more, and let the oldest go where there are too many."""
        super().__setitem__(key, value)
        if len(self) > _CURVES:
            self.popitem(last=False)


def weighed(
    curve: CostCurve, weights: Float, host_share: float, peers: int, dram_price: float
) -> CostCurve:
    """A curve whose `gpu_s` weighs phases, the time of a host of so many GPUs, and bytes there."""
    gpu_s, split_s = weights @ curve.phase_s, float(weights @ curve.split_phase_s)
    drive_s = curve.drive_s_of_phases
    if drive_s is not None:  # Of the delay, which nothing on a drive is part of, it has none.
        drive_s = (1 - host_share) * (weights[: len(drive_s)] @ drive_s)
    if host_share:
        gpu_s = (1 - host_share) * gpu_s + host_share * peers * curve.dram_s
        split_s *= 1 - host_share
    if dram_price:
        gpu_s += dram_price * curve.dram_bytes
    return replace(curve, gpu_s=gpu_s, split_s=split_s, drive_s=drive_s)


def at_share(curve: CostCurve, share: float) -> CostCurve:
    """Return a curve of one point: that with `share` of the rows in HBM."""
    hot = round(share * int(curve.hot_rows[-1]))
    inside = 0 < hot < curve.hot_rows[-1]

    def at(values: Float) -> Float:
        return np.array([np.interp(hot, curve.hot_rows, values)])

    return CostCurve(
        hot_rows=np.array([hot]),
        gpu_s=at(curve.gpu_s) + (curve.split_s if inside else 0.0),
        dram_s=at(curve.dram_s),
        hbm_bytes=at(curve.hbm_bytes) + (curve.split_hbm_bytes if inside else 0.0),
        dram_bytes=at(curve.dram_bytes),
        split_s=0.0,
        split_hbm_bytes=0.0,
        gpu_s_of_phases=np.array([at(phase) for phase in curve.phase_s])
        + (curve.split_phase_s[:, None] if inside else 0.0),
        split_s_of_phases=np.zeros_like(curve.split_phase_s),
    )
