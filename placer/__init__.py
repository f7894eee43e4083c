"""placer: decide where the embedding tables of a recommendation model live, and train with it.

Importing this package needs neither a solver nor OR-Tools: a trainer that consumes a plan
carries the runtime alone. Its names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from placer.adapters.pytorch import apply_plan, profile_model, remove_plan
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

__getattr__ = lazy_exports(
    __name__,
    {
        "placer.adapters.pytorch": "apply_plan profile_model remove_plan",
        "placer.constraints.constraints": "Constraints",
        "placer.constraints.rules": "TableRule",
        "placer.errors": "PlacerError",
        "placer.plan.plan": "Plan",
        "placer.plan.shard": "Shard",
        "placer.problem": "Problem",
        "placer.profile.cdf": "AccessCdf",
        "placer.profile.profile": "Profile",
        "placer.profile.table_profile": "TableProfile",
        "placer.tables": "Feature Table",
        "placer.topology.topology": "Topology",
    },
)
