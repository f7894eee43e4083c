"""Operations per second that GPUs and CPUs reach in dense layers, and where that comes from."""

from dataclasses import dataclass

from placer.dense import DenseLayers, DenseMath
from placer.errors import ProblemError
from placer.topology.devices import Gpu

_GPU_SHARE = 0.75
_TENSOR_SHARE = 0.45
_FITTED = (
    "the share is fitted to whole training steps that others published for DLRM, DCN-V2 and Wide & "
    "Deep (benchmarks/published)"
)
_CPU_SHARE = 0.50


@dataclass(frozen=True, slots=True)
class FlopRate:
    """Floating-point operations per second."""

    stated_per_s: float  # The vendor's peak, or what was measured.
    share: float  # What MLPs reach of it, in 0..1; 1 where it was measured.
    source: str  # Where both come from.

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


def _gpu(
    chip: str, tflops: dict[DenseMath, float], vendor: str = "NVIDIA"
) -> dict[DenseMath, FlopRate]:
    fitted = _FITTED if vendor == "NVIDIA" else f"{_FITTED}, on other GPUs: an assumption here"
    return {
        math: FlopRate(
            rate * 1e12,
            _GPU_SHARE if math == "float32" else _TENSOR_SHARE,
            f"{vendor} {chip} datasheet, {math} without sparsity; {fitted}",
        )
        for math, rate in tflops.items()
    }


_V100 = _gpu("V100 SXM2", {"float32": 15.7, "float16": 125.0})
_A100 = _gpu("A100", {"float32": 19.5, "tf32": 156.0, "float16": 312.0, "bfloat16": 312.0})
_H100: dict[DenseMath, float] = {
    "float32": 67.0, "tf32": 494.7, "float16": 989.4, "bfloat16": 989.4,
}  # fmt: skip

GPU_FLOPS: dict[str, dict[DenseMath, FlopRate]] = {
    "v100-16": _V100,
    "v100-32": _V100,
    "t4": _gpu("T4", {"float32": 8.1, "float16": 65.0}),
    "a100-40": _A100,
    "a100-80": _A100,
    "h100": _gpu("H100 SXM", _H100),
    "h200": _gpu("H200 SXM", _H100),
    "b200": _gpu(
        "HGX B200", {"float32": 75.0, "tf32": 1100.0, "float16": 2250.0, "bfloat16": 2250.0}
    ),
    "gb200": _gpu(
        "GB200 NVL72", {"float32": 80.0, "tf32": 1250.0, "float16": 2500.0, "bfloat16": 2500.0}
    ),
    "l4": _gpu("L4", {"float32": 30.3, "tf32": 60.0, "float16": 121.0, "bfloat16": 121.0}),
    "l40s": _gpu("L40S", {"float32": 91.6, "tf32": 183.0, "float16": 362.05, "bfloat16": 362.05}),
    "a10": _gpu("A10", {"float32": 31.2, "tf32": 62.5, "float16": 125.0, "bfloat16": 125.0}),
    "a10g": _gpu("A10G", {"float32": 31.5, "tf32": 35.0, "float16": 70.0, "bfloat16": 70.0}),
    "mi300x": _gpu(
        "Instinct MI300X",
        {"float32": 163.4, "tf32": 653.7, "float16": 1307.4, "bfloat16": 1307.4},
        "AMD",
    ),
    "mi350x": _gpu(
        "Instinct MI350X", {"float32": 144.2, "float16": 2300.0, "bfloat16": 2300.0}, "AMD"
    ),
    "mi355x": _gpu(
        "Instinct MI355X", {"float32": 157.3, "float16": 2500.0, "bfloat16": 2500.0}, "AMD"
    ),
    "gaudi2": _gpu("Gaudi 2", {"bfloat16": 432.0}, "Intel"),
    "gaudi3": _gpu("Gaudi 3", {"bfloat16": 1835.0}, "Intel"),
}
"""By the GPU kinds of `placer.topology.presets`, and the type in which matrices are multiplied."""


def gpu_rate(gpu: Gpu, layers: DenseLayers) -> float:
    """Operations per second that a GPU reaches in given layers."""
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
        return known["float32"].per_s  # As frameworks do on chips that are older than it.
    if layers.math not in known:
        raise ProblemError(
            f"{gpu.id} is a {gpu.chip}, which does not multiply in {layers.math}; it has "
            f"{', '.join(known)}"
        )
    return known[layers.math].per_s


def _cpu(sockets: int, cores: int, flops_per_cycle: int, ghz: float, chip: str) -> FlopRate:
    """Peak of a server's CPUs: sockets × cores × operations per cycle × clock."""
    return FlopRate(
        sockets * cores * flops_per_cycle * ghz * 1e9,
        _CPU_SHARE,
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
"""By server: the CPU server and Zion of Acun et al., or the 8-GPU server of a GPU kind."""
