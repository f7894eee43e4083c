"""Search for a placement. One strategy per file."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cost_models import CostModel, cost_model
from placer.adapters.torchrec.export import INSTALL
from placer.errors import BackendError, PlacerError
from placer.problem import Problem
from solvers.result import Limits, Shortage, Solver, SolveResult, Termination
from solvers.strategies.auto import Auto
from solvers.strategies.beam import Beam
from solvers.strategies.dp import DynamicProgramming
from solvers.strategies.flow import Flow
from solvers.strategies.greedy import GreedyDim, GreedyLookup, GreedySize, GreedySizeLookup
from solvers.strategies.greedy_cost import GreedyCost
from solvers.strategies.ilp import Ilp
from solvers.strategies.lns import Lns
from solvers.strategies.local_search import LocalSearch

if TYPE_CHECKING:
    from solvers.torchrec_planner import PlacerPlanner

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

__all__ = [
    "SOLVERS",
    "Limits",
    "PlacerPlanner",
    "Shortage",
    "SolveResult",
    "Solver",
    "Termination",
    "solve",
    "solver",
]


def solver(name: str) -> Solver:
    """The solver of that name.

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
    model = _cost_model_by_name(cost_model) if isinstance(cost_model, str) else cost_model
    return strategy.solve(problem, model, Limits(time_limit_s, gap, seed, threads, max_steps, stop))


def __getattr__(name: str) -> Any:
    """`PlacerPlanner`, whose import needs torchrec: it is imported when it is asked for."""
    if name != "PlacerPlanner":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from solvers.torchrec_planner import PlacerPlanner
    except ImportError as error:
        raise BackendError(
            f"PlacerPlanner is a planner of TorchRec's, which cannot be imported ({error}); "
            f"install it with: {INSTALL}"
        ) from error
    return PlacerPlanner


_by_name = solver
_cost_model_by_name = cost_model
