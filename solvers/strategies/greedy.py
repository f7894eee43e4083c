"""The four classic greedy solvers: whole tables, sorted by a score, on the least loaded GPU.

They are the baselines of RecShard (doi:10.1145/3503222.3507777, section 5) and of TorchRec's early
planners; see "The classic greedies" in docs/solvers.md.
"""

from abc import abstractmethod
from typing import NamedTuple

import numpy as np

from placer.plan.fields import Memory
from placer.plan.memory import Shortage
from placer.plan.plan import Plan
from placer.tables import Table
from placer.units import format_bytes, listed
from solvers.model.build_plan import build_plan
from solvers.model.instance import Block, Instance, Placement, TableShard
from solvers.result import Termination
from solvers.strategies._base import Strategy
from solvers.strategies._search import Search


class _ScoreGreedy(Strategy):
    """Base class of greedy solvers for whole tables; subclasses give a table's score."""

    @abstractmethod
    def score(self, table: Table) -> float:
        """Return a table's score. Tables are sorted, and GPUs balanced, by scores."""

    def place(self, search: Search) -> Plan | Termination:
        """Return the plan of whole tables, or the reason if a table finds no room.

        There are no `assignments`: filling HBM again would split tables.
        """
        instance = search.instance
        tables = [profile.table for profile in instance.problem.profile]
        score_of = [self.score(table) for table in tables]
        kinds, load = np.array(instance.kind_of_gpu), np.zeros(instance.gpus)
        hbm, dram = instance.hbm_bytes.copy(), instance.dram_bytes.copy()
        on_gpu = np.array([instance.is_gpu(gpu) for gpu in range(instance.gpus)])
        placements: list[Placement] = []
        # A block usually has one table. It has more if the user wants tables together.
        blocks = instance.blocks(instance.whole(table) for table in range(instance.tables))
        scores = np.array([sum(score_of[shard.table] for shard in block) for block in blocks])
        order = np.argsort(-scores, kind="stable").tolist()
        # Go in the order of tables, as only the latest curves are cached.
        ends = [_Ends.of(instance, block) for block in blocks]
        # A table in DRAM needs buffers in HBM, so leave room for those of the tables to come.
        buffers = np.array([ends[n].hbm_bytes[0, 0] for n in order] + [0.0])[::-1]
        to_come, largest = np.cumsum(buffers)[-2::-1], np.maximum.accumulate(buffers)[-2::-1]
        for turn, number in enumerate(order):
            block, own = blocks[number], ends[number]
            kept = to_come[turn] / (instance.gpus - instance.servers) + largest[turn]
            may_serve = instance.open_gpus(block)
            gpu = -1
            # If no GPU has room, a server takes the block.
            for end, spare, serving in ((-1, kept, on_gpu), (0, 0.0, on_gpu), (0, 0.0, ~on_gpu)):
                needed_hbm, needed_dram = own.hbm_bytes[kinds, end], own.dram_bytes[kinds, end]
                has_room = serving & (needed_hbm + 2 * len(block) <= hbm - spare)
                has_room &= (needed_dram <= dram[instance.host_of_gpu]) & may_serve
                if has_room.any():
                    gpu = int(np.where(has_room, load, np.inf).argmin())
                    break
            if gpu < 0:
                return _no_room(instance, block, own, may_serve, hbm, dram)
            hbm[gpu] -= np.ceil(needed_hbm[gpu])
            dram[instance.host_of_gpu[gpu]] -= needed_dram[gpu]
            load[gpu] += scores[number]
            placements += [
                Placement(shard, gpu, int(hot_rows))
                for shard, hot_rows in zip(block, own.hot_rows[kinds[gpu], end], strict=True)
            ]
        return build_plan(instance, placements)


class _Ends(NamedTuple):
    """Memory of a block without rows in HBM and with all rows there, by kind of GPU."""

    # Float64, shape (kinds, 2).
    hbm_bytes: np.ndarray
    dram_bytes: np.ndarray
    hot_rows: np.ndarray  # Int64, shape (kinds, 2, shards).

    @classmethod
    def of(cls, instance: Instance, block: tuple[TableShard, ...]) -> "_Ends":
        curves = [[instance.curve(shard, gpu) for shard in block] for gpu in instance.kinds]
        ends = [0, -1]
        return cls(
            np.array([np.sum([c.hbm_bytes[ends] for c in of], axis=0) for of in curves]),
            np.array([np.sum([c.dram_bytes[ends] for c in of], axis=0) for of in curves]),
            np.array([np.stack([c.hot_rows[ends] for c in of], axis=1) for of in curves]),
        )


def _no_room(
    instance: Instance,
    block: Block,
    own: _Ends,
    may_serve: np.ndarray,
    hbm: np.ndarray,
    dram: np.ndarray,
) -> Termination:
    """Return the reason that a block finds no room in what is left of HBM and DRAM."""
    topology = instance.problem.topology
    tables = [instance.problem.profile.tables[shard.table].table for shard in block]
    names = listed([repr(table.name) for table in tables], 4)
    size = format_bytes(sum(table.total_bytes for table in tables))
    serving = np.flatnonzero(may_serve).tolist()
    gpus = [gpu for gpu in serving if instance.is_gpu(gpu)]
    host = int(max((instance.host_of_gpu[gpu] for gpu in serving), key=dram.__getitem__))
    resource: Memory = "dram"
    device, what = topology.hosts[host].id, "whole tables"
    short = float(own.dram_bytes[0, 0]) - dram[host]
    if short <= 0 and gpus:
        gpu = max(gpus, key=hbm.__getitem__)
        device, resource, what = topology.gpus[gpu].id, "hbm", "buffers"
        short = float(own.hbm_bytes[instance.kind_of_gpu[gpu], 0]) + 2 * len(block) - hbm[gpu]
    most = hbm[: instance.gpus - instance.servers].max()
    who = f"table {names} of {size} finds"
    if len(block) > 1:
        who = f"tables {names} of {size}, which stay together, find"
    return Termination(
        "no_plan",
        detail=f"{who} no room: the GPUs "
        f"have at most {format_bytes(most)} of HBM left, the hosts {format_bytes(dram.max())} of "
        "DRAM, buffers included; whole-table greedies cannot divide it, `greedy-cost` can",
        shortages=(Shortage(device, resource, max(1, int(np.ceil(short))), what),),
    )


class GreedySize(_ScoreGreedy):
    """Solver ``greedy-size``: sorts tables by bytes."""

    name = "greedy-size"

    def score(self, table: Table) -> float:
        return float(table.total_bytes)


class GreedyLookup(_ScoreGreedy):
    """Solver ``greedy-lookup``: sorts tables by lookups per sample × dim."""

    name = "greedy-lookup"

    def score(self, table: Table) -> float:
        return table.lookups_per_sample * table.dim


class GreedySizeLookup(_ScoreGreedy):
    """Solver ``greedy-size-lookup``: sorts by lookups × dim × log10(rows), as in RecShard."""

    name = "greedy-size-lookup"

    def score(self, table: Table) -> float:
        return table.lookups_per_sample * table.dim * float(np.log10(max(10, table.rows)))


class GreedyDim(_ScoreGreedy):
    """Solver ``greedy-dim``: sorts tables by dim, like AutoShard's baseline."""

    name = "greedy-dim"

    def score(self, table: Table) -> float:
        return float(table.dim)
