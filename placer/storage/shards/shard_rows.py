"""Rows of tables by their ids: which shards hold them, by arithmetic, reading and loading them."""

from collections.abc import Set
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from placer.errors import CheckpointError
from placer.executor.distributed.placement.division import ranks_of_devices
from placer.executor.id_order import IdRange, TableTensor, tensors_of
from placer.executor.tensor_names import UPDATES, check_shapes
from placer.files import StrPath
from placer.plan.order import Int, Ranks
from placer.plan.shard import Shard
from placer.storage.run_state import STATES, WEIGHTS, Checkpoint
from placer.storage.shards.shard_folder import ShardFile, ShardFolder, open_shards
from placer.storage.tensor_rows import MOST_ROWS, AnyTensor, TensorRows, chunk_rows, row_blocks

if TYPE_CHECKING:
    from placer.executor import Embeddings


def ids_at(order: Ranks, shard: Shard, start: int, stop: int) -> Int:
    """Return ids at rows ``start..stop`` of a shard, shape (stop − start,).

    >>> ids_at(Ranks.of([7, 3]), Shard("t", (0, 100, 1), (0, 8), ("gpu:0",), "hbm", "device"), 0, 4)
    array([7, 3, 0, 1])
    """
    first, _, step = shard.rows
    return order.ids(first + step * np.arange(start, stop, dtype=np.int64))


def same_ids(one: tuple[Ranks, Shard], other: tuple[Ranks, Shard]) -> bool:
    """Compare the ids of two shards of as many rows, of whatever row orders, in their order."""
    return all(
        np.array_equal(ids_at(*one, start, stop), ids_at(*other, start, stop))
        for start, stop in row_blocks(one[1].row_count, MOST_ROWS)
    )


def held_rows(ranks: Int, shard: Shard) -> tuple[Int, Int]:
    """Find those of some rows that a shard holds: which, ascending, and their places in the shard.

    `ranks` are in the row order of the shard's plan.
    """
    start, stop, step = shard.rows
    inside = (ranks >= start) & (ranks < stop)
    if step > 1:
        inside &= (ranks - start) % step == 0
    where = np.flatnonzero(inside)
    return where, (ranks[where] - start) // step


def gather(
    folder: ShardFolder,
    tensor: TableTensor,
    ids: Int,
    cols: tuple[int, int],
    own: Set[str] = frozenset(),
) -> Tensor:
    """Read rows and columns of a tensor, from the files of `own` devices before others.

    Returns shape (n, stop − start); (n,) for state that is one number a row. Raises CheckpointError
    if a file is damaged, or the folder lacks some of the rows.
    """

    def is_foreign(file: ShardFile) -> bool:
        return file.home.device not in own

    table, width = tensor.table.name, cols[1] - cols[0]
    result = np.empty((ids.size, tensor.width_bytes(width)), dtype=np.uint8)
    columns_read = np.zeros(ids.size, dtype=np.int64)
    ranks = folder.order_of(table).ranks(ids)
    nearest = (min(copies, key=is_foreign) for copies in folder.files[table])
    for file in sorted(nearest, key=is_foreign):
        shard, stored = file.shard, file.tensors[tensor.name]
        low, high = max(cols[0], shard.cols[0]), min(cols[1], shard.cols[1])
        if tensor.is_per_row:
            low, high = cols
        if low >= high:
            continue
        where, positions = held_rows(ranks, shard)
        if tensor.is_per_row:
            is_new = columns_read[where] == 0
            where, positions = where[is_new], positions[is_new]
        if where.size:
            here = stored.columns(low - cols[0], high - cols[0])
            there = stored.columns(low - shard.cols[0], high - shard.cols[0])
            result[where, here] = folder.rows(file, stored, positions)[:, there]
            columns_read[where] += high - low
    if (columns_read != width).any():
        raise CheckpointError(
            f"the shards in {folder.path} do not hold every row and column of table {table!r} "
            "once; `placer verify` says which of its plan's are missing"
        )
    values = torch.from_numpy(result).view(tensor.dtype)
    return values.reshape(-1) if tensor.is_per_row else values


def checkpoint_of_shards(folder: ShardFolder) -> Checkpoint:
    """Make a checkpoint of a folder's tables; their rows are read on demand, in id order."""
    groups: dict[str, dict[str, AnyTensor]] = {WEIGHTS: {}, STATES: {}}

    def read(tensor: TableTensor, start: int, stop: int) -> Tensor:
        cols = (0, 1) if tensor.is_per_row else (0, tensor.table.dim)
        return gather(folder, tensor, np.arange(start, stop), cols)

    for table in folder.plan.tables:
        for tensor in tensors_of(table, table.optimizer):
            group = WEIGHTS if tensor.name == "weight" else STATES
            groups[group][f"{table.name}.{tensor.name}"] = TensorRows(
                tensor.shape, tensor.dtype, partial(read, tensor)
            )
    if folder.updates is not None:
        groups[STATES][UPDATES] = torch.tensor(folder.updates)
    return Checkpoint(folder.position, {}, groups)


def load_shards(
    embeddings: "Embeddings",
    shards: ShardFolder | StrPath,
    *,
    verify_files: bool = True,
) -> ShardFolder:
    """Overwrite weights and optimizer state with a folder's rows, and the number of updates.

    Every process reads the rows that it holds, and talks to no other. Where the folder is of the
    module's own plan these are the files of the process's own devices; else any that have the
    rows. All is checked before anything is overwritten but the files' content, which is when
    their first row is read.

    Parameters
    ----------
    embeddings : PlacedEmbeddings or ShardedEmbeddings
    shards : ShardFolder or path
    verify_files : bool
        Whether the SHA-256 of the files is compared.

    Returns
    -------
    ShardFolder
        The folder; its `step` is how far the rows were trained.

    Raises
    ------
    CheckpointError
        If the folder's tables are not those of the module; names each. If a file is missing or
        damaged; rows may have been overwritten then.
    """
    if not isinstance(shards, ShardFolder):
        shards = open_shards(shards, verify=verify_files)
    order = embeddings.id_order()
    held = {
        f"{table.name}.{tensor.name}": tensor
        for table in shards.plan.tables
        for tensor in tensors_of(table, table.optimizer)
    }
    expected = {f"{tensor.table.name}.{tensor.name}": tensor for tensor in order.tensors()}
    check_shapes(
        f"the shards in {shards.path} do not fit",
        held,
        {name: tensor.shape for name, tensor in expected.items()},
        {name: tensor.dtype for name, tensor in expected.items()},
    )
    order.synchronize()
    ranks = ranks_of_devices(order.plan.topology, order.world)
    own = frozenset(device for device, rank in ranks.items() if rank == order.rank)
    for tensor in order.tensors():
        for start, stop in row_blocks(tensor.table.rows, chunk_rows(tensor.row_bytes)):
            for places, cols, write in order.held(IdRange(tensor, start, stop)):
                write(gather(shards, tensor, (start + places).numpy(), cols, own))
    if shards.updates is not None:
        order.set_update_count(shards.updates)
    return shards
