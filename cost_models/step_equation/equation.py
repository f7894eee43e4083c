"""The step equation: the cost of a placement from the costs of its units of work.

A step has L lookups in a shard, which read U distinct rows and return V vectors. A row has w bytes
of weights and s bytes of optimizer state. A resource (the GPU's memory, its link or the host's
memory) is then busy for

    L·(a + b·w) + U·(c + d·(w + s)) + V·(e + f·w)

seconds. The constants a to f depend on how rows are read. Additional constants (`UnitCosts`) are
for bytes that a GPU returns or exchanges, for shards and for column slices. Arenas of a GPU also
take time (`cost_models.arenas`). All these seconds belong to phases of the step
(`cost_models.step_equation.phases`). Each phase takes as long as its slowest GPU. A step takes at
least as long as the busiest host's memory, which the host's GPUs share.

All shards of a table have the same constants, for all sharding options.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, lru_cache, partial

import numpy as np
import numpy.typing as npt

from cost_models.arenas import added_up, arena_loads, tables_by_arena, times_by_arena
from cost_models.base import Cold, CostCurve, CostModel, Float, ShardingOption, TableShard
from cost_models.cost_report import PARTS, CostReport, GpuCost, HostCost, TableCost
from cost_models.dense import dense_step_s
from cost_models.schedule import Schedule
from cost_models.sharding_options import standard_options
from cost_models.step_equation.curve import point_curve, shard_curve
from cost_models.step_equation.loads import may_return_fewer
from cost_models.step_equation.phases import (
    HOST,
    LOOKUP_SHARES,
    NAMES,
    ROWS,
    Rates,
    ReadCosts,
    UnitCosts,
    parts_of,
    schedule_of,
    with_lanes,
)
from cost_models.step_equation.work import Work, work_of
from placer.plan.fields import Shard
from placer.plan.memory import device_memory, home_of, output_vectors, with_buffers
from placer.plan.plan import Plan
from placer.problem import Problem

# Cache, as solvers size a plan several times, and several machines need the same sizes.
_with_buffers = lru_cache(maxsize=32_768)(with_buffers)


class StepEquation(CostModel, ABC):
    """Base class of cost models with the step equation; subclasses give the constants."""

    lookup_shares: Float = LOOKUP_SHARES  # The lookup's share of each constant of `ReadCosts`.

    def relative_error(self, problem: Problem) -> float | None:
        """Return the median relative error of step times; None if it is not known."""
        return None

    @abstractmethod
    def unit_costs(self, problem: Problem, table: int, gpu: int) -> UnitCosts:
        """Return the constants of table number `table` on GPU number `gpu`.

        They must be equal for GPUs with equal properties in the topology. Called often, so it
        should be fast.
        """

    @abstractmethod
    def least_shard_s(self, problem: Problem) -> float | None:
        """Return the least ``shard_s`` of all tables if one kind of GPU has all the best constants.

        Otherwise return None: dividing a table may then save time, with hot rows on one kind of
        GPU and cold rows on another.
        """

    def sharding_overhead_s(self, problem: Problem) -> float | None:
        """Return `least_shard_s`. See `CostModel.sharding_overhead_s`.

        Return None if there are servers, or a table's shards may return fewer vectors than the
        whole table.
        """
        if problem.topology.servers or any(
            may_return_fewer(profile.table) for profile in problem.profile
        ):
            return None
        return self.least_shard_s(problem)

    def host_rates(self, problem: Problem, table: int, host: str) -> Rates:
        """Return the rates of the memory of a host without GPUs, for rows that it serves."""
        costs = self.unit_costs(problem, table, 0).host
        # Without constants of hosts' memory, take the constants of the time that GPUs wait.
        rates = costs.dram if any(costs.dram) else costs.link
        known = problem.topology.hosts_by_id[problem.topology.gpus[0].host].dram_bytes_per_s
        slower = known / problem.topology.hosts_by_id[host].dram_bytes_per_s
        return Rates(*(slower * rate for rate in rates[:4]))

    def serving_costs(self, problem: Problem, table: int, number: int) -> UnitCosts:
        """Return a table's constants on device `number` of `Topology.serving`: a GPU or a server.

        A server's network carries pooled rows, ids and gradients. The time of its processors counts
        as link time, as it does if a host pools for a GPU.
        """
        gpus = len(problem.topology.gpus)
        if number < gpus:
            return self.unit_costs(problem, table, number)
        server = problem.topology.servers[number - gpus].id
        rates = self.host_rates(problem, table, server)
        byte_s = 1 / problem.topology.server_bytes_per_s(server)
        return UnitCosts(host=ReadCosts(link=rates, dram=rates), exchange_byte_s=byte_s)

    def schedule(self, problem: Problem, *, with_servers: bool = True) -> Schedule:
        """Return the schedule of the executor's step. See `CostModel.schedule`."""
        return schedule_of(problem, with_servers)

    def sharding_options(self, problem: Problem, table: int) -> tuple[ShardingOption, ...]:
        """Return the `standard_options`. See `CostModel.sharding_options`."""
        return standard_options(problem, table, self._colds(problem, table))

    def with_buffers(
        self, problem: Problem, table: int, shard: Shard, *, returns_bags: bool
    ) -> Shard:
        """Return a shard sized by `placer.plan.memory`. See `CostModel.with_buffers`."""
        samples = problem.global_batch_size // len(shard.devices)
        anywhere = replace(shard, devices=())
        profile, ahead = problem.profile.tables[table], problem.pipeline == "look-ahead"
        sized = _with_buffers(
            profile, anywhere, samples=samples, returns_bags=returns_bags, ahead=ahead
        )
        return replace(shard, staging_rows=sized.staging_rows, buffer_bytes=sized.buffer_bytes)

    def evaluate(self, problem: Problem, plan: Plan) -> CostReport:
        """Return the cost of a whole plan. See `CostModel.evaluate`."""
        topology, works = problem.topology, work_of(problem, plan)
        with_servers = any(len(topology.gpus) <= gpu for work in works for gpu in work.gpus)
        schedule = self.schedule(problem, with_servers=with_servers)
        # The last axis has the GPUs, then the servers.
        parts_s = np.zeros((len(PARTS), ROWS, len(topology.serving)))
        dram_s = {host.id: 0.0 for host in topology.hosts}
        table_s = np.zeros(len(problem.profile))
        known: dict[tuple[object, ...], tuple[Float, float]] = {}
        kinds_of = cache(partial(_by_kind, np.array(topology.kind_of_gpu)))
        for work in works:
            for kind, gpus in kinds_of(work.gpus):  # Equal GPUs do equal work for replicas.
                key = *work.amounts, kind
                if key not in known:
                    costs = self.serving_costs(problem, work.table, int(gpus[0]))
                    seconds = work.seconds(costs, self.lookup_shares)
                    fixed_s = work.extras.launch_s(costs), work.extras.drive_s
                    own_s = parts_of(seconds[:HOST], work.kind, *fixed_s)
                    known[key] = own_s, float(seconds[HOST])
                own_s, host_s = known[key]
                table_s[work.table] += gpus.size * own_s.sum()
                parts_s[:, :, gpus] += own_s[..., None]
                for gpu in gpus.tolist() if host_s else ():
                    dram_s[home_of(topology, topology.serving[gpu].id, "dram")] += host_s
        by_arena = times_by_arena(self, problem, arena_loads(problem, plan))
        for arena, members in tables_by_arena(problem, plan).items():
            # The tables of a GPU's arena share its time.
            arena_s = [of[arena][: len(NAMES)].sum() if arena in of else 0.0 for of in by_arena]
            table_s += members @ (np.array(arena_s) / np.maximum(1, members.sum(axis=0)))
        arenas_s = added_up(by_arena, len(schedule.phases))
        parts_s = with_lanes(parts_s, problem.pipeline)
        parts_s[PARTS.index("launches")] += arenas_s
        hbm_s, link_s, pooled_s, exchange_s, launches_s, drives_s = parts_s[:, : len(NAMES)].sum(1)
        of_gpus = np.stack((hbm_s, link_s + pooled_s + drives_s, exchange_s, launches_s), axis=1)
        by_gpu = zip(topology.serving_numbers, of_gpus.tolist(), strict=True)
        hot, every = _hbm_lookups(problem, works)
        return CostReport(
            self.name,
            tuple(GpuCost(one, *of) for one, of in by_gpu),
            tuple(HostCost(host, seconds) for host, seconds in dram_s.items()),
            device_memory(plan),
            sum(hot) / sum(every) if any(every) else 1.0,
            self.relative_error(problem),
            schedule,
            tuple(map(tuple, parts_s.sum(axis=0).tolist())),
            dense_step_s(problem),
            parts_s,
            {
                name: TableCost(seconds, table_hot / lookups if lookups else 1.0)
                for name, seconds, table_hot, lookups in zip(
                    problem.profile.table_names, table_s.tolist(), hot, every, strict=True
                )
                if plan.shards_by_table.get(name)
            },
        )

    def cost_curve(self, problem: Problem, shard: TableShard, gpu: int) -> CostCurve:
        """Return a shard's cost as a function of its hot rows. See `CostModel.cost_curve`."""
        costs = self.serving_costs(problem, shard.table, gpu)
        server = "" if gpu < len(problem.topology.gpus) else problem.topology.serving[gpu].id
        if server or shard.is_replica:
            return point_curve(problem, shard, costs, self.lookup_shares, server)
        return shard_curve(problem, shard, gpu, costs, self.lookup_shares)

    def _colds(self, problem: Problem, table: int) -> tuple[Cold, ...]:
        """Return the allowed ways to read cold rows that may pay, the usual way first.

        Staging beats reading in place, but its buffers may not fit. Pooling by the host saves link
        time if bags are large and rarely repeat rows. A cache needs no row map of a split, which
        pays if the cache is small.
        """
        profile, topology = problem.profile.tables[table], problem.topology
        spec, samples = profile.table, problem.global_batch_size
        lookups = samples * spec.lookups_per_sample
        unique, vectors = profile.unique(float(lookups)), output_vectors(spec, samples, lookups)
        sizes = spec.weight_bytes_per_row(), spec.bytes_per_row()
        whole = Work(table, "host", *sizes, lookups, unique, vectors)

        def pools(gpu: int) -> bool:
            costs = self.unit_costs(problem, table, gpu)
            staged_s = whole.resource_s(costs.staged.hbm) + whole.resource_s(costs.staged.link)
            # The host's memory does this for all its GPUs in the same time.
            peers = len(topology.gpus_of(topology.gpus[gpu].host))
            pooled_s = whole.resource_s(costs.host.dram) * peers
            return max(whole.resource_s(costs.host.link), pooled_s) < staged_s

        colds: list[Cold] = ["staged", "uva"]
        # It is enough that pooling pays on one kind of GPU.
        kinds = topology.kind_of_gpu[: len(topology.gpus)]
        if any(pools(kinds.index(kind)) for kind in sorted(set(kinds))):
            colds.append("host")
        if profile.counts is not None and spec.rows > 1:
            colds.append("cached")
        forbidden = problem.constraints.rule_of(profile.name).forbid
        if forbidden & {"staged", "uva"}:  # Then other ways may pay, or no others are left.
            colds += [cold for cold in ("host", "cached") if cold not in colds]
        # The first goes with every way to divide the table, so it must be allowed.
        return tuple(cold for cold in colds if cold not in forbidden) or ("staged",)


def _by_kind(
    kind_of_gpu: npt.NDArray[np.int64], gpus: tuple[int, ...]
) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Return the numbers of these GPUs and servers, grouped by kind."""
    numbers = np.array(gpus, dtype=np.int64)
    kinds = kind_of_gpu[numbers]
    return [(kind, numbers[kinds == kind]) for kind in np.unique(kinds).tolist()]


def _hbm_lookups(problem: Problem, works: Iterable[Work]) -> tuple[list[float], list[float]]:
    """Return each table's lookups that HBM serves, with hits of caches, and all lookups."""
    hot, every = ([0.0] * len(problem.profile) for _ in range(2))
    for work in works:
        spec = problem.profile.tables[work.table].table
        lookups = work.lookups * work.weight_bytes / spec.weight_bytes_per_row()
        lookups *= len(work.gpus)
        hot[work.table] += lookups if work.kind in ("device", "hit") else 0.0
        every[work.table] += lookups
    return hot, every
