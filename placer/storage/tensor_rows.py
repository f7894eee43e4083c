"""Tensors that are read and written a number of rows at a time, wherever they are."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from placer.errors import CheckpointError
from placer.files import FileRecord, HashedFile
from placer.storage.row_blocks import READ_ROWS, row_blocks
from placer.storage.safetensors_layout import lay_out

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True, eq=False)
class TensorRows:
    """A tensor that is somewhere else, and read a number of rows at a time."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # Rows ``start..stop`` on the host; with no dimension, the whole.
    read: Callable[[int, int], Tensor]

    @classmethod
    def of(cls, tensor: "AnyTensor") -> "TensorRows":
        """Return those of a tensor that is in memory, or in rows already.

        >>> TensorRows.of(torch.arange(4)).read(1, 3)
        tensor([1, 2])
        """
        if isinstance(tensor, TensorRows):
            return tensor
        held = tensor

        def read(start: int, stop: int) -> Tensor:
            return (held[start:stop] if held.dim() else held).detach().cpu()

        return cls(tuple(held.shape), held.dtype, read)

    @property
    def rows(self) -> int:
        """Number of rows; of a tensor without dimensions, 1."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def blocks(self, step: int) -> Iterator[tuple[int, Tensor]]:
        """Yield first row and values of each block of so many rows."""
        for start, stop in row_blocks(self.rows, step):
            yield start, self.read(start, stop).to(self.dtype)

    def whole(self) -> Tensor:
        """Return the tensor."""
        return self.read(0, self.rows)


AnyTensor = Tensor | TensorRows
"""A tensor that is in memory, or comes in rows."""


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as a vector: NumPy lacks bfloat16, and bytes are bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def open_safetensors(path: Path) -> tuple[dict[str, TensorRows], dict[str, str]]:
    """Open a safetensors file: its tensors, of which rows are read when asked for; what it says."""
    types = {name: dtype for dtype, name in _NAMES.items()}
    try:
        file: Any = safe_open(path, "pt")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        tensors = {
            name: TensorRows(tuple(each.get_shape()), types[each.get_dtype()], partial(_read, each))
            for name, each in slices.items()
        }
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path} is cut short, or no file of tables: {error}") from error
    return tensors, file.metadata() or {}


def _read(tensor: Any, start: int, stop: int) -> Tensor:
    rows: Tensor = tensor[start:stop]
    return rows


def write_safetensors(
    path: Path, tensors: Mapping[str, AnyTensor], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write tensors to a safetensors file; none of them is in memory whole.

    Raises OSError if the file cannot be written.
    """
    rows = {name: TensorRows.of(tensor) for name, tensor in tensors.items()}
    header, stored = lay_out(
        ((name, _NAMES[each.dtype], each.shape) for name, each in rows.items()), metadata
    )
    file = HashedFile(path)
    try:
        file.write(header)
        for tensor in stored:
            for _, block in rows[tensor.name].blocks(READ_ROWS):
                if block.numel():
                    file.write(bytes_of(block).numpy().data)
    finally:
        file.close()
    return file.finish()
