"""Describe configurations and options for documentation, checks and the command line.

A configuration is a frozen dataclass whose fields are made by `knob`. The command line makes
options from these fields, and from parameters with an `Option` as their default.

Users set defaults in `placer.toml` and in environment variables. The order of precedence is: the
command line; the environment variable ``PLACER_COMMAND_OPTION``; the command's table in
`placer.toml`; the keys above all tables there; the built-in default.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, cast, get_args, get_origin, get_type_hints

from placer.errors import PlacerError, did_you_mean


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


FILE_NAME = "placer.toml"
FILE_VARIABLE = "PLACER_CONFIG"
"""Environment variable with the path of a file to read instead of `placer.toml`."""
OWN_VARIABLES = ("PLACER_CACHE", FILE_VARIABLE, "PLACER_DEBUG")
"""Environment variables of placer that belong to no option."""


class Key(NamedTuple):
    """A long flag's parameter, whether it takes several values, and whether it turns it off."""

    parameter: str
    several: bool = False
    negates: bool = False


def variable_of(*words: str) -> str:
    """Return the environment variable of a command's option.

    >>> variable_of("plan", "time-limit")
    'PLACER_PLAN_TIME_LIMIT'
    """
    return "_".join(("PLACER", *words)).replace("-", "_").upper()


def check_variables(environment: Mapping[str, str], of_options: Iterable[str]) -> None:
    """Refuse environment variables that begin with ``PLACER_`` but belong to no option.

    >>> check_variables({"PLACER_PLAN_HBMM": "8GiB"}, ["PLACER_PLAN_HBM"])
    Traceback (most recent call last):
    placer.errors.PlacerError: no option has the variable PLACER_PLAN_HBMM; did you mean \
PLACER_PLAN_HBM?
    """
    known = {*of_options, *OWN_VARIABLES}
    for name in sorted(environment):
        if name.startswith("PLACER_") and name not in known:
            more = did_you_mean(name, known) or "; it is PLACER_COMMAND_OPTION, or unset it"
            raise PlacerError(f"no option has the variable {name}{more}")


def default_options(
    commands: Mapping[str, Mapping[str, Key]], environment: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return the options in `placer.toml`, by command and parameter.

    Values are texts as on the command line, or lists of texts. `commands` has the keys of each
    command, by long flags without dashes. `FILE_VARIABLE` in `environment` may name another file.

    Raises `PlacerError` if a named file is missing, the file is invalid, or it has an unknown
    command or option.

    >>> default_options({"plan": {"topology": Key("topology")}}, {})
    {'plan': {}}
    """
    named = environment.get(FILE_VARIABLE)
    found: dict[str, dict[str, Any]] = {command: {} for command in commands}
    path = Path(named or FILE_NAME)
    if not named and not path.is_file():
        return found
    from placer.config_file import read_mapping  # Loads slowly, and few have such a file.

    values = read_mapping(path, "defaults", PlacerError)
    every = {name for known in commands.values() for name in known}
    tables = {name: value for name, value in values.items() if isinstance(value, dict)}
    for_all = {name: value for name, value in values.items() if name not in tables}
    for name in sorted(for_all.keys() - every):
        raise PlacerError(f"{path}: no command has an option --{name}{did_you_mean(name, every)}")
    for command in sorted(tables.keys() - commands.keys()):
        more = did_you_mean(command, commands) or f"; they are {', '.join(commands)}"
        raise PlacerError(f"{path}: [{command}] is no command{more}")
    for command, known in commands.items():
        own = tables.get(command, {})
        for name, value in own.items():
            if name not in known:
                more = did_you_mean(name, known)
                raise PlacerError(f"{path}: placer {command} has no option --{name}{more}")
            if isinstance(value, dict):
                raise PlacerError(f"{path}: --{name} of placer {command} must be one value")
        for name, value in (for_all | own).items():
            if name in known and value is not None:  # YAML and JSON have an empty value.
                found[command][known[name].parameter] = _given(known[name], value)
        for table in (for_all, own):
            _refuse_both(path, known, table)
    return found


def _refuse_both(path: Path, known: Mapping[str, Key], table: Mapping[str, Any]) -> None:
    """Raise PlacerError if a table of the file has a flag and the one that turns it off."""
    for off in (name for name in table if name in known and known[name].negates):
        for on in table:
            if known.get(on) == known[off]._replace(negates=False):
                raise PlacerError(f"{path}: {on} and {off} are one option: give one of them")


def _given(key: Key, value: Any) -> Any:
    """Convert a value in the file to the text or texts of the command line."""
    texts = [
        str(one).lower() if isinstance(one, bool) else str(one)
        for one in (value if isinstance(value, list) else [value])
    ]
    if key.several:
        return texts
    return negated(",".join(texts)) if key.negates else ",".join(texts)


def negated(text: str) -> str:
    """Return the opposite of a yes or no in any spelling; other texts stay unchanged."""
    words = {"true": "false", "1": "0", "yes": "no", "on": "off", "t": "f", "y": "n"}
    return (words | {no: yes for yes, no in words.items()}).get(text.strip().lower(), text)


def config_text(command: str, values: Mapping[str, Any]) -> str:
    """Return a command's options as text for `placer.toml`. Unset options are comments.

    >>> print(config_text("plan", {"hbm": "8GiB", "cache": True, "dim": None}))
    [plan]
    hbm = "8GiB"
    cache = true
    # dim =
    """
    lines = [f"[{command}]"]
    for name, value in values.items():
        lines.append(f"# {name} =" if value in (None, (), []) else f"{name} = {toml_value(value)}")
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    # TOML writes text as JSON, but for \x7f.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
