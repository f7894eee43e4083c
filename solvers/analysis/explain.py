"""Explain a table's placement: the worth of HBM to its rows, and the cost of alternatives.

An alternative changes one table and keeps all others. A user's constraint binds the table if an
alternative that only this constraint forbids would be faster.
"""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cost_models import CostCurve, CostModel
from placer.constraints.constraints import Constraints
from placer.constraints.file import TableRule
from placer.errors import PlacerError
from placer.plan.memory import home_of
from placer.plan.plan import Plan
from placer.problem import Problem
from placer.units import format_bytes, format_seconds, listed
from solvers.analysis.alternatives import Alternative, PlannedTable, alternatives
from solvers.bounds.lagrangian import lagrangian_bound
from solvers.model.instance import Instance, Placement
from solvers.model.knapsack import BYTES, solve_knapsack
from solvers.model.read_plan import placements_of

_PRICE_SHARE = 1 / 64
"""Share of a GPU's HBM over which to measure its price: much more than a row, far from all."""

_FULL = 0.99
"""A memory counts as full from this share on, as rows and buffers never fill it exactly."""

Constraint = Literal[
    "hbm", "dram", "hottest row", "pin", "tier", "forbidden", "together", "work"
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShardMargin:
    """The worth of HBM to one shard at its hot/cold split, and the price of its GPU's HBM.

    `last_s_per_byte` is the time that the coldest rows in HBM save per byte, and `next_s_per_byte`
    the time that the hottest rows in DRAM would save; None if there are no such rows.
    `gpu_price_s_per_byte` is the time that one more byte of this GPU's HBM would save in its best
    use for all shards of the GPU; None if the GPU has a placement that solvers do not search.
    """

    device: str
    rows: int
    hot_rows: int
    last_s_per_byte: float | None
    next_s_per_byte: float | None
    gpu_price_s_per_byte: float | None


@dataclass(frozen=True, slots=True)
class Binding:
    """A constraint that may keep the table from a better placement, and an explanation."""

    constraint: Constraint
    device: str
    detail: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The result of `explain`: the reasons for the placement of one table.

    `pooled_price_s_per_byte` is the GPU seconds that one more byte of HBM would save if GPUs shared
    all HBM. `alternatives` begin with all rows in HBM and all in DRAM. Other GPUs and sharding
    options follow: those that fit first, then fastest first. Constraints allow all of them.
    """

    table: str
    current: Alternative
    pooled_price_s_per_byte: float
    margins: tuple[ShardMargin, ...]
    alternatives: tuple[Alternative, ...]
    bindings: tuple[Binding, ...]


def explain(problem: Problem, plan: Plan, table: str, cost_model: CostModel) -> Explanation:
    """Explain the placement of `table` in `plan`.

    Raises PlacerError if the plan has no such table, or no `ShardingOption` describes its
    placement.

    >>> from cost_models import Roofline
    >>> from placer import Problem, Topology
    >>> from placer.workloads import named_workload
    >>> from solvers import solve
    >>> problem = Problem(named_workload("random-3@1"), Topology.parse("2xh100", hbm="1GiB"), 64)
    >>> plan = solve(problem, "greedy-cost").plan
    >>> explanation = explain(problem, plan, "t1", Roofline())
    >>> [one.constraint for one in explanation.bindings]
    ['work']
    """
    if table not in plan.tables_by_name:
        names = listed([*plan.tables_by_name], most=8)
        raise PlacerError(f"the plan has no table {table!r}; it has {names}")
    planned = PlannedTable(problem, plan, table, cost_model)
    others = alternatives(planned)
    price = lagrangian_bound(planned.instance).price_s_per_byte
    margins = (
        split_margin(planned.instance, placed, _gpu_price(planned, placed.gpu))
        for placed in planned.placements
        if planned.instance.is_gpu(placed.gpu)
    )
    memories, constraints = _full_memories(planned), _constraints(planned, others)
    bindings = (*memories, *_hottest_row(planned), *constraints, _work(planned))
    return Explanation(table, planned.current, price, tuple(margins), others, bindings)


def split_margin(
    instance: Instance, placed: Placement, gpu_price: float | None = None
) -> ShardMargin:
    """Return the worth of HBM to a shard at its split, and the price of its GPU's HBM."""
    curve = instance.curve(placed.shard, placed.gpu)
    return ShardMargin(
        instance.problem.topology.serving[placed.gpu].id,
        int(curve.hot_rows[-1]),
        placed.hot_rows,
        _saving(curve, int(np.searchsorted(curve.hot_rows, placed.hot_rows, side="left"))),
        _next_saving(curve, placed.hot_rows),
        gpu_price,
    )


def _next_saving(curve: CostCurve, hot_rows: int) -> float | None:
    """Return the seconds per byte of HBM that the hottest rows in DRAM would save."""
    return _saving(curve, int(np.searchsorted(curve.hot_rows, hot_rows, side="right")))


def _saving(curve: CostCurve, point: int) -> float | None:
    """Return the seconds per byte of HBM that the rows before a point of a curve save."""
    if not 0 < point < curve.hot_rows.size:
        return None
    extra = float(curve.hbm_bytes[point] - curve.hbm_bytes[point - 1])
    saved = float(curve.gpu_s[point - 1] - curve.gpu_s[point])
    # Rows that every step stages take as many bytes of staging buffer, so in HBM they are free.
    return saved / extra if extra > 0 else float("inf") if saved > 0 else 0.0


def _gpu_price(planned: PlannedTable, gpu: int) -> float | None:
    """Return the seconds per byte that a little more HBM on one GPU saves; None if unknown."""
    instance, replicated, shards = planned.instance, 0.0, []
    device = planned.problem.topology.serving[gpu].id
    served = dict.fromkeys(s.table for s in planned.plan.shards if device in s.devices)
    for table in served:
        placement = placements_of(instance, planned.plan, table)
        if placement is None:
            return None
        shards += [p.shard for p in placement.placements if p.gpu == gpu]
        for replica in placement.replicas:
            replicated += float(instance.priced_costs(replica, gpu)[BYTES, 0])
    priced = [instance.priced_costs(shard, gpu) for shard in shards]
    curves = [instance.curve(shard, gpu) for shard in shards]
    hbm_bytes = float(instance.hbm_bytes[gpu])
    more = hbm_bytes * _PRICE_SHARE
    now, then = (
        solve_knapsack(priced, room - replicated, lambda number: curves[number])
        for room in (hbm_bytes, hbm_bytes + more)
    )
    if now is None or then is None:
        return None
    return max(0.0, now.gpu_s - then.gpu_s) / more


def _full_memories(planned: PlannedTable) -> Iterator[Binding]:
    """Yield full GPUs, if the table's cold rows there would gain from HBM, and full hosts."""
    topology, cost = planned.problem.topology, planned.cost
    gpus = topology.serving
    cold = [
        p
        for p in planned.placements
        if (_next_saving(planned.instance.curve(p.shard, p.gpu), p.hot_rows) or 0.0) > 0
    ]
    for device in dict.fromkeys(gpus[p.gpu].id for p in cold):
        use = cost.memory[device]
        if use.total_bytes >= _FULL * use.capacity_bytes:
            free = f"{format_bytes(use.free_bytes)} of {format_bytes(use.capacity_bytes)} are free"
            words = f"{free}, and it has rows in DRAM that HBM would make faster"
            yield Binding("hbm", device, words)
    homes = (home_of(topology, gpus[p.gpu].id, "dram") for p in planned.placements)
    for host in dict.fromkeys(homes):
        use = cost.memory[host]
        if use.capacity_bytes and use.total_bytes >= _FULL * use.capacity_bytes:
            words = f"{format_bytes(use.free_bytes)} are free for rows that are cold"
            yield Binding("dram", host, words)


def _hottest_row(planned: PlannedTable) -> Iterator[Binding]:
    """Yield a binding if one row has too many lookups for even row slices."""
    option = planned.option
    top = float(planned.problem.profile.tables[planned.number].cdf.share(1))
    if option.row_slices > 1 and not option.replicated_rows and top * option.row_slices > 0.5:
        first = next(p for p in planned.placements if p.shard.row_slice == 0)
        yield Binding(
            "hottest row",
            planned.problem.topology.serving[first.gpu].id,
            f"one row takes {top:.1%} of the lookups; an even slice of {option.row_slices} has "
            f"{1 / option.row_slices:.1%}, so more slices would not make the first one much faster",
        )


def _constraints(planned: PlannedTable, others: Sequence[Alternative]) -> Iterator[Binding]:
    """Yield each constraint on the table, and the gain without it."""
    step_time_s = planned.cost.step_time_s
    fastest_s = min([step_time_s, *(one.step_time_s for one in others if not one.short_bytes)])
    devices = list(dict.fromkeys(d for shard in planned.own.shards for d in shard.devices))
    for kind, words, relaxed in _relaxed(planned.problem.constraints, planned.table):
        problem = replace(planned.problem, constraints=relaxed)
        freed = PlannedTable(problem, planned.plan, planned.table, planned.cost_model)
        fitting = [one for one in alternatives(freed) if not one.short_bytes]
        best = min(fitting, key=lambda one: one.step_time_s, default=None)
        gain = "no other placement that fits beside the other tables would be faster"
        # More than rounding errors.
        if best is not None and best.step_time_s < fastest_s * (1 - 1e-6):
            times = f"{format_seconds(best.step_time_s)} instead of {format_seconds(step_time_s)}"
            gain = f"without that, {best.name}: step {times}"
        yield Binding(kind, devices[0] if len(devices) == 1 else "", f"{words}; {gain}")


def _relaxed(constraints: Constraints, table: str) -> Iterator[tuple[Constraint, str, Constraints]]:
    """Yield each constraint on a table: its kind, its words, and all constraints without it."""
    rule, group = constraints.rule_of(table), constraints.group_of(table)

    def with_rule(changed: TableRule) -> Constraints:
        # A problem's constraints have one rule for each table, under its name.
        key = glob.escape(table)
        kept = tuple((k, r) for k, r in constraints.tables if k != key)
        mine = [(key, changed)] if changed != TableRule() else []
        return replace(constraints, tables=(*kept, *mine))

    if rule.devices is not None:
        words = f"is pinned to {', '.join(rule.devices)}"
        yield "pin", words, with_rule(replace(rule, devices=None))
    if rule.tier is not None:
        words = f"all its rows have to be in {rule.tier}"
        yield "tier", words, with_rule(replace(rule, tier=None))
    if rule.forbid:
        words = f"forbidden: {', '.join(sorted(rule.forbid))}"
        yield "forbidden", words, with_rule(replace(rule, forbid=frozenset()))
    if group:
        words = f"has to be with {', '.join(name for name in group if name != table)}"
        others = (tuple(n for n in names if n != table) for names in constraints.together)
        together = tuple(names for names in others if len(names) > 1)
        yield "together", words, replace(constraints, together=together)


def _work(planned: PlannedTable) -> Binding:
    """Return what the table's slowest device spends its time on, and how slow it is."""
    cost = planned.cost
    devices = {device for shard in planned.own.shards for device in shard.devices}
    gpu_s = dict(zip((gpu.device for gpu in cost.gpus), cost.gpu_s.tolist(), strict=True))
    mine = min(
        (gpu for gpu in planned.own_cost.gpus if gpu.device in devices),
        key=lambda gpu: (-gpu_s[gpu.device], gpu.device),
    )
    is_gpu = mine.device in planned.problem.topology.gpus_by_id
    parts = {
        "HBM bandwidth": mine.hbm_s,
        "the host link" if is_gpu else "pooling by its processors": mine.link_s,
        "communication": mine.communication_s,
        "kernel launches": mine.launch_s,
    }
    most = max(parts, key=lambda part: parts[part])
    share = parts[most] / mine.total_s if mine.total_s else 0.0
    slowest_of_all = max(gpu_s, key=lambda device: gpu_s[device])
    most_s = gpu_s[slowest_of_all]
    behind = 1 - gpu_s[mine.device] / most_s if most_s else 0.0
    place = "the slowest device"
    if behind >= 1e-9:
        place = f"{behind:.2%} faster than the slowest device, {slowest_of_all}"
    return Binding("work", mine.device, f"{share:.0%} of its time there is {most}; {place}")
