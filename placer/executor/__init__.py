"""The executor: trains embedding tables where a plan puts them, in one process or in many."""

from placer.executor.bags import BagBatch
from placer.executor.freed_memory import keep_freed_memory
from placer.executor.hit_rates import HitRates
from placer.executor.lookahead import look_ahead
from placer.executor.placed import PlacedEmbeddings
from placer.executor.ranks import ShardedEmbeddings
from placer.executor.reference import RowWiseAdagrad, UnplacedEmbeddings
from placer.executor.step import PreparedBatch

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
