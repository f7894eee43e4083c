"""Tensors that `torch.save` has written, read without running anything of the file.

The format since PyTorch 1.6 is a zip file of uncompressed members: ``data.pkl``, which says what
there is, and ``data/<key>``, the bytes of each storage.
"""

import io
import math
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from placer.torch_files.pickled import (
    MOST_BYTES,
    Global,
    Made,
    NotAdmittedError,
    PickleError,
    Reference,
    read_pickle,
)

if TYPE_CHECKING:
    from torch import Tensor

MOST_DIMENSIONS = 64
_MOST_MEMBERS = 10_000
_READ_BYTES = 1 << 24
_END, _END_BYTES = b"PK\x05\x06", 22
"""What a zip file without a comment ends with."""

ELEMENT_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Types of tensors that are read, as attributes of `torch`, and the bytes of an element."""

_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip
_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_HOOKS = Global("collections", "OrderedDict")


class TensorFileError(ValueError):
    """A file that holds no tensors, or is damaged."""


class OtherContentError(TensorFileError):
    """A file of `torch.save` that holds more than tensors, or something else."""


def read_tensors(file: BinaryIO) -> Any:
    """Return what a file holds: a tensor, or tuples and lists of tensors.

    Members are read as they are in the file, and one that is compressed is refused: so memory
    is at most the file's size for each tensor of a storage.

    Raises TensorFileError if it is cut short or damaged, or holds anything but tensors of
    `ELEMENT_BYTES`.

    >>> import io, torch
    >>> file = io.BytesIO()
    >>> torch.save((torch.arange(3), torch.zeros(2, 2)), file)
    >>> read_tensors(file)[0]
    tensor([0, 1, 2])
    """
    try:
        with zipfile.ZipFile(file) as archive:
            end = file.seek(-_END_BYTES, io.SEEK_END)
            ends = file.read(len(_END)) == _END
            return _Archive(archive, end + _END_BYTES, ends).read()
    except NotAdmittedError as error:
        raise OtherContentError(str(error)) from error
    except (zipfile.BadZipFile, PickleError, OSError, EOFError, NotImplementedError) as error:
        raise TensorFileError(str(error) or type(error).__name__) from error
    except TensorFileError:
        raise
    except (ValueError, RuntimeError, OverflowError, KeyError) as error:
        raise TensorFileError(str(error).splitlines()[0] if str(error) else "damaged") from error


class _Archive:
    """The zip file, and the storages that were read from it."""

    def __init__(self, archive: zipfile.ZipFile, size_bytes: int, ends: bool) -> None:
        self._archive = archive
        self._storages: dict[tuple[str, str], Tensor] = {}
        members = archive.infolist()
        # zipfile passes over what stands before an archive, such as another one, and behind it.
        if not members or min(one.header_offset for one in members) or not ends:
            raise TensorFileError("something stands before its archive, or behind it")
        if sum(one.file_size for one in members) > size_bytes:
            raise TensorFileError("its members are larger than the file, or lie over each other")
        if len(members) > _MOST_MEMBERS or len({one.filename for one in members}) != len(members):
            raise TensorFileError("it has too many members, or two of one name")
        pickles = [one.filename for one in members if one.filename.endswith("/data.pkl")]
        if len(pickles) != 1 or "/" in pickles[0].removesuffix("/data.pkl"):
            raise TensorFileError("it is no file of torch.save")
        self._pickle = pickles[0]
        self._top = self._pickle.removesuffix("data.pkl")
        self._size_bytes = {one.filename: one.file_size for one in members}
        order = f"{self._top}byteorder"
        if order in self._size_bytes and self._member(order, most_bytes=10) != b"little":
            raise TensorFileError(
                "its numbers are big-endian, and only little-endian ones are read"
            )

    def read(self) -> Any:
        content = self._member(self._pickle, MOST_BYTES)
        return self._value(read_pickle(bytes(content), _admits), depth=0)

    def _member(self, name: str, most_bytes: int | None = None) -> bytearray:
        info = self._archive.getinfo(name)
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise TensorFileError(f"{name[:100]} is compressed, which torch.save does not do")
        if most_bytes is not None and info.file_size > most_bytes:
            raise TensorFileError(f"{name[:100]} has {info.file_size} bytes")
        content = bytearray(info.file_size)
        read = 0
        with self._archive.open(info) as member:
            while block := member.read(_READ_BYTES):
                content[read : read + len(block)] = block
                read += len(block)
        if read != info.file_size or len(content) != read:
            raise TensorFileError(f"{name[:100]} is cut short")
        return content

    def _value(self, value: Any, depth: int) -> Any:
        if isinstance(value, Made) and value.of == _REBUILD:
            return self._tensor(value)
        if isinstance(value, Made) and value.of == _PARAMETER and value.arguments:
            return self._value(value.arguments[0], depth + 1) if depth < 3 else _refuse(value)
        if isinstance(value, tuple | list) and depth < 2 and len(value) <= _MOST_MEMBERS:
            return type(value)(self._value(one, depth + 1) for one in value)
        return _refuse(value)

    def _tensor(self, made: Made) -> "Tensor":
        import torch

        if not 6 <= len(made.arguments) <= 7 or made.has_state:
            raise TensorFileError("a tensor of it has attributes that are not known")
        reference, offset, shape, strides, _, hooks = made.arguments[:6]
        if not isinstance(hooks, Made) or hooks.of != _HOOKS or hooks.arguments or hooks.has_state:
            raise TensorFileError("a tensor of it has hooks")
        storage = self._storage(reference)
        sizes_fit = (
            _are_counts(shape) and _are_counts(strides) and len(shape) == len(strides)
        ) and _are_counts((offset,))
        if not sizes_fit:
            raise TensorFileError("a tensor of it has a shape that is none")
        elements = math.prod(shape)
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if elements > storage.numel() or (elements and last >= storage.numel()):
            raise TensorFileError(
                f"a tensor of it has {elements} elements, its storage {storage.numel()}"
            )
        return torch.as_strided(storage, shape, strides, offset)

    def _storage(self, reference: Any) -> "Tensor":
        import torch

        name = reference.name if isinstance(reference, Reference) else None
        if (
            not isinstance(name, tuple)
            or len(name) != 5
            or name[0] != "storage"
            or not isinstance(name[1], Global)
            or name[1].name not in _STORAGES
            or not isinstance(name[2], str)
            or not _are_counts((name[4],))
        ):
            raise TensorFileError("a tensor of it has no storage")
        dtype, member, numel = _STORAGES[name[1].name], f"{self._top}data/{name[2]}", name[4]
        size_bytes = self._size_bytes.get(member)
        if size_bytes != numel * ELEMENT_BYTES[dtype]:
            raise TensorFileError(
                f"a storage of it has {size_bytes or 0} bytes instead of "
                f"{numel} times {ELEMENT_BYTES[dtype]}"
            )
        key = dtype, member
        if key not in self._storages:
            kind = getattr(torch, dtype)
            content = self._member(member)
            self._storages[key] = (
                torch.frombuffer(content, dtype=kind) if content else torch.empty(0, dtype=kind)
            )
        return self._storages[key]


def _admits(name: Global) -> bool:
    return name in (_REBUILD, _PARAMETER, _HOOKS) or (
        name.module == "torch" and name.name in _STORAGES
    )


def _are_counts(values: Any) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) <= MOST_DIMENSIONS
        and all(type(one) is int and 0 <= one < 1 << 63 for one in values)
    )


def _refuse(value: Any) -> Any:
    kind = str(value.of) if isinstance(value, Made) else type(value).__name__
    raise OtherContentError(f"it holds a {kind[:100]}, and only tensors are read")
