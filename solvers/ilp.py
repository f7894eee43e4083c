"""The cost-optimal placement as an integer program, with a proven bound.

RecShard's decision (doi:10.1145/3503222.3507777, section 4): the GPU that owns a table and
where it is split into hot and cold rows; here of every row slice of a table, with the
number of slices a decision too. With x[p,g] ∈ {0,1} for piece p on GPU g, z[t,s] ∈ {0,1}
for table t in s slices, and h[p] the piece's hot rows::

    minimise T
    Σ_s z[t,s] = 1                                    for each table t
    Σ_g x[p,g] = z[t,s]                               for each piece p of table t in s slices
    Σ_p time(p, h[p])·x[p,g] ≤ T                      for each GPU g
    Σ_p bytes(p, h[p])·x[p,g] ≤ HBM[g]                for each GPU g

RecShard enumerates split points with a binary each, which relaxes badly. Here HBM has a
price λ instead: adding λ times the fourth row to the third leaves, for any h,

    Σ_p c[p]·x[p,g] ≤ T + λ·HBM[g]      with c[p] = min over h of time(p, h) + λ·bytes(p, h)

so that the splits are decided piece by piece and a pure assignment problem remains, which
CP-SAT solves well. Its bound less λ·HBM is a bound of the true problem for every λ ≥ 0
(Lagrangian duality; Geoffrion 1974, doi:10.1007/BFb0120690), and nearly tight at the price
of the pooled problem, because the curves are convex: what one GPU lacks another sells at
about that price. The placement found is then filled GPU by GPU and costed exactly.

Cuts that no plan as good as the greedy's can use are left out first: those with a piece
longer than that plan's step, and those whose extra work alone lifts the pooled bound above
it.
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cost_models import CostModel
from placer.errors import BackendError
from placer.plan.plan import Plan
from placer.problem import Problem
from solvers._base import Limits, SolveResult, Termination
from solvers._bound import PooledBound, least, pooled_bound
from solvers._build import finished, fitted_plan
from solvers._feasibility import impossible
from solvers._instance import EXACT_POINTS, Cut, Instance, Piece
from solvers._packing import Packing
from solvers.greedy_cost import best_packing

_TIME_UNITS = 1_000_000
"""The greedy's step time in integer units, so that rounding is far below any gap."""

_PRICE_FACTORS = (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)

_MAX_PLACES = 20_000
"""Pieces × GPUs beyond which a model takes longer to build than a search would gain."""


class Ilp:
    """The integer program of this module's docstring, warm-started from the cost greedy."""

    name = "ilp"

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Solve to the gap or the time limit. See `Solver.solve`.

        Raises
        ------
        BackendError
            If CP-SAT rejects the model.
        """
        started = time.monotonic()
        instance = Instance(problem, cost_model)
        failure = impossible(instance)
        if failure:
            return SolveResult(None, failure)
        bound = pooled_bound(instance)
        warm, hit = best_packing(instance, bound, limits, started)
        plan = fitted_plan(instance, warm.placements()) if warm else None
        bound_s, detail = bound.step_time_s, ""
        stats: dict[str, object] = {"pooled_bound_s": bound.step_time_s}
        upper = cost_model.evaluate(problem, plan).step_time_s if plan else math.inf
        if upper > bound_s * (1 + limits.gap) and not hit:
            left = limits.time_limit_s - (time.monotonic() - started)
            program = _Program.build(instance, bound, warm, upper)
            if program is None:
                detail = "too large for the integer program: the cost greedy's plan"
            elif left > 0:
                answer = program.run(limits, left)
                stats |= {"cp_sat_status": answer.status, "variables": answer.variables}
                bound_s = max(bound_s, min(answer.bound_s, upper))
                plan = _better(instance, plan, answer.packing)
                hit = answer.limit_hit
        if plan is None:
            return SolveResult(
                None,
                Termination(
                    "no_plan",
                    "time" if hit else None,
                    "no placement was found: every GPU needs room for the buffers of its "
                    "slices, every host for their cold rows; raise --hbm or the time limit",
                ),
                bound_s=bound_s,
                stats=stats,
            )
        return finished(
            self.name,
            instance,
            plan,
            bound_s=bound_s,
            limits=limits,
            started=started,
            limit_hit=hit,
            detail=detail,
            stats=stats,
        )


def _better(instance: Instance, plan: Plan | None, packing: Packing | None) -> Plan | None:
    """The faster of a plan and a packing's plan, by exact evaluation."""
    found = fitted_plan(instance, packing.placements()) if packing else None
    plans = [p for p in (plan, found) if p is not None]
    return min(
        plans,
        key=lambda p: instance.cost_model.evaluate(instance.problem, p).step_time_s,
        default=None,
    )


