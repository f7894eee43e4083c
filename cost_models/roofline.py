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

from cost_models._base import (
    REPLICA,
    Cold,
    CostReport,
    Cut,
    GpuCost,
    HostCost,
    Piece,
    PieceCurve,
    require_match,
)
from cost_models._load import (
    cumulative_load,
    rows_in_flight,
    slice_load,
    with_steps_at_ends,
)
from cost_models._space import standard_cuts
from placer.plan.buffers import (
    cache_slices,
    exchange_buffer_bytes,
    index_buffer_bytes,
    output_vectors,
    staging_buffer_bytes,
    with_buffers,
)
from placer.plan.memory import POOL_ENTRY_BYTES, device_memory, row_map_bytes
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

    @property
    def parts(self) -> tuple[Float, Float, Float]:
        """The three, in order."""
        return self.hbm, self.link, self.dram

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


def _by_host(
    table: Table, width: int, lookups: Float, unique: Float, vectors: Float | float
) -> _Traffic:
    output = np.zeros_like(lookups) + vectors * table.weight_bytes_per_row(width)
    return _Traffic(2 * output, output, _in_hbm(table, width, lookups, unique).hbm)


class Roofline:
    """The cost model of this module's docstring; see `cost_models.CostModel`."""

    name = "roofline"
    uniform_splits = False

    def extra_cut_s(self, problem: Problem) -> float | None:
        """A further launch; what pieces return and sort is never less. See `CostModel`.

        None where no GPU is the fastest at everything: hot rows may then be best on one kind
        of GPU and cold ones on another, which a whole table cannot have.
        """
        topology = problem.topology
        speeds = {
            (
                gpu.hbm_bytes_per_s,
                topology.host_link_bytes_per_s(gpu.id),
                -topology.exchange_s(gpu.id, 1.0),
            )
            for gpu in topology.gpus
        }
        if tuple(map(max, zip(*speeds, strict=True))) not in speeds:
            return None
        return min(gpu.launch_s for gpu in topology.gpus)

    def cuts(self, problem: Problem, table: int) -> tuple[Cut, ...]:
        """The cuts that are searched. See `CostModel.cuts` and `standard_cuts`."""
        return standard_cuts(problem, table, self._colds(problem, table))

    def with_buffers(
        self, problem: Problem, table: int, shard: Shard, *, returns_bags: bool
    ) -> Shard:
        """As `placer.plan.buffers` has them. See `CostModel.with_buffers`."""
        samples = problem.global_batch_size // len(shard.devices)
        profile = problem.profile.tables[table]
        return with_buffers(profile, shard, samples=samples, returns_bags=returns_bags)

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
            lookups, _ = slice_load(profile, shard.rows, step_lookups)
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
                    touched = slice_load(profile, shard.rows, global_lookups)[1]
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

    def piece_curve(self, problem: Problem, piece: Piece, gpu: int) -> PieceCurve:
        """Cost of a piece over its hot rows. See `CostModel.piece_curve`."""
        profile, device = problem.profile.tables[piece.table], problem.topology.gpus[gpu]
        if piece.strip == REPLICA:
            return self._replica_curve(problem, profile, piece.cut.head, gpu)
        spec, topology, cold = profile.table, problem.topology, piece.cut.cold
        first, last = piece.columns(spec.dim)
        width, rows = last - first, piece.rows(spec.rows)
        samples = problem.global_batch_size
        step_lookups = samples * spec.lookups_per_sample
        hot, lookups, unique = cumulative_load(profile, rows, step_lookups)
        if cold in ("host", "cached"):  # Their costs jump beside none and all.
            hot, lookups, unique = with_steps_at_ends(hot, lookups, unique)
        cold_lookups, cold_unique = lookups[-1] - lookups, unique[-1] - unique
        members, row_bytes = int(hot[-1]), spec.bytes_per_row(width)
        vectors = output_vectors(spec, samples, float(lookups[-1]))
        traffic = _in_hbm(spec, width, lookups, unique)
        buffers = np.full(
            hot.size,
            exchange_buffer_bytes(spec, samples, float(lookups[-1]), width)
            + index_buffer_bytes(float(lookups[-1])),
        )
        if cold in ("staged", "cached"):
            traffic += _staged(spec, width, cold_lookups, cold_unique)
            in_flight = rows_in_flight(profile, rows, step_lookups, hot)
            staging = staging_buffer_bytes(spec, in_flight[-1] - in_flight, width)
            if cold == "cached":  # Without a cache, rows are read in place.
                staging[0] = 0.0
            buffers += staging
        elif cold == "uva":
            traffic += _in_place(spec, width, cold_lookups, cold_unique)
        else:
            bags = output_vectors(spec, samples, 0.0)
            cold_vectors = bags + (vectors - bags) * _share_of_last(cold_lookups)
            by_host = _by_host(spec, width, cold_lookups, cold_unique, cold_vectors)
            # With all rows in HBM there is nothing for the host to send; without any row it
            # sends empty bags.
            sends = (hot < members) | (members == 0)
            traffic += _Traffic(*(np.where(sends, part, 0.0) for part in by_host.parts))
        in_dram = ((members - hot) * row_bytes).astype(np.float64)
        if cold == "cached":
            in_dram = np.where(hot < members, float(members * row_bytes), 0.0)
            in_place = _in_place(spec, width, lookups[-1:], unique[-1:])
            for part, alone in zip(traffic.parts, in_place.parts, strict=True):
                part[0] = alone[0]
            buffers += np.where(hot < members, hot * POOL_ENTRY_BYTES, 0)
        output = vectors * spec.weight_bytes_per_row(width)
        fixed_s = (
            device.launch_s
            + 2 * output / device.hbm_bytes_per_s
            + 2 * topology.exchange_s(device.id, output)
            + topology.exchange_s(device.id, float(lookups[-1]) * ID_BYTES)
        )
        # Ranks differ from ids, and so need a map, where they decide what is read where. With
        # a replicated head every GPU has that map anyway.
        map_bytes = row_map_bytes(spec) if profile.counts and not piece.cut.head else 0
        by_rank = piece.cut.ways > 1 and not piece.cut.blocked
        return PieceCurve(
            hot_rows=hot,
            gpu_s=fixed_s
            + traffic.hbm / device.hbm_bytes_per_s
            + traffic.link / topology.host_link_bytes_per_s(device.id),
            dram_s=traffic.dram / topology.hosts_by_id[device.host].dram_bytes_per_s,
            hbm_bytes=hot * row_bytes + buffers + (map_bytes if by_rank else 0),
            dram_bytes=in_dram,
            # A cache and the rows behind it are one shard, and know their rows by id.
            split_s=0.0 if cold == "cached" else device.launch_s,
            split_hbm_bytes=0.0 if by_rank or cold == "cached" else float(map_bytes),
        )

    def _replica_curve(
        self, problem: Problem, profile: TableProfile, head: int, gpu: int
    ) -> PieceCurve:
        """Cost on one GPU of rows that every GPU holds, for its own samples."""
        spec, topology = profile.table, problem.topology
        device = topology.gpus[gpu]
        samples = problem.global_batch_size // len(topology.gpus)
        rows, width_bytes = (0, head, 1), spec.weight_bytes_per_row()
        lookups, unique = slice_load(profile, rows, samples * spec.lookups_per_sample)
        touched = slice_load(profile, rows, problem.global_batch_size * spec.lookups_per_sample)[1]
        traffic = _in_hbm(spec, spec.dim, np.array([lookups]), np.array([unique]))
        output = output_vectors(spec, samples, lookups) * width_bytes
        ordered = profile.counts is not None and head < spec.rows
        return PieceCurve(
            hot_rows=np.array([head]),
            gpu_s=device.launch_s
            + (traffic.hbm + 2 * output) / device.hbm_bytes_per_s
            + topology.exchange_s(device.id, 2 * touched * width_bytes),
            dram_s=np.zeros(1),
            hbm_bytes=np.array([float(head * spec.bytes_per_row())])
            + exchange_buffer_bytes(spec, samples, lookups, spec.dim)
            + index_buffer_bytes(lookups)
            + (row_map_bytes(spec) if ordered else 0),
            dram_bytes=np.zeros(1),
            split_s=0.0,
            split_hbm_bytes=0.0,
        )

    def _colds(self, problem: Problem, table: int) -> tuple[Cold, ...]:
        """Ways to read the cold rows of a table that may pay, the usual one first.

        Staging beats reading in place wherever its buffers fit, but they may not. A host that
        pools saves link time where bags are large and hardly repeat rows. A cache needs no map
        of a split's rows, which pays where it is small.
        """
        profile, gpu = problem.profile.tables[table], problem.topology.gpus[0]
        spec, samples = profile.table, problem.global_batch_size
        lookups = np.array([samples * spec.lookups_per_sample])
        unique = np.array([profile.cdf.unique(float(lookups[0]))])
        vectors = output_vectors(spec, samples, float(lookups[0]))
        staged = _staged(spec, spec.dim, lookups, unique)
        host = _by_host(spec, spec.dim, lookups, unique, vectors)
        link = problem.topology.host_link_bytes_per_s(gpu.id)
        dram = problem.topology.hosts_by_id[gpu.host].dram_bytes_per_s
        colds: list[Cold] = ["staged", "uva"]
        in_step = staged.hbm[0] / gpu.hbm_bytes_per_s + staged.link[0] / link
        # The host's memory has to do this for all its GPUs in the same time.
        peers = len(problem.topology.gpus_of(gpu.host))
        if max(host.link[0] / link, host.dram[0] * peers / dram) < in_step:
            colds.append("host")
        if profile.counts is not None and spec.rows > 1:
            colds.append("cached")
        forbidden = problem.constraints.rule_of(profile.name).forbid
        if forbidden & {"staged", "uva"}:  # Then others may pay, or be all that is left.
            colds += [cold for cold in ("host", "cached") if cold not in colds]
        return tuple(colds)

    def _shard_traffic(
        self, profile: TableProfile, shard: Shard, step_lookups: float, vectors: float
    ) -> tuple[_Traffic, float]:
        """Traffic of a shard, and how many of its lookups are served from HBM."""
        table, width = profile.table, shard.width
        lookups, unique = slice_load(profile, shard.rows, step_lookups)
        if shard.lookup == "device":
            return _in_hbm(table, width, np.asarray(lookups), np.asarray(unique)), lookups
        if shard.lookup == "uva":
            return _in_place(table, width, np.asarray(lookups), np.asarray(unique)), 0.0
        if shard.lookup == "host":
            return (
                _by_host(table, width, np.asarray(lookups), np.asarray(unique), vectors),
                0.0,
            )
        hits, hit_rows = slice_load(profile, cache_slices(shard)[0], step_lookups)
        traffic = _in_hbm(table, width, np.asarray(hits), np.asarray(hit_rows)) + _staged(
            table, width, np.asarray(lookups - hits), np.asarray(unique - hit_rows)
        )
        return traffic, hits


def _share_of_last(cold_lookups: Float) -> Float:
    """Cold lookups as a share of all lookups; 0 where there are none."""
    total = cold_lookups[0] if cold_lookups.size else 0.0
    return cold_lookups / total if total else np.zeros_like(cold_lookups)
