"""What `placer plan` runs unless told otherwise."""

from dataclasses import replace

from cost_models import CostModel
from placer.problem import Problem
from solvers._base import Limits, SolveResult
from solvers.greedy_cost import GreedyCost
from solvers.ilp import Ilp

_GREEDY_IS_ENOUGH = 0.01
"""A gap at which the cost greedy's plan is returned at once."""


class Auto:
    """The cost greedy if it ends within 1% of the bound, else the ILP for the time left."""

    name = "auto"

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Run the cheaper strategy first. See `Solver.solve`."""
        greedy = GreedyCost().solve(problem, cost_model, limits)
        if greedy.termination.reason == "infeasible":
            return greedy
        if greedy.gap is not None and greedy.gap <= max(_GREEDY_IS_ENOUGH, limits.gap):
            return greedy
        left = limits.time_limit_s - float(greedy.stats.get("seconds", 0.0))
        if left <= 0:
            return greedy
        polished = Ilp().solve(problem, cost_model, replace(limits, time_limit_s=left))
        return polished if polished.plan is not None else greedy
