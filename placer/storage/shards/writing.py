"""From the tables of a checkpoint, or of other shards, to the shards of a plan or to one file."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from placer.errors import CheckpointError
from placer.executor.id_order import tensors_of
from placer.executor.tensor_names import UPDATES, check_shapes, state_shapes
from placer.files import StrPath, replacing
from placer.growing.key_map import KeyMap
from placer.growing.options import Growing
from placer.plan.diff import PlanDiff, diff
from placer.plan.order import Ranks
from placer.plan.plan import Plan
from placer.plan.verify import verify
from placer.storage.row_blocks import chunk_rows, row_blocks
from placer.storage.run_state import KEYS, STATES, WEIGHTS, Checkpoint
from placer.storage.shards.shard_file import ShardLayout, shard_writer
from placer.storage.shards.shard_folder import (
    NewShards,
    ShardFile,
    ShardFolder,
    files_by_table,
    new_shards,
    open_shards,
    refuse_other_plan,
)
from placer.storage.shards.shard_rows import checkpoint_of_shards, held_rows, same_ids
from placer.storage.tensor_rows import AnyTensor, TensorRows, bytes_of, write_safetensors

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
    tensors = tensors_by_table(plan, checkpoint)
    with new_shards(path, plan) as made:
        for name, files in files_by_table(plan).items():
            _write_table(made, files, tensors[name])
        updates = checkpoint.tensors.get(STATES, {}).get(UPDATES)
        count = None if updates is None else int(TensorRows.of(updates).whole())
        made.finish(checkpoint.position, count)
    return open_shards(path)


@dataclass(frozen=True, slots=True)
class Resharded:
    """What was done."""

    difference: PlanDiff  # Rows by device.
    # Files that are those of the older folder (or of a replica), and those with rows of several.
    kept_files: int
    written_files: int
    # Of these, what was not and what was written to disk; on a file system without hard links kept
    # files are written too.
    kept_file_bytes: int
    written_file_bytes: int


def reshard(
    shards: ShardFolder | StrPath,
    new: Plan,
    path: StrPath,
    *,
    old: Plan | None = None,
    verify_files: bool = True,
) -> Resharded:
    """Make the folder of a plan from that of another one, byte for byte as from a checkpoint.

    Files whose rows and columns are those of an older file become hard links to it. The others
    are written as `write_shards` writes them; rows are known by their ids, whatever the row
    orders. Optimizer state goes with its rows.

    Parameters
    ----------
    shards : ShardFolder or path
        Stays as it is. The new folder shares files with it: write none of them in place.
    new : Plan
    path : str or path
        The folder to make; it appears when it is complete.
    old : Plan, optional
        The plan that `shards` is believed to be of; by default the one that it has in it. Bytes
        are counted between its devices and those of `new`.
    verify_files : bool
        Whether the SHA-256 of every file that is kept or read is compared first. Without it
        kept files are not read, and of others only blocks of rows of which some are needed.

    Raises
    ------
    PlanMismatchError
        If the folder is not of `old`, or `new` has tables that `old` lacks or has otherwise.
    PlanError
        If the newer plan is unsound.
    CheckpointError
        If a file is missing or damaged.
    PlacerError
        If there is something at `path`, or it cannot be written; nothing is left there then.
    """
    if not isinstance(shards, ShardFolder):
        shards = open_shards(shards, verify=verify_files)
    refuse_other_plan(shards, old or shards.plan)
    verify(new)
    difference = diff(old or shards.plan, new)
    difference.check_rows()
    tensors = tensors_by_table(shards.plan, checkpoint_of_shards(shards))
    with new_shards(path, new) as made:
        for name, files in files_by_table(new).items():
            order = Ranks.in_plan(new, name)
            changed = []
            for copies in files:
                source = _unchanged(shards, order, copies[0].layout)
                if source is None:
                    changed.append(copies)
                    continue
                shards.check(source)
                sha256 = shards.manifest.files[source.name].sha256
                made.link(shards.path / source.name, copies, sha256)
            _write_table(made, changed, tensors[name])
        made.finish(shards.position, shards.updates)
    every = [(name, entry.size_bytes) for name, entry in made.entries.items()]
    written_bytes = sum(size for name, size in every if name not in made.linked)
    return Resharded(
        difference,
        len(made.kept),
        len(every) - len(made.kept),
        sum(size for _, size in every) - written_bytes,
        written_bytes,
    )


def _unchanged(shards: ShardFolder, order: Ranks, layout: ShardLayout) -> ShardFile | None:
    """Return the file of an older shard with the same rows in the same order, if there is one."""
    table, shard = layout.table.name, layout.shard
    older_order = shards.order_of(table)
    for file, *_ in shards.files[table]:
        older = file.layout.shard
        if (older.cols, older.row_count) == (shard.cols, shard.row_count) and same_ids(
            (older_order, older), (order, shard)
        ):
            return file
    return None


def write_tables(
    plan: Plan,
    checkpoint: Checkpoint,
    path: StrPath,
    *,
    with_optimizer: bool = False,
) -> None:
    """Write the tables of a checkpoint to one safetensors file, in rows.

    ``<table>.weight`` is [rows, dim] in id order, as in `PlacedEmbeddings.state_dict`; with the
    optimizer's state besides, as in its `optimizer_state_dict`. Of a table that grows,
    ``<table>.keys`` are the keys that have rows, and ``<table>.rows`` these rows; int64. The file
    says of which checkpoint it is, so that servers of it take the increments that follow.

    Raises CheckpointError if the checkpoint lacks a table of the plan, or has another shape or
    dtype. Raises PlacerError if the file cannot be written; what was there before is there still.
    """
    named: dict[str, AnyTensor] = {
        f"{table}.{name}": rows
        for table, tensors in tensors_by_table(plan, checkpoint, with_optimizer).items()
        for name, rows in tensors.items()
    }
    for table, how in plan.growing.items():
        live = keys_of(checkpoint, table, how).live()
        for name, values in zip(("keys", "rows"), live, strict=True):
            named[f"{table}.{name}"] = torch.from_numpy(values)
    with replacing(path) as temporary:
        write_safetensors(temporary, named, origin_of(checkpoint))


def origin_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Return what a file says of its checkpoint, where that was read from files."""
    if not checkpoint.sha256:
        return {}
    return {"checkpoint": checkpoint.sha256, "step": str(checkpoint.position.step)}


