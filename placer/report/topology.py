"""The machine, and where its constants come from."""

from collections.abc import Callable
from operator import itemgetter

from placer.report import section as form
from placer.report.section import Column, Report, table_of
from placer.topology.devices import Gpu, Host
from placer.topology.topology import Topology
from placer.units import counted

MOST_DEVICES = 18


def topology_report(topology: Topology) -> Report:
    """Report devices with their budgets and bandwidths, and the source of each constant."""
    with_gpus, without = len(topology.hosts) - len(topology.servers), len(topology.servers)
    of_gpus = f"{counted(len(topology.gpus), 'GPU')} in {counted(with_gpus, 'host')}"
    headline = [of_gpus + (f", and {counted(without, 'host')} without GPUs" if without else "")]
    if topology.emulated:
        headline.append("The GPU is emulated: a part of host memory plays its memory.")

    def of_gpu(bandwidth: Callable[[str], float]) -> Callable[[Gpu | Host], float | None]:
        return lambda device: (bandwidth(device.id) or None) if isinstance(device, Gpu) else None

    def of_network(device: Gpu | Host) -> float | None:
        if device in topology.servers:
            return topology.server_bytes_per_s(device.id)
        return of_gpu(topology.network_bytes_per_s)(device)

    return Report(
        title=f"Topology {topology.name}",
        facts={"name": topology.name, "emulated": topology.emulated},
        headline=tuple(headline),
        sections=(
            table_of(
                (*topology.gpus, *topology.hosts),
                "devices",
                "Devices",
                Column("device", "device", of=lambda device: device.id),
                Column("host", "host", of=lambda device: getattr(device, "host", None)),
                Column("memory_bytes", "budget"),
                Column("memory_bytes_per_s", "memory", of=_memory_bytes_per_s),
                *(
                    Column(f"{link}_bytes_per_s", title, form.rate, of=of_gpu(bandwidth))
                    for link, title, bandwidth in (
                        ("host_link", "to host", topology.host_link_bytes_per_s),
                        ("peer", "to peers", topology.peer_bytes_per_s),
                        ("rack", "to rack", topology.rack_bytes_per_s),
                    )
                ),
                Column("network_bytes_per_s", "to network", form.rate, of=of_network),
                shown=MOST_DEVICES,
            ),
            table_of(
                topology.sources.items(),
                "sources",
                "Where the constants come from",
                Column("constant", "constant", of=itemgetter(0)),
                Column("source", "source", wraps=True, of=itemgetter(1)),
            ),
        ),
    )


def _memory_bytes_per_s(device: Gpu | Host) -> float:
    return device.hbm_bytes_per_s if isinstance(device, Gpu) else device.dram_bytes_per_s
