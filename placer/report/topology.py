"""The machine, and where its constants come from."""

from placer.report import section as form
from placer.report.section import Column, Report, Row, Section
from placer.topology.topology import Topology

MOST_DEVICES = 18

_DEVICE_COLUMNS = (
    Column("device", "device"),
    Column("host", "host"),
    Column("memory_bytes", "budget", form.size),
    Column("memory_bytes_per_s", "memory", form.rate),
    Column("host_link_bytes_per_s", "to host", form.rate),
    Column("peer_bytes_per_s", "to peers", form.rate),
    Column("rack_bytes_per_s", "to rack", form.rate),
    Column("network_bytes_per_s", "to network", form.rate),
)
_SOURCE_COLUMNS = (Column("constant", "constant"), Column("source", "source", wraps=True))


def topology_report(topology: Topology) -> Report:
    """Devices with their budgets and bandwidths, and the source of each constant."""
    rows = _device_rows(topology)
    sources: tuple[Row, ...] = tuple(
        {"constant": constant, "source": source} for constant, source in topology.sources.items()
    )
    gpus, hosts = len(topology.gpus), len(topology.hosts)
    headline = f"{gpus} GPU{'s'[: gpus > 1]} in {hosts} host{'s'[: hosts > 1]}"
    return Report(
        title=f"Topology {topology.name}",
        facts={"name": topology.name, "emulated": topology.emulated},
        headline=(headline, "The GPU is emulated: a part of host memory plays its memory.")
        if topology.emulated
        else (headline,),
        sections=(
            Section(
                "devices",
                "Devices",
                _DEVICE_COLUMNS,
                rows,
                shown=MOST_DEVICES if len(rows) > MOST_DEVICES else None,
            ),
            Section("sources", "Where the constants come from", _SOURCE_COLUMNS, sources),
        ),
    )


def _device_rows(topology: Topology) -> tuple[Row, ...]:
    rows: list[Row] = [
        {
            "device": gpu.id,
            "host": gpu.host,
            "memory_bytes": gpu.memory_bytes,
            "memory_bytes_per_s": gpu.hbm_bytes_per_s,
            "host_link_bytes_per_s": topology.host_link_bytes_per_s(gpu.id),
            "peer_bytes_per_s": topology.peer_bytes_per_s(gpu.id),
            "rack_bytes_per_s": topology.rack_bytes_per_s(gpu.id) or None,
            "network_bytes_per_s": topology.network_bytes_per_s(gpu.id) or None,
        }
        for gpu in topology.gpus
    ]
    rows += [
        {
            "device": host.id,
            "host": None,
            "memory_bytes": host.memory_bytes,
            "memory_bytes_per_s": host.dram_bytes_per_s,
            "host_link_bytes_per_s": None,
            "peer_bytes_per_s": None,
            "rack_bytes_per_s": None,
            "network_bytes_per_s": None,
        }
        for host in topology.hosts
    ]
    return tuple(rows)
