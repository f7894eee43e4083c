"""Functions that numba compiles where it is installed."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

HAS_COMPILER = find_spec("numba") is not None


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that reads and writes arrays; without numba it is interpreted.

    What it returns is the same, as numbers are, bit for bit: nothing is reordered
    (`fastmath` is off). The compiled code is kept beside the module, or in the user's cache folder.
    """
    if not HAS_COMPILER:
        return function
    import numba

    # No wrapper for C: it takes a third of the time, and nobody calls it. Without references to
    # arrays being counted, which tuples of them make the most of a move's time, functions may
    # make no arrays; and calls are as cheap only if they are inlined.
    options: dict[str, Any] = {
        "cache": True,
        "no_cfunc_wrapper": True,
        "nogil": True,
        "forceinline": True,
        "_nrt": False,
    }
    compile_function: Callable[[Callable[P, R]], Callable[P, R]] = numba.njit(**options)
    return compile_function(function)


def is_loaded(function: Callable[..., Any]) -> bool:
    """Return whether this process has a function's code, or needs none."""
    return bool(getattr(function, "signatures", True))


def is_compiled(function: Callable[..., Any]) -> bool:
    """Return whether a function is compiled already, in this process or on disk.

    Code that the cache has of another version of numba or of the module, as from before an
    upgrade, is none.
    """
    compiler: Any = function
    return is_loaded(function) or bool(compiler._cache._cache_file._load_index())
