"""Read tensors of a `torch.distributed.checkpoint` folder, a number of rows at a time.

The folder is not trusted. Its ``.metadata`` is a pickle. `placer.files.torch_files` reads it as
plain values, and this checks that they have the form of such metadata. No class that the pickle
names is looked up, and none of its code is run.
"""

import io
import math
import os
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from placer.errors import CheckpointError
from placer.files.atomic import is_name
from placer.files.reading import open_file
from placer.files.torch_files import (
    ELEMENT_BYTES,
    MOST_BYTES,
    Global,
    Made,
    Pairs,
    TensorFileError,
    are_counts,
    read_pickle,
)
from placer.files.torch_files import read_tensors as read_file
from placer.storage.tensor_rows import TensorRows

NAME = ".metadata"
MOST_BLOCKS = 1 << 20
"""Most blocks of all tensors together. With 16 MiB each, that is 16 TiB."""

_DCP = "torch.distributed.checkpoint"
_METADATA = (
    "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
    "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING"
)
_PATHS = {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
_ADMITTED = {
    "torch": {"Size", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128", *ELEMENT_BYTES},
    "torch.serialization": {"_get_layout"},
    f"{_DCP}.filesystem": {"_StorageInfo"},
    f"{_DCP}.metadata": set(_METADATA.split()),
    "builtins": {"getattr"},  # Python 3.11.0 to 3.11.3 pickle members of an Enum by their names.
    # The path that the checkpoint was written to.
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}
"""All names that such a pickle may have. They only identify values; none is looked up."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a tensor, and the place of its bytes in a file."""

    # First index and length in each dimension of the tensor.
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str  # Name of a file beside the metadata.
    # First byte and number of bytes in the file.
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    name: str
    dtype: str  # Name in `torch`, such as ``float32``.
    shape: tuple[int, ...]
    # By rising offsets. Reading finds out whether they cover the tensor.
    blocks: tuple[Block, ...]


def read_tensors(folder: Path, known_files: Collection[str] | None = None) -> dict[str, TensorRows]:
    """Return the tensors of a folder by name. Their rows are read on demand.

    Rows are read in blocks as they were saved. Only the last block is cached, so read a tensor's
    rows in order. Entries that are no tensors are left out. `known_files` are the files that a
    manifest lists; others are refused. Raises CheckpointError if the metadata is damaged. Reading
    rows raises it if a file is damaged, or a part of the tensor was saved twice or not at all.
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
    """Check that each block has its own bytes, and enough of them, in a file of the folder.

    So damaged metadata cannot make a reader use more memory than the files' size.
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
    def __init__(self, files: "_Files", tensor: StoredTensor, dtype: torch.dtype) -> None:
        self._files, self._name, self._shape = files, tensor.name, tensor.shape
        self._dtype, self._blocks = dtype, tensor.blocks
        self._starts = [block.offsets[0] if block.offsets else 0 for block in tensor.blocks]
        heights = (block.sizes[0] if tensor.shape else 1 for block in tensor.blocks)
        self._tallest = max(heights, default=0)
        self._cells = sum(math.prod(block.sizes) for block in tensor.blocks)

    def __call__(self, start: int, stop: int) -> Tensor:
        if not self._shape:
            start, stop = 0, 1
        shape = (stop - start, *self._shape[1:])
        # Check before allocating memory: blocks must have at least as many cells.
        if math.prod(shape) > self._cells:
            raise self._fault("lacks", start, stop)
        result = torch.empty(shape, dtype=self._dtype)
        # `filled` marks cells read so far. While blocks are whole rows in order, `end` does.
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
    """Reads blocks from the files of a folder, and caches the last block."""

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
                # Reading more bytes than the file has would allocate memory for all of them.
                is_whole = block.start + block.length <= os.fstat(file.fileno()).st_size
                file.seek(block.start if is_whole else 0)
                content = file.read(block.length) if is_whole else b""
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        if len(content) != block.length:
            raise CheckpointError(f"{path} is cut short: it lacks a part of {name}")
        try:
            values = read_file(io.BytesIO(content))
        except TensorFileError as error:
            raise CheckpointError(f"{path} was altered: {name} cannot be read: {error}") from error
        is_part = isinstance(values, Tensor) and tuple(values.shape) == block.sizes
        if not is_part or values.dtype != dtype:
            raise CheckpointError(f"{path} was altered: it has no such part of {name}")
        self._last = block, values
        return self._last[1]


def read_metadata(folder: Path) -> tuple[StoredTensor, ...]:
    """Return the tensors that a folder's metadata lists, without entries that are no tensors."""
    path = folder / NAME
    try:
        with open_file(path) as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        value = read_pickle(content, lambda name: name.name in _ADMITTED.get(name.module, ()))
    except TensorFileError as error:
        raise CheckpointError(
            f"{path} is damaged, or no metadata of torch.distributed.checkpoint: {error}; "
            "nothing of it was run"
        ) from error
    if not isinstance(value, Made) or value.of != Global(f"{_DCP}.metadata", "Metadata"):
        raise CheckpointError(f"{path} is no metadata of torch.distributed.checkpoint")
    try:
        return tuple(_tensors(value))
    except _Wrong as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


class _Wrong(ValueError):
    """Raised for a value that such metadata cannot have."""


_Places = dict[tuple[str, tuple[int, ...] | None], Any]


def _tensors(metadata: Made) -> Iterator[StoredTensor]:
    wanted = "storage_data", "state_dict_metadata"
    parts, entries = _fields(metadata, "metadata", "Metadata", *wanted)
    places = _places(parts)
    used = 0
    seen: set[str] = set()
    for name, entry in _pairs(entries):
        if not isinstance(name, str) or name in seen:
            raise _Wrong(f"it names a tensor twice, or not by a text: {_shown(name)}")
        seen.add(name)
        if isinstance(entry, Made) and entry.of.name == "BytesStorageMetadata":
            continue
        size, chunks, properties = _fields(
            entry, "metadata", "TensorStorageMetadata", "size", "chunks", "properties"
        )
        shape = _size(size)
        used += len(chunks) if isinstance(chunks, list) else 0
        if not isinstance(chunks, list) or used > MOST_BLOCKS:
            raise _Wrong(f"{_shown(name)} is in too many parts: at most {MOST_BLOCKS} are read")
        blocks = [_block(name, shape, chunk, places) for chunk in chunks]
        blocks.sort(key=lambda block: block.offsets)
        yield StoredTensor(name, _dtype(name, properties), shape, tuple(blocks))


def _block(name: str, shape: tuple[int, ...], chunk: Any, places: _Places) -> Block:
    of_chunk = _fields(chunk, "metadata", "ChunkStorageMetadata", "offsets", "sizes")
    offsets, sizes = map(_size, of_chunk)
    if (name, offsets) not in places:
        raise _Wrong(f"it does not say where the part of {_shown(name)} at {offsets} is")
    place = places[name, offsets]
    file, start, length = (place.get(key) for key in ("relative_path", "offset", "length"))
    fits = len(offsets) == len(sizes) == len(shape) and all(
        offset + size <= limit for offset, size, limit in zip(offsets, sizes, shape, strict=True)
    )
    # A name with folders could lead out of the folder.
    if not fits or not isinstance(file, str) or not is_name(file):
        raise _Wrong(f"{_shown(name)} has a part at {offsets} of {sizes} in {_shown(file)}")
    if not are_counts((start, length)):
        raise _Wrong(
            f"{_shown(name)} has a part of {_shown(length)} bytes from byte {_shown(start)} on"
        )
    transforms = place.get("transform_descriptors")
    if transforms is not None and transforms != []:
        raise CheckpointError(
            f"{name} was saved through {_shown(transforms)}, which only "
            "torch.distributed.checkpoint reads; load and save it there without"
        )
    return Block(offsets, sizes, file, start, length)


def _places(value: Any) -> _Places:
    """Return the place of each part, by its tensor's name and its offsets in the tensor."""
    places: _Places = {}
    pairs = _pairs(value)
    if len(pairs) > MOST_BLOCKS:
        raise _Wrong(f"it has more than {MOST_BLOCKS} parts")
    for index, place in pairs:
        of = _attributes(index, "metadata", "MetadataIndex")
        name, offsets = of.get("fqn", ""), of.get("offset")
        key = name, None if offsets is None else _size(offsets)
        if not isinstance(name, str) or key in places:
            raise _Wrong(f"it says twice, or not by a text, where a part of {_shown(name)} is")
        places[key] = _attributes(place, "filesystem", "_StorageInfo")
    return places


def _dtype(name: str, properties: Any) -> str:
    """Return the dtype, which is the first field of a pickled `TensorProperties`."""
    made = _made(properties, "metadata", "TensorProperties")
    first = made.state[0] if isinstance(made.state, tuple) and made.state else None
    if not isinstance(first, Global) or first.module != "torch" or first.name == "Size":
        raise _Wrong(f"{_shown(name)} has dtype {_shown(first)}")
    return first.name


def _size(value: Any) -> tuple[int, ...]:
    """Return a pickled `torch.Size` as a tuple of numbers from 0 up that fit in 64 bits."""
    if isinstance(value, Made) and value.of == Global("torch", "Size") and value.state is None:
        numbers: Any = value.arguments[0] if len(value.arguments) == 1 else None
        if are_counts(numbers):  # Older Python versions wrote a list.
            return tuple(numbers)
    raise _Wrong(f"it has a shape that is none: {_shown(value)}")


def _made(value: Any, module: str, name: str) -> Made:
    if not isinstance(value, Made) or value.of != Global(f"{_DCP}.{module}", name):
        raise _Wrong(f"it has {_shown(value)} where a {name} belongs")
    if value.arguments:
        raise _Wrong(f"it makes a {name} of {_shown(value.arguments)}")
    return value


def _attributes(value: Any, module: str, name: str) -> dict[str, Any]:
    """Return the attributes of a pickled instance of the class `name`."""
    state = _made(value, module, name).state
    fields: dict[str, Any] = {}
    for key, held in _pairs(state):
        if not isinstance(key, str) or key in fields:
            raise _Wrong(f"a {name} has an attribute twice, or one without a name: {_shown(key)}")
        fields[key] = held
    return fields


def _fields(value: Any, module: str, kind: str, *names: str) -> list[Any]:
    """Return the named attributes of an instance, which must all be there."""
    fields = _attributes(value, module, kind)
    for name in names:
        if name not in fields:
            raise _Wrong(f"it lacks {name}")
    return [fields[name] for name in names]


def _pairs(value: Any) -> Sequence[tuple[Any, Any]]:
    if not isinstance(value, Pairs):
        raise _Wrong(f"it has {_shown(value)} where a dictionary belongs")
    return value.items


def _shown(value: Any) -> str:
    """Return a value for a message: print plain values, only name the type of others."""
    if isinstance(value, str):
        return repr(value[:100])
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "a huge number"
    if isinstance(value, int | float | Global | None):
        return str(value)[:200]
    if isinstance(value, Made):
        return f"a {value.of}"
    return f"a {type(value).__name__}"
