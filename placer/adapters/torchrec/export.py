"""Check a plan against a model, and convert it to TorchRec's `ShardingPlan`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from placer.adapters.torchrec.sharding import (
    Part,
    Staged,
    parts_of,
    with_even_growing,
    with_fixed_rows,
)
from placer.errors import BackendError, PlanMismatchError
from placer.plan.plan import Plan
from placer.plan.verify import refuse_growing, verify
from placer.tables import Table

if TYPE_CHECKING:
    from placer.adapters.torchrec.modules import TableOfModel

INSTALL = "pip install 'embedding-placer[torchrec]' && pip install --no-deps torchrec==1.8.0"
"""How to install TorchRec. Without ``--no-deps``, pip would install FBGEMM's CUDA build."""


def to_sharding_plan(
    plan: Plan,
    module: Any,
    env: Any,
    *,
    device: Any = None,
    prefetch_pipeline: bool = False,
    staged_as: Staged | None = None,
    state_by_column_slice: bool = False,
) -> Any:
    """Return the `ShardingPlan` of a plan, for `DistributedModelParallel(module, plan=...)`.

    Rank i is the topology's i-th GPU. `module` is the model after `split_tables`, not sharded yet.
    `env` is a `ShardingEnv`, which has the number of ranks.

    Raises PlanError if the plan is not sound. Raises PlanMismatchError if the plan is for another
    model or number of ranks, or TorchRec cannot train it correctly. Raises BackendError if torchrec
    is not installed.

    Parameters
    ----------
    device : torch.device or str, optional
        Where TorchRec computes: by default CUDA under NCCL, otherwise the CPU. On the CPU, all
        kernels keep rows in host memory.
    prefetch_pipeline : bool
        Whether TorchRec's prefetching pipeline fills the caches.
    staged_as : {"uva", "cached"}, optional
        How TorchRec reads rows that the plan stages, as it cannot stage rows. By default, such
        plans are refused. Pass the same value to `split_tables`.
    state_by_column_slice : bool
        Whether tables with row-wise Adagrad may be sharded by columns. TorchRec keeps separate
        state for each column slice, so such a table trains differently from a whole one.
    """
    with require_torchrec():
        import torch
        import torch.distributed as dist
        from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

        from placer.adapters.torchrec.modules import tables_of
    verify(plan)
    refuse_growing(plan, "`to_sharding_plan`")
    parts = [part for table in plan.tables for part in parts_of(plan, table, staged_as=staged_as)]
    _require_ranks(plan, env, parts)
    tables = tables_of(module)
    for part in parts:
        if part.remapped and part.source in tables:
            raise PlanMismatchError(
                f"table {part.source!r} is in the plan as {part.name!r}, in the order of a "
                "profile: call split_tables(module, plan) first"
            )
    planned = {part.name: part.table for part in parts}
    require_tables(planned, tables, tables.keys() - planned)
    _require_rows(parts, {name: own.path for name, own in tables.items()}, prefetch_pipeline)
    modules: dict[str, Any] = {}
    if device is None:
        group = env.process_group
        device = "cuda" if group is not None and dist.get_backend(group) == "nccl" else "cpu"
    kind = torch.device(device).type
    for part in parts:
        _require_exact(part, state_by_column_slice=state_by_column_slice)
        _require_trainable(part, tables[part.name])
        module_plan = modules.setdefault(tables[part.name].path, EmbeddingModuleShardingPlan())
        module_plan[part.name] = _parameter_sharding(plan, part, kind, prefetch_pipeline)
    return ShardingPlan(modules)


