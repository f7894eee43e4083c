"""The step equation: what a placement costs, given what each unit of its work costs.

With L lookups of a step in a shard, U distinct rows among them, rows of w bytes of weights
and s bytes of optimizer state, and V output vectors, a resource of a GPU (its memory, its
link) or of its host (its memory) is busy for

    L·(a + b·w) + U·(c + d·(w + s)) + V·(e + f·w)

seconds, with constants a to f that depend on how rows are read, and for ``output_byte_s`` per
byte that it returns, ``exchange_byte_s`` per byte that it exchanges, and a constant for every
shard and piece (`UnitCosts`). Nothing overlaps, so times add; the step takes as long as the
slowest GPU, or as the busiest host's memory, which its GPUs share.

Constants of a table are the same for all its pieces, wherever these are cut: so a plan costs
what its pieces cost, and curves of staged rows and of rows read in place fall and are convex
where no unit is cheaper than one of rows in HBM.
"""

from abc import ABC, abstractmethod
from collections import defaultdict

import numpy as np

from cost_models.base import (
    Cold,
    CostCurve,
    CostReport,
    Float,
    GpuCost,
    HostCost,
    ShardingOption,
    TableShard,
)
from cost_models.sharding_options import standard_options
from cost_models.step_equation.exchanged_bytes import (
    ID_BYTES,
    length_bytes,
    output_bytes,
    replica_bytes,
    returned_vectors,
    row_sum_bytes,
)
from cost_models.step_equation.slice_load import (
    cumulative_load,
    rows_in_flight,
    slice_load,
    with_steps_at_ends,
)
from cost_models.step_equation.unit_costs import PerUnit, Rates, ReadKind, UnitCosts
from cost_models.step_equation.work import hbm_lookup_share, work_of
from placer.plan.buffers import (
    exchange_buffer_bytes,
    index_buffer_bytes,
    output_vectors,
    staging_buffer_bytes,
    with_buffers,
)
from placer.plan.memory import POOL_ENTRY_BYTES, device_memory, row_map_bytes
from placer.plan.plan import Plan
from placer.plan.shard import Shard
from placer.problem import Problem
from placer.profile.table_profile import TableProfile
from placer.tables import Table


