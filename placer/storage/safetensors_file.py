"""safetensors files that are written and read a number of rows at a time.

The format (https://huggingface.co/docs/safetensors): eight bytes with the size of a JSON header,
the header with each tensor's type, shape and place, and the tensors' bytes. Shapes and types are
known beforehand, so that no tensor has to be in memory whole.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from placer.storage.checkpoint.sink import Sink, Written
from placer.storage.tensor_rows import AnyTensor as AnyTensor
from placer.storage.tensor_rows import TensorRows as TensorRows
from placer.storage.tensor_rows import in_rows as in_rows

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


def write(path: Path, tensors: Mapping[str, AnyTensor]) -> Written:
    """Write tensors to a file.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    # As safetensors' own writer does: by falling size of the elements, which keeps all aligned.
    rows = sorted(
        ((name, in_rows(tensor)) for name, tensor in tensors.items()),
        key=lambda item: (-item[1].dtype.itemsize, item[0]),
    )
    sink = Sink(path)
    try:
        sink.write(_header(dict(rows)))
        for _, tensor in rows:
            for chunk in tensor.chunks():
                if chunk.numel():
                    # NumPy lacks bfloat16; bytes are bytes.
                    flat = chunk.to(tensor.dtype).contiguous().reshape(-1)
                    sink.write(flat.view(torch.uint8).numpy().data)
    finally:
        sink.close()
    return sink.finish()


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
