"""Count the bytes that a plan places on every device, the buffers of its shards included.

The executor, cost models and `verify` all use these counts. So a plan that fits here fits in
training.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from placer.growing.options import Growing
from placer.plan.fields import Memory, Shard
from placer.plan.plan import Plan
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.tables import Table
from placer.topology.devices import BLOCK_BYTES, Gpu, Host
from placer.topology.topology import Topology

ROW_MAP_BYTES_PER_ROW = 4
"""Bytes a row of the id → slot map, one int32, for a table with row order ``profile``."""

ROW_NUMBER_BYTES = 4
"""Bytes a row of the row numbers, one int32, in a key map that has a part of a table's rows."""

ENTRY_BYTES_HELD = 21
"""Permanent bytes of bookkeeping for one entry of HBM for staged or cached rows (`RowCache`).

The slot that it holds, its last use and its priority (4 each), whether it was updated (1), and the
directory's slot and entry (4 each). Arenas of 2³¹ rows and more take 29. Measured by
tests/executor/test_executor_memory.py."""

ENTRY_BYTES_PASSING = 48
"""Temporary bytes of an entry on a GPU, while rows get entries and evicted entries are sorted.

Keys (4), the order of eviction (8), slots (4), sorted slots (4), their numbers twice (16), and
memory of CUB's radix sort of pairs (12)."""

ROW_CACHE_ENTRY_BYTES = ENTRY_BYTES_HELD + 31
"""Bytes of an entry that plans count: permanent bytes, and the 31 temporary bytes on a CPU. On a
GPU, the memory of outputs and gradients, which do not exist yet, has room for the rest."""

SORT_BYTES_PER_LOOKUP = 8
"""Bytes of a lookup that sorting takes on a GPU beyond those of updating rows.

Sorting int32 slots takes 20: their order as int64 twice, and 4 for CUB (`sort_stable` in PyTorch's
ATen/native/cuda/SortStable.cu). An update takes at least 12; see `placer.plan.memory`."""

CHECKSUM_BYTES = 4
"""Bytes of the checksum of each block on a drive."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes on one device, by purpose, and the device's capacity.

    `row_map_bytes` counts id → slot maps, and key maps of tables that grow. `buffer_bytes` counts
    staged rows, exchange buffers and integers of the lookups in flight.
    """

    device: str
    capacity_bytes: int
    weight_bytes: int = 0
    state_bytes: int = 0
    cache_bytes: int = 0
    row_map_bytes: int = 0
    buffer_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All bytes together."""
        return (
            self.weight_bytes
            + self.state_bytes
            + self.cache_bytes
            + self.row_map_bytes
            + self.buffer_bytes
        )

    @property
    def free_bytes(self) -> int:
        """Bytes left; negative if the plan does not fit."""
        return self.capacity_bytes - self.total_bytes


@dataclass(frozen=True, slots=True)
class Shortage:
    """Memory that a problem lacks, so that no placement fits."""

    device: str
    resource: Memory
    short_bytes: int
    detail: str


def row_map_bytes(table: Table) -> int:
    """Return bytes of a table's id → slot map on each device that serves it."""
    return ROW_MAP_BYTES_PER_ROW * table.rows


