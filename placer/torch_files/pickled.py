"""Pickles read as values: an interpreter that imports nothing, calls nothing and makes no object.

A pickle is a program for a stack machine (https://docs.python.org/3/library/pickletools.html).
Python's unpickler looks up what the program names, calls it, and sets attributes of the result;
a list of admitted classes does not stop the last of these. Here a name stays a name: what a
program calls or builds becomes a `Made`, a record of the name, the arguments and the state, and
who reads the file compares these with the one form that it expects.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MOST_BYTES = 64 << 20
"""Longest pickle that is read: a checkpoint's metadata takes some 100 bytes a block of 16 MiB."""
MOST_VALUES = 4 << 20
"""Most texts, containers and records of one pickle; each takes some 100 bytes of memory."""
MOST_STACKED = 1 << 17
"""Deepest stack. Python's own pickler hands over at most 1,000 items at a time."""


class PickleError(ValueError):
    """A pickle that is damaged, too large, or wants what its reader does not admit."""


class NotAdmittedError(PickleError):
    """A pickle that names a class or a function that does not belong there."""


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or a function, which is not looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Made:
    """What a class or a function would have made.

    Attributes
    ----------
    of : Global
    arguments : tuple
    state : object
        What would have been set on it afterwards; `NO_STATE` where nothing would.
    """

    of: Global
    arguments: tuple[Any, ...]
    state: Any = None
    has_state: bool = False


@dataclass(slots=True, eq=False)
class Pairs:
    """A dictionary: keys and values as they came, which nothing has hashed or compared."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Something outside of the pickle, by what it is called there."""

    name: Any


_MARK = object()


def read_pickle(content: bytes, admits: Callable[[Global], bool]) -> Any:
    """The value of a pickle of protocol 2 to 5, made of plain values and the records above.

    Time and memory grow with the length of the content alone.

    Parameters
    ----------
    content : bytes
    admits : callable
        Which names may occur in it.

    Raises
    ------
    PickleError
        If it is damaged or too large, or has a name that is not admitted.

    Examples
    --------
    >>> import pickle
    >>> read_pickle(pickle.dumps((1, ["a"])), admits=lambda name: False)
    (1, ['a'])
    >>> read_pickle(pickle.dumps(print), admits=lambda name: False)
    Traceback (most recent call last):
    placer.torch_files.pickled.NotAdmittedError: it wants builtins.print
    """
    if len(content) > MOST_BYTES:
        raise PickleError(f"it has {len(content)} bytes, and at most {MOST_BYTES} are read")
    return _Machine(content, admits).run()


