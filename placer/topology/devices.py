"""Describe the parts of a machine: GPUs, hosts and links; and check that they fit together."""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from placer.errors import TopologyError
from placer.tables import Count

LinkKind = Literal["pcie", "nvlink", "rack", "network", "socket"]
Rate = Annotated[float, Gt(0)]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that serves lookups from its own memory (HBM) and over its link from DRAM."""

    # Its id, such as ``gpu:3``, and the id of its host, such as ``host:0``.
    id: str
    host: str
    # HBM for embeddings, without what is reserved for the rest of the model.
    memory_bytes: int
    # Effective bandwidth of random row reads and writes, measured or derated.
    hbm_bytes_per_s: float
    launch_s: float = 5e-6  # Time of one kernel launch.
    # Name in `placer.topology.kinds.GPU_KINDS`, such as ``h100``, by which its arithmetic rate is
    # known. Empty if unknown; only dense layers need it.
    chip: str = ""


BLOCK_BYTES = 4096
"""Bytes of a block, which a drive reads or writes at a time."""


@dataclass(frozen=True, slots=True)
class Drive:
    """A host's SSD, or several as one."""

    memory_bytes: Count  # Bytes for embeddings.
    # Random blocks of `BLOCK_BYTES` that it reads or writes a second, with many parallel requests.
    # The defaults are for one data-centre drive on PCIe 4.0, rounded down from data sheets of 2021
    # to 2023 (1.0 to 1.1 million reads, 180 to 200 thousand writes).
    reads_per_s: Rate = 1.0e6
    writes_per_s: Rate = 180e3

    def faster(self, times: float) -> "Drive":
        """Return a drive with `times` as many reads and writes a second."""
        return Drive(self.memory_bytes, self.reads_per_s * times, self.writes_per_s * times)

    def row_s(self, row_bytes: float) -> float:
        """Return the seconds to read a row of `row_bytes` bytes and to write it back later."""
        blocks = -(-row_bytes // BLOCK_BYTES)
        return blocks * (1 / self.reads_per_s + 1 / self.writes_per_s)


@dataclass(frozen=True, slots=True)
class Host:
    """A host: memory that its GPUs share, and CPUs that can pool rows.

    A host without GPUs is a server: its CPUs pool its rows and send the sums over the network.
    """

    id: str
    memory_bytes: int  # DRAM for embeddings of all GPUs of the host together.
    # Effective bandwidth of random row reads and writes, for all GPUs together.
    dram_bytes_per_s: float
    drive: Drive | None = None  # Drive for cold rows, if any.


@dataclass(frozen=True, slots=True)
class Link:
    """A full-duplex link between two ends: bytes per second each way.

    `a` is the GPU or host that the link belongs to, and `b` its other end. ``pcie`` joins a GPU to
    its host. ``nvlink`` joins a GPU to all GPUs of its host, and `b` is the host. ``rack`` joins a
    host to the other hosts of its rack, and `b` is a name such as ``rack:0``. ``network`` joins a
    host to all hosts, and `b` is ``network``.
    """

    a: str
    b: str
    kind: LinkKind
    bytes_per_s: Rate
    latency_s: Annotated[float, Ge(0)] = 0.0


@dataclass(frozen=True)
class TopologyFields:
    """Fields of a machine from presets, files or measurement; see `placer.Topology`."""

    name: str
    gpus: tuple[Gpu, ...]
    hosts: tuple[Host, ...]
    links: tuple[Link, ...]
    emulated: bool = False
    sources: dict[str, str] = field(default_factory=dict)


def check_devices(machine: TopologyFields) -> None:
    """Raise if a GPU has no host, a capacity is negative, or a bandwidth is not positive."""
    hosts = {host.id for host in machine.hosts}
    for gpu in machine.gpus:
        if gpu.host not in hosts:
            raise TopologyError(
                f"{gpu.id} is attached to {gpu.host!r}, which is none of {sorted(hosts)[:12]}"
            )
        if gpu.memory_bytes < 0 or gpu.hbm_bytes_per_s <= 0:
            raise TopologyError(f"{gpu.id} needs memory and a positive HBM bandwidth")
    for host in machine.hosts:
        if host.memory_bytes < 0 or host.dram_bytes_per_s <= 0:
            raise TopologyError(f"{host.id} needs memory and a positive DRAM bandwidth")
        drive = host.drive
        if drive and (drive.memory_bytes < 0 or min(drive.reads_per_s, drive.writes_per_s) <= 0):
            raise TopologyError(f"the drive of {host.id} needs bytes and positive rates")


def check_links(machine: TopologyFields, known: Set[str]) -> None:
    """Raise if a link joins unknown devices, or devices that its kind cannot join."""
    homes = {gpu.id: gpu.host for gpu in machine.gpus}
    joined: set[tuple[str, str]] = set()
    for link in machine.links:
        named = f"link {link.a} – {link.b}"
        for end in (link.a,) if link.kind == "rack" else (link.a, link.b):
            if end not in known:
                raise TopologyError(
                    f"{named} ({link.kind}): no device is called {end!r}; "
                    f"there are {', '.join(sorted(known)[:12])}"
                )
        if link.bytes_per_s <= 0:
            raise TopologyError(f"{named} needs a positive bandwidth, not {link.bytes_per_s}")
        if link.kind == "socket":
            continue
        if link.kind == "rack":
            joins, is_right = "a host to a rack such as rack:0", link.b.startswith("rack:")
        elif link.kind == "network":
            joins, is_right = "a host to network", link.b == "network"
        else:
            joins, is_right = "a GPU to its own host", link.b == homes.get(link.a)
        if not is_right or (link.kind in ("rack", "network") and link.a in homes):
            raise TopologyError(f"{named}: a {link.kind} link joins {joins}")
        if (link.a, link.kind) in joined:
            raise TopologyError(
                f"{link.a} has two {link.kind} links; add their bandwidths up in one"
            )
        joined.add((link.a, link.kind))
    servers = [host.id for host in machine.hosts if host.id not in homes.values()]
    for host in machine.hosts if servers else ():
        if (host.id, "network") not in joined:
            raise TopologyError(
                f"{host.id} has no network link, but {servers[0]}, without GPU, serves rows over "
                f"the network: add {{a: {host.id}, b: network, kind: network}}"
            )
