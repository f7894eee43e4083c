"""Tensors of a `torch.distributed.checkpoint` folder, read a number of rows at a time."""

import io
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from placer.errors import CheckpointError
from placer.storage.checkpoint.dcp_metadata import NAME, read_metadata
from placer.storage.tensor_rows import TensorRows


@dataclass(frozen=True, slots=True)
class _Block:
    """A part of a tensor, and which bytes of which file it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


def read_tensors(folder: Path) -> dict[str, TensorRows]:
    """The tensors of a folder by their names, whose rows are read on demand.

    Rows are read block by block as they were saved, and the last block is kept: read a tensor's
    rows in order. Entries that are no tensors are left out.

    Raises
    ------
    CheckpointError
        If the metadata is missing, damaged or not what it should be; later, from reading rows,
        if a file is missing, damaged or truncated, or a part of the tensor was not saved.
    """
    metadata = read_metadata(folder)
    files = _Files(folder)
    try:
        return {
            name: _tensor_rows(files, name, entry, metadata.storage_data)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / NAME} is damaged: {error!r}") from error


def _tensor_rows(
    files: "_Files", name: str, entry: TensorStorageMetadata, places: Any
) -> TensorRows:
    shape, dtype = tuple(map(int, entry.size)), entry.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} has dtype {dtype!r}")
    blocks = []
    for chunk in entry.chunks:
        offsets, sizes = tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes))
        fits = len(offsets) == len(sizes) == len(shape) and all(
            offset >= 0 and size >= 0 and offset + size <= limit
            for offset, size, limit in zip(offsets, sizes, shape, strict=True)
        )
        place = places[MetadataIndex(name, offsets)]
        # A name with folders in it could lead anywhere.
        if not fits or Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"{name} has a part at {offsets} of {sizes} in {place.relative_path}")
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                f"{name} was saved through {place.transform_descriptors}, which only "
                "torch.distributed.checkpoint reads; load and save it there without"
            )
        blocks.append(_Block(offsets, sizes, place.relative_path, place.offset, place.length))
    blocks.sort(key=lambda block: block.offsets)
    return TensorRows(shape, dtype, _Rows(files, name, shape, dtype, blocks))


class _Rows:
    """Reads rows of one tensor."""

    def __init__(
        self,
        files: "_Files",
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        blocks: Sequence[_Block],
    ) -> None:
        self._files, self._name, self._shape, self._dtype = files, name, shape, dtype
        self._blocks = blocks
        self._starts = [block.offsets[0] if shape else 0 for block in blocks]
        self._tallest = max((block.sizes[0] for block in blocks), default=0) if shape else 1

    def __call__(self, start: int, stop: int) -> Tensor:
        if not self._shape:
            start, stop = 0, 1
        shape = (stop - start, *self._shape[1:])
        result = torch.empty(shape, dtype=self._dtype)
        filled = 0
        first = bisect_left(self._starts, start - self._tallest + 1)
        for block in self._blocks[first : bisect_left(self._starts, stop)]:
            top = block.offsets[0] if self._shape else 0
            height = block.sizes[0] if self._shape else 1
            low, high = max(start, top), min(stop, top + height)
            if low >= high or not math.prod(block.sizes):
                continue
            rest = zip(block.offsets[1:], block.sizes[1:], strict=True)
            there = (slice(low - start, high - start), *(slice(o, o + n) for o, n in rest))
            values = self._files.block(block, self._name, self._dtype)
            part = (values if self._shape else values.view(1))[low - top : high - top]
            result[there] = part
            filled += part.numel()
        if filled != result.numel():
            raise CheckpointError(
                f"{self._files.folder} lacks a part of rows {start}..{stop} of {self._name}; "
                "use another checkpoint"
            )
        return result if self._shape else result.view(())


class _Files:
    """The files of a folder, of which the block that was read last is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._last: tuple[_Block, Tensor] | None = None

    def block(self, block: _Block, name: str, dtype: torch.dtype) -> Tensor:
        if self._last is not None and self._last[0] == block:
            return self._last[1]
        self._last = None
        path = self.folder / block.file
        try:
            with path.open("rb") as file:
                file.seek(block.start)
                content = file.read(block.length)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        if len(content) != block.length:
            raise CheckpointError(f"{path} is cut short: it lacks a part of {name}")
        try:
            # Weights only: nothing in it is run.
            values = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"{path} was altered: {name} cannot be read: {reason}") from error
        if (
            not isinstance(values, Tensor)
            or tuple(values.shape) != block.sizes
            or values.dtype != dtype
        ):
            raise CheckpointError(f"{path} was altered: it has no such part of {name}")
        self._last = block, values.detach()
        return self._last[1]