class StepEquation(ABC):
    """A cost model (see `cost_models.CostModel`) but for its constants."""

    name: str
    uniform_splits = False

    @property
    def relative_error(self) -> float | None:
        """How far step times are off on average, as a share; None where nobody measured it."""
        return None

    @abstractmethod
    def unit_costs(self, problem: Problem, table: int, gpu: int) -> UnitCosts:
        """Constants of table number `table` on GPU number `gpu`.

        The same for GPUs that are alike in all that the topology says of them. Asked for often:
        it should be quick.
        """

    @abstractmethod
    def sharding_overhead_s(self, problem: Problem) -> float | None:
        """See `CostModel.sharding_overhead_s`.

        Where one kind of GPU has the least of all constants of every table: the least
        ``piece_s + shard_s``, as pieces return and sort no less than the whole. Else None: hot
        rows may then be best on one kind of GPU and cold ones on another, which a whole table
        cannot have.
        """

    def host_rates(self, problem: Problem, table: int, host: str) -> Rates:
        """Seconds of a host's memory for rows that the host pools without a GPU's asking."""
        attached = problem.topology.gpus_of(host) or problem.topology.gpus
        number = problem.topology.gpus.index(attached[0])
        return self.unit_costs(problem, table, number).host.dram

    def sharding_options(self, problem: Problem, table: int) -> tuple[ShardingOption, ...]:
        """The cuts that are searched. See `CostModel.cuts` and `standard_cuts`."""
        return standard_options(problem, table, self._colds(problem, table))

    def with_buffers(
        self, problem: Problem, table: int, shard: Shard, *, returns_bags: bool
    ) -> Shard:
        """As `placer.plan.buffers` has them. See `CostModel.with_buffers`."""
        samples = problem.global_batch_size // len(shard.devices)
        profile = problem.profile.tables[table]
        return with_buffers(profile, shard, samples=samples, returns_bags=returns_bags)

    def evaluate(self, problem: Problem, plan: Plan) -> CostReport:
        """Cost of a whole plan. See `CostModel.evaluate`."""
        topology = problem.topology
        numbers = {gpu.id: number for number, gpu in enumerate(topology.gpus)}
        spent: list[dict[str, float]] = [defaultdict(float) for _ in topology.gpus]
        dram_s: dict[str, float] = {host.id: 0.0 for host in topology.hosts}
        for work in work_of(problem, plan):
            if work.gpu is None:
                rates = self.host_rates(problem, work.table, work.host)
                per_unit = rates.of(work.weight_bytes, work.row_bytes, work.weight_bytes)
                dram_s[work.host] += float(per_unit.seconds(work.lookups, work.rows, work.vectors))
                attached = topology.gpus_of(work.host)
                for gpu in attached:
                    costs = self.unit_costs(problem, work.table, numbers[gpu.id])
                    spent[numbers[gpu.id]]["link"] += work.seconds(costs).link_s / len(attached)
                continue
            seconds = work.seconds(self.unit_costs(problem, work.table, work.gpu))
            dram_s[work.host] += seconds.dram_s
            time = spent[work.gpu]
            time["hbm"] += seconds.hbm_s
            time["link"] += seconds.link_s
            time["exchange"] += seconds.exchange_s
            time["launch"] += seconds.launch_s
        return CostReport(
            self.name,
            tuple(
                GpuCost(gpu.id, t["hbm"], t["link"], t["exchange"], t["launch"])
                for gpu, t in zip(topology.gpus, spent, strict=True)
            ),
            tuple(HostCost(host, seconds) for host, seconds in dram_s.items()),
            device_memory(plan),
            hbm_lookup_share(problem, plan),
            self.relative_error,
        )

    def cost_curve(self, problem: Problem, shard: TableShard, gpu: int) -> CostCurve:
        """Cost of a piece over its hot rows. See `CostModel.cost_curve`."""
        profile = problem.profile.tables[shard.table]
        costs = self.unit_costs(problem, shard.table, gpu)
        if shard.is_replica:
            return _replica_curve(problem, profile, shard.option.replicated_rows, costs)
        spec, cold = profile.table, shard.option.cold
        first, last = shard.columns(spec.dim)
        width, rows = last - first, shard.rows(spec.rows)
        samples = problem.global_batch_size
        step_lookups = samples * spec.lookups_per_sample
        hot, lookups, unique = cumulative_load(profile, rows, step_lookups)
        pool_s = costs.pool_s if cold in ("staged", "cached") else 0.0
        if pool_s or cold in ("host", "cached"):  # Their costs jump beside none and all.
            hot, lookups, unique = with_steps_at_ends(hot, lookups, unique)
        cold_lookups, cold_unique = lookups[-1] - lookups, unique[-1] - unique
        members, row_bytes = int(hot[-1]), spec.bytes_per_row(width)
        vectors = output_vectors(spec, samples, float(lookups[-1]))
        hit_kind: ReadKind = "hit" if cold == "cached" else "device"
        gpu_unit, dram_unit = _per_unit(costs, hit_kind, spec, width)
        gpu_s = gpu_unit.seconds(lookups, unique, 0.0)
        dram_s = dram_unit.seconds(lookups, unique, 0.0)
        buffers = np.full(
            hot.size,
            exchange_buffer_bytes(spec, samples, float(lookups[-1]), width)
            + index_buffer_bytes(float(lookups[-1])),
        )
        cold_kind: ReadKind = "miss" if cold == "cached" else cold
        cold_gpu, cold_dram = _per_unit(costs, cold_kind, spec, width)
        if cold in ("staged", "cached"):
            in_flight = rows_in_flight(profile, rows, step_lookups, hot)
            staging = staging_buffer_bytes(spec, in_flight[-1] - in_flight, width)
            if cold == "cached":  # Without a cache, rows are read in place.
                staging[0] = 0.0
            buffers += staging
        if cold == "host":
            bags = output_vectors(spec, samples, 0.0)
            cold_vectors = bags + (vectors - bags) * _share_of_last(cold_lookups)
            # With all rows in HBM there is nothing for the host to send; without any row it
            # sends empty bags.
            sends = (hot < members) | (members == 0)
            by_host = cold_gpu.seconds(cold_lookups, cold_unique, cold_vectors)
            gpu_s = gpu_s + np.where(sends, by_host, 0.0)
            by_host = cold_dram.seconds(cold_lookups, cold_unique, cold_vectors)
            dram_s = dram_s + np.where(sends, by_host, 0.0)
        else:
            gpu_s = gpu_s + cold_gpu.seconds(cold_lookups, cold_unique, 0.0)
            dram_s = dram_s + cold_dram.seconds(cold_lookups, cold_unique, 0.0)
        gpu_s, dram_s = np.array(gpu_s), np.array(dram_s)
        split_s = costs.shard_s + costs.split_s + float(lookups[-1]) * costs.split_lookup_s
        if cold == "staged" and members:  # A pool is needed however few rows are staged.
            gpu_s[0] += pool_s
            split_s += pool_s
        in_dram = ((members - hot) * row_bytes).astype(np.float64)
        if cold == "cached":
            in_dram = np.where(hot < members, float(members * row_bytes), 0.0)
            gpu_s += hot * costs.cache_row_s + pool_s
            # Ends of a cache's curve are shards without one: in place, or just in HBM.
            ends: tuple[tuple[int, ReadKind], ...] = ((-1, "device"), (0, "uva"))
            for end, kind in ends:
                of_gpu, of_dram = _per_unit(costs, kind, spec, width)
                gpu_s[end] = of_gpu.seconds(lookups[-1], unique[-1], 0.0)
                dram_s[end] = of_dram.seconds(lookups[-1], unique[-1], 0.0)
            buffers += np.where(hot < members, hot * POOL_ENTRY_BYTES, 0)
        alone = shard.option.row_slices == 1 and not shard.option.replicated_rows
        returned = returned_vectors(spec, samples, float(lookups[-1]), alone=alone)
        output, strips = output_bytes(returned, width), max(1, len(shard.option.column_widths))
        exchanged = float(lookups[-1]) * ID_BYTES + length_bytes(spec, samples) + 2 * output
        exchanged += row_sum_bytes(spec, float(unique[-1]), strips, len(problem.topology.gpus))
        fixed_s = (
            costs.piece_s
            + (costs.strip_s if strips > 1 else 0.0)
            + costs.shard_s
            + returned * costs.output_vector_s
            + output * costs.output_byte_s
            + exchanged * costs.exchange_byte_s
        )
        # Ranks differ from ids, and so need a map, where they decide what is read where. With
        # a replicated head every GPU has that map anyway.
        map_bytes = (
            row_map_bytes(spec) if profile.counts and not shard.option.replicated_rows else 0
        )
        by_rank = shard.option.row_slices > 1 and not shard.option.blocked
        return CostCurve(
            hot_rows=hot,
            gpu_s=fixed_s + gpu_s,
            dram_s=dram_s,
            hbm_bytes=hot * row_bytes + buffers + (map_bytes if by_rank else 0),
            dram_bytes=in_dram,
            # A cache and the rows behind it are one shard, and know their rows by id.
            split_s=0.0 if cold == "cached" else split_s,
            split_hbm_bytes=0.0 if by_rank or cold == "cached" else float(map_bytes),
        )

    def _colds(self, problem: Problem, table: int) -> tuple[Cold, ...]:
        """Ways to read the cold rows of a table that may pay, the usual one first.

        Staging beats reading in place wherever its buffers fit, but they may not. A host that
        pools saves link time where bags are large and hardly repeat rows. A cache needs no map
        of a split's rows, which pays where it is small.
        """
        profile, topology = problem.profile.tables[table], problem.topology
        spec, samples = profile.table, problem.global_batch_size
        lookups = samples * spec.lookups_per_sample
        unique = profile.cdf.unique(float(lookups))
        vectors = output_vectors(spec, samples, float(lookups))
        costs = self.unit_costs(problem, table, 0)
        size = (spec.weight_bytes_per_row(), spec.bytes_per_row(), spec.weight_bytes_per_row())
        amounts = (lookups, unique, vectors)
        staged_s = (costs.staged.hbm + costs.staged.link).of(*size).seconds(*amounts)
        host_s = costs.host.link.of(*size).seconds(*amounts)
        # The host's memory has to do this for all its GPUs in the same time.
        peers = len(topology.gpus_of(topology.gpus[0].host))
        host_dram_s = costs.host.dram.of(*size).seconds(*amounts) * peers
        colds: list[Cold] = ["staged", "uva"]
        if max(float(host_s), float(host_dram_s)) < staged_s:
            colds.append("host")
        if profile.counts is not None and spec.rows > 1:
            colds.append("cached")
        forbidden = problem.constraints.rule_of(profile.name).forbid
        if forbidden & {"staged", "uva"}:  # Then others may pay, or be all that is left.
            colds += [cold for cold in ("host", "cached") if cold not in colds]
        return tuple(colds)


