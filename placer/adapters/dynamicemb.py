"""Convert plans for NVIDIA's dynamicemb: options of growing tables, and TorchRec's plan of others.

The options are fields of `DynamicEmbTableOptions` and `FrequencyAdmissionStrategy` in
NVIDIA/recsys-examples, corelib/dynamicemb (dynamicemb_config.py at commit 007974c).
"""

from typing import Any

from placer.adapters.torchrec import document
from placer.adapters.torchrec.sharding import with_even_growing
from placer.errors import PlanMismatchError
from placer.plan.plan import Plan

_SCORES = {"lfu": "LFU", "lru": "STEP"}
"""Member of `DynamicEmbScoreStrategy` for each eviction. It decides which key loses its row."""


def table_options(plan: Plan, **options: Any) -> dict[str, Any]:
    """Return dynamicemb's options of the tables that grow, and TorchRec's plan of the other tables.

    docs/adapters.md says how the options follow from the plan. A warning names tables that the plan
    has elsewhere than evenly on all GPUs. `options` are passed to
    `placer.adapters.torchrec.document`.

    Raises PlanError if the plan is not sound. Raises PlanMismatchError if no table grows, or
    dynamicemb cannot place a table as the plan does. The message says why.
    """
    if not plan.growing:
        raise PlanMismatchError("no table of the plan grows; export it to torchrec")
    plan = with_even_growing(plan, "dynamicemb", ttl=0)
    tables = {}
    for name, how in plan.growing.items():
        table = plan.tables_by_name[name]
        shards = plan.shards_by_table[name]
        if any(shard.memory == "ssd" or shard.lookup == "host" for shard in shards):
            raise PlanMismatchError(
                f"table {name!r} grows, and dynamicemb has its rows in HBM or the host's memory, "
                "read by GPUs; forbid `ssd` and `host` (docs/constraints.md)"
            )
        if narrow := {shard.dtype for shard in shards} - {None, table.dtype}:
            raise PlanMismatchError(
                f"table {name!r} grows, and dynamicemb has its rows in {table.dtype}, not in "
                f"{', '.join(sorted(filter(None, narrow)))}; plan without --widths"
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
