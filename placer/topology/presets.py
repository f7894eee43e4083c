"""Machines by name: ``8xh100``, ``2x8xa100-80``, ``1xt4``, ``big-basin``, ``zion``.

Every constant is data with its source: what the vendor states, and the share of it that
random reads and writes of embedding rows reach. Where no measurement is known the share is
an assumption, and `Topology.sources` says so; a file (docs/topology.md) replaces it by
anybody's own.
"""

import re
from dataclasses import dataclass

from placer.errors import TopologyError
from placer.topology.devices import Gpu, Host, Link, TopologyFields

_MIB = 2**20
_GIB = 2**30
_GB = 1e9
_GBIT = 1e9 / 8

RESERVED_HBM_SHARE = 0.15
"""HBM that presets leave to dense weights, activations and the CUDA context.

The figure TorchRec's planner reserves by default (`HeuristicalStorageReservation(0.15)`).
"""

RESERVED_DRAM_SHARE = 0.10
"""Host memory that presets leave to the operating system and data loading."""

_GPUS_PER_HOST = 8
_MOST_HOSTS = 1024
_NVLINK_LATENCY_S = 6e-6
"""A small all-reduce of two H100 in CUDA graphs (NCCL 1259)."""

_NETWORK_LATENCY_S = 25e-6
"""NCCL's own estimate of a small all-reduce over two hosts of H100, where 62 us were measured
(NCCL 1453)."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A bandwidth: the vendor's figure, the share of it that rows reach, and why.

    Attributes
    ----------
    stated_bytes_per_s : float
        The vendor's figure, each way.
    share : float
        Effective over stated bandwidth, in 0..1.
    source : str
        Where both come from.
    """

    stated_bytes_per_s: float
    share: float
    source: str

    @property
    def bytes_per_s(self) -> float:
        """Effective bandwidth."""
        return self.stated_bytes_per_s * self.share

    def scaled(self, factor: float) -> "Rate":
        """A part of it, such as one GPU's share of its host's memory bandwidth."""
        return Rate(self.stated_bytes_per_s * factor, self.share, self.source)

    def describe(self) -> str:
        """For people: figure, share and source."""
        return (
            f"{self.bytes_per_s / _GB:.4g} GB/s = {self.share:.3g} of "
            f"{self.stated_bytes_per_s / _GB:.4g} GB/s: {self.source}"
        )


@dataclass(frozen=True, slots=True)
class GpuKind:
    """A GPU and its links to its host and its peers."""

    name: str
    memory_bytes: int
    hbm: Rate
    pcie: Rate
    nvlink: Rate | None


@dataclass(frozen=True, slots=True)
class HostKind:
    """The 8-GPU server that a GPU usually comes in; fewer GPUs get their share of it."""

    name: str
    memory_bytes: int
    dram: Rate
    network: Rate


def _hbm(gb_per_s: float, chip: str) -> Rate:
    return Rate(
        gb_per_s * _GB,
        0.90,
        f"NVIDIA {chip} datasheet; the share is what copies of pooled rows reach on an H100, 2.18 "
        "of 2.40 TB/s (torchrec 4634), assumed for this generation",
    )


_PCIE3 = Rate(
    15.75 * _GB, 0.76, "PCIe 3.0 x16; about 12 GB/s is usual for pinned copies, not measured here"
)
_PCIE4 = Rate(
    31.5 * _GB,
    0.79,
    "PCIe 4.0 x16; pinned copies of 25 to 26 GB/s (nvbandwidth's README, issue 53)",
)
_PCIE5 = Rate(63.0 * _GB, 0.87, "PCIe 5.0 x16; 53 to 55 GB/s (nvbandwidth's issue 24)")


def _nvswitch(gb_per_s: float, chip: str) -> Rate:
    return Rate(
        gb_per_s * _GB,
        0.80,
        f"NVIDIA {chip} datasheet, half of the two-way figure; collectives of 8 GPUs on NVSwitch "
        "reach 230 of 300 GB/s on A100 and 370 of 450 on H100 (nccl-tests 149, 212)",
    )


# A cube mesh of 8 joins a GPU to 4 of its 7 peers; the other 3 are two hops away, so that a
# byte of an even all-to-all crosses (4 + 3 * 2) / 7 links on average.
_CUBE_MESH = Rate(
    150 * _GB,
    0.80 * 7 / 10,
    "NVIDIA V100 datasheet, half of the two-way figure; hybrid cube mesh, where an even "
    "all-to-all takes 10/7 hops, at an assumed 0.80 of each link",
)
_V100_HBM = Rate(
    900 * _GB, 0.83, "NVIDIA V100 datasheet; 750 GB/s measured by Jia et al. 2018, arXiv:1804.06826"
)


