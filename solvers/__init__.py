"""Search for a placement. One strategy per file."""

from typing import TYPE_CHECKING, Any

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from solvers.analysis.compare import CompareRow, compare
    from solvers.cache.folder import PlanCache
    from solvers.cache.solver import CachedSolver
    from solvers.registry import SOLVERS, solve, solver
    from solvers.result import Limits, Shortage, Solver, SolveResult, Termination
    from solvers.torchrec_planner import PlacerPlanner

__all__ = [
    "SOLVERS",
    "CachedSolver",
    "CompareRow",
    "Limits",
    "PlacerPlanner",
    "PlanCache",
    "Shortage",
    "SolveResult",
    "Solver",
    "Termination",
    "compare",
    "solve",
    "solver",
]

_exported = lazy_exports(
    __name__,
    {
        "solvers.analysis.compare": "CompareRow compare",
        "solvers.cache.folder": "PlanCache",
        "solvers.cache.solver": "CachedSolver",
        "solvers.registry": "SOLVERS solve solver",
        "solvers.result": "Limits Shortage SolveResult Solver Termination",
        "solvers.torchrec_planner": "PlacerPlanner",
    },
)


def __getattr__(name: str) -> Any:
    """See `lazy_exports`; `PlacerPlanner` needs torchrec."""
    try:
        return _exported(name)
    except (ImportError, OSError) as error:  # OSError: FBGEMM built for another torch.
        if name != "PlacerPlanner":
            raise
        from placer.adapters.torchrec.export import INSTALL
        from placer.errors import BackendError

        raise BackendError(
            f"PlacerPlanner is a planner of TorchRec's, which cannot be imported ({error}); "
            f"install it with: {INSTALL}"
        ) from error
