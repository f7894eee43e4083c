"""Why a table is where it is: its rows' worth against the price of HBM, and its alternatives.

Every alternative changes one table and leaves all others as they are; its cost is the cost
model's answer for the whole plan so changed. Of the rows of an alternative as many are in HBM
as save time and fit beside the other tables. What the user asks of the table binds it as far as
an alternative that only this forbids would be faster.
"""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cost_models import CostCurve, CostModel, CostReport
from placer.constraints.constraints import Constraints
from placer.constraints.rules import TableRule
from placer.errors import PlacerError, PlanMismatchError
from placer.plan.memory import device_memory
from placer.plan.plan import Plan
from placer.problem import Problem
from placer.units import format_bytes, format_seconds
from solvers.bounds.lagrangian import lagrangian_bound
from solvers.model.build_plan import build_plan
from solvers.model.instance import Instance, Placement, ShardingOption, TableShard
from solvers.model.knapsack import BYTES, solve_knapsack
from solvers.model.read_plan import is_one_of, placements_of

Constraint = Literal[
    "hbm", "dram", "hottest row", "pin", "tier", "forbidden", "together", "work"
]  # fmt: skip

_MOST_GPUS = 8
"""Other GPUs that a table is tried on, those with room and the least load first."""

_PRICE_SHARE = 1 / 64
"""Share of a GPU's HBM over which its price is measured: far more than a row, far less than all."""

_FULL = 0.99
"""A memory that is filled to this share counts as full: rows and buffers do not come in bytes."""

_REFILLS = 12

_GAIN = 1e-6
"""A step is faster than another by at least this share: more than rounding."""


@dataclass(frozen=True, slots=True)
class ShardMargin:
    """The worth of HBM at the split of one piece of a table, beside its price.

    Attributes
    ----------
    device : str
        The GPU that serves the piece.
    rows, hot_rows : int
        Rows of the piece, and those of them in HBM.
    last_s_per_byte, next_s_per_byte : float or None
        Seconds per byte that the coldest rows in HBM save, and that the hottest rows in DRAM
        would save; None where there are none.
    gpu_price_s_per_byte : float or None
        What one more byte of this GPU's HBM would save of its time, refilled with all its
        pieces; None if it serves a placement that solvers do not search.
    """

    device: str
    rows: int
    hot_rows: int
    last_s_per_byte: float | None
    next_s_per_byte: float | None
    gpu_price_s_per_byte: float | None


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another placement of the table, everything else as it is.

    Attributes
    ----------
    name : str
        For people.
    step_time_s : float
        Of the whole plan, whether it fits or not.
    table_s : float
        Time of the table by itself, summed over GPUs.
    short_bytes : dict of device to int
        What the plan lacks; empty if it fits.
    plan : Plan
    """

    name: str
    step_time_s: float
    table_s: float
    short_bytes: dict[str, int]
    plan: Plan


@dataclass(frozen=True, slots=True)
class Binding:
    """A constraint that keeps the table from a better placement, and how."""

    constraint: Constraint
    device: str
    detail: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What decided the placement of one table.

    Attributes
    ----------
    current : Alternative
        The placement as it is.
    pooled_price_s_per_byte : float
        The price of HBM if all GPUs' were one pool, in GPU seconds per byte.
    margins : tuple of PieceMargin
    alternatives : tuple of Alternative
        All rows in HBM and none, then other GPUs and cuts: those that fit first, fastest first.
        The constraints allow them all.
    bindings : tuple of Binding
    """

    table: str
    current: Alternative
    pooled_price_s_per_byte: float
    margins: tuple[ShardMargin, ...]
    alternatives: tuple[Alternative, ...]
    bindings: tuple[Binding, ...]


def explain(problem: Problem, plan: Plan, table: str, cost_model: CostModel) -> Explanation:
    """Explain the placement of `table` in `plan`.

    Raises
    ------
    PlacerError
        If the plan has no such table, or places it in a way that no `ShardingOption` describes:
        rows replicated on some GPUs only, uneven row slices, two pieces on one GPU.
    """
    if table not in plan.tables_by_name:
        raise PlacerError(f"the plan has no table {table!r}; it has {_some(plan)}")
    asked = _Question(problem, plan, table, cost_model)
    margins = tuple(_margin(asked, p, _gpu_price(asked, p.gpu)) for p in asked.placements)
    alternatives = _alternatives(asked)
    return Explanation(
        table,
        asked.current,
        lagrangian_bound(asked.instance).price_s_per_byte,
        margins,
        alternatives,
        (*_bindings(asked), *_asked_for(asked, alternatives), _work(asked, asked.cost)),
    )


