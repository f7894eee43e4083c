"""A lower bound of the step time from the linear relaxation, with the prices of all memory.

The relaxation: each table is a mixture of its placements, by sharding option, shard, GPU and number
of hot rows. With shares x ≥ 0 of them, n[k] GPUs alike in group k and m[j] hosts in group j::

    minimise T
    Σ x = 1                          for each table
    Σ time · x       ≤ n[k] · T      α[k] is the price of a second of one GPU
    Σ bytes · x      ≤ HBM[k]        λ[k] of a byte of HBM
    Σ dram time · x  ≤ m[j] · T      β[j] of a second of one host's memory
    Σ dram bytes · x ≤ DRAM[j]       μ[j] of a byte of DRAM

There are endlessly many placements. The linear program has those that were found so far, and
its dual prices say which others to look for, table by table: column generation (Dantzig and
Wolfe 1960, doi:10.1287/opre.8.1.101). Programs stay small: a row per table and a few more.

The bound is not the program's value, which is too high until the last placement is found,
and rounded, but computed from its prices: for any that are not negative, with
Σ n·α + Σ m·β = 1, a plan of step time T has

    L = Σ over tables of the least α·time + λ·bytes + β·dram time + μ·dram bytes
        − Σ λ·HBM − Σ μ·DRAM  ≤  T

where the least is over everything a table can do, in sharding options whose every shard can finish
within T (Lagrangian duality; Geoffrion 1974, doi:10.1007/BFb0120690). L falls as T grows, so no
plan is faster than the smallest T that is at least L. Prices a bit off make it weaker, not wrong.

The relaxation gives away that shards are whole, and tables together.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from placer.errors import BackendError
from solvers.bounds.lagrangian import LagrangianBound, lagrangian_bound
from solvers.bounds.linear_program_arrays import Space
from solvers.bounds.linear_program_devices import DeviceGroups, Prices, is_large
from solvers.model.instance import Instance

Float = npt.NDArray[np.float64]

_CLOSE_ENOUGH = 1e-5
"""Prices are good enough if others cannot lift the bound by more than this share."""

_STEP_ACCURACY = 1e-7
"""How close to a step time at which other sharding options become possible the bound comes."""

_ROUNDS = 100

_PENALTY = 1e4
"""What all HBM or DRAM of a group once more costs in the program, in steps: it always has an
answer, and prices have a limit."""

_FIRST_PRICES = (0.0, 0.25, 0.6, 1.0, 1.6, 4.0, 1e3)
"""Prices of HBM, in lagrangian ones, whose placements the first program has."""


@dataclass(frozen=True, slots=True)
class GroupPrice:
    """Prices of the resources of one group of GPUs or hosts that are alike.

    Attributes
    ----------
    devices : tuple of int
        Numbers of the GPUs or hosts.
    time_share : float
        The share of the step that waits for their work, all together: where it is less by 1%,
        the step is by this share of 1%.
    price_s_per_byte : float
        Seconds of the step that one more byte of memory on one of them saves.
    memory_bytes : float
        Of all of them.
    """

    devices: tuple[int, ...]
    time_share: float
    price_s_per_byte: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class LpBound:
    """The bound of the linear relaxation, and the prices that prove it.

    Attributes
    ----------
    step_time_s : float
        Infinite if no plan exists.
    gpus, hosts : tuple of GroupPrice
        Prices of HBM and DRAM. They are slopes: of large changes they promise too much.
    status : {"converged", "limit"}
        ``converged``: the relaxation proves no more.
    rounds : int
        Linear programs solved.
    seconds : float
    """

    step_time_s: float
    gpus: tuple[GroupPrice, ...]
    hosts: tuple[GroupPrice, ...]
    status: Literal["converged", "limit"]
    rounds: int
    seconds: float


def lp_bound(
    instance: Instance,
    upper_s: float | None = None,
    *,
    lagrangian: LagrangianBound | None = None,
    time_limit_s: float = 10.0,
    all_options: bool = False,
    stop: Callable[[], bool] | None = None,
) -> LpBound | None:
    """The bound of this module's docstring, at least the lagrangian one; None if there is no time.

    Parameters
    ----------
    instance : Instance
    upper_s : float or None
        Step time of a known plan. What no faster plan can use is left out: the bound is closer.
    lagrangian : LagrangianBound or None
        If it is known already.
    time_limit_s : float
    all_options : bool
        Look at all sharding options of all tables of large problems too: closer, and takes several
        times as long.
    stop : callable or None
        Asked now and then whether to end with what is proven so far.

    Raises
    ------
    BackendError
    """
    started = time.monotonic()
    deadline = started + time_limit_s
    lagrangian = lagrangian or lagrangian_bound(instance)
    upper = np.inf if upper_s is None else upper_s
    large = is_large(instance) and not all_options
    groups = DeviceGroups.of(instance, large)
    space = Space.of(instance, groups, lagrangian.step_time_s, upper, deadline, large=large)
    if space is None:
        return None
    if isinstance(space, int):
        prices = _by_group(groups, _even(groups, 0.0))
        seconds = time.monotonic() - started
        return LpBound(upper, *prices, "converged", 0, seconds)
    search = _Search(space, min(upper, lagrangian.step_time_s), upper)
    status, rounds = search.run(lagrangian.price_s_per_byte / instance.gpus, deadline, stop)
    return LpBound(
        search.bound_s,
        *_by_group(groups, search.best),
        status,
        rounds,
        time.monotonic() - started,
    )


def _by_group(
    groups: DeviceGroups, prices: Prices
) -> tuple[tuple[GroupPrice, ...], tuple[GroupPrice, ...]]:
    gpus = zip(groups.gpus, prices.gpu_s, prices.hbm, groups.hbm_bytes, strict=True)
    hosts = zip(groups.hosts, prices.dram_s, prices.dram, groups.dram_bytes, strict=True)
    by_gpu, by_host = (
        tuple(
            GroupPrice(devices, len(devices) * float(second), float(byte), float(memory))
            for devices, second, byte, memory in of
        )
        for of in (gpus, hosts)
    )
    return by_gpu, by_host


def _even(groups: DeviceGroups, hbm: float, dram_share: float = 0.0) -> Prices:
    """The same prices on all GPUs; a share of the time is hosts'."""
    gpus, hosts = groups.gpu_counts, groups.host_counts
    return Prices(
        np.full(gpus.size, (1 - dram_share) / gpus.sum()),
        np.full(gpus.size, hbm),
        np.full(hosts.size, dram_share / hosts.sum()),
        np.zeros(hosts.size),
    )


