"""Call TorchRec's own estimators for tables of a problem. Importing this needs torchrec."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator, get_partition_by_type
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.planner.types import Shard as TorchRecShard
from torchrec.distributed.planner.types import ShardingOption as TorchRecOption
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import CacheParams, CacheStatistics
from torchrec.optim import RowWiseAdagrad

from cost_models.base import CostCurve, Float
from placer.adapters.torchrec.sharding import Block, Kernel, Sharding, ShardingType, even_blocks
from placer.errors import ProblemError, TopologyError
from placer.plan.fields import Shard
from placer.plan.memory import ROW_CACHE_ENTRY_BYTES, cache_bytes
from placer.problem import Problem
from placer.profile.table_profile import TableProfile
from placer.tables import DType, Table
from placer.topology.topology import Topology

Bandwidths = Literal["torchrec", "topology"]

_COMM_TYPES: Mapping[DType, CommType] = {
    "float32": CommType.FP32,
    "bfloat16": CommType.BF16,
    "float16": CommType.FP16,
}

OPTIMIZERS: dict[str, type] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,  # TorchRec has no SparseAdam, but the state is the same.
}
"""The optimizer classes that tell TorchRec the size of a row's state."""

MODULE_PATHS = {True: "embeddings", False: "sequences"}
"""The path in a model at which the planner finds pooled tables (True) and others (False)."""

_META = torch.device("meta")

_MS = 1e-3

LOAD_FACTORS = np.concatenate((np.geomspace(1e-4, 0.1, 60)[:-1], np.linspace(0.1, 0.99, 90)))
"""Load factors of caches to try."""


class Many(np.ndarray[Any, np.dtype[np.float64]]):
    """An array of load factors that TorchRec's formulas take in place of one number.

    Besides arithmetic, the formulas only round the number and assert that it is positive, which
    this class supports.
    """

    def __bool__(self) -> bool:
        return bool(np.asarray(self).all())

    def __ceil__(self) -> "Many":
        return np.ceil(self).view(Many)

    def __round__(self, digits: int | None = None) -> "Many":
        return np.rint(self).view(Many)


class ProfileCacheStatistics(CacheStatistics):  # type: ignore[misc]
    """A table's profile for TorchRec's planner: distinct rows, and misses of a cache.

    A cache of k rows holds the k hottest rows. So the distinct rows of a global batch that miss it
    are those expected among the other rows.
    """

    def __init__(self, profile: TableProfile, samples: int) -> None:
        self._ranks = profile.cdf.ranks.astype(np.float64)
        self._unique = profile.unique_at_ranks(samples * profile.table.lookups_per_sample)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ProfileCacheStatistics":
        return self  # The planner copies thousands of options; these statistics never change.

    @property
    def expected_lookups(self) -> float:
        """The expected number of distinct rows in a global batch."""
        return float(self._unique[-1])

    def expected_miss_rate(self, clf: Any) -> Any:
        """Return the share of distinct rows that miss a cache with the share `clf` of rows."""
        total = self._unique[-1]
        if not total > 0:
            return clf * 0.0
        hits = np.interp(clf * self._ranks[-1], self._ranks, self._unique)
        rate = np.maximum(0.0, 1 - hits / total)
        return rate.view(Many) if isinstance(clf, Many) else float(rate)

    @property
    def cacheability(self) -> float:
        """The area under the curve of miss rate over load factor: 0 for tables that cache well."""
        if not self._unique[-1] > 0:
            return 0.0
        rates = 1 - self._unique / self._unique[-1]
        area = float(np.trapezoid(rates, self._ranks))
        return area / float(self._ranks[-1])


def torchrec_topology(topology: Topology, bandwidths: Bandwidths) -> TorchRecTopology:
    """Return a machine as TorchRec describes it: equal ranks, each with a part of its host."""
    for server in topology.servers:
        raise TopologyError(
            f"TorchRec's ranks are GPUs, and {server.id} of {topology.name!r} has none: leave "
            "hosts without GPUs out of the topology"
        )
    hosts = {gpu.host: len(topology.gpus_of(gpu.host)) for gpu in topology.gpus}
    if len(set(hosts.values())) > 1:
        raise TopologyError(
            f"TorchRec knows hosts of equally many GPUs; {topology.name!r} has {hosts}"
        )
    local = next(iter(hosts.values()))
    if any(
        gpu.host != topology.gpus[rank - rank % local].host
        for rank, gpu in enumerate(topology.gpus)
    ):
        raise TopologyError(
            f"TorchRec numbers GPUs host by host; list those of {topology.name!r} so"
        )
    dram = min(topology.hosts_by_id[host].memory_bytes for host in hosts)
    hardware = _bandwidths(topology) if bandwidths == "topology" else {}
    return TopologyFactory.create_topology(
        TrainerConfig(
            world_size=len(topology.gpus),
            local_world_size=local,
            hbm_cap_bytes=min(gpu.memory_bytes for gpu in topology.gpus),
            ddr_cap_bytes=dram // local,
        ),
        HardwareConfig(**hardware),
        KernelConfig(compute_device="cuda", use_hardware_based_bandwidth=bool(hardware)),
    )


