"""What a search minimises: the step time, and a smooth norm that leads to it.

A chain of phases may also count what shared lanes add, as a sum over shards: see `Delay`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from cost_models import CostCurve
from cost_models.schedule import Schedule, SharedLane
from solvers.model.knapsack import Float

if TYPE_CHECKING:
    from solvers.model.instance import Instance

_NORM = 24
"""Exponent of the norm: the slowest GPU counts most, but two slow GPUs count more than one."""

_LEAST_SHARE = 1e-3
_LEAST_WEIGHT = 1e-4

_DELAYED = "delayed"
"""Name of `Delay`'s phase. It is no work: it says how long other phases are together."""


class Objective:
    """Computes step times from phase times under a schedule.

    `chain_weights`, shape (chains,): weight of each chain in the one number that stands for all
    phases. Weights are not negative and add up to 1. No step is shorter than this weighted mean of
    its chains, so bounds of the number bound the step. Shared lanes only make it longer.
    """

    def __init__(self, schedule: Schedule, chain_weights: Float | None = None) -> None:
        self.schedule = schedule
        self.members = schedule.members
        self.fixed = schedule.fixed
        chains = len(schedule.chains)
        if chain_weights is None:
            chain_weights = np.eye(chains)[0]
        # Of two equally fast plans, prefer the one with less work in any chain.
        little = np.full(chains, _LEAST_WEIGHT)
        self.chain_weights = (
            (1 - little.sum()) * chain_weights + little if chains > 1 else little**0
        )

    @cached_property
    def weights(self) -> Float:
        """Weight of each phase, shape (phases,)."""
        weights: Float = self.chain_weights @ self.members
        return weights

    @property
    def fixed_s(self) -> float:
        """Fixed seconds of chains, weighted."""
        return float(self.chain_weights @ self.fixed)

    def prolonged(self, phase_s: Float, slowest_s: Float | None = None) -> Float:
        """Phase times with what shared lanes add, shape (..., phases); see `Schedule.prolonged`."""
        return self.schedule.prolonged(phase_s.T, slowest_s).T

    def step_time_s(self, phase_s: Float) -> Float:
        """Return step times, (...), from all GPUs' seconds in each phase, (..., GPUs, phases)."""
        return self.longest_s(self.prolonged(phase_s).max(axis=-2))

    def longest_s(self, slowest: Float) -> Float:
        """Return step times, (...), from the slowest GPU's seconds in each phase, (..., phases)."""
        with np.errstate(invalid="ignore"):  # Phases outside a chain may be infinite.
            times: Float = (slowest @ self.members.T + self.fixed).max(axis=-1)
        return np.where(np.isnan(times), np.inf, times)

    def norm_s(self, scale_s: Float, powers: Float) -> Float:
        """Return the norm of phase times, (...), from their `powers`, (..., phases)."""
        return self.longest_s(scale_s * powers ** (1 / _NORM))

    def powers(self, phase_s: Float, scale_s: Float) -> Float:
        """Return the norm's terms of `phase_s`, shape (..., phases), which add up over GPUs."""
        phase_s = self.prolonged(phase_s, scale_s)
        # Infinite seconds, where nothing fits, must not become NaN.
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            share = np.divide(phase_s, scale_s, out=np.zeros_like(phase_s), where=scale_s > 0)
            square = share * share
            eighth = square * square
            eighth = eighth * eighth
            powers: Float = eighth * eighth * eighth
        return powers

    def scale_s(self, phase_s: Float) -> Float:
        """Return the times that phase times are divided by, (phases,), for (GPUs, phases).

        They are the slowest GPU's seconds, or a little for phases without any.
        """
        slowest = self.prolonged(phase_s).max(axis=0)
        scale_s: Float = np.maximum(slowest, _LEAST_SHARE * slowest.sum())
        return scale_s

    def key_s(self, phase_s: Float) -> float:
        """Return the norm of phase times of shape (GPUs, phases): nearly the step time.

        Maxima alone do not tell one slow GPU from several, so ties would stop the search.
        """
        scale_s = self.scale_s(phase_s)
        return float(self.norm_s(scale_s, self.powers(phase_s, scale_s).sum(axis=0)))


