"""The options that a TorchRec enumerator made of a model, as a cost model.

Where `cost_models.torchrec.model` asks TorchRec about any problem, this asks a planner's own
enumerator about the model that it enumerated: its topology, estimators and constraints decide what
there is and what it costs. A table is placed by one of its options of types ``table_wise``,
``column_wise``, ``row_wise`` and ``data_parallel``; the kernel and the load factor of a cache
follow from how many rows are in HBM. Importing this needs torchrec.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from torchrec.distributed.planner.types import Shard as TorchRecShard
from torchrec.distributed.planner.types import ShardingOption as TorchRecOption

from cost_models.base import Cold, CostCurve, Float, ShardingOption, TableShard, shards_of
from cost_models.cost_report import CostReport, GpuCost, HostCost
from cost_models.schedule import ONE_PHASE, Schedule
from cost_models.torchrec.shards import (
    Part,
    cached_rows,
    column_widths,
    in_one_shard,
    load_factor,
    shard_of,
)
from placer.adapters.torchrec.sharding import KERNELS, Sharding, ShardingType, sharding_of
from placer.errors import PlanMismatchError, ProblemError
from placer.plan.memory import ROW_CACHE_ENTRY_BYTES, cache_bytes, device_memory
from placer.plan.plan import Plan
from placer.plan.shard import Shard
from placer.problem import Problem
from placer.tables import Table

LOAD_FACTORS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Of caches, where neither the user nor TorchRec's default decides."""

SEARCHED: tuple[ShardingType, ...] = ("table_wise", "column_wise", "row_wise", "data_parallel")
"""Sharding types that are searched."""

IN_HBM = ("fused", "dense")
"""Kernels whose rows are all in the memory of the GPU."""

_MS = 1e-3

_Points = dict[int, tuple[float, float, int]]
"""Seconds, bytes of HBM and bytes of DRAM, by the rows in HBM."""


