"""The best plan of a tiny problem, by trying every one of the search space."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations, product
from typing import NamedTuple

import numpy as np

from cost_models import CostModel, ShardingOption, TableShard
from placer import Plan, Problem
from placer.constraints.constraints import Constraints
from placer.constraints.unmet import unmet
from placer.plan.memory import row_map_bytes
from placer.tables import Table
from solvers.model.build_plan import build_plan
from solvers.model.drive_rows import at_drive_share, is_open
from solvers.model.instance import Instance, Placement


class Choice(NamedTuple):
    """One way to place a table: replicas, and pieces on GPUs with their hot rows."""

    replicas: tuple[TableShard, ...]
    placements: tuple[Placement, ...]


@dataclass(frozen=True)
class Choices:
    """Ways to place some tables, shape (choices, GPUs or hosts): seconds and bytes.

    `row_slices` has shape (choices, tables): numbers of the choices of each of the tables.
    `phase_s` has the phases of a GPU after those of the one before it, `arenas` the numbers of
    shards of each arena on each GPU in the same way.
    """

    instance: Instance
    row_slices: np.ndarray
    phase_s: np.ndarray
    arenas: np.ndarray
    dram_s: np.ndarray
    hbm_bytes: np.ndarray
    dram_bytes: np.ndarray

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        return self.phase_s, self.arenas, self.dram_s, self.hbm_bytes, self.dram_bytes

    @property
    def step_time_s(self) -> np.ndarray:
        instance, number = self.instance, len(self.row_slices)
        if not number:
            return np.zeros(0)
        held = (self.arenas.reshape(number, instance.gpus, -1) > 0).sum(axis=2)
        phase_s = self.phase_s.reshape(number, instance.gpus, -1)
        phase_s = phase_s + held[:, :, None] * np.array(instance.launches_s)
        schedule = instance.objective.schedule
        slowest = schedule.prolonged(phase_s.T).max(axis=1)
        steps = (slowest.T @ schedule.members.T + schedule.fixed).max(axis=1)
        return np.maximum(steps, self.dram_s.max(axis=1))

    def beside(self, other: "Choices") -> "Choices":
        """All ways to place the tables of both; costs add up."""
        mine, theirs = np.indices((len(self.row_slices), len(other.row_slices))).reshape(2, -1)
        return Choices(
            self.instance,
            np.concatenate((self.row_slices[mine], other.row_slices[theirs]), axis=1),
            *(one[mine] + two[theirs] for one, two in zip(self.parts, other.parts, strict=True)),
        )

    def only(self, kept: np.ndarray) -> "Choices":
        return Choices(self.instance, self.row_slices[kept], *(part[kept] for part in self.parts))

    def without_worse(self) -> "Choices":
        """Those that no other is at least as good as in everything, equal ones once."""
        costs = np.concatenate(self.parts, axis=1)
        order = np.argsort(costs.sum(axis=1), kind="stable")
        kept = []
        while order.size:
            kept.append(order[0])
            order = order[(costs[order] < costs[order[0]]).any(axis=1)]
        return self.only(np.array(kept, dtype=np.int64))


class Enumeration:
    """All plans of a problem under a cost model.

    Time and memory of every piece on every GPU with every number of hot rows are those of a
    plan of nothing else, from `CostModel.evaluate` and never from a curve; a plan's are their
    sums. Only the map of a table's rows belongs to no piece: it is on all GPUs that serve the
    table if any of its pieces asks for it.
    """

    def __init__(self, problem: Problem, model: CostModel) -> None:
        self.problem = problem
        self.model = model
        # Constraints are not taken from what solvers make of them, but asked of plans.
        self.free = replace(problem, constraints=Constraints())
        self.instance = Instance(self.free, model)
        # Servers after GPUs, all rows of whose shards are in their memory.
        self.gpus = range(len(problem.topology.serving))
        self.holding_replicas = range(len(problem.topology.gpus))
        self.part = cache(self._part)
        shards = [
            shard
            for table in range(self.instance.tables)
            for option in self.instance.options_of(table)
            for shard in (
                *self.instance.shards(table, option),
                *self.instance.replicas(table, option),
            )
        ]
        self.arenas = {arena: number for number, arena in enumerate(self.instance.arenas(shards))}
        phases = len(self.instance.objective.schedule.phases)
        self.first_byte = len(self.gpus) * (phases + len(self.arenas)) + len(problem.topology.hosts)

    def plan(self, choices: Iterable[Choice]) -> Plan:
        """The plan of some tables' choices."""
        replicas = [shard for choice in choices for shard in choice.replicas]
        placements = [placed for choice in choices for placed in choice.placements]
        return build_plan(self.instance, placements, replicas)

    def _part(self, shard: TableShard, gpu: int, hot_rows: int) -> tuple[np.ndarray, bool]:
        """Seconds and bytes of all devices, and whether a map of rows is asked for."""
        replica = shard.is_replica
        plan = build_plan(
            self.instance,
            [] if replica else [Placement(shard, gpu, hot_rows)],
            [shard] if replica else [],
        )
        report, topology = self.model.evaluate(self.free, plan), self.problem.topology
        used = report.memory
        without_map = [used[g.id].total_bytes - used[g.id].row_map_bytes for g in topology.serving]
        serving = self.holding_replicas if replica else [gpu]
        arenas = np.zeros((len(self.gpus), len(self.arenas)))
        arenas[serving, self.arenas[self.instance.arena_of(shard)]] = 1
        phase_s = np.array(report.phase_s).T
        phase_s = phase_s - (arenas.sum(axis=1) > 0)[:, None] * np.array(self.instance.launches_s)
        costs = np.array(
            phase_s.reshape(-1).tolist()
            + arenas.reshape(-1).tolist()
            + [host.dram_s for host in report.hosts]
            + without_map
            + [used[host.id].total_bytes for host in topology.hosts],
            dtype=np.float64,
        )
        return costs, bool(plan.row_order)

    def _of_option(self, table: int, option: ShardingOption) -> Iterator[tuple[Choice, np.ndarray]]:
        """All ways to place a table that is cut in this way, with their costs."""
        instance, gpus, hosts = self.instance, len(self.gpus), len(self.problem.topology.hosts)
        shards, replicas = instance.shards(table, option), instance.replicas(table, option)
        base, base_map = 0.0, False
        for replica in replicas:
            base, base_map = self.part(replica, 0, option.replicated_rows)
        spec = self.problem.profile.tables[table].table
        ways = [self._ways(shard, spec) for shard in shards]
        for homes in permutations(self.gpus, len(shards)):
            served = np.zeros(self.first_byte + gpus + hosts)
            holders = {*homes, *(self.holding_replicas if replicas else ())}
            at = [self.first_byte + gpu for gpu in holders]
            served[at] = row_map_bytes(spec)
            allowed: dict[tuple[tuple[bool, ...], ...], bool] = {}
            of_homes = [
                # A server has no hot rows: all of its rows are in its memory.
                way
                if instance.is_gpu(gpu)
                else [(one, 0, (True, not spec.rows)) for one, *_ in way[:1]]
                for way, gpu in zip(ways, homes, strict=True)
            ]
            for way in product(*of_homes):
                placed = tuple(
                    Placement(shard, gpu, hot)
                    for (shard, hot, _), gpu in zip(way, homes, strict=True)
                )
                kinds = tuple(kind for _, _, kind in way)
                if kinds not in allowed:
                    allowed[kinds] = self._is_allowed(Choice(replicas, placed))
                if not allowed[kinds]:
                    continue
                parts = [self.part(p.shard, p.gpu, p.hot_rows) for p in placed]
                costs = base + sum(cost for cost, _ in parts)
                if base_map or any(mapped for _, mapped in parts):
                    costs = costs + served
                yield Choice(replicas, placed), costs

    def _is_allowed(self, choice: Choice) -> bool:
        constraints = self.problem.constraints
        return not (constraints and unmet(self.plan([choice]), constraints))

    def _ways(
        self, shard: TableShard, spec: Table
    ) -> list[tuple[TableShard, int, tuple[bool, ...]]]:
        """Shards with hot rows, and what constraints tell apart: none, some and all rows.

        With every number of rows on the drive where that is open.
        """
        rows, hots = len(range(*shard.rows(spec.rows))), self._hot_rows(shard, spec)
        if not is_open(shard):
            return [(shard, hot, (hot == 0, hot == hots[-1])) for hot in hots]
        return [
            (at_drive_share(shard, rows - first, rows), hot, (hot == 0, False))
            for first in (range(1, rows) if len(hots) == rows + 1 else ())
            for hot in range(first)
        ]

    def _hot_rows(self, shard: TableShard, spec: Table) -> Sequence[int]:
        """Every number of hot rows that is not forbidden."""
        rows = len(range(*shard.rows(spec.rows)))
        rule = self.problem.constraints.rule_of(spec.name)
        if shard.option.cold in rule.forbid:
            return [rows]
        if "split" in rule.forbid and ("cached" in rule.forbid or shard.option.cold != "cached"):
            return sorted({0, rows})
        return range(rows + 1)

    def choices_of(self, table: int) -> tuple[list[Choice], Choices]:
        """Every cut, assignment of its pieces, and number of hot rows of each that is allowed."""
        options = self.model.sharding_options(self.problem, table)
        found = [way for option in options for way in self._of_option(table, option)]
        gpus, hosts = len(self.gpus), len(self.problem.topology.hosts)
        first = self.first_byte
        costs = np.array([costs for _, costs in found]).reshape(-1, first + gpus + hosts)
        ends = [first - hosts - gpus * len(self.arenas), first - hosts, first, first + gpus]
        choices = Choices(
            self.instance, np.arange(len(found))[:, None], *np.split(costs, ends, axis=1)
        )
        return [choice for choice, _ in found], choices

    def best(self) -> tuple[float, Plan | None]:
        """The step time and the plan of the best placement that fits; infinite if none does."""
        topology, names = self.problem.topology, self.problem.profile.table_names
        hbm = np.array([gpu.memory_bytes for gpu in topology.serving])
        dram = np.array([host.memory_bytes for host in topology.hosts])
        groups = [[names.index(n) for n in g] for g in self.problem.constraints.together]
        tables = [self.choices_of(table) for table in range(len(names))]
        best: tuple[float, Plan | None] = np.inf, None
        # Tables that one GPU has to serve: on one after the other.
        for homes in product(self.gpus, repeat=len(groups)):
            kept = [choices for _, choices in tables]
            for home, group in zip(homes, groups, strict=True):
                for table in group:
                    here = [all(p.gpu == home for p in c.placements) for c in tables[table][0]]
                    kept[table] = kept[table].only(np.array(here, dtype=bool))
            together = None
            for number, mine in enumerate(kept):
                more = mine.without_worse()
                together = more if together is None else together.beside(more)
                fits = (together.hbm_bytes <= hbm).all(axis=1)
                fits &= (together.dram_bytes <= dram).all(axis=1)
                together = together.only(fits)
                together = together.only(together.step_time_s < best[0])
                if number + 1 < len(kept):
                    together = together.without_worse()
            if len(together.row_slices):
                fastest = int(together.step_time_s.argmin())
                row_slices = zip(tables, together.row_slices[fastest].tolist(), strict=True)
                chosen = [choices[number] for (choices, _), number in row_slices]
                best = float(together.step_time_s[fastest]), self.plan(chosen)
        if best[1] is None:
            return best
        # Row-wise Adagrad sends more between three column slices than one beside none tells.
        return self.model.evaluate(self.problem, best[1]).step_time_s, best[1]
