"""Which ids are at which rows of a shard, by arithmetic: no table's ids are ever listed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from placer.plan.order import Int, Ranks
from placer.plan.shard import Shard
from placer.storage.shards.shard_file import MOST_ROWS


def ids_at(order: Ranks, shard: Shard, start: int, stop: int) -> Int:
    """Ids at rows ``start..stop`` of a shard, shape (stop − start,)."""
    first, _, step = shard.rows
    ranks = first + step * np.arange(start, stop, dtype=np.int64)
    known = int(np.searchsorted(ranks, order.listed.size))
    return np.concatenate((order.listed[ranks[:known]], order.unlisted_ids(ranks[known:])))


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Those of some ids that a shard holds.

    Attributes
    ----------
    index : int
        Of the shard, among those looked through.
    shard : Shard
    where : int64, shape (n,)
        Which of the ids, ascending.
    positions : int64, shape (n,)
        Their rows in the shard.
    """

    index: int
    shard: Shard
    where: Int
    positions: Int


def find(order: Ranks, shards: Sequence[Shard], ids: Int, cols: tuple[int, int]) -> Iterator[Found]:
    """The shards of a table that hold some of these ids in some of these columns.

    Parameters
    ----------
    order : Ranks
        Of the plan that the shards are of.
    ids : int64, shape (n,)
    cols : (start, stop)
    """
    if not ids.size:
        return
    ranks = order.ranks(ids)
    low, high = int(ranks.min()), int(ranks.max())
    for index, shard in enumerate(shards):
        start, stop, step = shard.rows
        apart = shard.cols[1] <= cols[0] or cols[1] <= shard.cols[0]
        if apart or stop <= low or high < start:
            continue
        inside = (ranks >= start) & (ranks < stop)
        if step > 1:
            inside &= (ranks - start) % step == 0
        where = np.flatnonzero(inside)
        if where.size:
            yield Found(index, shard, where, (ranks[where] - start) // step)


def same_ids(one: tuple[Ranks, Shard], other: tuple[Ranks, Shard]) -> bool:
    """Whether two shards of as many rows, of whatever row orders, have the same ids in order."""
    rows, start, step = one[1].row_count, 0, 256  # Most that differ do so soon.
    while start < rows:
        stop = min(start + step, rows)
        if not np.array_equal(ids_at(*one, start, stop), ids_at(*other, start, stop)):
            return False
        start, step = stop, min(4 * step, MOST_ROWS)
    return True
