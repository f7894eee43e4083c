"""safetensors files that are written and read a number of rows at a time.

The format (https://huggingface.co/docs/safetensors): eight bytes with the size of a JSON header,
the header with each tensor's type, shape and place, and the tensors' bytes. Shapes and types are
known beforehand, so that no tensor has to be in memory whole.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from placer.executor.initial import CHUNK_ROWS

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _TYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class TensorRows:
    """A tensor that is somewhere else, and read a number of rows at a time.

    Attributes
    ----------
    shape : tuple of int
    dtype : torch.dtype
    read : callable
        Rows ``start..stop`` on the host; with no dimension, the whole.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorRows":
        """Those of a tensor that is here."""

        def read(start: int, stop: int) -> Tensor:
            return (tensor[start:stop] if tensor.dim() else tensor).detach().cpu()

        return cls(tuple(tensor.shape), tensor.dtype, read)

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        return math.prod(self.shape) * self.dtype.itemsize

    def chunks(self) -> Iterator[Tensor]:
        """All rows, a bounded number at a time."""
        if not self.shape:
            yield self.read(0, 1)
            return
        for start in range(0, self.shape[0], CHUNK_ROWS):
            yield self.read(start, min(start + CHUNK_ROWS, self.shape[0]))

    def whole(self) -> Tensor:
        """The tensor."""
        return self.read(0, self.shape[0] if self.shape else 1)


AnyTensor = Tensor | TensorRows
"""A tensor that is in memory, or comes in rows."""


def in_rows(tensor: AnyTensor) -> TensorRows:
    """Either kind as rows."""
    return tensor if isinstance(tensor, TensorRows) else TensorRows.of(tensor)


@dataclass(frozen=True, slots=True)
class Written:
    """What a file has become."""

    size_bytes: int
    sha256: str


def write(path: Path | None, tensors: Mapping[str, AnyTensor]) -> Written:
    """Write tensors to a file; without a path, only ask for their rows.

    Rows may come from many processes, which all have to ask for them: so they are asked for even
    after the disk is full.

    Raises
    ------
    OSError
        If the file cannot be written, after all rows were asked for.
    """
    # As safetensors' own writer does: by falling size of the elements, which keeps all aligned.
    rows = sorted(
        ((name, in_rows(tensor)) for name, tensor in tensors.items()),
        key=lambda item: (-item[1].dtype.itemsize, item[0]),
    )
    sink = _Sink(path)
    try:
        sink.put(_header(dict(rows)))
        for _, tensor in rows:
            for chunk in tensor.chunks():
                if path is not None and chunk.numel():
                    # NumPy lacks bfloat16; bytes are bytes.
                    flat = chunk.to(tensor.dtype).contiguous().reshape(-1)
                    sink.put(flat.view(torch.uint8).numpy().data)
    finally:
        sink.close()
    if sink.failure is not None:
        raise sink.failure
    return Written(sink.size_bytes, sink.digest.hexdigest())


def read(path: Path) -> dict[str, TensorRows]:
    """The tensors of a file, which are read when they are asked for.

    Raises
    ------
    OSError, safetensors.SafetensorError
        If it cannot be read.
    """
    file: Any = safetensors.safe_open(path, framework="pt")
    return {name: _stored(file, name) for name in file.keys()}  # noqa: SIM118


def _stored(file: Any, name: str) -> TensorRows:
    part = file.get_slice(name)
    shape = tuple(part.get_shape())

    def read_rows(start: int, stop: int) -> Tensor:
        found: Tensor = part[start:stop] if shape else file.get_tensor(name)
        return found

    return TensorRows(shape, _DTYPES[part.get_dtype()], read_rows)


def _header(tensors: Mapping[str, TensorRows]) -> bytes:
    entries, start = {}, 0
    for name, tensor in tensors.items():
        stop = start + tensor.size_bytes
        entries[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _Sink:
    """A file, or none, that remembers what went wrong instead of raising it."""

    def __init__(self, path: Path | None) -> None:
        self.size_bytes = 0
        self.digest = hashlib.sha256()
        self.failure: OSError | None = None
        self._file = None
        if path is not None:
            try:
                self._file = path.open("wb")
            except OSError as error:
                self.failure = error

    def put(self, content: "bytes | memoryview") -> None:
        if self._file is None or self.failure is not None:
            return
        try:
            self._file.write(content)
        except OSError as error:
            self.failure = error
        self.digest.update(content)
        self.size_bytes += len(content)

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self.failure = self.failure or error