def keys_of(checkpoint: Checkpoint, table: str, how: Growing) -> KeyMap:
    """Return which keys of a table that grows have which rows."""
    saved, keys = checkpoint.tensors.get(KEYS, {}), KeyMap(how)
    names = {name: f"{table}.keys.{name}" for name in KeyMap.STATE}
    missing = [name for name in names.values() if name not in saved]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {missing[0]!r} of a table that grows")
    whole = {name: TensorRows.of(saved[full]).whole().numpy() for name, full in names.items()}
    keys.load_state(whole)
    return keys


def _write_table(
    made: NewShards, files: Sequence[tuple[ShardFile, ...]], tensors: Mapping[str, TensorRows]
) -> None:
    """Write shards of one table, reading the table once, or once for so many as may be open."""
    for first in range(0, len(files), _MOST_OPEN):
        _write_shards(made, files[first : first + _MOST_OPEN], tensors)


def _write_shards(
    made: NewShards, files: Sequence[tuple[ShardFile, ...]], tensors: Mapping[str, TensorRows]
) -> None:
    layouts = [file.layout for file, *_ in files]
    order = Ranks.in_plan(made.plan, layouts[0].table.name)
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(shard_writer(made.target(file), file.layout)) for file, *_ in files
        ]
        for name, rows in tensors.items():
            for start, stop in row_blocks(rows.rows, chunk_rows(rows.row_bytes)):
                ranks = order.ranks(np.arange(start, stop, dtype=np.int64))
                held = [held_rows(ranks, layout.shard) for layout in layouts]
                if not any(where.size for where, _ in held):
                    continue
                values = bytes_of(rows.read(start, stop)).numpy().reshape(stop - start, -1)
                for layout, writer, (where, positions) in zip(layouts, writers, held, strict=True):
                    tensor = layout.tensors[name]
                    own = values[where][:, tensor.columns(*layout.shard.cols)]
                    writer.write(tensor, positions, own)
    for copies in files:
        made.add_written(copies)


def tensors_by_table(
    plan: Plan, checkpoint: Checkpoint, with_optimizer: bool = True
) -> dict[str, dict[str, TensorRows]]:
    """Return a checkpoint's tensors by table and name, checked against a plan's tables."""
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
