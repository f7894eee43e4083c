"""The ``.metadata`` of a `torch.distributed.checkpoint` folder, read without trusting it.

The file is a pickle. It is read as values (`placer.torch_files`) and compared with the one
form that such metadata has: no class of a file is looked up, and nothing of it is run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placer.errors import CheckpointError
from placer.files import is_name
from placer.read_files import open_file
from placer.torch_files import (
    ELEMENT_BYTES,
    MOST_BYTES,
    MOST_DIMENSIONS,
    Global,
    Made,
    Pairs,
    PickleError,
    read_pickle,
)

NAME = ".metadata"
MOST_BLOCKS = 1 << 20
"""Most blocks of all tensors together: of 16 MiB each, 16 TiB."""

_DCP = "torch.distributed.checkpoint"
_PATHS = {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
_ADMITTED = {
    "torch": {"Size", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128", *ELEMENT_BYTES},
    "torch.serialization": {"_get_layout"},
    f"{_DCP}.filesystem": {"_StorageInfo"},
    f"{_DCP}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    # Where it was written to.
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}
"""All names that such a file has. None of them is looked up: they only say what a value is."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a tensor, and which bytes of which file it is."""

    # First index and length in each dimension of the tensor.
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str  # A file beside the metadata.
    # Its bytes there.
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    name: str
    dtype: str  # As an attribute of `torch`, such as ``float32``.
    shape: tuple[int, ...]
    # By rising offsets. They may not cover the tensor: that shows when it is read.
    blocks: tuple[Block, ...]


def read_metadata(folder: Path) -> tuple[StoredTensor, ...]:
    """Return the tensors that a folder says it has; entries that are no tensors are left out."""
    path = folder / NAME
    try:
        with open_file(path) as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        value = read_pickle(content, _admits)
    except PickleError as error:
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
    """A value that such metadata does not have."""


def _admits(name: Global) -> bool:
    return name.name in _ADMITTED.get(name.module, ())


def _tensors(metadata: Made) -> Iterator[StoredTensor]:
    parts, entries = _fields(
        metadata, "metadata", "Metadata", "storage_data", "state_dict_metadata"
    )
    places = _places(parts)
    used = 0
    seen: set[str] = set()
    for name, entry in _pairs(entries):
        if not isinstance(name, str) or name in seen:
            raise _Wrong(f"it names a tensor twice, or not by a text: {_shown(name)}")
        seen.add(name)
        if isinstance(entry, Made) and entry.of.name == "BytesStorageMetadata":
            continue
        wanted = "size", "chunks", "properties"
        size, chunks, properties = _fields(entry, "metadata", "TensorStorageMetadata", *wanted)
        shape = _size(size)
        used += len(chunks) if isinstance(chunks, list) else 0
        if not isinstance(chunks, list) or used > MOST_BLOCKS:
            raise _Wrong(f"{_shown(name)} is in too many parts: at most {MOST_BLOCKS} are read")
        blocks = [_block(name, shape, chunk, places) for chunk in chunks]
        blocks.sort(key=lambda block: block.offsets)
        yield StoredTensor(name, _dtype(name, properties), shape, tuple(blocks))


def _block(
    name: str,
    shape: tuple[int, ...],
    chunk: Any,
    places: dict[tuple[str, tuple[int, ...] | None], Any],
) -> Block:
    of_chunk = _fields(chunk, "metadata", "ChunkStorageMetadata", "offsets", "sizes")
    offsets, sizes = map(_size, of_chunk)
    if (name, offsets) not in places:
        raise _Wrong(f"it does not say where the part of {_shown(name)} at {offsets} is")
    place = places[name, offsets]
    file, start, length = (place.get(key) for key in ("relative_path", "offset", "length"))
    fits = len(offsets) == len(sizes) == len(shape) and all(
        offset + size <= limit for offset, size, limit in zip(offsets, sizes, shape, strict=True)
    )
    # A name with folders in it could lead anywhere.
    if not fits or not isinstance(file, str) or not is_name(file):
        raise _Wrong(f"{_shown(name)} has a part at {offsets} of {sizes} in {_shown(file)}")
    if not _is_count(start) or not _is_count(length):
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


def _places(value: Any) -> dict[tuple[str, tuple[int, ...] | None], dict[str, Any]]:
    """Return where each part is, by its tensor's name and its offsets there."""
    places: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]] = {}
    pairs = _pairs(value)
    if len(pairs) > MOST_BLOCKS:
        raise _Wrong(f"it has more than {MOST_BLOCKS} parts")
    for index, place in pairs:
        of = _attributes(index, "metadata", "MetadataIndex")
        name, offsets = of.get("fqn"), of.get("offset")
        if not isinstance(name, str):
            raise _Wrong(f"it names a tensor by {_shown(name)}")
        key = name, None if offsets is None else _size(offsets)
        if key in places:
            raise _Wrong(f"it says twice where a part of {_shown(name)} is")
        places[key] = _attributes(place, "filesystem", "_StorageInfo")
    return places


def _dtype(name: str, properties: Any) -> str:
    """Return the pickled `TensorProperties`: dtype, layout, gradient, format, pinned."""
    made = _made(properties, "metadata", "TensorProperties")
    first = made.state[0] if isinstance(made.state, tuple) and made.state else None
    if not isinstance(first, Global) or first.module != "torch" or first.name == "Size":
        raise _Wrong(f"{_shown(name)} has dtype {_shown(first)}")
    return first.name


def _size(value: Any) -> tuple[int, ...]:
    """Return a `torch.Size`, of numbers that are not negative and fit into 64 bits."""
    if isinstance(value, Made) and value.of == Global("torch", "Size") and not value.has_state:
        numbers = value.arguments[0] if len(value.arguments) == 1 else None
        # A list where older versions of Python wrote one.
        if (
            isinstance(numbers, tuple | list)
            and len(numbers) <= MOST_DIMENSIONS
            and all(map(_is_count, numbers))
        ):
            return tuple(numbers)
    raise _Wrong(f"it has a shape that is none: {_shown(value)}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _made(value: Any, module: str, name: str) -> Made:
    if not isinstance(value, Made) or value.of != Global(f"{_DCP}.{module}", name):
        raise _Wrong(f"it has {_shown(value)} where a {name} belongs")
    if value.arguments:
        raise _Wrong(f"it makes a {name} of {_shown(value.arguments)}")
    return value


def _attributes(value: Any, module: str, name: str) -> dict[str, Any]:
    """Return the attributes of an instance of one of the classes."""
    state = _made(value, module, name).state
    fields: dict[str, Any] = {}
    for key, held in _pairs(state):
        if not isinstance(key, str) or key in fields:
            raise _Wrong(f"a {name} has an attribute twice, or one without a name: {_shown(key)}")
        fields[key] = held
    return fields


def _fields(value: Any, module: str, kind: str, *names: str) -> list[Any]:
    """Return those of the attributes that it must have."""
    fields = _attributes(value, module, kind)
    missing = [name for name in names if name not in fields]
    if missing:
        raise _Wrong(f"it lacks {missing[0]}")
    return [fields[name] for name in names]


def _pairs(value: Any) -> Sequence[tuple[Any, Any]]:
    if not isinstance(value, Pairs):
        raise _Wrong(f"it has {_shown(value)} where a dictionary belongs")
    return value.items


def _shown(value: Any) -> str:
    """Return a value in a message: what is made by others is described, not printed."""
    if isinstance(value, str):
        return repr(value[:100])
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "a huge number"
    if isinstance(value, int | float | Global | None):
        return str(value)[:200]
    if isinstance(value, Made):
        return f"a {value.of}"
    return f"a {type(value).__name__}"
