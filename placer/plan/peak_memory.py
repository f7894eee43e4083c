"""Memory of each GPU, phase by phase of a training step, and the batch that fits.

What a plan's `device_memory` charges to a device is there at all times or reserved. This module
says what a step has at once: arrays of a batch's lookups come and go, pooled rows wait for dense
layers, and gradients come back while the copies of others are still there. It follows the executor
and `placer.training.Trainer`, one process for each GPU. benchmarks/step_memory.py holds it to what
PyTorch's allocator gives out.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from placer.dense import DenseLayers, DenseNetwork, dense_memory
from placer.dense.network import pass_bytes
from placer.errors import ProblemError
from placer.plan.buffers import (
    INDEX_BYTES_HELD_PER_LOOKUP,
    STEPS_IN_FLIGHT,
    SUM_BYTES_PER_LOOKUP_AND_COLUMN,
    output_vectors,
    slice_lookup_share,
)
from placer.plan.memory import ENTRY_BYTES_HELD, ENTRY_BYTES_PASSING, device_memory
from placer.plan.plan import Plan
from placer.profile.profile import Profile

DeviceKind = Literal["cuda", "cpu"]

CONTEXT_BYTES = 512 << 20
"""Of a CUDA context with PyTorch's kernels loaded: 0.4 to 0.6 GiB on recent GPUs, as nvidia-smi
shows it for a process that has allocated nothing. An assumption; see docs/memory.md."""

COMMUNICATOR_BYTES = 32 * 2 * (4 << 20)
"""Of an NCCL communicator: 32 channels with a buffer each way, of 4 MiB, the default of
NCCL_BUFFSIZE (NCCL's user guide, environment variables). Most machines open fewer channels."""

COMMUNICATORS = 3
"""The training's exchange, that of batches sent ahead, and DistributedDataParallel's."""

FRAGMENTATION_SHARE = 0.05
"""Of what comes and goes on a GPU: PyTorch's caching allocator rounds blocks up to 512 bytes, and
segments of 10 MiB and more to 2 MiB (c10/cuda/CUDACachingAllocator.cpp). An assumption."""

_ID_BYTES, _FLOAT_BYTES, _OFFSET_BYTES = 8, 4, 8
_ENTRY_BYTES_PASSING: Mapping[DeviceKind, int] = {"cpu": 31, "cuda": ENTRY_BYTES_PASSING}
_SORT_BYTES: Mapping[DeviceKind, int] = {"cpu": 13, "cuda": 20}
"""Of a lookup, beyond those held, while lookups are sorted; see `placer.plan.memory`."""

_STAGING_BYTES = 15
"""Of a lookup that may be of a staged or cached row, besides."""


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """What a GPU has at once in one phase of a step, by purpose, in bytes."""

    name: str
    parts: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """A GPU's memory in each phase of a step."""

    device: str
    capacity_bytes: int  # Of the card, or what else the step has to fit in.
    phases: tuple[PhaseMemory, ...]  # In the order of a step.

    @property
    def fullest(self) -> PhaseMemory:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.total_bytes)

    @property
    def peak_bytes(self) -> int:
        """Bytes of that phase."""
        return self.fullest.total_bytes

    @property
    def free_bytes(self) -> int:
        """What is left then; negative where the step does not fit."""
        return self.capacity_bytes - self.peak_bytes


@dataclass(slots=True)
class _Arena:
    """Rows of one width and optimizer on a GPU, and a step's reads of them."""

    width: int
    lookups: float = 0.0
    cold_rows: int = 0
    entries: int = 0

    def prepare_bytes(self, kind: DeviceKind) -> float:
        """Return what comes and goes while its lookups are prepared."""
        staged = _STAGING_BYTES * min(self.lookups, self.cold_rows) if self.entries else 0.0
        return self.lookups * _SORT_BYTES[kind] + staged + self.entries * _ENTRY_BYTES_PASSING[kind]

    def update_bytes(self) -> float:
        """Return what comes and goes while its rows are updated."""
        sums = max(float(_FLOAT_BYTES), self.width * SUM_BYTES_PER_LOOKUP_AND_COLUMN)
        return self.lookups * (_FLOAT_BYTES + sums)


@dataclass(slots=True)
class _Load:
    """What a GPU serves in a step; `row_cache_bytes` are of weights and state in row caches."""

    arenas: dict[object, _Arena] = field(default_factory=dict)
    vectors: float = 0.0
    output_bytes: float = 0.0
    row_cache_bytes: int = 0

    @property
    def lookups(self) -> float:
        """Of all arenas."""
        return sum(arena.lookups for arena in self.arenas.values())

    @property
    def entries(self) -> int:
        """Of all row caches."""
        return sum(arena.entries for arena in self.arenas.values())


