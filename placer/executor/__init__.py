"""The executor: trains embedding tables where a plan places them, in one process or in many."""

from typing import TYPE_CHECKING, Literal

from placer.lazy import lazy_exports

if TYPE_CHECKING:
    from placer.executor.distributed import ShardedEmbeddings as ShardedEmbeddings
    from placer.executor.distributed import make_embeddings as make_embeddings
    from placer.executor.distributed.serve_tables import serve_tables as serve_tables
    from placer.executor.embeddings import Embeddings as Embeddings
    from placer.executor.local.hit_rates import HitRates as HitRates
    from placer.executor.local.lookahead import look_ahead as look_ahead
    from placer.executor.local.placed_embeddings import PlacedEmbeddings as PlacedEmbeddings
    from placer.executor.local.reference import RowWiseAdagrad as RowWiseAdagrad
    from placer.executor.local.reference import UnplacedEmbeddings as UnplacedEmbeddings
    from placer.executor.lookups.bag_batch import BagBatch as BagBatch
    from placer.executor.lookups.steps import PreparedBatch as PreparedBatch
    from placer.executor.memory.host_memory import keep_freed_memory as keep_freed_memory

__getattr__, __all__ = lazy_exports(__name__)

BACKENDS: tuple[str, ...] = ("auto", "numba", "torch", "triton", "tiered")

Policy = Literal["lfu", "rank"]
"""Which cached rows are evicted: the least often looked up, or the last ones in the plan's row
order."""

MOST_THREADS = 1024
"""Most threads to allow, because OpenMP ends the process if it cannot start them."""