class EnumeratedOptions:
    """Time and memory of enumerated options; see `cost_models.CostModel`.

    Parameters
    ----------
    options : sequence of ShardingOption
        As an enumerator returns them, estimated. The problem's tables bear their `fqn`.
    estimate : callable
        Writes times and bytes into options, such as the enumerator's `populate_estimates`.
    on_cpu : bool
        Whether ranks compute on CPUs, whose memory the problem has as that of GPUs.
    """

    name = "torchrec-options"
    uniform_splits = True

    def __init__(
        self,
        options: Sequence[TorchRecOption],
        estimate: Callable[[list[TorchRecOption]], None],
        *,
        on_cpu: bool = False,
    ) -> None:
        self._estimate = estimate
        self._on_cpu = on_cpu
        self._options: dict[str, dict[tuple[str, str], TorchRecOption]] = defaultdict(dict)
        for option in options:
            self._options[option.fqn][option.sharding_type, option.compute_kernel] = option
        self._curves: dict[tuple[object, ...], CostCurve] = {}
        self._cached: dict[tuple[str, str, float], TorchRecOption] = {}

    def sharding_options(self, problem: Problem, table: int) -> tuple[ShardingOption, ...]:
        """The sharding options that were enumerated. See `CostModel.sharding_options`.

        A cache whose load factor is free is one option with the kernels without one, from none of
        the rows in HBM to all. One whose load factor is given is an option by itself, of one point.
        """
        spec, gpus = problem.profile.tables[table].table, len(problem.topology.gpus)
        options = self._options[spec.name]
        by_kind: dict[str, ShardingOption] = {}
        for (kind, kernel), option in options.items():
            if kind == "data_parallel":
                by_kind[kind] = ShardingOption(replicated_rows=spec.rows, cold="uva")
            elif kernel not in KERNELS.values() and kernel not in IN_HBM:
                continue
            elif kind == "table_wise":
                by_kind[kind] = ShardingOption()
            elif kind == "column_wise":
                by_kind[kind] = ShardingOption(1, column_widths(option, gpus))
            elif kind == "row_wise":
                by_kind[kind] = ShardingOption(gpus, blocked=True)
        if len(by_kind) > 1:
            self._drop_pointless(problem, spec, by_kind)
        sharding_options = [
            sharding_option._replace(cold=cold)
            for kind in SEARCHED
            if (sharding_option := by_kind.get(kind)) is not None
            for cold in self._colds(spec, kind)
        ]
        if not sharding_options:
            allowed = sorted(f"{kind} with {kernel}" for kind, kernel in options)
            raise ProblemError(
                f"table {spec.name!r} may only be {', '.join(allowed)}; searched are "
                f"{', '.join(SEARCHED)}, with kernels fused, fused_uvm, fused_uvm_caching and, for "
                "replicas, dense"
            )
        return tuple(sharding_options)

    def _colds(self, spec: Table, kind: str) -> list[Cold]:
        """How rows in DRAM may be read: ``cached`` with a free load factor has all points."""
        kernels = {
            kernel: o for (own, kernel), o in self._options[spec.name].items() if own == kind
        }
        if kind == "data_parallel":
            return ["uva"]
        cached = kernels.get("fused_uvm_caching")
        if cached is not None and self._load_factor_is_free(cached):
            return ["cached"]
        colds: list[Cold] = []
        if kernels.keys() & {*IN_HBM, "fused_uvm"}:
            colds.append("uva")
        if cached is not None and (not colds or cached_rows(cached) is not None):
            colds.append("cached")
        return colds

    def _drop_pointless(
        self, problem: Problem, spec: Table, by_kind: dict[str, ShardingOption]
    ) -> None:
        """Leave out options that do not divide the table, give a GPU no rows, or fit no GPU."""
        by_columns = by_kind.get("column_wise")
        if by_columns and len(by_columns.column_widths) == 1 and "table_wise" in by_kind:
            del by_kind["column_wise"]
        blocks = {k: o for (kind, k), o in self._options[spec.name].items() if kind == "row_wise"}
        for kernel, option in blocks.items():
            empty = any(not shard.size[0] for shard in option.shards)
            # One kernel serves all blocks, and a cache of a block of a row or two is no cache.
            too_few = kernel == "fused_uvm_caching" and cached_rows(option) is None
            if empty or (too_few and len(blocks) == 1):
                by_kind.pop("row_wise", None)
        smallest = min(gpu.memory_bytes for gpu in problem.topology.gpus)
        if len(by_kind) > 1 and spec.total_bytes > smallest:
            by_kind.pop("data_parallel", None)

    def schedule(self, problem: Problem) -> Schedule:
        """One phase: TorchRec's planner takes the slowest rank with all its work."""
        return ONE_PHASE

    def launches(self, problem: Problem, gpu: int) -> Float:
        """None: launches are not in TorchRec's model."""
        return np.zeros(1)

    def sharding_overhead_s(self, problem: Problem) -> None:
        """None: TorchRec may count a sharded table as cheaper."""

    def cost_curve(self, problem: Problem, shard: TableShard, gpu: int) -> CostCurve:
        """Cost of a shard at the points that its options have. See `CostModel.cost_curve`."""
        spec = problem.profile.tables[shard.table].table
        kind, number = shard_of(shard)
        first, last = shard.columns(spec.dim)
        key = (spec.name, kind, number, first, shard.option.cold)
        if key not in self._curves:
            part = Part(kind, number, first, last)
            self._curves[key] = self._curve(spec, part, shard.option.cold)
        return self._curves[key]

    def _curve(self, spec: Table, part: Part, cold: Cold) -> CostCurve:
        points: _Points = {}
        free = False
        for (own, kernel), option in self._options[spec.name].items():
            if own != part.kind:
                continue
            shards = part.shards(option)
            rows = shards[0].size[0]
            row_bytes = sum(spec.bytes_per_row(shard.size[1]) for shard in shards)
            if kernel == "fused_uvm_caching":
                if cold == "cached":
                    free = self._load_factor_is_free(option)
                    points = self._cached_points(part, option, row_bytes) | points
            elif part.kind == "data_parallel" or kernel in IN_HBM:
                points[rows] = (*self._costs(shards, rows * row_bytes), 0)
            elif kernel == "fused_uvm":
                points[0] = (*self._costs(shards, 0), rows * row_bytes)
        if cold == "cached" and not free:
            several = {hot: costs for hot, costs in points.items() if costs[2] and hot}
            points = several or points
        hot_rows = sorted(points)
        return CostCurve(
            hot_rows=np.array(hot_rows, dtype=np.int64),
            gpu_s=np.array([points[hot][0] for hot in hot_rows]),
            dram_s=np.zeros(len(hot_rows)),
            hbm_bytes=np.array([points[hot][1] for hot in hot_rows]),
            dram_bytes=np.array([float(points[hot][2]) for hot in hot_rows]),
            # Without a cache, a table is in one tier.
            split_s=0.0 if cold == "cached" else np.inf,
            split_hbm_bytes=0.0,
        )

    def _cached_points(self, part: Part, option: TorchRecOption, row_bytes: int) -> _Points:
        """Points of a part whose rows a row cache serves."""
        points: _Points = {}
        shards = part.shards(option)
        rows = shards[0].size[0]
        largest = max(shard.size[0] for shard in option.shards)
        free = self._load_factor_is_free(option)
        for factor in LOAD_FACTORS if free else (load_factor(option),):
            # A table has one load factor, that of its largest block in whole rows.
            chosen = min(largest - 1, max(1, round(factor * largest)))
            cached = round(chosen * rows / largest)
            if 0 < cached < rows and cached not in points:
                estimated = self._with_load_factor(option, chosen / largest)
                hbm_bytes = cached * (row_bytes + ROW_CACHE_ENTRY_BYTES)
                points[cached] = (*self._costs(part.shards(estimated), hbm_bytes), rows * row_bytes)
        if cached_rows(option) is None:
            # A table of too few rows for a cache is in HBM.
            points[rows] = (*self._costs(shards, rows * row_bytes), 0)
        return points

    def _costs(self, shards: Sequence[TorchRecShard], own_bytes: float) -> tuple[float, float]:
        """Seconds of shards and their bytes on the GPU: no fewer than a plan counts itself."""
        seconds = sum(shard.perf.total for shard in shards) * _MS
        return seconds, float(max(sum(map(self._bytes, shards)), own_bytes))

    def _bytes(self, shard: TorchRecShard) -> int:
        return int(shard.storage.ddr if self._on_cpu else shard.storage.hbm)

    def _load_factor_is_free(self, option: TorchRecOption) -> bool:
        """Whether a cached option may have any load factor.

        Without statistics TorchRec counts no misses, and the smallest cache would seem as good.
        """
        params = option.cache_params
        return params is not None and params.load_factor is None and params.stats is not None

    def _with_load_factor(self, option: TorchRecOption, factor: float) -> TorchRecOption:
        """An option with another load factor, estimated; itself, where that is not free."""
        if not self._load_factor_is_free(option):
            return option
        key = (option.fqn, option.sharding_type, factor)
        if key not in self._cached:
            changed = copy.deepcopy(option)
            changed.cache_params = replace(changed.cache_params, load_factor=factor)
            self._estimate([changed])
            self._cached[key] = changed
        return self._cached[key]

    def least_gpu_bytes(self, problem: Problem, table: int) -> float:
        """What a GPU must hold at least for a table, in whatever way it is placed."""
        least = np.inf
        for option in self.sharding_options(problem, table):
            rows = problem.profile.tables[table].table.rows
            shards = (
                [TableShard.replica(table, option)]
                if option.replicated_rows
                else shards_of(table, option, rows)
            )
            curves = [self.cost_curve(problem, shard, 0) for shard in shards]
            least = min(least, max(float(curve.hbm_bytes.min()) for curve in curves))
        return float(least)

    def placed(self, problem: Problem, plan: Plan) -> list[TorchRecOption]:
        """A plan as options with ranks, in the order of the problem's tables.

        Raises
        ------
        PlanMismatchError
            If a table has no such option.
        """
        return [
            self._placed(
                profile.table,
                sharding_of(problem.topology, profile.table, plan.shards_by_table[profile.name]),
            )
            for profile in problem.profile
        ]

    def _placed(self, spec: Table, sharding: Sharding) -> TorchRecOption:
        option = self._of_kind(spec, sharding.kind, sharding.kernel)
        if sharding.load_factor is not None:
            option = self._with_load_factor(option, sharding.load_factor)
        option = copy.deepcopy(option)
        for number, shard in enumerate(option.shards):
            if sharding.kind in ("column_wise", "table_wise"):
                # A column slice of the plan may be several of TorchRec's.
                column = shard.offset[1]
                home = next(b for b in sharding.blocks if 0 <= column - b.first_column < b.width)
            else:
                home = sharding.blocks[number]
            shard.rank = home.rank
        return option

    def _of_kind(self, spec: Table, kind: str, kernel: str) -> TorchRecOption:
        """The option of a table of a sharding type and a kernel, by whatever name it goes."""
        options = self._options[spec.name]
        # Tables of a row or two are in HBM even where their kernel caches.
        kernels = (*IN_HBM, "fused_uvm_caching") if kernel in IN_HBM else (kernel,)
        for own in kernels:
            if (kind, own) in options:
                return options[kind, own]
        # A whole table may have been enumerated as one block, column slice or replica.
        for (_, own), option in options.items():
            if kind == "table_wise" and own in kernels and in_one_shard(option):
                return option
        raise PlanMismatchError(f"table {spec.name!r} has no option {kind} with {kernel}")

    def evaluate(self, problem: Problem, plan: Plan) -> CostReport:
        """Cost of a whole plan. See `CostModel.evaluate`."""
        hbm_s: dict[int, float] = defaultdict(float)
        link_s: dict[int, float] = defaultdict(float)
        exchange_s: dict[int, float] = defaultdict(float)
        hits = lookups = 0.0
        for profile, option in zip(problem.profile, self.placed(problem, plan), strict=True):
            held = option.compute_kernel in IN_HBM
            for shard in option.shards:
                compute = (shard.perf.fwd_compute + shard.perf.bwd_compute) * _MS
                (hbm_s if held else link_s)[shard.rank] += compute
                link_s[shard.rank] += shard.perf.prefetch_compute * _MS
                exchange_s[shard.rank] += (shard.perf.fwd_comms + shard.perf.bwd_comms) * _MS
            lookups += profile.table.lookups_per_sample
            hits += profile.table.lookups_per_sample * held
        return CostReport(
            self.name,
            tuple(
                GpuCost(gpu.id, hbm_s[rank], link_s[rank], exchange_s[rank], 0.0)
                for rank, gpu in enumerate(problem.topology.gpus)
            ),
            tuple(HostCost(host.id, 0.0) for host in problem.topology.hosts),
            device_memory(plan),
            hits / lookups if lookups else 1.0,
        )

    def with_buffers(
        self, problem: Problem, table: int, shard: Shard, *, returns_bags: bool
    ) -> Shard:
        """What TorchRec counts beyond a shard's rows, state and cache. See `CostModel`."""
        spec = problem.profile.tables[table].table
        kind: ShardingType = "table_wise"
        if len(shard.devices) > 1:
            kind = "data_parallel"
        elif shard.width < spec.dim:
            kind = "column_wise"
        elif shard.row_count < spec.rows:
            kind = "row_wise"
        kernel = KERNELS.get(shard.lookup)
        if kernel is None:
            raise PlanMismatchError(
                f"table {shard.table!r}: TorchRec has no lookup {shard.lookup!r}; "
                f"use {', '.join(KERNELS)}"
            )
        option = self._of_kind(spec, kind, kernel)
        own = shard.row_count * spec.bytes_per_row(shard.width) if kernel == "fused" else 0
        if kernel == "fused_uvm_caching":
            own = cache_bytes(spec, shard)
            largest = max(part.size[0] for part in option.shards)
            # That of a smaller block was rounded to rows, so the table's may be half a row more.
            more = 0.5 if shard.row_count < largest else 0.0
            factor = min(1.0, (shard.cache_rows + more) / shard.row_count)
            option = self._with_load_factor(option, factor)
        first_row, (first, last) = shard.rows[0], shard.cols
        parts = [
            part
            for part in option.shards
            if part.offset[0] == first_row and first <= part.offset[1] < last
        ]
        if kind == "data_parallel":
            parts = parts[:1]
        counted = sum(map(self._bytes, parts))
        return replace(shard, staging_rows=0, buffer_bytes=max(0, math.ceil(counted - own)))
