"""Build a plan from placements of shards."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import numpy as np

from placer.plan.drift import SPREAD_EVENLY
from placer.plan.fields import Lookup, Memory, RowOrder, Shard
from placer.plan.memory import device_memory
from placer.plan.plan import Plan
from solvers.model.assignment import Assignment
from solvers.model.instance import Instance, Placement, TableShard
from solvers.model.knapsack import Int, costs_with

_REFILLS = 20


def build_plan(
    instance: Instance, placements: Sequence[Placement], replicas: Sequence[TableShard] = ()
) -> Plan:
    """Return the plan of placed shards and replicas with row orders, without a solver's record."""
    problem = instance.problem
    topology = problem.topology
    shards: list[Shard] = []
    listed: dict[str, int] = {}

    def add(table: int, parts: Sequence[Shard]) -> None:
        with_buffers = partial(instance.cost_model.with_buffers, problem, table)
        shards.extend(with_buffers(part, returns_bags=part is parts[0]) for part in parts)

    def list_ids(table: int, ranks: int) -> None:
        profile = problem.profile.tables[table]
        if profile.counts is not None:
            listed[profile.name] = max(listed.get(profile.name, 0), ranks)

    everyone = tuple(gpu.id for gpu in topology.gpus)
    for table_shard in sorted(replicas):
        table = problem.profile.tables[table_shard.table].table
        rows = table_shard.rows(table.rows)
        shard = Shard(table.name, rows, (0, table.dim), everyone, "hbm", "device")
        add(table_shard.table, [shard])
        if table_shard.option.replicated_rows < table.rows:
            list_ids(table_shard.table, table_shard.option.replicated_rows)
    for placed in sorted(placements, key=lambda p: p.shard):
        table = problem.profile.tables[placed.shard.table].table
        parts = _parts(instance, placed)
        add(placed.shard.table, parts)
        option = placed.shard.option
        if len(parts) > 1:
            list_ids(placed.shard.table, min(table.rows, parts[-2].rows[1]))
        elif option.row_slices > 1 and not option.blocked:
            list_ids(placed.shard.table, min(table.rows, option.replicated_rows + SPREAD_EVENLY))
    hot_ids = {
        profile.name: profile.counts.hottest(listed[profile.name])
        for profile in problem.profile
        if profile.counts is not None and profile.name in listed
    }
    row_order = {name: RowOrder("profile") for name in hot_ids}
    cached_of: dict[str, list[Shard]] = {}
    for shard in shards:
        if shard.lookup == "cached":
            cached_of.setdefault(shard.table, []).append(shard)
    for profile in problem.profile:
        cached = cached_of.get(profile.name)
        if cached and profile.counts is not None and profile.name not in hot_ids:
            # Rows stay in id order: only caches need to know which are hot.
            row_order[profile.name] = RowOrder("id")
            hot_ids[profile.name] = _warm_ids(profile.counts.hottest(), cached)
    known = problem.fields_of_plans
    return Plan(**known, shards=tuple(shards), row_order=row_order, hot_ids=hot_ids)


def _warm_ids(hottest: Int, cached: Sequence[Shard]) -> Int:
    """Return the hottest ids of each cached shard that fit its cache, hottest first."""
    kept = np.zeros(hottest.size, dtype=bool)
    for shard in cached:
        start, stop, step = shard.rows
        within = (hottest >= start) & (hottest < stop) & ((hottest - start) % step == 0)
        kept[np.flatnonzero(within)[: shard.cache_rows]] = True
    return hottest[kept]


