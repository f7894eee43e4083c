"""Shards into the module that trains or serves with them."""

from typing import TYPE_CHECKING

import torch

from placer.executor.distributed.placement.division import ranks_of_devices
from placer.executor.id_order import tensors_of
from placer.executor.tensor_names import check_shapes
from placer.files import StrPath
from placer.storage.row_blocks import chunk_rows, row_blocks
from placer.storage.shards.shard_folder import ShardFolder, open_shards
from placer.storage.shards.shard_rows import gather

if TYPE_CHECKING:
    from placer.executor import Embeddings


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
    for local in order.local_shards():
        cols = local.cols or (0, 1)
        step = chunk_rows(local.tensor.width_bytes(cols[1] - cols[0]))
        for start, stop in row_blocks(local.rows, step):
            ids = local.ids(start, stop).cpu().numpy()
            rows = gather(shards, local.tensor, ids, cols, own)
            local.write(torch.arange(start, stop), rows)
    if shards.updates is not None:
        order.set_update_count(shards.updates)
    return shards
