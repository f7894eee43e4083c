"""Tables that grow in TorchRec: row-wise, behind a multi-probe zero-collision hash (MPZCH)."""

from dataclasses import replace
from typing import Any

from placer.adapters.growing_tables import row_wise_shards
from placer.plan.plan import Plan
from placer.plan.shard import Shard
from placer.tables import Table


def with_fixed_rows(plan: Plan) -> Plan:
    """Return the plan with tables that grow as fixed ones, in row blocks as TorchRec has them.

    They get as many rows on each GPU, up to one more than the plan has there.
    """
    if not plan.growing:
        return plan
    tables = dict(plan.tables_by_name)
    shards: list[Shard] = []
    for name in plan.growing:
        own = row_wise_shards(plan, name, "TorchRec's MPZCH", eviction="lru", admission=1, ttl=0)
        size = max(shard.row_count for shard in own)
        tables[name] = replace(tables[name], rows=size * len(own))
        shards += [
            replace(shard, rows=(size * rank, size * (rank + 1), 1))
            for rank, shard in enumerate(own)
        ]
    fixed = tuple(shard for shard in plan.shards if shard.table not in plan.growing)
    return replace(plan, tables=tuple(tables.values()), shards=(*fixed, *shards), growing={})


def mpzch_options(table: Table, gpus: int) -> dict[str, Any]:
    """Return arguments of TorchRec's `HashZchManagedCollisionModule` for a resized table."""
    features = [feature.name for feature in table.features]
    return {
        "name": table.name,
        "zch_size": table.rows,
        "total_num_buckets": gpus,
        "eviction_policy_name": "LRU_EVICTION",
        "eviction_config": {"features": features, "single_ttl": 0},
    }
