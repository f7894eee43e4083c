"""Keep parts of an old plan: its whole placement, or rows on equal GPUs and in equal row slices.

To a solver, equal GPUs are interchangeable, and so are equal row slices. To a migration they are
not. So GPUs and slices are matched such that most bytes stay ("What a step costs" in
docs/replan.md).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np

from cost_models import CostModel, ShardingOption
from placer.constraints.unmet import unmet
from placer.errors import PlanMismatchError
from placer.plan.diff import shared_bytes
from placer.plan.fields import RowOrder, Shard
from placer.plan.memory import home_of
from placer.plan.plan import Plan, Ranks, distinct, listed_ids
from placer.plan.verify import violations
from placer.problem import Problem
from placer.profile.table_profile import RowCounts
from solvers.model.instance import Instance, Placement
from solvers.model.knapsack import Int
from solvers.model.read_plan import TablePlacement
from solvers.search.old_placement import OldTable

_Class = tuple[float, ...]
KeptBytes = dict[tuple[str, str], int]
"""Bytes that stay, by device of the new plan and device of the old machine that replaces it."""


def kept_plan(problem: Problem, cost_model: CostModel, old: Plan) -> tuple[Plan | None, str]:
    """Return the old placement on the new problem; or None, and why it does not work there."""
    names = problem.profile.table_numbers
    for profile in problem.profile:
        now, before = profile.table, old.tables_by_name.get(profile.name)
        if before is None:
            return None, f"the old plan has no table {profile.name!r}"
        if (before.rows, before.dim) != (now.rows, now.dim):
            was, size = f"{before.rows} × {before.dim}", f"{now.rows} × {now.dim}"
            return None, f"table {profile.name!r} was {was} and is {size}"
    known = problem.topology.gpus_by_id.keys() | problem.topology.hosts_by_id.keys()
    shards = [shard for shard in old.shards if shard.table in names]
    gone = sorted({device for shard in shards for device in shard.devices} - known)
    if gone:
        return None, f"the old plan uses {gone[0]}, which {problem.topology.name!r} lacks"
    plan = Plan(
        **problem.fields_of_plans,
        shards=tuple(shards),
        row_order={k: v for k, v in old.row_order.items() if k in names},
        hot_ids={k: v for k, v in old.hot_ids.items() if k in names},
    )
    try:
        needed = _with_buffers(problem, cost_model, plan)
        cost_model.evaluate(problem, needed)
    except PlanMismatchError as error:
        return None, str(error)
    broken = violations(needed) + unmet(needed, problem.constraints)
    if not broken:
        return needed, ""
    as_before = _with_old_buffers(needed, old)
    if as_before is not None and not violations(as_before) + unmet(as_before, problem.constraints):
        return as_before, ""
    return None, broken[0].message


def _with_old_buffers(needed: Plan, old: Plan) -> Plan | None:
    """Shrink buffers to their sizes in the old plan; None if steps may need larger ones."""
    # Larger batches need larger buffers.
    if needed.batch_size > old.batch_size or needed.topology != old.topology:
        return None
    place = attrgetter("table", "rows", "cols", "devices")
    before = {place(one): one for one in old.shards}
    shards = []
    for shard in needed.shards:
        had = before[place(shard)]
        rows = min(shard.staging_rows, had.staging_rows)
        size = min(shard.buffer_bytes, had.buffer_bytes)
        shards.append(replace(shard, staging_rows=rows, buffer_bytes=size))
    return replace(needed, shards=tuple(shards))


def in_place_share(problem: Problem, cost_model: CostModel, plan: Plan) -> float:
    """Return the share of staged rows that lack buffers in the plan and are read in place."""
    needed = sum(shard.staging_rows for shard in _with_buffers(problem, cost_model, plan).shards)
    room = sum(shard.staging_rows for shard in plan.shards)
    return max(0.0, 1 - room / needed) if needed else 0.0


def read_in_place(plan: Plan) -> Plan:
    """Return the plan with all staged rows read in place instead."""
    shards = (
        replace(shard, lookup="uva", staging_rows=0) if shard.lookup == "staged" else shard
        for shard in plan.shards
    )
    return replace(plan, shards=tuple(shards))


def _with_buffers(problem: Problem, cost_model: CostModel, plan: Plan) -> Plan:
    """Return the plan with the buffers that the problem's accesses and batch need."""
    ordered = problem.in_plan_order(plan)
    number = problem.profile.table_numbers
    returned: set[tuple[str, tuple[str, ...], tuple[int, int]]] = set()
    shards: list[Shard] = []
    for shard in plan.shards:
        if shard.devices[0] in plan.topology.serving_numbers:
            bags = (shard.table, shard.devices, shard.cols)
            of = ordered, number[shard.table], shard
            shard = cost_model.with_buffers(*of, returns_bags=bags not in returned)
            returned.add(bags)
        shards.append(shard)
    return replace(plan, shards=tuple(shards))


