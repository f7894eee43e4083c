"""Which of an enumerator's options TorchRec can train. Importing this needs torchrec."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torchrec.distributed.planner.types import Shard as TorchRecShard
from torchrec.distributed.planner.types import ShardingOption as TorchRecOption

from placer.adapters.torchrec.sharding import even_blocks

ROW_WISE = ("row_wise", "table_row_wise", "grid_shard")
"""Sharding types that divide rows."""


def trainable(options: Sequence[TorchRecOption], *, replicate: bool = True) -> list[TorchRecOption]:
    """The options that TorchRec 1.8 can train right; all of a table that has no such option.

    It reads row 0 for ids beyond a block of uneven row blocks. Replicas it leaves to the optimizer
    of the dense layers: unless `replicate`, tables whose optimizer is applied in the backward pass
    are not replicated. Blocks without rows are another matter: see `without_companions`.
    """
    kept = {
        id(option)
        for option in options
        if not _is_uneven(option) and (replicate or not is_replica_of_fused(option))
    }
    tables = {option.fqn for option in options if id(option) in kept}
    return [o for o in options if id(o) in kept or o.fqn not in tables]


def trained_wrong(plan: Sequence[TorchRecOption]) -> list[str]:
    """The tables of a plan that TorchRec does not train, or not right, by their `fqn`."""
    uneven = [option.fqn for option in plan if _is_uneven(option)]
    return uneven + without_companions(plan)


def without_companions(plan: Sequence[TorchRecOption]) -> list[str]:
    """Tables with a rank where a block has no rows, and that serves no other table with them.

    There TorchRec's kernels fail. Tables of a module are served together that have a sharding
    type, an element type, a pooling, a kernel and its parameters in common.
    """
    served = {
        (_group_of(option), shard.rank)
        for option in plan
        for shard in option.shards
        if shard.size[0]
    }
    return [
        option.fqn
        for option in plan
        if any(not s.size[0] and (_group_of(option), s.rank) not in served for s in option.shards)
    ]


def has_empty_block(option: TorchRecOption) -> bool:
    """Whether a shard of an option has no rows."""
    return any(not shard.size[0] for shard in option.shards)


def _group_of(option: TorchRecOption) -> tuple[object, ...]:
    """What tables have in common that a kernel of TorchRec's serves together."""
    path, module = option.module
    configs: list[Any] = getattr(module, "embedding_bag_configs", list)()
    pooling = {config.name: config.pooling for config in configs}.get(option.name)
    params, kernel = option.cache_params, option.compute_kernel
    ahead = kernel == "fused_uvm_caching" and params is not None and params.prefetch_pipeline
    width = option.shards[0].size[1] if ahead else None
    # Load factors of tables that are served together are averaged; other parameters are not.
    cache = params and (params.algorithm, params.reserved_memory, params.precision)
    others = option.enforce_hbm, option.stochastic_rounding, option.bounds_check_mode
    alike = option.tensor.dtype, option.output_dtype, pooling, cache, others
    return path, option.sharding_type, kernel, alike, bool(ahead), width


def _is_uneven(option: TorchRecOption) -> bool:
    """Whether row blocks are others than those that TorchRec trains."""
    if option.sharding_type not in ROW_WISE or not option.shards:
        return False
    first = option.shards[0].offset[1]
    rows = [shard.size[0] for shard in option.shards if shard.offset[1] == first]
    return rows != [stop - start for start, stop in even_blocks(sum(rows), len(rows))]


def with_even_blocks(
    options: Sequence[TorchRecOption], estimate: Callable[[list[TorchRecOption]], None]
) -> list[TorchRecOption]:
    """The options, of which ``row_wise`` ones have even row blocks.

    TorchRec's enumerator makes blocks in proportion to the ranks' memory where that differs.
    """
    evened = {}
    for option in options:
        if option.sharding_type == "row_wise" and _is_uneven(option):
            changed = evened[id(option)] = copy.copy(option)
            blocks = even_blocks(sum(s.size[0] for s in option.shards), len(option.shards))
            changed.shards = [
                TorchRecShard(size=[stop - start, s.size[1]], offset=[start, s.offset[1]])
                for s, (start, stop) in zip(option.shards, blocks, strict=True)
            ]
    if evened:
        estimate([*evened.values()])
    return [evened.get(id(option), option) for option in options]


def is_replica_of_fused(option: TorchRecOption) -> bool:
    """Whether a table is replicated whose optimizer is applied in the backward pass."""
    classes = getattr(option.tensor, "_optimizer_classes", None) or [None]
    return option.sharding_type == "data_parallel" and classes[0] is not None
