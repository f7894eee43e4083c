"""List GPUs and their usual servers: the vendors' figures, and the share that random rows reach.

Every constant has its source. Assumptions have the word "assumed" or "assumption" in `Rate.source`,
which reports look for. Steps on AMD and Intel GPUs, L4, L40S, A10, A10G and GB200 were never
compared with the cost model.
"""

from dataclasses import dataclass

_MIB = 2**20
_GIB = 2**30
_GB = 1e9
_GBIT = 1e9 / 8

NVLINK_LATENCY_S = 6e-6
"""Seconds of a small all-reduce of two H100 in CUDA graphs (NCCL issue 1259)."""

NETWORK_LATENCY_S = 25e-6
"""NCCL's estimate, in seconds, of a small all-reduce over two hosts of H100. 62 us were measured
(NCCL issue 1453)."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A bandwidth: the vendor's figure, the share that random rows reach, and the sources."""

    stated_bytes_per_s: float  # The vendor's figure, each way.
    share: float  # Effective bandwidth / stated bandwidth, in 0..1.
    source: str  # Sources of both numbers.

    @property
    def bytes_per_s(self) -> float:
        """Effective bandwidth."""
        return self.stated_bytes_per_s * self.share

    def scaled(self, factor: float) -> "Rate":
        """Return a multiple, such as one GPU's part of its host's memory bandwidth."""
        return Rate(self.stated_bytes_per_s * factor, self.share, self.source)

    def describe(self) -> str:
        """Describe effective bandwidth, share, stated bandwidth and source in words."""
        return (
            f"{self.bytes_per_s / _GB:.4g} GB/s = {self.share:.3g} of "
            f"{self.stated_bytes_per_s / _GB:.4g} GB/s: {self.source}"
        )


@dataclass(frozen=True, slots=True)
class GpuKind:
    """A GPU and its links to its host and its peers."""

    name: str
    memory_bytes: int  # As nvidia-smi reports it, or as `memory_source` says.
    # Bandwidths of its memory; of the link to its host, PCIe or another; and of all links to other
    # GPUs of its host together, NVLink or another fabric, None without such links.
    hbm: Rate
    pcie: Rate
    nvlink: Rate | None
    memory_source: str = "as nvidia-smi reports it"


@dataclass(frozen=True, slots=True)
class HostKind:
    """The usual 8-GPU server of a GPU. A host with fewer GPUs is a proportional part of it."""

    name: str
    memory_bytes: int
    # Bandwidths of its memory, and to other hosts.
    dram: Rate
    network: Rate
    network_latency_s: float = NETWORK_LATENCY_S  # Latency of a collective over several hosts.
    # Most GPUs that such a network joins; None without a limit.
    most_gpus: int | None = None


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


# A cube mesh of 8 GPUs joins each to 4 of its 7 peers. The other 3 are two hops away, so a byte of
# an even all-to-all crosses (4 + 3 * 2) / 7 links on average.
_CUBE_MESH = Rate(
    150 * _GB,
    0.80 * 7 / 10,
    "NVIDIA V100 datasheet, half of the two-way figure; hybrid cube mesh, where an even "
    "all-to-all takes 10/7 hops, at an assumed 0.80 of each link",
)
_V100_HBM = Rate(
    900 * _GB, 0.83, "NVIDIA V100 datasheet; 750 GB/s measured by Jia et al. 2018, arXiv:1804.06826"
)


def _gddr6(gb_per_s: float, chip: str) -> Rate:
    why = "the share is that measured on a T4 (arXiv:1903.07486), an assumption here"
    return Rate(gb_per_s * _GB, 0.69, f"NVIDIA {chip} datasheet, GDDR6; {why}")


def _other_hbm(gb_per_s: float, source: str) -> Rate:
    return Rate(gb_per_s * _GB, 0.80, f"{source}; the share is an assumption")


def _instinct(name: str, gib: int, gb_per_s: float, fabric_gb_per_s: float) -> GpuKind:
    """Make an AMD GPU with `fabric_gb_per_s` of Infinity Fabric each way to each of 7 peers."""
    chip = f"AMD Instinct {name.upper()}"
    fabric = Rate(
        7 * fabric_gb_per_s * _GB,
        0.80,
        f"{chip} datasheet: Infinity Fabric to each of 7 peers, half of the two-way "
        f"figure of {2 * fabric_gb_per_s:g} GB/s; the share is an assumption",
    )
    memory = "the memory that AMD states, in GiB"
    hbm = _other_hbm(gb_per_s, f"{chip} datasheet")
    return GpuKind(name, gib * _GIB, hbm, _PCIE5, fabric, memory)


