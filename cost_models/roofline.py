"""Step time from bytes over bandwidths, per shard and per GPU.

With L lookups of a step in a shard, U distinct rows among them, rows of w bytes of weights
and s bytes of optimizer state, and V output vectors:

* rows in HBM: the forward pass reads L·w, the backward pass gathers a gradient of w bytes
  for each lookup, sorts the lookups by row, and reads and writes U·(w + s);
* staged rows: U·(w + s) over the link each way at once, twice the same bytes of host
  memory, and in HBM the copies land and leave besides the work of rows in HBM;
* rows read in place (uva): L·w + U·(w + s) over the link and in host memory;
* rows pooled by the host: V·w over the link each way, and in host memory what rows in HBM
  cost there;
* communication: ids come in, V·w goes out and its gradient comes back, by all-to-all;
  replicas look up their own samples and all-reduce the gradients of the touched rows;
* a constant for every shard.

Nothing overlaps, so times add; the step takes as long as the slowest GPU, or as the
busiest host's memory, which its GPUs share. RecShard (doi:10.1145/3503222.3507777),
TorchRec's estimators and HugeCTR's planner are special cases.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models._base import CostReport, GpuCost, HostCost, PieceCurve, require_match
from placer.plan.buffers import (
    exchange_buffer_bytes,
    output_vectors,
    slice_members,
    staging_buffer_bytes,
)
from placer.plan.memory import device_memory, row_map_bytes
from placer.plan.plan import Plan, Shard
from placer.problem import Problem
from placer.profile.profile import TableProfile
from placer.tables import Table

Float = npt.NDArray[np.float64]

ID_BYTES = 8
"""An id is an int64 on the wire and in memory."""

SORT_BYTES_PER_LOOKUP = 112
"""HBM bytes to sort one (row, bag) pair of 12 bytes: four radix passes that read and write
it, 96, and a histogram pass with its ids, 16."""


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Bytes that a step moves: in HBM, over the link in its busier direction, in host DRAM."""

    hbm: Float
    link: Float
    dram: Float

    def __add__(self, other: "_Traffic") -> "_Traffic":
        return _Traffic(self.hbm + other.hbm, self.link + other.link, self.dram + other.dram)


def _in_hbm(table: Table, width: int, lookups: Float, unique: Float) -> _Traffic:
    w, row = table.weight_bytes_per_row(width), table.bytes_per_row(width)
    hbm = lookups * (ID_BYTES + 2 * w + SORT_BYTES_PER_LOOKUP) + 2 * unique * row
    zero = np.zeros_like(hbm)
    return _Traffic(hbm, zero, zero)


def _staged(table: Table, width: int, lookups: Float, unique: Float) -> _Traffic:
    moved = unique * table.bytes_per_row(width)
    return _in_hbm(table, width, lookups, unique) + _Traffic(2 * moved, moved, 2 * moved)


def _in_place(table: Table, width: int, lookups: Float, unique: Float) -> _Traffic:
    w, row = table.weight_bytes_per_row(width), table.bytes_per_row(width)
    read = lookups * w + unique * row
    hbm = lookups * (ID_BYTES + w + SORT_BYTES_PER_LOOKUP)
    return _Traffic(hbm, read, read + unique * row)


def _by_host(table: Table, width: int, lookups: Float, unique: Float, vectors: float) -> _Traffic:
    output = np.full_like(lookups, vectors * table.weight_bytes_per_row(width))
    return _Traffic(2 * output, output, _in_hbm(table, width, lookups, unique).hbm)