class _Search:
    """Column generation: the best bound so far, and the program that looks for better prices.

    The prices `best` prove `bound_s`.
    """

    def __init__(self, space: Space, bound_s: float, upper_s: float) -> None:
        self.space = space
        self.upper_s = upper_s
        # Every option has a longest shard, so that no plan is faster than one of these.
        longest_s = np.minimum.reduceat(space.longest_s, space.first_option)
        self.bound_s = min(upper_s, max(bound_s, float(longest_s.max())))
        self.best = _even(space.groups, 0.0)
        self._strongest_s = -np.inf

    def run(
        self, price: float, deadline: float, stop: Callable[[], bool] | None
    ) -> tuple[Literal["converged", "limit"], int]:
        """Raise the bound until it no longer grows; return how it ended and how many programs ran.

        `price` is about that of a byte of HBM.
        """
        if self.bound_s >= self.upper_s or not self.bound_s > 0:
            return "converged", 0
        # In units of about a step, but at least a picosecond, as ratios have to be finite.
        program = _Program(self.space, max(1e-12, self.bound_s))
        for factor in _FIRST_PRICES:
            for dram_share in (0.0, 0.5):
                prices = _even(self.space.groups, factor * price, dram_share)
                program.add(self._cheapest(prices), prices)
        for done in range(_ROUNDS):
            left_s = deadline - time.monotonic()
            is_over = left_s <= 0 or (stop is not None and stop())
            answer = None if is_over else program.solve(left_s)
            if answer is None:
                return "limit", done
            value_s, prices, wanted_s = answer
            cheapest = self._cheapest(prices)
            # The program's value is never below that of the whole relaxation.
            if value_s <= self.bound_s * (1 + _CLOSE_ENOUGH) or self.bound_s >= self.upper_s:
                return "converged", done + 1
            if not program.add(cheapest, prices, wanted_s):
                return "converged", done + 1
        return "limit", _ROUNDS

    def _cheapest(self, prices: Prices) -> npt.NDArray[np.int64]:
        """The cheapest sharding option of each table, after lifting the bound by these prices."""
        space = self.space
        priced = space.priced(prices)
        credit_s = space.groups.credit_s(prices)

        def least_s(step_time_s: float) -> float:
            allowed = np.where(space.longest_s <= step_time_s, priced, np.inf)
            return float(np.minimum.reduceat(allowed, space.first_option).sum()) - credit_s

        low, value = self.bound_s, least_s(self.bound_s)
        if value > low:
            high = value
            while high - low > _STEP_ACCURACY * high:
                middle = (low + high) / 2
                low, high = (middle, high) if least_s(middle) > middle else (low, middle)
            low = min(self.upper_s, low)
            if low > self.bound_s * (1 + _STEP_ACCURACY):
                self._strongest_s = -np.inf  # Of more options, other prices may prove the most.
            self.bound_s = low
        # Work falls in steps as T grows, and the bound is just below one of them.
        reached_s = self.bound_s * (1 + 2 * _STEP_ACCURACY)
        value = least_s(reached_s)
        if value > self._strongest_s:
            self._strongest_s, self.best = value, prices
        return _argmin_of(
            np.where(space.longest_s <= reached_s, priced, np.inf), space.first_option
        )


