"""Alternative placements of one table: other hot/cold splits, GPUs and sharding options."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any

from cost_models import CostModel, CostReport, ShardingOption, TableShard
from cost_models.arenas import (
    Loads,
    added_up,
    arena_loads,
    joined_loads,
    tables_by_arena,
    times_by_arena,
)
from cost_models.step_equation.phases import NAMES
from placer.errors import PlacerError, PlanMismatchError
from placer.plan.memory import device_memory
from placer.plan.plan import Plan
from placer.problem import Problem
from solvers.model.build_plan import build_plan
from solvers.model.instance import Block, Instance, Placement
from solvers.model.knapsack import BYTES, Float, solve_knapsack
from solvers.model.read_plan import is_one_of, placements_of

_MOST_GPUS = 8
"""Number of other GPUs to try for a table; those with room and the least load come first."""

_COLD_NAMES = {
    "uva": "cold rows read in place",
    "host": "cold rows pooled by the host",
    "cached": "cold rows through a cache",
}

_MOST_ATTEMPTS = 12
"""Largest number of times that a placement that does not fit gets fewer rows in HBM."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another placement of one table; all other tables stay as they are.

    `step_time_s` is the step time of the whole plan, even if it does not fit. `table_s` is the
    table's own time, summed over GPUs. `short_bytes` has the bytes that devices lack, by device.
    """

    name: str
    step_time_s: float
    table_s: float
    short_bytes: dict[str, int]
    plan: Plan


class PlannedTable:
    """A table's placement in a plan, and the memory and time that the other tables leave.

    Raises a `PlacerError` if no `ShardingOption` describes the table's placement.
    """

    def __init__(self, problem: Problem, plan: Plan, table: str, cost_model: CostModel) -> None:
        self.problem, self.plan, self.table, self.cost_model = problem, plan, table, cost_model
        self.instance = Instance(problem, cost_model)
        self.number = problem.profile.table_numbers[table]
        placement = placements_of(self.instance, plan, table)
        if placement is None:
            raise PlacerError(
                f"table {table!r} is placed in a way that solvers do not search, so there is "
                "nothing to compare it with; --explain knows tables that are whole or in row "
                "slices (strided, or even blocks), column slices or both, each shard on a GPU "
                "of its own and read in one way, with all or the hottest rows on every GPU or none"
            )
        self.option, self.placements = placement.option, placement.placements
        self.replicas = placement.replicas
        self.in_group = self.instance.in_group(self.number)
        self.cost = cost_model.evaluate(problem, plan)
        self.own = replace(plan, shards=plan.shards_by_table[table])
        self.own_cost = cost_model.evaluate(problem, self.own)
        self._others = replace(plan, shards=tuple(s for s in plan.shards if s.table != table))
        self.others_cost = cost_model.evaluate(problem, self._others)
        self._others_loads = arena_loads(problem, self._others)
        neighbours = tables_by_arena(problem, self._others).items()
        self._neighbours = {arena: members.sum(axis=0) for arena, members in neighbours}
        gpus = problem.topology.serving
        self.free_hbm = [self.others_cost.memory[gpu.id].free_bytes for gpu in gpus]
        self.current = self._alternative("as planned", plan, self.own, self.own_cost)
        # Options that differ only in `cold` may give the same placement.
        self._seen = {frozenset(self.own.shards)}

    def costed(self, name: str, own: Plan) -> Iterator[Alternative]:
        """Yield the whole plan with the table placed as in `own`.

        Yield nothing if this placement was costed before, or the cost model does not know it.
        """
        shards = frozenset(own.shards)
        if shards in self._seen:
            return
        self._seen.add(shards)
        row_order = {k: v for k, v in self.plan.row_order.items() if k != self.table}
        hot_ids = {k: v for k, v in self.plan.hot_ids.items() if k != self.table}
        order: Any = {"row_order": row_order | own.row_order, "hot_ids": hot_ids | own.hot_ids}
        plan = replace(self._others, shards=(*self._others.shards, *own.shards), **order)
        try:
            cost = self.cost_model.evaluate(self.problem, own)
        except PlanMismatchError:
            return
        yield self._alternative(name, plan, own, cost)

    def _alternative(self, name: str, plan: Plan, own: Plan, cost: CostReport) -> Alternative:
        """Return the alternative in which the table has this cost.

        Costs of tables add up, except for arenas that they share.
        """
        others = self.others_cost
        shared_s, table_s = self._shared(own)
        phase_s = cost.phase_times_s + others.phase_times_s - shared_s
        hosts = [a.dram_s + b.dram_s for a, b in zip(cost.hosts, others.hosts, strict=True)]
        # If any table is on servers, these take part in the exchanges of the whole plan.
        schedule = max(cost.schedule, others.schedule, key=attrgetter("fixed_s"))
        step_time_s = max(schedule.step_time_s(phase_s), *hosts)
        table_s += cost.tables[self.table].gpu_s
        return Alternative(name, step_time_s, table_s, self.short_bytes(own), plan)

    def _shared(self, own: Plan) -> tuple[Float, float]:
        """Return seconds that shared arenas save, (phases, GPUs), and a correction of table time.

        They save time compared with separate arenas for the table and the others. The correction is
        the table's share of shared arenas minus the time of its own arenas.
        """
        loads = arena_loads(self.problem, own)
        # GPUs without the table share nothing.
        both = zip(self._others_loads, loads, strict=True)
        others = [load if mine else {} for load, mine in both]
        parts: tuple[Sequence[Loads], ...] = joined_loads(loads, others), loads, others
        together, alone, apart = (
            times_by_arena(self.cost_model, self.problem, part) for part in parts
        )
        phases = len(self.others_cost.phase_times_s)
        saved_s = added_up(alone, phases) + added_up(apart, phases) - added_up(together, phases)
        table_s = 0.0
        for gpu, mine in enumerate(alone):
            for arena, alone_s in mine.items():
                sharers = 1 + (self._neighbours[arena][gpu] if arena in self._neighbours else 0)
                own_s = together[gpu][arena] / sharers - alone_s
                table_s += float(own_s[: len(NAMES)].sum())
        return saved_s, table_s

    def short_bytes(self, own: Plan) -> dict[str, int]:
        """Return the bytes that each device lacks to hold `own` beside the other tables."""
        free = {name: use.free_bytes for name, use in self.others_cost.memory.items()}
        used = {name: use.total_bytes for name, use in device_memory(own).items()}
        return {name: used[name] - free[name] for name in used if used[name] > free[name]}

    def filled(self, shards: Sequence[tuple[TableShard, int]], replicas: Block) -> Plan:
        """Place the table's shards on these GPUs; fill HBM with rows that pay and fit."""
        free = list(self.free_hbm)
        for replica, gpu in product(replicas, range(self.instance.gpus)):
            free[gpu] -= int(self.instance.priced_costs(replica, gpu)[BYTES, 0])
        spare = [0] * self.instance.gpus
        for attempt in range(_MOST_ATTEMPTS):
            placements = [
                Placement(shard, gpu, self._hot_rows(shard, gpu, free[gpu] - spare[gpu]))
                for shard, gpu in shards
            ]
            own = build_plan(self.instance, placements, replicas)
            short = self.short_bytes(own)
            excess = [short.get(gpu.id, 0) for gpu in self.problem.topology.serving]
            if not any(excess[p.gpu] and p.hot_rows for p in placements):
                break
            # A plan may take more bytes than its curves say, so leave room for these.
            spare = [s + (e << attempt) for s, e in zip(spare, excess, strict=True)]
        return own

    def _hot_rows(self, shard: TableShard, gpu: int, room_bytes: float) -> int:
        """Return the rows in HBM that save most within `room_bytes`; the fewest if none fit."""
        curve, costs = self.instance.curve(shard, gpu), self.instance.priced_costs(shard, gpu)
        knapsack = solve_knapsack([costs], room_bytes, lambda _: curve)
        return int(curve.hot_rows[0]) if knapsack is None else knapsack.hot_rows[0]


