"""Train a plan over several ranks of `torch.distributed`."""

from placer.executor.distributed.channels import ShardedBatch
from placer.executor.distributed.collectives import Volume
from placer.executor.distributed.serve_tables import serve_tables
from placer.executor.distributed.sharded_embeddings import ShardedEmbeddings, make_embeddings

__all__ = ["ShardedBatch", "ShardedEmbeddings", "Volume", "make_embeddings", "serve_tables"]