GPU_KINDS: dict[str, GpuKind] = {
    kind.name: kind
    for kind in (
        GpuKind("v100-16", 16160 * _MIB, _V100_HBM, _PCIE3, _CUBE_MESH),
        GpuKind("v100-32", 32510 * _MIB, _V100_HBM, _PCIE3, _CUBE_MESH),
        GpuKind(
            "t4",
            15360 * _MIB,
            Rate(
                320 * _GB,
                0.69,
                "NVIDIA T4 datasheet; 220 GB/s measured by Jia et al. 2019, arXiv:1903.07486",
            ),
            _PCIE3,
            None,
        ),
        GpuKind(
            "a100-40", 40960 * _MIB, _hbm(1555, "A100 40GB SXM"), _PCIE4, _nvswitch(300, "A100")
        ),
        GpuKind(
            "a100-80", 81920 * _MIB, _hbm(2039, "A100 80GB SXM"), _PCIE4, _nvswitch(300, "A100")
        ),
        GpuKind("h100", 81559 * _MIB, _hbm(3350, "H100 SXM"), _PCIE5, _nvswitch(450, "H100")),
        GpuKind(
            "h200",
            143771 * _MIB,
            _hbm(4800, "H200"),
            _PCIE5,
            _nvswitch(450, "H200"),
        ),
        GpuKind("b200", 183359 * _MIB, _hbm(8000, "B200"), _PCIE5, _nvswitch(900, "B200")),
    )
}


def _dram(sockets: int, channels: int, mega_transfers: int, memory: str) -> Rate:
    return Rate(
        sockets * channels * mega_transfers * 1e6 * 8,
        0.70,
        f"{sockets} sockets × {channels} channels of {memory}-{mega_transfers}; the share is "
        "an assumption for rows of 128 bytes and more at random, over both sockets",
    )


def _rdma(ports: int, gbit_per_s: int, where: str) -> Rate:
    return Rate(
        ports * gbit_per_s * _GBIT,
        0.90,
        f"{ports} × {gbit_per_s} Gbit/s ({where}); the share is an assumption for headers and "
        "congestion",
    )


_DGX1 = HostKind("DGX-1", 512 * _GIB, _dram(2, 6, 2666, "DDR4"), _rdma(4, 100, "DGX-1"))
_HOPPER_DRAM = _dram(2, 8, 4800, "DDR5")

HOST_KINDS: dict[str, HostKind] = {
    "v100-16": _DGX1,
    "v100-32": _DGX1,
    "t4": HostKind(
        "EC2 g4dn.metal", 384 * _GIB, _dram(2, 6, 2933, "DDR4"), _rdma(1, 100, "EC2 g4dn.metal")
    ),
    "a100-40": HostKind(
        "DGX A100 320GB", 1024 * _GIB, _dram(2, 8, 3200, "DDR4"), _rdma(8, 200, "DGX A100")
    ),
    "a100-80": HostKind(
        "DGX A100 640GB", 2048 * _GIB, _dram(2, 8, 3200, "DDR4"), _rdma(8, 200, "DGX A100")
    ),
    "h100": HostKind("DGX H100", 2048 * _GIB, _HOPPER_DRAM, _rdma(8, 400, "DGX H100")),
    "h200": HostKind("DGX H200", 2048 * _GIB, _HOPPER_DRAM, _rdma(8, 400, "DGX H200")),
    "b200": HostKind("DGX B200", 2048 * _GIB, _dram(2, 8, 5600, "DDR5"), _rdma(8, 400, "DGX B200")),
}

_ACUN = "as recalled from Acun et al., HPCA 2021, arXiv:2011.05497"

_BIG_BASIN = (
    GPU_KINDS["v100-16"],
    HostKind(
        f"Big Basin ({_ACUN}); big-basin-32 has V100 of 32 GB",
        256 * _GIB,
        _dram(2, 6, 2666, "DDR4"),
        _rdma(1, 100, f"Ethernet; {_ACUN}"),
    ),
)

_ZION = (
    # The prototype's accelerators have no links among themselves: peers meet in host memory.
    GpuKind("v100-16", 16160 * _MIB, _V100_HBM, _PCIE3, None),
    HostKind(
        f"Zion prototype, 8 sockets ({_ACUN})",
        2048 * _GIB,
        Rate(
            1000 * _GB,
            0.70,
            f"about 1 TB/s over 8 sockets, {_ACUN}; the share is an assumption for random rows",
        ),
        _rdma(4, 100, f"InfiniBand; {_ACUN}"),
    ),
)

NAMED: dict[str, tuple[GpuKind, HostKind]] = {
    "big-basin": _BIG_BASIN,
    "big-basin-32": (GPU_KINDS["v100-32"], _BIG_BASIN[1]),
    "zion": _ZION,
}

