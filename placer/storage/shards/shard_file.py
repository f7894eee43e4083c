"""The file of one shard: a safetensors file whose layout the plan alone decides.

Table and shard say which tensors there are and of what shape; so a file's first bytes are known
beforehand, and so is each row's place.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from placer.errors import CheckpointError
from placer.plan.order import Int
from placer.plan.shard import Shard
from placer.storage.manifest import check_sha256, check_size
from placer.storage.safetensors_layout import StoredTensor, lay_out
from placer.tables import OPTIMIZER_STATE, Table

Bytes = npt.NDArray[np.uint8]

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class ShardLayout:
    """What a shard's file holds, and where."""

    table: Table
    shard: Shard

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """By name, in the order of the file."""
        return {tensor.name: tensor for tensor in self._laid_out[1]}

    @property
    def header(self) -> bytes:
        """The file's first bytes."""
        return self._laid_out[0]

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(tensor.size_bytes for tensor in self.tensors.values())

    @cached_property
    def _laid_out(self) -> tuple[bytes, tuple[StoredTensor, ...]]:
        rows, width, table = self.shard.row_count, self.shard.width, self.table
        state_shape = (rows,) if table.optimizer == "rowwise_adagrad" else (rows, width)
        weight = ("weight", _DTYPES[table.dtype], (rows, width))
        state = [(name, "F32", state_shape) for name in OPTIMIZER_STATE[table.optimizer]]
        return lay_out([weight, *state])


@contextlib.contextmanager
def shard_writer(path: Path, layout: ShardLayout) -> Iterator["ShardWriter"]:
    """Make a shard's file, which must not exist; afterwards it is on disk."""
    with path.open("xb", buffering=0) as file:
        writer = ShardWriter(file.fileno())
        writer.write_at(layout.header, 0)
        os.ftruncate(file.fileno(), layout.size_bytes)
        yield writer
        os.fsync(file.fileno())


class ShardWriter:
    """Writes rows of a shard's file in any order; see `shard_writer`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, tensor: StoredTensor, positions: Int, rows: Bytes) -> None:
        """Overwrite rows of a tensor: `rows` as uint8, shape (n, row_bytes), at any `positions`."""
        if not positions.size:
            return
        content = np.ascontiguousarray(rows)
        # Neighbours go in one call: of rows that no row order lists, all of them.
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        edges = [0, *breaks.tolist(), positions.size]
        for first, last in pairwise(edges):
            at = tensor.offset + int(positions[first]) * tensor.row_bytes
            self.write_at(content[first:last].data, at)

    def write_at(self, content: "bytes | memoryview", at: int) -> None:
        """Write bytes at a place of the file."""
        left = memoryview(content).cast("B")
        while left:  # Near a full disk, a part is written first.
            done = os.pwrite(self._descriptor, left, at)
            left, at = left[done:], at + done


def read_rows(path: Path, tensor: StoredTensor, positions: Int) -> Bytes:
    """Return rows of a tensor of a shard's file, in any order: uint8, shape (n, row_bytes)."""
    if not positions.size:
        return np.empty((0, tensor.row_bytes), dtype=np.uint8)
    shape = tensor.shape[0], tensor.row_bytes
    try:
        rows = np.memmap(path, np.uint8, "r", tensor.offset, shape)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    return np.asarray(rows[positions])


def check_file(path: Path, layout: ShardLayout, sha256: str | None) -> None:
    """Check that a file is the shard's and, where there is a hash, every byte of it."""
    fix = "write the shards again from a checkpoint (`placer export --to shards`)"
    check_size(path, layout.size_bytes, fix)
    try:
        with path.open("rb") as file:
            first_bytes = file.read(len(layout.header))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}; {fix}") from error
    if first_bytes != layout.header:
        raise CheckpointError(f"{path} was altered: it does not begin as its shard's does; {fix}")
    if sha256 is not None:
        check_sha256(path, sha256, "shards.json", fix)
