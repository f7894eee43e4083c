"""What GPUs cost an hour: list prices of two providers, on demand, with their date.

They change, differ by region, and nobody with a contract pays them: give your own
(`placer fleet --price h100=2.5`). GPUs that no list at hand has, have no price here.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars for one GPU and hour, its part of the server included."""

    dollars_per_gpu_hour: float
    source: str = ""  # The list, the server and the date; empty for a user's own.


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
"""By the names of `placer.topology.kinds.GPU_KINDS`; MI350X and Gaudi are in neither list."""
