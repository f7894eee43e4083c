"""Describe the parts of a plan beside its tables and shards."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

RowOrderKind = Literal["id", "profile"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class RowOrder:
    """How a table's ranks map to ids.

    ``id``: rank = id. ``profile``: the ids that `file` lists come first, in that order, and all
    other ids follow in id order. `file` is a safetensors file beside the plan, with one int64
    tensor per table.
    """

    kind: RowOrderKind = "id"
    file: str | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class SolverRecord:
    """Which solver made the plan and what it proved.

    `step_time_s` is the cost model's step time of this plan. `bound_s` is a proven lower limit of
    it over the solver's search space, or None if nothing was proven.
    """

    name: str = "unknown"
    status: Literal["optimal", "feasible"] = "feasible"
    step_time_s: float | None = None
    bound_s: float | None = None
    seconds: float = 0.0
    seed: int = 0
    cost_model: str = ""
    search_space: str = ""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the plan comes from.

    `ids_sha256` has, by table, the hash of the mapping of ids to rows (`Encoding.ids_sha256`). It
    is empty if rows were counted directly.
    """

    problem_sha256: str = ""
    placer_version: str = ""
    created: str = ""
    profile: str = ""
    ids_sha256: Mapping[str, str] = field(default_factory=dict)
