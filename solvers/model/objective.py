"""What a search minimises: the step time, and a smooth norm that leads to it."""

from functools import cached_property

import numpy as np

from cost_models.schedule import Schedule
from solvers.model.knapsack import Float

_NORM = 24
"""Exponent of the norm: the slowest GPU counts most, but two slow GPUs count more than one."""

_LEAST_SHARE = 1e-3
_LEAST_WEIGHT = 1e-4


class Objective:
    """Computes step times from phase times under a schedule.

    Attributes
    ----------
    schedule : Schedule
    chain_weights : float64, shape (chains,)
        Weight of each chain in the one number that stands for all phases. Weights are not
        negative and add up to 1. No step is shorter than this weighted mean of its chains, so
        bounds of the number bound the step. Shared lanes only make it longer.
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

    @cached_property
    def is_plain_sum(self) -> bool:
        """Whether all phases have equal weight."""
        return bool((self.weights == 1).all())

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
