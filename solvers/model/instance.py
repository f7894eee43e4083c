"""A problem as solvers see it: shards of tables, and their cost curves.

The cost model defines the search space. Every table takes one sharding option of
`Instance.options_of(table)`. Its replicated rows are on every GPU. Each shard is served by one GPU,
and shards of one table by different GPUs. The hottest rows of a shard are in HBM and the rest in
the DRAM of the GPU's host. What the user forbids is left out.

A server (a host without GPUs) counts as one more GPU, after all GPUs. Its HBM is the host's memory,
which has all rows of its shards. It holds no replicas.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from cost_models import (
    ANY_SHARE,
    IN_DRAM,
    WHOLE_TABLE,
    CostCurve,
    CostModel,
    ShardingOption,
    TableShard,
    shards_of,
)
from cost_models.arenas import Arena, ArenaCosts
from placer.plan.memory import home_of, key_map_bytes
from placer.problem import Problem
from solvers.model.constraint_rules import ConstraintRules, search_space
from solvers.model.curves import Latest, alike_tables, prices_of, weighed
from solvers.model.drive_rows import DriveRows, is_open, takes_drives, takes_servers
from solvers.model.knapsack import Bool, Float, priced_costs
from solvers.model.objective import Delay, Objective, objective_of_servers
from solvers.model.shared_costs import ArenaTimes, Replicas

Block = tuple[TableShard, ...]
"""Shards that one GPU has to serve; mostly a single one."""

_SPARE_DRAM = 0.001
"""Share of DRAM that searches leave free if DRAM is short. Plans need it for rows that do not fit
in HBM after all."""

_REPLICAS = 16  # Sets of replicas whose sums are kept at a time.


@dataclass(frozen=True, slots=True)
class Placement:
    """A shard on a GPU, with its `hot_rows` hottest rows in HBM."""

    shard: TableShard
    gpu: int
    hot_rows: int


class Instance:
    """Curves of a problem under a cost model, computed on first use.

    GPUs that cost the same share curves, so 1,024 equal GPUs need one set. `drives` chooses the
    shares of rows on drives that sharding options leave open.

    Attributes:
    - `gpus`, `tables`, `servers`: numbers of GPUs, tables and servers; `gpus` includes the servers,
      which come last.
    - `alike`: for each table, the first table with equal costs.
    - `kinds`, `kind_of_gpu`, `host_of_gpu`: one GPU of each kind; the kind and the host of each
      GPU.
    - `hbm_bytes`, `dram_bytes`, `all_hbm_bytes`: memory of each GPU and host, and of all GPUs but
      servers. Where drives hold what DRAM has no room for, of hosts a little less than
      `all_dram_bytes`.
    - `objective`: step times of phase times.
    - `launches_s`, `arena_times`, list of float64, shape (phases,), and ArenaTimes: what each arena
      takes of each GPU, and what arenas take besides.
    - `delay`: where the schedule has a phase for it beyond the cost model's.

    Parameters:
    - `like`: an instance of the same problem and cost model. Reuse its curves.
    - `host_share`: how much the time of a host's memory counts beside all phases where GPUs choose
      the rows in their HBM: 0 to 1.
    - `with_replicas`: whether options that replicate rows are searched.
    - `dram_price`: seconds that a byte of DRAM counts where GPUs choose the rows in their HBM, and
      on drives.
    - `server_share`: what a server's second counts beside, in seconds of a GPU.
    """

    def __init__(
        self,
        problem: Problem,
        cost_model: CostModel,
        chain_weights: Float | None = None,
        delay: Delay | None = None,
        like: "Instance | None" = None,
        host_share: float = 0.0,
        with_replicas: bool = True,
        dram_price: float = 0.0,
        server_share: float = 1.0,
    ) -> None:
        self.problem = problem
        self.cost_model = cost_model
        self.delay, self.host_share, self.with_replicas = delay, host_share, with_replicas
        self.dram_price, self.server_share, self.drives = dram_price, server_share, DriveRows(self)
        topology = problem.topology
        of_model = cost_model.schedule(problem)
        schedule = of_model if delay is None else delay.schedule(of_model)
        self.chain_weights, self.objective = chain_weights, Objective(schedule, chain_weights)
        self.gpus, self.servers = len(topology.serving), len(topology.servers)
        self.tables = len(problem.profile)
        self.kind_of_gpu = list(topology.kind_of_gpu)
        self.kinds = [self.kind_of_gpu.index(kind) for kind in range(max(self.kind_of_gpu) + 1)]
        keys = key_map_bytes(topology, problem.growing)
        hbm = [gpu.memory_bytes - keys[gpu.id] for gpu in topology.serving]
        self.hbm_bytes = np.array(hbm, dtype=np.float64)
        self.all_hbm_bytes = float(self.hbm_bytes[: self.gpus - self.servers].sum())
        of_kind = [cost_model.launches(problem, gpu) for gpu in self.kinds]
        costs = [cost_model.arena_costs(problem, gpu) for gpu in self.kinds]
        if delay is not None:
            of_kind = [delay.with_row(launches_s) for launches_s in of_kind]
            costs = [c and ArenaCosts(*map(delay.with_row, c)) for c in costs]
        self.launches_s = [of_kind[kind] for kind in self.kind_of_gpu]
        self.arena_times = ArenaTimes(problem, [costs[kind] for kind in self.kind_of_gpu])
        hosts = {host.id: number for number, host in enumerate(topology.hosts)}
        self.host_of_gpu = [hosts[home_of(topology, gpu.id, "dram")] for gpu in topology.serving]
        of_gpus = self.host_of_gpu[: self.gpus - self.servers]
        left = [(h.memory_bytes - keys[h.id]) * (hosts[h.id] in of_gpus) for h in topology.hosts]
        self.all_dram_bytes: Float = np.maximum(np.array(left, dtype=np.float64), 0.0)
        self.dram_bytes = self.all_dram_bytes * (1 - self.lacks_dram * _SPARE_DRAM)
        self._rules = ConstraintRules(problem)
        self.alike: list[int] = alike_tables(problem) if like is None else like.alike
        # As the cost model has them, and as the objective weighs them.
        self._model_curves: Latest[CostCurve] = Latest() if like is None else like._model_curves
        self._curves: Latest[CostCurve] = Latest()
        self._settled_costs: Latest[Float] = Latest()
        self._priced_costs: dict[tuple[object, ...], Float] = {}
        self._options: dict[int, tuple[ShardingOption, ...]] = {}
        if like is not None and like.with_replicas == with_replicas:
            self._options = like._options
        self._costs_at: dict[tuple[object, ...], Float] = {}
        self._option_costs: dict[tuple[int, ShardingOption, int], Float] = {}
        self._replicas: OrderedDict[int, Replicas] = OrderedDict()

    def recounted(self, chain_weights: Float | None = None, **counted: Any) -> "Instance":
        """Return an instance of the same problem with other parameters of this class.

        It reuses the curves, and has replicas if this instance has them.
        """
        how = {"like": self, "with_replicas": self.with_replicas, **counted}
        return Instance(self.problem, self.cost_model, chain_weights, **how)

    lacks_dram = cached_property(takes_drives)
    needs_servers = cached_property(takes_servers)
    objective_of_servers = cached_property(objective_of_servers)
    prices = cached_property(prices_of)

    def is_gpu(self, gpu: int) -> bool:
        """Return whether this is a GPU instead of a server."""
        return gpu < self.gpus - self.servers

    def options_of(self, table: int) -> tuple[ShardingOption, ...]:
        """Return the sharding options of a table that are searched and not forbidden."""
        table = self.alike[table]
        if table not in self._options:
            options = self.cost_model.sharding_options(self.problem, table)
            allowed = self._rules.allowed_options(table, options)
            if not self.with_replicas:
                allowed = tuple(o for o in allowed if not o.replicated_rows) or allowed
            self._options[table] = allowed
        return self._options[table]

    def whole(self, table: int) -> TableShard:
        """Return a table as one shard with the usual lookup of cold rows."""
        return TableShard(table, self.options_of(table)[0])

    def uncut(self, table: int) -> list[TableShard]:
        """Return a table as one shard, once for each allowed lookup of cold rows."""
        every = self.options_of(table)
        options = [o for o in every if o.shard_count == 1 and not o.replicated_rows]
        return [TableShard(table, option) for option in options] or [self.whole(table)]

    def shards(self, table: int, option: ShardingOption) -> list[TableShard]:
        """Return the shards of a table with this option, without replicas."""
        return shards_of(table, option, self.rows(table))

    def replicas(self, table: int, option: ShardingOption) -> Block:
        """Return what each GPU holds of a table's replicated rows: one shard, or none."""
        return (TableShard.replica(table, option),) if option.replicated_rows else ()

    def rows(self, table: int) -> int:
        """Return the number of rows of a table."""
        return self.problem.profile.tables[table].table.rows

    def columns(self, shard: TableShard) -> tuple[int, int]:
        """Return the range of columns of a shard."""
        return shard.columns(self.problem.profile.tables[shard.table].table.dim)

    def sharded(
        self, options: Sequence[ShardingOption]
    ) -> tuple[list[TableShard], list[TableShard]]:
        """Return shards and replicas of all tables, each with its option of `options`."""
        shards = [s for table, option in enumerate(options) for s in self.shards(table, option)]
        replicas = [r for table, option in enumerate(options) for r in self.replicas(table, option)]
        return shards, replicas

    def allowed(self, table: int) -> Bool | None:
        """Return which GPUs may serve a table's shards, shape (gpus,); None for all of them."""
        return self._rules.gpus_of_table.get(table)

    def may_serve(self, shard: TableShard, gpu: int) -> bool:
        """Return whether a GPU may serve a shard."""
        allowed = self.allowed(shard.table)
        return shard.home_gpu in (None, gpu) and (allowed is None or bool(allowed[gpu]))

    def open_gpus(self, block: Iterable[TableShard]) -> Bool:
        """Return which GPUs may serve all shards of a block by constraints, shape (gpus,)."""
        return self._rules.open_gpus(block, self.gpus)

    def blocks(self, shards: Iterable[TableShard]) -> list[Block]:
        """Return shards in blocks that one GPU has to serve; most have one shard."""
        return self._rules.blocks(shards)

    def in_group(self, table: int) -> bool:
        """Return whether a table has to stay together with others."""
        return table in self._rules.group_of_table

    def curve(self, shard: TableShard, gpu: int) -> CostCurve:
        """Return the cost of a shard on a GPU."""
        shard = self.drives.settled(shard, gpu)
        key = self._key(shard, gpu)
        if key not in self._curves:
            self._curves[key] = self._rules.within_tier(shard, self._weighed(shard, gpu))
        return self._curves[key]

    def free_curve(self, shard: TableShard, gpu: int) -> CostCurve:
        """Return the cost of a shard on a GPU without constraints on its rows in HBM.

        If its share of rows on the drive is open, no rows are there.
        """
        if shard.option.home.drive_share != ANY_SHARE:
            limited = self._rules.limits_tiers(shard)
            return self._weighed(shard, gpu) if limited else self.curve(shard, gpu)
        key = self._key(shard, gpu)
        if key not in self._curves:
            self._curves[key] = self._weighed(shard, gpu)
        return self._curves[key]

    def _weighed(self, shard: TableShard, gpu: int) -> CostCurve:
        """Return the weighed curve of the cost model."""
        curve = self.model_curve(shard, gpu)
        objective = self.objective if self.is_gpu(gpu) else self.objective_of_servers
        peers = self.host_of_gpu.count(self.host_of_gpu[gpu])
        return weighed(curve, objective.weights, self.host_share, peers, self.dram_price)

    def model_curve(self, shard: TableShard, gpu: int) -> CostCurve:
        """Return the cost model's curve of a shard."""
        key, kind = self._key(shard, gpu), self.kinds[self.kind_of_gpu[gpu]]
        if key not in self._model_curves:
            if not self.is_gpu(gpu):
                shard = _on_server(shard)
            self._model_curves[key] = self.cost_model.cost_curve(self.problem, shard, kind)
        curve = self._model_curves[key]
        return curve if self.delay is None else self.delay.with_phase(curve)

    @cached_property
    def sharding_overhead_s(self) -> float | None:
        """`CostModel.sharding_overhead_s`, weighed; it counts phases of the main chain."""
        extra_s = self.cost_model.sharding_overhead_s(self.problem)
        return None if extra_s is None else extra_s * float(self.objective.chain_weights[0])

    def arenas(self, shards: Iterable[TableShard]) -> set[Arena]:
        """Return the arenas of shards: their element types, widths and optimizers."""
        return {self.arena_of(shard) for shard in shards}

    def arena_of(self, shard: TableShard) -> Arena:
        """Return the arena that a shard is part of."""
        return self.arena_times.arena_of(shard)

    @cached_property
    def replicas_s(self) -> float:
        """Weighted seconds that any replicated rows add to every step."""
        return float((self.objective.weights * self.arena_times.least_replicas_s).sum())

    def launches_weighed_s(self, gpu: int) -> float:
        """Return weighted seconds of an arena's launches on a GPU."""
        return float(self.objective.weights @ self.launches_s[gpu])

    @cached_property
    def fixed_s(self) -> float:
        """Weighted seconds that every step takes: the schedule's fixed time, and launches.

        The slowest GPU of each phase serves something, and so launches at least one arena. A single
        GPU launches all arenas, as it divides no table by columns.
        """
        launches_s = np.min(self.launches_s, axis=0)
        if self.gpus == 1:
            tables = (profile.table for profile in self.problem.profile)
            launches_s = launches_s * len({(t.dtype, t.optimizer, t.dim) for t in tables})
        of_servers = self.objective_of_servers if self.servers else self.objective
        fixed_s = min(self.objective.fixed_s, of_servers.fixed_s)
        return fixed_s + float(self.objective.weights @ launches_s)

    def priced_costs(self, shard: TableShard, gpu: int) -> Float:
        """Return the cost of a shard on a GPU at each of `prices`."""
        shard = self.drives.settled(shard, gpu)
        key = self._key(shard, gpu)
        kept = self._settled_costs if is_open(shard) else self._priced_costs
        if key not in kept:
            kept[key] = priced_costs(self.curve(shard, gpu), self.prices)
        return kept[key]

    def costs_at(self, shard: TableShard, gpu: int, index: int) -> Float:
        """Return the column of `priced_costs` for price number `index`, shape (5 + phases,).

        If only one price is needed, this is faster than to cost the shard at all prices.
        """
        shard = self.drives.settled(shard, gpu)
        key = self._key(shard, gpu)
        priced = self._priced_costs.get(key)
        if priced is not None:
            return priced[:, index]
        last = self.prices.size - 1
        key = (*key, index % (last + 1))
        if key not in self._costs_at:
            few = priced_costs(self.curve(shard, gpu), self.prices[[0, index, last]])
            column = {0: 0, last: 2}.get(index % (last + 1), 1)
            self._costs_at[key] = few[:, column].copy()  # A copy lets go of the others.
        return self._costs_at[key]

    def price_index(self, price: float) -> int:
        """Return the number of the last of `prices` that is at least `price`."""
        return int(np.searchsorted(-self.prices, -price, side="right")) - 1

    def replicated(self, replicas: tuple[TableShard, ...]) -> Replicas:
        """Return sums over replicas, cached by tuple."""
        if id(replicas) not in self._replicas:
            self._replicas[id(replicas)] = Replicas(self, replicas)
            if len(self._replicas) > _REPLICAS:
                self._replicas.popitem(last=False)
        return self._replicas[id(replicas)]

    @property
    def rows_of_costs(self) -> int:
        """Number of rows of `priced_costs`: 5 plus one for each phase."""
        return 5 + len(self.objective.schedule.phases)

    def option_costs(self, table: int, option: ShardingOption) -> Float:
        """Return HBM bytes and GPU seconds of all a table's shards and replicas, shape (2, prices).

        Costs of row slices lie between those of the first and the last slice.
        """
        return self._of_option(table, option, self.priced_costs)

    def option_costs_at(self, table: int, option: ShardingOption, index: int) -> Float:
        """Return the column of `option_costs` for price number `index`, shape (2,)."""
        key = self.alike[table], option, index % self.prices.size
        if key not in self._option_costs:
            costs_of = partial(self.costs_at, index=index)
            self._option_costs[key] = self._of_option(table, option, costs_of)
        return self._option_costs[key]

    def _of_option(
        self, table: int, option: ShardingOption, costs_of: Callable[[TableShard, int], Float]
    ) -> Float:
        gpu, shards = self.kinds[0], self.shards(table, option)
        total: Float | float = 0.0
        if shards:
            first, last = (costs_of(shard, gpu)[:2] for shard in (shards[0], shards[-1]))
            total = len(shards) * (first + last) / 2
        for replica in self.replicas(table, option):
            total = total + (self.gpus - self.servers) * costs_of(replica, gpu)[:2]
        return np.asarray(total)

    def _key(self, shard: TableShard, gpu: int) -> tuple[object, ...]:
        if not self.is_gpu(gpu):
            shard = _on_server(shard)
        return self.alike[shard.table], *shard.cost_key[1:], self.kind_of_gpu[gpu]

    @property
    def search_space(self) -> str:
        """The search space in words, for plans and reports."""
        options = {option for table in range(self.tables) for option in self.options_of(table)}
        return search_space(options, is_constrained=self._rules.any)


def _on_server(shard: TableShard) -> TableShard:
    """Return a shard as servers hold it: all rows in memory, in their table's type."""
    option = shard.option._replace(home=IN_DRAM, cold=WHOLE_TABLE.cold)
    return shard._replace(option=option)


__all__ = ["WHOLE_TABLE", "Block", "Instance", "Placement", "ShardingOption", "TableShard"]
