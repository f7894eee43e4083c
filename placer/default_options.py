"""Options that a person gives once: `placer.toml` and variables of the environment.

An option of the command line comes first, then ``PLACER_COMMAND_OPTION`` of the environment, then
the command's own table in `placer.toml`, then what stands above all tables there, then the default.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from placer.errors import PlacerError, did_you_mean

FILE_NAME = "placer.toml"
FILE_VARIABLE = "PLACER_CONFIG"
"""The variable that names another file than `placer.toml` of the working folder."""
OWN_VARIABLES = ("PLACER_CACHE", FILE_VARIABLE, "PLACER_DEBUG")
"""Variables that are read and belong to no option."""


class Key(NamedTuple):
    """The parameter that a long flag sets; if it may be given again, and if it turns it off."""

    parameter: str
    several: bool = False
    negates: bool = False


def variable_of(*words: str) -> str:
    """Return the variable of a command's option, by the names of both.

    >>> variable_of("plan", "time-limit")
    'PLACER_PLAN_TIME_LIMIT'
    """
    return "_".join(("PLACER", *words)).replace("-", "_").upper()


def check_variables(environment: Mapping[str, str], of_options: Iterable[str]) -> None:
    """Refuse variables that look like an option's and are none.

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
    """Return what `placer.toml` says of the options of each command, by command and parameter.

    Values are texts, as on the command line, and lists of these. `commands` have the options of
    each command by their long flags without dashes; `FILE_VARIABLE` of the environment may name
    another file.

    Raises a `PlacerError` if the file is named and missing, is no TOML, or has an option that no
    command has, or a command has not.

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
            if name in known:
                found[command][known[name].parameter] = _given(known[name], value)
    return found


def _given(key: Key, value: Any) -> Any:
    """Return a value of a file as the command line would have it."""
    texts = [
        str(one).lower() if isinstance(one, bool) else str(one)
        for one in (value if isinstance(value, list) else [value])
    ]
    if key.several:
        return texts
    return negated(",".join(texts)) if key.negates else ",".join(texts)


def negated(text: str) -> str:
    """Return the value of an option whose negation has a value; what is neither stays as it is."""
    words = {"true": "false", "1": "0", "yes": "no", "on": "off", "t": "f", "y": "n"}
    return (words | {no: yes for yes, no in words.items()}).get(text.strip().lower(), text)


def config_text(command: str, values: Mapping[str, Any]) -> str:
    """Write a command's options as a `placer.toml`; those not given are comments.

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
    """Write a value as TOML does."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    # A copy of what is on a store goes by its URI. JSON's text is TOML's, save the character 127.
    text = json.dumps(getattr(value, "uri", "") or str(value), ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")
