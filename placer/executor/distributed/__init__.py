"""A plan over many ranks of `torch.distributed`: who holds what, and what they exchange."""

from placer.executor.distributed.comm import Volume
from placer.executor.distributed.pieces import LocalPiece
from placer.executor.distributed.sharded import ShardedEmbeddings
from placer.executor.distributed.step import ShardedBatch

__all__ = ["LocalPiece", "ShardedBatch", "ShardedEmbeddings", "Volume"]
