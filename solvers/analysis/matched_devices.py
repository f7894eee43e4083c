"""Which of several equal GPUs, hosts and row slices take which places of a new plan.

A solver does not care which of several equal GPUs serves what, nor which of several equal row
slices a GPU has. Who has to copy the rows does: places are given so that most bytes stay.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from placer.plan.diff import shared_bytes
from placer.plan.memory import home_of
from placer.plan.plan import Plan
from solvers.model.instance import Instance, Placement
from solvers.model.read_plan import TablePlacement
from solvers.search.old_placement import OldTable

KeptBytes = dict[tuple[str, str], int]
"""Bytes that stay if the second device, of the old machine, takes the place of the first."""

_UNIT_BYTES = 1 << 10
"""Bytes are weighed in units of this, so that the assignment's integers do not overflow."""


def matched_gpus(
    instance: Instance,
    plan: Plan,
    old: Plan,
    placements: Sequence[TablePlacement],
    tables: Mapping[int, OldTable],
) -> dict[int, int]:
    """Return which GPU should take the place of each GPU of a plan, so that fewest bytes move.

    GPUs take each other's places if they are of one kind and size and may serve the same
    tables, and hosts if their GPUs do and they have equal memory.

    Parameters
    ----------
    placements : sequence of TablePlacement
        Of each table in `plan`.

    Returns
    -------
    dict of GPU number to GPU number
    """
    topology = instance.problem.topology
    kept = _kept_bytes(instance, plan, old, placements, tables)
    classes = _classes(instance)
    by_host: dict[str, dict[int, list[int]]] = {host.id: {} for host in topology.hosts}
    for number, gpu in enumerate(topology.gpus):
        by_host[gpu.host].setdefault(classes[number], []).append(number)
    alike: dict[object, list[str]] = defaultdict(list)
    for host in topology.hosts:
        sizes = sorted((kind, len(gpus)) for kind, gpus in by_host[host.id].items())
        alike[host.memory_bytes, tuple(sizes)].append(host.id)
    ids = [gpu.id for gpu in topology.gpus]
    matched: dict[int, int] = {}
    for hosts in alike.values():
        pairs = {(a, b): _within(by_host[a], by_host[b], ids, kept) for a in hosts for b in hosts}
        values = [[pairs[a, b][0] + kept.get((a, b), 0) for b in hosts] for a in hosts]
        for place, taker in enumerate(_best_matching(values)):
            matched |= pairs[hosts[place], hosts[taker]][1]
    return matched


def _within(
    places: Mapping[int, list[int]],
    takers: Mapping[int, list[int]],
    ids: Sequence[str],
    kept: KeptBytes,
) -> tuple[int, dict[int, int]]:
    """Match one host's GPUs to another's; return the bytes that stay, and the pairs."""
    total, matched = 0, {}
    for kind, mine in places.items():
        values = [[kept.get((ids[a], ids[b]), 0) for b in takers[kind]] for a in mine]
        for at, chosen in enumerate(_best_matching(values)):
            total += values[at][chosen]
            matched[mine[at]] = takers[kind][chosen]
    return total, matched


def _classes(instance: Instance) -> list[int]:
    """Return equal numbers for GPUs that can take each other's places."""
    masks = [
        mask for table in range(instance.tables) if (mask := instance.allowed(table)) is not None
    ]
    pins = np.unique(np.array(masks), axis=0) if masks else np.zeros((0, instance.gpus))
    known: dict[object, int] = {}
    return [
        known.setdefault(
            (kind, float(instance.hbm_bytes[gpu]), tuple(pins[:, gpu].tolist())), len(known)
        )
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
            # Any slice can become the one that the GPU has.
            held = dict.fromkeys((device, shard.column_slice) for shard, device in was.shards)
            for placed in placements[number].placements:
                first, last = placed.shard.columns(table.dim)
                size = placed.hot_rows * table.bytes_per_row(last - first)
                for device, column_slice in held:
                    if column_slice == placed.shard.column_slice:
                        kept[topology.gpus[placed.gpu].id, device] += size
            continue
        for (source, target), size in shared_bytes(old, plan, profile.name).items():
            if source.memory == target.memory:
                to = home_of(plan.topology, target.device, target.memory)
                kept[to, home_of(old.topology, source.device, source.memory)] += size
    return kept


def _best_matching(values: Sequence[Sequence[int]]) -> list[int]:
    """Return a different column for each row, such that the sum is greatest."""
    if len(values) < 2 or not any(map(any, values)):
        return list(range(len(values)))
    from ortools.graph.python import linear_sum_assignment

    most = max(max(row) for row in values)
    solver = linear_sum_assignment.SimpleLinearSumAssignment()
    for at, row in enumerate(values):
        for column, value in enumerate(row):
            # Of equal matchings, the one that changes least.
            cost = 2 * ((most - value) // _UNIT_BYTES) + (at != column)
            solver.add_arc_with_cost(at, column, cost)
    assert solver.solve() == solver.OPTIMAL, "every row can have every column"
    return [solver.right_mate(at) for at in range(len(values))]


def with_matched_slices(
    placement: TablePlacement, was: OldTable | None, devices: Sequence[str], rows: int
) -> TablePlacement:
    """Return the same GPUs with the row slices that they had before, where they had some."""
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
