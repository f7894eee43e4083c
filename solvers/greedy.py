"""The four classic greedies: whole tables, one score, the least loaded GPU.

The baselines of RecShard (doi:10.1145/3503222.3507777, section 5) and of TorchRec's early
planners: tables are sorted by a score, largest first, and each goes whole to the GPU with
the smallest sum of scores so far that has room in HBM, or else whole into the DRAM of such
a GPU's host.
"""

import time
from abc import ABC, abstractmethod

import numpy as np

from cost_models import CostModel
from placer.problem import Problem
from placer.tables import Table
from placer.units import format_bytes
from solvers._base import Limits, Shortage, SolveResult, Termination
from solvers._bound import pooled_bound
from solvers._build import build_plan, finished
from solvers._feasibility import impossible
from solvers._instance import Instance, Piece, Placement


class _ScoreGreedy(ABC):
    """Sorted greedy on whole tables; subclasses say what a table's score is."""

    name: str

    @abstractmethod
    def score(self, table: Table) -> float:
        """What tables are sorted by, largest first, and GPUs are balanced by."""

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Place every table whole. See `Solver.solve`."""
        started = time.monotonic()
        instance = Instance(problem, cost_model)
        failure = impossible(instance)
        if failure:
            return SolveResult(None, failure)
        bound = pooled_bound(instance)
        tables = [profile.table for profile in problem.profile]
        scores = np.array([self.score(table) for table in tables])
        load = np.zeros(instance.gpus)
        hbm, dram = instance.hbm_bytes.copy(), instance.dram_bytes.copy()
        placements = []
        order = np.argsort(-scores, kind="stable")
        # A table in DRAM needs buffers in HBM too: rows leave room for those still to come.
        buffers = np.array([instance.curve(Piece(int(n)), 0).hbm_bytes[0] for n in order])
        for turn, number in enumerate(order):
            piece = Piece(int(number))
            chosen: Placement | None = None
            by_load = np.argsort(load, kind="stable")
            to_come = buffers[turn + 1 :]
            kept = to_come.sum() / instance.gpus + to_come.max(initial=0.0)
            for hot in (tables[number].rows, 0):
                for gpu in by_load:
                    curve = instance.curve(piece, int(gpu))
                    end = -1 if hot else 0
                    room = hbm[gpu] - (kept if hot else 0.0)
                    if curve.hbm_bytes[end] + 1 <= room and (
                        curve.dram_bytes[end] <= dram[instance.host_of_gpu[gpu]]
                    ):
                        chosen = Placement(piece, int(gpu), hot)
                        hbm[gpu] -= np.ceil(curve.hbm_bytes[end])
                        dram[instance.host_of_gpu[gpu]] -= curve.dram_bytes[end]
                        break
                if chosen:
                    break
            if chosen is None:
                return SolveResult(
                    None,
                    Termination(
                        "no_plan",
                        detail=_no_room(tables[number], hbm, dram),
                        shortages=(_shortage(instance, piece, hbm, dram),),
                    ),
                    bound_s=bound.step_time_s,
                )
            load[chosen.gpu] += scores[number]
            placements.append(chosen)
        return finished(
            self.name,
            instance,
            build_plan(instance, placements),
            bound_s=bound.step_time_s,
            limits=limits,
            started=started,
        )


def _no_room(table: Table, hbm: np.ndarray, dram: np.ndarray) -> str:
    return (
        f"table {table.name!r} of {format_bytes(table.total_bytes)} finds no room: the GPUs have "
        f"at most {format_bytes(hbm.max())} of HBM left, the hosts {format_bytes(dram.max())} of "
        "DRAM, buffers included; whole-table greedies cannot cut it, `greedy-cost` can"
    )


def _shortage(instance: Instance, piece: Piece, hbm: np.ndarray, dram: np.ndarray) -> Shortage:
    host = int(np.argmax(dram))
    needed = float(instance.curve(piece, 0).dram_bytes[0])
    short = needed - dram[host]
    if short > 0:
        return Shortage(
            instance.problem.topology.hosts[host].id, "dram", int(np.ceil(short)), "one whole table"
        )
    gpu = int(np.argmax(hbm))
    short = float(instance.curve(piece, gpu).hbm_bytes[0]) - hbm[gpu]
    return Shortage(
        instance.problem.topology.gpus[gpu].id, "hbm", max(1, int(np.ceil(short))), "its buffers"
    )


class GreedySize(_ScoreGreedy):
    """By bytes of the table."""

    name = "greedy-size"

    def score(self, table: Table) -> float:
        return float(table.total_bytes)


class GreedyLookup(_ScoreGreedy):
    """By bytes looked up per sample: lookups per sample × dim."""

    name = "greedy-lookup"

    def score(self, table: Table) -> float:
        return table.lookups_per_sample * table.dim


class GreedySizeLookup(_ScoreGreedy):
    """By lookups × dim × log10(rows), RecShard's size-and-lookup score."""

    name = "greedy-size-lookup"

    def score(self, table: Table) -> float:
        return table.lookups_per_sample * table.dim * float(np.log10(max(10, table.rows)))


class GreedyDim(_ScoreGreedy):
    """By dim, as AutoShard's baseline does."""

    name = "greedy-dim"

    def score(self, table: Table) -> float:
        return float(table.dim)
