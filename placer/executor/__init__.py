"""The executor: trains embedding tables where a plan puts them, in one process or in many."""

from placer.executor.distributed import ShardedEmbeddings
from placer.executor.local.hit_rates import HitRates
from placer.executor.local.lookahead import look_ahead
from placer.executor.local.placed_embeddings import PlacedEmbeddings
from placer.executor.local.reference import RowWiseAdagrad, UnplacedEmbeddings
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import PreparedBatch
from placer.executor.memory.freed_memory import keep_freed_memory

__all__ = [
    "BagBatch",
    "HitRates",
    "PlacedEmbeddings",
    "PreparedBatch",
    "RowWiseAdagrad",
    "ShardedEmbeddings",
    "UnplacedEmbeddings",
    "keep_freed_memory",
    "look_ahead",
]