@dataclass(frozen=True, slots=True)
class _Answer:
    """What CP-SAT found: a packing or none, and a bound of the true step time."""

    packing: Packing | None
    bound_s: float
    status: str
    variables: int
    limit_hit: bool


class _Program:
    """The assignment problem at one price of HBM, and what is needed to read its answer."""

    def __init__(
        self,
        instance: Instance,
        cuts: Sequence[Sequence[Cut]],
        upper_s: float,
        prices: Sequence[float],
    ) -> None:
        from ortools.sat.python import cp_model

        self.instance = instance
        self.unit_s = upper_s / _TIME_UNITS
        self.model = cp_model.CpModel()
        self.on: dict[tuple[Piece, int], Any] = {}
        gpus = range(instance.gpus)
        load: list[list[list[Any]]] = [[[] for _ in prices] for _ in gpus]
        for table, options in enumerate(cuts):
            chosen = [self.model.new_bool_var("") for _ in options]
            self.model.add_exactly_one(chosen)
            for cut, used in zip(options, chosen, strict=True):
                pieces = instance.pieces(table, cut)
                for piece in pieces:
                    here = [self.model.new_bool_var("") for _ in gpus]
                    self.model.add(sum(here) == used)
                    for gpu, variable in zip(gpus, here, strict=True):
                        self.on[piece, gpu] = variable
                        curve = instance.curve(piece, gpu, EXACT_POINTS)
                        hbm_bytes = float(instance.hbm_bytes[gpu])
                        if curve.hbm_bytes.min() > hbm_bytes:
                            self.model.add(variable == 0)
                            continue
                        for row, price in zip(load[gpu], prices, strict=True):
                            cost = least(curve, hbm_bytes, price)[1]
                            row.append(math.floor(cost / self.unit_s) * variable)
                for gpu in gpus if cut.pieces > 1 else ():
                    self.model.add_at_most_one(self.on[piece, gpu] for piece in pieces)
        self.step = self.model.new_int_var(0, _TIME_UNITS, "T")
        for gpu in gpus:
            for row, price in zip(load[gpu], prices, strict=True):
                credit = math.ceil(price * instance.hbm_bytes[gpu] / self.unit_s)
                self.model.add(sum(row) <= self.step + credit)
        self.model.minimize(self.step)

    @classmethod
    def build(
        cls, instance: Instance, bound: PooledBound, warm: Packing | None, upper_s: float
    ) -> "_Program | None":
        """The program of an instance, or None if it is too large to be worth it."""
        if not math.isfinite(upper_s):
            upper_s = 8 * bound.step_time_s
        spare_s = instance.gpus * upper_s - bound.work_s(upper_s)
        cuts = []
        for table in range(instance.tables):
            cheapest = bound.cut_for(table, upper_s)
            assert cheapest is not None, "a plan of this step time exists, or the limit is generous"
            cuts.append(
                [
                    cut.cut
                    for cut in bound.cuts[table]
                    if cut.longest_s <= upper_s
                    and cut.priced_s - cheapest.priced_s <= spare_s + 1e-12
                ]
            )
        if sum(cut.pieces for options in cuts for cut in options) * instance.gpus > _MAX_PLACES:
            return None
        prices = {0.0, *(bound.price_s_per_byte * factor for factor in _PRICE_FACTORS)}
        program = cls(instance, cuts, upper_s, sorted(prices))
        if warm is not None:
            program.hint(warm)
        return program

    def hint(self, warm: Packing) -> None:
        """Start from a packing."""
        used = {(piece, gpu) for gpu, pieces in enumerate(warm.pieces) for piece in pieces}
        for key, variable in self.on.items():
            self.model.add_hint(variable, key in used)

    def run(self, limits: Limits, time_limit_s: float) -> _Answer:
        """Solve, and read the packing and the bound of the true problem back."""
        from ortools.sat.python import cp_model

        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.1, time_limit_s)
        solver.parameters.num_workers = limits.threads or os.cpu_count() or 1
        solver.parameters.random_seed = limits.seed
        solver.parameters.relative_gap_limit = limits.gap / 4
        # Deterministic for a seed as long as the time limit does not strike.
        solver.parameters.interleave_search = True
        status = solver.solve(self.model)
        if status == cp_model.MODEL_INVALID:
            raise BackendError(f"CP-SAT rejects the model: {self.model.validate()}")
        packing = None
        bound_s = solver.best_objective_bound * self.unit_s
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            on = [key for key, variable in self.on.items() if solver.value(variable)]
            packing = Packing.of(self.instance, on)
            if packing is not None:
                packing.improve(time.monotonic() + 1.0)
        elif status == cp_model.INFEASIBLE:
            bound_s = math.inf  # No plan is faster than the one at hand.
        return _Answer(
            packing,
            bound_s,
            solver.status_name(status),
            len(self.model.proto.variables),
            status in (cp_model.FEASIBLE, cp_model.UNKNOWN),
        )
