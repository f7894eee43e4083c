"""Tensors that are read and written a number of rows at a time, wherever they are."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

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
        """Those of a tensor that is in memory, or in rows already.

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
        """First row and values of each block of so many rows."""
        for start, stop in row_blocks(self.rows, step):
            yield start, self.read(start, stop).to(self.dtype)

    def whole(self) -> Tensor:
        """The tensor."""
        return self.read(0, self.rows)


AnyTensor = Tensor | TensorRows
"""A tensor that is in memory, or comes in rows."""


def bytes_of(tensor: Tensor) -> Tensor:
    """A tensor's bytes as a vector: NumPy lacks bfloat16, and bytes are bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def write_safetensors(path: Path, tensors: Mapping[str, AnyTensor]) -> FileRecord:
    """Write tensors to a safetensors file; none of them is in memory whole.

    Raises OSError if the file cannot be written.
    """
    rows = {name: TensorRows.of(tensor) for name, tensor in tensors.items()}
    header, stored = lay_out((name, _NAMES[each.dtype], each.shape) for name, each in rows.items())
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
