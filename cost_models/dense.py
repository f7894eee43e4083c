"""Time of the dense part of a DLRM: its MLPs, its interaction and what they send.

The model is that of Naumov et al. (arXiv:1906.00091): a bottom MLP takes the dense features to
a vector of `dim` columns, all pairs of it and the pooled embeddings are multiplied, and a top
MLP takes the products, and the bottom's output, to one logit. A multiply-accumulate of the
forward pass is done three times in a step (forward, gradient of the input, gradient of the
weights), each of two operations: 6 floating-point operations. Of the first layer, whose input
needs no gradient, this counts a third too much. The interaction multiplies all (n + 1)² pairs,
as a batched matrix product does, though the top MLP takes half of them.

What is assumed of machines is in `GPU_FLOPS` and `cpu_rate`: a peak, the share of it that the
matrix products of such MLPs reach, and where both come from.
"""

from dataclasses import dataclass
from itertools import pairwise

from placer.errors import ProblemError
from placer.topology.topology import Topology

FLOPS_PER_MAC = 6
"""Operations of a training step per multiply-accumulate of the forward pass."""

KERNELS_PER_LAYER = 6
"""Launches of one layer: product and activation forward; backward the activation's gradient,
two products and the sum over the bias. A count of what PyTorch launches, not a measurement."""

OTHER_KERNELS = 20
"""Launches of the interaction forward and backward, the loss and a fused optimizer; a count."""

_FLOAT_BYTES = 4
_GPU_SHARE = 0.60
_CPU_SHARE = 0.50


@dataclass(frozen=True, slots=True)
class FlopRate:
    """Floating-point operations per second, in float32.

    Attributes
    ----------
    stated_per_s : float
        The vendor's peak, or what was measured.
    share : float
        What MLPs reach of it, in 0..1; 1 where it was measured.
    source : str
        Where both come from.
    """

    stated_per_s: float
    share: float
    source: str

    @property
    def per_s(self) -> float:
        """What MLPs reach."""
        return self.stated_per_s * self.share

    def describe(self) -> str:
        """For people: figure, share and source."""
        return (
            f"{self.per_s / 1e12:.3g} TFLOP/s = {self.share:.3g} of "
            f"{self.stated_per_s / 1e12:.3g} TFLOP/s: {self.source}"
        )


def _gpu(tflops: float, chip: str) -> FlopRate:
    return FlopRate(
        tflops * 1e12,
        _GPU_SHARE,
        f"NVIDIA {chip} datasheet, float32 without tensor cores, as PyTorch multiplies by "
        "default; the share is an assumption for layers of some hundred columns",
    )


GPU_FLOPS: dict[str, FlopRate] = {
    "v100-16": _gpu(15.7, "V100 SXM2"),
    "v100-32": _gpu(15.7, "V100 SXM2"),
    "t4": _gpu(8.1, "T4"),
    "a100-40": _gpu(19.5, "A100"),
    "a100-80": _gpu(19.5, "A100"),
    "h100": _gpu(67.0, "H100 SXM"),
    "h200": _gpu(67.0, "H200 SXM"),
    "b200": _gpu(75.0, "HGX B200"),
}
"""By the GPU kinds of `placer.topology.presets`."""


def cpu_rate(sockets: int, cores: int, flops_per_cycle: int, ghz: float, chip: str) -> FlopRate:
    """Peak of a server's CPUs: sockets × cores × operations per cycle × clock."""
    return FlopRate(
        sockets * cores * flops_per_cycle * ghz * 1e9,
        _CPU_SHARE,
        f"{sockets} sockets × {cores} cores × {flops_per_cycle} operations a cycle × {ghz:g} GHz "
        f"({chip}); the share is an assumption",
    )


_SKYLAKE = "20-core Skylake assumed, at its clock for AVX-512"
_TWO_SKYLAKES = cpu_rate(2, 20, 64, 1.9, _SKYLAKE)
_ROME = cpu_rate(2, 64, 32, 2.6, "EPYC 7742")
_SAPPHIRE_RAPIDS = cpu_rate(2, 56, 64, 2.6, "Xeon 8480C, clock for AVX-512 assumed")