def _alternatives(asked: "_Question") -> tuple[Alternative, ...]:
    """Other splits, GPUs and cuts."""
    splits = list(_other_splits(asked))
    return (*splits, *sorted((*_on_other_gpus(asked), *_other_options(asked)), key=_rank))


def _some(plan: Plan) -> str:
    names = list(plan.tables_by_name)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


class _Question:
    """The plan, what the table has in it, and what there is without the table."""

    def __init__(self, problem: Problem, plan: Plan, table: str, cost_model: CostModel) -> None:
        self.plan, self.table, self.cost_model = plan, table, cost_model
        self.problem = problem
        self.instance = Instance(problem, cost_model)
        self.number = problem.profile.table_names.index(table)
        found = placements_of(self.instance, plan, table)
        if found is None:
            raise PlacerError(
                f"table {table!r} is placed in a way that solvers do not search, so there is "
                "nothing to compare it with; --explain knows tables that are whole or in row "
                "slices (strided, or even blocks), strips of columns or both, each piece on a GPU "
                "of its own and read in one way, with all or the hottest rows on every GPU or none"
            )
        self.option, self.placements, self.replica = found.option, found.placements, found.replica
        self.in_group = self.instance.in_group(self.number)
        self.rest = replace(plan, shards=tuple(s for s in plan.shards if s.table != table))
        self.cost = cost_model.evaluate(problem, plan)
        self.rest_cost = cost_model.evaluate(problem, self.rest)
        self.free_hbm = [self.rest_cost.memory[gpu.id].free_bytes for gpu in problem.topology.gpus]
        self.rest_s = [gpu.total_s for gpu in self.rest_cost.gpus]
        mine = replace(plan, shards=plan.shards_by_table[table])
        self.current = self._answer("as planned", plan, mine)
        # Cuts that differ only in how cold rows are read may be the same placement.
        self._seen = {frozenset(mine.shards)}

    def made(self, placements: Sequence[Placement], replica: TableShard | None = None) -> Plan:
        """The table placed otherwise, and nothing else."""
        return build_plan(self.instance, placements, () if replica is None else (replica,))

    def answers(self, name: str, made: Plan) -> Iterator[Alternative]:
        """The answer for another placement of the table, unless it was given before.

        None either where the cost model has no such placement.
        """
        shards = frozenset(made.shards)
        if shards in self._seen:
            return
        self._seen.add(shards)
        row_order = {k: v for k, v in self.plan.row_order.items() if k != self.table}
        hot_ids = {k: v for k, v in self.plan.hot_ids.items() if k != self.table}
        plan = replace(
            self.rest,
            shards=(*self.rest.shards, *made.shards),
            row_order={**row_order, **made.row_order},
            hot_ids={**hot_ids, **made.hot_ids},
        )
        try:
            yield self._answer(name, plan, made)
        except PlanMismatchError:
            return

    def _answer(self, name: str, plan: Plan, made: Plan) -> Alternative:
        """What a plan costs in which the table is placed as in `made`: costs of tables add up."""
        cost, rest = self.cost_model.evaluate(self.problem, made), self.rest_cost
        gpus = [a.total_s + b.total_s for a, b in zip(cost.gpus, rest.gpus, strict=True)]
        hosts = [a.dram_s + b.dram_s for a, b in zip(cost.hosts, rest.hosts, strict=True)]
        table_s = sum(gpu.total_s for gpu in cost.gpus)
        return Alternative(name, max(*gpus, *hosts), table_s, self.short_bytes(made), plan)

    def short_bytes(self, made: Plan) -> dict[str, int]:
        """What each device lacks that has too little for the table beside the others."""
        free = {name: use.free_bytes for name, use in self.rest_cost.memory.items()}
        used = {name: use.total_bytes for name, use in device_memory(made).items()}
        return {name: used[name] - free[name] for name in used if used[name] > free[name]}

    def filled(
        self, shards: Sequence[tuple[TableShard, int]], replica: TableShard | None = None
    ) -> Plan:
        """The table's pieces on these GPUs, with as many rows in HBM as help and fit."""
        free = list(self.free_hbm)
        if replica is not None:
            for gpu in range(self.instance.gpus):
                free[gpu] -= int(self.instance.priced_costs(replica, gpu)[BYTES, 0])
        spare = [0] * self.instance.gpus
        for attempt in range(_REFILLS):
            placements = [
                Placement(shard, gpu, self._hot_rows(shard, gpu, free[gpu] - spare[gpu]))
                for shard, gpu in shards
            ]
            made = self.made(placements, replica)
            excess = self.short_bytes(made)
            over = [excess.get(gpu.id, 0) for gpu in self.problem.topology.gpus]
            if not any(over[p.gpu] and p.hot_rows for p in placements):
                break
            spare = [s + (o << attempt) for s, o in zip(spare, over, strict=True)]
        return made

    def _hot_rows(self, shard: TableShard, gpu: int, room_bytes: float) -> int:
        """Rows of a piece in HBM that help most within `room_bytes`; the fewest if none fit."""
        curve = self.instance.curve(shard, gpu)
        knapsack = solve_knapsack(
            [self.instance.priced_costs(shard, gpu)], room_bytes, lambda _: curve
        )
        return int(curve.hot_rows[0]) if knapsack is None else knapsack.hot_rows[0]


