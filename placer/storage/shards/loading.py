"""Shards into the module that trains or serves with them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from placer.errors import PlanMismatchError
from placer.files import StrPath
from placer.plan.order import Int
from placer.plan.plan import Plan
from placer.plan.shard import Shard
from placer.storage.row_blocks import chunk_rows, row_blocks
from placer.storage.shards.shard_file import ShardLayout
from placer.storage.shards.shard_folder import ShardFile, ShardFolder, open_shards
from placer.storage.shards.shard_rows import gather, held_rows
from placer.tables import OptimizerName

if TYPE_CHECKING:
    from placer.executor import Embeddings
    from placer.executor.id_order import IdOrder, LocalShard


def load_shards(
    embeddings: "Embeddings",
    shards: ShardFolder | StrPath,
    *,
    verify_files: bool = True,
    optimizer_state: bool = True,
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
    optimizer_state : bool
        Whether the module trains on, and must have the optimizers that the rows were trained by.

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
    if not isinstance(shards, ShardFolder):
        shards = open_shards(shards, verify=verify_files)
    tables = embeddings.id_order()
    _check_tables(shards, tables.plan, tables.optimizers if optimizer_state else None)
    tables.synchronize()
    own = _devices(tables)
    for local in tables.local_shards():
        _load(local, shards, own)
    if shards.updates is not None:
        tables.set_update_count(shards.updates)
    return shards


def _load(local: "LocalShard", shards: ShardFolder, own: frozenset[str]) -> None:
    """Overwrite what this process holds of one tensor."""
    import torch

    def nearest(files: tuple[ShardFile, ...]) -> ShardFile:
        return next((file for file in files if file.home.device in own), files[0])

    name = local.tensor.name
    table = shards.plan.tables_by_name[local.tensor.table.name]
    width = 1 if local.cols is None else local.cols[1] - local.cols[0]
    step = chunk_rows(local.tensor.width_bytes(width))
    for start, stop in row_blocks(local.rows, step):
        ids = local.ids(start, stop).cpu().numpy()
        cols = local.cols or _own_column(shards, table.name, ids, own)
        # What a row of these columns is in a file.
        layout = ShardLayout(table, Shard(table.name, (0, 0, 1), cols, (), "dram", "host"))
        rows = gather(shards, layout, (name,), ids, nearest)[name]
        values = torch.from_numpy(rows).view(local.tensor.dtype)
        if local.tensor.is_per_row:
            values = values.reshape(-1)
        local.write(torch.arange(start, stop), values)


def _own_column(shards: ShardFolder, table: str, ids: Int, own: frozenset[str]) -> tuple[int, int]:
    """A column whose slice has the state of these rows: state of one number a row is in all.

    One of this process's own devices, if there is such a one.
    """
    of_table = shards.plan.shards_by_table[table]
    for first in sorted({shard.cols[0] for shard in of_table}):
        column = (first, first + 1)
        held = held_rows(shards.order_of(table), of_table, ids, column)
        if all(own.intersection(rows.shard.devices) for rows in held):
            return column
    return (0, 1)


def _devices(tables: "IdOrder") -> frozenset[str]:
    """The plan's devices that this process stands for."""
    from placer.executor.distributed.placement.division import ranks_of_devices

    ranks = ranks_of_devices(tables.plan.topology, tables.world)
    return frozenset(device for device, rank in ranks.items() if rank == tables.rank)


def _check_tables(
    shards: ShardFolder, plan: Plan, optimizers: Mapping[str, OptimizerName] | None
) -> None:
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
        optimizer = held.optimizer if optimizers is None else optimizers[table.name]
        now = (table.rows, table.dim, table.dtype, optimizer)
        faults += [
            f"table {table.name!r} has {what} {before} in the shards and {after} in the model"
            for what, before, after in zip(
                ("rows", "dim", "dtype", "optimizer"), was, now, strict=True
            )
            if before != after
        ]
    if faults:
        raise PlanMismatchError(f"the shards in {shards.path} do not fit: {'; '.join(faults)}")
