"""Plans for NVIDIA's dynamicemb: the options of its tables, which grow, beside TorchRec's plan.

Names are those of `DynamicEmbTableOptions` and `FrequencyAdmissionStrategy` in
NVIDIA/recsys-examples, corelib/dynamicemb (dynamicemb_config.py at commit 007974c).
"""

from typing import Any

from placer.adapters.torchrec import document
from placer.adapters.torchrec.sharding import row_wise_shards
from placer.errors import PlanMismatchError
from placer.plan.plan import Plan
from placer.plan.verify import verify

_SCORES = {"lfu": "LFU", "lru": "STEP"}
"""Members of `DynamicEmbScoreStrategy`: which key of a bucket loses its row."""


def table_options(plan: Plan, **options: Any) -> dict[str, Any]:
    """A plan's tables that grow as dynamicemb's options, and its other tables as TorchRec's plan.

    ``num_embeddings`` is the capacity over all GPUs, from which dynamicemb's planner takes that of
    each. ``global_hbm_for_values`` are the bytes of weights and optimizer state in HBM, of all
    GPUs; where that is a cache, ``caching`` is true. `options` are those of
    `placer.adapters.torchrec.document`.

    Raises PlanError if the plan is not sound. Raises PlanMismatchError if no table grows, or
    dynamicemb cannot have one as the plan does; the message says why.
    """
    verify(plan)
    if not plan.growing:
        raise PlanMismatchError("no table of the plan grows; export it to torchrec")
    tables = {}
    for name, how in plan.growing.items():
        table = plan.tables_by_name[name]
        shards = row_wise_shards(plan, name, "dynamicemb", ttl=0)
        if any(shard.memory == "ssd" or shard.lookup == "host" for shard in shards):
            raise PlanMismatchError(
                f"table {name!r} grows, and dynamicemb has its rows in HBM or the host's memory, "
                "read by GPUs; forbid `ssd` and `host` (docs/constraints.md)"
            )
        caching = any(shard.lookup == "cached" for shard in shards)
        hbm_rows = sum(
            shard.row_count if shard.memory == "hbm" else shard.cache_rows for shard in shards
        )
        admitted: dict[str, Any] = {}
        if how.admission > 1:
            threshold = {"threshold": how.admission}
            admitted["admit_strategy"] = {"FrequencyAdmissionStrategy": threshold}
        tables[name] = {
            "num_embeddings": how.capacity,
            "embedding_dim": table.dim,
            "feature_names": [feature.name for feature in table.features],
            "options": {
                "index_type": "int64",
                "embedding_dtype": table.dtype,
                "score_strategy": _SCORES[how.eviction],
                "global_hbm_for_values": hbm_rows * table.bytes_per_row(),
                "caching": caching,
                **admitted,
            },
        }
    fixed = [table.name for table in plan.tables if table.name not in plan.growing]
    return {"dynamicemb": tables, "torchrec": document(plan.of_tables(fixed), **options)}
