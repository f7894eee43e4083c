"""Increments: the rows and keys that changed from one checkpoint to another."""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from placer.errors import CheckpointError
from placer.files import StrPath, replacing
from placer.plan.order import Int
from placer.plan.plan import Plan
from placer.storage.row_blocks import chunk_rows, row_blocks
from placer.storage.run_state import Checkpoint
from placer.storage.shards.writing import keys_of, origin_of, tensors_by_table
from placer.storage.tensor_rows import AnyTensor, TensorRows, bytes_of, write_safetensors


def write_increment(plan: Plan, before: Checkpoint, after: Checkpoint, path: StrPath) -> int:
    """Write what changed in the tables between two checkpoints to one safetensors file.

    ``<table>.rows`` are the numbers of the rows that changed, ascending, and ``<table>.weight``
    their values. Of a table that grows, ``<table>.keys`` are the keys of these rows (that of row 0
    means nothing), and ``<table>.deleted`` the keys that had a row before and have none after. Both
    checkpoints are read once, a bounded number of rows at a time, and the later one's changed rows
    once more. The file is there when it is complete. Returns how many rows changed, of all tables.

    Raises CheckpointError if a checkpoint lacks a table of the plan, has it otherwise, or was not
    read from files. Raises PlacerError if the file cannot be written; what was there before is
    there still.
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
    """Return whether each row has other bytes than before."""
    parts = [np.empty(0, bool)]
    for start, stop in row_blocks(new.rows, chunk_rows(new.row_bytes)):
        shape = stop - start, new.row_bytes
        one, other = (
            bytes_of(rows.read(start, stop)).numpy().reshape(shape) for rows in (old, new)
        )
        parts.append((one != other).any(1))
    return np.concatenate(parts)


def _rows_of(whole: TensorRows, numbers: Int) -> TensorRows:
    """Return rows of a tensor of these numbers, which ascend; blocks without one are not read."""

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
