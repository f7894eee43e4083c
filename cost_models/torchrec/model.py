"""The TorchRec cost model: step time and memory from the estimators of TorchRec's planner.

docs/torchrec.md says which placements TorchRec can hold, and what its formulas count and leave out.
Misses of caches come from the profile.

This module repeats no formula. One call of the estimators with all load factors makes a curve.
"""

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from cost_models.base import CostCurve, CostModel, ShardingOption, TableShard, require_match
from cost_models.cost_report import CostReport, GpuCost, HostCost, TableCost
from placer.adapters.torchrec.export import require_torchrec
from placer.adapters.torchrec.sharding import (
    KERNELS,
    Block,
    Sharding,
    ShardingType,
    even_blocks,
    sharding_of,
)
from placer.errors import PlanMismatchError, ProblemError
from placer.plan.fields import Shard
from placer.plan.memory import device_memory
from placer.plan.plan import Plan
from placer.problem import Problem
from placer.profile.table_profile import TableProfile
from placer.tables import Table
from placer.topology.topology import Topology

if TYPE_CHECKING:
    from cost_models.torchrec.estimates import Estimates

_MS = 1e-3


class TorchRec(CostModel):
    """The cost model of TorchRec's planner; see `cost_models.CostModel`.

    A step takes as long as the slowest rank needs for all its work. Dividing a table by rows may
    save time: TorchRec charges narrow rows more in a whole table than in a block of rows.

    Parameters
    ----------
    prefetch_pipeline : bool
        Whether TorchRec's prefetching pipeline fills caches ahead of the step. Then cached rows
        are read as fast as rows in HBM, and misses only cost their copy.
    bandwidths : {"torchrec", "topology"}
        TorchRec's default bandwidths, or those of the problem's machine.
    min_partition : int or None
        The narrowest column slice, like TorchRec's constraint of this name. The default is 128,
        so narrower tables are not sharded by columns.
    replicate : bool
        Whether solvers may replicate tables. TorchRec does not apply an optimizer of the backward
        pass to replicas. So only models that update tables with the optimizer of the dense layers
        can train such plans.
    """

    uniform_splits = True

    def __init__(
        self,
        *,
        prefetch_pipeline: bool = False,
        bandwidths: Literal["torchrec", "topology"] = "torchrec",
        min_partition: int | None = None,
        replicate: bool = False,
    ) -> None:
        self.name = "torchrec-prefetch" if prefetch_pipeline else "torchrec"
        self._prefetches, self._bandwidths = prefetch_pipeline, bandwidths
        self._min_partition, self._replicate = min_partition, replicate
        self._estimates: Estimates | None = None  # Of the last problem.

    def estimates(self, problem: Problem) -> "Estimates":
        """Return TorchRec's estimators for a problem.

        Raises BackendError if torchrec is not installed.
        """
        if self._estimates is None or self._estimates.problem is not problem:
            with require_torchrec():
                from cost_models.torchrec.estimates import Estimates
            self._estimates = Estimates(problem, self._prefetches, self._bandwidths)
        return self._estimates

    def sharding_options(self, problem: Problem, table: int) -> tuple[ShardingOption, ...]:
        """Return the options of TorchRec's enumerator. See `CostModel.sharding_options`."""
        estimates = self.estimates(problem)
        spec, gpus = problem.profile.tables[table].table, problem.topology.gpus
        options = [ShardingOption(cold="cached")]
        if len(gpus) == 1 or spec.rows == 0:
            return tuple(options)

        def is_divisible(ways: int) -> bool:
            # With few rows, some GPUs would have none, but TorchRec would charge the same.
            start, stop = even_blocks(spec.rows, ways)[-1]
            return start < stop

        blocked = ShardingOption(len(gpus), cold="cached", blocked=True)
        widths = estimates.even_column_widths(spec, self._min_partition)
        if len(widths) > 1:
            options.append(ShardingOption(1, widths, cold="cached"))
        if is_divisible(len(gpus)):
            options.append(blocked)
        local = estimates.topology.local_world_size
        is_pooled = all(feature.pooling != "none" for feature in spec.features)
        # Blocks of one row would be read back as blocks over all GPUs.
        if 1 < local < min(len(gpus), spec.rows) and is_divisible(local) and is_pooled:
            for first in range(0, len(gpus), local):
                of_host = blocked._replace(row_slices=local, first_gpu=first)
                options.append(of_host)
                if 1 < len(widths) <= (len(gpus) - first) // local:
                    options.append(of_host._replace(column_widths=widths))
        if self._replicate and spec.total_bytes <= min(gpu.memory_bytes for gpu in gpus):
            options.append(ShardingOption(replicated_rows=spec.rows, cold="cached"))
        return tuple(options)

    def evaluate(self, problem: Problem, plan: Plan) -> CostReport:
        """Return the cost of a whole plan. See `CostModel.evaluate`."""
        require_match(problem, plan)
        estimates = self.estimates(problem)
        placed = {
            profile.name: sharding_of(problem.topology, profile.table, shards)
            for profile in problem.profile
            if (shards := plan.shards_by_table.get(profile.name))
        }
        options = [
            estimates.option(problem.profile[name], sharding) for name, sharding in placed.items()
        ]
        estimates.estimate(options)
        times: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        hits = lookups = 0.0
        tables: dict[str, TableCost] = {}
        for option, (name, sharding) in zip(options, placed.items(), strict=True):
            table_s, profile = 0.0, problem.profile[name]
            for shard in option.shards:
                for part, seconds in _parts(option.compute_kernel, shard.perf, self).items():
                    times[shard.rank][part] += seconds
                    table_s += seconds
            tables[name] = TableCost(table_s, _hit_share(profile, sharding))
            lookups += profile.table.lookups_per_sample
            hits += profile.table.lookups_per_sample * tables[name].hbm_lookup_share
        of_ranks = (times[rank] for rank in range(len(problem.topology.gpus)))
        return CostReport(
            self.name,
            tuple(
                GpuCost(gpu.id, of["hbm"], of["link"], of["exchange"], 0.0)
                for gpu, of in zip(problem.topology.gpus, of_ranks, strict=True)
            ),
            tuple(HostCost(host.id, 0.0) for host in problem.topology.hosts),
            device_memory(plan),
            hits / lookups if lookups else 1.0,
            tables=tables,
        )

    def cost_curve(self, problem: Problem, shard: TableShard, gpu: int) -> CostCurve:
        """Return the cost of a shard over its hot rows. See `CostModel.cost_curve`.

        The curve is exact at its points, but not convex. An empty cache costs more than no cache,
        and a cache of nearly all rows costs more than all rows in HBM.
        """
        estimates = self.estimates(problem)
        profile = problem.profile.tables[shard.table]
        table = profile.table
        start, stop, _ = shard.rows(table.rows)
        first, last = shard.columns(table.dim)
        option, home_gpu = shard.option, gpu if shard.home_gpu is None else shard.home_gpu
        is_strided = option.row_slices > 1 and not option.blocked
        if option.cold != "cached" or is_strided or option.replicated_rows not in (0, table.rows):
            raise ProblemError(
                f"TorchRec has no such sharding option of table {table.name!r}: {option}"
            )
        kind = _kind(problem.topology, table, (start, stop), last - first, home_gpu)
        if shard.is_replica:
            kind = "data_parallel"
        lookups = tuple(feature.lookups_per_sample for feature in table.features)
        poolings = tuple(feature.pooling for feature in table.features)
        # Tables with the same size and the same accesses share their curves.
        alike = table.rows, table.dim, table.dtype, table.optimizer, lookups, poolings
        key = shard.is_replica, kind, stop - start, last - first, alike, id(profile.cdf)
        if key not in estimates.curves:
            block = Block(stop - start, last - first, start, first, gpu)
            estimates.curves[key] = estimates.curve(
                profile, kind, block, is_replica=shard.is_replica
            )
        return estimates.curves[key]

    def with_buffers(
        self, problem: Problem, table: int, shard: Shard, *, returns_bags: bool
    ) -> Shard:
        """Return a shard with TorchRec's buffers. See `CostModel.with_buffers`.

        They are all that TorchRec counts besides rows, state and caches. No rows are staged:
        TorchRec's caches take misses in, and its other kernels read in place.
        """
        if shard.lookup not in KERNELS:
            raise PlanMismatchError(
                f"table {shard.table!r}: TorchRec has no lookup {shard.lookup!r}; "
                f"use {', '.join(KERNELS)}"
            )
        profile, topology = problem.profile.tables[table], problem.topology
        rows, gpu = shard.rows[:2], topology.gpu_numbers[shard.devices[0]]
        kind, kernel = _kind(topology, profile.table, rows, shard.width, gpu), KERNELS[shard.lookup]
        if len(shard.devices) > 1:
            kind, kernel = "data_parallel", "dense"
        size = self.estimates(problem).shard_buffer_bytes(profile, shard, kind, kernel)
        return replace(shard, staging_rows=0, buffer_bytes=size)


