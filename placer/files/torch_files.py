"""Read files of PyTorch safely: nothing in a file is imported, called or run.

A pickle is a program for a stack machine (https://docs.python.org/3/library/pickletools.html).
Python's unpickler imports the names in the program, calls them, and sets attributes of the results.
A list of admitted classes does not prevent setting attributes. Here names stay names: a call
becomes a `Made`, a record of the name, the arguments and the state. Callers compare it with the one
form that they expect.

Since PyTorch 1.6, `torch.save` writes a zip file of uncompressed members: ``data.pkl``, a pickle
that describes the content, and ``data/<key>``, the bytes of each storage.
"""

import io
import math
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from torch import Tensor

MOST_BYTES = 64 << 20
"""Largest pickle that is read. A checkpoint's metadata has about 100 bytes per 16 MiB block."""
MOST_VALUES = 4 << 20
"""Most texts, containers and records of a pickle. Each takes about 100 bytes of memory."""
MOST_STACKED = 1 << 17
"""Deepest stack. Python's pickler stacks at most 1,000 items at a time."""
MOST_DIMENSIONS = 64
_MOST_MEMBERS = 10_000
_READ_BYTES = 1 << 24
_END, _END_BYTES = b"PK\x05\x06", 22
"""Signature and size of the record that ends a zip file without a comment."""

ELEMENT_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of an element, by dtype of `torch`, for all dtypes that are read."""

_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip


class TensorFileError(ValueError):
    """A file or pickle has no tensors, is damaged or is too large."""


class OtherContentError(TensorFileError):
    """A file has more than tensors, or names a class or function that is not admitted."""


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function. It is not imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Made:
    """A record of a call in the pickle, which was not made."""

    of: Global
    arguments: tuple[Any, ...]
    state: Any = None  # The state that the pickle sets on the result, if any.


@dataclass(slots=True, eq=False)
class Pairs:
    """A dictionary as pairs of keys and values. The keys are not hashed or compared."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A reference to something outside of the pickle, such as a storage."""

    name: Any


_MARK = object()


def read_pickle(content: bytes, admits: Callable[[Global], bool]) -> Any:
    """Return the value of a pickle of protocol 2 to 5, as plain values and the records above.

    `admits` says which names may occur. Time and memory grow with the length of the content.

    >>> import pickle
    >>> read_pickle(pickle.dumps((1, ["a"])), admits=lambda name: False)
    (1, ['a'])
    >>> read_pickle(pickle.dumps(print), admits=lambda name: False)
    Traceback (most recent call last):
    placer.files.torch_files.OtherContentError: it wants builtins.print
    """
    if len(content) > MOST_BYTES:
        raise TensorFileError(f"it has {len(content)} bytes, and at most {MOST_BYTES} are read")
    try:
        return _Machine(admits).run(content)
    except TensorFileError:
        raise
    except ValueError as error:  # `pickletools`, which decodes opcodes, raises it.
        raise TensorFileError(f"it is cut short or damaged: {error}") from error


class _Machine:
    def __init__(self, admits: Callable[[Global], bool]) -> None:
        self._admits = admits
        self._values = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        """Run a pickle to its end, and return the value that it leaves on the stack."""
        for opcode, argument, _ in pickletools.genops(content):
            operation = _OPERATIONS.get(opcode.name)
            if operation is None:
                raise TensorFileError(
                    f"it has opcode {ord(opcode.code):#04x}, which does not belong there"
                )
            operation(self, argument)
            if len(self._stack) > MOST_STACKED:
                raise TensorFileError("it stacks more values than such a file does")
        result = self._pop()
        if self._stack:
            raise TensorFileError("it ends with values that nothing takes")
        return result

    def _push(self, value: Any) -> None:
        self._values += 1
        if self._values > MOST_VALUES:
            raise TensorFileError(f"it makes more than {MOST_VALUES} values")
        self._stack.append(value)

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise TensorFileError("it takes a value that is not there")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                taken = self._stack[place + 1 :]
                del self._stack[place:]
                return taken
        raise TensorFileError("it takes values up to a mark that is not there")

    def _top(self, kind: type[Any]) -> Any:
        top = self._stack[-1] if self._stack else None
        if not isinstance(top, kind):
            raise TensorFileError(f"it adds to a {type(top).__name__}, not a {kind.__name__}")
        return top

    def _tuple_of(self, size: int) -> None:
        values = [self._pop() for _ in range(size)]
        self._push(tuple(reversed(values)))

    def _extend(self, values: list[Any]) -> None:
        self._top(list).extend(values)

    def _update(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise TensorFileError("a key of it has no value")
        self._top(Pairs).items.extend(zip(values[::2], values[1::2], strict=True))

    def _put(self, number: int | None) -> None:
        value = self._pop()
        self._stack.append(value)
        self._memo[len(self._memo) if number is None else number] = value

    def _get(self, number: int) -> None:
        if number not in self._memo:
            raise TensorFileError("it takes a value that is not there")
        self._stack.append(self._memo[number])

    def _name(self, words: str | None) -> None:
        if words is None:  # Module and name are on the stack.
            name, module = self._pop(), self._pop()
        else:
            module, _, name = words.partition(" ")
        if not isinstance(module, str) or not isinstance(name, str):
            raise TensorFileError("it names a class by what is no text")
        wanted = Global(module, name)
        if not self._admits(wanted):
            raise OtherContentError(f"it wants {str(wanted)[:200]}")
        self._push(wanted)

    def _make(self, _: Any) -> None:
        arguments, of = self._pop(), self._pop()
        if not isinstance(of, Global) or not isinstance(arguments, tuple):
            raise TensorFileError(f"it calls a {type(of).__name__}")
        self._push(Made(of, arguments))

    def _build(self, _: Any) -> None:
        state = self._pop()
        made = self._top(Made)
        if made.state is not None:
            raise TensorFileError(f"it sets the attributes of a {made.of} twice")
        made.state = state


_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, _: None),
    "MARK": lambda machine, _: machine._stack.append(_MARK),
    "NONE": lambda machine, _: machine._stack.append(None),
    "NEWTRUE": lambda machine, _: machine._stack.append(True),
    "NEWFALSE": lambda machine, _: machine._stack.append(False),
    **dict.fromkeys(("BININT1", "BININT2"), lambda machine, value: machine._stack.append(value)),
    **dict.fromkeys(("BININT", "LONG1", "BINFLOAT"), _Machine._push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _Machine._push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES"), _Machine._push),
    "EMPTY_TUPLE": lambda machine, _: machine._stack.append(()),
    "TUPLE1": lambda machine, _: machine._tuple_of(1),
    "TUPLE2": lambda machine, _: machine._tuple_of(2),
    "TUPLE3": lambda machine, _: machine._tuple_of(3),
    "TUPLE": lambda machine, _: machine._push(tuple(machine._pop_to_mark())),
    "EMPTY_LIST": lambda machine, _: machine._push([]),
    "APPEND": lambda machine, _: machine._extend([machine._pop()]),
    "APPENDS": lambda machine, _: machine._extend(machine._pop_to_mark()),
    "EMPTY_DICT": lambda machine, _: machine._push(Pairs()),
    "SETITEM": lambda machine, _: machine._update([machine._pop(), machine._pop()][::-1]),
    "SETITEMS": lambda machine, _: machine._update(machine._pop_to_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine._put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine._get),
    **dict.fromkeys(("GLOBAL", "STACK_GLOBAL"), _Machine._name),
    **dict.fromkeys(("NEWOBJ", "REDUCE"), _Machine._make),
    "BUILD": _Machine._build,
    "BINPERSID": lambda machine, _: machine._push(Reference(machine._pop())),
}
"""Opcodes that metadata and tensors are written with, by their names in `pickletools`."""