def _parts(instance: Instance, placed: Placement) -> list[Shard]:
    """Return the parts of a shard: rows in HBM and in DRAM, or a cache over all of them."""
    shard, problem = instance.drives.settled(placed.shard, placed.gpu), instance.problem
    table = problem.profile.tables[shard.table].table
    start, stop, step = shard.rows(table.rows)
    cols, devices = instance.columns(shard), (problem.topology.serving[placed.gpu].id,)
    members, hot = len(range(start, stop, step)), placed.hot_rows
    if not instance.is_gpu(placed.gpu):
        return [Shard(table.name, (start, stop, step), cols, devices, "dram", "host")]
    if shard.option.cold == "cached" and hot < members:
        lookup: Lookup = "cached" if hot else "uva"
        return [Shard(table.name, (start, stop, step), cols, devices, "dram", lookup, hot)]
    home = shard.option.home
    drive = members if not home.drive_share else max(hot, home.first_on_drive(members))
    read: Lookup = "uva" if shard.option.cold == "cached" else shard.option.cold
    parts = []
    ranges: tuple[tuple[Memory, Lookup, int, int], ...] = (
        ("hbm", "device", 0, hot),
        ("dram", read, hot, drive),
        ("ssd", read, drive, members),
    )
    for memory, lookup, first, last in ranges:
        if first < last or (not members and memory == "dram"):
            rows = (min(stop, start + first * step), min(stop, start + last * step), step)
            dtype = home.dtype or None if memory != "hbm" else None
            parts.append(Shard(table.name, rows, cols, devices, memory, lookup, dtype=dtype))
    return parts


def overfull(plan: Plan) -> dict[str, int]:
    """Return the excess bytes of each GPU and host that a plan overfills."""
    return {d: -m.free_bytes for d, m in device_memory(plan).items() if m.free_bytes < 0}


def fitted_plan(assignment: Assignment) -> Plan | None:
    """Return the plan of an assignment; fill GPUs a little less if the plan overfills them.

    Curves understate bytes a little: buffers between two points, fractions of bytes, and the row
    map of a column slice if only another slice is split. Return None if a device stays overfull.
    """
    topology = assignment.instance.problem.topology
    spare = [0] * len(topology.serving)
    trial: Assignment | None = assignment
    for attempt in range(_REFILLS):
        if trial is not None and assignment.instance.cost_model.uniform_splits:
            trial = _with_common_shares(trial)
        if trial is None:
            return None
        plan = build_plan(assignment.instance, trial.placements(), trial.replicas)
        excess = overfull(plan)
        if not excess:
            return plan
        # Increase it, because a few bytes less may not make one row less.
        spare = [
            less + (excess.get(gpu.id, 0) << attempt)
            for less, gpu in zip(spare, topology.serving, strict=True)
        ]
        trial = assignment.with_spare_hbm(spare)
    return None


def _with_common_shares(assignment: Assignment) -> Assignment | None:
    """Return the assignment with the same share in HBM for all shards of a table.

    The share is the least or the largest of the shards' shares, whichever is faster. Tables of one
    shard take the HBM that is left. Return None if neither fits.
    """
    instance = assignment.instance
    shards_of: dict[int, list[tuple[Placement, int]]] = defaultdict(list)
    for placed in assignment.placements():
        rows = len(range(*placed.shard.rows(instance.rows(placed.shard.table))))
        shards_of[placed.shard.table].append((placed, rows))
    if all(_is_common(shards) for shards in shards_of.values()):
        return assignment
    pairs = [(placed.shard, placed.gpu) for shards in shards_of.values() for placed, _ in shards]
    made = []
    for chosen in (min, max):
        fixed = {}
        for shards in shards_of.values():
            share = chosen(placed.hot_rows / max(1, rows) for placed, rows in shards)
            for placed, rows in shards if len(shards) > 1 else ():
                curve = instance.curve(placed.shard, placed.gpu)
                costs = costs_with(curve, round(share * rows))
                fixed[placed.shard] = np.tile(costs[:, None], instance.prices.size)
        made.append(Assignment.of(instance, pairs, assignment.replicas, fixed=fixed))
    fitting = [one for one in made if one is not None]
    return min(fitting, key=lambda one: one.step_time_s, default=None)


def _is_common(shards: Sequence[tuple[Placement, int]]) -> bool:
    """Return whether shards have the same share of rows in HBM, up to one row."""
    largest, most = max(shards, key=lambda one: one[1])
    share = largest.hot_rows / max(1, most)
    return all(abs(placed.hot_rows - share * rows) <= 1 for placed, rows in shards)
