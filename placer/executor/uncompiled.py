"""Functions that `torch.compile` leaves as they are, without the import of its compiler."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Do what `torch.compiler.disable` does, once something is compiled.

    That decorator imports ``torch._dynamo``, which takes two seconds that a run without
    `torch.compile` need not wait for.

    >>> @uncompiled
    ... def twice(number):
    ...     return 2 * number
    >>> twice(3)
    6
    """

    disabled: list[Callable[Parameters, Result]] = []

    @functools.wraps(function)
    def outside(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    # What the compiler looks for: it calls such a function instead of tracing it.
    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    outside._torchdynamo_disable_msg = None  # type: ignore[attr-defined]
    return outside
