"""A lower bound of the step that knows of single shards, where GPUs cost the same.

With z[t,o] for table t in option o, x[p,k] for shard p with the hot rows of point k of its curve,
G GPUs and r the replicas of an option, the linear relaxation is::

    minimise T
    Σ_f of a chain T[f] + fixed ≤ T                                        for each chain
    Σ_o z[t,o] = 1,   Σ_k x[p,k] = z[t,o]                      for each table, and shard p of t in o
    Σ_p,k time(p,k,f)·x[p,k] / G + Σ_t,o r(t,o,f)·z[t,o] + launch[f] ≤ T[f]        for each phase
    Σ_o,k time(p,k,f)·x[p,k] + Σ_t,o r(t,o,f)·z[t,o] + launch[f] ≤ T[f]   for each phase and shard p
    Σ_p,k bytes(p,k)·x[p,k] + G · Σ_t,o r_bytes(t,o)·z[t,o] ≤ Σ_g HBM[g]

The fourth rows are what pooling all GPUs does not see: a phase takes as long as its longest shard,
with the replicas of all tables on the same GPU. Shards that cost the same share their rows.

Points are added as they are found (Dantzig and Wolfe 1960, doi:10.1287/opre.8.1.101). The bound is
not the program's value but the Lagrangian one at its prices, over all points, so that neither
rounding nor points that are left out make it too high.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from solvers.bounds.least_cost import points_within
from solvers.bounds.linear_program_tables import distinct_shards
from solvers.model.instance import Instance, ShardingOption
from solvers.model.knapsack import BYTES, PHASES, Float

_MOST_POINTS = 2_000_000
"""Points of shards, a number for each phase, beyond which there is no program."""

_ROUNDS = 30
_ENOUGH = 1e-4
"""The program ends where its value is so near its bound."""


@dataclass(frozen=True, slots=True)
class _Prices:
    """Multipliers of rows: of chains, means of phases, single shards, (rows, phases), and bytes."""

    chains: Float
    means: Float
    singles: Float
    byte_s: float


class PhaseProgram:
    """The program of this module's docstring; see `phase_bound`."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.gpus = instance.gpus
        self.launch_s = np.min(instance.launches_s, axis=0)
        self.phases = self.launch_s.size
        self.hbm_bytes = float(instance.hbm_bytes.sum())
        tables: list[int] = []
        option_of: list[int] = []
        replicas, times, singles = [], [], []
        points: list[Float] = []
        rows: dict[tuple[int, int], int] = {}
        none = np.zeros(1 + self.phases)
        for table in range(instance.tables):
            for option in instance.options_of(table):
                parts = self._parts(table, option)
                if not all(each.size for _, _, each in parts):
                    continue
                replica = instance.replica(table, option)
                costs = None if replica is None else instance.priced_costs(replica, 0)[:, 0]
                replicas.append(none if costs is None else np.append(costs[BYTES], costs[PHASES]))
                for number, same, each in parts:
                    option_of.append(len(tables))
                    times.append(float(same))
                    singles.append(rows.setdefault((table, number), len(rows)))
                    points.append(each)
                tables.append(table)
        self.table_of: npt.NDArray[np.int64] = np.array(tables)
        self.replicas = np.array(replicas).reshape(len(tables), 1 + self.phases)
        self.option_of: npt.NDArray[np.int64] = np.array(option_of, dtype=np.int64)
        self.times, self.single_of = np.array(times), np.array(singles, dtype=np.int64)
        self.singles = len(rows)
        sizes = [each.shape[1] for each in points]
        self.starts = np.cumsum([0, *sizes[:-1]]).astype(np.int64)
        self.sizes = np.array(sizes)
        self.points = np.hstack(points) if points else np.zeros((1 + self.phases, 0))
        unit = np.median(self.points[1:].sum(axis=0)) if points else 0.0
        self.unit_s = float(unit) or 1.0

    def _parts(self, table: int, option: ShardingOption) -> list[tuple[int, int, Float]]:
        """Of shards that cost the same: a number, how many, and points, shape (1 + phases, m)."""
        most_bytes, parts = float(self.instance.hbm_bytes.max()), []
        shards = distinct_shards(self.instance.shards(table, option))
        for number, (shard, same) in enumerate(shards):
            curve = self.instance.curve(shard, 0)
            found = points_within(curve, curve.phase_s, curve.split_phase_s, most_bytes)
            points = np.vstack(found)
            parts.append((number, same, points[:, np.isfinite(points).all(axis=0)]))
        return parts

    def bound(self, prices: _Prices) -> tuple[float, npt.NDArray[np.int64]]:
        """The Lagrangian bound at any prices, and the cheapest point of each part."""
        p, objective = prices, self.instance.objective
        due = p.chains @ objective.members
        paid = p.means + p.singles.sum(axis=0)
        scale = np.divide(due, paid, out=np.zeros_like(due), where=paid > 0)
        means, singles = np.where(paid > 0, p.means * scale, due), p.singles * scale
        weights = means / self.gpus + singles[self.single_of] / self.times[:, None]
        costs = p.byte_s * self.points[0]
        for phase in range(self.phases):
            costs += np.repeat(weights[:, phase], self.sizes) * self.points[1 + phase]
        least = np.minimum.reduceat(costs, self.starts)
        at = np.flatnonzero(costs == np.repeat(least, self.sizes))
        part = np.repeat(np.arange(self.sizes.size), self.sizes)[at]
        cheapest = at[np.unique(part, return_index=True)[1]]
        options = self.replicas[:, 1:] @ due + self.gpus * p.byte_s * self.replicas[:, 0]
        np.add.at(options, self.option_of, self.times * least)
        of_table = np.full(self.instance.tables, np.inf)
        np.minimum.at(of_table, self.table_of, options)
        fixed_s = float(p.chains @ objective.fixed + due @ self.launch_s)
        return float(of_table.sum()) - p.byte_s * self.hbm_bytes + fixed_s, cheapest

    def solve(self, chosen: npt.NDArray[np.int64], time_limit_s: float) -> tuple[float, _Prices]:
        """The value of the program with some points, and its prices; NaN without an answer."""
        from scipy.optimize import linprog

        objective, phases = self.instance.objective, self.phases
        chains = objective.members.shape[0]
        upper, equal = self._rows(chosen)
        limits = np.concatenate(
            (
                -objective.fixed / self.unit_s,
                np.tile(-self.launch_s / self.unit_s, 1 + self.singles),
                [1.0],
            )
        )
        found = linprog(
            np.eye(1, upper.shape[1])[0],
            A_ub=upper,
            b_ub=limits,
            A_eq=equal,
            b_eq=np.repeat([1.0, 0.0], (self.instance.tables, self.sizes.size)),
            method="highs",
            options={"time_limit": max(0.01, time_limit_s)},
        )
        if found.status != 0:
            return float("nan"), _Prices(np.zeros(0), np.zeros(0), np.zeros((0, 0)), 0.0)
        prices = np.maximum(0.0, -found.ineqlin.marginals)
        of_phases = prices[chains:-1].reshape(-1, phases)
        byte_s = float(prices[-1]) * self.unit_s / self.hbm_bytes
        weights = prices[:chains] / prices[:chains].sum()
        return found.fun * self.unit_s, _Prices(weights, of_phases[0], of_phases[1:], byte_s)

    def _rows(self, chosen: npt.NDArray[np.int64]) -> tuple[Any, Any]:
        """Rows "at most" and rows "equal", over T, T[f], z and x."""
        from scipy import sparse

        members, phases, options = self.instance.objective.members, self.phases, self.table_of.size
        part = np.searchsorted(self.starts, chosen, side="right") - 1
        row, phase = np.nonzero(self.points[1:, chosen].T)
        value = self.points[1 + phase, chosen[row]] / self.unit_s
        shape = (1 + self.singles) * phases, chosen.size
        mean = value * self.times[part[row]] / self.gpus, (phase, row)
        single = value, ((1 + self.single_of[part[row]]) * phases + phase, row)
        replicas = (
            self.replicas.T / np.append(self.hbm_bytes, np.full(phases, self.unit_s))[:, None]
        )
        repeated = np.ones((1 + self.singles, 1))
        upper = sparse.bmat(
            [
                [np.full((len(members), 1), -1.0), members, None, None],
                [
                    None,
                    sparse.kron(repeated, -sparse.eye(phases)),
                    sparse.kron(repeated, replicas[1:]),
                    sparse.csr_matrix(mean, shape) + sparse.csr_matrix(single, shape),
                ],
                [
                    None,
                    None,
                    self.gpus * replicas[:1],
                    (self.times[part] * self.points[0, chosen] / self.hbm_bytes)[None],
                ],
            ],
            format="csr",
        )
        taken = sparse.csr_matrix((np.ones(options), (self.table_of, np.arange(options))))
        used = sparse.csr_matrix(
            (-np.ones(part.max() + 1), (np.arange(self.sizes.size), self.option_of)),
            (self.sizes.size, options),
        )
        placed = sparse.csr_matrix((np.ones(chosen.size), (part, np.arange(chosen.size))))
        none = sparse.csr_matrix((self.instance.tables, 1 + phases))
        equal = sparse.bmat([[none, taken, None], [None, used, placed]], format="csr")
        return upper, equal