def peak_memory(
    plan: Plan,
    profile: Profile,
    *,
    device_kind: DeviceKind = "cuda",
    capacity_bytes: Mapping[str, int] | None = None,
) -> tuple[DevicePeak, ...]:
    """Return memory of each GPU in each phase of a training step.

    The profile says how the lookups of a table that is divided by rows are shared. A ``cuda``
    device has a context, communication buffers and an allocator that fragments; where a CPU plays
    it, what PyTorch's allocator gives out is asked. `capacity_bytes` are those of the cards: by
    default of the plan, and what its dense part took of it. Raises ProblemError if a table of the
    plan has no profile.

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
    """Return the most samples a GPU with which a step of this plan fits everywhere; 0 if none does.

    The rows that the plan makes room for stay as they are: larger batches read more of their
    staged rows in place.
    """

    def fits(samples: int) -> bool:
        larger = replace(plan, batch_size=samples)
        peaks = peak_memory(larger, profile, capacity_bytes=capacity_bytes)
        return all(peak.free_bytes >= 0 for peak in peaks)

    if not fits(1):
        return 0
    most = 1
    while most < 1 << 30 and fits(2 * most):
        most *= 2
    step = most // 2
    while step:
        most += step if fits(most + step) else 0
        step //= 2
    return most


def _loads(plan: Plan, profile: Profile) -> dict[str, _Load]:
    """Return what each GPU serves in a step."""
    loads = {gpu.id: _Load() for gpu in plan.topology.gpus}
    returned: set[tuple[object, ...]] = set()
    for shard in plan.shards:
        table = plan.tables_by_name[shard.table]
        # Of a step, whose lookups each server of the shard handles.
        samples = plan.batch_size * (1 if len(shard.devices) > 1 else len(plan.topology.gpus))
        share = slice_lookup_share(profile[table.name], shard.rows)
        lookups = samples * table.lookups_per_sample * share
        for device in shard.devices:
            if device not in loads:
                continue
            load = loads[device]
            key = table.dtype, shard.width, table.optimizer, len(shard.devices) > 1
            arena = load.arenas.setdefault(key, _Arena(shard.width))
            arena.lookups += lookups
            if shard.lookup in ("staged", "cached"):
                arena.cold_rows += shard.row_count
                entries = shard.staging_rows + shard.cache_rows
                arena.entries += entries
                load.row_cache_bytes += entries * table.bytes_per_row(shard.width)
            group = device, shard.table, shard.cols, len(shard.devices) > 1
            vectors = output_vectors(table, 0 if group in returned else samples, lookups)
            returned.add(group)
            load.vectors += vectors
            load.output_bytes += vectors * shard.width * _FLOAT_BYTES
    return loads


def _own_output_bytes(plan: Plan) -> float:
    """Return bytes of the vectors that a GPU's own samples get of all servers."""
    total, seen = 0.0, set()
    for shard in plan.shards:
        servers = ["own"] if len(shard.devices) > 1 else list(shard.devices)
        table = plan.tables_by_name[shard.table]
        for server in servers:
            group = server, shard.table, shard.cols
            if group not in seen:
                seen.add(group)
                vectors = output_vectors(table, plan.batch_size, 0.0)
                total += vectors * shard.width * _FLOAT_BYTES
    return total


def _phases(
    plan: Plan, base: dict[str, float], load: _Load, own: float, kind: DeviceKind
) -> tuple[PhaseMemory, ...]:
    """Return the phases of a step of a GPU that has `base` at all times."""
    ranks, out, lookups = len(plan.topology.gpus), load.output_bytes, load.lookups
    gradients, dense, (forward, backward) = _dense_bytes(plan)
    base = base | dense
    if kind == "cuda":
        base["context"] = CONTEXT_BYTES
        base["communication"] = COMMUNICATORS * COMMUNICATOR_BYTES if ranks > 1 else 0
    ahead = plan.pipeline == "look-ahead"
    step = INDEX_BYTES_HELD_PER_LOOKUP * lookups + _OFFSET_BYTES * load.vectors
    in_flight = step * (STEPS_IN_FLIGHT if ahead else 1)
    # Ids that have come from other ranks wait for their turn; on a GPU a batch is a copy.
    ids = _ID_BYTES * lookups
    waiting = ids if ranks > 1 and ahead else 0.0
    preparing = max((arena.prepare_bytes(kind) for arena in load.arenas.values()), default=0.0)
    updating = max((arena.update_bytes() for arena in load.arenas.values()), default=0.0)
    # A stream of its own prepares the next step meanwhile; on a CPU nothing is beside a step.
    beside = preparing + ids if kind == "cuda" and ahead else 0.0
    shared = {"indices": in_flight + waiting + beside}
    copied = ids if kind == "cuda" or ranks > 1 else 0.0
    found = {"indices": in_flight + waiting + preparing + copied, "dense gradients": gradients}
    phases: list[tuple[str, dict[str, float]]] = [("prepare", found)]
    if ranks > 1:
        # As sent and as they came; then as they came, their new order (int32), and in that order.
        exchanged = 2.5 * ids + (ids if kind == "cuda" else 0.0)
        sent = {"indices": in_flight - step * ahead + waiting, "exchange": exchanged}
        phases.insert(0, ("exchange of ids", sent | {"dense gradients": gradients}))
    phases.append(("lookup", shared | {"outputs": out}))
    if ranks > 1:
        # Numbers of 16 bits beside those that they are made from and become.
        narrow = 0.0 if plan.exchange_dtype == "float32" else (out + own) / 2
        sums = {"outputs": out, "exchange": out + own + narrow}
        phases.append(("exchange of outputs", shared | sums))
    # The outputs that a rank's samples got are let go of with the forward pass. Those that it sent
    # are not, for the backward pass begins at them.
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
    """Return gradients of dense layers, what they have at all times, and the most in each pass."""
    if not isinstance(plan.dense, DenseLayers):
        return 0.0, {}, (0.0, 0.0)
    network = DenseNetwork.of(plan.dense, plan.tables)
    memory = dense_memory(network, plan.batch_size, len(plan.topology.gpus))
    always = {
        "dense parameters": memory.parameter_bytes,
        "dense state": memory.state_bytes,
        "gradient buckets": memory.bucket_bytes,
    }
    return (
        float(memory.gradient_bytes),
        {purpose: float(size) for purpose, size in always.items()},
        pass_bytes(network, plan.batch_size),
    )
