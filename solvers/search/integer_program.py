"""The integer program over which GPU serves which shard, for `solvers.strategies.ilp`.

With x[p,g] ∈ {0,1} for shard p on GPU g, z[t,c] ∈ {0,1} for table t in option c, and h[p] the
shard's hot rows::

    minimise T
    Σ_c z[t,c] = 1                                    for each table t
    Σ_g x[p,g] = z[t,c]                               for each shard p of table t in option c
    Σ_p time(p, h[p], f)·x[p,g] ≤ T[f]                for each GPU g and phase f of the step
    Σ_f of a chain T[f] ≤ T                           for each chain of phases
    Σ_p bytes(p, h[p])·x[p,g] ≤ HBM[g]                for each GPU g

RecShard enumerates split points with a binary each, which relaxes badly. Here the rows of times
and bytes are replaced by their combinations, for weights α of phases and prices λ of HBM:

    Σ_p c[p]·x[p,g] ≤ Σ_f α[f]·T[f] + λ·HBM[g]
    with c[p] = min over h of Σ_f α[f]·time(p, h, f) + λ·bytes(p, h)

The weights are those of the objective, at a list of prices, and each phase alone, at a few.

The split of each shard is thereby decided by the price, and only the assignment is left for
CP-SAT. Each row holds for every placement, so CP-SAT's bound is one of the true problem;
and as time is convex in bytes, the rows of all weights and prices together are equivalent to those
they replace (duality of the fractional knapsack), up to the cost of splits. A few
come close, so the placement found is nearly as good as the program says; it is filled GPU
by GPU and costed exactly. Rows that a sharding option replicates count on every GPU.

Sharding options that no plan as good as the one at hand can use are left out: those with a shard
longer than that plan's step, and those whose extra work alone lifts the Lagrangian bound above it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from solvers.bounds.claims import Claim, Options
from solvers.bounds.lagrangian import LagrangianBound
from solvers.bounds.least_cost import least_weighed
from solvers.model.assignment import Assignment
from solvers.model.instance import Instance, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, PHASES, Float
from solvers.result import Limits
from solvers.search.cp_sat import run_cp_sat

_TIME_UNITS = 1_000_000
"""The step time of the plan at hand in integer units, so that rounding is far below any gap."""

_PRICE_FACTORS = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)

_PHASE_PRICE_SHARES = (0.0, 0.4)
"""Prices of HBM in rows of single phases, as shares of that of all."""

_WEIGHT_PARTS = 64
"""Weights of phases are rounded up to so many parts."""

_REPEATED_S = 0.4
"""CP-SAT's own measure of its work, about seconds, where steps are limited and not time."""

_MAX_PLACES = 20_000
"""Shards × GPUs beyond which a model takes longer to build than a search would gain."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What CP-SAT found: shards on GPUs or None, and a claim about the true step time."""

    pairs: tuple[tuple[TableShard, int], ...] | None
    replicas: tuple[TableShard, ...]
    claim: Claim
    status: str
    variables: int


