"""A plan over many ranks of `torch.distributed`: who holds what, and what they exchange."""

from placer.executor.ranks.comm import Volume
from placer.executor.ranks.pieces import LocalPiece
from placer.executor.ranks.sharded import ShardedEmbeddings
from placer.executor.ranks.step import ShardedBatch

__all__ = ["LocalPiece", "ShardedBatch", "ShardedEmbeddings", "Volume"]