def matched_gpus(
    instance: Instance,
    plan: Plan,
    old: Plan,
    placements: Sequence[TablePlacement],
    tables: Mapping[int, OldTable],
) -> dict[int, int]:
    """Return for each GPU of a plan the GPU that should replace it, so that fewest bytes move.

    GPUs can replace each other if they have equal kind and size and may serve the same tables.
    Hosts can replace each other if they have equal memory and such GPUs. `placements` are the
    placements of all tables in `plan`.
    """
    topology = instance.problem.topology
    kept = _kept_bytes(instance, plan, old, placements, tables)
    classes = _classes(instance)
    by_host: dict[str, dict[_Class, list[int]]] = {host.id: {} for host in topology.hosts}
    for number, gpu in enumerate(topology.serving):
        host = home_of(topology, gpu.id, "dram")
        by_host[host].setdefault(classes[number], []).append(number)
    alike: dict[object, list[str]] = defaultdict(list)
    for one in topology.hosts:
        sizes = sorted((kind, len(gpus)) for kind, gpus in by_host[one.id].items())
        alike[one.memory_bytes, tuple(sizes)].append(one.id)
    ids = [gpu.id for gpu in topology.serving]
    matched: dict[int, int] = {}
    for hosts in alike.values():
        pairs = {(a, b): _within(by_host[a], by_host[b], ids, kept) for a in hosts for b in hosts}
        values = [[pairs[a, b][0] + kept.get((a, b), 0) for b in hosts] for a in hosts]
        for place, taker in enumerate(_best_matching(values)):
            matched |= pairs[hosts[place], hosts[taker]][1]
    return matched


def _within(
    places: Mapping[_Class, list[int]],
    takers: Mapping[_Class, list[int]],
    ids: Sequence[str],
    kept: KeptBytes,
) -> tuple[int, dict[int, int]]:
    """Match one host's GPUs to another host's; return the bytes that stay, and the pairs."""
    total, matched = 0, {}
    for kind, mine in places.items():
        values = [[kept.get((ids[a], ids[b]), 0) for b in takers[kind]] for a in mine]
        for at, chosen in enumerate(_best_matching(values)):
            total += values[at][chosen]
            matched[mine[at]] = takers[kind][chosen]
    return total, matched


def _classes(instance: Instance) -> list[_Class]:
    """Return a value for each GPU, equal for GPUs that can replace each other."""
    masks = [
        mask for table in range(instance.tables) if (mask := instance.allowed(table)) is not None
    ]
    pins = np.unique(np.array(masks), axis=0) if masks else np.zeros((0, instance.gpus))
    return [
        (kind, float(instance.hbm_bytes[gpu]), *pins[:, gpu].tolist())
        for gpu, kind in enumerate(instance.kind_of_gpu)
    ]


def _kept_bytes(
    instance: Instance,
    plan: Plan,
    old: Plan,
    placements: Sequence[TablePlacement],
    tables: Mapping[int, OldTable],
) -> KeptBytes:
    topology = instance.problem.topology
    kept: KeptBytes = defaultdict(int)
    for number, profile in enumerate(instance.problem.profile):
        table, was = profile.table, tables.get(number)
        before = old.tables_by_name.get(profile.name)
        if before is None or (before.rows, before.dim) != (table.rows, table.dim):
            continue
        option = placements[number].option
        if was is not None and was.option.row_slices > 1 and was.has_option(option):
            # The GPU can keep its slice, as any new slice may become it.
            held = dict.fromkeys((device, shard.column_slice) for shard, device in was.shards)
            for placed in placements[number].placements:
                first, last = placed.shard.columns(table.dim)
                size = placed.hot_rows * table.bytes_per_row(last - first)
                for device, column_slice in held:
                    if column_slice == placed.shard.column_slice:
                        kept[topology.serving[placed.gpu].id, device] += size
            continue
        for (source, target), size in shared_bytes(old, plan, profile.name).items():
            if source.memory == target.memory:
                to = home_of(plan.topology, target.device, target.memory)
                kept[to, home_of(old.topology, source.device, source.memory)] += size
    return kept


def _best_matching(values: Sequence[Sequence[int]]) -> list[int]:
    """Return a different column for each row, with the greatest sum of values."""
    from ortools.graph.python import linear_sum_assignment

    # Of equal matchings, prefer the one with the fewest changes.
    weights = 2 * np.array(values, dtype=np.int64) + np.eye(len(values), dtype=np.int64)
    rows, columns = np.indices(weights.shape).reshape(2, -1)
    solver = linear_sum_assignment.SimpleLinearSumAssignment()
    solver.add_arcs_with_cost(rows, columns, weights.max(initial=0) - weights.ravel())
    assert solver.solve() == solver.OPTIMAL, "every row can have every column"
    return [solver.right_mate(row) for row in range(len(values))]


