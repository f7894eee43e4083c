"""Where the tensors of a safetensors file are: known from their shapes, before any is there.

The format (https://huggingface.co/docs/safetensors): eight bytes with the size of a JSON header,
the header with each tensor's type, shape and place, and the tensors' bytes. So a row's place is
arithmetic, and rows are read and written as bytes, whatever their type.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
"""Bytes of an element of each type, as safetensors calls it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file."""

    name: str
    dtype: str  # A key of `ELEMENT_BYTES`.
    shape: tuple[int, ...]
    offset: int = 0  # Where its bytes begin in the file.

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.element_bytes * math.prod(self.shape[1:])

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return self.element_bytes * math.prod(self.shape)

    @property
    def is_per_row(self) -> bool:
        """Whether it is one number a row, of which every column slice has a copy."""
        return len(self.shape) == 1

    def columns(self, start: int, stop: int) -> slice:
        """Return bytes of a row that hold some of its columns."""
        if self.is_per_row:
            return slice(0, self.row_bytes)
        return slice(start * self.element_bytes, stop * self.element_bytes)


def lay_out(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
) -> tuple[bytes, tuple[StoredTensor, ...]]:
    """Return a file's first bytes, and its tensors in their order there.

    Tensors are given as (name, dtype, shape); `metadata` is what the file says of itself.
    """
    # As safetensors' own writer does: by falling size of the elements, which aligns all.
    ordered = sorted(
        (StoredTensor(*tensor) for tensor in tensors),
        key=lambda tensor: (-tensor.element_bytes, tensor.name),
    )
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, end = [], 0
    for tensor in ordered:
        start, end = end, end + tensor.size_bytes
        starts.append(start)
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    placed = tuple(
        StoredTensor(tensor.name, tensor.dtype, tensor.shape, len(header) + start)
        for tensor, start in zip(ordered, starts, strict=True)
    )
    return header, placed
