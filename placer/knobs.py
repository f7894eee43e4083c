"""Describe configurations and options for documentation, checks and the command line.

A configuration is a frozen dataclass whose fields are made by `knob`. The command line makes
options from these fields, and from parameters with an `Option` as their default.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from placer.errors import PlacerError


def check_knobs(configuration: Any) -> None:
    """Raise PlacerError at the first value that is too small or not among its type's choices.

    >>> @dataclass(frozen=True)
    ... class Effort:
    ...     steps: int = knob(10, "Steps to take.", least=1)
    ...     def __post_init__(self) -> None:
    ...         check_knobs(self)
    >>> Effort(steps=0)
    Traceback (most recent call last):
    placer.errors.PlacerError: steps must be at least 1, not 0
    """
    for name, (kind, spec) in _knobs(type(configuration)).items():
        value = getattr(configuration, name)
        choices = choices_of(kind)
        if choices and value not in choices:
            raise PlacerError(f"{name} {value!r} is none of {', '.join(map(str, choices))}")
        if value is None:
            continue
        if spec.least is not None and not value >= spec.least:
            raise PlacerError(f"{name} must be at least {spec.least:g}, not {value}")
        if spec.above is not None and not value > spec.above:
            raise PlacerError(f"{name} must be more than {spec.above:g}, not {value}")


def choices_of(kind: Any) -> tuple[Any, ...]:
    """Return the values of a `Literal` type, with None first if the type is optional."""
    if get_origin(kind) in (Union, UnionType):
        inner = [choices_of(one) for one in get_args(kind) if one is not type(None)]
        return (None, *inner[0]) if inner[0] else ()
    return get_args(kind) if get_origin(kind) is Literal else ()


@dataclass(frozen=True, slots=True)
class Option:
    """A command's option or argument, given as the default of a parameter; ``...`` is required.

    `flags` are separated by blanks; the first word may be the option's name, if it is not the
    parameter's. By default the flag is ``--`` and the name. `kind` is a click type, or a function
    that raises PlacerError for a wrong text, if the type hint does not imply a type. `metavar`
    stands for the value in help. An argument has no flag, and a `positional` option may also be
    given as the argument PLAN. `heading` is its heading in help.
    """

    default: Any
    help: str = ""
    flags: str = ""
    least: float | None = None
    above: float | None = None
    kind: Any = None
    metavar: str | None = None
    is_argument: bool = False
    positional: bool = False
    heading: str = ""


def option(*values: Any, **more: Any) -> Any:
    """Return an `Option` as the default of a parameter, typed `Any` for type checkers."""
    return Option(*values, **more)


def argument(default: Any = ..., kind: Any = None) -> Any:
    """Return an `Option` for an argument, as the default of a parameter."""
    return Option(default, kind=kind, is_argument=True)


def knob(default: Any, help: str, flags: str = "", **more: Any) -> Any:
    """Return the field of a configuration that is also an option; `more` is as in `Option`."""
    return field(default=default, metadata={"option": Option(default, help, flags, **more)})


def _knobs(configuration: type) -> dict[str, tuple[Any, Option]]:
    """Return the types and options of a configuration's knobs."""
    hints = get_type_hints(configuration)
    return {
        one.name: (hints[one.name], one.metadata["option"])
        for one in fields(configuration)
        if "option" in one.metadata
    }


def options_of(
    configuration: type, heading: str, names: str = "", **changed: tuple[Any, Option]
) -> Any:
    """Return the knobs of a configuration as options, for a parameter that is a mapping.

    `names` says which, separated by blanks; by default all. Those in `changed` have other types or
    options.
    """
    known = _knobs(configuration) | changed
    of = {name: known[name] for name in names.split() or known}
    return {name: (hint, replace(spec, heading=heading)) for name, (hint, spec) in of.items()}


Member = tuple[str, str, Any, Option]
"""A parameter's name; and the name, type and option of one of its values."""


def members(function: Callable[..., Any]) -> Iterator[Member]:
    """Yield the options of a function's parameters, in order.

    A parameter has several options if it is a dataclass, or if its default is from `options_of`.
    """
    hints = get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        several = parameter.default
        if is_dataclass(hints[name]):
            inner = get_type_hints(hints[name])
            heading = getattr(hints[name], "HEADING", "")
            several = {
                one.name: (inner[one.name], replace(cast(Option, one.default), heading=heading))
                for one in fields(hints[name])
            }
        if not isinstance(several, dict):
            several = {name: (hints[name], several)}
        for each, (hint, spec) in several.items():
            yield name, each, hint, spec


def called(function: Callable[..., Any], values: dict[tuple[str, str], Any]) -> Any:
    """Call a function with the values of its `members`, given by parameter and name."""
    hints = get_type_hints(function)
    grouped: dict[str, dict[str, Any]] = {}
    for (name, each), value in values.items():
        grouped.setdefault(name, {})[each] = value
    for name, group in grouped.items():
        if is_dataclass(hints[name]):
            grouped[name] = hints[name](**group)
        elif list(group) == [name]:
            grouped[name] = group[name]
    return function(**grouped)
