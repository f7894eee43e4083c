"""Curves of shards from TorchRec's estimators. Importing this needs torchrec."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from cost_models.base import CostCurve
from cost_models.torchrec.estimates import Estimates, Many
from placer.adapters.torchrec.sharding import Block, Kernel, Sharding, ShardingType, even_blocks
from placer.plan.memory import ROW_CACHE_ENTRY_BYTES, cache_bytes
from placer.plan.shard import Shard
from placer.profile.table_profile import TableProfile
from placer.tables import Table

Float = npt.NDArray[np.float64]

_POINTS = 128
_MS = 1e-3


def curve(
    estimates: Estimates,
    profile: TableProfile,
    kind: ShardingType,
    block: Block,
    *,
    is_replica: bool,
) -> CostCurve:
    """Return a shard's cost with none of its rows in HBM, with caches of many sizes, and with all.

    A replica has all of them there: one point.
    """
    table, rows = profile.table, block.rows
    row_bytes = table.bytes_per_row(block.width)
    options, timed, caches = [], [], np.zeros(0)
    if not is_replica:
        options.append(estimates.option(profile, Sharding(kind, "fused_uvm", (block,))))
        # A table has one load factor: its blocks of rows are asked at those of the largest.
        largest = largest_block(estimates, table, kind, block)
        points = _cache_points(largest.rows)
        caches = np.rint(points * (rows / max(1, largest.rows)))
        kept = (caches < rows) & (np.diff(caches, prepend=0.0) > 0)
        points, caches = points[kept], caches[kept]
        if caches.size:
            caching = Sharding(kind, "fused_uvm_caching", (block,))
            factors = _load_factor(caches, rows, largest.rows).view(Many)
            options.append(estimates.option(profile, caching, factors))
            if rows < largest.rows:
                caching = Sharding(kind, "fused_uvm_caching", (largest,))
                factors = (points / largest.rows).view(Many)
                timed = [estimates.option(profile, caching, factors)]
    if rows or is_replica:
        kernel: Kernel = "dense" if kind == "data_parallel" else "fused"
        options.append(estimates.option(profile, Sharding(kind, kernel, (block,))))
    estimates.estimate(options + timed)
    hot = np.concatenate(([] if is_replica else [0], caches, [rows] if rows or is_replica else []))
    own = np.where(hot < rows, hot * (row_bytes + ROW_CACHE_ENTRY_BYTES), hot * row_bytes)
    hbm_bytes = np.maximum(_joined(option.shards[0].storage.hbm for option in options), own)
    if timed:
        options[1] = timed[0]
    # Launches, splits and DRAM bandwidth are not in TorchRec's model.
    return CostCurve(
        hot_rows=hot.astype(np.int64),
        gpu_s=_joined(option.shards[0].perf.total for option in options) * _MS,
        dram_s=np.zeros(hot.size),
        hbm_bytes=hbm_bytes,
        dram_bytes=np.where(hot < rows, rows * row_bytes, 0).astype(np.float64),
        split_s=0.0,
        split_hbm_bytes=0.0,
        only_points=True,
    )


def shard_buffer_bytes(
    estimates: Estimates, profile: TableProfile, shard: Shard, kind: ShardingType, kernel: Kernel
) -> int:
    """Return HBM that TorchRec counts for a shard beyond the plan's own rows and caches."""
    table = profile.table
    block = Block(shard.row_count, shard.width, shard.rows[0], shard.cols[0], 0)
    factor, own = None, 0
    if kernel == "fused_uvm_caching":
        largest = largest_block(estimates, table, kind, block)
        factor = float(_load_factor(shard.cache_rows, block.rows, largest.rows))
        own = cache_bytes(table, shard)
    elif kernel != "fused_uvm":
        own = block.rows * table.bytes_per_row(block.width)
    option = estimates.option(profile, Sharding(kind, kernel, (block,), factor))
    estimates.estimate([option])
    counted: float = option.shards[0].storage.hbm
    return max(0, math.ceil(counted - own))


def largest_block(estimates: Estimates, table: Table, kind: ShardingType, block: Block) -> Block:
    """Return the table's largest row block; `block` itself if it is no row block."""
    if kind not in ("row_wise", "table_row_wise", "grid_shard"):
        return block
    topology = estimates.topology
    row_slices = topology.world_size if kind == "row_wise" else topology.local_world_size
    return block._replace(rows=even_blocks(table.rows, row_slices)[0][1])


def _load_factor(cache_rows: Any, rows: int, largest: int) -> Any:
    """Load factor that a cache's bytes are counted by.

    That of a smaller block was rounded to rows, so the table's may be half a row more.
    """
    return np.minimum(1.0, (cache_rows + (0.5 if rows < largest else 0.0)) / rows)


def _cache_points(rows: int) -> Float:
    """Cache sizes of a curve, between none and all of `rows` rows: small ones are close."""
    if rows < 2:
        return np.zeros(0)
    spread = np.concatenate(
        (np.geomspace(1, rows - 1, _POINTS // 2), np.linspace(1, rows - 1, _POINTS // 2))
    )
    return np.unique(np.rint(spread))


def _joined(parts: Any) -> Float:
    return np.concatenate([np.atleast_1d(np.asarray(part, dtype=np.float64)) for part in parts])
