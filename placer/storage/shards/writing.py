"""From the canonical tables of a checkpoint to the shards of a plan, or to one file of tables."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from placer.errors import CheckpointError
from placer.files import replacing, sha256_file
from placer.plan.order import Ranks
from placer.plan.plan import Plan
from placer.plan.verify import verify
from placer.storage.shards.shard_file import Bytes, ShardWriter, chunk_rows
from placer.storage.shards.shard_folder import (
    NewFolder,
    ShardFile,
    ShardFolder,
    files_by_table,
    new_folder,
    open_shards,
)
from placer.storage.shards.shard_rows import find

if TYPE_CHECKING:
    from torch import Tensor

    from placer.storage.tensor_rows import TensorRows
    from placer.training.checkpoint import Checkpoint

_WEIGHTS, _STATES = "embeddings", "embedding_optimizer"
"""What a checkpoint calls them."""
_MOST_OPEN = 256
"""Files that are open at a time: systems allow some thousand."""


def write_shards(plan: Plan, checkpoint: "Checkpoint", path: str | os.PathLike[str]) -> ShardFolder:
    """Write the tables of a checkpoint as a plan lays them out, one file a shard and device.

    Each table is read once, a bounded number of rows at a time, and its rows go to the files
    of the shards that have them: no table has to fit in memory. Replicas are one file that has
    a name for each device (a hard link, where the file system has them).

    Parameters
    ----------
    plan : Plan
    checkpoint : Checkpoint
        As `placer.training.checkpoint.open_checkpoint` gives it; of any plan of these tables.
    path : str or path
        The folder to make; it appears when it is complete.

    Raises
    ------
    PlanError
        If the plan is unsound.
    CheckpointError
        If the checkpoint lacks a table or its optimizer state, or has another shape or dtype.
    PlacerError
        If there is something at `path`, or it cannot be written; nothing is left there then.
    """
    verify(plan)
    tensors = _canonical_tensors(plan, checkpoint)
    with new_folder(path, plan) as made:
        for name, files in files_by_table(plan).items():
            order = Ranks.in_plan(plan, name)
            for start in range(0, len(files), _MOST_OPEN):
                _write_table(made, order, files[start : start + _MOST_OPEN], tensors[name])
        made.finish(asdict(checkpoint.position), _updates(checkpoint))
    return open_shards(path)


def write_tables(
    plan: Plan,
    checkpoint: "Checkpoint",
    path: str | os.PathLike[str],
    *,
    with_optimizer: bool = False,
) -> None:
    """Write the canonical tables of a checkpoint to one safetensors file, in rows.

    ``<table>.weight`` is [rows, dim] in id order, as in `PlacedEmbeddings.state_dict`; with the
    optimizer's state besides, as in its `optimizer_state_dict`.

    Raises
    ------
    CheckpointError
        If the checkpoint lacks a table of the plan, or has another shape or dtype.
    PlacerError
        If the file cannot be written; what was there before is there still.
    """
    from placer.storage import safetensors_file as tensor_file

    found = {
        f"{table}.{name}": rows
        for table, tensors in _canonical_tensors(plan, checkpoint, with_optimizer).items()
        for name, rows in tensors.items()
    }
    with replacing(Path(path)) as temporary:
        tensor_file.write(temporary, found)


def _write_table(
    made: NewFolder,
    order: Ranks,
    files: Sequence[tuple[ShardFile, ...]],
    tensors: dict[str, "TensorRows"],
) -> None:
    """Write some of a table's shards, reading the table once."""
    table, shards = files[0][0].form.table, [copies[0].form.shard for copies in files]
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(ShardWriter(made.target(copies[0]), copies[0].form))
            for copies in files
        ]
        for name, rows in tensors.items():
            for row, chunk in _chunks(rows):
                ids = np.arange(row, row + len(chunk), dtype=np.int64)
                for found in find(order, shards, ids, (0, table.dim)):
                    form = files[found.index][0].form
                    tensor = form.tensors[name]
                    own = chunk[found.where]
                    if not tensor.is_per_row:
                        own = own[
                            :, slice(*(tensor.element_bytes * col for col in found.shard.cols))
                        ]
                    writers[found.index].write(tensor, found.positions, own)
    for first, *others in files:
        sha256 = sha256_file(made.target(first))
        made.add(first, sha256)
        for other in others:
            made.take(made.target(first), other, sha256)


def _chunks(rows: "TensorRows") -> Iterator[tuple[int, Bytes]]:
    """First row, and the bytes of some rows, shape (n, bytes of a row)."""
    if not rows.shape[0]:
        return
    row_bytes = rows.size_bytes // rows.shape[0]
    step = chunk_rows(row_bytes)
    for start in range(0, rows.shape[0], step):
        chunk = rows.read(start, min(start + step, rows.shape[0]))
        yield start, _bytes_of(chunk.to(rows.dtype), row_bytes)


def _bytes_of(chunk: "Tensor", row_bytes: int) -> Bytes:
    """NumPy lacks bfloat16; bytes are bytes."""
    import torch

    flat = chunk.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.asarray(flat).reshape(-1, row_bytes)


def _canonical_tensors(
    plan: Plan, checkpoint: "Checkpoint", with_optimizer: bool = True
) -> dict[str, dict[str, "TensorRows"]]:
    """A checkpoint's tensors by table and name, checked against a plan's tables."""
    from placer.executor.memory.arena import TORCH_DTYPES
    from placer.executor.optimizers.rule import STATE
    from placer.executor.tensor_names import UPDATES, check_shapes, state_shapes, tensor_shape
    from placer.storage.tensor_rows import in_rows

    weights, states = (dict(checkpoint.tensors.get(name, {})) for name in (_WEIGHTS, _STATES))
    shapes = {
        f"{table.name}.weight": tensor_shape(table, "weight", table.optimizer)
        for table in plan.tables
    }
    check_shapes("the checkpoint's tables do not fit the plan", weights, shapes)
    if with_optimizer:
        optimizers = {table.name: table.optimizer for table in plan.tables}
        shapes = state_shapes(plan.tables, optimizers, counted=UPDATES in states)
        check_shapes("the checkpoint's optimizer state does not fit the plan", states, shapes)
    found: dict[str, dict[str, TensorRows]] = {}
    for table in plan.tables:
        rows = in_rows(weights[f"{table.name}.weight"])
        if rows.dtype != TORCH_DTYPES[table.dtype]:
            raise CheckpointError(
                f"table {table.name!r} is {rows.dtype} in the checkpoint and {table.dtype} in the "
                "plan; make the plan with that --dtype"
            )
        found[table.name] = {"weight": rows}
        if with_optimizer:
            for name in STATE[table.optimizer]:
                found[table.name][name] = in_rows(states[f"{table.name}.{name}"])
    return found


def _updates(checkpoint: "Checkpoint") -> int | None:
    from placer.executor.tensor_names import UPDATES
    from placer.storage.tensor_rows import in_rows

    found = checkpoint.tensors.get(_STATES, {}).get(UPDATES)
    return None if found is None else int(in_rows(found).whole())
