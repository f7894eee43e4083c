"""Greedy by cost: cut what is too much for one GPU, pack by time, fill HBM by saving per byte.

1. The pooled bound says how many row slices each table needs for a given step time.
2. Slices are packed longest first onto the GPU that would finish first, each with the hot
   rows that the pooled HBM would give it.
3. Each GPU fills its own HBM with the rows that save most per byte (`solvers._fill`).
4. Slices move or swap between the slowest GPU and others while that makes it faster.

Steps 2 to 4 run for a few target step times above the bound; the best plan is kept.
"""

import time

from cost_models import CostModel
from placer.problem import Problem
from solvers._base import Limits, SolveResult, Termination
from solvers._bound import PooledBound, pooled_bound
from solvers._build import finished, fitted_plan
from solvers._feasibility import impossible
from solvers._instance import Instance
from solvers._packing import Packing

_TARGETS = (1.0, 1.01, 1.03, 1.08, 1.2, 1.5, 2.5)
_CLOSE_ENOUGH = 1e-3


class GreedyCost:
    """The strategy of this module's docstring."""

    name = "greedy-cost"

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Cut, pack, fill, improve. See `Solver.solve`."""
        started = time.monotonic()
        instance = Instance(problem, cost_model)
        failure = impossible(instance)
        if failure:
            return SolveResult(None, failure)
        bound = pooled_bound(instance)
        packing, hit = best_packing(instance, bound, limits, started)
        plan = fitted_plan(packing) if packing else None
        if plan is None:
            return SolveResult(
                None,
                Termination(
                    "no_plan",
                    detail="no packing fits: every GPU needs room for the buffers of its slices, "
                    "and every host for their cold rows; raise --hbm or lower --batch-size",
                ),
                bound_s=bound.step_time_s,
            )
        return finished(
            self.name,
            instance,
            plan,
            bound_s=bound.step_time_s,
            limits=limits,
            started=started,
            limit_hit=hit,
            stats={"moves": packing.moves if packing else 0},
        )


def best_packing(
    instance: Instance, bound: PooledBound, limits: Limits, started: float
) -> tuple[Packing | None, bool]:
    """The best packing over the targets, and whether the time limit cut the search short."""
    best: Packing | None = None
    deadline = started + limits.time_limit_s
    for target in _TARGETS:
        packing = Packing.construct(instance, bound, target * bound.step_time_s)
        if packing is not None:
            packing.improve(deadline)
            if best is None or packing.step_time_s < best.step_time_s:
                best = packing
        if best is not None and best.step_time_s <= bound.step_time_s * (1 + _CLOSE_ENOUGH):
            return best, False
        if time.monotonic() > deadline:
            return best, True
    return best, False
