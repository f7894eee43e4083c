"""Greedy by cost: cut what is too much for one GPU, pack by time, fill HBM by saving per byte.

1. The Lagrangian bound says how many row slices each table needs for a given step time.
2. Slices are packed longest first onto the GPU that would finish first, each with the hot
   rows that the pooled HBM would give it.
3. Each GPU fills its own HBM with the rows that save most per byte (`solvers.model.knapsack`).
4. Slices move or swap between the slowest GPU and others while that makes it faster.

Steps 2 to 4 run for a few target step times above the bound; the best plan is kept.
"""

import time

from cost_models import CostModel
from placer.problem import Problem
from solvers.bounds.feasibility import impossible
from solvers.bounds.lagrangian import LagrangianBound, lagrangian_bound
from solvers.model.assignment import Assignment
from solvers.model.build_plan import result_of
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.result import Limits, SolveResult
from solvers.search.construction import construct
from solvers.search.moves import improve

_TARGETS = (1.0, 1.01, 1.03, 1.08, 1.2, 0.85, 0.7, 1.5, 2.5)
_CLOSE_ENOUGH = 1e-3


class GreedyCost:
    """The strategy of this module's docstring."""

    name = "greedy-cost"

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Cut, pack, fill, improve. See `Solver.solve`."""
        started, clock = time.monotonic(), Clock.start(limits)
        instance = Instance(problem, cost_model)
        failure = impossible(instance)
        if failure:
            return SolveResult(None, failure)
        bound = lagrangian_bound(instance)
        assignment = greedy_assignment(instance, bound, clock)
        return result_of(self.name, instance, assignment, bound=bound, clock=clock, started=started)


def greedy_assignment(
    instance: Instance, bound: LagrangianBound, clock: Clock
) -> Assignment | None:
    """The best assignment over the targets, as far as the clock lets it come; at least one."""
    best: Assignment | None = None
    for target in _TARGETS:
        assignment = construct(instance, bound, target * bound.step_time_s)
        if assignment is not None:
            improve(assignment, clock)
            if best is None or assignment.step_time_s < best.step_time_s:
                best = assignment
        if best is not None and (
            clock.spent or best.step_time_s <= bound.step_time_s * (1 + _CLOSE_ENOUGH)
        ):
            return best
    return best