def alternatives(planned: PlannedTable) -> tuple[Alternative, ...]:
    """Return all rows in one tier, then other GPUs and sharding options, the best first."""
    splits = list(_other_splits(planned))
    others = (*_on_other_gpus(planned), *_other_options(planned))
    return (*splits, *sorted(others, key=_rank))


def _rank(one: Alternative) -> tuple[bool, float, float]:
    """Return a sort key: alternatives that fit come first, then faster ones."""
    return bool(one.short_bytes), one.step_time_s, one.table_s


def _other_splits(planned: PlannedTable) -> Iterator[Alternative]:
    """Yield alternatives with all rows in one tier, and shards on the same GPUs."""
    instance, placed = planned.instance, planned.placements
    curves = [instance.curve(p.shard, p.gpu) for p in placed]
    for name, end in (("all rows in HBM", -1), ("all rows in DRAM", 0)):
        moved = [
            Placement(p.shard, p.gpu, int(curve.hot_rows[end]))
            for p, curve in zip(placed, curves, strict=True)
        ]
        # If constraints forbid a tier, the curve ends before all rows are in it.
        rows = instance.rows(planned.number)
        wanted = [len(range(*p.shard.rows(rows))) if end else 0 for p in moved]
        if moved != list(placed) and [p.hot_rows for p in moved] == wanted:
            yield from planned.costed(name, build_plan(instance, moved, planned.replicas))