_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_HOOKS = Global("collections", "OrderedDict")
_ADMITTED = {_REBUILD, _PARAMETER, _HOOKS, *(Global("torch", name) for name in _STORAGES)}
_DAMAGE = OSError, EOFError, zipfile.BadZipFile, ValueError, RuntimeError, KeyError, OverflowError


def read_tensors(file: BinaryIO) -> Any:
    """Return the content of a file of `torch.save`: a tensor, or tuples and lists of tensors.

    Compressed members are refused, so no storage takes more memory than the file's size.

    Raises TensorFileError if the file is cut short or damaged, or has something other than tensors
    with a dtype in `ELEMENT_BYTES`.

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
    except TensorFileError:
        raise
    except _DAMAGE as error:
        raise TensorFileError(str(error).partition("\n")[0] or type(error).__name__) from error


class _Archive:
    def __init__(self, archive: zipfile.ZipFile, size_bytes: int, ends: bool) -> None:
        self._archive = archive
        self._storages: dict[tuple[str, str], Tensor] = {}
        members = archive.infolist()
        # zipfile ignores bytes before and after an archive, such as another archive.
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
        return self._value(read_pickle(bytes(content), lambda name: name in _ADMITTED), depth=0)

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

        if not 6 <= len(made.arguments) <= 7 or made.state is not None:
            raise TensorFileError("a tensor of it has attributes that are not known")
        reference, offset, shape, strides, _, hooks = made.arguments[:6]
        has_none = isinstance(hooks, Made) and (hooks.of, hooks.arguments) == (_HOOKS, ())
        if not has_none or hooks.state is not None:
            raise TensorFileError("a tensor of it has hooks")
        storage = self._storage(reference)
        counted = all(map(are_counts, (shape, strides, (offset,))))
        if not counted or len(shape) != len(strides):
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

        match reference:
            case Reference(("storage", Global(_, kind), str() as key, _, numel)) if (
                kind in _STORAGES and are_counts((numel,))
            ):
                dtype, member = _STORAGES[kind], f"{self._top}data/{key}"
            case _:
                raise TensorFileError("a tensor of it has no storage")
        size_bytes = self._size_bytes.get(member)
        if size_bytes != numel * ELEMENT_BYTES[dtype]:
            raise TensorFileError(
                f"a storage of it has {size_bytes or 0} bytes instead of "
                f"{numel} times {ELEMENT_BYTES[dtype]}"
            )
        place = dtype, member
        if place not in self._storages:
            of, content = getattr(torch, dtype), self._member(member)
            self._storages[place] = (
                torch.frombuffer(content, dtype=of) if content else torch.empty(0, dtype=of)
            )
        return self._storages[place]


def are_counts(values: Any) -> bool:
    """Return whether untrusted values are a short list of numbers from 0 up that fit in 64 bits."""
    return (
        isinstance(values, tuple | list)
        and len(values) <= MOST_DIMENSIONS
        and all(type(one) is int and 0 <= one < 1 << 63 for one in values)
    )


def _refuse(value: Any) -> Any:
    kind = str(value.of) if isinstance(value, Made) else type(value).__name__
    raise OtherContentError(f"it holds a {kind[:100]}, and only tensors are read")
