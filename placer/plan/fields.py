"""The fields of a plan, as its file holds them: below both the file and `placer.Plan`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from placer.dense import Dense
from placer.pipeline import Pipeline
from placer.plan.shard import Shard
from placer.tables import Table
from placer.topology.topology import Topology

RowOrderKind = Literal["id", "profile"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class RowOrder:
    """How a table's ranks map to ids.

    ``id``: rank = id. ``profile``: the ids listed in `file` (beside the plan, a
    safetensors file with one int64 tensor per table) come first, in that order; all other
    ids follow in id order.
    """

    kind: RowOrderKind = "id"
    file: str | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class SolverRecord:
    """Which solver made the plan and what it proved.

    `step_time_s` is the cost model's time of this plan, `bound_s` a proven lower limit of
    it over the solver's search space (None if nothing was proven).
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

    `ids_sha256` has, by table, the hash of how ids became rows (`Encoding.ids_sha256`): none where
    rows were counted directly.
    """

    problem_sha256: str = ""
    placer_version: str = ""
    created: str = ""
    profile: str = ""
    ids_sha256: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanFields:
    """What a plan file holds; see `placer.Plan`."""

    tables: tuple[Table, ...]
    topology: Topology
    shards: tuple[Shard, ...]
    row_order: dict[str, RowOrder] = field(default_factory=dict)
    hot_ids: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict, compare=False)
    batch_size: int = 1
    solver: SolverRecord = SolverRecord()
    provenance: Provenance = field(default_factory=Provenance)
    pipeline: Pipeline = "look-ahead"
    dense: Dense | None = None
