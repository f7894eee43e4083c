"""Placer's own solvers on instances of the library."""

import time
from dataclasses import fields
from typing import Any

from expand import Recipe, catalogue
from outcome import Outcome
from plans import shards_json

from cost_models import Roofline
from cost_models.roofline import UPDATE_KERNELS, RooflineConstants
from placer import Problem
from solvers import solve

SOLVERS = (
    "auto",
    "greedy-cost",
    "greedy-size",
    "greedy-lookup",
    "greedy-size-lookup",
    "greedy-dim",
)


def cost_model() -> Roofline:
    """The step equation with the library's constants."""
    constants = catalogue()["constants"]
    assert constants["update_kernels"] == UPDATE_KERNELS, "of another version of the library"
    known = {field.name for field in fields(RooflineConstants)}
    # In version 1 of the instances hosts pool at their memory's bandwidth, and no GPU waits.
    constants = constants | {"host_pool_share": 1.0, "host_wait_share": 0.0}
    return Roofline(RooflineConstants(**{k: v for k, v in constants.items() if k in known}))


def run(planner: str, recipe: Recipe, problem: Problem, time_limit_s: float, seed: int) -> Outcome:
    """Solve an instance with one core."""
    started = time.process_time()
    result = solve(
        problem, planner, cost_model(), time_limit_s=time_limit_s, gap=1e-4, seed=seed, threads=1
    )
    seconds = time.process_time() - started
    facts: dict[str, Any] = {
        "options": {"time_limit_s": time_limit_s, "gap": 1e-4, "threads": 1},
        "seed": seed,
        "seconds": round(seconds, 2),
        "status": result.termination.reason,
        "bound_s": result.bound_s or None,
    }
    if result.plan is None:
        words = f"{result.termination.summary}: {result.termination.detail}"
        return Outcome(None, facts | {"reason": words})
    return Outcome(shards_json(result.plan), facts, result.step_time_s)