def key_map_bytes(topology: Topology, growing: Mapping[str, Growing]) -> dict[str, int]:
    """Return bytes of the key maps of tables that grow, by host and by GPU.

    The process of each GPU has an equal part of the keys, in its host's memory. With several GPUs,
    a map also has its rows' numbers. A single GPU that serves alone has a copy, to look keys up.
    """
    ranks = max(1, len(topology.gpus))
    parts = [replace(how, capacity=-(-how.capacity // ranks)) for how in growing.values()]
    size = sum(part.nbytes + ROW_NUMBER_BYTES * part.rows * (ranks > 1) for part in parts)
    of_hosts = {host.id: size * len(topology.gpus_of(host.id)) for host in topology.hosts}
    copied = sum(how.copy_nbytes for how in growing.values()) * (len(topology.serving) == 1)
    return of_hosts | dict.fromkeys((gpu.id for gpu in topology.gpus), copied)


def cache_bytes(table: Table, shard: Shard) -> int:
    """Return bytes of the HBM cache of a ``cached`` shard on each GPU that serves it."""
    return shard.cache_rows * (table.bytes_per_row(shard.width) + ROW_CACHE_ENTRY_BYTES)


def home_of(topology: Topology, device: str, memory: Memory) -> str:
    """Return the name of the memory of rows that `device` serves: a GPU, a host or its drive.

    >>> machine = Topology.parse("1xh100", ssd="1TiB")
    >>> home_of(machine, "gpu:0", "dram"), home_of(machine, "gpu:0", "ssd")
    ('host:0', 'host:0 ssd')
    """
    gpu = topology.gpus_by_id.get(device)
    if gpu is None or memory == "hbm":
        return device
    return drive_of(gpu.host) if memory == "ssd" else gpu.host


def drive_of(host: str) -> str:
    """Return the name of a host's drive in `device_memory`."""
    return f"{host} ssd"


def record_bytes(table: Table, shard: Shard) -> int:
    """Return bytes of a shard's row in its memory; on a drive, its share of blocks."""
    row_bytes = table.bytes_per_row(shard.width, shard.dtype)
    if shard.memory != "ssd":
        return row_bytes
    in_a_block = (BLOCK_BYTES - CHECKSUM_BYTES) // row_bytes
    if in_a_block:
        return -(-BLOCK_BYTES // in_a_block)
    return -(-(row_bytes + CHECKSUM_BYTES) // BLOCK_BYTES) * BLOCK_BYTES


def device_memory(plan: Plan) -> dict[str, MemoryUse]:
    """Return the memory use of every GPU, host and drive of the plan's topology.

    Keys are ids of GPUs and hosts, and for drives the names of `drive_of`.
    """
    topology = plan.topology
    devices: tuple[Gpu | Host, ...] = (*topology.gpus, *topology.hosts)
    sizes = {device.id: device.memory_bytes for device in devices}
    sizes |= {drive_of(h.id): h.drive.memory_bytes for h in topology.hosts if h.drive}
    # Sum first by set of devices, because many tables may be replicated on the same GPUs.
    of_rows: dict[tuple[tuple[str, ...], Memory], Counter[str]] = defaultdict(Counter)
    besides: dict[Iterable[str], Counter[str]] = defaultdict(Counter)
    mapped: dict[str, set[str]] = defaultdict(set)
    for shard in plan.shards:
        table, count = plan.tables_by_name[shard.table], shard.row_count
        state = count * table.state_bytes_per_row(shard.width)
        held = of_rows[shard.devices, shard.memory]
        held["weight_bytes"] += count * record_bytes(table, shard) - state
        held["state_bytes"] += state
        besides[shard.devices]["buffer_bytes"] += shard.buffer_bytes
        if shard.lookup == "cached":
            besides[shard.devices]["cache_bytes"] += cache_bytes(table, shard)
        if plan.order_of(shard.table).kind == "profile":
            mapped[shard.table].update(shard.devices)
    for name, holders in mapped.items():
        besides[frozenset(holders)]["row_map_bytes"] += row_map_bytes(plan.tables_by_name[name])
    used: dict[str, Counter[str]] = {name: Counter() for name in sizes}
    for (devices_of_rows, memory), held in of_rows.items():
        for device in devices_of_rows:
            used[home_of(topology, device, memory)].update(held)
    for devices_besides, held in besides.items():
        for device in devices_besides:
            used[device].update(held)
    for device, size in key_map_bytes(topology, plan.growing).items():
        used[device]["row_map_bytes"] += size
    return {name: MemoryUse(name, size, **used[name]) for name, size in sizes.items()}


Float = npt.NDArray[np.float64]

STEPS_IN_FLIGHT = 2
"""Steps in flight: the step that trains, and the next step, whose rows are being copied."""

INDEX_BYTES_HELD_PER_LOOKUP = 16
"""Bytes of integers of one lookup, from its step's preparation to the step's end, on any tier.

Its place, its position in the order of rows, the start of its run of equal rows and that run's
place, all int32, on the GPU that serves it. Measured by tests/executor/test_executor_memory.py."""

INDEX_BYTES_PASSING_PER_LOOKUP = 8
"""Temporary bytes of one lookup while rows are updated, without sums of parts of rows.

4 for its bag in the order of rows. 4 for rounding of PyTorch's allocator, and for lists of lookups
that a host pools. The next step is prepared before."""

SUM_BYTES_PER_LOOKUP_AND_COLUMN = 2 * 4 / 128
"""Bytes for sums of parts of rows that are read often: two float32 rows for 128 lookups."""

_FLOAT32_BYTES = 4


def exchange_buffer_bytes(table: Table, samples: int, lookups: float, width: int) -> float:
    """Return bytes of a server's float32 output of one step and of its gradient.

    Pooled features have one vector of `width` columns for each of the server's `samples` samples.
    Unpooled features have one for each of its `lookups` lookups.
    """
    vectors = output_vectors(table, samples, lookups)
    return 2.0 * vectors * width * _FLOAT32_BYTES


def output_vectors(table: Table, samples: float, lookups: float) -> float:
    """Return the number of vectors that a server outputs: bags, or single rows of lookups."""
    total = table.lookups_per_sample
    unpooled = sum(f.lookups_per_sample for f in table.features if f.pooling == "none")
    bags = samples * sum(f.pooling != "none" and f.coverage > 0 for f in table.features)
    return bags + (lookups * unpooled / total if total else 0.0)


def index_buffer_bytes(table: Table, lookups: float, width: int, ahead: bool = True) -> float:
    """Return bytes of integers of all steps in flight, for a server with `lookups` lookups a step.

    They are linear in lookups, so dividing a table by rows does not change their sum. Without
    looking `ahead`, one step is in flight.

    >>> from placer import Feature
    >>> table = Table("ads", rows=1000, dim=64, features=(Feature("ad"),))
    >>> index_buffer_bytes(table, 1000, 64), index_buffer_bytes(table, 1000, 64, ahead=False)
    (44000.0, 28000.0)
    """
    steps = STEPS_IN_FLIGHT if ahead else 1
    each = table.lookups_per_sample
    # Sorting uses the memory of outputs and gradients, which do not exist yet.
    room = exchange_buffer_bytes(table, 1, each, width) / each if each else SORT_BYTES_PER_LOOKUP
    # Bags in the order of rows use the memory of the sums that follow.
    passing = INDEX_BYTES_PASSING_PER_LOOKUP + max(4.0, width * SUM_BYTES_PER_LOOKUP_AND_COLUMN)
    passing += max(0.0, SORT_BYTES_PER_LOOKUP - room)
    return lookups * (steps * INDEX_BYTES_HELD_PER_LOOKUP + passing)


def staged_rows(unique_rows: Float | float) -> Float:
    """Return the rows of a staging buffer, if the steps in flight read `unique_rows` on average.

    The number of distinct rows varies from step to step. So add four standard deviations of a sum
    of independent draws, each at most √unique. The result is not rounded, so that it is concave in
    `unique_rows`: bounds of HBM need that no chord lies above it. Rows that two steps in flight
    share are staged once.
    """
    rows: Float = np.asarray(unique_rows, dtype=np.float64)
    kept: Float = rows + 4 * np.sqrt(rows)
    return kept


def staging_buffer_bytes(table: Table, unique_rows: Float | float, width: int) -> Float:
    """Return bytes of `staged_rows(unique_rows)` rows, with their state and bookkeeping."""
    return staged_rows(unique_rows) * (table.bytes_per_row(width) + ROW_CACHE_ENTRY_BYTES)


def slice_members(ranks: npt.NDArray[np.int64], rows: tuple[int, int, int]) -> Float:
    """Return the number of members of a slice of ranks in each segment, shape (m,)."""
    start, stop, step = rows
    # `np.clip` and `np.diff` have more overhead, and solvers call this very often.
    below: Float = np.ceil((np.minimum(np.maximum(ranks, start), stop) - start) / step)
    return below[1:] - below[:-1]


def slice_lookup_share(profile: TableProfile, rows: tuple[int, int, int]) -> float:
    """Return the share of the table's lookups that fall in a slice of ranks."""
    return float(slice_members(profile.cdf.ranks, rows) @ profile.cdf.row_share)


def slice_unique(profile: TableProfile, rows: tuple[int, int, int], lookups: float) -> float:
    """Return the expected number of distinct rows of a slice in `lookups` lookups of the table."""
    touched = np.diff(profile.unique_at_ranks(lookups)) / profile.cdf.widths
    return float(slice_members(profile.cdf.ranks, rows) @ touched)


def cache_slices(shard: Shard) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the slice of a shard's ranks that its cache holds, and the slice of the others.

    A cache filled by frequency holds the shard's hottest rows. Without a cache, the first is empty.
    """
    start, stop, step = shard.rows
    edge = min(stop, start + shard.cache_rows * step)
    return (start, edge, step), (edge, stop, step)


def with_buffers(
    profile: TableProfile, shard: Shard, *, samples: int, returns_bags: bool, ahead: bool = True
) -> Shard:
    """Return the shard with the `staging_rows` and `buffer_bytes` that reading it needs.

    Rows in a cache are not staged. Each serving device handles the lookups of `samples` samples.
    Shards of one table on one device pool into one output, so only the shard with `returns_bags`
    counts its buffers. Each shard counts the outputs of its own unpooled lookups.
    """
    table, width = profile.table, shard.width
    all_lookups = samples * table.lookups_per_sample
    lookups = all_lookups * slice_lookup_share(profile, shard.rows)
    size = exchange_buffer_bytes(table, samples if returns_bags else 0, lookups, width)
    size += index_buffer_bytes(table, lookups, width, ahead)
    staging_rows = 0
    if shard.lookup in ("staged", "cached"):
        _, cold = cache_slices(shard)
        unique = slice_unique(profile, cold, STEPS_IN_FLIGHT * all_lookups)
        size += float(staging_buffer_bytes(table, unique, width))
        staging_rows = min(len(range(*cold)), math.floor(staged_rows(unique)))
    return replace(shard, staging_rows=staging_rows, buffer_bytes=math.ceil(size))


def buffered(shards: Iterable[Shard], profile: Profile, samples: int) -> list[Shard]:
    """Return shards with their buffers. `samples` is the batch of all GPUs together.

    On each GPU, the first shard of a table's columns returns bags.
    """
    made, returned = [], set()
    for shard in shards:
        key = (shard.table, shard.devices, shard.cols)
        own, bags = samples // len(shard.devices), key not in returned
        returned.add(key)
        made.append(with_buffers(profile[shard.table], shard, samples=own, returns_bags=bags))
    return made
