"""Read and write tensors a number of rows at a time, from memory or files."""

import json
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
from placer.files.atomic import HashedFile
from placer.files.reading import open_file

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types in safetensors."""

CHUNK_BYTES = 32 << 20
"""Most bytes of rows in memory at a time while one process copies them."""
BLOCK_BYTES = 16 << 20
"""Most bytes of a tensor that a process writes to a checkpoint at a time."""
MOST_ROWS = 1 << 17  # For short rows, ids and ranks take the memory.
READ_ROWS = 1 << 16
"""Number of rows that readers of checkpoints request at a time."""


def chunk_rows(row_bytes: int) -> int:
    """Return the number of rows in a chunk, for rows of `row_bytes` bytes."""
    return max(1, min(MOST_ROWS, CHUNK_BYTES // max(row_bytes, 1)))


def block_rows(row_bytes: int) -> int:
    """Return the rows of a checkpoint's block: a power of two, so reads take whole blocks.

    >>> block_rows(512), block_rows(1 << 30)
    (32768, 1)
    """
    most = min(READ_ROWS, BLOCK_BYTES // max(row_bytes, 1))
    return 1 << max(most.bit_length() - 1, 0)


def row_blocks(rows: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the first row and the end of each block of `step` rows.

    >>> list(row_blocks(10, 4))
    [(0, 4), (4, 8), (8, 10)]
    """
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


@dataclass(frozen=True, slots=True, eq=False)
class TensorRows:
    """A tensor that is read a number of rows at a time, from memory or from a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    # Returns rows ``start..stop`` on the host; a tensor without dimensions whole.
    read: Callable[[int, int], Tensor]

    @classmethod
    def of(cls, tensor: "AnyTensor") -> "TensorRows":
        """Return the rows of a tensor in memory, or of one that is read in rows already.

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
        """Number of rows; 1 for a tensor without dimensions."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def blocks(self, step: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the first row and the values of each block of `step` rows."""
        for start, stop in row_blocks(self.rows, step):
            yield start, self.read(start, stop).to(self.dtype)

    def whole(self) -> Tensor:
        """Return the whole tensor in memory."""
        return self.read(0, self.rows)


AnyTensor = Tensor | TensorRows
"""A tensor in memory, or one that is read in rows."""


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as a uint8 vector, because NumPy lacks bfloat16."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def open_safetensors(path: Path) -> tuple[dict[str, TensorRows], dict[str, str]]:
    """Return a safetensors file's tensors, whose rows are read on demand, and its metadata."""
    types = {name: dtype for dtype, name in NAMES.items()}
    try:
        open_file(path).close()
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
) -> None:
    """Write tensors to a safetensors file, a number of rows at a time.

    Raises OSError if the file cannot be written.
    """
    rows = {name: TensorRows.of(tensor) for name, tensor in tensors.items()}
    # Like safetensors' own writer, sort by falling element size, which aligns all tensors.
    names = sorted(rows, key=lambda name: (-rows[name].dtype.itemsize, name))
    rows = {name: rows[name] for name in names}
    file = HashedFile(path)
    try:
        file.write(_header(rows, metadata or {}))
        for tensor in rows.values():
            for _, block in tensor.blocks(READ_ROWS):
                if block.numel():
                    file.write(bytes_of(block).numpy().data)
    finally:
        file.close()
    file.finish()


def _header(tensors: Mapping[str, TensorRows], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a safetensors file: the size of a JSON header, and the header.

    See https://huggingface.co/docs/safetensors.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
