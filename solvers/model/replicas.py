"""Sum costs over replicated rows, by the GPU's kind.

A model may replicate hundreds of small tables, and a search needs their sums at every move.
"""

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from cost_models import TableShard
from cost_models.arenas import Arena
from solvers.model.knapsack import OF_GPU, Float

if TYPE_CHECKING:
    from solvers.model.instance import Instance


class Replicas:
    """Sums over an assignment's replicas; `Instance.replicated` caches them.

    Attributes
    ----------
    shards : tuple of TableShard
    """

    def __init__(self, instance: "Instance", shards: tuple[TableShard, ...]) -> None:
        self._instance = instance
        self.shards = shards

    @cached_property
    def costs(self) -> list[Float]:
        """Costs on each kind of GPU, each of shape (5 + phases,)."""
        instance = self._instance
        none = np.zeros(instance.rows_of_costs)
        return [
            sum((instance.priced_costs(one, gpu)[:, 0] for one in self.shards), none)
            for gpu in instance.kinds
        ]

    @cached_property
    def totals(self) -> list[Float]:
        """Bytes and seconds on each kind of GPU, each of shape (2 + phases, prices)."""
        return [total(self._instance, self.shards, gpu) for gpu in self._instance.kinds]

    @cached_property
    def arenas(self) -> Counter[Arena]:
        """Number of replicas in each arena."""
        return Counter(map(self._instance.arena_of, self.shards))


def total(instance: "Instance", shards: Iterable[TableShard], gpu: int) -> Float:
    """Return bytes and seconds of shards on a GPU at each price, shape (2 + phases, prices)."""
    summed = np.zeros((instance.rows_of_costs - 3, instance.prices.size))
    for shard in shards:
        summed += instance.priced_costs(shard, gpu)[OF_GPU]
    return summed
