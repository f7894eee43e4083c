"""The units of work that a plan gives each GPU in a step, to be multiplied with unit costs."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import NamedTuple

import numpy as np

from cost_models.base import Float, require_match
from cost_models.step_equation.loads import (
    ID_BYTES,
    LENGTH_BYTES,
    OUTPUT_BYTES,
    replica_bytes,
    returned_vectors,
    slice_load,
    with_own_part,
)
from cost_models.step_equation.phases import (
    COPIES,
    GRADIENTS,
    HOST,
    IDS,
    LOOKUP,
    OUTPUTS,
    ROWS,
    UPDATE,
    Amount,
    Rates,
    ReadKind,
    UnitCosts,
    read_matrix,
)
from placer.errors import PlanMismatchError
from placer.plan.fields import Shard
from placer.plan.memory import cache_slices, output_vectors
from placer.plan.plan import Plan
from placer.problem import Problem
from placer.profile.table_profile import TableProfile
from placer.tables import DTYPE_BYTES
from placer.topology.topology import Topology


class Extras(NamedTuple):
    """A GPU's work for shards besides reading rows, in the order of `UnitCosts`."""

    # Number of groups with only some of the table's columns, and number of shards.
    column_slices: Amount = 0.0
    shards: Amount = 0.0
    # Number of vectors that the GPU returns, and their bytes.
    output_vectors: Amount = 0.0
    output_bytes: Amount = 0.0
    # Bytes that the GPU sends and receives for the shards, spread evenly over all GPUs.
    exchanged_bytes: Amount = 0.0
    cache_rows: Amount = 0.0  # Capacity of caches in rows.
    # Lookups of groups whose rows do not lie in the order of their ids; see `is_mapped`.
    mapped_lookups: Amount = 0.0
    pooled_lookups: Amount = 0.0  # Lookups of groups of which the host pools some rows.
    sliced_row_bytes: Amount = 0.0  # Bytes of weights and state of distinct rows in slices.
    # The parts of `exchanged_bytes` before the lookup (ids) and before the update (gradients).
    id_bytes: Amount = 0.0
    gradient_bytes: Amount = 0.0
    # Seconds of the host's drive to read its rows and write them back, if all GPUs of the host read
    # equally many.
    drive_s: Amount = 0.0

    def launch_s(self, costs: UnitCosts) -> Amount:
        """Return the fixed seconds of shards and column slices."""
        return self.column_slices * costs.column_slice_s + self.shards * costs.shard_s

    def phase_s(self, costs: UnitCosts) -> Float:
        """Return seconds by phase, shape (8, ...); lookup and update share local work equally."""
        outputs = self.exchanged_bytes - self.id_bytes - self.gradient_bytes
        local_s = self.output_vectors * costs.output_vector_s
        local_s += self.output_bytes * costs.output_byte_s
        local_s += self.mapped_lookups * costs.mapped_lookup_s
        local_s += self.pooled_lookups * costs.pooled_lookup_s
        local_s += self.sliced_row_bytes * costs.sliced_row_byte_s
        local_s += self.cache_rows * costs.cache_row_s
        local_s += self.launch_s(costs)
        phase_s = np.zeros((ROWS, *np.shape(local_s)))
        phase_s[LOOKUP] = phase_s[UPDATE] = local_s / 2
        phase_s[COPIES] = self.drive_s
        phase_s[IDS] = self.id_bytes * costs.exchange_byte_s
        phase_s[OUTPUTS] = outputs * costs.exchange_byte_s
        phase_s[GRADIENTS] = self.gradient_bytes * costs.exchange_byte_s
        return phase_s


NO_EXTRAS = Extras()


@dataclass(frozen=True, slots=True)
class Work:
    """A step's work of one shard, or of its cache's hits or misses, on each of its devices."""

    table: int  # Number of the table in the problem's profile.
    kind: ReadKind
    # Bytes of a row's weights, and of its weights and state, in HBM.
    weight_bytes: float
    row_bytes: float
    # Number of lookups in a step, distinct rows that they read, and vectors after pooling.
    lookups: float
    rows: float
    vectors: float
    # Numbers of the devices that each do this work: GPUs, then servers. There are several only for
    # replicas, and `by_host`: a host with GPUs serves the rows by itself, over the links of all its
    # GPUs, each of which has an equal part of the work.
    gpus: tuple[int, ...] = ()
    by_host: bool = False
    # Only a shard's first work has the shard's extras; a group's first work also has the group's.
    extras: Extras = NO_EXTRAS
    # Bytes of a row's weights and state in its home; 0 if as many as in HBM.
    home_bytes: float = 0.0

    @property
    def amounts(self) -> tuple[object, ...]:
        """Everything except the device. Works with equal amounts take equal time on equal GPUs."""
        sizes = self.weight_bytes, self.row_bytes, self.home_bytes
        counts = self.lookups, self.rows, self.vectors
        return self.table, self.kind, self.by_host, sizes, counts, self.extras

    def seconds(self, costs: UnitCosts, shares: Float) -> Float:
        """Return seconds of each phase, with extras, and of the host's memory, shape (9,).

        See `read_matrix`.
        """
        sizes = self.weight_bytes, self.row_bytes, self.home_bytes
        if self.by_host:
            costs = UnitCosts(host=costs.host._replace(hbm=Rates()))
        matrix = read_matrix(costs, self.kind, sizes, shares)
        seconds: Float = matrix @ (self.lookups, self.rows, self.vectors)
        seconds[:HOST] += self.extras.phase_s(costs)
        return seconds

    def resource_s(self, rates: Rates) -> float:
        """Return the seconds of a resource with these rates."""
        lookup_bytes, row_bytes = self.lookups * self.weight_bytes, self.rows * self.row_bytes
        vector_bytes = self.vectors * self.weight_bytes
        units = self.lookups, lookup_bytes, self.rows, row_bytes, self.vectors, vector_bytes
        seconds: float = sum(map(mul, rates, units))
        return seconds