def _kind(
    topology: Topology, table: Table, rows: tuple[int, int], width: int, gpu: int
) -> ShardingType:
    """Return TorchRec's sharding type of a shard with a range of rows on GPU number `gpu`."""
    whole = rows == (0, table.rows)
    if width < table.dim:
        return "column_wise" if whole else "grid_shard"
    if whole:
        return "table_wise"
    # For row blocks on one host, TorchRec counts buffers of other sizes.
    block = even_blocks(table.rows, len(topology.gpus))[gpu]
    return "row_wise" if rows == block else "table_row_wise"


def _parts(kernel: str, perf: Any, model: TorchRec) -> dict[str, float]:
    """Divide `Perf.total` into HBM, link and exchange, in seconds, by the main resource."""
    compute = (perf.fwd_compute + perf.bwd_compute) * _MS
    rows_in_hbm = kernel in ("fused", "dense") or (
        kernel == "fused_uvm_caching" and model.name == "torchrec-prefetch"
    )
    return {
        "hbm": compute if rows_in_hbm else 0.0,
        "link": (0.0 if rows_in_hbm else compute) + perf.prefetch_compute * _MS,
        "exchange": (perf.fwd_comms + perf.bwd_comms) * _MS,
    }


def _hit_share(profile: TableProfile, sharding: Sharding) -> float:
    """Return the share of a table's lookups that HBM serves."""
    if sharding.load_factor is not None:
        return float(profile.cdf.share(sharding.load_factor * profile.table.rows))
    return 0.0 if sharding.kernel == "fused_uvm" else 1.0
