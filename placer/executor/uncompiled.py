"""Exclude functions from `torch.compile` without importing its compiler."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Exclude a function from `torch.compile`, as `torch.compiler.disable` does.

    `torch.compiler.disable` imports ``torch._dynamo``, which takes two seconds. This decorator only
    calls it in programs that have imported the compiler already.

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

    # The compiler calls functions with these attributes instead of tracing them.
    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    outside._torchdynamo_disable_msg = None  # type: ignore[attr-defined]
    return outside
