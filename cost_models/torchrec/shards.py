"""Shards of a TorchRec option by the shards that a solver places. Importing this needs torchrec."""

from dataclasses import dataclass

from torchrec.distributed.planner.types import Shard as TorchRecShard
from torchrec.distributed.planner.types import ShardingOption as TorchRecOption

from cost_models.base import TableShard
from placer.adapters.torchrec.sharding import ShardingType

OPEN_LOAD_FACTOR = 0.2
"""What TorchRec takes where a load factor is left open."""


def load_factor(option: TorchRecOption) -> float:
    """The load factor that a cached option has."""
    return OPEN_LOAD_FACTOR if option.cache_load_factor is None else option.cache_load_factor


def cached_rows(option: TorchRecOption) -> int | None:
    """Rows of the cache of the largest block, or None if some block is too small to be cached."""
    blocks = [shard.size[0] for shard in option.shards]
    chosen = min(max(blocks) - 1, max(1, round(load_factor(option) * max(blocks))))
    inside = all(0 < round(chosen * rows / max(blocks)) < rows for rows in blocks)
    return chosen if inside else None


def column_widths(option: TorchRecOption, gpus: int) -> tuple[int, ...]:
    """Widths of the column slices of a table, at most one for each GPU.

    TorchRec may have several shards of a table on a rank, which are one column slice here.
    """
    shards = len(option.shards)
    together = next(n for n in range(1, shards + 1) if shards % n == 0 and shards // n <= gpus)
    return (option.shards[0].size[1] * together,) * (shards // together)


def in_one_shard(option: TorchRecOption) -> bool:
    """Whether an option may have all of a table on one rank."""
    return len(option.shards) == 1 or option.sharding_type == "column_wise"


@dataclass(frozen=True, slots=True)
class Part:
    """The shards of TorchRec that a shard stands for: `number`, or those of its columns."""

    kind: ShardingType
    number: int
    first: int
    last: int

    def shards(self, option: TorchRecOption) -> list[TorchRecShard]:
        """These shards of an option."""
        if self.kind != "column_wise":
            return [option.shards[self.number]]
        return [part for part in option.shards if self.first <= part.offset[1] < self.last]


def shard_of(shard: TableShard) -> tuple[ShardingType, int]:
    """The sharding type of a shard's option, and the number of its shard."""
    if shard.is_replica or shard.option.replicated_rows:
        return "data_parallel", 0
    if shard.option.blocked:
        return "row_wise", shard.row_slice
    if shard.option.column_widths:
        return "column_wise", shard.column_slice
    return "table_wise", 0
