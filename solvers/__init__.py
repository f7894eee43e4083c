"""Solvers: searches for a placement. One strategy per file."""

from typing import TYPE_CHECKING, Any

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from placer.plan.memory import Shortage as Shortage
    from solvers.analysis.capacities import choose_capacities as choose_capacities
    from solvers.analysis.compare import CompareRow as CompareRow
    from solvers.analysis.compare import compare as compare
    from solvers.registry import SOLVERS as SOLVERS
    from solvers.registry import solve as solve
    from solvers.registry import solver as solver
    from solvers.result import Limits as Limits
    from solvers.result import Solver as Solver
    from solvers.result import SolveResult as SolveResult
    from solvers.result import Termination as Termination
    from solvers.torchrec_planner import PlacerPlanner as PlacerPlanner

_exported, __all__ = lazy_exports(__name__)


def __getattr__(name: str) -> Any:
    """Import an exported name at its first use; `PlacerPlanner` needs torchrec."""
    if name != "PlacerPlanner":
        return _exported(name)
    from placer.adapters.torchrec.export import require_torchrec

    with require_torchrec():
        return _exported(name)
