"""The time of a step's dense part: layers, interaction and the sum of their gradients.

docs/dense.md says what is counted. A linear layer of i inputs and o outputs is one product of B·i·o
multiply-accumulates forward, each of two floating-point operations, and two such products backward.
Gradients are summed like in PyTorch's DistributedDataParallel (Li et al. 2020,
doi:10.14778/3415478.3415530).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from placer.dense import DenseLayers, DenseMath, DenseNetwork, MeasuredDense, Product
from placer.dense.network import FLOAT_BYTES
from placer.errors import ProblemError
from placer.problem import Problem
from placer.topology.devices import Gpu
from placer.topology.topology import Topology

_FITTED = (
    "the share is fitted to whole training steps that others published for DLRM, DCN-V2 and Wide & "
    "Deep (benchmarks/published)"
)


@dataclass(frozen=True, slots=True)
class FlopRate:
    """Floating-point operations per second."""

    stated_per_s: float  # The vendor's peak, or a measured rate.
    share: float  # The share that MLPs reach, in 0..1; 1 if measured.
    source: str  # Where both numbers come from.

    @property
    def per_s(self) -> float:
        """Operations per second that MLPs reach."""
        return self.stated_per_s * self.share

    def describe(self) -> str:
        """Return the rate, the share and the source in words."""
        return (
            f"{self.per_s / 1e12:.3g} TFLOP/s = {self.share:.3g} of "
            f"{self.stated_per_s / 1e12:.3g} TFLOP/s: {self.source}"
        )


_DATASHEETS: dict[str, tuple[str, float | None, float | None, float | None, float | None]] = {
    "v100-16": ("NVIDIA V100 SXM2", 15.7, None, 125.0, None),
    "v100-32": ("NVIDIA V100 SXM2", 15.7, None, 125.0, None),
    "t4": ("NVIDIA T4", 8.1, None, 65.0, None),
    "a100-40": ("NVIDIA A100", 19.5, 156.0, 312.0, 312.0),
    "a100-80": ("NVIDIA A100", 19.5, 156.0, 312.0, 312.0),
    "h100": ("NVIDIA H100 SXM", 67.0, 494.7, 989.4, 989.4),
    "h200": ("NVIDIA H200 SXM", 67.0, 494.7, 989.4, 989.4),
    "b200": ("NVIDIA HGX B200", 75.0, 1100.0, 2250.0, 2250.0),
    "gb200": ("NVIDIA GB200 NVL72", 80.0, 1250.0, 2500.0, 2500.0),
    "l4": ("NVIDIA L4", 30.3, 60.0, 121.0, 121.0),
    "l40s": ("NVIDIA L40S", 91.6, 183.0, 362.05, 362.05),
    "a10": ("NVIDIA A10", 31.2, 62.5, 125.0, 125.0),
    "a10g": ("NVIDIA A10G", 31.5, 35.0, 70.0, 70.0),
    "mi300x": ("AMD Instinct MI300X", 163.4, 653.7, 1307.4, 1307.4),
    "mi350x": ("AMD Instinct MI350X", 144.2, None, 2300.0, 2300.0),
    "mi355x": ("AMD Instinct MI355X", 157.3, None, 2500.0, 2500.0),
    "gaudi2": ("Intel Gaudi 2", None, None, None, 432.0),
    "gaudi3": ("Intel Gaudi 3", None, None, None, 1835.0),
}
"""Each GPU kind's chip, and TFLOP/s without sparsity in float32, tf32, float16 and bfloat16."""

_MATHS: tuple[DenseMath, ...] = ("float32", "tf32", "float16", "bfloat16")


def _gpu(chip: str, *tflops: float | None) -> dict[DenseMath, FlopRate]:
    is_fitted = chip.startswith("NVIDIA")
    fitted = _FITTED if is_fitted else f"{_FITTED}, on other GPUs: an assumption here"
    return {
        math: FlopRate(
            rate * 1e12,
            0.75 if math == "float32" else 0.45,
            f"{chip} datasheet, {math} without sparsity; {fitted}",
        )
        for math, rate in zip(_MATHS, tflops, strict=True)
        if rate is not None
    }


GPU_FLOPS = {kind: _gpu(*known) for kind, known in _DATASHEETS.items()}
"""Rates by GPU kind of `placer.topology.presets` and by type of matrix products."""


def gpu_rate(gpu: Gpu, layers: DenseLayers) -> float:
    """Return operations per second that a GPU reaches in the layers; ProblemError if unknown."""
    if layers.flops_per_s is not None:
        return layers.flops_per_s
    known = GPU_FLOPS.get(gpu.chip)
    if known is None:
        chip = f"chip {gpu.chip!r} of {gpu.id}" if gpu.chip else f"the chip of {gpu.id}"
        raise ProblemError(
            f"nothing is known of {chip}: give flops_per_s with the dense layers, a measured "
            "time (--dense measured:12ms), or a chip in the topology file, one of "
            f"{', '.join(GPU_FLOPS)}"
        )
    if layers.math == "tf32" and "tf32" not in known:
        return known["float32"].per_s  # As frameworks do on chips without tf32.
    if layers.math not in known:
        raise ProblemError(
            f"{gpu.id} is a {gpu.chip}, which does not multiply in {layers.math}; it has "
            f"{', '.join(known)}"
        )
    return known[layers.math].per_s


