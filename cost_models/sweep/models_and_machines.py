"""The models and machines of `placer sweep`, with the FLOP rates of GPUs and CPUs."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cost_models.dense import CPU_FLOPS, GPU_FLOPS, FlopRate
from placer.dense import DenseLayers, DenseNetwork
from placer.errors import ProblemError, TopologyError
from placer.profile.profile import Profile
from placer.profile.table_profile import TableProfile
from placer.tables import MOST_DIM, MOST_ROWS, Feature, Table
from placer.topology.detect import best_rate, host_memory_bytes
from placer.topology.devices import Gpu, Host, Link
from placer.topology.kinds import CPU_SERVER
from placer.topology.presets import cpu_server, kinds
from placer.topology.topology import Topology

_MOST = {"sparse": 10_000, "depth": 1000, "rows": MOST_ROWS, "dim": MOST_DIM}


@dataclass(frozen=True, slots=True)
class Setting:
    """A DLRM with equal tables, and its batch.

    docs/sweep.md says what each value means, and where the defaults come from. CPU trainers have
    their own `batch`.

    Raises ProblemError if a value is less than 1, the skew less than 0, or a table too large.
    """

    dense: int = 512
    sparse: int = 64
    rows: int = 100_000
    width: int = 512
    depth: int = 3
    batch: int = 1600
    pooling: int = 32
    dim: int = 64
    skew: float = 1.05

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name == "skew" else 1
            if not value >= least:  # It may be NaN.
                raise ProblemError(f"{name} must be at least {least}, not {value:g}")
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise ProblemError(f"{name} must be at most {most}, not {getattr(self, name):g}")

    @property
    def dense_network(self) -> DenseNetwork:
        """The dense layers: MLPs of `depth` hidden layers around a dot interaction."""
        hidden = (self.width,) * self.depth
        layers = DenseLayers((*hidden, 1), (*hidden, self.dim), self.dense)
        return DenseNetwork.of(layers, [_table(self, number) for number in range(self.sparse)])

    @property
    def embedding_key(self) -> tuple[float, ...]:
        """All values that the cost of the embeddings depends on."""
        return (self.sparse, self.rows, self.pooling, self.dim, self.skew)

    def profile(self, tables: int | None = None) -> Profile:
        """Return a profile of the first `tables` tables with Zipf accesses; ids are ranks."""
        made = (
            TableProfile.zipf(_table(self, number), self.skew)
            for number in range(self.sparse if tables is None else tables)
        )
        source = f"sweep: {self.sparse} tables alike, Zipf exponent {self.skew:g} assumed"
        return Profile(tuple(made), source=source)

    def with_values(self, values: Mapping[str, float]) -> "Setting":
        """Return the setting with other values of some axes."""
        changes: dict[str, Any] = {
            axis: value if axis == "skew" else int(value) for axis, value in values.items()
        }
        return replace(self, **changes)


def _table(setting: Setting, number: int) -> Table:
    name = f"t{number + 1}"
    features = (Feature(name, float(setting.pooling)),)
    return Table(name, setting.rows, setting.dim, features=features)


AXES: dict[str, tuple[float, ...]] = {
    "dense": (64, 128, 256, 512, 1024, 2048, 4096),
    "sparse": (4, 8, 16, 32, 64, 128),
    "rows": (10_000, 100_000, 1_000_000, 5_000_000, 10_000_000, 20_000_000),
    "width": (64, 128, 256, 512, 1024, 2048),
    "depth": (1, 2, 3, 4, 5),
    "batch": (200, 400, 800, 1600, 3200, 6400),
    "pooling": (1, 4, 16, 32, 64, 128),
    "dim": (16, 32, 64, 128, 256),
    "skew": (0.0, 0.6, 0.8, 1.05, 1.3),
}
"""Default values of each axis."""

DEFAULT_AXES = ("dense", "sparse", "rows", "width", "depth", "batch", "pooling", "dim")

MODELS: dict[str, Setting] = {
    "suite": Setting(),
    "m1": Setting(dense=800, sparse=30, rows=5_000_000, pooling=28),
    "m2": Setting(dense=504, sparse=13, rows=10_000_000, pooling=17, width=1024),
    "m3": Setting(dense=809, sparse=127, rows=10_000_000, pooling=49),
}
"""The test suite, and the production models of the paper's table II; see docs/sweep.md."""


