"""Estimate the time to move from one plan to another, by the bytes on each link."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from placer.errors import TopologyError
from placer.plan.diff import Home, PlanDiff, host_of
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


def migration(diff: PlanDiff, *, in_files: bool = False) -> Migration:
    """Return the migration from a difference's older plan to its newer plan.

    A GPU and its host exchange rows over PCIe. Two GPUs of a host use NVLink, or PCIe without it.
    Hosts use the network; their GPUs also use PCIe. DRAM is read and written at its bandwidth.
    Devices are matched by id. Devices that the newer machine lacks are taken to be readable, for
    example as a checkpoint. New tables and reshaped tables do not move.

    Raises TopologyError if rows move between hosts and one of them has no network link; with
    `in_files`, rows of that host move in files, and only the other host's links take time.
    """
    load: dict[Resource, float] = defaultdict(float)
    speed: dict[Resource, float] = {}
    for move in diff.moves:
        if move.target is None or not move.moved_bytes:
            continue
        ends = (diff.old.topology, move.source), (diff.new.topology, move.target)
        for resource, bytes_per_s in _path(*ends, in_files):
            load[resource] += move.moved_bytes
            speed[resource] = bytes_per_s
    times = {resource: load[resource] / speed[resource] for resource in load}
    slowest = max(times, key=lambda resource: (times[resource], resource), default=None)
    if slowest is None:
        return Migration(0, 0.0, "")
    return Migration(diff.moved_bytes, times[slowest], " ".join(slowest))


End = tuple[Topology, Home]


def _path(source: End, target: End, in_files: bool) -> Iterator[tuple[Resource, float]]:
    """Yield the links and host memories that a move crosses, with their bandwidths."""
    hosts = host_of(*source), host_of(*target)
    same_host = hosts[0] == hosts[1]
    peers = same_host and source[1].memory == target[1].memory == "hbm"
    for (topology, home), host, way in zip((source, target), hosts, ("out", "in"), strict=True):
        drive = topology.hosts_by_id[host].drive
        if home.memory == "ssd" and drive is not None:
            blocks_per_s = drive.reads_per_s if way == "out" else drive.writes_per_s
            yield (host, "ssd"), blocks_per_s * BLOCK_BYTES
        if home.memory != "hbm":
            yield (host, "dram"), topology.hosts_by_id[host].dram_bytes_per_s
        else:
            nvlink = topology.link_of(home.device, "nvlink") if peers else None
            link = nvlink or topology.link_of(home.device, "pcie")
            assert link is not None, "a topology links each GPU to its host"
            yield (home.device, f"{link.kind} {way}"), link.bytes_per_s
        if not same_host:
            network = topology.link_of(host, "network")
            if network is None and in_files:
                continue
            if network is None:
                raise TopologyError(
                    f"rows move from {hosts[0]} to {hosts[1]}, but {host} of "
                    f"{topology.name!r} has no network link; add one to the topology"
                )
            yield (host, f"network {way}"), network.bytes_per_s