def _cpu(sockets: int, cores: int, flops_per_cycle: int, ghz: float, chip: str) -> FlopRate:
    """Return the peak of a server's CPUs: sockets × cores × operations per cycle × clock."""
    return FlopRate(
        sockets * cores * flops_per_cycle * ghz * 1e9,
        0.50,
        f"{sockets} sockets × {cores} cores × {flops_per_cycle} operations a cycle × {ghz:g} GHz "
        f"({chip}); the share is an assumption",
    )


_SKYLAKE = "20-core Skylake assumed, at its clock for AVX-512"
_TWO_SKYLAKES = _cpu(2, 20, 64, 1.9, _SKYLAKE)
_ROME = _cpu(2, 64, 32, 2.6, "EPYC 7742")
_MILAN = _cpu(2, 48, 32, 2.65, "EPYC 7R13, all-core clock assumed")
_TURIN = _cpu(2, 64, 64, 3.3, "EPYC 9575F")
_SAPPHIRE_RAPIDS = _cpu(2, 56, 64, 2.6, "Xeon 8480C, clock for AVX-512 assumed")

CPU_FLOPS: dict[str, FlopRate] = {
    "dual-socket": _TWO_SKYLAKES,
    "zion": _cpu(8, 20, 64, 1.9, _SKYLAKE),
    "v100-16": _TWO_SKYLAKES,
    "v100-32": _TWO_SKYLAKES,
    "t4": _cpu(2, 24, 64, 2.0, "Xeon 8259CL, clock for AVX-512 assumed"),
    "a100-40": _ROME,
    "a100-80": _ROME,
    "h100": _SAPPHIRE_RAPIDS,
    "h200": _SAPPHIRE_RAPIDS,
    "b200": _cpu(2, 56, 64, 2.6, "Xeon 8570, clock for AVX-512 assumed"),
    "gb200": _cpu(4, 72, 32, 3.1, "Grace, clock assumed"),
    "l4": _MILAN,
    "l40s": _MILAN,
    "a10": _cpu(4, 32, 64, 2.6, "Xeon 8358 of two servers, clock for AVX-512 assumed"),
    "a10g": _MILAN,
    "mi300x": _SAPPHIRE_RAPIDS,
    "mi350x": _TURIN,
    "mi355x": _TURIN,
    "gaudi2": _cpu(2, 40, 64, 2.3, "Xeon 8380, clock for AVX-512 assumed"),
    "gaudi3": _SAPPHIRE_RAPIDS,
}
"""CPU rates by server: the CPU server and Zion of Acun et al., or a GPU kind's 8-GPU server."""

FORWARD_KERNELS = 2
"""Kernels of a layer's forward pass: product with bias, and activation. This number and the next
two count what PyTorch launches; they are not measured."""

BACKWARD_KERNELS = 4
"""Kernels of a layer's backward pass: activation's gradient, two products, and the bias's sum."""

OTHER_KERNELS = 20
"""Other kernels of a step: interaction forward and backward, loss, and a fused optimizer."""

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20
"""Default sizes of DistributedDataParallel's first bucket and of the others (`bucket_cap_mb`)."""

_COLLECTIVES = 2
"""Collectives of a bucket: each GPU sums a part, and then sends it to all."""


@dataclass(frozen=True, slots=True)
class DenseCost:
    """Seconds that the dense part takes on one GPU in one step."""

    forward_s: float  # All of the forward pass, the bottom MLP included.
    # The backward pass, and the optimizer's update.
    backward_s: float
    update_s: float
    allreduce_s: float  # The sum of the gradients over all GPUs, on the links between them.
    exposed_s: float  # The part of it after the backward pass has ended.
    # Copies of dense features and labels over the host link, ahead of the step.
    input_s: float

    @property
    def step_s(self) -> float:
        """Seconds that the dense part adds to a step, without the hidden sum of gradients."""
        return self.forward_s + self.backward_s + self.exposed_s + self.update_s


@dataclass(frozen=True, slots=True)
class _Device:
    """A GPU's rates, and its samples in a step."""

    flops_per_s: float
    hbm_bytes_per_s: float
    launch_s: float
    samples: int
    value_bytes: int

    def product_s(self, product: Product) -> float:
        """Return the seconds of one product of a layer's size, forward or backward."""
        flops = 2.0 * self.samples * product.macs_per_sample
        values = self.samples * (product.inputs + product.outputs) + product.macs_per_sample
        return max(flops / self.flops_per_s, self.moved_s(values))

    def moved_s(self, values: float) -> float:
        """Return the seconds to read or write this many activations or weights."""
        return values * self.value_bytes / self.hbm_bytes_per_s


