"""Local search: the cost greedy's plan, annealed, then improved by chosen moves until time is up.

`solvers._anneal` makes many random moves, `solvers._moves` has the chosen ones (move, swap,
cut anew), `solvers._search` the way out of their local optima.
"""

import time

from cost_models import CostModel
from placer.problem import Problem
from solvers._anneal import anneal
from solvers._base import Limits, SolveResult
from solvers._bound import pooled_bound
from solvers._build import result_of
from solvers._clock import Clock
from solvers._feasibility import impossible
from solvers._instance import Instance
from solvers._search import iterated_search
from solvers.greedy_cost import best_packing

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
        bound = pooled_bound(instance)
        target_s = bound.step_time_s * (1 + limits.gap)
        packing = best_packing(instance, bound, clock.part(_GREEDY_SHARE))
        if packing is not None:
            packing = anneal(
                packing, target_s=target_s, seed=limits.seed, clock=clock.part(_ANNEALING_SHARE)
            )
            packing = iterated_search(packing, target_s=target_s, seed=limits.seed, clock=clock)
        return result_of(self.name, instance, packing, bound=bound, clock=clock, started=started)