class Roofline:
    """The cost model of this module's docstring; see `cost_models.CostModel`."""

    name = "roofline"

    def evaluate(self, problem: Problem, plan: Plan) -> CostReport:
        """Cost of a whole plan. See `CostModel.evaluate`."""
        require_match(problem, plan)
        topology = problem.topology
        gpu_time: dict[str, dict[str, float]] = {g.id: defaultdict(float) for g in topology.gpus}
        dram_bytes: dict[str, float] = {host.id: 0.0 for host in topology.hosts}
        hot_lookups = all_lookups = 0.0
        exchanged: set[tuple[str, str, tuple[int, int]]] = set()
        by_name = {profile.name: profile for profile in problem.profile}
        for shard in plan.shards:
            profile = by_name[shard.table]
            table, replicas = profile.table, len(shard.devices)
            samples = problem.global_batch_size // replicas
            step_lookups = samples * table.lookups_per_sample
            lookups, _ = _slice_load(profile, shard.rows, step_lookups)
            vectors = output_vectors(table, samples, lookups)
            traffic, hits = self._shard_traffic(profile, shard, step_lookups, vectors)
            weight = shard.width / table.dim * replicas
            hot_lookups += hits * weight
            all_lookups += lookups * weight
            for device in shard.devices:
                if device not in gpu_time:  # A host that serves by itself.
                    dram_bytes[device] += float(traffic.dram)
                    for gpu in topology.gpus_of(device):
                        share = 1 / len(topology.gpus_of(device))
                        bandwidth = topology.host_link_bytes_per_s(gpu.id)
                        gpu_time[gpu.id]["link"] += float(traffic.link) * share / bandwidth
                    continue
                gpu = topology.gpus_by_id[device]
                time = gpu_time[device]
                time["hbm"] += float(traffic.hbm) / gpu.hbm_bytes_per_s
                time["link"] += float(traffic.link) / topology.host_link_bytes_per_s(device)
                time["launch"] += gpu.launch_s
                dram_bytes[gpu.host] += float(traffic.dram)
                width_bytes = table.weight_bytes_per_row(shard.width)
                if replicas > 1:
                    global_lookups = problem.global_batch_size * table.lookups_per_sample
                    touched = _slice_load(profile, shard.rows, global_lookups)[1]
                    time["exchange"] += topology.exchange_s(device, 2 * touched * width_bytes)
                    time["hbm"] += 2 * vectors * width_bytes / gpu.hbm_bytes_per_s
                    continue
                time["exchange"] += topology.exchange_s(device, lookups * ID_BYTES)
                # Shards of one table and strip of columns pool into one output.
                group = (shard.table, device, shard.cols)
                pooled = output_vectors(table, samples, 0.0) if group not in exchanged else 0.0
                exchanged.add(group)
                unpooled = vectors - output_vectors(table, samples, 0.0)
                output = (pooled + unpooled) * width_bytes
                time["exchange"] += 2 * topology.exchange_s(device, output)
                time["hbm"] += 2 * output / gpu.hbm_bytes_per_s
        return CostReport(
            self.name,
            tuple(
                GpuCost(name, t["hbm"], t["link"], t["exchange"], t["launch"])
                for name, t in gpu_time.items()
            ),
            tuple(
                HostCost(host.id, dram_bytes[host.id] / host.dram_bytes_per_s)
                for host in topology.hosts
            ),
            device_memory(plan),
            hot_lookups / all_lookups if all_lookups else 1.0,
        )

    def piece_curve(
        self,
        problem: Problem,
        table: int,
        ways: int,
        index: int,
        width: int,
        gpu: int,
    ) -> PieceCurve:
        """Cost of one strided slice over its hot rows. See `CostModel.piece_curve`."""
        profile, device = problem.profile.tables[table], problem.topology.gpus[gpu]
        spec = profile.table
        samples = problem.global_batch_size
        step_lookups = samples * spec.lookups_per_sample
        hot, lookups, unique = _cumulative_load(profile, ways, index, step_lookups)
        topology = problem.topology
        rows = int(hot[-1])
        cold_unique = unique[-1] - unique
        traffic = _in_hbm(spec, width, lookups, unique) + _staged(
            spec, width, lookups[-1] - lookups, cold_unique
        )
        output = output_vectors(spec, samples, float(lookups[-1])) * spec.weight_bytes_per_row(
            width
        )
        fixed_s = (
            device.launch_s
            + 2 * output / device.hbm_bytes_per_s
            + 2 * topology.exchange_s(device.id, output)
            + topology.exchange_s(device.id, float(lookups[-1]) * ID_BYTES)
        )
        ordered = profile.counts is not None
        map_bytes = row_map_bytes(spec) if ordered else 0
        buffers = exchange_buffer_bytes(spec, samples, float(lookups[-1]), width)
        return PieceCurve(
            hot_rows=hot,
            gpu_s=fixed_s
            + traffic.hbm / device.hbm_bytes_per_s
            + traffic.link / topology.host_link_bytes_per_s(device.id),
            dram_s=traffic.dram / topology.hosts_by_id[device.host].dram_bytes_per_s,
            hbm_bytes=hot * spec.bytes_per_row(width)
            + staging_buffer_bytes(spec, cold_unique, width)
            + buffers
            + (map_bytes if ways > 1 else 0),
            dram_bytes=np.asarray(rows - hot, np.float64) * spec.bytes_per_row(width),
            split_s=device.launch_s,
            split_hbm_bytes=0.0 if ways > 1 else float(map_bytes),
        )

    def _shard_traffic(
        self, profile: TableProfile, shard: Shard, step_lookups: float, vectors: float
    ) -> tuple[_Traffic, float]:
        """Traffic of a shard, and how many of its lookups are served from HBM."""
        table, width = profile.table, shard.width
        lookups, unique = _slice_load(profile, shard.rows, step_lookups)
        if shard.lookup == "device":
            return _in_hbm(table, width, np.asarray(lookups), np.asarray(unique)), lookups
        if shard.lookup == "uva":
            return _in_place(table, width, np.asarray(lookups), np.asarray(unique)), 0.0
        if shard.lookup == "host":
            return (
                _by_host(table, width, np.asarray(lookups), np.asarray(unique), vectors),
                0.0,
            )
        # A cache filled by frequency holds the shard's hottest rows; without one, none.
        start, stop, step = shard.rows
        edge = min(stop, start + shard.cache_rows * step)
        hits, hit_rows = _slice_load(profile, (start, edge, step), step_lookups)
        traffic = _in_hbm(table, width, np.asarray(hits), np.asarray(hit_rows)) + _staged(
            table, width, np.asarray(lookups - hits), np.asarray(unique - hit_rows)
        )
        return traffic, hits


