"""What makes a machine of devices and links: see `placer.Topology`."""

from collections.abc import Set

from placer.errors import TopologyError
from placer.topology.devices import TopologyFields


def check_devices(machine: TopologyFields) -> None:
    """Raise if a GPU is on no host, or a capacity or bandwidth is not positive."""
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
    """Raise if a link joins what is not known, or devices that it cannot join."""
    for link in machine.links:
        ends = (link.a,) if link.kind == "rack" else (link.a, link.b)
        for end in ends:
            if end not in known:
                raise TopologyError(
                    f"link {link.a} – {link.b} ({link.kind}): no device is called {end!r}; "
                    f"there are {', '.join(sorted(known)[:12])}"
                )
        if link.bytes_per_s <= 0:
            raise TopologyError(
                f"link {link.a} – {link.b} needs a positive bandwidth, not {link.bytes_per_s}"
            )
    _check_link_ends(machine)
    with_gpus = {gpu.host for gpu in machine.gpus}
    servers = [host.id for host in machine.hosts if host.id not in with_gpus]
    on_network = {link.a for link in machine.links if link.kind == "network"}
    for host in machine.hosts if servers else ():
        if host.id not in on_network:
            raise TopologyError(
                f"{host.id} has no network link, but {servers[0]}, without GPU, serves rows over "
                f"the network: add {{a: {host.id}, b: network, kind: network}}"
            )


def _check_link_ends(machine: TopologyFields) -> None:
    homes = {gpu.id: gpu.host for gpu in machine.gpus}
    joined: set[tuple[str, str]] = set()
    for link in machine.links:
        if link.kind == "socket":
            continue
        if link.kind == "rack":
            joins, is_right = "a host to a rack such as rack:0", link.b.startswith("rack:")
        elif link.kind == "network":
            joins, is_right = "a host to network", link.b == "network"
        else:
            joins, is_right = "a GPU to its own host", link.b == homes.get(link.a)
        if not is_right or (link.kind in ("rack", "network") and link.a in homes):
            raise TopologyError(f"link {link.a} – {link.b}: a {link.kind} link joins {joins}")
        if (link.a, link.kind) in joined:
            raise TopologyError(
                f"{link.a} has two {link.kind} links; add their bandwidths up in one"
            )
        joined.add((link.a, link.kind))
