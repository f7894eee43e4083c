"""What `placer plan` runs unless told otherwise: a portfolio within the time limit.

One packing goes from strategy to strategy, until it is within the gap of the bound or time
is up: the cost greedy's first plan; annealing; the integer program where it is small enough
to be solved; large neighbourhoods for the time that is left. Whenever it is stopped, it
returns the best plan so far.
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
from solvers._packing import Packing
from solvers._program import Program
from solvers.greedy_cost import best_packing
from solvers.lns import neighbourhood_search

_GREEDY_SHARE, _ANNEALING_SHARE, _PROGRAM_SHARE = 0.6, 0.7, 0.7
"""Shares of the time that is left when each of these begins."""

_SMALL = 1500
"""Pieces × GPUs up to which the integer program is tried: it mostly proves its answer."""


class Auto:
    """The strategy of this module's docstring."""

    name = "auto"

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Search to the gap or a limit. See `Solver.solve`.

        Raises
        ------
        BackendError
            If CP-SAT rejects a model.
        """
        started, clock = time.monotonic(), Clock.start(limits)
        instance = Instance(problem, cost_model)
        failure = impossible(instance)
        if failure:
            return SolveResult(None, failure)
        bound = pooled_bound(instance)
        bound_s = bound.step_time_s
        stats: dict[str, object] = {"pooled_bound_s": bound_s}

        def is_open() -> bool:
            if clock.spent:
                return False
            return packing is None or packing.step_time_s > bound_s * (1 + limits.gap)

        packing = best_packing(instance, bound, clock.part(_GREEDY_SHARE))
        stats["greedy_s"] = packing.step_time_s if packing else None
        if packing is not None and is_open():
            packing = anneal(
                packing,
                target_s=bound_s * (1 + limits.gap),
                seed=limits.seed,
                clock=clock.part(_ANNEALING_SHARE),
            )
            stats["annealed_s"] = packing.step_time_s
        if is_open():
            upper_s = packing.step_time_s if packing else float("inf")
            program = Program.build(instance, bound, packing, upper_s, most_places=_SMALL)
            if program is not None:
                answer = program.run(limits, clock.left_s * _PROGRAM_SHARE)
                stats |= {"cp_sat_status": answer.status, "variables": answer.variables}
                bound_s = max(bound_s, min(answer.bound_s, upper_s))
                found = answer.pairs and Packing.of(instance, answer.pairs, answer.replicas)
                if found and (packing is None or found.step_time_s < packing.step_time_s):
                    packing = found
        if packing is not None and is_open() and instance.gpus > 1:
            packing, stats["rounds"] = neighbourhood_search(
                packing,
                bound,
                target_s=bound_s * (1 + limits.gap),
                seed=limits.seed,
                clock=clock,
            )
        return result_of(
            self.name, instance, packing, bound_s=bound_s, clock=clock, started=started, stats=stats
        )
