"""Which of an enumerator's options TorchRec can train. Importing this needs torchrec."""

import copy
from collections.abc import Callable, Sequence

from torchrec.distributed.planner.types import Shard as TorchRecShard
from torchrec.distributed.planner.types import ShardingOption as TorchRecOption

from placer.adapters.torchrec.sharding import even_blocks


def trainable(options: Sequence[TorchRecOption], *, replicate: bool = True) -> list[TorchRecOption]:
    """Return the options that TorchRec 1.8 can train right; all of a table that has no such option.

    Replicas it leaves to the optimizer of the dense layers: unless `replicate`, tables whose
    optimizer is applied in the backward pass are not replicated.
    """
    kept = {
        id(option)
        for option in options
        if not is_trained_wrong(option) and (replicate or not is_replica_of_fused(option))
    }
    tables = {option.fqn for option in options if id(option) in kept}
    return [o for o in options if id(o) in kept or o.fqn not in tables]


def is_trained_wrong(option: TorchRecOption) -> bool:
    """Return whether TorchRec does not train an option, or may not train it right.

    It reads row 0 for ids beyond a block of uneven row blocks. Its kernels fail on a rank where a
    block has no rows, unless they serve another table there, which depends on the whole plan.
    """
    return _is_uneven(option) or any(not shard.size[0] for shard in option.shards)


def _is_uneven(option: TorchRecOption) -> bool:
    """Return whether row blocks are others than those that TorchRec trains."""
    first = option.shards[0].offset[1]
    rows = [shard.size[0] for shard in option.shards if shard.offset[1] == first]
    return rows != [stop - start for start, stop in even_blocks(sum(rows), len(rows))]


def with_even_blocks(
    options: Sequence[TorchRecOption], estimate: Callable[[list[TorchRecOption]], None]
) -> list[TorchRecOption]:
    """Return the options, of which ``row_wise`` ones have even row blocks.

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
    """Return whether a table is replicated whose optimizer is applied in the backward pass."""
    classes = getattr(option.tensor, "_optimizer_classes", None) or [None]
    return option.sharding_type == "data_parallel" and classes[0] is not None
