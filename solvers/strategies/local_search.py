"""Local search: the cost greedy's plan, annealed, then improved by chosen moves until time is up.

`solvers.search.annealing` makes many random moves, `solvers.search.moves` has the chosen ones
(move, swap, cut anew), `solvers.search.iterated` the way out of their local optima.
"""

import time

from cost_models import CostModel
from placer.problem import Problem
from solvers.bounds.feasibility import impossible
from solvers.bounds.lagrangian import lagrangian_bound
from solvers.model.build_plan import result_of
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.result import Limits, SolveResult
from solvers.search.annealing import anneal
from solvers.search.iterated import iterated_search
from solvers.strategies.greedy_cost import greedy_assignment

_GREEDY_SHARE, _ANNEALING_SHARE = 0.5, 0.8
"""Shares of the time that is left for the first plan, and then for annealing."""


class LocalSearch:
    """The strategy of this module's docstring."""

    name = "local-search"

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Search to the gap or a limit. See `Solver.solve`."""
        started, clock = time.monotonic(), Clock.start(limits)
        instance = Instance(problem, cost_model)
        failure = impossible(instance)
        if failure:
            return SolveResult(None, failure)
        bound = lagrangian_bound(instance)
        target_s = bound.step_time_s * (1 + limits.gap)
        assignment = greedy_assignment(instance, bound, clock.part(_GREEDY_SHARE))
        if assignment is not None:
            assignment = anneal(
                assignment, target_s=target_s, seed=limits.seed, clock=clock.part(_ANNEALING_SHARE)
            )
            assignment = iterated_search(
                assignment, target_s=target_s, seed=limits.seed, clock=clock
            )
        return result_of(self.name, instance, assignment, bound=bound, clock=clock, started=started)