CPU_SERVER = HostKind(
    f"dual-socket CPU server ({_ACUN})",
    256 * _GIB,
    _dram(2, 6, 2666, "DDR4"),
    _rdma(1, 25, f"Ethernet; {_ACUN}"),
)
"""The server without GPUs of Acun et al.: a trainer or a parameter server."""

_GRAMMAR = re.compile(r"(?:(?P<nodes>\d+)x)?(?P<count>\d+)x(?P<kind>[a-z][a-z0-9-]*)")
_SERVERS = re.compile(rf"(?:(?P<nodes>\d+)x)?(?P<name>{'|'.join(NAMED)})")


def chip_called(name: str, memory_bytes: int) -> str:
    """The name in `GPU_KINDS` of a GPU that a driver calls so, or nothing if it has none.

    Cards for PCIe slots, which are slower, have none.

    Examples
    --------
    >>> chip_called("NVIDIA A100-SXM4-80GB", 80 * 2**30)
    'a100-80'
    """
    words = re.split(r"[^a-z0-9]+", name.lower())
    kinds = [kind for kind in GPU_KINDS.values() if kind.name.partition("-")[0] in words]
    if not kinds or "pcie" in words:
        return ""
    return min(kinds, key=lambda kind: abs(kind.memory_bytes - memory_bytes)).name


def preset_help() -> str:
    """What `preset` takes, in one line for error messages and ``--help``."""
    return (
        f"[NODESx]COUNTxKIND, such as 8xh100 or 16x8xh100, with KIND one of "
        f"{', '.join(GPU_KINDS)}; or {', '.join(NAMED)} (also 4xbig-basin)"
    )


def preset(text: str) -> TopologyFields | None:
    """The machine that a preset's name stands for, or None if `text` is not of that form.

    ``[NODESx]COUNTxKIND``: COUNT GPUs in each of NODES hosts. A host with fewer than 8 GPUs
    has that share of the memory, memory bandwidth and network of the 8-GPU server that
    HOST_KINDS names. GPUs keep 85% of their memory for embeddings and hosts 90%.

    Raises
    ------
    TopologyError
        If the form is right but the kind is unknown or the counts are out of range; the
        message lists the kinds.
    """
    name = text.strip().lower()
    match = _SERVERS.fullmatch(name) or _GRAMMAR.fullmatch(name)
    if match is None:
        return None
    machine = kinds(name)
    if machine is None:
        raise TopologyError(f"{text!r}: no GPU is called {match['kind']!r}; use {preset_help()}")
    gpu, host, count = machine
    if not 1 <= count <= _GPUS_PER_HOST:
        raise TopologyError(
            f"{text!r} puts {count} GPUs in a host, which holds 1 to {_GPUS_PER_HOST}; "
            f"for more write NODESxCOUNTxKIND, such as 2x8x{match['kind']}"
        )
    return _build(name, int(match["nodes"] or 1), count, gpu, host)


def kinds(text: str) -> tuple[GpuKind, HostKind, int] | None:
    """The GPU, the whole server and the GPUs per host of a preset, or None if it is none."""
    name = text.strip().lower()
    servers = _SERVERS.fullmatch(name)
    if servers is not None:
        return *NAMED[servers["name"]], _GPUS_PER_HOST
    match = _GRAMMAR.fullmatch(name)
    if match is None or match["kind"] not in GPU_KINDS:
        return None
    return GPU_KINDS[match["kind"]], HOST_KINDS[match["kind"]], int(match["count"])


def _whole_mib(size_bytes: float) -> int:
    return int(size_bytes // _MIB) * _MIB


def _build(name: str, nodes: int, count: int, gpu: GpuKind, host: HostKind) -> TopologyFields:
    if not 1 <= nodes <= _MOST_HOSTS:
        raise TopologyError(f"{name!r} has {nodes} hosts; there can be 1 to {_MOST_HOSTS}")
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
        "gpu memory": f"{gpu.memory_bytes / _GIB:.4g} GiB of {gpu.name}, as nvidia-smi reports it, "
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
        links.extend(
            Link(one.id, one.host, "nvlink", gpu.nvlink.bytes_per_s, _NVLINK_LATENCY_S)
            for one in gpus
        )
        sources["nvlink bandwidth"] = gpu.nvlink.describe()
    if nodes > 1:
        links.extend(
            Link(one.id, "network", "network", network.bytes_per_s, _NETWORK_LATENCY_S)
            for one in hosts
        )
        sources["network bandwidth"] = network.describe()
    return TopologyFields(name, gpus, hosts, tuple(links), sources=sources)
