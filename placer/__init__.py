"""placer: decide where the embedding tables of a recommendation model live, and train with it.

Importing this package loads neither solvers nor OR-Tools: a trainer that uses a plan needs only the
runtime. Names of this package are imported when they are first used.
"""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from placer.adapters.pytorch import apply_plan as apply_plan
    from placer.adapters.pytorch import profile_model as profile_model
    from placer.adapters.pytorch import remove_plan as remove_plan
    from placer.constraints.constraints import Constraints as Constraints
    from placer.constraints.file import TableRule as TableRule
    from placer.errors import PlacerError as PlacerError
    from placer.plan.fields import Shard as Shard
    from placer.plan.plan import Plan as Plan
    from placer.problem import Problem as Problem
    from placer.profile.cdf import AccessCdf as AccessCdf
    from placer.profile.profile import Profile as Profile
    from placer.profile.table_profile import TableProfile as TableProfile
    from placer.tables import Feature as Feature
    from placer.tables import Table as Table
    from placer.topology.topology import Topology as Topology

__version__ = "0.2.0"

__getattr__, __all__ = lazy_exports(__name__)