CPU_FLOPS: dict[str, FlopRate] = {
    "dual-socket": _TWO_SKYLAKES,
    "zion": cpu_rate(8, 20, 64, 1.9, _SKYLAKE),
    "v100-16": _TWO_SKYLAKES,
    "v100-32": _TWO_SKYLAKES,
    "t4": cpu_rate(2, 24, 64, 2.0, "Xeon 8259CL, clock for AVX-512 assumed"),
    "a100-40": _ROME,
    "a100-80": _ROME,
    "h100": _SAPPHIRE_RAPIDS,
    "h200": _SAPPHIRE_RAPIDS,
    "b200": cpu_rate(2, 56, 64, 2.6, "Xeon 8570, clock for AVX-512 assumed"),
}
"""By server: the CPU server and Zion of Acun et al., or the 8-GPU server of a GPU kind."""


@dataclass(frozen=True, slots=True)
class DenseModel:
    """The dense part of a DLRM.

    Attributes
    ----------
    dense_features, sparse_features : int
        Numbers of features; each sparse one gives a pooled vector.
    dim : int
        Columns of the embeddings, and of the bottom MLP's output.
    mlp_width, mlp_depth : int
        Hidden layers of the bottom MLP and of the top MLP alike: `mlp_depth` of them.

    Raises
    ------
    ProblemError
        If one of them is less than 1.
    """

    dense_features: int
    sparse_features: int
    dim: int
    mlp_width: int
    mlp_depth: int

    def __post_init__(self) -> None:
        for name in ("dense_features", "sparse_features", "dim", "mlp_width", "mlp_depth"):
            if getattr(self, name) < 1:
                raise ProblemError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each layer, bottom MLP first."""
        hidden = (self.mlp_width,) * self.mlp_depth
        pairs = self.sparse_features * (self.sparse_features + 1) // 2
        bottom = (self.dense_features, *hidden, self.dim)
        top = (self.dim + pairs, *hidden, 1)
        return (*pairwise(bottom), *pairwise(top))

    @property
    def macs_per_sample(self) -> int:
        """Multiply-accumulates of the forward pass of one sample, interaction included."""
        interaction = (self.sparse_features + 1) ** 2 * self.dim
        return sum(inputs * outputs for inputs, outputs in self.layers) + interaction

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights and biases, in float32; as many of gradients."""
        return sum((inputs + 1) * outputs for inputs, outputs in self.layers) * _FLOAT_BYTES

    @property
    def kernels(self) -> int:
        """Kernel launches of one step."""
        return KERNELS_PER_LAYER * len(self.layers) + OTHER_KERNELS

    @property
    def input_bytes_per_sample(self) -> int:
        """Dense features and label of one sample, in float32."""
        return (self.dense_features + 1) * _FLOAT_BYTES

    def compute_s(self, samples: int, rate: FlopRate) -> float:
        """Seconds of the arithmetic of one step of `samples` samples on one device."""
        return FLOPS_PER_MAC * self.macs_per_sample * samples / rate.per_s


@dataclass(frozen=True, slots=True)
class DenseCost:
    """Seconds that the dense part takes on each GPU in one step.

    Attributes
    ----------
    compute_s, launch_s : float
        Arithmetic, and launches of its kernels.
    allreduce_s : float
        The sum of the gradients over all GPUs.
    input_s : float
        Dense features and labels on their way from the host, over the host link.
    """

    compute_s: float
    launch_s: float
    allreduce_s: float
    input_s: float

    @property
    def gpu_s(self) -> float:
        """Seconds that the GPU is busy: all but the inputs, which are copied before the step."""
        return self.compute_s + self.launch_s + self.allreduce_s


def dense_costs(
    model: DenseModel, topology: Topology, rate: FlopRate, batch_size: int
) -> tuple[DenseCost, ...]:
    """Cost on each GPU of the data-parallel dense part, for its `batch_size` samples.

    Gradients are reduced and scattered, then gathered: on each GPU, twice their bytes spread
    evenly over all of them (`Topology.exchange_s`), as a ring does, too.
    """
    return tuple(
        DenseCost(
            compute_s=model.compute_s(batch_size, rate),
            launch_s=model.kernels * gpu.launch_s,
            allreduce_s=topology.exchange_s(gpu.id, 2.0 * model.parameter_bytes),
            input_s=batch_size
            * model.input_bytes_per_sample
            / topology.host_link_bytes_per_s(gpu.id),
        )
        for gpu in topology.gpus
    )