class _Machine:
    """The stack, the memo and the place in the content."""

    def __init__(self, content: bytes, admits: Callable[[Global], bool]) -> None:
        self._content, self._admits = content, admits
        self._at = 0
        self._values = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        stop = ord(".")
        while True:
            code = self._number("<B")
            if code == stop:
                result = self._pop()
                if self._stack:
                    raise PickleError("it ends with values that nothing takes")
                return result
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise PickleError(f"it has opcode {code:#04x}, which does not belong there")
            operation(self)
            if len(self._stack) > MOST_STACKED:
                raise PickleError("it stacks more values than such a file does")

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._content):
            raise PickleError("it is cut short")
        taken = self._content[self._at : end]
        self._at = end
        return taken

    def _number(self, kind: str) -> int:
        size = struct.calcsize(kind)
        if self._at + size > len(self._content):
            raise PickleError("it is cut short")
        (number,) = struct.unpack_from(kind, self._content, self._at)
        self._at += size
        return int(number)

    def _line(self) -> str:
        end = self._content.find(b"\n", self._at, self._at + 1000)
        if end < 0:
            raise PickleError("it is cut short")
        return _text(self._take(end + 1 - self._at)[:-1])

    def _push(self, value: Any) -> None:
        self._values += 1
        if self._values > MOST_VALUES:
            raise PickleError(f"it makes more than {MOST_VALUES} values")
        self._stack.append(value)

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise PickleError("it takes a value that is not there")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                taken = self._stack[place + 1 :]
                del self._stack[place:]
                return taken
        raise PickleError("it takes values up to a mark that is not there")

    def _top(self, kind: type[Any]) -> Any:
        top = self._stack[-1] if self._stack else None
        if not isinstance(top, kind):
            raise PickleError(f"it adds to a {type(top).__name__}, not a {kind.__name__}")
        return top

    def _constant(self, value: Any) -> None:
        self._stack.append(value)

    def _tuple(self, size: int) -> None:
        values = [self._pop() for _ in range(size)]
        self._push(tuple(reversed(values)))

    def _long(self) -> None:
        self._push(int.from_bytes(self._take(self._number("<B")), "little", signed=True))

    def _binary_float(self) -> None:
        self._push(struct.unpack(">d", self._take(8))[0])

    def _append(self) -> None:
        value = self._pop()
        self._top(list).append(value)

    def _appends(self) -> None:
        values = self._pop_to_mark()
        self._top(list).extend(values)

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._top(Pairs).items.append((key, value))

    def _set_items(self) -> None:
        values = self._pop_to_mark()
        if len(values) % 2:
            raise PickleError("a key of it has no value")
        self._top(Pairs).items.extend(zip(values[::2], values[1::2], strict=True))

    def _put(self, number: int) -> None:
        if not self._stack or self._stack[-1] is _MARK:
            raise PickleError("it takes a value that is not there")
        self._memo[number] = self._stack[-1]

    def _get(self, number: int) -> None:
        if number not in self._memo:
            raise PickleError("it takes a value that is not there")
        self._stack.append(self._memo[number])

    def _global(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("it names a class by what is no text")
        wanted = Global(module, name)
        if not self._admits(wanted):
            raise NotAdmittedError(f"it wants {str(wanted)[:200]}")
        self._push(wanted)

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._global(module, name)

    def _make(self) -> None:
        arguments, of = self._pop(), self._pop()
        if not isinstance(of, Global) or not isinstance(arguments, tuple):
            raise PickleError(f"it calls a {type(of).__name__}")
        self._push(Made(of, arguments))

    def _build(self) -> None:
        state = self._pop()
        made = self._top(Made)
        if made.has_state:
            raise PickleError(f"it sets the attributes of a {made.of} twice")
        made.state, made.has_state = state, True


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise PickleError("a text of it is not UTF-8") from error


def _counted(kind: str, wrap: Callable[[bytes], Any]) -> Callable[[_Machine], None]:
    """Push what has its length in front; the length is compared with what is there."""
    return lambda machine: machine._push(wrap(machine._take(machine._number(kind))))


def _constant(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine._constant(value)


_OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    ord(code): operation
    for code, operation in {
        "\x80": lambda m: m._take(1) and None,  # PROTO
        "\x95": lambda m: m._take(8) and None,  # FRAME
        "(": _constant(_MARK),
        "N": _constant(None),
        "\x88": _constant(True),
        "\x89": _constant(False),
        "K": lambda m: m._constant(m._number("<B")),
        "M": lambda m: m._constant(m._number("<H")),
        "J": lambda m: m._push(m._number("<i")),
        "\x8a": _Machine._long,
        "G": _Machine._binary_float,
        "\x8c": _counted("<B", _text),
        "X": _counted("<I", _text),
        "\x8d": _counted("<Q", _text),
        "C": _counted("<B", bytes),
        "B": _counted("<I", bytes),
        ")": _constant(()),
        "\x85": lambda m: m._tuple(1),
        "\x86": lambda m: m._tuple(2),
        "\x87": lambda m: m._tuple(3),
        "t": lambda m: m._push(tuple(m._pop_to_mark())),
        "]": lambda m: m._push([]),
        "a": _Machine._append,
        "e": _Machine._appends,
        "}": lambda m: m._push(Pairs()),
        "s": _Machine._set_item,
        "u": _Machine._set_items,
        "q": lambda m: m._put(m._number("<B")),
        "r": lambda m: m._put(m._number("<I")),
        "\x94": lambda m: m._put(len(m._memo)),
        "h": lambda m: m._get(m._number("<B")),
        "j": lambda m: m._get(m._number("<I")),
        "c": lambda m: m._global(m._line(), m._line()),
        "\x93": _Machine._stack_global,
        "\x81": _Machine._make,  # NEWOBJ
        "R": _Machine._make,  # REDUCE
        "b": _Machine._build,
        "Q": lambda m: m._push(Reference(m._pop())),
    }.items()
}
"""All opcodes that metadata and tensors are written with, by their byte."""
