"""Write tables to one safetensors file: whole, or the changes between two checkpoints."""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from placer.errors import CheckpointError
from placer.executor.id_order import tensors_of
from placer.executor.tensor_names import UPDATES, check_shapes, state_shapes
from placer.files.atomic import StrPath, replacing
from placer.growing.key_map import KeyMap, load_table
from placer.growing.options import Growing
from placer.plan.plan import Int, Plan
from placer.storage.manifest import KEYS, STATES, WEIGHTS, Checkpoint
from placer.storage.tensor_rows import (
    AnyTensor,
    TensorRows,
    bytes_of,
    chunk_rows,
    row_blocks,
    write_safetensors,
)


def write_tables(
    plan: Plan,
    checkpoint: Checkpoint,
    path: StrPath,
    *,
    with_optimizer: bool = False,
) -> None:
    """Write the tables of a checkpoint to one safetensors file.

    ``<table>.weight`` is [rows, dim] in id order, as in `PlacedEmbeddings.state_dict`.
    `with_optimizer` adds state as in `PlacedEmbeddings.optimizer_state_dict`. For a table that
    grows, ``<table>.keys`` has the keys that have rows, and ``<table>.rows`` their rows, int64. The
    file names its checkpoint, so that servers can apply the increments that follow.

    Raises CheckpointError if the checkpoint lacks a table of the plan, or has another shape or
    dtype. Raises PlacerError if the file cannot be written. An existing file is then unchanged.
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
    """Return a checkpoint's hash and step for a file; nothing if it was not read from files."""
    if not checkpoint.sha256:
        return {}
    return {"checkpoint": checkpoint.sha256, "step": str(checkpoint.position.step)}


def keys_of(checkpoint: Checkpoint, table: str, how: Growing) -> KeyMap:
    """Return the key map of a table that grows, from a checkpoint."""
    saved, keys = checkpoint.tensors.get(KEYS, {}), KeyMap(how)
    names = {name: f"{table}.keys.{name}" for name in KeyMap.STATE}
    missing = [name for name in names.values() if name not in saved]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {missing[0]!r} of a table that grows")
    whole = {name: TensorRows.of(saved[full]).whole().numpy() for name, full in names.items()}
    load_table(keys, table, whole)
    return keys


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


def write_increment(plan: Plan, before: Checkpoint, after: Checkpoint, path: StrPath) -> int:
    """Write what changed in the tables between two checkpoints to one safetensors file.

    ``<table>.rows`` has the numbers of changed rows, ascending, and ``<table>.weight`` their
    values. For a table that grows, ``<table>.keys`` has the keys of these rows (the key of row 0
    has no meaning), and ``<table>.deleted`` the keys that lost their row. Both checkpoints are read
    once, a limited number of rows at a time, and changed rows of `after` once more. The file
    appears when it is complete. Returns the number of changed rows of all tables.

    Raises CheckpointError if a checkpoint lacks a table of the plan, has it in another shape or
    dtype, or was not read from files. Raises PlacerError if the file cannot be written. An existing
    file is then unchanged.
    """
    if not (before.sha256 and after.sha256):
        raise CheckpointError("an increment is between two checkpoints in files; open_checkpoint")
    tables = [tensors_by_table(plan, each, with_optimizer=False) for each in (before, after)]
    named: dict[str, AnyTensor] = {}
    changed = 0
    for table in plan.tables:
        name = table.name
        old, new = (tensors[name]["weight"] for tensors in tables)
        is_changed = _changed(old, new)
        if name in plan.growing:
            how = plan.growing[name]
            (old_keys, old_rows), (keys, rows) = (
                keys_of(each, name, how).live() for each in (before, after)
            )
            is_read, key_of, old_key_of = np.zeros(how.rows, bool), *np.zeros((2, how.rows), int)
            key_of[rows], old_key_of[old_rows] = keys, old_keys
            is_read[rows] = is_read[0] = True
            is_new = is_read.copy()
            is_new[0] = is_new[old_rows] = False
            is_changed = is_read & (is_changed | is_new | (key_of != old_key_of))
            named[f"{name}.keys"] = torch.from_numpy(key_of[is_changed])
            named[f"{name}.deleted"] = torch.from_numpy(np.setdiff1d(old_keys, keys))
        (numbers,) = is_changed.nonzero()
        named[f"{name}.rows"] = torch.from_numpy(numbers)
        named[f"{name}.weight"] = _rows_of(new, numbers)
        changed += numbers.size
    since = {f"since_{name}": value for name, value in origin_of(before).items()}
    with replacing(path) as temporary:
        write_safetensors(temporary, named, {**origin_of(after), **since})
    return changed


def _changed(old: TensorRows, new: TensorRows) -> "np.ndarray[tuple[int], np.dtype[np.bool]]":
    """Return for each row whether its bytes changed, shape (rows,)."""
    parts = [np.empty(0, bool)]
    for start, stop in row_blocks(new.rows, chunk_rows(new.row_bytes)):
        shape = stop - start, new.row_bytes
        one, other = (
            bytes_of(rows.read(start, stop)).numpy().reshape(shape) for rows in (old, new)
        )
        parts.append((one != other).any(1))
    return np.concatenate(parts)


def _rows_of(whole: TensorRows, numbers: Int) -> TensorRows:
    """Return the rows with these ascending `numbers`. Blocks without such a row are not read."""

    def read(start: int, stop: int) -> Tensor:
        own = numbers[start:stop]
        ends = [*range(0, whole.rows, chunk_rows(whole.row_bytes)), whole.rows]
        parts = [torch.empty(0, *whole.shape[1:], dtype=whole.dtype)]
        for low, high in pairwise(ends):
            first, last = np.searchsorted(own, (low, high))
            if first < last:
                parts.append(whole.read(low, high)[torch.from_numpy(own[first:last] - low)])
        return torch.cat(parts)

    return TensorRows((numbers.size, *whole.shape[1:]), whole.dtype, read)
