"""Search for a placement. One strategy per file."""

from typing import TYPE_CHECKING, Any

from placer.adapters.torchrec.export import INSTALL
from placer.errors import BackendError
from solvers.registry import SOLVERS, solve, solver
from solvers.result import Limits, Shortage, Solver, SolveResult, Termination

if TYPE_CHECKING:
    from solvers.torchrec_planner import PlacerPlanner

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
