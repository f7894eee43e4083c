"""placer: decide where the embedding tables of a recommendation model live, and train with it.

Importing this package needs neither a solver nor OR-Tools: a trainer that consumes a plan
carries the runtime alone.
"""

from typing import TYPE_CHECKING, Any

from placer.constraints.constraints import Constraints
from placer.constraints.rules import TableRule
from placer.errors import PlacerError
from placer.plan.plan import Plan
from placer.plan.shard import Shard
from placer.problem import Problem
from placer.profile.cdf import AccessCdf
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.tables import Feature, Table
from placer.topology.topology import Topology

if TYPE_CHECKING:
    from placer.adapters.pytorch import apply_plan, profile_model, remove_plan

__version__ = "0.1.0"

__all__ = [
    "AccessCdf",
    "Constraints",
    "Feature",
    "PlacerError",
    "Plan",
    "Problem",
    "Profile",
    "Shard",
    "Table",
    "TableProfile",
    "TableRule",
    "Topology",
    "__version__",
    "apply_plan",
    "profile_model",
    "remove_plan",
]


def __getattr__(name: str) -> Any:
    # These import torch, which who only reads plans need not wait for.
    if name in ("apply_plan", "profile_model", "remove_plan"):
        from placer.adapters import pytorch

        return getattr(pytorch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