def _on_other_gpus(planned: PlannedTable) -> Iterator[Alternative]:
    """Move the shard on the slowest GPU to each GPU without the table; yield these."""
    placed = planned.placements
    if not placed or planned.in_group:
        return
    times = planned.cost.gpu_s.tolist()
    slowest = max(placed, key=lambda p: (times[p.gpu], -p.gpu))
    taken = {p.gpu for p in placed}
    others = [gpu for gpu in _roomy_first(planned, slowest.shard) if gpu not in taken]
    ids = [gpu.id for gpu in planned.problem.topology.serving]
    what = "" if len(placed) == 1 else f"shard of {ids[slowest.gpu]} "
    for gpu in others[:_MOST_GPUS]:
        pairs = [(p.shard, gpu if p is slowest else p.gpu) for p in placed]
        own = planned.filled(pairs, planned.replicas)
        yield from planned.costed(f"{what}on {ids[gpu]}", own)


def _other_options(planned: PlannedTable) -> Iterator[Alternative]:
    """Yield other sharding options: the best for each number of row and column slices."""
    instance = planned.instance
    best: dict[tuple[object, ...], Alternative] = {}
    for option in instance.options_of(planned.number):
        if is_one_of(option, [planned.option]) or option.shard_count > instance.gpus:
            continue
        shards = instance.shards(planned.number, option)
        gpus = _roomy_first(planned, shards[0]) if shards else []
        if planned.in_group:  # The table stays with its group.
            gpus = [placed.gpu for placed in planned.placements]
        if option.blocked:
            gpus = [shard.home_gpu for shard in shards if shard.home_gpu is not None]
        if len(gpus) < len(shards):
            continue
        name = _option_name(option, instance.rows(planned.number))
        pairs = list(zip(shards, gpus, strict=False))
        own = planned.filled(pairs, instance.replicas(planned.number, option))
        # Options of one kind differ only in widths of column slices or in their first GPU.
        widths = (0,) * len(option.column_widths)
        kind = option._replace(column_widths=widths, first_gpu=0)
        for one in planned.costed(name, own):
            best[kind] = min(best.get(kind, one), one, key=_rank)
    yield from best.values()


def _roomy_first(planned: PlannedTable, shard: TableShard) -> list[int]:
    """Return the GPUs that may serve a shard: GPUs with room for it first, then by load."""
    instance, gpu_s = planned.instance, planned.others_cost.gpu_s

    def rank(gpu: int) -> tuple[bool, float, int]:
        least_bytes = float(instance.priced_costs(shard, gpu)[BYTES].min())
        return planned.free_hbm[gpu] < least_bytes, gpu_s[gpu], gpu

    return sorted((g for g in range(instance.gpus) if instance.may_serve(shard, g)), key=rank)


def _option_name(option: ShardingOption, rows: int) -> str:
    if option.replicated_rows >= rows > 0:
        return "replicated on every GPU"
    words = []
    if option.row_slices > 1:
        words.append(f"{option.row_slices} {'blocks of rows' if option.blocked else 'row slices'}")
    if option.column_widths:
        widths = "+".join(map(str, option.column_widths))
        words.append(f"{len(option.column_widths)} column slices of {widths} columns")
    name = " x ".join(words) or "in one piece"
    if option.replicated_rows:
        name = f"{option.replicated_rows:,} hottest rows on every GPU, the others {name}"
    if option.cold != "staged":
        name += f", {_COLD_NAMES[option.cold]}"
    if option.home.drive_share:
        name += f", cold rows {'on SSD' if option.home.drive_share == 1 else 'in DRAM and on SSD'}"
    return f"{name}, cold rows as {option.home.dtype}" if option.home.dtype else name