Group = tuple[str, tuple[int, int], tuple[str, ...]]
"""A table, columns, and the devices that hold them."""


def group_of(shard: Shard) -> Group:
    """Return a shard's group. On each device, a group's shards are pooled into one output."""
    return shard.table, shard.cols, shard.devices


def groups_of(plan: Plan) -> dict[Group, list[Shard]]:
    """Return the shards of a plan by group."""
    groups: dict[Group, list[Shard]] = defaultdict(list)
    for shard in plan.shards:
        groups[group_of(shard)].append(shard)
    return groups


def host_pools(shards: Iterable[Shard]) -> bool:
    """Return whether a host pools any rows of these shards."""
    return any(shard.lookup == "host" and shard.row_count for shard in shards)


def is_mapped(profile: TableProfile, shards: Sequence[Shard]) -> bool:
    """Return whether the group needs a map from ids to the places of their rows.

    One contiguous shard needs none. If ids are ranks, contiguous hot and cold shards need none.
    """
    most = 2 if profile.counts is None else 1
    return len(shards) > most or any(shard.rows[2] > 1 for shard in shards)


def work_of(problem: Problem, plan: Plan) -> list[Work]:
    """Return the work of all shards of a plan, group by group."""
    require_match(problem, plan)
    slices = column_slice_counts(plan)
    numbers = problem.profile.table_numbers
    works: list[Work] = []
    for (name, _, _), shards in groups_of(plan).items():
        reads = works_anywhere(problem, numbers[name], shards, column_slices=slices[name])
        for shard, own in zip(shards, reads, strict=True):
            works += _on_devices(problem.topology, shard, own)
    return works


def _on_devices(topology: Topology, shard: Shard, works: Sequence[Work]) -> Iterator[Work]:
    """Yield a shard's `works_anywhere` for its devices."""
    numbers, (first, *others) = topology.serving_numbers, works
    # Drives of hosts may differ.
    alike = [(one,) for one in shard.devices] if shard.memory == "ssd" else [shard.devices]
    for devices in alike:
        if gpus := tuple(numbers[device] for device in devices if device in numbers):
            extras = first.extras
            if shard.memory == "ssd":
                drive_s = works[-1].rows * drive_row_s(topology, devices[0], works[-1].home_bytes)
                extras = extras._replace(drive_s=drive_s)
            yield replace(first, gpus=gpus, extras=extras)
            yield from (replace(one, gpus=gpus) for one in others)
        for host in (device for device in devices if device not in numbers):
            gpus = tuple(numbers[gpu.id] for gpu in topology.gpus_of(host))
            lookups, rows = first.lookups / len(gpus), first.rows / len(gpus)
            part = replace(first, lookups=lookups, rows=rows, vectors=first.vectors / len(gpus))
            yield replace(part, gpus=gpus, by_host=True, extras=NO_EXTRAS)


def works_anywhere(
    problem: Problem, table: int, shards: Sequence[Shard], *, column_slices: int
) -> list[list[Work]]:
    """Return the work of each shard of a group, without naming the devices that do it."""
    spec = problem.profile.tables[table].table
    all_rows = sum(shard.row_count for shard in shards) == spec.rows
    is_slice = float(shards[0].width < spec.dim)
    mapped = float(is_mapped(problem.profile.tables[table], shards))
    pooled = float(host_pools(shards))
    works = []
    for shard in shards:
        reads = _reads(problem, table, shard)
        lookups, rows = sum(read.lookups for read in reads), sum(read.rows for read in reads)
        exchange = exchange_of(
            problem,
            table,
            shard.width,
            lookups,
            rows,
            replicated=shard.rows if len(shard.devices) > 1 else None,
            replicas=len(shard.devices),
            returns_bags=shard is shards[0],
            all_rows=all_rows,
            column_slices=column_slices,
        )
        extras = Extras(
            **exchange,
            column_slices=is_slice if shard is shards[0] else 0.0,
            shards=1.0,
            cache_rows=float(shard.cache_rows),
            mapped_lookups=mapped * lookups,
            pooled_lookups=pooled * lookups,
            sliced_row_bytes=is_slice * rows * spec.bytes_per_row(shard.width),
        )
        works.append([replace(reads[0], extras=extras), *reads[1:]])
    return works