def _per_unit(costs: UnitCosts, kind: ReadKind, spec: Table, width: int) -> tuple[PerUnit, PerUnit]:
    """Seconds of the GPU, memory and link together, and of the host's memory."""
    read, weight_bytes = costs.read(kind), spec.weight_bytes_per_row(width)
    size = (weight_bytes, spec.bytes_per_row(width), weight_bytes)
    return read.hbm.of(*size) + read.link.of(*size), read.dram.of(*size)


def _replica_curve(
    problem: Problem, profile: TableProfile, replicated_rows: int, costs: UnitCosts
) -> CostCurve:
    """Cost on one GPU of rows that every GPU holds, for its own samples."""
    spec, gpus = profile.table, len(problem.topology.gpus)
    samples = problem.global_batch_size // gpus
    rows = (0, replicated_rows, 1)
    lookups, unique = slice_load(profile, rows, samples * spec.lookups_per_sample)
    touched = slice_load(profile, rows, problem.global_batch_size * spec.lookups_per_sample)[1]
    read, _ = _per_unit(costs, "device", spec, spec.dim)
    vectors = returned_vectors(spec, samples, lookups, alone=replicated_rows == spec.rows)
    reduced = replica_bytes(spec.dim, unique, touched, gpus, gpus)
    ordered = profile.counts is not None and replicated_rows < spec.rows
    return CostCurve(
        hot_rows=np.array([replicated_rows]),
        gpu_s=np.array(
            [
                costs.piece_s
                + costs.shard_s
                + read.seconds(lookups, unique, 0.0)
                + vectors * costs.output_vector_s
                + output_bytes(vectors, spec.dim) * costs.output_byte_s
                + reduced * costs.exchange_byte_s
            ]
        ),
        dram_s=np.zeros(1),
        hbm_bytes=np.array([float(replicated_rows * spec.bytes_per_row())])
        + exchange_buffer_bytes(spec, samples, lookups, spec.dim)
        + index_buffer_bytes(lookups)
        + (row_map_bytes(spec) if ordered else 0),
        dram_bytes=np.zeros(1),
        split_s=0.0,
        split_hbm_bytes=0.0,
    )


def _share_of_last(cold_lookups: Float) -> Float:
    """Cold lookups as a share of all lookups; 0 where there are none."""
    total = cold_lookups[0] if cold_lookups.size else 0.0
    return cold_lookups / total if total else np.zeros_like(cold_lookups)
