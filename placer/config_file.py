"""Read YAML, TOML and JSON files that people write, and explain errors in them."""

import os
import tomllib
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, TypeVar

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
from placer.files.reading import LimitError, kind_of, read_json, read_limited

SUFFIXES = (".yaml", ".yml", ".toml", ".json")
MOST_BYTES = 4 << 20
"""Largest file that is read."""
MOST_VALUES = 500_000
"""Most values of a file. Values of an alias count at each use."""
MOST_DEPTH = 64
"""Deepest nesting of YAML."""

_PAGES = {"schema": "data"}
"""The page of docs/ on a kind of file, if it has another name."""
_FORMS = {
    "dict_type": "it must map names to values",
    "list_type": "it must be a list, in [ ]",
    "model_type": "it must map fields to values, in { }",
}
"""What a value must be, by the type of pydantic's error."""

_FastLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class StrictModel(BaseModel):
    """A part of a file. Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="wrap")
    @classmethod
    def _refuse_truth_values(cls, value: Any, taken: ValidatorFunctionWrapHandler) -> Any:
        """Refuse true and false where a number is expected; pydantic takes them as 1 and 0."""
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
    suffix = source.suffix.lower()
    if suffix == ".json":
        return read_json(source, MOST_BYTES)
    text = read_limited(source, MOST_BYTES).decode("utf-8-sig")
    if not text.strip():
        raise ValueError("it is empty")
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
        reason = reason.replace('in "<unicode string>", ', "in ")  # YAML's name of a text.
        raise error_type(f"{source} is not a {kind} file: {reason}") from error
    raw = {} if raw is None else raw  # A file may have only comments.
    if not isinstance(raw, dict):
        must = f"it must map {', '.join(fields)} to their values, but holds a {type(raw).__name__}"
        raise error_type(f"{source} is not a {kind} file: {must}")
    found = kind_of(raw)
    if found not in ("", f"a {kind}"):
        raise error_type(f"{source} is {found}, and no {kind} file")
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
        raise error_type(f"{path}: {_explain(error, kind, model)}") from error


def write_yaml(
    path: str | os.PathLike[str], text: str, kind: str, error_type: type[PlacerError]
) -> None:
    """Write YAML text atomically to a file with a YAML ending."""
    if Path(path).suffix.lower() not in (".yaml", ".yml"):
        raise error_type(f"{path}: {kind} files are written as YAML; end the name in .yaml")
    write_text(path, text)


def _explain(error: ValidationError, kind: str, model: type[BaseModel]) -> str:
    """Return the errors of a file in one line, at most five of them."""
    problems, found = [], error.errors(include_url=False)
    schema = model.model_json_schema()
    parts_of_file = schema, *schema.get("$defs", {}).values()
    fields = {name for part in parts_of_file for name in part.get("properties", ())}
    for problem in found[:5]:
        parts = [part for part in problem["loc"] if part != "[key]"]
        named = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
        where = "".join(named).lstrip(".")
        reason = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            more = did_you_mean(str(parts[-1]), fields - {parts[-1]})
            reason = f"no such field; docs/{_PAGES.get(kind, kind)}.md lists them{more}"
        elif problem["type"] == "string_type" and not isinstance(problem["input"], list | dict):
            reason = f"{_shown(problem['input'])} is no name; write it in quotes"
        elif problem["type"] != "missing":
            reason = f"{_shown(problem['input'])}: {_FORMS.get(problem['type'], reason)}"
        problems.append(f"{where}: {reason}")
    if len(found) > len(problems):
        problems.append(f"and {len(found) - len(problems)} more")
    return "; ".join(problems)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:160]} … {text[-30:]}"
