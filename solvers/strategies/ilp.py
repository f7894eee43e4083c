"""The cost-optimal placement by integer programming, with a proven bound.

RecShard's decision (doi:10.1145/3503222.3507777, section 4), the GPU that owns a table and
where it is split into hot and cold rows, extended by how it is cut. The cost greedy's plan
starts an iterated local search; what that leaves open goes to CP-SAT
(`solvers.search.integer_program`); the search then polishes CP-SAT's answer. The bound is the
larger of the Lagrangian one and CP-SAT's.
"""

import math
import time

from cost_models import CostModel
from placer.problem import Problem
from solvers.bounds.feasibility import impossible
from solvers.bounds.lagrangian import lagrangian_bound
from solvers.model.assignment import Assignment
from solvers.model.build_plan import result_of
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.result import Limits, SolveResult
from solvers.search.integer_program import Program
from solvers.search.iterated import iterated_search
from solvers.strategies.greedy_cost import greedy_assignment

_GREEDY_SHARE = 0.5
"""Share of the time that the first plan may take where problems are huge."""

_SEARCH_SHARE = 0.25
"""Share of the time for the local search before CP-SAT, and again after it."""


class Ilp:
    """The strategy of this module's docstring."""

    name = "ilp"

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Solve to the gap or a limit. See `Solver.solve`.

        Raises
        ------
        BackendError
            If CP-SAT rejects the model.
        """
        started, clock = time.monotonic(), Clock.start(limits)
        instance = Instance(problem, cost_model)
        failure = impossible(instance)
        if failure:
            return SolveResult(None, failure)
        bound = lagrangian_bound(instance)
        bound_s = bound.step_time_s
        assignment = greedy_assignment(instance, bound, clock.part(_GREEDY_SHARE))
        stats: dict[str, object] = {"lagrangian_bound_s": bound_s}

        def closed() -> bool:
            return assignment is not None and assignment.step_time_s <= bound_s * (1 + limits.gap)

        def searched(start: Assignment, clock: Clock, seed: int) -> Assignment:
            target_s = bound_s * (1 + limits.gap)
            return iterated_search(start, target_s=target_s, seed=seed, clock=clock)

        if assignment is not None and not closed():
            assignment = searched(assignment, clock.part(_SEARCH_SHARE), limits.seed)
        if not closed() and not clock.spent:
            upper_s = assignment.step_time_s if assignment else math.inf
            program = Program.build(instance, bound, assignment, upper_s)
            if program is None:
                stats["cp_sat_status"] = "not run: too many shards"
                if assignment is not None:
                    assignment = searched(assignment, clock, limits.seed + 1)
            elif (left := clock.left_s) > 0.1:
                answer = program.run(limits, left * (1 - _SEARCH_SHARE))
                stats |= {"cp_sat_status": answer.status, "variables": answer.variables}
                bound_s = max(bound_s, min(answer.bound_s, upper_s))
                found = None
                if answer.pairs is not None:
                    found = Assignment.of(instance, answer.pairs, answer.replicas)
                if found is not None and (
                    assignment is None or found.step_time_s < assignment.step_time_s * 1.01
                ):
                    polished = searched(found, clock, limits.seed + 1)
                    assignment = min(
                        (p for p in (assignment, polished) if p is not None),
                        key=lambda p: p.step_time_s,
                    )
        return result_of(
            self.name,
            instance,
            assignment,
            bound=bound,
            bound_s=bound_s,
            clock=clock,
            started=started,
            stats=stats,
        )
