"""Plans that leave rows where they are: equal GPUs and equal slices are told apart by their rows.

A solver does not care which of several equal GPUs serves what, nor which row is in which of
several equal slices. Who has to copy the rows does.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cost_models import ShardingOption, TableShard
from placer.plan.diff import Home, shared_bytes
from placer.plan.fields import RowOrder
from placer.plan.order import Ranks, distinct, listed_ids
from placer.plan.plan import Plan
from placer.profile.counts import RowCounts
from solvers.model.instance import Instance, Placement
from solvers.model.read_plan import TablePlacement

Int = npt.NDArray[np.int64]
Gain = dict[tuple[str, str], int]
"""Bytes that do not move if a GPU (or host) of the new plan is one of the old machine."""

_UNIT_BYTES = 1 << 10
"""Gains are weighed in units of this, so that the assignment's integers do not overflow."""


@dataclass(frozen=True, slots=True)
class OldTable:
    """How a table was cut, and the id of the device of each piece."""

    option: ShardingOption
    shards: tuple[tuple[TableShard, str], ...]

    def is_option_as(self, option: ShardingOption) -> bool:
        """Whether another cut is the same, however cold rows are read."""
        return option._replace(cold=self.option.cold) == self.option


def with_steady_rows(
    instance: Instance,
    plan: Plan,
    old: Plan,
    tables: Mapping[int, OldTable],
    options: Sequence[ShardingOption],
) -> Plan:
    """The plan with row orders that leave the rows of tables cut as before in their slices.

    Parameters
    ----------
    tables : mapping of table number to OldTable
    cuts : sequence of Cut
        Of each table in `plan`.
    """
    row_order, hot_ids = dict(plan.row_order), dict(plan.hot_ids)
    for number, was in tables.items():
        profile, option = instance.problem.profile.tables[number], options[number]
        name, rows = profile.name, profile.table.rows
        sliced = option.row_slices > 1 and not option.blocked and was.is_option_as(option)
        if not sliced or profile.counts is None or old.tables_by_name[name].rows != rows:
            continue
        ends = (shard.rows[1] for shard in plan.shards_by_table[name] if shard.row_count)
        told_apart = max((end for end in ends if end < rows), default=0)
        before = listed_ids(old, name)
        order = steady_order(
            profile.counts, before, option.row_slices, option.replicated_rows, told_apart
        )
        if order.size:
            row_order[name], hot_ids[name] = RowOrder("profile"), order
        else:
            row_order.pop(name, None)
            hot_ids.pop(name, None)
    return replace(plan, row_order=row_order, hot_ids=hot_ids)


