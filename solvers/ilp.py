"""The cost-optimal placement by integer programming, with a proven bound.

RecShard's decision (doi:10.1145/3503222.3507777, section 4), the GPU that owns a table and
where it is split into hot and cold rows, extended by how it is cut. The cost greedy's plan
starts an iterated local search; what that leaves open goes to CP-SAT (`solvers._program`);
the search then polishes CP-SAT's answer. The bound is the larger of the pooled one and
CP-SAT's.
"""

import math
import time

from cost_models import CostModel
from placer.problem import Problem
from solvers._base import Limits, SolveResult, Termination
from solvers._bound import pooled_bound
from solvers._build import finished, fitted_plan
from solvers._feasibility import impossible
from solvers._instance import Instance
from solvers._packing import Packing
from solvers._program import Program
from solvers._search import iterated_search
from solvers.greedy_cost import best_packing

_SHAKES = 20_000
"""Shakes of each local search; far more than fit into a minute on large problems."""

_SEARCH_SHARE = 0.25
"""Share of the time for the local search before CP-SAT, and again after it."""


class Ilp:
    """The strategy of this module's docstring."""

    name = "ilp"

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Solve to the gap or the time limit. See `Solver.solve`.

        Raises
        ------
        BackendError
            If CP-SAT rejects the model.
        """
        started = time.monotonic()
        deadline = started + limits.time_limit_s
        instance = Instance(problem, cost_model)
        failure = impossible(instance)
        if failure:
            return SolveResult(None, failure)
        bound = pooled_bound(instance)
        bound_s = bound.step_time_s
        packing, _ = best_packing(instance, bound, limits, started)
        stats: dict[str, object] = {"pooled_bound_s": bound_s}

        def closed() -> bool:
            return packing is not None and packing.step_time_s <= bound_s * (1 + limits.gap)

        def searched(start: Packing, until: float, seed: int) -> Packing:
            return iterated_search(
                start,
                target_s=bound_s * (1 + limits.gap),
                seed=seed,
                deadline=until,
                shakes=_SHAKES,
            )

        if packing is not None and not closed():
            until = time.monotonic() + _SEARCH_SHARE * (deadline - time.monotonic())
            packing = searched(packing, until, limits.seed)
        if not closed():
            upper_s = packing.step_time_s if packing else math.inf
            program = Program.build(instance, bound, packing, upper_s)
            if program is None:
                stats["cp_sat_status"] = "not run: too many pieces"
            elif (left := deadline - time.monotonic()) > 0.1:
                answer = program.run(limits, left * (1 - _SEARCH_SHARE))
                stats |= {"cp_sat_status": answer.status, "variables": answer.variables}
                bound_s = max(bound_s, min(answer.bound_s, upper_s))
                if answer.packing is not None and (
                    packing is None or answer.packing.step_time_s < packing.step_time_s * 1.01
                ):
                    polished = searched(answer.packing, deadline, limits.seed + 1)
                    packing = min(
                        (p for p in (packing, polished) if p is not None),
                        key=lambda p: p.step_time_s,
                    )
        plan = fitted_plan(packing) if packing else None
        if packing is None or plan is None:
            return SolveResult(
                None,
                Termination(
                    "no_plan",
                    "time" if time.monotonic() >= deadline else None,
                    "no placement was found: every GPU needs room for the buffers of its "
                    "pieces, every host for their cold rows; raise --hbm or the time limit",
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
            limit_hit=time.monotonic() >= deadline,
            stats=stats | {"moves": packing.moves},
        )
