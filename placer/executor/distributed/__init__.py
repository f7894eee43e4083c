"""A plan over many ranks of `torch.distributed`: who holds what, and what they exchange."""

from placer.executor.distributed.comm import Volume
from placer.executor.distributed.local_shards import LocalShard
from placer.executor.distributed.sharded import ShardedEmbeddings
from placer.executor.distributed.step import ShardedBatch

__all__ = ["LocalShard", "ShardedBatch", "ShardedEmbeddings", "Volume"]
