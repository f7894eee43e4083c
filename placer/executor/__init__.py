"""The executor: trains embedding tables where a plan places them, in one process or in many."""

from typing import TYPE_CHECKING

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from placer.executor.distributed import ShardedEmbeddings, make_embeddings
    from placer.executor.embeddings import Embeddings
    from placer.executor.local.hit_rates import HitRates
    from placer.executor.local.lookahead import look_ahead
    from placer.executor.local.placed_embeddings import PlacedEmbeddings
    from placer.executor.local.reference import RowWiseAdagrad, UnplacedEmbeddings
    from placer.executor.lookups.bag_batch import BagBatch
    from placer.executor.lookups.batch_reads import PreparedBatch
    from placer.executor.memory.freed_memory import keep_freed_memory

__all__ = [
    "BagBatch",
    "Embeddings",
    "HitRates",
    "PlacedEmbeddings",
    "PreparedBatch",
    "RowWiseAdagrad",
    "ShardedEmbeddings",
    "UnplacedEmbeddings",
    "keep_freed_memory",
    "look_ahead",
    "make_embeddings",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "placer.executor.distributed": "ShardedEmbeddings make_embeddings",
        "placer.executor.embeddings": "Embeddings",
        "placer.executor.local.hit_rates": "HitRates",
        "placer.executor.local.lookahead": "look_ahead",
        "placer.executor.local.placed_embeddings": "PlacedEmbeddings",
        "placer.executor.local.reference": "RowWiseAdagrad UnplacedEmbeddings",
        "placer.executor.lookups.bag_batch": "BagBatch",
        "placer.executor.lookups.batch_reads": "PreparedBatch",
        "placer.executor.memory.freed_memory": "keep_freed_memory",
    },
)
