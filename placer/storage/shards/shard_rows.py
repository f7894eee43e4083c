"""Rows of tables by their ids: which shards hold them, by arithmetic, and in which files."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from placer.errors import CheckpointError
from placer.plan.order import Int, Ranks
from placer.plan.shard import Shard
from placer.storage.row_blocks import MOST_ROWS
from placer.storage.shards.shard_file import Bytes, ShardLayout
from placer.storage.shards.shard_folder import ShardFile, ShardFolder

Choose = Callable[[tuple[ShardFile, ...]], ShardFile]
"""Which of a shard's replicas is read."""


def ids_at(order: Ranks, shard: Shard, start: int, stop: int) -> Int:
    """Ids at rows ``start..stop`` of a shard, shape (stop − start,).

    >>> ids_at(Ranks.of([7, 3]), Shard("t", (0, 100, 1), (0, 8), ("gpu:0",), "hbm", "device"), 0, 4)
    array([7, 3, 0, 1])
    """
    first, _, step = shard.rows
    return order.ids(first + step * np.arange(start, stop, dtype=np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class HeldRows:
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


def held_rows(
    order: Ranks, shards: Sequence[Shard], ids: Int, cols: tuple[int, int]
) -> Iterator[HeldRows]:
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
            yield HeldRows(index, shard, where, (ranks[where] - start) // step)


def same_ids(one: tuple[Ranks, Shard], other: tuple[Ranks, Shard]) -> bool:
    """Whether two shards of as many rows, of whatever row orders, have the same ids in order."""
    rows, start, step = one[1].row_count, 0, 256  # Most that differ do so soon.
    while start < rows:
        stop = min(start + step, rows)
        if not np.array_equal(ids_at(*one, start, stop), ids_at(*other, start, stop)):
            return False
        start, step = stop, min(4 * step, MOST_ROWS)
    return True


def gather(
    folder: ShardFolder,
    layout: ShardLayout,
    names: Iterable[str],
    ids: Int,
    choose: Choose,
) -> dict[str, Bytes]:
    """Rows of tensors, as a shard of other rows and columns has them.

    Parameters
    ----------
    folder : ShardFolder
    layout : ShardLayout
        Whose table, columns and bytes of a row the result has.
    names : iterable of str
        Which of its tensors.
    ids : int64, shape (n,)
    choose : callable

    Returns
    -------
    dict of str to uint8, shape (n, bytes of a row)

    Raises
    ------
    CheckpointError
        If a file is damaged, or the folder lacks some of the rows.
    """
    table, cols = layout.table.name, layout.shard.cols
    chunk = {
        name: np.empty((ids.size, layout.tensors[name].row_bytes), dtype=np.uint8) for name in names
    }
    cells = 0
    shards = folder.plan.shards_by_table[table]
    for held in held_rows(folder.order_of(table), shards, ids, cols):
        source = choose(folder.files[table][held.index])
        own = held.shard.cols
        low, high = max(cols[0], own[0]), min(cols[1], own[1])
        for name, rows in chunk.items():
            tensor = source.layout.tensors[name]
            here = layout.tensors[name].columns(low - cols[0], high - cols[0])
            there = tensor.columns(low - own[0], high - own[0])
            rows[held.where, here] = folder.rows(source, tensor, held.positions)[:, there]
        cells += held.where.size * (high - low)
    if cells != ids.size * layout.shard.width:
        raise CheckpointError(
            f"the shards in {folder.path} do not hold every row and column of table {table!r} "
            "once; `placer verify` says which of its plan's are missing"
        )
    return chunk
