"""The plan: which rectangle of which table lives where, and how its rows are read.

docs/plan-format.md describes the file; `placer.plan.io` reads and writes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from placer.errors import PlanError
from placer.tables import Table
from placer.topology.topology import Topology

if TYPE_CHECKING:
    import os

    import numpy as np
    import numpy.typing as npt

Memory = Literal["hbm", "dram"]
Lookup = Literal["device", "uva", "staged", "cached", "host"]
RowOrderKind = Literal["id", "profile"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """A rectangle of a table: a slice of ranks × a range of columns, on one tier.

    Attributes
    ----------
    table : str
        Name of the table.
    rows : (start, stop, step)
        A Python slice over ranks (over ids where the table's row order is ``id``).
    cols : (start, stop)
        Range of columns.
    devices : tuple of str
        GPUs that serve the lookups; more than one is a replica on each.
    memory : {"hbm", "dram"}
        Where the bytes are; ``dram`` is the memory of the serving GPU's host.
    lookup : {"device", "uva", "staged", "cached", "host"}
        How rows are read; see docs/plan-format.md.
    cache_rows : int
        Rows of the HBM cache of a ``cached`` shard.
    staging_rows : int
        Rows of HBM, on each serving GPU, for those cold rows of a ``staged`` or ``cached``
        shard that the steps in flight touch. What finds no room is read in place.
    buffer_bytes : int
        HBM that reading the shard needs besides its rows, on each serving GPU: the
        `staging_rows` with their state, the exchange buffers of its pooled output, and the
        integers that say where each lookup reads.
    """

    table: str
    rows: tuple[int, int, int]
    cols: tuple[int, int]
    devices: tuple[str, ...]
    memory: Memory
    lookup: Lookup
    cache_rows: int = 0
    staging_rows: int = 0
    buffer_bytes: int = 0

    @property
    def row_count(self) -> int:
        """Rows in the shard."""
        return len(range(*self.rows))

    @property
    def width(self) -> int:
        """Columns in the shard."""
        return self.cols[1] - self.cols[0]


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
    """Where the plan comes from."""

    problem_sha256: str = ""
    placer_version: str = ""
    created: str = ""
    profile: str = ""


@dataclass(frozen=True)
class Plan:
    """A placement of all tables of a model on a machine.

    Attributes
    ----------
    tables : tuple of Table
    topology : Topology
    shards : tuple of Shard
        Cover every row × column of every table exactly once, replicas aside.
    row_order : dict of table name to RowOrder
        Tables that are not listed have order ``id``.
    hot_ids : dict of table name to int64 array
        The ids that the row order lists, hottest first; saved beside the plan.
    batch_size : int
        Samples per GPU and step that the plan was made for.
    """

    tables: tuple[Table, ...]
    topology: Topology
    shards: tuple[Shard, ...]
    row_order: dict[str, RowOrder] = field(default_factory=dict)
    hot_ids: dict[str, "npt.NDArray[np.int64]"] = field(default_factory=dict, compare=False)
    batch_size: int = 1
    solver: SolverRecord = SolverRecord()
    provenance: Provenance = Provenance()

    @cached_property
    def tables_by_name(self) -> dict[str, Table]:
        """Tables by their name."""
        return {table.name: table for table in self.tables}

    @cached_property
    def shards_by_table(self) -> dict[str, tuple[Shard, ...]]:
        """Shards of each table, in the plan's order."""
        shards: dict[str, list[Shard]] = {table.name: [] for table in self.tables}
        for shard in self.shards:
            if shard.table not in shards:
                raise PlanError(
                    f"a shard is of table {shard.table!r}, which the plan does not list"
                )
            shards[shard.table].append(shard)
        return {name: tuple(parts) for name, parts in shards.items()}

    def order_of(self, table: str) -> RowOrder:
        """The row order of a table."""
        return self.row_order.get(table, RowOrder())

    def with_solver(self, **changes: Any) -> "Plan":
        """The same placement with other fields in the solver's record."""
        return replace(self, solver=replace(self.solver, **changes))

    @classmethod
    def load(cls, path: "str | os.PathLike[str]") -> "Plan":
        """Read a plan and the row order beside it.

        Raises
        ------
        PlanError
            If the file is truncated, breaks the format, is of a newer version, or its row
            order is missing or was altered.
        """
        from placer.plan.io import load

        return load(path)

    def save(self, path: "str | os.PathLike[str]") -> None:
        """Write the plan, and the row order beside it, atomically."""
        from placer.plan.io import save

        save(self, path)


def whole_table_shard(
    table: Table, device: str, memory: Memory, lookup: Lookup, rows: Sequence[int] | None = None
) -> Shard:
    """A shard of all columns of a table and of all its rows, or of a slice of them."""
    start, stop, step = rows if rows is not None else (0, table.rows, 1)
    return Shard(table.name, (start, stop, step), (0, table.dim), (device,), memory, lookup)
