"""Count the bytes that a plan places on every device.

The executor, cost models and `verify` all use these counts. So a plan that fits here fits in
training.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from placer.growing.options import Growing
from placer.plan.plan import Plan
from placer.plan.shard import Memory, Shard
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
ATen/native/cuda/SortStable.cu). An update takes at least 12; see `placer.plan.buffers`."""

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