def _bandwidths(topology: Topology) -> dict[str, float]:
    """Return a machine's bandwidths by TorchRec's names, in bytes per millisecond."""

    def same(name: str, values: set[float]) -> float:
        if len(values) > 1:
            raise TopologyError(
                f"TorchRec knows one {name} for all GPUs; {topology.name!r} has {sorted(values)}"
            )
        return values.pop() / 1000

    ids = [gpu.id for gpu in topology.gpus]
    bandwidths = {
        "hbm_mem_bw": same("HBM bandwidth", {gpu.hbm_bytes_per_s for gpu in topology.gpus}),
        "ddr_mem_bw": same("DRAM bandwidth", {h.dram_bytes_per_s for h in topology.hosts}),
        "hbm_to_ddr_mem_bw": same("host link", {topology.host_link_bytes_per_s(g) for g in ids}),
        "intra_host_bw": same("peer link", {topology.peer_bytes_per_s(g) for g in ids}),
    }
    network = {topology.network_bytes_per_s(gpu) for gpu in ids}
    if network != {0.0}:
        bandwidths["inter_host_bw"] = same("network", network)
    return bandwidths


def input_lengths(table: Table) -> tuple[list[float], bool]:
    """Return the mean ids per sample of each feature, and whether they are pooled."""
    poolings = {feature.pooling for feature in table.features}
    if "max" in poolings or ("none" in poolings and len(poolings) > 1):
        raise ProblemError(
            f"table {table.name!r} has features with pooling {', '.join(sorted(poolings))}; "
            "TorchRec's tables are pooled by sum or mean for all features, or for none"
        )
    return [feature.lookups_per_sample for feature in table.features], "none" not in poolings


def weight(table: Table) -> torch.Tensor:
    """Return a table's weights on the meta device, labelled with their optimizer."""
    # TorchRec's formulas divide by the number of weights.
    shape = max(1, table.rows), table.dim
    tensor = torch.empty(shape, dtype=getattr(torch, table.dtype), device=_META)
    tensor._optimizer_classes = [OPTIMIZERS[table.optimizer]]  # type: ignore[attr-defined]
    return tensor


