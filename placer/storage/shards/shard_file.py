"""The file of one shard: a safetensors file whose layout the plan alone decides.

The format (https://huggingface.co/docs/safetensors): eight bytes with the size of a JSON header,
the header with each tensor's type, shape and place, and the tensors' bytes. Table and shard say
which tensors there are and of what shape; so a file's first bytes are known beforehand, a row's
place is arithmetic, and rows are read and written as bytes, whatever their type.
"""

import errno
import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from placer.errors import CheckpointError
from placer.plan.order import Int
from placer.plan.shard import Shard
from placer.tables import OptimizerName, Table

Bytes = npt.NDArray[np.uint8]

STATE: dict[OptimizerName, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("sum",),
    "rowwise_adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}
"""As `placer.executor.optimizers.rule.STATE`, which cannot be had without torch."""

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_HASHED_BYTES = 1 << 20
_NEAR_BYTES = 16 << 10  # What a call costs, about, in bytes that could have been read.
_WINDOW_BYTES = 8 << 20
CHUNK_BYTES = 32 << 20
MOST_ROWS = 1 << 17  # Of short rows, their ids and ranks are what takes memory.


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """One tensor of a shard's file.

    Attributes
    ----------
    name : str
        ``weight``, or a name of the optimizer's state.
    dtype : str
        As safetensors call it: ``F32``, ``F16``, ``BF16``.
    element_bytes : int
    shape : tuple of int
        (rows, columns), or (rows,) for state that is one number a row.
    offset : int
        Where its bytes begin in the file.
    """

    name: str
    dtype: str
    element_bytes: int
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.element_bytes * (self.shape[1] if len(self.shape) > 1 else 1)

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return self.shape[0] * self.row_bytes

    @property
    def is_per_row(self) -> bool:
        """Whether it is one number a row, which every strip of a row has a copy of."""
        return len(self.shape) == 1

    def columns(self, start: int, stop: int) -> slice:
        """Bytes of a row that hold some of the shard's columns."""
        if self.is_per_row:
            return slice(0, self.row_bytes)
        return slice(start * self.element_bytes, stop * self.element_bytes)


@dataclass(frozen=True)
class ShardForm:
    """What a shard's file holds, and where.

    Attributes
    ----------
    table : Table
    shard : Shard
    """

    table: Table
    shard: Shard

    @cached_property
    def tensors(self) -> dict[str, ShardTensor]:
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

    @property
    def row_bytes(self) -> int:
        """Weights and optimizer state of one row of the shard."""
        return self.table.bytes_per_row(self.shard.width)

    @cached_property
    def _laid_out(self) -> tuple[bytes, tuple[ShardTensor, ...]]:
        rows, width, table = self.shard.row_count, self.shard.width, self.table
        state_shape = (rows,) if table.optimizer == "rowwise_adagrad" else (rows, width)
        tensors = [ShardTensor("weight", _DTYPES[table.dtype], table.element_bytes, (rows, width))]
        tensors += [ShardTensor(name, "F32", 4, state_shape) for name in STATE[table.optimizer]]
        # As safetensors' own writer does: by falling size of the elements, which aligns all.
        tensors.sort(key=lambda tensor: (-tensor.element_bytes, tensor.name))
        entries, start, offsets = {}, 0, []
        for tensor in tensors:
            offsets.append(start)
            stop = start + tensor.size_bytes
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [start, stop],
            }
            start = stop
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        placed = (
            ShardTensor(t.name, t.dtype, t.element_bytes, t.shape, len(header) + offset)
            for t, offset in zip(tensors, offsets, strict=True)
        )
        return header, tuple(placed)


