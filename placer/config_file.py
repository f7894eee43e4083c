"""Read YAML, TOML and JSON files that people write, and explain errors in them.

One of them is `placer.toml`, which has default options of commands. The order of precedence is: the
command line; the environment variable ``PLACER_COMMAND_OPTION``; the command's table in
`placer.toml`; the keys above all tables there; the built-in default.
"""

import json
import os
import tomllib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from placer.errors import PlacerError, did_you_mean
from placer.files.atomic import write_text
from placer.files.reading import LimitError, read_json, read_limited

SUFFIXES = (".yaml", ".yml", ".toml", ".json")
MOST_BYTES = 4 << 20
"""Largest file that is read."""
MOST_VALUES = 500_000
"""Most values of a file. Values of an alias count at each use."""
MOST_DEPTH = 64
"""Deepest nesting of YAML."""

_FastLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class StrictModel(BaseModel):
    """A part of a file. Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="wrap")
    @classmethod
    def _is_no_truth(cls, value: Any, taken: ValidatorFunctionWrapHandler) -> Any:
        """Refuse true and false for numbers, which would be 1 and 0."""
        field = taken(value)
        if isinstance(value, bool) and not isinstance(field, bool):
            raise ValueError("it must be a number")
        return field


_Model = TypeVar("_Model", bound=StrictModel)


class _Loader(_FastLoader):  # type: ignore[misc]
    """A YAML loader that refuses duplicate keys, instead of silently taking the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                words = f"{key.value!r} is written twice"
                raise yaml.constructor.ConstructorError(None, None, words, key.start_mark)
            seen.add(key.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


def _values(source: Path) -> Any:
    """Return the parsed content of a file."""
    suffix = source.suffix.lower()
    if suffix == ".json":
        return read_json(source, MOST_BYTES)
    text = read_limited(source, MOST_BYTES).decode("utf-8-sig")
    if suffix == ".toml":
        return tomllib.loads(text)
    _check_size(text)
    return yaml.load(text, _Loader)


def _check_size(text: str) -> None:
    """Refuse YAML that is nested too deeply, or too large with aliases expanded.

    Loaders build nested values by recursion, so deep nesting would crash them.
    """
    sizes: dict[str | None, int] = {}
    begun: list[Any] = [[None, 0]]  # Open collections: anchor, and number of values so far.
    for event in yaml.parse(text, _FastLoader):
        anchor, size = getattr(event, "anchor", None), 1
        if isinstance(event, yaml.CollectionStartEvent):
            begun.append([anchor, 1])
            if len(begun) > MOST_DEPTH + 1:
                raise LimitError(f"its values are nested deeper than {MOST_DEPTH} levels")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = begun.pop()
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == above for above, _ in begun):
                raise LimitError("a value is a part of itself")
            size = sizes.get(anchor, 0)
        elif not isinstance(event, yaml.ScalarEvent):
            continue
        sizes[anchor] = size
        begun[-1][1] += size
        if begun[-1][1] > MOST_VALUES:
            raise LimitError(f"it has more than {MOST_VALUES} values, its aliases written out")


def read_mapping(
    path: str | os.PathLike[str],
    kind: str,
    error_type: type[PlacerError],
    fields: Sequence[str] = ("names",),
) -> dict[str, Any]:
    """Return the keys and values of a file of a kind (``topology``, ``constraints``), unchecked.

    Raises `error_type` if the file is missing, or is not a mapping in YAML, TOML or JSON. The
    message lists `fields`, the fields that the file may have.
    """
    source = Path(path)
    if source.suffix.lower() not in SUFFIXES:
        raise error_type(f"{source}: a {kind} file ends in one of {', '.join(SUFFIXES)}")
    try:
        raw = _values(source)
    except OSError as error:
        reason = error.strerror or str(error)
        raise error_type(f"cannot read the {kind} {source}: {reason}") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        reason = "its values are nested too deeply" if deep else " ".join(str(error).split())
        raise error_type(f"{source} is not a {kind} file: {reason}") from error
    raw = {} if raw is None else raw  # A file may have only comments.
    if not isinstance(raw, dict):
        must = f"it must map {', '.join(fields)} to their values, but holds a {type(raw).__name__}"
        raise error_type(f"{source} is not a {kind} file: {must}")
    return raw


def read_file(
    path: str | os.PathLike[str], model: type[_Model], kind: str, error_type: type[PlacerError]
) -> _Model:
    """Read a file of a kind (``topology``, ``constraints``), which docs/KIND.md describes.

    Raises `error_type` if the file is missing or not YAML, TOML or JSON, or if a field is unknown,
    missing or of the wrong type. The message names the file, the field and the value.
    """
    raw = read_mapping(path, kind, error_type, list(model.model_fields))
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise error_type(f"{path}: {_explain(error, kind)}") from error


def write_yaml(
    path: str | os.PathLike[str], text: str, kind: str, error_type: type[PlacerError]
) -> None:
    """Write YAML text atomically to a file with a YAML ending."""
    if Path(path).suffix.lower() not in (".yaml", ".yml"):
        raise error_type(f"{path}: {kind} files are written as YAML; end the name in .yaml")
    write_text(path, text)


def _explain(error: ValidationError, kind: str) -> str:
    """Return the errors of a file in one line, at most five of them."""
    problems, found = [], error.errors(include_url=False)
    for problem in found[:5]:
        parts = (part for part in problem["loc"] if part != "[key]")
        named = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
        where = "".join(named).lstrip(".")
        reason = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            reason = f"no such field; docs/{kind}.md lists them"
        elif problem["type"] == "string_type" and not isinstance(problem["input"], list | dict):
            reason = f"{_shown(problem['input'])} is no name; write it in quotes"
        elif problem["type"] != "missing":
            reason = f"{_shown(problem['input'])}: {reason}"
        problems.append(f"{where}: {reason}")
    if len(found) > len(problems):
        problems.append(f"and {len(found) - len(problems)} more")
    return "; ".join(problems)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:160]} … {text[-30:]}"


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
    # A copy of a file on a store is named by its URI. TOML writes text as JSON, but for \x7f.
    text = json.dumps(getattr(value, "uri", "") or str(value), ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")
