"""The machines that `placer sweep` compares, with what their dense layers and CPUs do."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from cost_models.dense import CPU_FLOPS, GPU_FLOPS, FlopRate
from placer.errors import TopologyError
from placer.topology.detect import host_memory_bytes
from placer.topology.devices import Gpu, Host, Link
from placer.topology.kinds import CPU_SERVER
from placer.topology.presets import RESERVED_DRAM_SHARE, kinds
from placer.topology.topology import Topology

_CPU_SERVERS = re.compile(r"(?:(?P<count>\d+)x)?cpu")
_MOST_SERVERS = 1024

_EMULATED_SHARE = 0.25
"""Of this machine's memory: what an emulated GPU has where nobody says."""

_PRODUCT = (1600, 512, 512)
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Platform:
    """A machine, or several CPU servers.

    Attributes
    ----------
    topology : Topology or None
        None for CPU servers.
    gpu, cpu : FlopRate
        Of one GPU, which is meaningless for CPU servers, and of the CPUs of one host.
    server : Host
        One host.
    sources : mapping
        Where the rates come from, beside `Topology.sources`.
    network_bytes_per_s : float or None
        Of one host, each way; None where it is not known.
    servers : int
        Number of CPU servers, trainers and parameter servers together; 1 for other machines.
    """

    name: str
    topology: Topology | None
    gpu: FlopRate
    cpu: FlopRate
    server: Host
    sources: dict[str, str]
    network_bytes_per_s: float | None = None
    servers: int = 1


def cpu_server() -> Host:
    """Return the memory of the dual-socket server of Acun et al."""
    memory_bytes = int(CPU_SERVER.memory_bytes * (1 - RESERVED_DRAM_SHARE))
    return Host("cpu:0", memory_bytes, CPU_SERVER.dram.bytes_per_s)


def platform(text: str, *, hbm: str | int | None = None, dram: str | int | None = None) -> Platform:
    """Make the machine of a name: a preset of topologies, ``Nxcpu`` servers, or ``auto``.

    `hbm` and `dram` are the memory of each GPU and of each host that embeddings may take.

    Raises
    ------
    TopologyError
        If it is none of these.
    """
    name = text.strip().lower()
    servers = _CPU_SERVERS.fullmatch(name)
    if servers is not None:
        return _cpu_servers(name, int(servers["count"] or 1), dram)
    if name == "auto":
        return _this_machine(hbm, dram)
    known = kinds(name)
    if known is None:
        raise TopologyError(
            f"{text!r} is no machine whose FLOP rates are known; name a preset (`placer topology "
            "--help` lists them), cpu or 16xcpu for dual-socket servers, or auto"
        )
    gpu_kind, host_kind, per_host = known
    topology = Topology.parse(name, hbm=hbm, dram=dram)
    rates = GPU_FLOPS[gpu_kind.name]
    if "float32" not in rates:
        raise TopologyError(
            f"{text!r}: nobody states what {gpu_kind.name} does in float32, in which a sweep's "
            "dense layers are"
        )
    gpu = rates["float32"]
    whole = CPU_FLOPS["zion" if name.endswith("zion") else gpu_kind.name]
    part = per_host / 8
    cpu = FlopRate(whole.stated_per_s * part, whole.share, whole.source)
    network = host_kind.network.scaled(part)
    sources = {
        "GPU float32": gpu.describe(),
        "CPU float32": cpu.describe(),
        "network bandwidth": network.describe(),
    }
    return Platform(name, topology, gpu, cpu, topology.hosts[0], sources, network.bytes_per_s)


def _cpu_servers(name: str, count: int, dram: str | int | None) -> Platform:
    if not 1 <= count <= _MOST_SERVERS:
        raise TopologyError(f"{name!r} has {count} servers; there can be 1 to {_MOST_SERVERS}")
    cpu, network = CPU_FLOPS["dual-socket"], CPU_SERVER.network
    server = server_topology(cpu_server()).with_memory(dram=dram).hosts[0]
    sources = {
        "CPU float32": cpu.describe(),
        "dram bandwidth": CPU_SERVER.dram.describe(),
        "network bandwidth": network.describe(),
    }
    return Platform(name, None, cpu, cpu, server, sources, network.bytes_per_s, count)


def server_topology(server: Host) -> Topology:
    """Return one host that serves lookups by itself.

    A topology has a GPU; here it is one without memory, which stands for the CPUs that take the
    pooled rows, at the bandwidth of the host's memory.
    """
    gpu = Gpu("gpu:0", server.id, 0, server.dram_bytes_per_s, 0.0)
    link = Link("gpu:0", server.id, "pcie", server.dram_bytes_per_s)
    return Topology("server", (gpu,), (server,), (link,), emulated=True)


def _this_machine(hbm: str | int | None, dram: str | int | None) -> Platform:
    import torch

    has_gpu = torch.cuda.is_available()
    if hbm is None and not has_gpu:
        hbm = int(host_memory_bytes() * _EMULATED_SHARE)
    topology = Topology.parse("auto", hbm=hbm, dram=dram)
    words = "products of 1600 × 512 × 512 measured on the"
    cpu = FlopRate(_measured_flops("cpu"), 1.0, f"{words} CPU")
    gpu = FlopRate(_measured_flops("cuda"), 1.0, f"{words} GPU") if has_gpu else cpu
    sources = {"GPU float32": gpu.describe(), "CPU float32": cpu.describe()}
    return Platform("auto", topology, gpu, cpu, topology.hosts[0], sources)


def _measured_flops(device: str) -> float:
    """Operations per second of the best of a few products of an MLP's usual size."""
    import torch

    samples, inputs, outputs = _PRODUCT
    left = torch.ones(samples, inputs, device=device)
    right = torch.ones(inputs, outputs, device=device)
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    fastest = float("inf")
    for _ in range(_REPEATS):
        wait()
        started = time.perf_counter()
        left @ right
        wait()
        fastest = min(fastest, time.perf_counter() - started)
    return 2.0 * samples * inputs * outputs / fastest