def chunk_rows(row_bytes: int) -> int:
    """Rows that are handled at a time, where one takes so many bytes: bounds the memory."""
    return max(1, min(MOST_ROWS, CHUNK_BYTES // max(row_bytes, 1)))


class ShardWriter:
    """Writes a shard's file, rows in any order; within ``with``, after which it is on disk.

    Parameters
    ----------
    path : Path
        Must not exist.
    form : ShardForm
    """

    def __init__(self, path: Path, form: ShardForm) -> None:
        self._file = path.open("xb", buffering=0)
        try:
            self._put(form.header, 0)
            os.ftruncate(self._file.fileno(), form.size_bytes)
        except OSError:
            self._file.close()
            raise

    def write(self, tensor: ShardTensor, positions: Int, rows: Bytes) -> None:
        """Overwrite rows of a tensor.

        Parameters
        ----------
        positions : int64, shape (n,)
            Rows of the shard, in any order.
        rows : uint8, shape (n, row_bytes)
        """
        if not positions.size:
            return
        content = np.ascontiguousarray(rows)
        # Neighbours go in one call: of rows that no row order lists, all of them.
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        edges = [0, *breaks.tolist(), positions.size]
        for first, last in pairwise(edges):
            at = tensor.offset + int(positions[first]) * tensor.row_bytes
            self._put(content[first:last].data, at)

    def _put(self, content: "bytes | memoryview", at: int) -> None:
        left = memoryview(content).cast("B")
        while left:  # Near a full disk, a part is written first.
            done = os.pwrite(self._file.fileno(), left, at)
            left, at = left[done:], at + done

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def read_rows(path: Path, tensor: ShardTensor, positions: Int) -> Bytes:
    """Rows of a tensor of a shard's file, in any order: uint8, shape (n, row_bytes).

    Rows that are near one another are read at once, with what is between them.

    Raises
    ------
    CheckpointError
        If the file cannot be read.
    """
    found = np.empty((positions.size, tensor.row_bytes), dtype=np.uint8)
    if not positions.size:
        return found
    order = np.argsort(positions, kind="stable")
    ascending = positions[order]
    starts = ascending * tensor.row_bytes
    apart = np.diff(starts) > _NEAR_BYTES
    apart |= np.diff(starts // _WINDOW_BYTES) != 0
    edges = [0, *(np.flatnonzero(apart) + 1).tolist(), positions.size]
    try:
        with path.open("rb", buffering=0) as file:
            for first, last in pairwise(edges):
                low = int(ascending[first])
                count = int(ascending[last - 1]) + 1 - low
                at = tensor.offset + low * tensor.row_bytes
                window = _read(file.fileno(), count * tensor.row_bytes, at)
                rows = window.reshape(count, tensor.row_bytes)
                found[order[first:last]] = rows[ascending[first:last] - low]
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    return found


def _read(descriptor: int, size_bytes: int, at: int) -> Bytes:
    window = np.empty(size_bytes, dtype=np.uint8)
    done = 0
    while done < size_bytes:
        count = os.preadv(descriptor, [window[done:].data], at + done)
        if not count:
            raise OSError(errno.EIO, "it is cut short")
        done += count
    return window


def check_file(path: Path, form: ShardForm, sha256: str | None) -> None:
    """Check that a file is the shard's and, where a hash is given, every byte of it.

    Raises
    ------
    CheckpointError
        If it is missing, cut short, of another shard, or altered.
    """
    fix = "write the shards again from a checkpoint (`placer export --to shards`)"
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != form.size_bytes:
                raise CheckpointError(
                    f"{path} is cut short or altered: it has {size_bytes} bytes and should have "
                    f"{form.size_bytes}; {fix}"
                )
            header = file.read(len(form.header))
            digest = hashlib.sha256(header)
            while sha256 is not None and (part := file.read(_HASHED_BYTES)):
                digest.update(part)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}; {fix}") from error
    if header != form.header:
        raise CheckpointError(f"{path} was altered: it does not begin as its shard's does; {fix}")
    if sha256 is not None and digest.hexdigest() != sha256:
        raise CheckpointError(
            f"{path} was altered: its SHA-256 is not the one that shards.json lists; {fix}"
        )
