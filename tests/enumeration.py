"""The best plan of a tiny problem, by trying every one of the search space."""

from dataclasses import dataclass
from itertools import permutations, product

import numpy as np

from cost_models import CostModel
from placer import Problem
from solvers._build import build_plan
from solvers._instance import Instance, Placement


@dataclass(frozen=True)
class Choices:
    """All ways to place one table, shape (choices, GPUs or hosts): seconds and bytes."""

    gpu_s: np.ndarray
    dram_s: np.ndarray
    hbm_bytes: np.ndarray
    dram_bytes: np.ndarray

    def beside(self, other: "Choices") -> "Choices":
        """All ways to place two tables; both add up."""
        return Choices(
            *(
                (mine[:, None, :] + theirs[None, :, :]).reshape(-1, mine.shape[1])
                for mine, theirs in zip(self.parts, other.parts, strict=True)
            )
        )

    def only(self, kept: np.ndarray) -> "Choices":
        return Choices(*(part[kept] for part in self.parts))

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        return self.gpu_s, self.dram_s, self.hbm_bytes, self.dram_bytes

    @property
    def step_time_s(self) -> np.ndarray:
        return np.maximum(self.gpu_s.max(axis=1), self.dram_s.max(axis=1))


def choices_of(problem: Problem, model: CostModel, table: int) -> Choices:
    """Every cut, every assignment of its pieces, every number of hot rows of each.

    Time and memory are those of the plan that results, not of the curves that solvers use.
    """
    instance, topology = Instance(problem, model), problem.topology
    rows = problem.profile.tables[table].table.rows
    found: list[tuple[list[float], ...]] = []
    for cut in instance.cuts_of(table):
        pieces = instance.pieces(table, cut)
        hots = product(*(range(len(range(p.offset, rows, cut.ways)) + 1) for p in pieces))
        for hot, gpus in product(hots, permutations(range(instance.gpus), len(pieces))):
            placed = [Placement(p, g, h) for p, g, h in zip(pieces, gpus, hot, strict=True)]
            report = model.evaluate(problem, build_plan(instance, placed))
            found.append(
                (
                    [gpu.total_s for gpu in report.gpus],
                    [host.dram_s for host in report.hosts],
                    [report.memory[gpu.id].total_bytes for gpu in topology.gpus],
                    [report.memory[host.id].total_bytes for host in topology.hosts],
                )
            )
    return Choices(*(np.array(part, dtype=float) for part in zip(*found, strict=True)))


def best_step_time_s(problem: Problem, model: CostModel) -> float:
    """Step time of the best plan that fits; infinite if none does."""
    hbm = np.array([gpu.memory_bytes for gpu in problem.topology.gpus])
    dram = np.array([host.memory_bytes for host in problem.topology.hosts])
    choices = None
    for table in range(len(problem.profile)):
        mine = choices_of(problem, model, table)
        choices = mine if choices is None else choices.beside(mine)
        fits = (choices.hbm_bytes <= hbm).all(axis=1) & (choices.dram_bytes <= dram).all(axis=1)
        choices = choices.only(fits)
    assert choices is not None
    return float(choices.step_time_s.min(initial=np.inf))