def phase_bound(
    instance: Instance,
    price_s_per_byte: float,
    *,
    time_limit_s: float,
    stop: Callable[[], bool] | None = None,
) -> float | None:
    """The bound of this module's docstring, in seconds of a step; None where it does not apply.

    It applies where all GPUs cost the same and the problem is not too large.

    Parameters
    ----------
    price_s_per_byte : float
        A price of HBM to begin with, in GPU seconds.

    Examples
    --------
    >>> from cost_models import Roofline
    >>> from placer import Problem, Topology
    >>> from placer.workloads import named_workload
    >>> machine = Topology.parse("2xh100", hbm="1GiB")
    >>> instance = Instance(Problem(named_workload("random-2"), machine, 64), Roofline())
    >>> phase_bound(instance, 1e-15, time_limit_s=60) > instance.fixed_s
    True
    """
    deadline = time.monotonic() + time_limit_s
    if len(instance.kinds) > 1:
        return None
    program = PhaseProgram(instance)
    if not 0 < program.points.shape[1] <= _MOST_POINTS or not program.starts.size:
        return None
    if np.unique(program.table_of).size < instance.tables:
        return None
    chains = np.asarray(instance.objective.chain_weights, dtype=float)
    chains = chains / chains.sum()
    due = chains @ instance.objective.members
    none = np.zeros((program.singles, program.phases))
    best_s, chosen = 0.0, np.zeros(0, dtype=np.int64)
    for factor in (0.0, 0.25, 1.0, 4.0, 1e6):
        price = factor * price_s_per_byte / instance.gpus
        bound_s, cheapest = program.bound(_Prices(chains, due, none, price))
        best_s, chosen = max(best_s, bound_s), np.union1d(chosen, cheapest)
    for _ in range(_ROUNDS):
        left_s = deadline - time.monotonic()
        if left_s <= 0 or (stop is not None and stop()):
            break
        value_s, prices = program.solve(chosen, left_s)
        if not np.isfinite(value_s):
            break
        bound_s, cheapest = program.bound(prices)
        best_s = max(best_s, bound_s)
        more = np.union1d(chosen, cheapest)
        if value_s - best_s <= _ENOUGH * value_s or more.size == chosen.size:
            break
        chosen = more
    return best_s
