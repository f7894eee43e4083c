"""Keep the latest cost curves of shards, weigh curves, and find tables that share them."""

from collections import OrderedDict
from dataclasses import replace
from typing import TypeVar

from cost_models import CostCurve
from placer.problem import Problem
from solvers.model.knapsack import Float

T = TypeVar("T")

_CURVES = 4096
"""Number of curves kept. Priced costs are far smaller and all kept."""


class Latest(OrderedDict[tuple[object, ...], T]):
    """A mapping that keeps the latest curves or costs."""

    def __setitem__(self, key: tuple[object, ...], value: T) -> None:
        """Add an entry; drop the oldest if there are too many."""
        super().__setitem__(key, value)
        if len(self) > _CURVES:
            self.popitem(last=False)


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
