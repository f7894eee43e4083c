"""Plans that are kept, so that the same problem is not searched again; see docs/solvers.md.

`key` says what makes two problems the same, `entry` is a plan's file, `folder` all of them, and
`solver` any solver that looks there first.
"""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from solvers.cache.folder import PlanCache as PlanCache
    from solvers.cache.solver import CachedSolver as CachedSolver

__getattr__, __all__ = lazy_exports(__name__)
