"""Compile functions with numba if it is installed."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

HAS_COMPILER = find_spec("numba") is not None


def compiled(function: Callable[P, R], inline: str = "never") -> Callable[P, R]:
    """Compile a function that reads and writes arrays; without numba, return it as it is.

    Both give the same numbers to the bit, as `fastmath` is off. Numba keeps the compiled code
    beside the module, or in the user's cache folder.
    """
    if not HAS_COMPILER:
        return function
    import numba

    # The wrapper for C would take a third of the time, and nothing calls it. Without references to
    # arrays being counted, which tuples of them make the most of a move's time, functions may
    # make no arrays; and calls are as cheap only if they are inlined.
    options: dict[str, Any] = {
        "cache": True,
        "no_cfunc_wrapper": True,
        "nogil": True,
        "forceinline": True,
        "inline": inline,
        "_nrt": False,
    }
    made: Any = numba.njit(**options)(function)
    if made is not function:  # As it is where the variable NUMBA_DISABLE_JIT is set.
        # Numba compares the own module. Code from others of this package is in it.
        kept = made._cache._cache_file
        kept._source_stamp = kept._source_stamp, stamp(Path(__file__).parent)
    result: Callable[P, R] = made
    return result


def stamp(folder: Path) -> tuple[tuple[str, float, int], ...]:
    """Return name, time of change and size of each Python file of a folder."""
    files = [(file.name, file.stat()) for file in sorted(folder.glob("*.py"))]
    return tuple((name, known.st_mtime, known.st_size) for name, known in files)


def compiled_into(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function as a part of the only one that calls it.

    By itself it would be optimised once more, and that takes most of the time to compile.
    """
    return compiled(function, inline="always")


def is_loaded(function: Callable[..., Any]) -> bool:
    """Return whether this process has loaded a function's code, or needs none."""
    return bool(getattr(function, "signatures", True))


def is_compiled(function: Callable[..., Any]) -> bool:
    """Return whether a function's code is in this process or on disk.

    Code of another version of numba or of the module does not count.
    """
    compiler: Any = function
    return is_loaded(function) or bool(compiler._cache._cache_file._load_index())
