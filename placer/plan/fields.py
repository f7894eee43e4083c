"""Describe the parts of a plan beside its tables: shards, row orders, records of its origin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from annotated_types import Interval, MinLen

from placer.tables import ColdDType, Count, Table

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


Memory = Literal["hbm", "dram", "ssd"]
Lookup = Literal["device", "uva", "staged", "cached", "host"]
Place = Annotated[int, Interval(ge=-(1 << 63), lt=1 << 63)]
"""A row or a column. `placer.plan.verify` checks that it is in its table."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A rectangle of a table: a slice of ranks × a range of columns, on one tier.

    Attributes
    ----------
    table : str
        Name of the table.
    rows : (start, stop, step)
        A Python slice of row ranks. With row order ``id``, row ranks are ids.
    cols : (start, stop)
        Range of columns.
    devices : tuple of str
        GPUs that serve the lookups, or a host without GPUs. With several, each has a replica.
    memory : {"hbm", "dram", "ssd"}
        Tier of the rows. ``dram`` is the memory of the serving GPU's host. ``ssd`` is its drive,
        from which rows are ``staged`` or ``cached``. A host without GPUs serves its own ``dram``,
        by lookup ``host``.
    lookup : {"device", "uva", "staged", "cached", "host"}
        Lookup kind: how rows are read; see docs/plan-format.md.
    cache_rows : int
        Rows of the HBM cache of a ``cached`` shard.
    staging_rows : int
        Rows of HBM, on each serving GPU, for cold rows of a ``staged`` or ``cached`` shard that
        the steps in flight read. Rows without room there are read in place.
    buffer_bytes : int
        Other HBM that reading the shard needs on each serving GPU: the `staging_rows` with their
        state, exchange buffers of its pooled output, and integers that say where each lookup
        reads.
    dtype : {"float32", "float16", "bfloat16", "int8"} or None
        Type of ``staged`` and ``cached`` rows in DRAM or on SSD; by default their table's.
        Copies in HBM always have the table's type.

    Examples
    --------
    Every second row of 1,000, all 16 columns, in the memory of one GPU:

    >>> shard = Shard("C3", (0, 1000, 2), (0, 16), ("gpu:0",), "hbm", "device")
    >>> shard.row_count, shard.width
    (500, 16)
    """

    table: str
    rows: tuple[Place, Place, Place]
    cols: tuple[Place, Place]
    devices: Annotated[tuple[str, ...], MinLen(1)]
    memory: Memory
    lookup: Lookup
    cache_rows: Count = 0
    staging_rows: Count = 0
    buffer_bytes: Count = 0
    dtype: ColdDType | None = None

    @property
    def row_count(self) -> int:
        """Rows in the shard."""
        return len(range(*self.rows))

    @property
    def width(self) -> int:
        """Columns in the shard."""
        return self.cols[1] - self.cols[0]


def whole_table_shard(
    table: Table, device: str, memory: Memory, lookup: Lookup, rows: Sequence[int] | None = None
) -> Shard:
    """Return a shard with all columns of a table, and all its rows or a slice of rows."""
    start, stop, step = rows if rows is not None else (0, table.rows, 1)
    return Shard(table.name, (start, stop, step), (0, table.dim), (device,), memory, lookup)


Pipeline = Literal["look-ahead", "serial"]
"""``look-ahead`` copies rows of the next batch while a batch trains, and exchanges ids of
the batch after it; ``serial`` begins a step after the previous step has ended."""

PIPELINES: tuple[Pipeline, ...] = get_args(Pipeline)
