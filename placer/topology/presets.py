"""Make machines by name: ``8xh100``, ``2x8xa100-80``, ``1xt4``, ``big-basin``, ``zion+4xcpu``.

Every constant has its source: the vendor's figure, and the share of it that random reads and writes
of embedding rows reach. Shares without a measurement are assumptions, and `Topology.sources` says
so. Write a file (docs/topology.md) to use your own constants.
"""

import re

from placer.errors import TopologyError, did_you_mean
from placer.topology.devices import Gpu, Host, Link, TopologyFields
from placer.topology.kinds import (
    BETWEEN_RACKS,
    CPU_SERVER,
    GPU_KINDS,
    HOST_KINDS,
    NAMED,
    NETWORK_LATENCY_S,
    NVLINK_LATENCY_S,
    GpuKind,
    HostKind,
)

_MIB, _GIB = 2**20, 2**30

RESERVED_HBM_SHARE = 0.15
"""Share of HBM that presets reserve for dense weights, activations and the CUDA context.

TorchRec's planner reserves the same by default (`HeuristicalStorageReservation(0.15)`).
"""

RESERVED_DRAM_SHARE = 0.10
"""Share of host memory that presets reserve for the operating system and data loading."""

_GPUS_PER_HOST = 8
_MOST_HOSTS = 1024
_GRAMMAR = re.compile(r"(?:(?P<nodes>\d+)x)?(?P<count>\d+)x(?P<kind>[a-z][a-z0-9-]*)")
_CPU_SERVERS = re.compile(r"(?:(?P<count>\d+)x)?cpu")
_RACK = "gb200-nvl72"
"""Name of a rack of 36 Grace CPUs with 2 GPUs each, all on NVLink."""
_RACK_HOSTS, _RACK_HOST = 36, "2xgb200"
_SEVERAL_RACKS = re.compile(rf"(?P<racks>\d+)x{_RACK}")
_SERVERS = re.compile(rf"(?:(?P<nodes>\d+)x)?(?P<name>{'|'.join(NAMED)})")


def chip_called(name: str, memory_bytes: int) -> str:
    """Return the name in `GPU_KINDS` of a GPU, from its driver's name; empty if it has none.

    PCIe cards have none, because they are slower.

    >>> chip_called("NVIDIA A100-SXM4-80GB", 80 * 2**30)
    'a100-80'
    """
    words = re.split(r"[^a-z0-9]+", name.lower())
    kinds = [kind for kind in GPU_KINDS.values() if kind.name.partition("-")[0] in words]
    if not kinds or "pcie" in words:
        return ""
    return min(kinds, key=lambda kind: abs(kind.memory_bytes - memory_bytes)).name


def preset_help() -> str:
    """Describe the names that `machine_called` takes in one line, for errors and ``--help``."""
    return (
        f"[NODESx]COUNTxKIND, such as 8xh100 or 16x8xh100, with KIND one of "
        f"{', '.join(GPU_KINDS)}; or {', '.join([_RACK, *NAMED])} (also 2x{_RACK}, 4xbig-basin); "
        "each with servers without GPUs if you like, such as 8xh100+4xcpu"
    )


def machine_called(text: str) -> TopologyFields:
    """Return the machine of a preset's name.

    ``[NODESx]COUNTxKIND`` has COUNT GPUs in each of NODES hosts. A host with fewer than 8 GPUs has
    a proportional part of the memory, memory bandwidth and network of the 8-GPU server in
    `HOST_KINDS`. Embeddings get 85% of a GPU's memory and 90% of a host's. The ending ``+Nxcpu``
    adds N servers without GPUs, like `CPU_SERVER`.

    Raises TopologyError for any other text; the message lists the names. Also raises it if a count
    is out of range.
    """
    name = text.strip().lower()
    with_gpus, plus, cpus = name.partition("+")
    servers = _CPU_SERVERS.fullmatch(cpus) if plus else None
    if plus and not servers:
        raise TopologyError(f"{text!r}: write servers without GPUs as +4xcpu, not +{cpus}")
    spelled, racks = _spelled(with_gpus)
    match = _SERVERS.fullmatch(spelled) or _GRAMMAR.fullmatch(spelled)
    if match is None:
        from placer.config_file import SUFFIXES  # not above: pydantic and YAML load slowly

        raise TopologyError(
            f"unknown topology {text!r}; use {preset_help()}; auto for this machine; "
            f"or a file that ends in {', '.join(SUFFIXES)}{did_you_mean(text, NAMED)}"
        )
    machine = kinds(name)
    if machine is None:
        more = did_you_mean(match["kind"], GPU_KINDS)
        raise TopologyError(
            f"{text!r}: no GPU is called {match['kind']!r}; use {preset_help()}{more}"
        )
    gpu, host, count = machine
    if not 1 <= count <= _GPUS_PER_HOST:
        raise TopologyError(
            f"{text!r} puts {count} GPUs in a host, which holds 1 to {_GPUS_PER_HOST}; "
            f"for more write NODESxCOUNTxKIND, such as 2x8x{match['kind']}"
        )
    cpu_hosts = int(servers["count"] or 1) if servers else 0
    return _build(name, int(match["nodes"] or 1), count, gpu, host, racks, cpu_hosts)