def steady_order(
    counts: RowCounts, before: Int, row_slices: int, replicated_rows: int, told_apart: int
) -> Int:
    """Ids to list so that the hottest rows come first in their slices, and rows stay in them.

    Slice i has the ranks that leave i when divided by `ways`, after the `head` that every GPU
    has. An id that is listed anew shifts the ranks of all ids below that are not listed; so
    ids are listed `ways` at a time, of neighbouring ranks, which leaves all others in their
    slices. Only rows that enter or leave the head change slices, in each other's places.

    Parameters
    ----------
    before : int64, shape (n,)
        The ids that were listed.
    told_apart : int
        The hottest rows that have to be listed.
    """
    old = Ranks.of(before)
    if old.listed.size < replicated_rows:
        more = old.unlisted_ids(np.arange(old.listed.size, replicated_rows))
        old = Ranks.of(np.concatenate((old.listed, more)))
    if not told_apart:
        return old.listed
    listed = old.listed.size
    ranks = old.ranks(counts.hottest(told_apart))
    groups = distinct((ranks[ranks >= listed] - listed) // row_slices)
    # The last ids may be too few for a group.
    groups = groups[listed + (groups + 1) * row_slices <= counts.rows]
    added = (listed + groups[:, None] * row_slices + np.arange(row_slices)).ravel()
    ids = np.concatenate((old.listed, old.unlisted_ids(added)))
    was = np.concatenate((np.arange(listed), added))
    heat = _heat(counts, ids)
    in_slice = np.where(was < replicated_rows, -1, (was - replicated_rows) % row_slices)
    if replicated_rows:
        hottest = np.zeros(ids.size, dtype=bool)
        hottest[np.lexsort((in_slice >= 0, -heat))[:replicated_rows]] = True
        leaving = np.flatnonzero((in_slice < 0) & ~hottest)
        entering = np.flatnonzero((in_slice >= 0) & hottest)
        in_slice[leaving], in_slice[entering] = in_slice[entering], -1
    order = np.empty_like(ids)
    for number in range(-1, row_slices):
        mine = np.flatnonzero(in_slice == number)
        mine = mine[np.lexsort((was[mine], -heat[mine]))]
        if number < 0:
            order[:replicated_rows] = ids[mine]
        else:
            order[replicated_rows + number :: row_slices] = ids[mine]
    return order


def _heat(counts: RowCounts, ids: Int) -> Int:
    """How often rows were read."""
    heat = np.zeros(ids.size, dtype=np.int64)
    if counts.ids.size:
        at = np.minimum(np.searchsorted(counts.ids, ids), counts.ids.size - 1)
        read = counts.ids[at] == ids
        heat[read] = counts.counts[at[read]]
    return heat


def relabelled(
    instance: Instance,
    plan: Plan,
    old: Plan,
    found: Sequence[TablePlacement],
    tables: Mapping[int, OldTable],
) -> dict[int, int]:
    """Which GPU should play the part of each GPU of a plan, so that least moves.

    GPUs take each other's parts if they are of one kind and size and may serve the same
    tables, and hosts if their GPUs do and they have equal memory.

    Parameters
    ----------
    found : sequence of TablePlacement
        Of each table in `plan`.
    tables : mapping of table number to OldTable

    Returns
    -------
    dict of GPU number to GPU number
    """
    topology = instance.problem.topology
    gains = _gains(instance, plan, old, found, tables)
    classes = _classes(instance)
    by_host: dict[str, dict[int, list[int]]] = {host.id: {} for host in topology.hosts}
    for number, gpu in enumerate(topology.gpus):
        by_host[gpu.host].setdefault(classes[number], []).append(number)
    alike: dict[object, list[str]] = defaultdict(list)
    for host in topology.hosts:
        sizes = sorted((kind, len(mine)) for kind, mine in by_host[host.id].items())
        alike[host.memory_bytes, tuple(sizes)].append(host.id)
    ids = [gpu.id for gpu in topology.gpus]
    played: dict[int, int] = {}
    for hosts in alike.values():
        within = {
            (part, actor): _within(by_host[part], by_host[actor], ids, gains)
            for part in hosts
            for actor in hosts
        }
        values = [
            [within[part, actor][0] + gains.get((part, actor), 0) for actor in hosts]
            for part in hosts
        ]
        for part, actor in enumerate(_assignment(values)):
            played |= within[hosts[part], hosts[actor]][1]
    return played


def _within(
    parts: Mapping[int, list[int]], actors: Mapping[int, list[int]], ids: Sequence[str], gains: Gain
) -> tuple[int, dict[int, int]]:
    """What one host's GPUs gain in the parts of another one's, and which plays which."""
    total, played = 0, {}
    for kind, mine in parts.items():
        values = [[gains.get((ids[p], ids[a]), 0) for a in actors[kind]] for p in mine]
        for at, chosen in enumerate(_assignment(values)):
            total += values[at][chosen]
            played[mine[at]] = actors[kind][chosen]
    return total, played


def _classes(instance: Instance) -> list[int]:
    """Equal numbers for GPUs that can take each other's parts."""
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


def _gains(
    instance: Instance,
    plan: Plan,
    old: Plan,
    found: Sequence[TablePlacement],
    tables: Mapping[int, OldTable],
) -> Gain:
    """Bytes that stay if the second device, of the old machine, plays the part of the first."""
    topology = instance.problem.topology
    gains: Gain = defaultdict(int)
    for number, profile in enumerate(instance.problem.profile):
        spec, was = profile.table, tables.get(number)
        before = old.tables_by_name.get(profile.name)
        if before is None or (before.rows, before.dim) != (spec.rows, spec.dim):
            continue
        if was is not None and was.option.row_slices > 1 and was.is_option_as(found[number].option):
            # Any slice can become the one that the GPU has.
            held = {(device, shard.column_slice): shard for shard, device in was.shards}
            for placed in found[number].placements:
                first, last = placed.shard.columns(spec.dim)
                size = placed.hot_rows * spec.bytes_per_row(last - first)
                for device, column_slice in held:
                    if column_slice == placed.shard.column_slice:
                        gains[topology.gpus[placed.gpu].id, device] += size
            continue
        for (source, target), size in shared_bytes(old, plan, profile.name).items():
            if source.memory == target.memory:
                gains[_place(plan, target), _place(old, source)] += size
    return gains


def _place(plan: Plan, home: Home) -> str:
    """The device whose memory the bytes are in."""
    gpu = plan.topology.gpus_by_id.get(home.device)
    return home.device if gpu is None or home.memory == "hbm" else gpu.host


def _assignment(values: Sequence[Sequence[int]]) -> list[int]:
    """A column for each row, each of them once, of the greatest sum."""
    if len(values) < 2 or not any(map(any, values)):
        return list(range(len(values)))
    from ortools.graph.python import linear_sum_assignment

    most = max(max(row) for row in values)
    solver = linear_sum_assignment.SimpleLinearSumAssignment()
    for at, row in enumerate(values):
        for column, value in enumerate(row):
            # Of equal ones, everyone stays what they are.
            cost = 2 * ((most - value) // _UNIT_BYTES) + (at != column)
            solver.add_arc_with_cost(at, column, cost)
    assert solver.solve() == solver.OPTIMAL, "every row can have every column"
    return [solver.right_mate(at) for at in range(len(values))]


def kept_slices(
    found: TablePlacement, was: OldTable | None, devices: Sequence[str], rows: int
) -> TablePlacement:
    """The same GPUs with the slices that they had before, where they had some."""
    option = found.option
    if was is None or option.row_slices < 2 or option.blocked or not was.is_option_as(option):
        return found
    number = {device: at for at, device in enumerate(devices)}
    had = {(number[d], p.column_slice): p.row_slice for p, d in was.shards if d in number}
    by_strip: dict[int, list[Placement]] = defaultdict(list)
    for placed in found.placements:
        by_strip[placed.shard.column_slice].append(placed)
    moved = []
    for column_slice, placements in by_strip.items():
        keeps = {
            p.gpu: had[p.gpu, column_slice] for p in placements if (p.gpu, column_slice) in had
        }
        free = sorted(set(range(option.row_slices)) - set(keeps.values()))
        for placed in placements:
            row_slice = keeps[placed.gpu] if placed.gpu in keeps else free.pop(0)
            shard = placed.shard._replace(row_slice=row_slice)
            hot = min(placed.hot_rows, len(range(*shard.rows(rows))))
            moved.append(Placement(shard, placed.gpu, hot))
    return replace(found, placements=tuple(sorted(moved, key=lambda placed: placed.shard)))
