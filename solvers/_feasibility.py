"""Problems that no placement fits: what is short, and by how much."""

import math

from placer.units import format_bytes
from solvers._base import Shortage, Termination
from solvers._instance import Instance, Piece


def impossible(instance: Instance) -> Termination | None:
    """A proof that nothing fits, or None if these tests do not find one.

    Every table needs buffers in HBM however few of its rows are there, and all rows and
    buffers need a place in HBM or DRAM together. Cutting a table makes neither smaller.
    """
    hbm, dram = float(instance.hbm_bytes.sum()), float(instance.dram_bytes.sum())
    curves = [instance.curve(Piece(number), instance.kinds[0]) for number in range(instance.tables)]
    least_hbm = math.fsum(float(curve.hbm_bytes.min()) for curve in curves)
    if least_hbm > hbm:
        short = math.ceil(least_hbm - hbm)
        return _infeasible(
            Shortage("all GPUs", "hbm", short, "buffers of staged rows and exchanges"),
            f"even with every table in DRAM, the buffers of a step of "
            f"{instance.problem.batch_size} samples per GPU take {format_bytes(least_hbm)} of HBM; "
            f"the GPUs have {format_bytes(hbm)} together. Lower --batch-size or raise --hbm",
        )
    least = math.fsum(float((curve.hbm_bytes + curve.dram_bytes).min()) for curve in curves)
    if least > hbm + dram:
        short = math.ceil(least - hbm - dram)
        return _infeasible(
            Shortage("all hosts", "dram", short, "weights, optimizer state and buffers"),
            f"the tables take {format_bytes(least)} with optimizer state and buffers; HBM "
            f"({format_bytes(hbm)}) and DRAM ({format_bytes(dram)}) together are short by "
            f"{format_bytes(short)} ({short} bytes). Use more or larger machines, a smaller dim or "
            "dtype, or an optimizer with less state",
        )
    return None


def _infeasible(shortage: Shortage, detail: str) -> Termination:
    return Termination("infeasible", detail=detail, shortages=(shortage,))
