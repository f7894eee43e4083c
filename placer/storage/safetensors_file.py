"""safetensors files that are written a number of rows at a time: no tensor is in memory whole."""

from collections.abc import Mapping
from pathlib import Path

import torch

from placer.files import FileRecord, HashedFile
from placer.storage.row_blocks import READ_ROWS
from placer.storage.safetensors_layout import lay_out
from placer.storage.tensor_rows import AnyTensor, TensorRows, bytes_of

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


def write(path: Path, tensors: Mapping[str, AnyTensor]) -> FileRecord:
    """Write tensors to a file.

    Raises
    ------
    OSError
        If the file cannot be written.
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