def _argmin_of(values: Float, first: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where the least value of each segment is."""
    least = np.repeat(np.minimum.reduceat(values, first), np.diff([*first, values.size]))
    least_at = np.flatnonzero(values == least)
    segment = np.searchsorted(first, least_at, side="right")
    return least_at[np.unique(segment, return_index=True)[1]]


class _Program:
    """The linear program of the placements added so far, in steps and shares of memory."""

    def __init__(self, space: Space, unit_s: float) -> None:
        try:
            from ortools.math_opt.python import mathopt
        except ImportError as error:
            raise BackendError(f"OR-Tools' MathOpt cannot be imported: {error}") from error
        self.mathopt: Any = mathopt
        self.space = space
        self.unit_s = unit_s
        groups = space.groups
        self.counts = np.concatenate((groups.gpu_counts, groups.host_counts))
        self.gpus, self.hosts = len(groups.gpus), len(groups.hosts)
        memory = np.concatenate((groups.hbm_bytes, groups.dram_bytes))
        self.memory = np.where(memory > 0, memory, 1.0)
        self.model = mathopt.Model()
        step = self.model.add_variable(lb=0.0)
        beside = [0.0] * self.gpus + [groups.fixed_s / unit_s] * self.hosts
        self.times = [self.model.add_linear_constraint(ub=limit) for limit in beside]
        for row in self.times:
            row.set_coefficient(step, -1.0)
        self.sizes = [
            self.model.add_linear_constraint(ub=1.0 if has > 0 else 0.0) for has in memory
        ]
        lacking = [self.model.add_variable(lb=0.0) for _ in memory]
        for row, variable in zip(self.sizes, lacking, strict=True):
            row.set_coefficient(variable, -1.0)
        self.model.minimize(step + _PENALTY * sum(lacking))
        self.ones = [self.model.add_linear_constraint(lb=1.0, ub=1.0) for _ in space.first_option]
        self.solver: Any = None

    def add(
        self, options: npt.NDArray[np.int64], prices: Prices, wanted_s: Float | None = None
    ) -> int:
        """Add the cheapest placement of each table in its sharding option; how many were new.

        Left out are those that cost no less than `wanted_s`, shape (tables,), at `prices`.
        """
        added = 0
        for table, option in enumerate(options.tolist()):
            used = self.space.usage(option, prices)
            if wanted_s is not None:
                reduced = self._cost_s(used, prices) - wanted_s[table]
                if reduced >= -1e-9 * self.unit_s:
                    continue
            added += 1
            share = self.model.add_variable(lb=0.0)
            self.ones[table].set_coefficient(share, 1.0)
            seconds, sizes = self._scaled(used)
            for rows, values in ((self.times, seconds), (self.sizes, sizes)):
                for row, value in zip(rows, values.tolist(), strict=True):
                    if value:
                        row.set_coefficient(share, value)
        return added

    def solve(self, time_limit_s: float) -> tuple[float, Prices, Float] | None:
        """The program's value, its prices, and what each table costs; None if it is not solved.

        That is so where time is up, and where numbers are too far apart for GLOP.

        Raises
        ------
        BackendError
            If MathOpt does not solve a program that has a solution.
        """
        mathopt = self.mathopt
        parameters = mathopt.SolveParameters(time_limit=timedelta(seconds=time_limit_s))
        try:
            if self.solver is None:
                self.solver = mathopt.IncrementalSolver(self.model, mathopt.SolverType.GLOP)
            result = self.solver.solve(params=parameters)
        except (RuntimeError, ValueError, AttributeError) as error:
            raise BackendError(f"MathOpt's GLOP broke: {error}") from error
        reason, reasons = result.termination.reason, mathopt.TerminationReason
        if reason in (
            reasons.NO_SOLUTION_FOUND,
            reasons.FEASIBLE,
            reasons.IMPRECISE,
            reasons.NUMERICAL_ERROR,
        ):
            return None
        if reason != reasons.OPTIMAL or not result.has_dual_feasible_solution():
            raise BackendError(
                f"MathOpt's GLOP ended with {reason.name}: {result.termination.detail}"
            )
        # Prices of rows "at most" come as slopes of the step, which more room shortens.
        times, sizes = (
            np.abs(np.minimum(0.0, result.dual_values(rows))) for rows in (self.times, self.sizes)
        )
        times /= times.sum()
        seconds, bytes_ = times / self.counts, sizes * self.unit_s / self.memory
        prices = Prices(
            seconds[: self.gpus], bytes_[: self.gpus], seconds[self.gpus :], bytes_[self.gpus :]
        )
        wanted_s = np.array(result.dual_values(self.ones)) * self.unit_s
        return result.objective_value() * self.unit_s, prices, wanted_s

    def _scaled(self, used: Float) -> tuple[Float, Float]:
        """Seconds in steps of a group, and bytes in its memory; GPUs first, then hosts."""
        at = np.split(used, np.cumsum([self.gpus, self.gpus, self.hosts]))
        seconds, bytes_ = np.concatenate((at[0], at[2])), np.concatenate((at[1], at[3]))
        return seconds / (self.counts * self.unit_s), bytes_ / self.memory

    def _cost_s(self, used: Float, prices: Prices) -> float:
        order = np.concatenate((prices.gpu_s, prices.hbm, prices.dram_s, prices.dram))
        return float(used @ order)