def _margin(asked: _Question, placed: Placement, gpu_price: float | None) -> ShardMargin:
    curve = asked.instance.curve(placed.shard, placed.gpu)
    return ShardMargin(
        asked.problem.topology.gpus[placed.gpu].id,
        int(curve.hot_rows[-1]),
        placed.hot_rows,
        _saving(curve, placed.hot_rows, before=True),
        _saving(curve, placed.hot_rows, before=False),
        gpu_price,
    )


def _saving(curve: CostCurve, hot_rows: int, *, before: bool) -> float | None:
    """Seconds per byte of HBM that the rows just before (or after) a split save."""
    if before:
        last = int(np.searchsorted(curve.hot_rows, hot_rows, side="left"))
    else:
        last = int(np.searchsorted(curve.hot_rows, hot_rows, side="right"))
    if not 0 < last < curve.hot_rows.size:
        return None
    extra = float(curve.hbm_bytes[last] - curve.hbm_bytes[last - 1])
    saved = float(curve.gpu_s[last - 1] - curve.gpu_s[last])
    # Rows that every step stages take as many bytes in its buffer: in HBM they cost nothing.
    return saved / extra if extra > 0 else float("inf") if saved > 0 else 0.0


def _gpu_price(asked: _Question, gpu: int) -> float | None:
    """Seconds per byte that a little more HBM on one GPU saves of its time."""
    priced, curves, replicated = [], [], 0.0
    device = asked.problem.topology.gpus[gpu].id
    served = dict.fromkeys(s.table for s in asked.plan.shards if device in s.devices)
    for table in served:
        found = placements_of(asked.instance, asked.plan, table)
        if found is None:
            return None
        mine = [p.shard for p in found.placements if p.gpu == gpu]
        priced += [asked.instance.priced_costs(shard, gpu) for shard in mine]
        curves += [asked.instance.curve(shard, gpu) for shard in mine]
        for replica in found.replicas:
            replicated += float(asked.instance.priced_costs(replica, gpu)[BYTES, 0])
    hbm_bytes = float(asked.instance.hbm_bytes[gpu])
    more = hbm_bytes * _PRICE_SHARE
    now, then = (
        solve_knapsack(priced, room - replicated, lambda number: curves[number])
        for room in (hbm_bytes, hbm_bytes + more)
    )
    if now is None or then is None:
        return None
    return max(0.0, now.gpu_s - then.gpu_s) / more


def _other_splits(asked: _Question) -> Iterator[Alternative]:
    """All rows in one tier, the pieces where they are."""
    instance, placed = asked.instance, asked.placements
    curves = [instance.curve(p.shard, p.gpu) for p in placed]
    for name, end in (("all rows in HBM", -1), ("all rows in DRAM", 0)):
        moved = [
            Placement(p.shard, p.gpu, int(curve.hot_rows[end]))
            for p, curve in zip(placed, curves, strict=True)
        ]
        # A tier that constraints rule out is no end of the curve.
        cold = end == 0 and any(p.hot_rows for p in moved)
        hot = end == -1 and any(
            p.hot_rows < len(range(*p.shard.rows(instance.rows(asked.number)))) for p in moved
        )
        if moved != list(placed) and not cold and not hot:
            yield from asked.answers(name, asked.made(moved, asked.replica))


