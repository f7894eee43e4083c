"""Rows of a table by their ids, from whichever files hold them."""

from collections.abc import Callable, Iterable

import numpy as np

from placer.errors import CheckpointError
from placer.plan.order import Int
from placer.plan.shard import Shard
from placer.storage.shards.shard_file import Bytes, ShardForm
from placer.storage.shards.shard_folder import ShardFile, ShardFolder
from placer.storage.shards.shard_rows import find

Choose = Callable[[tuple[ShardFile, ...]], ShardFile]
"""Which of a shard's replicas is read."""


def gather(
    folder: ShardFolder,
    form: ShardForm,
    names: Iterable[str],
    ids: Int,
    choose: Choose,
    on_piece: Callable[[Shard, int], None] | None = None,
) -> dict[str, Bytes]:
    """Rows of tensors, as a shard of other rows and columns has them.

    Parameters
    ----------
    folder : ShardFolder
    form : ShardForm
        Whose table, columns and bytes of a row the result has.
    names : iterable of str
        Which of its tensors.
    ids : int64, shape (n,)
    choose : callable
    on_piece : callable, optional
        Is told of every shard that rows were taken from, and how many.

    Returns
    -------
    dict of str to uint8, shape (n, bytes of a row)

    Raises
    ------
    CheckpointError
        If a file is damaged, or the folder lacks some of the rows.
    """
    table, cols = form.table.name, form.shard.cols
    chunk = {
        name: np.empty((ids.size, form.tensors[name].row_bytes), dtype=np.uint8) for name in names
    }
    shards = folder.plan.shards_by_table[table]
    cells = 0
    for piece in find(folder.order_of(table), shards, ids, cols):
        source = choose(folder.files[table][piece.index])
        own = piece.shard.cols
        low, high = max(cols[0], own[0]), min(cols[1], own[1])
        for name, rows in chunk.items():
            held = source.form.tensors[name]
            here = form.tensors[name].columns(low - cols[0], high - cols[0])
            there = held.columns(low - own[0], high - own[0])
            rows[piece.where, here] = folder.rows(source, held, piece.positions)[:, there]
        cells += piece.where.size * (high - low)
        if on_piece is not None:
            on_piece(piece.shard, piece.where.size)
    if cells != ids.size * form.shard.width:
        raise CheckpointError(
            f"the shards in {folder.path} do not hold every row and column of table {table!r} "
            "once; `placer verify` says which of its plan's are missing"
        )
    return chunk