class Program:
    """The assignment problem, and what is needed to read its answer.

    Parameters
    ----------
    instance : Instance
    sharding_options : sequence of sequences of ShardingOption
        By table, those that it may take.
    upper_s : float
        A step time that is to be beaten.
    prices : sequence of float
    looked_at : sequence of sequences of ShardingOption, optional
        By table, those that claims are about: with options that no plan below `upper_s` can use.
    """

    def __init__(
        self,
        instance: Instance,
        sharding_options: Options,
        upper_s: float,
        prices: Sequence[float],
        looked_at: Options | None = None,
    ) -> None:
        from ortools.sat.python import cp_model

        self.instance = instance
        self.gpus = range(instance.gpus)
        self.looked_at = sharding_options if looked_at is None else looked_at
        self.unit_s = upper_s / _TIME_UNITS
        self.rows = _rows(instance, prices)
        self._weights = np.array([weights for weights, _ in self.rows])
        self._prices = np.array([price for _, price in self.rows])
        self._costs: dict[tuple[TableShard, int, float], Float] = {}
        self.model = cp_model.CpModel()
        self.on: dict[tuple[TableShard, int], Any] = {}
        self.option: dict[tuple[int, ShardingOption], Any] = {}
        self._load: list[list[list[Any]]] = [[[] for _ in self.rows] for _ in self.gpus]
        for table, options in enumerate(sharding_options):
            self._add_table(table, options)
        self._keep_together([shard for shard, _ in self.on])
        self.step = self.model.new_int_var(0, _TIME_UNITS, "T")
        self._add_phases()
        self.model.minimize(self.step)

    def _add_phases(self) -> None:
        """Times of phases and chains, and the rows of all GPUs."""
        objective = self.instance.objective
        # What serves anything has one arena's launches at least.
        least_s = np.min(self.instance.launches_s, axis=0)
        phases = [
            self.model.new_int_var(min(_TIME_UNITS, math.floor(s / self.unit_s)), _TIME_UNITS, "")
            for s in least_s.tolist()
        ]
        fixed = np.floor(objective.fixed / self.unit_s).astype(int).tolist()
        for chain, more in zip(objective.schedule.chains, fixed, strict=True):
            self.model.add(sum(phases[phase] for phase in chain) + more <= self.step)
        for gpu in self.gpus:
            for terms, (weights, price) in zip(self._load[gpu], self.rows, strict=True):
                # Whole numbers of parts of a unit, so that weights may be fractions.
                parts = np.ceil(weights * _WEIGHT_PARTS).astype(int).tolist()
                time = sum(part * phase for part, phase in zip(parts, phases, strict=True) if part)
                spent = math.floor(float(weights @ least_s) / self.unit_s)
                credit = math.ceil(price * self._hbm_bytes(gpu) / self.unit_s) - spent
                self.model.add(_WEIGHT_PARTS * (sum(terms) - credit) <= time)

    def _add_table(self, table: int, options: Sequence[ShardingOption]) -> None:
        chosen = [self.model.new_bool_var("") for _ in options]
        self.model.add_exactly_one(chosen)
        for option, used in zip(options, chosen, strict=True):
            self.option[table, option] = used
            shards = self.instance.shards(table, option)
            for shard in shards:
                self._add_shard(shard, used)
            self._keep_apart(shards)
            replica = self.instance.replica(table, option)
            if replica is None:
                continue
            for gpu in self.gpus:
                values = self.instance.priced_costs(replica, gpu)[:, 0]
                for terms, (weights, price) in zip(self._load[gpu], self.rows, strict=True):
                    cost = float(weights @ values[PHASES] + price * values[BYTES])
                    terms.append(math.floor(cost / self.unit_s) * used)

    def _add_shard(self, shard: TableShard, used: Any) -> None:
        here = []
        for gpu in self.gpus:
            if not self.instance.may_serve(shard, gpu):
                continue
            costs = self._least_costs(shard, gpu)
            if not np.isfinite(costs).all():
                continue
            variable = self.model.new_bool_var("")
            here.append(variable)
            self.on[shard, gpu] = variable
            for row, cost in zip(self._load[gpu], costs.tolist(), strict=True):
                row.append(math.floor(cost / self.unit_s) * variable)
        self.model.add(sum(here) == used)

    def _least_costs(self, shard: TableShard, gpu: int) -> Float:
        """What a shard costs at least in each row, shape (rows,): the same on GPUs alike."""
        hbm_bytes = self._hbm_bytes(gpu)
        key = shard, self.instance.kind_of_gpu[gpu], hbm_bytes
        if key not in self._costs:
            curve = self.instance.curve(shard, gpu)
            self._costs[key] = least_weighed(curve, hbm_bytes, self._weights, self._prices)
        return self._costs[key]

    def _hbm_bytes(self, gpu: int) -> float:
        return float(self.instance.hbm_bytes[gpu])

    def _keep_apart(self, shards: Sequence[TableShard]) -> None:
        for gpu in self.gpus if len(shards) > 1 else ():
            here = [self.on[shard, gpu] for shard in shards if (shard, gpu) in self.on]
            self.model.add_at_most_one(here)

    def _keep_together(self, shards: Sequence[TableShard]) -> None:
        for block in self.instance.blocks(dict.fromkeys(shards)):
            for gpu in self.gpus if len({shard.table for shard in block}) > 1 else ():
                on: dict[int, list[Any]] = {}
                for shard in block:
                    on.setdefault(shard.table, []).append(self.on.get((shard, gpu), 0))
                first, *others = (sum(variables) for variables in on.values())
                for other in others:
                    self.model.add(first == other)

    @classmethod
    def build(
        cls,
        instance: Instance,
        bound: LagrangianBound,
        warm: Assignment | None,
        upper_s: float,
        *,
        most_places: int = _MAX_PLACES,
    ) -> "Program | None":
        """The program of a whole instance, or None if it has too many shards × GPUs.

        Nor is there one if the limit is a step of no time, where tables are hardly ever read.
        """
        if not math.isfinite(upper_s):
            upper_s = 8 * bound.step_time_s + instance.fixed_s
        if upper_s <= 0:
            return None
        work_s = upper_s - instance.fixed_s
        spare_s = instance.gpus * work_s - bound.work_s(work_s)
        known = [bound.options_of(table) for table in range(instance.tables)]
        sharding_options = [
            [
                cost.option
                for cost in costs
                if cost.longest_s <= work_s
                and cost.priced_s - bound.least_s(table, work_s) <= spare_s + 1e-12
            ]
            for table, costs in enumerate(known)
        ]
        shards = [option.shard_count for options in sharding_options for option in options]
        places = sum(shards) * instance.gpus
        if places > most_places:
            return None
        program = cls(
            instance,
            sharding_options,
            upper_s,
            price_list(bound.price_s_per_byte),
            [[cost.option for cost in costs] for costs in known],
        )
        if warm is not None:
            program.hint(warm)
        return program

    def hint(self, warm: Assignment) -> None:
        """Start from an assignment."""
        used = {(shard, gpu) for gpu in self.gpus for shard in warm.shards[gpu]}
        options = {(shard.table, shard.option) for shard, _ in used}
        options |= {(shard.table, shard.option) for shard in warm.replicas}
        for place, variable in self.on.items():
            self.model.add_hint(variable, int(place in used))
        for choice, variable in self.option.items():
            self.model.add_hint(variable, int(choice in options))

    def run(self, limits: Limits, time_limit_s: float) -> Answer:
        """Solve, and read the assignment and the bound of the true problem back.

        Raises
        ------
        BackendError
            If CP-SAT rejects the model.
        """
        from ortools.sat.python import cp_model

        solver, status = run_cp_sat(
            self.model, limits, time_limit_s, gap=limits.gap / 4, repeated_s=_REPEATED_S
        )
        pairs, replicas = None, []
        # Times of phases are rounded up to whole units.
        rounded = len(self.instance.objective.schedule.phases)
        bound_s = max(0.0, solver.best_objective_bound - rounded) * self.unit_s
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            pairs = tuple(place for place, variable in self.on.items() if solver.value(variable))
            for (table, option), variable in self.option.items():
                replica = self.instance.replica(table, option)
                if replica is not None and solver.value(variable):
                    replicas.append(replica)
        elif status == cp_model.INFEASIBLE:  # No plan of these options beats the limit.
            bound_s = (_TIME_UNITS - rounded) * self.unit_s
        return Answer(
            pairs,
            tuple(replicas),
            Claim(bound_s, self.looked_at),
            solver.status_name(status),
            len(self.model.proto.variables),
        )


def _rows(instance: Instance, prices: Sequence[float]) -> list[tuple[Float, float]]:
    """Weights of phases and prices of HBM of the rows of each GPU."""
    weights = instance.objective.weights
    rows = [(weights, price) for price in prices]
    phases = weights.size
    if phases == 1:
        return rows
    usual = prices[len(prices) // 2]
    return rows + [
        (own, usual * share) for own in np.eye(phases)[weights > 0] for share in _PHASE_PRICE_SHARES
    ]


def price_list(price: float) -> list[float]:
    """Prices of HBM around one, and none, for the rows of a program."""
    return sorted({0.0, *(price * factor for factor in _PRICE_FACTORS)})
