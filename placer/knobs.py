"""Describe the options of commands, and check configurations, without click.

A command is a function, and its parameters become options. `placer.click_options` makes them:

- A parameter whose default is an `option` or an `argument` becomes that. Its type hint says which
  values it takes, unless the option has a `kind`.
- A parameter whose type is a dataclass becomes an option for each field whose default is an
  `option`, or that is a `knob`. The function gets the dataclass, with the values.
- A parameter whose default is from `options_of` becomes an option for each of some fields of a
  dataclass. The function gets a dictionary.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from placer.errors import PlacerError


@dataclass(frozen=True, slots=True)
class Option:
    """A command's option or argument.

    `default` is its value if it is not given; ``...`` means that it must be given. `flags` are
    separated by blanks; the first word may be the option's name, if it is not the parameter's. By
    default the flag is ``--`` and the name. `kind` is a click type, or a function that raises
    PlacerError for a wrong text. `metavar` stands for the value in help, where the option is under
    its `heading`.
    """

    default: Any
    help: str = ""
    flags: str = ""
    least: float | None = None
    above: float | None = None
    kind: Any = None
    metavar: str | None = None
    is_argument: bool = False
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


Options = dict[str, tuple[Any, Option]]
"""Type hints and options, by name."""


def options_of(configuration: type, names: str = "", **changed: tuple[Any, Option]) -> Any:
    """Return the options of a dataclass, under the heading `HEADING` of the class.

    `names` says which, separated by blanks; by default all. Those in `changed` have other types or
    options. If the class has `DEFAULTS`, that stands after "by default" in all helps.
    """
    hints, heading = get_type_hints(configuration), getattr(configuration, "HEADING", "")
    known: Options = {
        one.name: (hints[one.name], spec)
        for one in fields(configuration)
        if isinstance(spec := one.metadata.get("option", one.default), Option)
    }
    chosen = {name: (known | changed)[name] for name in names.split() or known}
    defaults = getattr(configuration, "DEFAULTS", r"\1")
    for name, (hint, spec) in chosen.items():
        words = re.sub("by default (.*)", f"by default {defaults}", spec.help)
        chosen[name] = hint, replace(spec, heading=heading, help=words)
    return chosen


def parameters_of(function: Callable[..., Any]) -> dict[str, tuple[Any, Options]]:
    """Return the type hint and the options of each parameter of a command's function."""
    hints, found = get_type_hints(function), {}
    for name, parameter in inspect.signature(function).parameters.items():
        options = options_of(hints[name]) if is_dataclass(hints[name]) else parameter.default
        is_one = isinstance(options, Option)
        found[name] = hints[name], {name: (hints[name], options)} if is_one else options
    return found


def choices_of(kind: Any) -> tuple[Any, ...]:
    """Return the values of a `Literal` type, with None first if the type is optional."""
    if get_origin(kind) in (Union, UnionType):
        inner = [choices_of(one) for one in get_args(kind) if one is not type(None)]
        return (None, *inner[0]) if inner[0] else ()
    return get_args(kind) if get_origin(kind) is Literal else ()


def check_knobs(configuration: Any) -> None:
    """Raise PlacerError at the first value that is too small or not among its type's choices.

    >>> @dataclass(frozen=True)
    ... class Effort:
    ...     steps: int = knob(10, "Steps to take.", least=1)
    >>> check_knobs(Effort(steps=0))
    Traceback (most recent call last):
    placer.errors.PlacerError: steps must be at least 1, not 0
    """
    for name, (kind, spec) in options_of(type(configuration)).items():
        value, choices = getattr(configuration, name), choices_of(kind)
        if choices and value not in choices:
            raise PlacerError(f"{name} {value!r} is none of {', '.join(map(str, choices))}")
        if value is not None and spec.least is not None and not value >= spec.least:
            raise PlacerError(f"{name} must be at least {spec.least:g}, not {value}")
        if value is not None and spec.above is not None and not value > spec.above:
            raise PlacerError(f"{name} must be more than {spec.above:g}, not {value}")