def _slice_load(
    profile: TableProfile, rows: tuple[int, int, int], step_lookups: float
) -> tuple[float, float]:
    """Lookups and expected distinct rows of a slice of ranks in a step."""
    cdf = profile.cdf
    members = slice_members(cdf.ranks, rows)
    touched = np.diff(cdf.unique_at_ranks(step_lookups)) / np.diff(cdf.ranks)
    return float(members @ cdf.row_share) * step_lookups, float(members @ touched)


def _cumulative_load(
    profile: TableProfile, ways: int, index: int, step_lookups: float
) -> tuple[npt.NDArray[np.int64], Float, Float]:
    """Hot rows of a piece, and the lookups and distinct rows that fall in them, shape (m,)."""
    cdf = profile.cdf
    piece = (index, cdf.rows, ways)
    members = slice_members(cdf.ranks, piece)
    touched = np.diff(cdf.unique_at_ranks(step_lookups)) / np.diff(cdf.ranks)
    hot = np.concatenate(([0.0], np.cumsum(members)))
    lookups = np.concatenate(([0.0], np.cumsum(members * cdf.row_share))) * step_lookups
    unique = np.concatenate(([0.0], np.cumsum(members * touched)))
    # A thin slice has no member in some segments.
    first = np.concatenate(([True], np.diff(hot) > 0))
    return hot[first].astype(np.int64), lookups[first], unique[first]
