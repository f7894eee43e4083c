"""Compute each GPU's memory in each phase of a training step, and the largest batch that fits.

`device_memory` counts what a device holds at all times or reserves. This module counts what exists
at the same time in a phase: arrays of lookups, pooled rows that wait for dense layers, and
gradients beside copies of others. It follows the executor and `placer.training.Trainer`, with one
process for each GPU. benchmarks/step_memory.py compares it with PyTorch's allocator.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from placer.dense import DenseLayers, DenseNetwork, dense_memory
from placer.dense.network import pass_bytes
from placer.errors import ProblemError
from placer.plan.memory import (
    ENTRY_BYTES_HELD,
    ENTRY_BYTES_PASSING,
    INDEX_BYTES_HELD_PER_LOOKUP,
    STEPS_IN_FLIGHT,
    SUM_BYTES_PER_LOOKUP_AND_COLUMN,
    device_memory,
    output_vectors,
    slice_lookup_share,
)
from placer.plan.plan import Plan
from placer.profile.profile import Profile

DeviceKind = Literal["cuda", "cpu"]

CONTEXT_BYTES = 512 << 20
"""Assumed bytes of a CUDA context with PyTorch's kernels: nvidia-smi shows 0.4 to 0.6 GiB on recent
GPUs for a process that has allocated nothing. See docs/memory.md."""

COMMUNICATOR_BYTES = 32 * 2 * (4 << 20)
"""Bytes of an NCCL communicator: 32 channels with two buffers of 4 MiB, the default of
NCCL_BUFFSIZE (NCCL's user guide, environment variables). Most machines open fewer channels."""

COMMUNICATORS = 3
"""Number of communicators: the step's exchange, the look-ahead exchange, and DDP."""

FRAGMENTATION_SHARE = 0.05
"""Assumed overhead of temporary memory on a GPU, as a share: PyTorch's caching allocator rounds
blocks up to 512 bytes, and segments from 10 MiB to 2 MiB (c10/cuda/CUDACachingAllocator.cpp)."""

_ID_BYTES, _FLOAT_BYTES, _OFFSET_BYTES = 8, 4, 8
_ENTRY_BYTES_PASSING: Mapping[DeviceKind, int] = {"cpu": 31, "cuda": ENTRY_BYTES_PASSING}
_SORT_BYTES: Mapping[DeviceKind, int] = {"cpu": 13, "cuda": 20}
"""Temporary bytes of a lookup while lookups are sorted; see `placer.plan.memory`."""

_STAGING_BYTES = 15
"""Further temporary bytes of a lookup that may read a staged or cached row."""


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """Bytes that a GPU holds at the same time in one phase of a step, by purpose."""

    name: str
    parts: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """Bytes of all purposes."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """A GPU's memory in each phase of a step."""

    device: str
    capacity_bytes: int  # Memory of the card, or another limit.
    phases: tuple[PhaseMemory, ...]  # In the order of a step.

    @property
    def fullest(self) -> PhaseMemory:
        """Phase that takes the most memory."""
        return max(self.phases, key=lambda phase: phase.total_bytes)

    @property
    def peak_bytes(self) -> int:
        """Bytes of the phase that takes most."""
        return self.fullest.total_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes left in that phase; negative if the step does not fit."""
        return self.capacity_bytes - self.peak_bytes


@dataclass(slots=True)
class _Arena:
    """Rows of one width and optimizer on a GPU, and a step's lookups of them."""

    width: int
    lookups: float = 0.0
    cold_rows: int = 0
    entries: int = 0

    def prepare_bytes(self, kind: DeviceKind) -> float:
        """Return temporary bytes while its lookups are prepared."""
        staged = _STAGING_BYTES * min(self.lookups, self.cold_rows) if self.entries else 0.0
        return self.lookups * _SORT_BYTES[kind] + staged + self.entries * _ENTRY_BYTES_PASSING[kind]

    def update_bytes(self) -> float:
        """Return temporary bytes while its rows are updated."""
        sums = max(float(_FLOAT_BYTES), self.width * SUM_BYTES_PER_LOOKUP_AND_COLUMN)
        return self.lookups * (_FLOAT_BYTES + sums)


@dataclass(slots=True)
class _Load:
    """What a GPU serves in a step. `row_cache_bytes` counts weights and state in row caches."""

    arenas: dict[object, _Arena] = field(default_factory=dict)
    vectors: float = 0.0
    output_bytes: float = 0.0
    entries: int = 0  # Of all row caches.
    row_cache_bytes: int = 0

    @property
    def lookups(self) -> float:
        return sum(arena.lookups for arena in self.arenas.values())


def peak_memory(
    plan: Plan,
    profile: Profile,
    *,
    device_kind: DeviceKind = "cuda",
    capacity_bytes: Mapping[str, int] | None = None,
) -> tuple[DevicePeak, ...]:
    """Return memory of each GPU in each phase of a training step.

    The profile says how row slices of a table share its lookups. For a ``cuda`` device, count its
    context, communication buffers and fragmentation. For ``cpu``, an emulated GPU, only count what
    PyTorch's allocator gives out. `capacity_bytes` has the memory of cards, by GPU. By default, it
    is the plan's, plus what its dense part reserved. Raises ProblemError if the profile lacks a
    table of the plan.

    >>> from placer import Plan, Shard, Topology
    >>> from placer.workloads import named_workload
    >>> profile = named_workload("random-1@7")
    >>> table = profile.tables[0].table
    >>> whole = Shard(table.name, (0, table.rows, 1), (0, table.dim), ("gpu:0",), "hbm", "device")
    >>> plan = Plan((table,), Topology.parse("1xh100"), (whole,), batch_size=1024)
    >>> [peak.fullest.name for peak in peak_memory(plan, profile)]
    ['update']
    """
    known = profile.table_numbers
    missing = [table.name for table in plan.tables if table.name not in known]
    if missing:
        raise ProblemError(
            f"the profile lacks tables {missing} of the plan; give the one it is from"
        )
    loads = _loads(plan, profile)
    own = _own_output_bytes(plan) if len(plan.topology.gpus) > 1 else 0.0
    uses = device_memory(plan)
    reserved = plan.dense.reserved_bytes if isinstance(plan.dense, DenseLayers) else 0
    result = []
    for gpu in plan.topology.gpus:
        use, load = uses[gpu.id], loads[gpu.id]
        base: dict[str, float] = {
            "weights": use.weight_bytes,
            "optimizer state": use.state_bytes,
            "row maps": use.row_map_bytes,
            "row caches": load.row_cache_bytes + load.entries * ENTRY_BYTES_HELD,
        }
        phases = _phases(plan, base, load, own, device_kind)
        room = (capacity_bytes or {}).get(gpu.id, gpu.memory_bytes + reserved)
        result.append(DevicePeak(gpu.id, room, phases))
    return tuple(result)


def largest_batch(
    plan: Plan, profile: Profile, *, capacity_bytes: Mapping[str, int] | None = None
) -> int:
    """Return the most samples a GPU with which a step of the plan fits on all GPUs, or 0.

    Staging buffers keep the plan's size, so larger batches read more of their cold rows in place.
    """

    def is_too_large(samples: int) -> bool:
        larger = replace(plan, batch_size=samples)
        peaks = peak_memory(larger, profile, capacity_bytes=capacity_bytes)
        return any(peak.free_bytes < 0 for peak in peaks)

    return bisect_left(range(1, 1 << 31), True, key=is_too_large)


def _loads(plan: Plan, profile: Profile) -> dict[str, _Load]:
    """Return the lookups, outputs and cached rows of each GPU in a step."""
    loads = {gpu.id: _Load() for gpu in plan.topology.gpus}
    returned: dict[tuple[object, ...], set[str]] = defaultdict(set)
    for shard in plan.shards:
        table = plan.tables_by_name[shard.table]
        # Samples of a step that each server of the shard handles.
        replicated = len(shard.devices) > 1
        samples = plan.batch_size * (1 if replicated else len(plan.topology.gpus))
        share = slice_lookup_share(profile[table.name], shard.rows)
        lookups = samples * table.lookups_per_sample * share
        width = shard.width
        key = table.dtype, width, table.optimizer, replicated
        with_bags, without = (output_vectors(table, n, lookups) for n in (samples, 0))
        return_bags = returned[shard.table, shard.cols, replicated]
        for device in shard.devices:
            if device not in loads:
                continue
            load = loads[device]
            if key not in load.arenas:
                load.arenas[key] = _Arena(width)
            arena = load.arenas[key]
            arena.lookups += lookups
            if shard.lookup in ("staged", "cached"):
                arena.cold_rows += shard.row_count
                entries = shard.staging_rows + shard.cache_rows
                arena.entries += entries
                load.entries += entries
                load.row_cache_bytes += entries * table.bytes_per_row(width)
            vectors = without if device in return_bags else with_bags
            return_bags.add(device)
            load.vectors += vectors
            load.output_bytes += vectors * width * _FLOAT_BYTES
    return loads


def _own_output_bytes(plan: Plan) -> float:
    """Return bytes of the vectors that a GPU receives from all servers, for its own samples."""
    total, seen = 0.0, set()
    for shard in plan.shards:
        server = "own" if len(shard.devices) > 1 else shard.devices[0]
        group = server, shard.table, shard.cols
        if group not in seen:
            seen.add(group)
            vectors = output_vectors(plan.tables_by_name[shard.table], plan.batch_size, 0.0)
            total += vectors * shard.width * _FLOAT_BYTES
    return total


def _phases(
    plan: Plan, base: dict[str, float], load: _Load, own: float, kind: DeviceKind
) -> tuple[PhaseMemory, ...]:
    """Return the phases of a step on a GPU that always holds `base`."""
    ranks, out, lookups = len(plan.topology.gpus), load.output_bytes, load.lookups
    gradients, dense, (forward, backward) = _dense_bytes(plan)
    base = base | dense
    if kind == "cuda":
        base["context"] = CONTEXT_BYTES
        base["communication"] = COMMUNICATORS * COMMUNICATOR_BYTES if ranks > 1 else 0
    ahead = plan.pipeline == "look-ahead"
    step = INDEX_BYTES_HELD_PER_LOOKUP * lookups + _OFFSET_BYTES * load.vectors
    in_flight = step * (STEPS_IN_FLIGHT if ahead else 1)
    # Ids that were received ahead wait for their step.
    ids = _ID_BYTES * lookups
    waiting = ids if ranks > 1 and ahead else 0.0
    preparing = max((arena.prepare_bytes(kind) for arena in load.arenas.values()), default=0.0)
    updating = max((arena.update_bytes() for arena in load.arenas.values()), default=0.0)
    # On a GPU, another stream prepares the next step meanwhile.
    beside = preparing + ids if kind == "cuda" and ahead else 0.0
    shared = {"indices": in_flight + waiting + beside}
    copied = ids if kind == "cuda" or ranks > 1 else 0.0
    found = {"indices": in_flight + waiting + preparing + copied, "dense gradients": gradients}
    phases: list[tuple[str, dict[str, float]]] = [("prepare", found)]
    if ranks > 1:
        # Ids as sent and as received; then as received, their order (int32), and reordered.
        exchanged = 2.5 * ids + (ids if kind == "cuda" else 0.0)
        sent = {"indices": in_flight - step * ahead + waiting, "exchange": exchanged}
        phases.insert(0, ("exchange of ids", sent | {"dense gradients": gradients}))
    phases.append(("lookup", shared | {"outputs": out}))
    if ranks > 1:
        # 16-bit numbers beside their float32 source and target.
        narrow = 0.0 if plan.exchange_dtype == "float32" else (out + own) / 2
        sums = {"outputs": out, "exchange": out + own + narrow}
        phases.append(("exchange of outputs", shared | sums))
    # A rank frees the outputs that it received after the forward pass. It keeps the outputs that it
    # sent, because the backward pass begins there.
    kept = {"outputs": out if ranks > 1 else 0.0}
    phases.append(("forward", shared | {"outputs": out, "exchange": own, "activations": forward}))
    phases.append(("backward", shared | kept | {"activations": backward}))
    held = kept | {"dense gradients": gradients}
    if ranks > 1:
        sums = {"exchange": 2 * own + out + narrow}
        phases.append(("exchange of gradients", shared | held | sums))
    joined = {"gradients of outputs": 2 * out + own, "sums of rows": updating}
    phases.append(("update", shared | held | joined))
    share = FRAGMENTATION_SHARE if kind == "cuda" else 0.0
    return tuple(_phase(name, base, parts, share) for name, parts in phases)


def _phase(
    name: str, base: Mapping[str, float], parts: Mapping[str, float], share: float
) -> PhaseMemory:
    rounded: dict[str, int] = defaultdict(int)
    for purpose, size in (*base.items(), *parts.items()):
        rounded[purpose] += round(size)
    if share:
        rounded["fragmentation"] = round(share * sum(parts.values()))
    return PhaseMemory(name, {purpose: size for purpose, size in rounded.items() if size})


def _dense_bytes(plan: Plan) -> tuple[float, dict[str, float], tuple[float, float]]:
    """Return bytes of dense layers: gradients, permanent memory, and the peak of each pass."""
    if not isinstance(plan.dense, DenseLayers):
        return 0.0, {}, (0.0, 0.0)
    network = DenseNetwork.of(plan.dense, plan.tables)
    memory = dense_memory(network, plan.batch_size, len(plan.topology.gpus))
    always: dict[str, float] = {
        "dense parameters": memory.parameter_bytes,
        "dense state": memory.state_bytes,
        "gradient buckets": memory.bucket_bytes,
    }
    return memory.gradient_bytes, always, pass_bytes(network, plan.batch_size)