def objective_of_servers(instance: "Instance") -> Objective:
    """Return the objective of servers: the chain that takes a server longest with all tables.

    GPUs may count another chain: see "The Lagrangian bound" in docs/bounds.md.
    """
    schedule, last = instance.objective.schedule, instance.gpus - 1
    every = [instance.model_curve(instance.whole(t), last) for t in range(instance.tables)]
    chains_s = schedule.members @ np.sum([curve.phase_s[:, 0] for curve in every], axis=0)
    return Objective(schedule, np.eye(len(chains_s))[chains_s.argmax()])


@dataclass(frozen=True, slots=True)
class Delay:
    """What a shared lane adds to the first chain of a schedule, as a sum over shards.

    Some phases share their lane with a phase of the next batch: the exchange of pooled rows shares
    the network with the exchange of ids. Such a phase takes longer by ``a = min(o, c + i − W)`` if
    that is positive. Here o are a GPU's seconds of the phase, i those of the phase beside it, which
    begins c seconds into the step, and W ≥ c is what all GPUs wait for before
    (`cost_models.schedule.SharedLane`). This depends on all shards of a GPU together. But
    ``x − y ≤ Σ (x − y)⁺`` over shards, so

        W + o + a  ≥  o + min(o + W, c + i)  ≥  c + Σ over a GPU's shards of (o + min(o, i))

    and a step is no shorter than a chain in which c seconds and one phase, of ``o + min(o, i)``
    seconds for each shard, replace the phase and all phases before it.
    """

    lane: SharedLane  # A lane that its phase uses from beginning to end.

    @classmethod
    def of(cls, schedule: Schedule) -> "Delay | None":
        """Return the delay of the first chain that this module can count; None if there is none.

        >>> lane = SharedLane(phase=1, part=1, beside=3, before=(0,), begin_s=0.5)
        >>> names = ("lookup", "outputs", "update", "ids")
        >>> delay = Delay.of(Schedule(names, ((0, 1, 2), (3,)), shared=(lane,)))
        >>> delay.schedule(Schedule(names, ((0, 1, 2), (3,)), (1.0, 0.0))).chains
        ((0, 1, 2), (3,), (2, 4))
        """
        for lane in schedule.shared:
            if lane.part == lane.phase and {lane.phase, *lane.before} <= set(schedule.chains[0]):
                return cls(lane)
        return None

    def schedule(self, schedule: Schedule) -> Schedule:
        """Return a schedule with the added phase and its chain, both last."""
        lane, first = self.lane, schedule.chains[0]
        replaced = {lane.phase, *lane.before}
        chain = (*(phase for phase in first if phase not in replaced), len(schedule.phases))
        fixed_s = tuple(schedule.fixed.tolist())
        return replace(
            schedule,
            phases=(*schedule.phases, _DELAYED),
            chains=(*schedule.chains, chain),
            fixed_s=(*fixed_s, fixed_s[0] + lane.begin_s),
        )

    def with_row(self, phase_s: Float) -> Float:
        """Return a shard's or a launch's seconds of phases, with the added phase's.

        `phase_s`, shape (phases, ...).
        """
        own, beside = phase_s[self.lane.phase], phase_s[self.lane.beside]
        return np.concatenate((phase_s, (own + np.minimum(own, beside))[None]))

    def with_phase(self, curve: CostCurve) -> CostCurve:
        """Return a curve with the added phase."""
        return replace(
            curve,
            gpu_s_of_phases=self.with_row(curve.phase_s),
            split_s_of_phases=self.with_row(curve.split_phase_s),
        )

    def is_likely(self, phase_s: Float) -> bool:
        """Return whether the mean GPU is delayed, given seconds of shape (GPUs, phases)."""
        lane = self.lane
        own, beside = phase_s[:, lane.phase], phase_s[:, lane.beside]
        waited_s = phase_s[:, list(lane.before)].sum(axis=1)
        return bool((lane.begin_s + np.minimum(own, beside)).mean() > waited_s.mean())
