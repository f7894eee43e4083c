"""Describe configurations and options for documentation, checks and the command line.

A configuration is a frozen dataclass with fields annotated by a `Knob`. The command line makes
options from these fields, and from parameters with an `Option` as their default.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from placer.errors import PlacerError


@dataclass(frozen=True, slots=True)
class Knob:
    """Help, least value and exclusive lower limit of an option; `kind` is as in `Option`."""

    help: str
    least: float | None = None
    above: float | None = None
    kind: Any = None


def knobs(configuration: type) -> Iterator[tuple[str, Any, Any, Knob]]:
    """Yield name, type, default (None without one) and knob of each field with a knob."""
    hints = get_type_hints(configuration, include_extras=True)
    for field in fields(configuration):
        hint = hints[field.name]
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, Knob):
                default = None if field.default is MISSING else field.default
                yield field.name, hint.__origin__, default, extra


def check_knobs(configuration: Any) -> None:
    """Raise PlacerError at the first value that is too small or not among its type's choices.

    >>> from typing import Annotated
    >>> @dataclass(frozen=True)
    ... class Effort:
    ...     steps: Annotated[int, Knob("Steps to take.", least=1)] = 10
    ...     def __post_init__(self) -> None:
    ...         check_knobs(self)
    >>> Effort(steps=0)
    Traceback (most recent call last):
    placer.errors.PlacerError: steps must be at least 1, not 0
    """
    for name, kind, _, knob in knobs(type(configuration)):
        value = getattr(configuration, name)
        choices = choices_of(kind)
        if choices and value not in choices:
            raise PlacerError(f"{name} {value!r} is none of {', '.join(map(str, choices))}")
        if value is None:
            continue
        if knob.least is not None and not value >= knob.least:
            raise PlacerError(f"{name} must be at least {knob.least:g}, not {value}")
        if knob.above is not None and not value > knob.above:
            raise PlacerError(f"{name} must be more than {knob.above:g}, not {value}")


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


def options_of(
    configuration: type,
    heading: str,
    renamed: Mapping[str, str],
    names: Collection[str] | None = None,
    **changed: tuple[Any, Option],
) -> Any:
    """Return fields of a configuration as options, for a parameter that is a mapping.

    By default these are all fields with a knob. If `names` is given, only those in `names`,
    `renamed` (to `Option.flags`) or `changed` (to other types and options).
    """
    known: dict[str, tuple[Any, Option]] = {}
    for name, hint, default, knob in knobs(configuration):
        if name in changed:
            known[name] = changed[name]
        elif name in renamed or names is None or name in names:
            metavar = "SECONDS" if name.endswith("_s") else None
            limits = knob.least, knob.above, knob.kind, metavar
            known[name] = hint, Option(default, knob.help, renamed.get(name, ""), *limits)
    return {name: (hint, replace(spec, heading=heading)) for name, (hint, spec) in known.items()}


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
