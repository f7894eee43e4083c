"""Pickles read as values: an interpreter that imports nothing, calls nothing and makes no object.

A pickle is a program for a stack machine (https://docs.python.org/3/library/pickletools.html).
Python's unpickler looks up what the program names, calls it, and sets attributes of the result;
a list of admitted classes does not stop the last of these. Here a name stays a name: what a
program calls or builds becomes a `Made`, a record of the name, the arguments and the state, and
who reads the file compares these with the one form that it expects.
"""

import pickletools
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
    """What a class or a function would have made."""

    of: Global
    arguments: tuple[Any, ...]
    state: Any = None  # What would have been set on it afterwards; `NO_STATE` where nothing would.
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
    """Return the value of a pickle of protocol 2 to 5, made of plain values and the records above.

    `admits` says which names may occur in it. Time and memory grow with the length of the content.

    >>> import pickle
    >>> read_pickle(pickle.dumps((1, ["a"])), admits=lambda name: False)
    (1, ['a'])
    >>> read_pickle(pickle.dumps(print), admits=lambda name: False)
    Traceback (most recent call last):
    placer.torch_files.pickled.NotAdmittedError: it wants builtins.print
    """
    if len(content) > MOST_BYTES:
        raise PickleError(f"it has {len(content)} bytes, and at most {MOST_BYTES} are read")
    try:
        return _Machine(admits).run(content)
    except PickleError:
        raise
    except ValueError as error:  # Of `pickletools`, which decodes opcodes and their arguments.
        raise PickleError(f"it is cut short or damaged: {error}") from error


class _Machine:
    """The stack and the memo."""

    def __init__(self, admits: Callable[[Global], bool]) -> None:
        self._admits = admits
        self._values = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        """Run a program to its end, and return the value that it leaves."""
        for opcode, argument, _ in pickletools.genops(content):
            operation = _OPERATIONS.get(opcode.name)
            if operation is None:
                raise PickleError(
                    f"it has opcode {ord(opcode.code):#04x}, which does not belong there"
                )
            operation(self, argument)
            if len(self._stack) > MOST_STACKED:
                raise PickleError("it stacks more values than such a file does")
        result = self._pop()
        if self._stack:
            raise PickleError("it ends with values that nothing takes")
        return result

    def _constant(self, value: Any) -> None:
        self._stack.append(value)

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

    def _tuple_of(self, size: int) -> None:
        values = [self._pop() for _ in range(size)]
        self._push(tuple(reversed(values)))

    def _extend(self, values: list[Any]) -> None:
        self._top(list).extend(values)

    def _update(self, values: list[Any]) -> None:
        if len(values) % 2:
            raise PickleError("a key of it has no value")
        self._top(Pairs).items.extend(zip(values[::2], values[1::2], strict=True))

    def _put(self, number: int | None) -> None:
        if not self._stack or self._stack[-1] is _MARK:
            raise PickleError("it takes a value that is not there")
        self._memo[len(self._memo) if number is None else number] = self._stack[-1]

    def _get(self, number: int) -> None:
        if number not in self._memo:
            raise PickleError("it takes a value that is not there")
        self._stack.append(self._memo[number])

    def _global(self, words: str) -> None:
        module, _, name = words.partition(" ")
        self._name(module, name)

    def _stack_global(self, _: Any) -> None:
        name, module = self._pop(), self._pop()
        self._name(module, name)

    def _name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("it names a class by what is no text")
        wanted = Global(module, name)
        if not self._admits(wanted):
            raise NotAdmittedError(f"it wants {str(wanted)[:200]}")
        self._push(wanted)

    def _make(self, _: Any) -> None:
        arguments, of = self._pop(), self._pop()
        if not isinstance(of, Global) or not isinstance(arguments, tuple):
            raise PickleError(f"it calls a {type(of).__name__}")
        self._push(Made(of, arguments))

    def _build(self, _: Any) -> None:
        state = self._pop()
        made = self._top(Made)
        if made.has_state:
            raise PickleError(f"it sets the attributes of a {made.of} twice")
        made.state, made.has_state = state, True


_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, _: None),
    "MARK": lambda machine, _: machine._constant(_MARK),
    "NONE": lambda machine, _: machine._constant(None),
    "NEWTRUE": lambda machine, _: machine._constant(True),
    "NEWFALSE": lambda machine, _: machine._constant(False),
    **dict.fromkeys(("BININT1", "BININT2"), _Machine._constant),
    **dict.fromkeys(("BININT", "LONG1", "BINFLOAT"), _Machine._push),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _Machine._push),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES"), _Machine._push),
    "EMPTY_TUPLE": lambda machine, _: machine._constant(()),
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
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    **dict.fromkeys(("NEWOBJ", "REDUCE"), _Machine._make),
    "BUILD": _Machine._build,
    "BINPERSID": lambda machine, _: machine._push(Reference(machine._pop())),
}
"""All opcodes that metadata and tensors are written with, by their names in `pickletools`."""