def document(
    plan: Plan,
    *,
    device: str = "cuda",
    module: str = "",
    staged_as: Staged | None = None,
    state_by_column_slice: bool = False,
) -> dict[str, Any]:
    """Return the `ShardingPlan` of a plan as JSON, in the layout of `ShardingPlan._serialize`.

    ``plan`` also has the caches' load factors. ``remapped`` lists the TorchRec tables that are read
    by row rank, each with its table of the plan and its range of ranks. ``managed_collisions`` has
    the options of tables that grow, for the function `managed_collisions`; their rows are spread
    evenly over all GPUs, with a warning if the plan has them elsewhere. `module` is the path of the
    embedding module in the model. This needs no torchrec.

    Raises PlanError if the plan is not sound. Raises PlanMismatchError if TorchRec has no such
    placement.
    """
    growing = plan.growing
    has = {"eviction": "lru", "admission": 1, "ttl": 0}
    plan = with_fixed_rows(with_even_growing(plan, "TorchRec's MPZCH", **has))
    tables: dict[str, Any] = {}
    remapped: dict[str, Any] = {}
    parts = [part for table in plan.tables for part in parts_of(plan, table, staged_as=staged_as)]
    _require_rows(parts, {}, prefetch=False)
    for part in parts:
        _require_exact(part, state_by_column_slice=state_by_column_slice)
        tables[part.name] = _written(plan, part, device)
        if part.source in growing:
            tables[part.name]["sharding_type"] = "row_wise"  # Not table-wise on one GPU.
        if part.remapped:
            remapped[part.name] = {"table": part.source, "ranks": [part.start, part.stop]}
    hashed: dict[str, Any] = {}
    for name in growing:
        table = plan.tables_by_name[name]
        features = [feature.name for feature in table.features]
        hashed[name] = {
            "name": name,
            "zch_size": table.rows,
            "total_num_buckets": len(plan.topology.gpus),
            "eviction_policy_name": "LRU_EVICTION",
            "eviction_config": {"features": features, "single_ttl": 0},
        }
    made = {"plan": {module: tables}, "remapped": remapped}
    return made | ({"managed_collisions": hashed} if growing else {})


@contextmanager
def require_torchrec() -> Iterator[None]:
    """Raise BackendError unless torchrec, and what the body imports of it, can be imported."""
    try:
        import torchrec  # noqa: F401

        yield
    except (ImportError, OSError) as error:  # OSError: FBGEMM built for another torch.
        raise BackendError(
            f"torchrec cannot be imported ({error}); install it with: {INSTALL}"
        ) from error


def _require_ranks(plan: Plan, env: Any, parts: Iterable[Part]) -> None:
    from torchrec.distributed.comm import get_local_size

    gpus = plan.topology.gpus
    if env.world_size != len(gpus):
        raise PlanMismatchError(
            f"the plan is for {len(gpus)} GPUs, but there are {env.world_size} ranks; replan for "
            "them"
        )
    # TorchRec derives the ranks of a host from their numbers alone.
    by_host = [part for part in parts if part.sharding.kind in ("table_row_wise", "grid_shard")]
    if not by_host:
        return
    local = get_local_size(env.world_size)
    if any(gpu.host != gpus[rank - rank % local].host for rank, gpu in enumerate(gpus)) or any(
        len(plan.topology.gpus_of(host.id)) not in (0, local) for host in plan.topology.hosts
    ):
        raise PlanMismatchError(
            f"table {by_host[0].name!r} is row-wise over the GPUs of a host, which TorchRec "
            f"takes to be {local} ranks in a row (LOCAL_WORLD_SIZE); the hosts of "
            f"{plan.topology.name!r} are others"
        )


def require_tables(
    planned: Mapping[str, Table], tables: "Mapping[str, TableOfModel]", unplanned: Set[str] = set()
) -> None:
    """Raise unless the model has the planned tables, in the planned shapes, and none is unplanned.

    TorchRec would fail with a KeyError or an assertion at a table that its plan lacks.
    """
    faults = []
    for name, own in planned.items():
        if name not in tables:
            faults.append(f"{name!r} is in the plan but not in the model")
            continue
        config = tables[name].config
        if (config.num_embeddings, config.embedding_dim) != (max(1, own.rows), own.dim):
            shape = f"{config.num_embeddings} × {config.embedding_dim}"
            faults.append(
                f"{name!r} is {own.rows} × {own.dim} in the plan but {shape} in the model"
            )
    faults += [
        f"{name!r} is in the model but not in the plan" for name in tables if name in unplanned
    ]
    if faults:
        raise PlanMismatchError(
            "tables differ: " + "; ".join(faults[:8]) + ("; and others" if faults[8:] else "")
        )