def _gaudi(number: int, gb: int, gb_per_s: float, pcie: Rate, gbit_per_s: int) -> GpuKind:
    """Make an Intel accelerator with 21 Ethernet ports to the others of its server."""
    ethernet = Rate(
        21 * gbit_per_s * _GBIT,
        0.80,
        f"Intel Gaudi {number} white paper: 21 of 24 ports of {gbit_per_s} Gbit/s Ethernet go to "
        "the 7 others of a server; the share is an assumption",
    )
    memory = "the memory that Intel states, in GB"
    hbm = _other_hbm(gb_per_s, f"Intel at Hot Chips 2024, Gaudi {number}")
    return GpuKind(f"gaudi{number}", int(gb * _GB), hbm, pcie, ethernet, memory)


_C2C = Rate(
    225 * _GB,
    0.80,
    "NVLink-C2C, 900 GB/s both ways between a Grace and its two GPUs (NVIDIA GB200 NVL72 "
    "datasheet), an even part of one way; the share is an assumption",
)
_NVLINK5 = "NVIDIA GB200 NVL72 datasheet, 130 TB/s both ways over 72 GPUs"

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
        GpuKind("h200", 143771 * _MIB, _hbm(4800, "H200"), _PCIE5, _nvswitch(450, "H200")),
        GpuKind("b200", 183359 * _MIB, _hbm(8000, "B200"), _PCIE5, _nvswitch(900, "B200")),
        GpuKind(
            "gb200",
            int(13.4e12 / 72),
            _hbm(8000, "GB200 NVL72"),
            _C2C,
            Rate(900 * _GB, 0.80, f"{_NVLINK5}; the share of other NVSwitches, an assumption here"),
            "a part of the datasheet's 13.4 TB of 72 GPUs",
        ),
        GpuKind("l4", 23034 * _MIB, _gddr6(300, "L4"), _PCIE4, None),
        GpuKind("l40s", 46068 * _MIB, _gddr6(864, "L40S"), _PCIE4, None),
        GpuKind("a10", 23028 * _MIB, _gddr6(600, "A10"), _PCIE4, None),
        GpuKind("a10g", 23028 * _MIB, _gddr6(600, "A10G"), _PCIE4, None),
        _instinct("mi300x", 192, 5300, 64),
        _instinct("mi350x", 288, 8000, 76.8),
        _instinct("mi355x", 288, 8000, 76.8),
        _gaudi(2, 96, 2460, _PCIE4, 100),
        _gaudi(3, 128, 3670, _PCIE5, 200),
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


BETWEEN_RACKS = _rdma(8, 400, "DGX GB200: an InfiniBand port for each GPU")
"""Bandwidth of 8 GPUs together, from one GB200 NVL72 to another."""


def _server(
    name: str, gib: int, dram: Rate, ports: int, gbit_per_s: int, where: str = ""
) -> HostKind:
    """Make a server. `where` names the source of its network, by default the server."""
    return HostKind(name, gib * _GIB, dram, _rdma(ports, gbit_per_s, where or name))


_DGX1 = _server("DGX-1", 512, _dram(2, 6, 2666, "DDR4"), 4, 100)
_HOPPER_DRAM = _dram(2, 8, 4800, "DDR5")
_EPYC_MILAN = _dram(2, 8, 3200, "DDR4")
_TURIN = _server("OCI BM.GPU.MI355X.8", 3072, _dram(2, 12, 6000, "DDR5"), 8, 400)

