"""The four classic greedies: whole tables, one score, the least loaded GPU.

The baselines of RecShard (doi:10.1145/3503222.3507777, section 5) and of TorchRec's early
planners: tables are sorted by a score, largest first, and each goes whole to the GPU with
the smallest sum of scores so far that has room in HBM, or else whole into the DRAM of such
a GPU's host.
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from placer.plan.plan import Plan
from placer.tables import Table
from placer.units import format_bytes
from solvers.model.assignment import Assignment
from solvers.model.build_plan import build_plan
from solvers.model.instance import Instance, Placement, TableShard
from solvers.result import Shortage, Termination
from solvers.strategies._base import Strategy
from solvers.strategies._search import Search


class _ScoreGreedy(Strategy):
    """Sorted greedy on whole tables; subclasses say what a table's score is."""

    @abstractmethod
    def score(self, table: Table) -> float:
        """Return what tables are sorted by, largest first, and GPUs are balanced by."""

    def assignments(self, search: Search) -> Iterable[Assignment]:
        """None: HBM is not filled again, as that would split tables."""
        return ()

    def place(self, search: Search) -> Plan | Termination:
        """Return the plan with every table whole, or the first that finds no room."""
        instance = search.instance
        tables = [profile.table for profile in instance.problem.profile]
        score_of = [self.score(table) for table in tables]
        kinds, load = np.array(instance.kind_of_gpu), np.zeros(instance.gpus)
        hbm, dram = instance.hbm_bytes.copy(), instance.dram_bytes.copy()
        on_gpu = np.array([instance.is_gpu(gpu) for gpu in range(instance.gpus)])
        placements: list[Placement] = []
        # Mostly one table each; more where the user wants them together.
        blocks = instance.blocks(instance.whole(table) for table in range(instance.tables))
        scores = np.array([sum(score_of[shard.table] for shard in block) for block in blocks])
        order = np.argsort(-scores, kind="stable").tolist()
        # In the order of tables, as curves are kept of the latest alone.
        ends = [_Ends.of(instance, block) for block in blocks]
        # A table in DRAM needs buffers in HBM too: rows leave room for those still to come.
        buffers = np.array([ends[n].hbm_bytes[0, 0] for n in order] + [0.0])[::-1]
        to_come, largest = np.cumsum(buffers)[-2::-1], np.maximum.accumulate(buffers)[-2::-1]
        for turn, number in enumerate(order):
            block, own = blocks[number], ends[number]
            kept = to_come[turn] / (instance.gpus - instance.servers) + largest[turn]
            may_serve = instance.open_gpus(block)
            gpu = -1
            # Servers take what no GPU has room for.
            for end, spare, serving in ((-1, kept, on_gpu), (0, 0.0, on_gpu), (0, 0.0, ~on_gpu)):
                needed_hbm, needed_dram = own.hbm_bytes[kinds, end], own.dram_bytes[kinds, end]
                has_room = serving & (needed_hbm + 2 * len(block) <= hbm - spare)
                has_room &= (needed_dram <= dram[instance.host_of_gpu]) & may_serve
                if has_room.any():
                    gpu = int(np.where(has_room, load, np.inf).argmin())
                    break
            if gpu < 0:
                return Termination(
                    "no_plan",
                    detail=_no_room(tables[block[0].table], hbm, dram),
                    shortages=(_shortage(instance, block[0], hbm, dram),),
                )
            hbm[gpu] -= np.ceil(needed_hbm[gpu])
            dram[instance.host_of_gpu[gpu]] -= needed_dram[gpu]
            load[gpu] += scores[number]
            placements += [
                Placement(shard, gpu, int(hot_rows))
                for shard, hot_rows in zip(block, own.hot_rows[kinds[gpu], end], strict=True)
            ]
        return build_plan(instance, placements)


class _Ends(NamedTuple):
    """A block with no rows in HBM, and with all: by the kind of GPU, and which of both.

    Attributes
    ----------
    hbm_bytes, dram_bytes : float64, shape (kinds, 2)
    hot_rows : int64, shape (kinds, 2, shards)
    """

    hbm_bytes: np.ndarray
    dram_bytes: np.ndarray
    hot_rows: np.ndarray

    @classmethod
    def of(cls, instance: Instance, block: tuple[TableShard, ...]) -> "_Ends":
        curves = [[instance.curve(shard, gpu) for shard in block] for gpu in instance.kinds]
        ends = [0, -1]
        return cls(
            np.array([np.sum([c.hbm_bytes[ends] for c in of], axis=0) for of in curves]),
            np.array([np.sum([c.dram_bytes[ends] for c in of], axis=0) for of in curves]),
            np.array([np.stack([c.hot_rows[ends] for c in of], axis=1) for of in curves]),
        )


def _no_room(table: Table, hbm: np.ndarray, dram: np.ndarray) -> str:
    return (
        f"table {table.name!r} of {format_bytes(table.total_bytes)} finds no room: the GPUs have "
        f"at most {format_bytes(hbm.max())} of HBM left, the hosts {format_bytes(dram.max())} of "
        "DRAM, buffers included; whole-table greedies cannot divide it, `greedy-cost` can"
    )


def _shortage(instance: Instance, shard: TableShard, hbm: np.ndarray, dram: np.ndarray) -> Shortage:
    host = int(np.argmax(dram))
    needed = float(instance.curve(shard, 0).dram_bytes[0])
    short = needed - dram[host]
    if short > 0:
        return Shortage(
            instance.problem.topology.hosts[host].id, "dram", int(np.ceil(short)), "one whole table"
        )
    gpu = int(np.argmax(hbm))
    short = float(instance.curve(shard, gpu).hbm_bytes[0]) - hbm[gpu]
    return Shortage(
        instance.problem.topology.gpus[gpu].id, "hbm", max(1, int(np.ceil(short))), "its buffers"
    )


class GreedySize(_ScoreGreedy):
    """Sort tables by their bytes."""

    name = "greedy-size"

    def score(self, table: Table) -> float:
        return float(table.total_bytes)


class GreedyLookup(_ScoreGreedy):
    """Sort tables by bytes looked up per sample: lookups per sample × dim."""

    name = "greedy-lookup"

    def score(self, table: Table) -> float:
        return table.lookups_per_sample * table.dim


class GreedySizeLookup(_ScoreGreedy):
    """Sort tables by lookups × dim × log10(rows), RecShard's size-and-lookup score."""

    name = "greedy-size-lookup"

    def score(self, table: Table) -> float:
        return table.lookups_per_sample * table.dim * float(np.log10(max(10, table.rows)))


class GreedyDim(_ScoreGreedy):
    """Sort tables by dim, as AutoShard's baseline does."""

    name = "greedy-dim"

    def score(self, table: Table) -> float:
        return float(table.dim)