def _other_options(asked: _Question) -> Iterator[Alternative]:
    """Of cuts into equally many slices and strips, the best one."""
    instance = asked.instance
    best: dict[tuple[object, ...], Alternative] = {}
    for option in instance.options_of(asked.number):
        if is_one_of(option, [asked.option]) or option.shard_count > instance.gpus:
            continue
        shards = instance.shards(asked.number, option)
        replica = instance.replica(asked.number, option)
        gpus = _roomy_first(asked, shards[0]) if shards else []
        if asked.in_group:  # It stays with its group.
            gpus = [placed.gpu for placed in asked.placements]
        if option.blocked:  # Blocks are in the order of GPUs.
            gpus = sorted(gpus[: len(shards)])
        name = _option_name(option, instance.rows(asked.number))
        if len(gpus) < len(shards):
            continue
        kind = (
            option.row_slices,
            len(option.column_widths),
            option.replicated_rows,
            option.cold,
            option.blocked,
        )
        pairs = list(zip(shards, gpus, strict=False))
        for one in asked.answers(name, asked.filled(pairs, replica)):
            best[kind] = min(best.get(kind, one), one, key=_rank)
    yield from best.values()


def _rank(one: Alternative) -> tuple[bool, float, float]:
    """What fits first, then the fastest."""
    return bool(one.short_bytes), one.step_time_s, one.table_s


def _on_other_gpus(asked: _Question) -> Iterator[Alternative]:
    """The slowest piece of the table on other GPUs, which serve none of it."""
    placed = asked.placements
    if not placed or asked.in_group:
        return
    times = [gpu.total_s for gpu in asked.cost.gpus]
    slowest = max(placed, key=lambda p: (times[p.gpu], -p.gpu))
    taken = {p.gpu for p in placed}
    others = [gpu for gpu in _roomy_first(asked, slowest.shard) if gpu not in taken]
    for gpu in others[:_MOST_GPUS]:
        pairs = [(p.shard, gpu if p is slowest else p.gpu) for p in placed]
        ids = asked.problem.topology.gpus
        what = "" if len(placed) == 1 else f"piece of {ids[slowest.gpu].id} "
        made = asked.filled(pairs, asked.replica)
        yield from asked.answers(f"{what}on {ids[gpu].id}", made)


def _roomy_first(asked: _Question, shard: TableShard) -> list[int]:
    """GPUs that may serve a piece, as they are to be tried: where its buffers fit, then by load."""

    def lacks_room(gpu: int) -> bool:
        return asked.free_hbm[gpu] < float(asked.instance.priced_costs(shard, gpu)[BYTES].min())

    return sorted(
        (gpu for gpu in range(asked.instance.gpus) if asked.instance.may_serve(shard, gpu)),
        key=lambda gpu: (lacks_room(gpu), asked.rest_s[gpu], gpu),
    )


_COLD_NAMES = {
    "staged": "staged",
    "uva": "cold rows read in place",
    "host": "cold rows pooled by the host",
    "cached": "cold rows through a cache",
}


def _option_name(option: ShardingOption, rows: int) -> str:
    if option.replicated_rows >= rows > 0:
        return "replicated on every GPU"
    words = []
    if option.row_slices > 1:
        words.append(f"{option.row_slices} {'blocks of rows' if option.blocked else 'row slices'}")
    if option.column_widths:
        words.append(
            f"{len(option.column_widths)} strips of "
            f"{'+'.join(map(str, option.column_widths))} columns"
        )
    name = " x ".join(words) or "in one piece"
    if option.replicated_rows:
        name = f"{option.replicated_rows:,} hottest rows on every GPU, the others {name}"
    return name if option.cold == "staged" else f"{name}, {_COLD_NAMES[option.cold]}"


def _bindings(asked: _Question) -> Iterator[Binding]:
    """What keeps the table from being faster, strongest first."""
    topology, cost = asked.problem.topology, asked.cost
    cold = [p for p in asked.placements if _saving_rows(asked, p)]
    for device in dict.fromkeys(topology.gpus[p.gpu].id for p in cold):
        use = cost.memory[device]
        if use.total_bytes >= _FULL * use.capacity_bytes:
            yield Binding(
                "hbm",
                device,
                f"{format_bytes(use.free_bytes)} of {format_bytes(use.capacity_bytes)} are free, "
                "and it has rows in DRAM that HBM would make faster",
            )
    for host in dict.fromkeys(topology.gpus[p.gpu].host for p in asked.placements):
        use = cost.memory[host]
        if use.capacity_bytes and use.total_bytes >= _FULL * use.capacity_bytes:
            yield Binding(
                "dram", host, f"{format_bytes(use.free_bytes)} are free for rows that are cold"
            )
    yield from _hottest_row(asked)


def _saving_rows(asked: _Question, placed: Placement) -> bool:
    saving = _saving(asked.instance.curve(placed.shard, placed.gpu), placed.hot_rows, before=False)
    return saving is not None and saving > 0


