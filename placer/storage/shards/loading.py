"""Shards into the module that trains or serves with them."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from placer.errors import PlanMismatchError
from placer.plan.order import Int
from placer.plan.plan import Plan
from placer.plan.shard import Shard
from placer.storage.shards.gather import Choose, gather
from placer.storage.shards.shard_file import Bytes, ShardForm, chunk_rows
from placer.storage.shards.shard_folder import ShardFile, ShardFolder, open_shards
from placer.storage.shards.shard_rows import find
from placer.tables import OptimizerName, Table

if TYPE_CHECKING:
    from torch import Tensor

    from placer.executor.distributed import ShardedEmbeddings
    from placer.executor.id_order import IdOrder
    from placer.executor.local.placed_embeddings import PlacedEmbeddings


def load_shards(
    embeddings: "PlacedEmbeddings | ShardedEmbeddings",
    shards: ShardFolder | str | os.PathLike[str],
    *,
    verify_files: bool = True,
) -> ShardFolder:
    """Overwrite weights and optimizer state with a folder's rows, and the number of updates.

    Every rank reads the rows that it holds, and talks to no other. Where the folder is of the
    module's own plan these are the files of the rank's own devices; else any that have the
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
    PlanMismatchError
        If the folder's tables are not those of the module; names each.
    CheckpointError
        If a file is missing or damaged. Rows may have been overwritten then.
    """
    from placer.executor.id_order import OwnTables
    from placer.executor.local.placed_embeddings import PlacedEmbeddings

    if not isinstance(shards, ShardFolder):
        shards = open_shards(shards, verify=verify_files)
    tables: IdOrder
    if isinstance(embeddings, PlacedEmbeddings):
        tables = OwnTables(embeddings)
    else:
        tables = embeddings.id_order()
    _check_tables(shards, tables.plan, tables.optimizers)
    tables.settle()
    if isinstance(embeddings, PlacedEmbeddings) or embeddings.world == 1:
        _load_whole(tables, shards)
    else:
        _load_pieces(embeddings, shards)
    if shards.updates is not None:
        tables.set_update_count(shards.updates)
    return shards


def _load_whole(tables: "IdOrder", shards: ShardFolder) -> None:
    """Into tables that this process has alone."""
    from placer.executor.id_order import Span, tensors_of

    for tensor in tensors_of(tables):
        table = tensor.table
        form = _strip(table, (0, table.dim))
        step = chunk_rows(form.tensors[tensor.name].row_bytes)
        for start in range(0, table.rows, step):
            stop = min(start + step, table.rows)
            ids = np.arange(start, stop, dtype=np.int64)
            values = _read(shards, form, tensor.name, ids, _first)
            tables.put(Span(tensor, start, stop), values)


def _load_pieces(embeddings: "ShardedEmbeddings", shards: ShardFolder) -> None:
    """Into what this rank holds of tables that it shares with others."""
    own = _devices(embeddings)

    def nearest(files: tuple[ShardFile, ...]) -> ShardFile:
        return next((file for file in files if file.home.device in own), files[0])

    for piece in embeddings.local_shards():
        table = embeddings.plan.tables_by_name[piece.table]
        step = chunk_rows(_strip(table, piece.cols or (0, 1)).tensors[piece.tensor].row_bytes)
        for start in range(0, piece.rows, step):
            stop = min(start + step, piece.rows)
            ids = piece.ids(start, stop).cpu().numpy()
            cols = piece.cols or _own_column(shards, table.name, ids, own)
            values = _read(shards, _strip(table, cols), piece.tensor, ids, nearest)
            piece.write(_tensor(np.arange(start, stop, dtype=np.int64)), values)


def _own_column(shards: ShardFolder, table: str, ids: Int, own: frozenset[str]) -> tuple[int, int]:
    """A column whose strip has the state of these rows: state of one number a row is in all.

    One of the rank's own devices, if there is such a one.
    """
    strips = shards.plan.shards_by_table[table]
    for first in sorted({shard.cols[0] for shard in strips}):
        column = (first, first + 1)
        found = find(shards.order_of(table), strips, ids, column)
        if all(own.intersection(piece.shard.devices) for piece in found):
            return column
    return (0, 1)


def _devices(embeddings: "ShardedEmbeddings") -> frozenset[str]:
    """The plan's devices that this rank stands for."""
    from placer.executor.distributed.placement.devices import ranks_of_devices

    ranks = ranks_of_devices(embeddings.plan.topology, embeddings.world)
    return frozenset(device for device, rank in ranks.items() if rank == embeddings.rank)


def _first(files: tuple[ShardFile, ...]) -> ShardFile:
    return files[0]


def _strip(table: Table, cols: tuple[int, int]) -> ShardForm:
    """What a row of some columns of a table is in a file."""
    return ShardForm(table, Shard(table.name, (0, 0, 1), cols, (), "dram", "host"))


def _read(shards: ShardFolder, form: ShardForm, name: str, ids: Int, choose: Choose) -> "Tensor":
    """Rows of a tensor by id: shape (n, columns), or (n,)."""
    import torch

    from placer.executor.memory.arena import TORCH_DTYPES

    tensor = form.tensors[name]
    dtype = TORCH_DTYPES[form.table.dtype] if name == "weight" else torch.float32
    values = _tensor(gather(shards, form, (name,), ids, choose)[name]).view(dtype)
    return values.reshape(-1) if tensor.is_per_row else values


def _tensor(array: "Int | Bytes") -> "Tensor":
    import torch

    return torch.from_numpy(array)


def _check_tables(shards: ShardFolder, plan: Plan, optimizers: Mapping[str, OptimizerName]) -> None:
    have = shards.plan.tables_by_name
    faults = [f"table {name!r} is in no shard" for name in plan.tables_by_name if name not in have]
    faults += [
        f"table {name!r} is not the model's" for name in have if name not in plan.tables_by_name
    ]
    for table in plan.tables:
        if table.name not in have:
            continue
        held = have[table.name]
        was = (held.rows, held.dim, held.dtype, held.optimizer)
        now = (table.rows, table.dim, table.dtype, optimizers[table.name])
        faults += [
            f"table {table.name!r} has {what} {before} in the shards and {after} in the model"
            for what, before, after in zip(
                ("rows", "dim", "dtype", "optimizer"), was, now, strict=True
            )
            if before != after
        ]
    if faults:
        raise PlanMismatchError(f"the shards in {shards.path} do not fit: {'; '.join(faults)}")
