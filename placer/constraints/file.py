"""Constraint files: YAML or TOML that people write, and YAML that placer writes.

docs/constraints.md describes the schema.
"""

import os
import tomllib
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from placer.constraints.rules import ConstraintsFields, Kind, TableRule
from placer.errors import ProblemError
from placer.files import write_text
from placer.plan.shard import Memory
from placer.topology.file import SUFFIXES, Size

Names = Annotated[list[str], Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RuleEntry(_Strict):
    """What is asked of the tables that a key matches."""

    devices: Names | None = None
    tier: Memory | None = None
    forbid: list[Kind] = []


class ConstraintsFile(_Strict):
    """A constraints file."""

    tables: dict[str, RuleEntry] = {}
    together: list[Names] = []
    reserve: dict[str, Size] = {}


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


def read(path: str | os.PathLike[str]) -> ConstraintsFields:
    """Read constraints from a YAML or TOML file.

    Raises
    ------
    ProblemError
        If the file is missing or not YAML or TOML, or a field is unknown or of the wrong type;
        the message names the file, the field and the value.
    """
    source = Path(path)
    if source.suffix.lower() not in SUFFIXES:
        raise ProblemError(f"{source}: a constraints file ends in one of {', '.join(SUFFIXES)}")
    is_toml = source.suffix.lower() == ".toml"
    try:
        text = source.read_text(encoding="utf-8")
        raw: Any = tomllib.loads(text) if is_toml else yaml.load(text, _Loader)
    except OSError as error:
        raise ProblemError(f"cannot read the constraints {source}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ProblemError(f"{source} is not a constraints file: {reason}") from error
    # All of a file, or all below one of its fields, may be commented out.
    raw = {} if raw is None else raw
    if not isinstance(raw, dict):
        raise ProblemError(
            f"{source} is not a constraints file: it must map tables, together and reserve, "
            f"but holds a {type(raw).__name__}"
        )
    try:
        entries = ConstraintsFile.model_validate({k: v for k, v in raw.items() if v is not None})
        return _constraints(entries)
    except ValidationError as error:
        raise ProblemError(f"{source}: {_explain(error)}") from error
    except ProblemError as error:
        raise ProblemError(f"{source}: {error}") from error


def write(constraints: ConstraintsFields, path: str | os.PathLike[str]) -> None:
    """Write constraints as YAML, atomically; `read` gives equal ones back."""
    if Path(path).suffix.lower() not in (".yaml", ".yml"):
        raise ProblemError(f"{path}: constraints are written as YAML; end the name in .yaml")
    write_text(path, dumps(constraints))


def dumps(constraints: ConstraintsFields) -> str:
    """Constraints as YAML text."""
    tables = {key: _entry(rule) for key, rule in constraints.tables}
    if len(tables) < len(constraints.tables):
        raise ProblemError("a key of constraints is given twice; a file has each key once")
    document = {
        "tables": tables,
        "together": [list(group) for group in constraints.together],
        "reserve": dict(constraints.reserve),
    }
    filled = {field: value for field, value in document.items() if value}
    return yaml.safe_dump(
        filled, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )


def _entry(rule: TableRule) -> dict[str, Any]:
    return {
        **({"devices": list(rule.devices)} if rule.devices is not None else {}),
        **({"tier": rule.tier} if rule.tier is not None else {}),
        **({"forbid": sorted(rule.forbid)} if rule.forbid else {}),
    }


def _constraints(entries: ConstraintsFile) -> ConstraintsFields:
    rules = []
    for key, entry in entries.tables.items():
        devices = None if entry.devices is None else tuple(entry.devices)
        try:
            rules.append((key, TableRule(devices, entry.tier, frozenset(entry.forbid))))
        except ProblemError as error:
            raise ProblemError(f"tables.{key}: {error}") from None
    return ConstraintsFields(
        tuple(rules),
        tuple(tuple(group) for group in entries.together),
        tuple(entries.reserve.items()),
    )


def _explain(error: ValidationError) -> str:
    """All that is wrong with a file, in one line."""
    problems = []
    for problem in error.errors(include_url=False):
        location = [part for part in problem["loc"] if part != "[key]"]
        where = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in location
        ).lstrip(".")
        reason = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            reason = "no such field; docs/constraints.md lists them"
        elif problem["type"] == "string_type" and not isinstance(problem["input"], list | dict):
            reason = f"{problem['input']!r} is no name; write it in quotes"
        else:
            reason = f"{problem['input']!r}: {reason}"
        problems.append(f"{where}: {reason}")
    return "; ".join(problems)