def axis_values(text: str) -> tuple[str, tuple[float, ...]]:
    """Parse ``sparse=4,16,64``, or ``sparse`` for default values; return the axis and its values.

    Raises a `ProblemError` if there is no such axis, or a value is not valid for it.
    """
    axis, _, listed = (part.strip() for part in text.partition("="))
    if axis not in AXES:
        raise ProblemError(f"nothing called {axis!r} can be varied; choose from {', '.join(AXES)}")
    if not listed:
        return axis, AXES[axis]
    values: list[float] = []
    for word in listed.split(","):
        try:
            value = float(word)
        except ValueError:
            raise ProblemError(f"{text!r}: {word.strip()!r} is no number") from None
        if axis != "skew" and not value.is_integer():
            raise ProblemError(f"{text!r}: {axis} must be a whole number, not {word.strip()}")
        Setting().with_values({axis: value})
        values.append(value)
    return axis, tuple(dict.fromkeys(values))


def axes_of(texts: Iterable[str]) -> dict[str, tuple[float, ...]]:
    """Return the values of each axis; see `axis_values`. An axis may have values in several texts.

    >>> axes_of(["sparse=4,8", "rows=1e6", "sparse=8,16"])
    {'sparse': (4.0, 8.0, 16.0), 'rows': (1000000.0,)}
    """
    axes: dict[str, tuple[float, ...]] = {}
    for axis, values in map(axis_values, texts):
        axes[axis] = tuple(dict.fromkeys((*axes.get(axis, ()), *values)))
    return axes


def cases(
    base: Setting, axes: Mapping[str, Sequence[float]], *, grid: bool = False
) -> list[tuple[dict[str, float], Setting]]:
    """Return the settings of a sweep, each with its changed values.

    Change one axis of `base` at a time, or take all combinations if `grid`.
    """
    if grid:
        combined = itertools.product(*axes.values())
        changes = [dict(zip(axes, values, strict=True)) for values in combined]
    else:
        changes = [{axis: value} for axis, values in axes.items() for value in values]
    return [(change, base.with_values(change)) for change in changes]


def with_overrides(model: str, changes: Sequence[str]) -> Setting:
    """Return one of `MODELS` with single values changed: ``["rows=1000000"]``.

    Raises a `ProblemError` if there is no such model or axis, or an axis is given several values.
    """
    if model not in MODELS:
        raise ProblemError(f"no model is called {model!r}; choose from {', '.join(MODELS)}")
    fixed: dict[str, float] = {}
    for text in changes:
        axis, values = axis_values(text)
        if "=" not in text or len(values) != 1 or axis in fixed:
            raise ProblemError(f"{text!r}: a model has one value of {axis}, such as {axis}=8")
        fixed[axis] = values[0]
    return MODELS[model].with_values(fixed)


_CPU_SERVERS = re.compile(r"(?:(?P<count>\d+)x)?cpu")
_MOST_SERVERS = 1024

_EMULATED_SHARE = 0.25
"""Default share of this machine's memory for an emulated GPU."""


@dataclass(frozen=True, slots=True)
class Platform:
    """A machine with GPUs, or several CPU servers without a topology.

    `gpu` is the FLOP rate of one GPU, meaningless for CPU servers, and `cpu` of all CPUs of one
    host, the `server`. `sources` says where rates come from, besides `Topology.sources`.
    `network_bytes_per_s` is one host's bandwidth each way; None if unknown. `servers` counts
    trainers and parameter servers together; it is 1 for machines with GPUs.
    """

    name: str
    topology: Topology | None
    gpu: FlopRate
    cpu: FlopRate
    server: Host
    sources: dict[str, str]
    network_bytes_per_s: float | None = None
    servers: int = 1


def platform(text: str, *, hbm: str | int | None = None, dram: str | int | None = None) -> Platform:
    """Return the machine of a name: a preset of topologies, ``Nxcpu`` servers, or ``auto``.

    Embeddings may take `hbm` of each GPU and `dram` of each host.

    Raises a `TopologyError` for other names.
    """
    name = text.strip().lower()
    if "+" in name:
        raise TopologyError(
            f"{text!r}: a sweep adds servers itself, for the placement remote; name the machine "
            f"alone: {name.partition('+')[0]}, and their number as --parameter-servers"
        )
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
    """Return a topology of one host that serves lookups by itself.

    As a topology needs a GPU, it has a GPU without memory. This GPU stands for the CPUs that take
    the pooled rows, at the bandwidth of the host's memory.
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
    """Measure operations per second of a matrix product of an MLP's usual size."""
    import torch

    samples, inputs, outputs = 1600, 512, 512
    left = torch.ones(samples, inputs, device=device)
    right = torch.ones(inputs, outputs, device=device)

    def multiply() -> None:
        torch.matmul(left, right)
        if device == "cuda":
            torch.cuda.synchronize()

    return best_rate(2 * samples * inputs * outputs, multiply)