def with_matched_slices(
    placement: TablePlacement, was: OldTable | None, devices: Sequence[str], rows: int
) -> TablePlacement:
    """Return the placement with each GPU's old row slices, if it had any."""
    option = placement.option
    if was is None or option.row_slices < 2 or option.blocked or not was.has_option(option):
        return placement
    number = {device: at for at, device in enumerate(devices)}
    had = {(number[d], s.column_slice): s.row_slice for s, d in was.shards if d in number}
    by_columns: dict[int, list[Placement]] = defaultdict(list)
    for placed in placement.placements:
        by_columns[placed.shard.column_slice].append(placed)
    moved = []
    for column_slice, members in by_columns.items():
        keeps = {p.gpu: had[p.gpu, column_slice] for p in members if (p.gpu, column_slice) in had}
        free = iter(sorted(set(range(option.row_slices)) - set(keeps.values())))
        for placed in members:
            row_slice = keeps[placed.gpu] if placed.gpu in keeps else next(free)
            shard = placed.shard._replace(row_slice=row_slice)
            hot = min(placed.hot_rows, len(range(*shard.rows(rows))))
            moved.append(Placement(shard, placed.gpu, hot))
    return replace(placement, placements=tuple(sorted(moved, key=lambda placed: placed.shard)))


def with_old_slices(
    instance: Instance,
    plan: Plan,
    old: Plan,
    tables: Mapping[int, OldTable],
    options: Sequence[ShardingOption],
) -> Plan:
    """Order rows so that they keep their slices, in tables with the same slices as before.

    `options` are the sharding options of all tables in `plan`.
    """
    row_order, hot_ids = dict(plan.row_order), dict(plan.hot_ids)
    for number, was in tables.items():
        profile, option = instance.problem.profile.tables[number], options[number]
        name, rows = profile.name, profile.table.rows
        sliced = option.row_slices > 1 and not option.blocked and was.has_option(option)
        if not sliced or profile.counts is None or old.tables_by_name[name].rows != rows:
            continue
        ends = (shard.rows[1] for shard in plan.shards_by_table[name] if shard.row_count)
        listed = max((end for end in ends if end < rows), default=0)
        shape = option.row_slices, option.replicated_rows, listed
        order = order_within_slices(profile.counts, listed_ids(old, name), *shape)
        if order.size:
            row_order[name], hot_ids[name] = RowOrder("profile"), order
        else:
            row_order.pop(name, None)
            hot_ids.pop(name, None)
    return replace(plan, row_order=row_order, hot_ids=hot_ids)


def order_within_slices(
    counts: RowCounts, before: Int, row_slices: int, replicated_rows: int, hottest_rows: int
) -> Int:
    """List ids so that the hottest come first within their slices, and ids keep their slices.

    After the replicated rows, slice i has the ranks with remainder i modulo `row_slices`. Listing
    another id shifts the ranks of all unlisted ids below it. So add ids in groups of `row_slices`
    neighbouring ranks, which leaves all other ids in their slices. Only rows that become replicated
    or stop being replicated change slices: they swap places.

    `before`, int64, shape (n,): the ids that the old order listed. `hottest_rows`: number of
    hottest rows that must be listed.
    """
    old = Ranks.of(before)
    if old.listed.size < replicated_rows:
        more = old.unlisted_ids(np.arange(old.listed.size, replicated_rows))
        old = Ranks.of(np.concatenate((old.listed, more)))
    if not hottest_rows:
        return old.listed
    listed = old.listed.size
    ranks = old.ranks(counts.hottest(hottest_rows))
    groups = distinct((ranks[ranks >= listed] - listed) // row_slices)
    # The last ids may not fill a group.
    groups = groups[listed + (groups + 1) * row_slices <= counts.rows]
    added = (listed + groups[:, None] * row_slices + np.arange(row_slices)).ravel()
    ids = np.concatenate((old.listed, old.unlisted_ids(added)))
    old_ranks = np.concatenate((np.arange(listed), added))
    reads = _reads(counts, ids)
    # Slice -1 stands for the replicated rows.
    slices = np.where(old_ranks < replicated_rows, -1, (old_ranks - replicated_rows) % row_slices)
    if replicated_rows:
        hottest = np.zeros(ids.size, dtype=bool)
        hottest[np.lexsort((slices >= 0, -reads))[:replicated_rows]] = True
        leaving = np.flatnonzero((slices < 0) & ~hottest)
        entering = np.flatnonzero((slices >= 0) & hottest)
        slices[leaving], slices[entering] = slices[entering], -1
    order = np.empty_like(ids)
    for number in range(-1, row_slices):
        mine = np.flatnonzero(slices == number)
        mine = mine[np.lexsort((old_ranks[mine], -reads[mine]))]
        if number < 0:
            order[:replicated_rows] = ids[mine]
        else:
            order[replicated_rows + number :: row_slices] = ids[mine]
    return order


def _reads(counts: RowCounts, ids: Int) -> Int:
    reads = np.zeros(ids.size, dtype=np.int64)
    if counts.ids.size:
        at = np.minimum(np.searchsorted(counts.ids, ids), counts.ids.size - 1)
        known = counts.ids[at] == ids
        reads[known] = counts.counts[at[known]]
    return reads