def _require_trainable(part: Part, table: "TableOfModel") -> None:
    """Raise if the model's element type or optimizer differs, or replicas would not be trained."""
    name = table.optimizer
    planned, own = part.table, table.as_table(part.table.optimizer, {})
    if own.dtype != planned.dtype:
        raise PlanMismatchError(
            f"table {own.name!r} is {planned.dtype} in the plan but {own.dtype} in the model"
        )
    if own.optimizer != planned.optimizer:
        raise PlanMismatchError(
            f"table {own.name!r} is updated by {planned.optimizer} in the plan but by {name} in "
            "the model, which has another state"
        )
    if name is not None and part.sharding.kind == "data_parallel":
        raise PlanMismatchError(
            f"table {own.name!r} is replicated on all ranks, but {name} is applied in its "
            "backward pass, where TorchRec leaves replicas as they are: it would not be trained. "
            "Leave its parameter to the optimizer of the dense layers"
        )


def _require_exact(part: Part, *, state_by_column_slice: bool) -> None:
    """Raise if row-wise Adagrad would train other weights because of column slices."""
    own, sharding = part.table, part.sharding
    column_wise = any(block.width < own.dim for block in sharding.blocks)
    if column_wise and own.optimizer == "rowwise_adagrad" and not state_by_column_slice:
        raise PlanMismatchError(
            f"table {own.name!r} is column-wise, where TorchRec's row-wise Adagrad takes the "
            "mean of the squared gradient over each column slice, not over the row: it would train "
            "other weights than the whole table. Say state_by_column_slice=True, from Python, "
            "if that may be"
        )


def _require_rows(parts: Sequence[Part], path_of: Mapping[str, str], prefetch: bool) -> None:
    """Raise if a rank has no rows of any table in a group that TorchRec serves together.

    One TorchRec kernel serves tables with the same module, sharding type, kernel, element type,
    optimizer and pooling. It fails on a rank without rows of any of them.
    """

    def group(part: Part) -> tuple[object, ...]:
        own, sharding = part.table, part.sharding
        ahead = prefetch and sharding.kernel == "fused_uvm_caching"
        width = sharding.blocks[0].width if ahead else None
        pooling = {feature.pooling for feature in own.features}
        path = path_of.get(part.name, "")
        alike = own.dtype, own.optimizer, frozenset(pooling)
        return path, sharding.kind, sharding.kernel, alike, width

    served = {(group(p), block.rank) for p in parts for block in p.sharding.blocks if block.rows}
    for part in parts:
        for block in part.sharding.blocks:
            if part.table.rows and not block.rows and (group(part), block.rank) not in served:
                raise PlanMismatchError(
                    f"table {part.table.name!r}: of blocks of {part.sharding.blocks[0].rows} of "
                    f"its {part.table.rows} rows rank {block.rank} gets none, nor any of a table "
                    "that is served with it, with which TorchRec's kernels fail; shard it otherwise"
                )


def _parameter_sharding(plan: Plan, part: Part, device: str, prefetch: bool) -> Any:
    from torchrec.distributed.types import (
        CacheParams,
        EnumerableShardingSpec,
        ParameterSharding,
        ShardMetadata,
    )

    own = _written(plan, part, device)
    if "shards" in own:
        shards = [ShardMetadata(**shard) for shard in own.pop("shards")]
        own["sharding_spec"] = EnumerableShardingSpec(shards)
    if "cache_params" in own:
        own["cache_params"] = CacheParams(**own["cache_params"], prefetch_pipeline=prefetch)
    return ParameterSharding(**own)


def _written(plan: Plan, part: Part, device: str) -> dict[str, Any]:
    """Return the `ParameterSharding` of a TorchRec table as JSON."""
    sharding = part.sharding
    own: dict[str, Any] = {
        "sharding_type": sharding.kind,
        "compute_kernel": sharding.kernel,
        "ranks": [block.rank for block in sharding.blocks],
    }
    shards = []
    for block in sharding.blocks:
        gpu = plan.topology.gpus[block.rank]
        local = [other.id for other in plan.topology.gpus_of(gpu.host)]
        where = device if device == "cpu" else f"{device}:{local.index(gpu.id)}"
        # TorchRec has no empty tables: a table without rows gets one row.
        rows = block.rows if part.table.rows else 1
        offsets, sizes = [block.first_row, block.first_column], [rows, block.width]
        placement = f"rank:{block.rank}/{where}"
        shards.append({"shard_offsets": offsets, "shard_sizes": sizes, "placement": placement})
    if sharding.kind != "data_parallel":
        own["shards"] = shards
    if sharding.load_factor is not None:
        own["cache_params"] = {"load_factor": sharding.load_factor}
    return own
