"""Problems that no placement fits: what is short, and by how much."""

from placer.units import format_bytes
from solvers._base import Shortage, Termination
from solvers._fill import hull
from solvers._instance import Instance, Piece


def impossible(instance: Instance) -> Termination | None:
    """A proof that nothing fits, or None if these tests do not find one.

    All rows need a place in HBM or DRAM together, and every table needs buffers in HBM
    however few of its rows are there.
    """
    tables = instance.problem.profile.tables
    hbm, dram = float(instance.hbm_bytes.sum()), float(instance.dram_bytes.sum())
    curves = [instance.curve(Piece(number), instance.kinds[0]) for number in range(instance.tables)]
    least_hbm = sum(float(hull(c, c.gpu_s).hbm_bytes[0]) for c in curves)
    if least_hbm > hbm:
        short = int(least_hbm - hbm) + 1
        return _infeasible(
            Shortage("all GPUs", "hbm", short, "buffers of staged rows and exchanges"),
            f"even with every table in DRAM, the buffers of a step of "
            f"{instance.problem.batch_size} samples per GPU take {format_bytes(least_hbm)} of HBM; "
            f"the GPUs have {format_bytes(hbm)} together. Lower --batch-size or raise --hbm",
        )
    rows = float(sum(profile.table.total_bytes for profile in tables))
    if rows > hbm + dram:
        short = int(rows - hbm - dram) + 1
        return _infeasible(
            Shortage("all hosts", "dram", short, "weights and optimizer state"),
            f"the tables take {format_bytes(rows)} with their optimizer state; HBM "
            f"({format_bytes(hbm)}) and DRAM ({format_bytes(dram)}) together are short by "
            f"{format_bytes(short)} ({short} bytes). Use more or larger machines, a smaller dim or "
            "dtype, or an optimizer with less state",
        )
    return None


def _infeasible(shortage: Shortage, detail: str) -> Termination:
    return Termination("infeasible", detail=detail, shortages=(shortage,))
