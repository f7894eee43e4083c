"""YAML, TOML and JSON files that people write: how they are read, and what is wrong with one."""

import os
import tomllib
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from placer.errors import PlacerError
from placer.files import write_text

SUFFIXES = (".yaml", ".yml", ".toml", ".json")


class StrictModel(BaseModel):
    """A part of a file, in which a field that is not known is an error."""

    model_config = ConfigDict(extra="forbid")


_Model = TypeVar("_Model", bound=StrictModel)


class _Loader(yaml.SafeLoader):
    """YAML in which a key that is written twice is an error, not silently the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is written twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_file(
    path: str | os.PathLike[str], model: type[_Model], kind: str, error_type: type[PlacerError]
) -> _Model:
    """A file of a kind (``topology``, ``constraints``), which docs/KIND.md describes.

    Raises
    ------
    PlacerError
        Of `error_type`, if the file is missing, not YAML, TOML or JSON, or a field is unknown,
        missing or of the wrong type; the message names the file, the field and the value.
    """
    source = Path(path)
    if source.suffix.lower() not in SUFFIXES:
        raise error_type(f"{source}: a {kind} file ends in one of {', '.join(SUFFIXES)}")
    is_toml = source.suffix.lower() == ".toml"  # JSON is YAML, too.
    try:
        text = source.read_text(encoding="utf-8")
        raw: Any = tomllib.loads(text) if is_toml else yaml.load(text, _Loader)
    except OSError as error:
        raise error_type(f"cannot read the {kind} {source}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise error_type(f"{source} is not a {kind} file: {reason}") from error
    raw = {} if raw is None else raw  # All of a file may be commented out.
    if not isinstance(raw, dict):
        fields = list(model.model_fields)
        raise error_type(
            f"{source} is not a {kind} file: it must map {', '.join(fields)} to their values, "
            f"but holds a {type(raw).__name__}"
        )
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise error_type(f"{source}: {_explain(error, kind)}") from error


def write_yaml(
    path: str | os.PathLike[str], text: str, kind: str, error_type: type[PlacerError]
) -> None:
    """Write YAML text, atomically; the file's name has to say that it is YAML."""
    if Path(path).suffix.lower() not in (".yaml", ".yml"):
        raise error_type(f"{path}: {kind} files are written as YAML; end the name in .yaml")
    write_text(path, text)


def _explain(error: ValidationError, kind: str) -> str:
    """All that is wrong with a file, in one line."""
    problems = []
    for problem in error.errors(include_url=False):
        location = [part for part in problem["loc"] if part != "[key]"]
        where = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in location
        ).lstrip(".")
        reason = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            reason = f"no such field; docs/{kind}.md lists them"
        elif problem["type"] == "string_type" and not isinstance(problem["input"], list | dict):
            reason = f"{problem['input']!r} is no name; write it in quotes"
        elif problem["type"] != "missing":
            reason = f"{problem['input']!r}: {reason}"
        problems.append(f"{where}: {reason}")
    return "; ".join(problems)