def _reads(problem: Problem, table: int, shard: Shard) -> list[Work]:
    """Return the work of reading a shard, without its device; hits and misses separately."""
    profile = problem.profile.tables[table]
    spec, samples = profile.table, problem.global_batch_size // len(shard.devices)
    step_lookups = samples * spec.lookups_per_sample
    lookups, rows = slice_load(profile, shard.rows, step_lookups)
    sizes = spec.weight_bytes_per_row(shard.width), spec.bytes_per_row(shard.width)
    vectors = output_vectors(spec, samples, lookups)
    is_usual = shard.dtype is None and shard.memory != "ssd"
    home_bytes = 0.0 if is_usual else float(spec.bytes_per_row(shard.width, shard.dtype))
    if shard.lookup != "cached":
        work = Work(table, shard.lookup, *sizes, lookups, rows, vectors, home_bytes=home_bytes)
        return [work]
    hits, hit_rows = slice_load(profile, cache_slices(shard)[0], step_lookups)
    missed = lookups - hits, rows - hit_rows
    return [
        Work(table, "hit", *sizes, hits, hit_rows, vectors),
        Work(table, "miss", *sizes, *missed, vectors, home_bytes=home_bytes),
    ]


def drive_row_s(topology: Topology, gpu: str, row_bytes: float) -> float:
    """Return the seconds of a row on a host's drive that all GPUs of the host use equally."""
    host = topology.hosts_by_id[topology.gpus_by_id[gpu].host]
    if host.drive is None:
        raise PlanMismatchError(
            f"the plan has rows on the drive of {host.id}, which {topology.name!r} lacks: "
            "give --ssd, or a topology file with a drive"
        )
    return host.drive.row_s(row_bytes) * len(topology.gpus_of(host.id))


def drive_rows_per_s(topology: Topology, gpu: str) -> float:
    """Return the small rows per second of a GPU from and to its host's drive; 0 without one."""
    has_drive = topology.hosts_by_id[topology.gpus_by_id[gpu].host].drive is not None
    return 1 / drive_row_s(topology, gpu, 1.0) if has_drive else 0.0


def one_is_fastest(speeds: Collection[tuple[float, ...]]) -> bool:
    """Return whether one GPU is the fastest in each of several speeds."""
    return tuple(map(max, zip(*speeds, strict=True))) in speeds


def exchange_of(
    problem: Problem,
    table: int,
    width: int,
    lookups: float,
    rows: float,
    *,
    replicated: tuple[int, int, int] | None = None,
    replicas: int = 1,
    returns_bags: bool = True,
    all_rows: bool,
    column_slices: int = 1,
) -> dict[str, float]:
    """Return fields of `Extras`: a shard's output vectors, and the bytes that it exchanges.

    In a step, the shard's `lookups` read `rows` distinct rows. Each of `replicas` GPUs holds the
    slice of ranks `replicated`. Set `returns_bags` to include the group's pooled output, and
    `all_rows` if the group has all rows of its columns.
    """
    profile = problem.profile.tables[table]
    spec, gpus = profile.table, len(problem.topology.gpus)
    samples = problem.global_batch_size // replicas if returns_bags else 0
    vectors = returned_vectors(spec, samples, lookups, all_rows=all_rows)
    output = vectors * width * OUTPUT_BYTES
    bags = samples * sum(feature.coverage > 0 for feature in spec.features)
    ids = lookups * ID_BYTES + bags * LENGTH_BYTES
    outputs = vectors * width * DTYPE_BYTES[problem.exchange_dtype]
    if replicated is None:
        gradients = outputs
        # Each column slice, on a GPU of its own, sends Σ g² of its rows to the others.
        if spec.optimizer == "rowwise_adagrad":
            gradients += with_own_part(rows * OUTPUT_BYTES * max(0, column_slices - 1), gpus)
    else:
        global_lookups = problem.global_batch_size * spec.lookups_per_sample
        touched = slice_load(profile, replicated, global_lookups)[1]
        # If some GPUs have no replica, the others serve their samples too.
        others = with_own_part(1 - replicas / gpus, gpus)
        ids, outputs = ids * others, outputs * others
        gradients = outputs + replica_bytes(width, rows, touched, replicas, gpus)
    return {
        "output_vectors": vectors,
        "output_bytes": output,
        "exchanged_bytes": ids + outputs + gradients,
        "id_bytes": ids,
        "gradient_bytes": gradients,
    }


def column_slice_counts(plan: Plan) -> Counter[str]:
    """Count each table's column slices without replicas; missing columns count as one slice."""
    slices = {(shard.table, shard.cols) for shard in plan.shards if len(shard.devices) == 1}
    columns: Counter[str] = Counter()
    for name, (first, last) in slices:
        columns[name] += last - first
    counts = Counter(name for name, _ in slices)
    for table in plan.tables:
        counts[table.name] += 0 < columns[table.name] < table.dim
    return counts
