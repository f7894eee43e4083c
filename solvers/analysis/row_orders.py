"""Row orders that keep rows in the row slices that they are in.

Strided row slices deal rows out by rank, so that a new order by frequency would send nearly
every row to another slice, and so to another GPU. The orders here are by frequency within each
slice only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cost_models import ShardingOption
from placer.plan.fields import RowOrder
from placer.plan.order import Ranks, distinct, listed_ids
from placer.plan.plan import Plan
from placer.profile.counts import RowCounts
from solvers.model.instance import Instance
from solvers.search.old_placement import OldTable

Int = npt.NDArray[np.int64]


def with_old_slices(
    instance: Instance,
    plan: Plan,
    old: Plan,
    tables: Mapping[int, OldTable],
    options: Sequence[ShardingOption],
) -> Plan:
    """Order rows so that they keep their slices, where tables are sliced as before.

    Parameters
    ----------
    options : sequence of ShardingOption
        Of each table in `plan`.
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
        order = order_within_slices(
            profile.counts,
            listed_ids(old, name),
            option.row_slices,
            option.replicated_rows,
            listed,
        )
        if order.size:
            row_order[name], hot_ids[name] = RowOrder("profile"), order
        else:
            row_order.pop(name, None)
            hot_ids.pop(name, None)
    return replace(plan, row_order=row_order, hot_ids=hot_ids)


def order_within_slices(
    counts: RowCounts, before: Int, row_slices: int, replicated_rows: int, hottest_rows: int
) -> Int:
    """List ids so that the hottest come first in their slices, and all stay in them.

    After the replicated rows, slice i has the ranks that leave i when divided by `row_slices`.
    An id that is listed anew shifts the ranks of all ids below it that are not listed. So ids
    are listed in groups of `row_slices` neighbouring ranks, which leaves all other ids in their
    slices. Only rows that become replicated, or stop to be, change slices: they swap places.

    Parameters
    ----------
    before : int64, shape (n,)
        The ids that were listed.
    hottest_rows : int
        So many of the hottest rows have to be listed.
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
    # The last ids may be too few for a group.
    groups = groups[listed + (groups + 1) * row_slices <= counts.rows]
    added = (listed + groups[:, None] * row_slices + np.arange(row_slices)).ravel()
    ids = np.concatenate((old.listed, old.unlisted_ids(added)))
    old_ranks = np.concatenate((np.arange(listed), added))
    reads = _reads(counts, ids)
    # Slice -1 is the replicated rows.
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
    """Return how often each row was read."""
    reads = np.zeros(ids.size, dtype=np.int64)
    if counts.ids.size:
        at = np.minimum(np.searchsorted(counts.ids, ids), counts.ids.size - 1)
        known = counts.ids[at] == ids
        reads[known] = counts.counts[at[known]]
    return reads