HOST_KINDS: dict[str, HostKind] = {
    "v100-16": _DGX1,
    "v100-32": _DGX1,
    "t4": _server("EC2 g4dn.metal", 384, _dram(2, 6, 2933, "DDR4"), 1, 100),
    "a100-40": _server("DGX A100 320GB", 1024, _EPYC_MILAN, 8, 200, "DGX A100"),
    "a100-80": _server("DGX A100 640GB", 2048, _EPYC_MILAN, 8, 200, "DGX A100"),
    "h100": _server("DGX H100", 2048, _HOPPER_DRAM, 8, 400),
    "h200": _server("DGX H200", 2048, _HOPPER_DRAM, 8, 400),
    "b200": _server("DGX B200", 2048, _dram(2, 8, 5600, "DDR5"), 8, 400),
    "gb200": HostKind(
        "4 Grace of GB200 NVL72, one for 2 GPUs, 480 GB each",
        int(4 * 480 * _GB),
        Rate(
            4 * 512 * _GB,
            0.70,
            "4 × LPDDR5X, up to 18.4 TB/s over 36 Grace (NVIDIA GB200 NVL72 datasheet); the share "
            "is an assumption for random rows",
        ),
        Rate(
            8 * 900 * _GB,
            0.80,
            f"NVLink joins all hosts of the rack: {_NVLINK5}; the share of other NVSwitches, an "
            "assumption here; peers on a host and elsewhere are taken not to share it",
        ),
        NVLINK_LATENCY_S,
        72,
    ),
    "l4": _server("EC2 g6.48xlarge", 768, _EPYC_MILAN, 1, 100),
    "l40s": _server("EC2 g6e.48xlarge", 1536, _EPYC_MILAN, 4, 100),
    "a10": _server(
        "two of OCI BM.GPU.A10.4, which has 4 GPUs",
        2048,
        _dram(4, 8, 3200, "DDR4"),
        4,
        50,
        "two of OCI BM.GPU.A10.4",
    ),
    "a10g": _server("EC2 g5.48xlarge", 768, _EPYC_MILAN, 1, 100),
    "mi300x": _server("OCI BM.GPU.MI300X.8", 2048, _HOPPER_DRAM, 8, 400),
    "mi350x": _TURIN,
    "mi355x": _TURIN,
    "gaudi2": _server("HLS-Gaudi2 server", 1024, _EPYC_MILAN, 24, 100, "3 ports of each Gaudi 2"),
    "gaudi3": _server(
        "IBM Cloud gx3d-160x1792x8gaudi3", 1792, _HOPPER_DRAM, 24, 200, "3 ports of each Gaudi 3"
    ),
}

_ACUN = "as recalled from Acun et al., HPCA 2021, arXiv:2011.05497"

_BIG_BASIN = _server(
    f"Big Basin ({_ACUN}); big-basin-32 has V100 of 32 GB",
    256,
    _dram(2, 6, 2666, "DDR4"),
    1,
    100,
    f"Ethernet; {_ACUN}",
)

NAMED: dict[str, tuple[GpuKind, HostKind]] = {
    "big-basin": (GPU_KINDS["v100-16"], _BIG_BASIN),
    "big-basin-32": (GPU_KINDS["v100-32"], _BIG_BASIN),
    "zion": (
        # The prototype's accelerators have no links to each other: peers exchange by host memory.
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
    ),
}

CPU_SERVER = HostKind(
    f"dual-socket CPU server ({_ACUN})",
    256 * _GIB,
    _dram(2, 6, 2666, "DDR4"),
    _rdma(1, 25, f"Ethernet; {_ACUN}"),
)
"""The server without GPUs of Acun et al.: a trainer or a parameter server."""


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars an hour, of a whole machine or of one GPU with its part of the server."""

    dollars_per_hour: float
    source: str = ""  # Price list, server and date; empty for a user's own price.


def _aws(dollars: float, instance: str) -> Price:
    return Price(
        dollars / 8,
        f"AWS EC2 {instance}, Linux on demand, us-east-1, {dollars:g} USD an hour with 8 GPUs, on "
        "2025-11-30 (github.com/tsaol/aws-gpu at 77fcd9f, from instances.vantage.sh)",
    )


def _oci(dollars: float, shape: str) -> Price:
    gpus = int(shape.rpartition(".")[2])
    return Price(
        dollars / gpus,
        f"Oracle Cloud {shape}, pay as you go, {dollars:g} USD an hour with {gpus} GPUs, read on "
        "2026-11-23 (github.com/skypilot-org/skypilot-catalog, catalogs/v8/oci/vms.csv at 0588751)",
    )


LIST_PRICES: dict[str, Price] = {
    "v100-16": _aws(24.48, "p3.16xlarge"),
    "v100-32": _aws(31.212, "p3dn.24xlarge"),
    "t4": _aws(7.824, "g4dn.metal"),
    "a100-40": _aws(21.957642, "p4d.24xlarge"),
    "a100-80": _aws(27.44705, "p4de.24xlarge"),
    "h100": _aws(55.04, "p5.48xlarge"),
    "h200": _aws(63.296, "p5en.48xlarge"),
    "b200": _aws(113.9328, "p6-b200.48xlarge"),
    "gb200": _oci(64.0, "BM.GPU.GB200.4"),
    "l4": _aws(13.3504, "g6.48xlarge"),
    "l40s": _aws(30.13118, "g6e.48xlarge"),
    "a10": _oci(8.0, "BM.GPU.A10.4"),
    "a10g": _aws(16.288, "g5.48xlarge"),
    "mi300x": _oci(48.0, "BM.GPU.MI300X.8"),
    "mi355x": _oci(68.8, "BM.GPU.MI355X.8"),
}
"""Prices of GPUs an hour, by name: dated on-demand list prices of two providers.

List prices change, differ by region, and are higher than contract prices. So give your own prices
(`placer fleet --price h100=2.5`). MI350X and Gaudi are in neither list, so they have no price."""