def dense_costs(problem: Problem) -> tuple[DenseCost, ...]:
    """Return the cost of the dense layers on each GPU; empty if the problem describes no layers.

    Raises ProblemError if a GPU's rate in these layers is not known; see `gpu_rate`.

    >>> from placer import Topology
    >>> from placer.dense import DenseLayers
    >>> from placer.workloads import named_workload
    >>> layers = DenseLayers(top=(512, 256, 1), bottom=(512, 256, 64, 16), dense_features=13)
    >>> tables = named_workload("criteo-kaggle")
    >>> problem = Problem(tables, Topology.parse("2xa100-40"), 2048, dense=layers)
    >>> cost = dense_costs(problem)[0]
    >>> f"{cost.step_s * 1e3:.2f} ms, of which {cost.exposed_s * 1e6:.0f} us sum gradients"
    '0.82 ms, of which 15 us sum gradients'
    """
    network, topology = problem.dense_network, problem.topology
    if network is None:
        return ()
    alike: dict[tuple[object, ...], DenseCost] = {}
    costs = []
    for gpu in topology.gpus:
        flops_per_s = gpu_rate(gpu, network.layers)
        link_bytes_per_s = topology.host_link_bytes_per_s(gpu.id)
        key = flops_per_s, gpu.hbm_bytes_per_s, gpu.launch_s, link_bytes_per_s
        if key not in alike:
            alike[key] = dense_cost(network, topology, gpu, problem.batch_size, flops_per_s)
        costs.append(alike[key])
    return tuple(costs)


def dense_step_s(problem: Problem) -> float | None:
    """Return the seconds that the dense part adds to a step; None if there is none."""
    if isinstance(problem.dense, MeasuredDense):
        return problem.dense.step_s
    return max((cost.step_s for cost in dense_costs(problem)), default=None)


def dense_cost(
    network: DenseNetwork, topology: Topology, gpu: Gpu, samples: int, flops_per_s: float
) -> DenseCost:
    """Return the cost of the dense part on one GPU, for its `samples` samples of a step."""
    device = _Device(flops_per_s, gpu.hbm_bytes_per_s, gpu.launch_s, samples, network.value_bytes)
    layers = [_layer_s(device, product) for product in network.products]
    interaction_s = _interaction_s(device, network)
    other_s = OTHER_KERNELS / 2 * device.launch_s
    forward_s = sum(forward for forward, _ in layers) + interaction_s + other_s
    steps = list(
        _backward(network, [backward for _, backward in layers], 2 * interaction_s + other_s)
    )
    backward_s = sum(seconds for seconds, _ in steps)
    sum_s = topology.allreduce_s(1.0)
    latency_s = _COLLECTIVES * topology.gpu_exchange_latency_s if len(topology.gpus) > 1 else 0.0
    return DenseCost(
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=(3 * network.parameter_bytes + 2 * network.state_bytes) / gpu.hbm_bytes_per_s,
        allreduce_s=network.parameter_bytes * sum_s,
        exposed_s=max(0.0, _summed_at(steps, sum_s, latency_s) - backward_s),
        input_s=samples * network.input_bytes_per_sample / topology.host_link_bytes_per_s(gpu.id),
    )


def _layer_s(device: _Device, product: Product) -> tuple[float, float]:
    """Return the seconds of a layer forward and backward, with activation and launches."""
    one_s, values = device.product_s(product), device.samples * product.outputs
    forward_s = one_s + device.moved_s(2 * values) + FORWARD_KERNELS * device.launch_s
    products_s = one_s * (1 if product.is_first else 2)
    # Read the activation; read and write its gradient; read the gradient for the bias.
    return forward_s, products_s + device.moved_s(4 * values) + BACKWARD_KERNELS * device.launch_s


def _interaction_s(device: _Device, network: DenseNetwork) -> float:
    """Return the seconds of the interaction forward; backward takes twice as long."""
    flops = 2.0 * device.samples * network.interaction_macs
    columns = network.vector_columns + network.interaction_columns
    return max(flops / device.flops_per_s, device.moved_s(device.samples * columns))


def _backward(
    network: DenseNetwork, layers_s: list[float], interaction_s: float
) -> Iterator[tuple[float, int]]:
    """Yield steps of the backward pass: seconds, and bytes of gradients ready after them."""
    backwards = list(zip(network.products, layers_s, strict=True))[::-1]
    for is_top, group in groupby(backwards, key=lambda one: one[0].part == "top"):
        for product, seconds in group:
            yield seconds, product.parameters * FLOAT_BYTES
        if is_top:
            yield interaction_s, 0


def _summed_at(steps: list[tuple[float, int]], byte_s: float, latency_s: float) -> float:
    """Return the seconds from the backward pass's start until the last bucket is summed.

    `steps` are those of `_backward`. A byte of gradients takes `byte_s` on the links, and each
    bucket `latency_s` in addition.
    """
    now, ready, limit, summed_at = 0.0, 0, FIRST_BUCKET_BYTES, 0.0
    for seconds, gradient_bytes in steps:
        now += seconds
        ready += gradient_bytes
        if ready >= limit:
            summed_at = max(now, summed_at) + latency_s + ready * byte_s
            ready, limit = 0, BUCKET_BYTES
    return max(now, summed_at) + (latency_s + ready * byte_s if ready else 0.0)