class Estimates:
    """TorchRec's estimators for one problem; see `cost_models.torchrec.model.TorchRec`."""

    def __init__(self, problem: Problem, prefetch_pipeline: bool, bandwidths: Bandwidths) -> None:
        self.problem = problem
        self.topology = torchrec_topology(problem.topology, bandwidths)
        self._prefetch_pipeline = prefetch_pipeline
        self._modules = {
            True: EmbeddingBagCollection(tables=[], device=_META),
            False: EmbeddingCollection(tables=[], device=_META),
        }
        kind = _COMM_TYPES[problem.exchange_dtype]
        codecs = get_qcomm_codecs_registry(QCommsConfig(kind, kind), device=torch.device("cuda"))
        sharders: list[Any] = [
            EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs),
            EmbeddingCollectionSharder(qcomm_codecs_registry=codecs),
        ]
        # Only to use its estimators, which take the element types of exchanges from sharders.
        self._enumerator = EmbeddingEnumerator(self.topology, problem.batch_size)
        self._enumerator.enumerate(torch.nn.Module(), sharders)
        self._statistics: dict[tuple[int, float], ProfileCacheStatistics] = {}
        self.curves: dict[tuple[object, ...], CostCurve] = {}

    @staticmethod
    def even_column_widths(table: Table, min_partition: int | None) -> tuple[int, ...]:
        """Return the widths of a table's column slices in TorchRec's enumerator."""
        sizes, _ = calculate_shard_sizes_and_offsets(
            weight(table), 1, 1, "column_wise", col_wise_shard_dim=min_partition
        )
        return tuple(size[1] for size in sizes)

    def cache_params(self, profile: TableProfile, load_factor: Any) -> CacheParams:
        """Return TorchRec's cache parameters of a table, with its profile's statistics."""
        key = id(profile.cdf), profile.table.lookups_per_sample
        if key not in self._statistics:
            samples = self.problem.global_batch_size
            self._statistics[key] = ProfileCacheStatistics(profile, samples)
        return CacheParams(
            load_factor=load_factor,
            prefetch_pipeline=self._prefetch_pipeline,
            stats=self._statistics[key],
        )

    def option(self, profile: TableProfile, sharding: Sharding) -> TorchRecOption:
        """Return TorchRec's sharding option of a table, without estimates.

        The sharding's load factor may be `Many`.
        """
        table = profile.table
        lengths, pooled = input_lengths(table)
        cached = sharding.kernel == "fused_uvm_caching"
        rows = max(1, table.rows)
        return TorchRecOption(
            name=table.name,
            tensor=weight(table),
            module=(MODULE_PATHS[pooled], self._modules[pooled]),
            input_lengths=lengths,
            batch_size=self.problem.batch_size,
            sharding_type=sharding.kind,
            partition_by=get_partition_by_type(sharding.kind),
            compute_kernel=sharding.kernel,
            shards=[
                TorchRecShard(
                    size=[block.rows if table.rows else rows, block.width],
                    offset=[block.first_row, block.first_column],
                    rank=block.rank,
                )
                for block in sharding.blocks
            ],
            cache_params=self.cache_params(profile, sharding.load_factor) if cached else None,
            is_pooled=pooled,
        )

    def estimate(self, options: list[TorchRecOption]) -> None:
        """Let TorchRec write times (in ms) and bytes into the options' shards."""
        self._enumerator.populate_estimates(options)

    def curve(
        self,
        profile: TableProfile,
        kind: ShardingType,
        block: Block,
        *,
        is_replica: bool,
    ) -> CostCurve:
        """Return a shard's cost curve: no row in HBM, caches of many sizes, and all rows in HBM.

        The curve of a replica has one point, with all rows in HBM.
        """
        table, rows = profile.table, block.rows
        row_bytes = table.bytes_per_row(block.width)
        options, timed, caches = [], [], np.zeros(0)
        if not is_replica:
            options.append(self.option(profile, Sharding(kind, "fused_uvm", (block,))))
            # A table has one load factor: all its row blocks take the points of the largest one.
            largest = self._largest_block(table, kind, block)
            points = _cache_points(largest.rows)
            caches = np.rint(points * (rows / max(1, largest.rows)))
            kept = (caches < rows) & (np.diff(caches, prepend=0.0) > 0)
            points, caches = points[kept], caches[kept]
            if caches.size:
                factors: Any = _load_factor(caches, rows, largest.rows).view(Many)
                caching = Sharding(kind, "fused_uvm_caching", (block,), factors)
                options.append(self.option(profile, caching))
                if rows < largest.rows:
                    factors = (points / largest.rows).view(Many)
                    caching = replace(caching, blocks=(largest,), load_factor=factors)
                    timed = [self.option(profile, caching)]
        if rows or is_replica:
            kernel: Kernel = "dense" if kind == "data_parallel" else "fused"
            options.append(self.option(profile, Sharding(kind, kernel, (block,))))
        self.estimate(options + timed)
        hot = np.concatenate(
            ([] if is_replica else [0], caches, [rows] if rows or is_replica else [])
        )
        own = np.where(hot < rows, hot * (row_bytes + ROW_CACHE_ENTRY_BYTES), hot * row_bytes)
        hbm_bytes = np.maximum(_joined(option.shards[0].storage.hbm for option in options), own)
        if timed:
            options[1] = timed[0]
        # TorchRec's model has no launches, splits or bandwidth of DRAM.
        return CostCurve(
            hot_rows=hot.astype(np.int64),
            gpu_s=_joined(option.shards[0].perf.total for option in options) * _MS,
            dram_s=np.zeros(hot.size),
            hbm_bytes=hbm_bytes,
            dram_bytes=np.where(hot < rows, rows * row_bytes, 0).astype(np.float64),
            only_points=True,
        )

    def shard_buffer_bytes(
        self, profile: TableProfile, shard: Shard, kind: ShardingType, kernel: Kernel
    ) -> int:
        """Return the HBM bytes that TorchRec counts for a shard besides its rows and cache."""
        table = profile.table
        block = Block(shard.row_count, shard.width, shard.rows[0], shard.cols[0], 0)
        factor, own = None, 0
        if kernel == "fused_uvm_caching":
            largest = self._largest_block(table, kind, block)
            factor = float(_load_factor(shard.cache_rows, block.rows, largest.rows))
            own = cache_bytes(table, shard)
        elif kernel != "fused_uvm":
            own = block.rows * table.bytes_per_row(block.width)
        option = self.option(profile, Sharding(kind, kernel, (block,), factor))
        self.estimate([option])
        counted: float = option.shards[0].storage.hbm
        return max(0, math.ceil(counted - own))

    def _largest_block(self, table: Table, kind: ShardingType, block: Block) -> Block:
        """Return the table's largest row block, or `block` if the table has no row blocks."""
        if kind not in ("row_wise", "table_row_wise", "grid_shard"):
            return block
        topology = self.topology
        row_slices = topology.world_size if kind == "row_wise" else topology.local_world_size
        return block._replace(rows=even_blocks(table.rows, row_slices)[0][1])


def _load_factor(cache_rows: Any, rows: int, largest: int) -> Any:
    """Return the load factor from which TorchRec computes a cache's bytes.

    The cache of a smaller block was rounded to rows, so the table's factor may be half a row more.
    """
    return np.minimum(1.0, (cache_rows + (0.5 if rows < largest else 0.0)) / rows)


def _cache_points(rows: int) -> Float:
    """Return a curve's cache sizes, between 1 and all but one row."""
    return (
        np.unique(np.rint(np.clip(rows * LOAD_FACTORS, 1, rows - 1))) if rows > 1 else np.zeros(0)
    )


def _joined(parts: Any) -> Float:
    return np.concatenate([np.atleast_1d(np.asarray(part, dtype=np.float64)) for part in parts])
