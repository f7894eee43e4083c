"""Plans as TorchRec's `ShardingPlan`, and TorchRec's plans as ours.

`to_sharding_plan` gives what `DistributedModelParallel` takes, `from_sharding_plan` reads what
TorchRec's planner made. TorchRec has one kernel for a table, so a plan that splits a table into
hot and cold rows needs `split_tables` first, which makes two tables of it, and `merge_state_dict`
when saving. Importing this imports neither torch nor torchrec; docs/torchrec.md tells the rest.
"""

from placer.adapters.torchrec.export import document, to_sharding_plan
from placer.adapters.torchrec.parts import Part, parts_of
from placer.adapters.torchrec.read import from_sharding_plan
from placer.adapters.torchrec.sharding import sharding_of
from placer.adapters.torchrec.state import (
    load_optimizer_state_dict,
    load_state_dict,
    merge_optimizer_state_dict,
    merge_state_dict,
    split_state_dict,
)
from placer.adapters.torchrec.tables import managed_collisions, split_tables

__all__ = [
    "Part",
    "document",
    "from_sharding_plan",
    "load_optimizer_state_dict",
    "load_state_dict",
    "managed_collisions",
    "merge_optimizer_state_dict",
    "merge_state_dict",
    "parts_of",
    "sharding_of",
    "split_state_dict",
    "split_tables",
    "to_sharding_plan",
]
