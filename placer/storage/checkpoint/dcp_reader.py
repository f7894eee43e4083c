"""Tensors of a `torch.distributed.checkpoint` folder, read a number of rows at a time."""

import io
import math
import os
from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from placer.errors import CheckpointError
from placer.read_files import open_file
from placer.storage.checkpoint.dcp_metadata import NAME, Block, StoredTensor, read_metadata
from placer.storage.tensor_rows import TensorRows
from placer.torch_files import ELEMENT_BYTES, TensorFileError
from placer.torch_files import read_tensors as read_file


def read_tensors(folder: Path, known_files: Collection[str] | None = None) -> dict[str, TensorRows]:
    """Return the tensors of a folder by their names, whose rows are read on demand.

    Rows are read block by block as they were saved, and the last block is kept: read a tensor's
    rows in order. Entries that are no tensors are left out. Files other than `known_files`, those
    that a manifest lists, are refused. Raises CheckpointError if the metadata is not what it should
    be; later, from reading rows, if a file is, or a part of the tensor was not saved, or saved
    twice.
    """
    tensors = read_metadata(folder)
    _check_places(folder, tensors, known_files)
    files = _Files(folder)
    stored: dict[str, TensorRows] = {}
    for tensor in tensors:
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        stored[tensor.name] = TensorRows(tensor.shape, dtype, _Rows(files, tensor, dtype))
    return stored


def _check_places(
    folder: Path, tensors: Sequence[StoredTensor], known_files: Collection[str] | None
) -> None:
    """Check that each block has bytes of its own, and enough of them, in a file of the folder.

    So no metadata makes a reader take more memory than the files have bytes.
    """
    places = sorted(
        (block.file, block.start, block.length, tensor.name)
        for tensor in tensors
        for block in tensor.blocks
    )
    for (file, start, length, name), (next_file, next_start, _, next_name) in pairwise(places):
        if file == next_file and start + length > next_start:
            raise CheckpointError(
                f"{folder / NAME} is damaged: the same bytes of {file} are a part of {name} and "
                f"of {next_name}"
            )
    for tensor in tensors:
        element_bytes = ELEMENT_BYTES.get(tensor.dtype)
        if element_bytes is None:
            raise CheckpointError(
                f"{folder / NAME}: {tensor.name} has dtype {tensor.dtype}, which is not read here; "
                f"those read are {', '.join(ELEMENT_BYTES)}"
            )
        for block in tensor.blocks:
            if known_files is not None and block.file not in known_files:
                raise CheckpointError(
                    f"{folder / NAME} has a part of {tensor.name} in {block.file}, which the "
                    "manifest does not list; use another checkpoint"
                )
            if math.prod(block.sizes) * element_bytes > block.length:
                raise CheckpointError(
                    f"{folder / NAME} is damaged: a part of {tensor.name}, {block.sizes}, is in "
                    f"{block.length} bytes of {block.file}"
                )


class _Rows:
    """Reads rows of one tensor."""

    def __init__(self, files: "_Files", tensor: StoredTensor, dtype: torch.dtype) -> None:
        self._files, self._name, self._shape = files, tensor.name, tensor.shape
        self._dtype, self._blocks = dtype, tensor.blocks
        self._starts = [block.offsets[0] if block.offsets else 0 for block in tensor.blocks]
        self._tallest = (
            max((block.sizes[0] for block in tensor.blocks), default=0) if tensor.shape else 1
        )
        self._cells = sum(math.prod(block.sizes) for block in tensor.blocks)

    def __call__(self, start: int, stop: int) -> Tensor:
        if not self._shape:
            start, stop = 0, 1
        shape = (stop - start, *self._shape[1:])
        # Before memory is taken: a tensor has no more cells than its blocks have.
        if math.prod(shape) > self._cells:
            raise self._fault("lacks", start, stop)
        result = torch.empty(shape, dtype=self._dtype)
        # Which cells came from a block; where blocks are whole rows, the end of the last one.
        filled: Tensor | None = None
        end = start
        first = bisect_left(self._starts, start - self._tallest + 1)
        for block in self._blocks[first : bisect_left(self._starts, stop)]:
            top = block.offsets[0] if self._shape else 0
            height = block.sizes[0] if self._shape else 1
            low, high = max(start, top), min(stop, top + height)
            if low >= high or not math.prod(block.sizes):
                continue
            rest = zip(block.offsets[1:], block.sizes[1:], strict=True)
            there = (slice(low - start, high - start), *(slice(o, o + n) for o, n in rest))
            if filled is None and low == end and block.sizes[1:] == self._shape[1:]:
                end = high
            else:
                if filled is None:
                    filled = torch.zeros(shape, dtype=torch.bool)
                    filled[: end - start] = True
                if bool(filled[there].any()):
                    raise self._fault("has", low, high, " twice")
                filled[there] = True
            values = self._files.block(block, self._name, self._dtype)
            result[there] = (values if self._shape else values.view(1))[low - top : high - top]
        complete = end == stop if filled is None else bool(filled.all())
        if result.numel() and not complete:
            raise self._fault("lacks", start, stop)
        return result if self._shape else result.view(())

    def _fault(self, verb: str, start: int, stop: int, how: str = "") -> CheckpointError:
        part = f"a part of rows {start}..{stop} of {self._name}{how}"
        return CheckpointError(f"{self._files.folder} {verb} {part}; use another checkpoint")


class _Files:
    """The files of a folder, of which the block that was read last is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: tuple[Block, Tensor] | None = None

    def block(self, block: Block, name: str, dtype: torch.dtype) -> Tensor:
        if self._last is not None and self._last[0] == block:
            return self._last[1]
        self._last = None
        path = self.folder / block.file
        try:
            with open_file(path) as file:
                # A read of more bytes than there are takes memory for all of them.
                if block.start + block.length > os.fstat(file.fileno()).st_size:
                    raise CheckpointError(f"{path} is cut short: it lacks a part of {name}")
                file.seek(block.start)
                content = file.read(block.length)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        if len(content) != block.length:
            raise CheckpointError(f"{path} is cut short: it lacks a part of {name}")
        try:
            values = read_file(io.BytesIO(content))
        except TensorFileError as error:
            raise CheckpointError(f"{path} was altered: {name} cannot be read: {error}") from error
        if (
            not isinstance(values, Tensor)
            or tuple(values.shape) != block.sizes
            or values.dtype != dtype
        ):
            raise CheckpointError(f"{path} was altered: it has no such part of {name}")
        self._last = block, values
        return self._last[1]