def _spelled(name: str) -> tuple[str, int]:
    """Return the name with racks written as their hosts, and the number of racks."""
    several = _SEVERAL_RACKS.fullmatch(name)
    racks = int(several["racks"]) if several else 1
    is_rack = several or name == _RACK
    return (f"{racks * _RACK_HOSTS}x{_RACK_HOST}" if is_rack else name), racks


def kinds(text: str) -> tuple[GpuKind, HostKind, int] | None:
    """Return the GPU, the 8-GPU server and the GPUs per host of a preset; None if unknown."""
    name, _ = _spelled(text.strip().lower().partition("+")[0])
    servers = _SERVERS.fullmatch(name)
    if servers is not None:
        return *NAMED[servers["name"]], _GPUS_PER_HOST
    match = _GRAMMAR.fullmatch(name)
    if match is None or match["kind"] not in GPU_KINDS:
        return None
    return GPU_KINDS[match["kind"]], HOST_KINDS[match["kind"]], int(match["count"])


def _whole_mib(size_bytes: float) -> int:
    return int(size_bytes // _MIB) * _MIB


def cpu_server(id_: str = "cpu:0") -> Host:
    """Return a server without GPUs, less the memory that its system needs."""
    memory_bytes = int(CPU_SERVER.memory_bytes * (1 - RESERVED_DRAM_SHARE))
    return Host(id_, memory_bytes, CPU_SERVER.dram.bytes_per_s)


def _build(
    name: str, nodes: int, count: int, gpu: GpuKind, host: HostKind, racks: int, servers: int
) -> TopologyFields:
    if nodes < 1 or nodes + servers > _MOST_HOSTS:
        raise TopologyError(
            f"{name!r} has {nodes + servers} hosts; there can be 1 to {_MOST_HOSTS}"
        )
    if host.most_gpus is not None and nodes * count > racks * host.most_gpus:
        raise TopologyError(
            f"{name!r} has {nodes * count} GPUs; a rack of {gpu.name} joins up to "
            f"{host.most_gpus}; write 2x{_RACK} for two racks"
        )
    part = count / _GPUS_PER_HOST
    dram, network = host.dram.scaled(part), host.network.scaled(part)
    hbm_bytes = _whole_mib(gpu.memory_bytes * (1 - RESERVED_HBM_SHARE))
    dram_bytes = _whole_mib(host.memory_bytes * part * (1 - RESERVED_DRAM_SHARE))
    hosts = tuple(Host(f"host:{n}", dram_bytes, dram.bytes_per_s) for n in range(nodes))
    gpus = tuple(
        Gpu(f"gpu:{n}", hosts[n // count].id, hbm_bytes, gpu.hbm.bytes_per_s, chip=gpu.name)
        for n in range(nodes * count)
    )
    links = [Link(one.id, one.host, "pcie", gpu.pcie.bytes_per_s) for one in gpus]
    sources = {
        "gpu memory": f"{gpu.memory_bytes / _GIB:.4g} GiB of {gpu.name}, {gpu.memory_source}, "
        f"less {RESERVED_HBM_SHARE:.0%} for dense weights, activations and context",
        "hbm bandwidth": gpu.hbm.describe(),
        "pcie bandwidth": f"{gpu.pcie.describe()}; each GPU alone on its way to the host, "
        "halve it where two GPUs share a switch's uplink",
        "host memory": f"{host.memory_bytes / _GIB:.4g} GiB with 8 GPUs, {host.name}; "
        f"{count}/8 of it, less {RESERVED_DRAM_SHARE:.0%} for the system and data loading",
        "dram bandwidth": dram.describe(),
        "kernel launch": "5 us, usual for a launch and its gaps; an assumption",
    }
    if gpu.nvlink is not None:
        speed = gpu.nvlink.bytes_per_s, NVLINK_LATENCY_S
        links += [Link(one.id, one.host, "nvlink", *speed) for one in gpus]
        sources["nvlink bandwidth"] = gpu.nvlink.describe()
    latency_s = host.network_latency_s
    if racks > 1 or (servers and host.most_gpus):  # The network joins hosts within each rack.
        in_rack, speed = nodes // racks, (network.bytes_per_s, latency_s)
        links += [
            Link(one.id, f"rack:{n // in_rack}", "rack", *speed) for n, one in enumerate(hosts)
        ]
        sources["rack bandwidth"] = network.describe()
        network, latency_s = BETWEEN_RACKS.scaled(part), NETWORK_LATENCY_S
    if nodes + servers > 1:
        speed = network.bytes_per_s, latency_s
        links += [Link(one.id, "network", "network", *speed) for one in hosts]
        sources["network bandwidth"] = network.describe()
    if servers:
        cpu_hosts = tuple(cpu_server(f"host:{nodes + n}") for n in range(servers))
        port = CPU_SERVER.network
        speed = port.bytes_per_s, NETWORK_LATENCY_S
        links += [Link(one.id, "network", "network", *speed) for one in cpu_hosts]
        hosts += cpu_hosts
        sources |= {
            "server memory": f"{CPU_SERVER.memory_bytes / _GIB:.4g} GiB of a {CPU_SERVER.name}, "
            f"less {RESERVED_DRAM_SHARE:.0%} for the system",
            "server dram bandwidth": CPU_SERVER.dram.describe(),
            "server network bandwidth": port.describe(),
        }
    return TopologyFields(name, gpus, hosts, tuple(links), sources=sources)
