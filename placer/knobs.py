"""Describes the values of a configuration: for documentation, checks and the command line.

A configuration is a frozen dataclass whose fields are annotated with a `Knob`. The command line
makes options of these, and of parameters whose defaults are an `Option`.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from placer.errors import PlacerError


@dataclass(frozen=True, slots=True)
class Knob:
    """The description and the least value of an option.

    Attributes
    ----------
    least : float, optional
        The least value that is allowed.
    above : float, optional
        What the value must exceed.
    """

    help: str
    least: float | None = None
    above: float | None = None


def knobs(configuration: type) -> Iterator[tuple[str, Any, Any, Knob]]:
    """Name, type, default (None without one) and knob of each field that has a knob."""
    hints = get_type_hints(configuration, include_extras=True)
    for field in fields(configuration):
        hint = hints[field.name]
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, Knob):
                default = None if field.default is MISSING else field.default
                yield field.name, hint.__origin__, default, extra


def check_knobs(configuration: Any) -> None:
    """Check that values are not too small, and are among the choices where a type names them.

    Raises
    ------
    PlacerError
        Names the first value that is not allowed.

    Examples
    --------
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
    """Return the values that a `Literal` type names, None with them where it may be left out."""
    if get_origin(kind) in (Union, UnionType):
        inner = [choices_of(one) for one in get_args(kind) if one is not type(None)]
        return (None, *inner[0]) if inner[0] else ()
    return get_args(kind) if get_origin(kind) is Literal else ()


@dataclass(frozen=True, slots=True)
class Option:
    """A value that a command takes, as the default of a parameter; ``...`` is required.

    Attributes
    ----------
    flags : str
        Between spaces, after the option's own name where it has another one than the parameter;
        by default the parameter's name with two dashes.
    least, above : float, optional
        See `Knob`.
    kind : Any
        What parses it, where its type does not say.
    metavar : str, optional
        What help shows for the value.
    is_argument : bool
        Whether it has no flag.
    positional : bool
        Whether it may be given without its flag, too, as PLAN.
    heading : str
        What it stands under in help, where that is not as usual.
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
    """Return an `Option` as the default of a parameter, whose type it therefore has."""
    return Option(*values, **more)


def argument(default: Any = ..., kind: Any = None) -> Any:
    """Return the default of a parameter that is an argument."""
    return Option(default, kind=kind, is_argument=True)


def options_of(
    configuration: type,
    heading: str,
    renamed: Mapping[str, str],
    names: Collection[str] | None = None,
    **changed: tuple[Any, Option],
) -> Any:
    """Return fields of a configuration as options, for a parameter that is a mapping of them.

    Parameters
    ----------
    configuration : type
        A dataclass whose fields have knobs.
    heading : str
        What they stand under in help.
    renamed : mapping of str to str
        How fields are spelt that are not spelt by their name; see `Option.flags`.
    names : collection of str, optional
        The other fields that are options; by default all.
    changed
        Types and options that the command line has in place of a field's own.
    """
    known: dict[str, tuple[Any, Option]] = {}
    for name, hint, default, knob in knobs(configuration):
        if name in changed:
            known[name] = changed[name]
        elif name in renamed or names is None or name in names:
            metavar = "SECONDS" if name.endswith("_s") else None
            limits = knob.least, knob.above, None, metavar
            known[name] = hint, Option(default, knob.help, renamed.get(name, ""), *limits)
    return {name: (hint, replace(spec, heading=heading)) for name, (hint, spec) in known.items()}


Member = tuple[str, str, Any, Option]
"""A parameter, the name of one of its values, that value's type and option."""


def members(function: Callable[..., Any]) -> Iterator[Member]:
    """Yield the options of a function's parameters, in order.

    A parameter that is a dataclass, or has `options_of` one as its default, has several.
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
    """Call a function with values of its `members`, by parameter and name."""
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
