"""Estimate the time to move from one plan to another, by the bytes on each link."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from placer.errors import TopologyError
from placer.plan.diff import Home, PlanDiff
from placer.topology.devices import BLOCK_BYTES
from placer.topology.topology import Topology

Resource = tuple[str, str]
"""A device, and one of its memories, or one of its links with a direction."""


@dataclass(frozen=True, slots=True)
class Migration:
    """The bytes that move, and the time that this takes."""

    moved_bytes: int  # Weights and optimizer state to copy to other memory.
    seconds: float  # Time of the slowest link; all work at the same time.
    waits_for: str  # Slowest link or memory: ``gpu:3 pcie out``; empty if nothing moves.


def break_even_steps(migration_s: float, before_s: float, after_s: float) -> float | None:
    """Return the number of steps until faster steps make up for a migration; None if never.

    >>> break_even_steps(6.0, 5.0, 2.0), break_even_steps(6.0, 2.0, 5.0), break_even_steps(0, 2, 5)
    (2.0, None, 0.0)
    """
    if not migration_s:
        return 0.0
    return migration_s / (before_s - after_s) if before_s > after_s else None


def migration(diff: PlanDiff) -> Migration:
    """Return the migration from a difference's older plan to its newer plan.

    A GPU and its host exchange rows over PCIe. Two GPUs of a host use NVLink, or PCIe without it.
    Hosts use the network; their GPUs also use PCIe. DRAM is read and written at its bandwidth.
    Devices are matched by id. Devices that the newer machine lacks are taken to be readable, for
    example as a checkpoint. New tables and reshaped tables do not move.

    Raises TopologyError if rows move between hosts and one of them has no network link.
    """
    load: dict[Resource, float] = defaultdict(float)
    speed: dict[Resource, float] = {}
    for move in diff.moves:
        if move.target is None or not move.moved_bytes:
            continue
        ends = _End.of(diff.old.topology, move.source), _End.of(diff.new.topology, move.target)
        for resource, bytes_per_s in _path(*ends):
            load[resource] += move.moved_bytes
            speed[resource] = bytes_per_s
    times = {resource: load[resource] / speed[resource] for resource in load}
    slowest = max(times, key=lambda resource: (times[resource], resource), default=None)
    if slowest is None:
        return Migration(0, 0.0, "")
    return Migration(diff.moved_bytes, times[slowest], " ".join(slowest))


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a move. `gpu` is the GPU with the HBM, or None for a host's DRAM or drive."""

    topology: Topology
    host: str
    gpu: str | None
    on_drive: bool

    @classmethod
    def of(cls, topology: Topology, home: Home) -> "_End":
        gpu = topology.gpus_by_id.get(home.device)
        host = home.device if gpu is None else gpu.host
        in_hbm = gpu is not None and home.memory == "hbm"
        return cls(topology, host, home.device if in_hbm else None, home.memory == "ssd")


def _path(source: _End, target: _End) -> Iterator[tuple[Resource, float]]:
    """Yield the links and host memories that a move crosses, with their bandwidths."""
    same_host = source.host == target.host
    peers = same_host and source.gpu is not None and target.gpu is not None
    for end, way in ((source, "out"), (target, "in")):
        drive = end.topology.hosts_by_id[end.host].drive
        if end.on_drive and drive is not None:
            blocks_per_s = drive.reads_per_s if way == "out" else drive.writes_per_s
            yield (end.host, "ssd"), blocks_per_s * BLOCK_BYTES
        if end.gpu is None:
            yield (end.host, "dram"), end.topology.hosts_by_id[end.host].dram_bytes_per_s
        else:
            nvlink = end.topology.link_of(end.gpu, "nvlink") if peers else None
            link = nvlink or end.topology.link_of(end.gpu, "pcie")
            assert link is not None, "a topology links each GPU to its host"
            yield (end.gpu, f"{link.kind} {way}"), link.bytes_per_s
        if not same_host:
            network = end.topology.link_of(end.host, "network")
            if network is None:
                raise TopologyError(
                    f"rows move from {source.host} to {target.host}, but {end.host} of "
                    f"{end.topology.name!r} has no network link; add one to the topology"
                )
            yield (end.host, f"network {way}"), network.bytes_per_s
