"""All solvers by name, and `solve`, which picks one and runs it."""

from collections.abc import Callable

import cost_models
from cost_models import CostModel
from placer.errors import PlacerError
from placer.problem import Problem
from solvers.result import Limits, Solver, SolveResult
from solvers.strategies.auto import Auto
from solvers.strategies.beam import Beam
from solvers.strategies.dp import DynamicProgramming
from solvers.strategies.flow import Flow
from solvers.strategies.greedy import GreedyDim, GreedyLookup, GreedySize, GreedySizeLookup
from solvers.strategies.greedy_cost import GreedyCost
from solvers.strategies.ilp import Ilp
from solvers.strategies.lns import Lns
from solvers.strategies.local_search import LocalSearch

SOLVERS: dict[str, Callable[[], Solver]] = {
    "auto": Auto,
    "greedy-size": GreedySize,
    "greedy-lookup": GreedyLookup,
    "greedy-size-lookup": GreedySizeLookup,
    "greedy-dim": GreedyDim,
    "greedy-cost": GreedyCost,
    "local-search": LocalSearch,
    "lns": Lns,
    "ilp": Ilp,
    "beam": Beam,
    "dp": DynamicProgramming,
    "flow": Flow,
}


def solver(name: str) -> Solver:
    """The solver of that name.

    >>> solver("greedy-cost").name
    'greedy-cost'

    Raises
    ------
    PlacerError
        If there is none; the message lists the valid names.
    """
    try:
        return SOLVERS[name]()
    except KeyError:
        raise PlacerError(
            f"no solver is called {name!r}; choose from {', '.join(SOLVERS)}"
        ) from None


def solve(
    problem: Problem,
    solver: str = "auto",
    cost_model: str | CostModel = "roofline",
    *,
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    seed: int = 0,
    threads: int = 0,
    max_steps: int | None = None,
    stop: Callable[[], bool] | None = None,
) -> SolveResult:
    """Place the tables of a problem: pick a solver and a cost model by name and run them.

    >>> from placer import Problem, Topology
    >>> from placer.workloads import named_workload
    >>> problem = Problem(named_workload("random-4"), Topology.parse("2xh100"), batch_size=1024)
    >>> result = solve(problem, solver="greedy-cost")
    >>> sorted({shard.table for shard in result.plan.shards})
    ['t1', 't2', 't3', 't4']

    Parameters
    ----------
    problem : Problem
    solver : str
        One of `SOLVERS`.
    cost_model : str or CostModel
        One of `cost_models.COST_MODELS`, or a model of your own.
    time_limit_s, gap, seed, threads, max_steps, stop
        See `Limits`.

    Returns
    -------
    SolveResult
        Infeasibility is a result too: `plan` is None and `termination` says what is short.
    """
    strategy = _by_name(solver)
    model = cost_models.cost_model(cost_model) if isinstance(cost_model, str) else cost_model
    return strategy.solve(problem, model, Limits(time_limit_s, gap, seed, threads, max_steps, stop))


_by_name = solver
