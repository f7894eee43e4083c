"""From the tables of a checkpoint to the shards of a plan, or to one file of tables."""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from placer.errors import CheckpointError
from placer.files import StrPath, replacing, sha256_file
from placer.plan.order import Ranks
from placer.plan.plan import Plan
from placer.plan.verify import verify
from placer.storage.row_blocks import chunk_rows
from placer.storage.run_state import STATES, WEIGHTS, Checkpoint
from placer.storage.shards.shard_file import shard_writer
from placer.storage.shards.shard_folder import (
    NewShards,
    ShardFile,
    ShardFolder,
    files_by_table,
    new_shards,
    open_shards,
)
from placer.storage.shards.shard_rows import held_rows

if TYPE_CHECKING:
    from placer.storage.tensor_rows import TensorRows

_MOST_OPEN = 256
"""Files that are open at a time: systems allow some thousand."""


def write_shards(plan: Plan, checkpoint: Checkpoint, path: StrPath) -> ShardFolder:
    """Write the tables of a checkpoint as a plan lays them out, one file a shard and device.

    Each table is read once, a bounded number of rows at a time, and its rows go to the files
    of the shards that have them: no table has to fit in memory. Replicas are one file that has
    a name for each device (a hard link, where the file system has them).

    Parameters
    ----------
    plan : Plan
    checkpoint : Checkpoint
        As `placer.training.checkpoint.open_checkpoint` opens it; of any plan of these tables.
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

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from placer import Plan, Shard, Table, Topology
    >>> from placer.storage.run_state import Position
    >>> shard = Shard("t", (0, 6, 1), (0, 2), ("gpu:0",), "hbm", "device")
    >>> plan = Plan((Table("t", 6, 2, optimizer="sgd"),), Topology.parse("1xh100"), (shard,))
    >>> weights = {"embeddings": {"t.weight": torch.rand(6, 2)}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     shards = write_shards(plan, Checkpoint(Position(step=3), {}, weights), f"{folder}/new")
    >>> shards.step, [file.name for (file,) in shards.files["t"]]
    (3, ['gpu%3A0.hbm/00000-t.safetensors'])
    """
    verify(plan)
    tensors = _tensors_by_table(plan, checkpoint)
    with new_shards(path, plan) as made:
        for name, files in files_by_table(plan).items():
            order = Ranks.in_plan(plan, name)
            for start in range(0, len(files), _MOST_OPEN):
                _write_table(made, order, files[start : start + _MOST_OPEN], tensors[name])
        made.finish(asdict(checkpoint.position), _updates(checkpoint))
    return open_shards(path)


def write_tables(
    plan: Plan,
    checkpoint: Checkpoint,
    path: StrPath,
    *,
    with_optimizer: bool = False,
) -> None:
    """Write the tables of a checkpoint to one safetensors file, in rows.

    ``<table>.weight`` is [rows, dim] in id order, as in `PlacedEmbeddings.state_dict`; with the
    optimizer's state besides, as in its `optimizer_state_dict`.

    Raises
    ------
    CheckpointError
        If the checkpoint lacks a table of the plan, or has another shape or dtype.
    PlacerError
        If the file cannot be written; what was there before is there still.
    """
    from placer.storage.tensor_rows import write_safetensors

    named = {
        f"{table}.{name}": rows
        for table, tensors in _tensors_by_table(plan, checkpoint, with_optimizer).items()
        for name, rows in tensors.items()
    }
    with replacing(path) as temporary:
        write_safetensors(temporary, named)


def _write_table(
    made: NewShards,
    order: Ranks,
    files: Sequence[tuple[ShardFile, ...]],
    tensors: dict[str, "TensorRows"],
) -> None:
    """Write some of a table's shards, reading the table once."""
    from placer.storage.tensor_rows import bytes_of

    layouts = [copies[0].layout for copies in files]
    table, shards = layouts[0].table, [layout.shard for layout in layouts]
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(shard_writer(made.target(copies[0]), copies[0].layout))
            for copies in files
        ]
        for name, rows in tensors.items():
            for start, block in rows.blocks(chunk_rows(rows.row_bytes)):
                values = bytes_of(block).numpy().reshape(len(block), -1)
                ids = np.arange(start, start + len(block), dtype=np.int64)
                for held in held_rows(order, shards, ids, (0, table.dim)):
                    tensor = layouts[held.index].tensors[name]
                    own = values[held.where][:, tensor.columns(*held.shard.cols)]
                    writers[held.index].write(tensor, held.positions, own)
    for first, *others in files:
        sha256 = sha256_file(made.target(first))
        made.add(first, sha256)
        for other in others:
            made.link(made.target(first), other, sha256)


def _tensors_by_table(
    plan: Plan, checkpoint: Checkpoint, with_optimizer: bool = True
) -> dict[str, dict[str, "TensorRows"]]:
    """A checkpoint's tensors by table and name, checked against a plan's tables."""
    from placer.executor.id_order import tensors_of
    from placer.executor.tensor_names import UPDATES, check_shapes, state_shapes
    from placer.storage.tensor_rows import TensorRows

    weights, states = (checkpoint.tensors.get(name, {}) for name in (WEIGHTS, STATES))
    tensors = {t.name: list(tensors_of(t, t.optimizer)) for t in plan.tables}
    shapes = {f"{table}.weight": weight.shape for table, (weight, *_) in tensors.items()}
    check_shapes("the checkpoint's tables do not fit the plan", weights, shapes)
    if with_optimizer:
        optimizers = {table.name: table.optimizer for table in plan.tables}
        shapes = state_shapes(plan.tables, optimizers, counted=UPDATES in states)
        check_shapes("the checkpoint's optimizer state does not fit the plan", states, shapes)
    by_table = {}
    for table in plan.tables:
        weight, *state = tensors[table.name]
        rows = TensorRows.of(weights[f"{table.name}.weight"])
        if rows.dtype != weight.dtype:
            raise CheckpointError(
                f"table {table.name!r} is {rows.dtype} in the checkpoint and {table.dtype} in the "
                "plan; make the plan with that --dtype"
            )
        by_table[table.name] = {"weight": rows}
        for tensor in state if with_optimizer else ():
            rows = TensorRows.of(states[f"{table.name}.{tensor.name}"])
            by_table[table.name][tensor.name] = rows
    return by_table


def _updates(checkpoint: Checkpoint) -> int | None:
    from placer.executor.tensor_names import UPDATES
    from placer.storage.tensor_rows import TensorRows

    updates = checkpoint.tensors.get(STATES, {}).get(UPDATES)
    return None if updates is None else int(TensorRows.of(updates).whole())
