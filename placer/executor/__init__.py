"""The executor: trains embedding tables where a plan puts them, in one process."""

from placer.executor.bags import BagBatch
from placer.executor.placed import PlacedEmbeddings
from placer.executor.reference import RowWiseAdagrad, UnplacedEmbeddings

__all__ = ["BagBatch", "PlacedEmbeddings", "RowWiseAdagrad", "UnplacedEmbeddings"]
