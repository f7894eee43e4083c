"""All solvers by name, and `solve`, which picks one and runs it."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import cost_models
from placer.errors import PlacerError, check_kinds

if TYPE_CHECKING:
    from cost_models import CostModel
    from placer.problem import Problem
    from solvers.result import Solver, SolveResult

SOLVERS = {
    "auto": "solvers.strategies.auto.Auto",
    "greedy-size": "solvers.strategies.greedy.GreedySize",
    "greedy-lookup": "solvers.strategies.greedy.GreedyLookup",
    "greedy-size-lookup": "solvers.strategies.greedy.GreedySizeLookup",
    "greedy-dim": "solvers.strategies.greedy.GreedyDim",
    "greedy-cost": "solvers.strategies.auto.GreedyCost",
    "ilp": "solvers.strategies.auto.Ilp",
    "beam": "solvers.strategies.published.Beam",
    "dp": "solvers.strategies.published.DynamicProgramming",
}
"""The path of each solver's class by the solver's name; `solver` imports the class."""


def solver(name: str) -> "Solver":
    """Return the solver with the name `name`.

    >>> solver("greedy-cost").name
    'greedy-cost'

    Raises PlacerError if no solver has this name; the message lists valid names.
    """
    if name not in SOLVERS:
        raise PlacerError(f"no solver is called {name!r}; choose from {', '.join(SOLVERS)}")
    module, _, strategy = SOLVERS[name].rpartition(".")
    made: Solver = getattr(importlib.import_module(module), strategy)()
    return made


def solve(
    problem: "Problem",
    solver: str = "auto",
    cost_model: "str | CostModel" = "roofline",
    *,
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    seed: int = 0,
    threads: int = 0,
    max_steps: int | None = None,
    stop: Callable[[], bool] | None = None,
) -> "SolveResult":
    """Place the tables of a problem with a solver and a cost model, chosen by name.

    If nothing fits, the result's `plan` is None, and its `termination` says what is short.

    >>> from placer import Problem, Topology
    >>> from placer.workloads import named_workload
    >>> problem = Problem(named_workload("random-4"), Topology.parse("2xh100"), batch_size=1024)
    >>> result = solve(problem, solver="greedy-cost")
    >>> sorted({shard.table for shard in result.plan.shards})
    ['t1', 't2', 't3', 't4']

    Parameters
    ----------
    solver : str
        One of `SOLVERS`.
    cost_model : str or CostModel
        A name that `cost_models.cost_model` accepts, or your own model.
    time_limit_s, gap, seed, threads, max_steps, stop
        See `Limits`.
    """
    from placer.problem import Problem
    from solvers.result import Limits

    check_kinds(problem=(problem, Problem), cost_model=(cost_model, str | cost_models.CostModel))
    strategy = _by_name(solver)
    model = cost_models.cost_model(cost_model) if isinstance(cost_model, str) else cost_model
    return strategy.solve(problem, model, Limits(time_limit_s, gap, seed, threads, max_steps, stop))


_by_name = solver
