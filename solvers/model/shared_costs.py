"""Costs of a GPU beside those of its shards: time of arenas, and rows that every GPU has.

Arenas take time besides launches, which depends on which rows are in HBM
(`cost_models.arenas.ArenaCosts`), so only whole assignments have it. Ratings of changes and bounds
leave it out. A model may replicate hundreds of small tables, and a search needs their sums at every
move.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from cost_models import TableShard
from cost_models.arenas import Arena, ArenaCosts, ArenaLoad, arena_of
from cost_models.base import Float
from cost_models.step_equation.loads import slice_load
from placer.problem import Problem
from solvers.model.knapsack import OF_GPU

if TYPE_CHECKING:
    from solvers.model.instance import Instance


class ArenaTimes:
    """Computes times of arenas from a GPU's shards and their rows in HBM.

    `costs`: one for each GPU.
    """

    def __init__(self, problem: Problem, costs: Sequence[ArenaCosts | None]) -> None:
        self._problem, self._costs = problem, costs
        self._lookups: dict[TableShard, float] = {}

    @property
    def is_any(self) -> bool:
        """Whether arenas take any time."""
        return any(costs is not None for costs in self._costs)

    @property
    def least_replicas_s(self) -> Float | float:
        """Least seconds of any replicas on any GPU, shape (phases,), or 0."""
        known = [costs.replicas_s for costs in self._costs if costs is not None]
        return np.min(known, axis=0) if len(known) == len(self._costs) else 0.0

    def arena_of(self, shard: TableShard) -> Arena:
        """Return the arena that a shard is part of."""
        table = self._problem.profile.tables[shard.table].table
        first, last = shard.columns(table.dim)
        return arena_of(table, last - first)

    def seconds(
        self,
        gpu: int,
        shards: Iterable[tuple[TableShard, int]],
        replicas: Iterable[TableShard] = (),
    ) -> Float | float:
        """Return seconds of each phase, shape (phases,), or 0.

        `shards`: what the GPU serves without replicas, each shard with its rows in HBM.
        """
        costs = self._costs[gpu]
        if costs is None:
            return 0.0
        loads: dict[Arena, ArenaLoad] = {}
        for shard, hot_rows in (*shards, *((one, one.option.replicated_rows) for one in replicas)):
            arena = self.arena_of(shard)
            loads[arena] = loads.get(arena, ArenaLoad()).joined(self._load(shard, hot_rows))
        return costs.seconds(loads.values())

    def _load(self, shard: TableShard, hot_rows: int) -> ArenaLoad:
        """Return what a shard adds to its arena."""
        profile = self._problem.profile.tables[shard.table]
        rows, cold = shard.rows(profile.table.rows), shard.option.cold
        lookups = self._lookups.get(shard)
        if lookups is None:
            gpus = len(self._problem.topology.gpus)
            samples = self._problem.global_batch_size // (gpus if shard.is_replica else 1)
            step_lookups = samples * profile.table.lookups_per_sample
            lookups = self._lookups[shard] = slice_load(profile, rows, step_lookups)[0]
        every = len(range(*rows))
        cold_rows = every - hot_rows
        load = ArenaLoad(lookups, replicated=shard.is_replica)
        if cold == "cached":  # With no cache, rows are read in place; with all in it, in HBM.
            return load._replace(cached_rows=every if hot_rows and cold_rows else 0)
        pooled = cold == "host" and cold_rows > 0
        cached_rows = cold_rows if cold == "staged" else 0
        return load._replace(cached_rows=cached_rows, pooled_lookups=lookups if pooled else 0.0)


class Replicas:
    """Sums over an assignment's replicas; `Instance.replicated` caches them."""

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
