"""Rules of constraints: read them from YAML or TOML files, and write them as YAML.

docs/constraints.md describes the schema.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import yaml
from pydantic import Field, model_validator

from placer.config_file import StrictModel, read_file
from placer.errors import ProblemError
from placer.plan.fields import Memory
from placer.topology.file import Size, format_size

Kind = Literal[
    "row-wise", "column-wise", "replicated", "split", "staged", "uva", "host", "cached",
    "ssd", "narrow",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)

_DRAM_LOOKUPS = frozenset[Kind](("staged", "uva", "host", "cached"))


@dataclass(frozen=True, slots=True)
class TableRule:
    """A rule for one table. By default, it allows everything.

    Only `devices` may serve the table; a host stands for itself and all its GPUs. All rows have to
    be in `tier`; rows with copies in a cache count as rows in DRAM. The kinds of placement that
    `forbid` has are forbidden: see `KINDS` and docs/constraints.md.

    >>> TableRule(devices=("gpu:0",), forbid=frozenset({"row-wise"})).tier is None
    True
    """

    devices: tuple[str, ...] | None = None
    tier: Memory | None = None
    forbid: frozenset[Kind] = frozenset()

    def __post_init__(self) -> None:
        if self.devices is not None and not self.devices:
            raise ProblemError("a table's devices name no GPU that may serve it; name one")
        if self.tier not in (None, *get_args(Memory)):
            raise ProblemError(f"tier {self.tier!r} is none of {', '.join(get_args(Memory))}")
        for kind in self.forbid:
            if kind not in KINDS:
                raise ProblemError(f"cannot forbid {kind!r}; there are {', '.join(KINDS)}")
        if self.tier == "dram" and self.forbid >= _DRAM_LOOKUPS:
            raise ProblemError(
                "tier dram with staged, uva, host and cached forbidden leaves no way to read "
                "the rows; forbid fewer, or ask for tier hbm"
            )


if TYPE_CHECKING:
    from placer.constraints.constraints import Constraints

Names = Annotated[list[str], Field(min_length=1)]


class RuleEntry(StrictModel):
    """The rule for the tables that a key matches."""

    devices: Names | None = None
    tier: Memory | None = None
    forbid: list[Kind] = Field([])


class ConstraintsFile(StrictModel):
    """A constraints file."""

    tables: dict[str, RuleEntry] = Field({})
    together: list[Names] = Field([])
    reserve: dict[str, Size] = Field({})

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Drop fields without a value, so that everything below a field can be commented out."""
        return {name: value for name, value in fields.items() if value is not None}


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the fields of constraints from a YAML or TOML file; see `placer.Constraints.load`.

    Raises ProblemError if the file cannot be read, or a rule is invalid; see
    `placer.config_file.read_file`.
    """
    entries = read_file(path, ConstraintsFile, "constraints", ProblemError)
    rules = []
    for key, entry in entries.tables.items():
        devices = None if entry.devices is None else tuple(entry.devices)
        try:
            rules.append((key, TableRule(devices, entry.tier, frozenset(entry.forbid))))
        except ProblemError as error:
            raise ProblemError(f"{path}: tables.{key}: {error}") from None
    return {
        "tables": tuple(rules),
        "together": tuple(tuple(group) for group in entries.together),
        "reserve": tuple(entries.reserve.items()),
    }


def dumps(constraints: "Constraints") -> str:
    """Return constraints as YAML text."""
    tables = {key: _entry(rule) for key, rule in constraints.tables}
    if len(tables) < len(constraints.tables):
        raise ProblemError("a key of constraints is given twice; a file has each key once")
    document = {
        "tables": tables,
        "together": [list(group) for group in constraints.together],
        "reserve": {device: format_size(size) for device, size in constraints.reserve},
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