def _hottest_row(asked: _Question) -> Iterator[Binding]:
    """Slices share the rows, but not the lookups of one row."""
    option = asked.option
    profile = asked.problem.profile.tables[asked.number]
    top = float(profile.cdf.share(1))
    if option.row_slices > 1 and not option.replicated_rows and top * option.row_slices > 0.5:
        device = asked.problem.topology.gpus[
            next(p.gpu for p in asked.placements if p.shard.row_slice == 0)
        ].id
        yield Binding(
            "hottest row",
            device,
            f"one row takes {top:.1%} of the lookups; an even slice of {option.row_slices} has "
            f"{1 / option.row_slices:.1%}, so more slices would not make the first one much faster",
        )


def _asked_for(asked: _Question, alternatives: Sequence[Alternative]) -> Iterator[Binding]:
    """What the user asks of the table, and what the placement would gain without it."""
    constraints, table = asked.problem.constraints, asked.table
    rule, group = constraints.rule_of(table), constraints.group_of(table)
    dropped: list[tuple[Constraint, str, Constraints]] = []
    if rule.devices is not None:
        words = f"is pinned to {', '.join(rule.devices)}"
        dropped.append(("pin", words, _with_rule(constraints, table, replace(rule, devices=None))))
    if rule.tier is not None:
        words = f"all its rows have to be in {rule.tier}"
        dropped.append(("tier", words, _with_rule(constraints, table, replace(rule, tier=None))))
    if rule.forbid:
        words = f"forbidden: {', '.join(sorted(rule.forbid))}"
        free = _with_rule(constraints, table, replace(rule, forbid=frozenset()))
        dropped.append(("forbidden", words, free))
    if group:
        others = tuple(tuple(n for n in g if n != table) for g in constraints.together)
        words = f"has to be with {', '.join(name for name in group if name != table)}"
        left = replace(constraints, together=tuple(g for g in others if len(g) > 1))
        dropped.append(("together", words, left))
    now = min([asked.cost.step_time_s, *(a.step_time_s for a in alternatives if not a.short_bytes)])
    devices = list(dict.fromkeys(d for s in asked.plan.shards_by_table[table] for d in s.devices))
    for kind, words, left in dropped:
        freed = _Question(
            replace(asked.problem, constraints=left), asked.plan, table, asked.cost_model
        )
        fitting = [one for one in _alternatives(freed) if not one.short_bytes]
        best = min(fitting, key=lambda one: one.step_time_s, default=None)
        if best is not None and best.step_time_s < now * (1 - _GAIN):
            gain = (
                f"without that, {best.name}: step {format_seconds(best.step_time_s)} "
                f"instead of {format_seconds(asked.cost.step_time_s)}"
            )
        else:
            gain = "no other placement that fits beside the other tables would be faster"
        yield Binding(kind, devices[0] if len(devices) == 1 else "", f"{words}; {gain}")


def _with_rule(constraints: Constraints, table: str, rule: TableRule) -> Constraints:
    """The constraints with another rule for one table; a problem's have one for each by name."""
    key = glob.escape(table)
    kept = tuple((k, r) for k, r in constraints.tables if k != key)
    return replace(constraints, tables=(*kept, *([(key, rule)] if rule != TableRule() else [])))


def _work(asked: _Question, cost: CostReport) -> Binding:
    """What the slowest of its GPUs waits for, and how far that GPU is from the slowest of all."""
    times = {gpu.device: gpu for gpu in cost.gpus}
    gpus = {d for shard in asked.plan.shards_by_table[asked.table] for d in shard.devices}
    slowest = max((times[g] for g in sorted(gpus)), key=lambda gpu: gpu.total_s)
    alone = asked.cost_model.evaluate(
        asked.problem, replace(asked.plan, shards=asked.plan.shards_by_table[asked.table])
    )
    mine = next(gpu for gpu in alone.gpus if gpu.device == slowest.device)
    parts = {
        "HBM bandwidth": mine.hbm_s,
        "the host link": mine.link_s,
        "communication": mine.communication_s,
        "kernel launches": mine.launch_s,
    }
    most = max(parts, key=lambda part: parts[part])
    share = parts[most] / mine.total_s if mine.total_s else 0.0
    behind = 1 - slowest.total_s / cost.step_time_s if cost.step_time_s else 0.0
    slowest_of_all = cost.bottleneck.rsplit(" ", 1)[0]
    place = (
        "the slowest device"
        if behind < 1e-9
        else f"{behind:.2%} faster than the slowest device, {slowest_of_all}"
    )
    return Binding("work", slowest.device, f"{most} is {share:.0%} of its time there; {place}")
