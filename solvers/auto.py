"""What `placer plan` runs unless told otherwise: the cost greedy, then the ILP if it helps."""

import time
from dataclasses import replace

from cost_models import CostModel
from placer.problem import Problem
from solvers._base import Limits, SolveResult
from solvers.greedy_cost import GreedyCost
from solvers.ilp import Ilp


class Auto:
    """The cost greedy's plan if its gap is closed, else what the ILP makes of it in time."""

    name = "auto"

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Run a portfolio within the time limit. See `Solver.solve`."""
        started = time.monotonic()
        result = GreedyCost().solve(problem, cost_model, limits)
        left = limits.time_limit_s - (time.monotonic() - started)
        if result.termination.reason in ("optimal", "infeasible") or left <= 0:
            return result
        polished = Ilp().solve(problem, cost_model, replace(limits, time_limit_s=left))
        return polished if polished.plan is not None else result
