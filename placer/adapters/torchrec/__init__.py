"""Convert plans to TorchRec's `ShardingPlan`, and TorchRec's plans to placer's.

docs/torchrec.md shows how to use the functions. Importing this imports neither torch nor torchrec.
"""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from placer.adapters.torchrec.export import document as document
    from placer.adapters.torchrec.export import to_sharding_plan as to_sharding_plan
    from placer.adapters.torchrec.read import from_sharding_plan as from_sharding_plan
    from placer.adapters.torchrec.sharding import Part as Part
    from placer.adapters.torchrec.sharding import parts_of as parts_of
    from placer.adapters.torchrec.sharding import sharding_of as sharding_of
    from placer.adapters.torchrec.split import (
        load_optimizer_state_dict as load_optimizer_state_dict,
    )
    from placer.adapters.torchrec.split import load_state_dict as load_state_dict
    from placer.adapters.torchrec.split import managed_collisions as managed_collisions
    from placer.adapters.torchrec.split import (
        merge_optimizer_state_dict as merge_optimizer_state_dict,
    )
    from placer.adapters.torchrec.split import merge_state_dict as merge_state_dict
    from placer.adapters.torchrec.split import split_tables as split_tables

__getattr__, __all__ = lazy_exports(__name__)
