"""The interface of cost models: shards and sharding options, cost curves and `CostModel`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from cost_models.cost_report import CostReport
from cost_models.schedule import ONE_PHASE, Schedule
from placer.errors import PlanMismatchError
from placer.plan.fields import Shard
from placer.plan.plan import Plan
from placer.problem import Problem
from placer.tables import ColdDType

if TYPE_CHECKING:
    from cost_models.arenas import ArenaCosts

Cold = Literal["staged", "uva", "host", "cached"]
"""How rows in DRAM are read; see docs/plan-format.md."""

ANY_SHARE = -1.0
"""Value of `ColdHome.drive_share` if shards may have any number of their rows on a drive."""

_REPLICA, _STAND_IN = -1, -2
"""Values of `TableShard.column_slice` that mark replicated rows and stand-ins."""

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


class ColdHome(NamedTuple):
    """The memory and element type of a sharding option's cold rows.

    `drive_share` of each shard's rows, the coldest, are on the host's drive unless they are in HBM.
    With `ANY_SHARE`, solvers choose a share for each shard. An empty `dtype` is the table's own.

    Examples
    --------
    >>> ColdHome(0.75).first_on_drive(1000)
    250
    """

    drive_share: float = 0.0
    dtype: ColdDType | Literal[""] = ""

    def first_on_drive(self, rows: int) -> int:
        """Return the first row on the drive, if `rows` rows are sorted hottest first."""
        return rows - round(rows * self.drive_share)


IN_DRAM = ColdHome()


class ShardingOption(NamedTuple):
    """One way to divide a table into shards; GPUs and rows in HBM are chosen separately.

    Every GPU has the hottest `replicated_rows` in HBM. If these are all rows, the table is
    data-parallel and has no other shards. The other ranks are divided into strided `row_slices`. If
    `blocked`, they are contiguous blocks of equal size: block i is on GPU `first_gpu` + i, and the
    next column slice is on the GPUs after these. Columns are divided by `column_widths`, which is
    empty if they stay together. Row and column slices form a grid of `shard_count` shards. `cold`
    is how rows in DRAM are read: ``cached`` shards have all rows there and a cache in HBM. `home`
    is where cold rows lie; only ``staged`` rows may have another home than `IN_DRAM`.

    Examples
    --------
    >>> option = ShardingOption(row_slices=2, column_widths=(64, 64))
    >>> option.shard_count
    4
    """

    row_slices: int = 1
    column_widths: tuple[int, ...] = ()
    replicated_rows: int = 0
    cold: Cold = "staged"
    blocked: bool = False
    first_gpu: int = 0
    home: ColdHome = IN_DRAM

    @property
    def shard_count(self) -> int:
        """Number of shards without replicas; meaningless if all rows are replicated."""
        return self.row_slices * max(1, len(self.column_widths))


WHOLE_TABLE = ShardingOption()


class TableShard(NamedTuple):
    """A shard of table number `table`: one row slice and one column slice of a sharding option.

    Examples
    --------
    >>> option = ShardingOption(row_slices=2, column_widths=(64, 64))
    >>> shard = TableShard(0, option, row_slice=1, column_slice=0)
    >>> shard.rows(1000), shard.columns(128)
    ((1, 1000, 2), (0, 64))
    """

    table: int
    option: ShardingOption = WHOLE_TABLE
    row_slice: int = 0
    column_slice: int = 0

    @classmethod
    def replica(cls, table: int, option: ShardingOption) -> "TableShard":
        """Return the shard of a table's replicated rows, which every GPU holds."""
        return cls(table, option, 0, _REPLICA)

    @property
    def is_replica(self) -> bool:
        """Whether the shard is the replicated rows, which every GPU holds."""
        return self.column_slice == _REPLICA

    def stand_in(self) -> "TableShard":
        """Return the shard whose curve bounds use for all ways to divide this shard.

        It is the shard itself, unless the host pools cold rows. Then its curve is a sum over rows:
        the host sends vectors even without cold rows, and only lookups of cold rows pay for
        pooling.
        """
        return self._replace(column_slice=_STAND_IN) if self.option.cold == "host" else self

    @property
    def is_stand_in(self) -> bool:
        """Whether `stand_in` made the shard for rows that the host pools."""
        return self.column_slice == _STAND_IN

    @property
    def home_gpu(self) -> int | None:
        """The number of the only GPU that may serve the shard; None if every GPU may."""
        option = self.option
        if not option.blocked or self.is_replica:
            return None
        return option.first_gpu + self.column_slice * option.row_slices + self.row_slice

    @property
    def cost_key(self) -> tuple[object, ...]:
        """A key that is equal for shards that cost the same on every GPU.

        A shard's cost depends on the number of other column slices, not on their widths. The cost
        of replicas does not depend on how the other rows are divided.
        """
        option = self.option
        if self.is_replica:
            return self.table, option.replicated_rows
        widths = option.column_widths
        width = widths[self.column_slice] if widths else self.column_slice
        return self.table, self.row_slice, width, len(widths), option._replace(column_widths=())

    def rows(self, table_rows: int) -> tuple[int, int, int]:
        """Return the shard's ranks as (start, stop, step), for a table of `table_rows` rows."""
        option = self.option
        if self.is_replica:
            return 0, option.replicated_rows, 1
        if option.blocked:
            block = -(-(table_rows - option.replicated_rows) // option.row_slices)
            start = min(table_rows, option.replicated_rows + self.row_slice * block)
            return start, min(table_rows, start + block), 1
        start = min(table_rows, option.replicated_rows + self.row_slice)
        return start, table_rows, option.row_slices

    def columns(self, dim: int) -> tuple[int, int]:
        """Return the shard's columns as (first, end), for a table of `dim` columns."""
        if self.is_replica or not self.option.column_widths:
            return 0, dim
        first = sum(self.option.column_widths[: self.column_slice])
        return first, first + self.option.column_widths[self.column_slice]


def shards_of(table: int, option: ShardingOption, table_rows: int) -> list[TableShard]:
    """Return all shards of a table of `table_rows` rows, without replicas, by column slice."""
    if table_rows and option.replicated_rows >= table_rows:
        return []
    return [
        TableShard(table, option, row_slice, column_slice)
        for column_slice in range(max(1, len(option.column_widths)))
        for row_slice in range(option.row_slices)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class CostCurve:
    """Cost of one shard of a table on one GPU, as a function of how many of its rows are in HBM.

    The shard's hottest rows are in HBM. The rest are in DRAM, or the coldest of them on a drive. A
    ``cached`` shard's cache holds the hottest rows: without a cache, rows are read in place, and a
    cache of all rows means that the rows are in HBM. All arrays have shape (m,), a value for each
    of `hot_rows`. Interpolate linearly between them: times are exact there, and bytes may be too
    low, because buffers are concave.

    If cold rows are ``staged`` or read in place (``uva``) over links much slower than HBM, `gpu_s`
    and `dram_s` fall and are convex. Curves of ``host`` and ``cached`` shards may jump between 0
    and 1 rows in HBM, and between all but one and all, so they have points there. `dram_s` and
    `dram_bytes` never rise. If more hot rows need fewer bytes of HBM, because they save buffers,
    they take no more time, except for the upkeep of a cache.

    `hot_rows` rise from 0 to all rows; replicas have one point with all rows. `gpu_s` is the GPU's
    time in all phases, and `dram_s` the time of the host's memory. `split_s` and `split_hbm_bytes`
    are added if some but not all rows are in HBM: for one more shard and a row map.
    `gpu_s_of_phases`, shape (phases, m), and `split_s_of_phases` are the same by phase of the
    model's schedule, by default one phase. If any share of rows may be on a drive, these numbers
    are for none there. Then `drive_s` is what `gpu_s` grows by if all rows from `hot_rows` on are
    on the drive. If `only_points`, times between the points are not linear, and solvers may only
    choose a number of `hot_rows`.
    """

    hot_rows: Int
    gpu_s: Float
    dram_s: Float
    hbm_bytes: Float
    dram_bytes: Float
    split_s: float = 0.0
    split_hbm_bytes: float = 0.0
    gpu_s_of_phases: Float | None = None
    split_s_of_phases: Float | None = None
    drive_s: Float | None = None
    drive_s_of_phases: Float | None = None
    only_points: bool = False

    @property
    def phase_s(self) -> Float:
        """Seconds of the GPU by phase of the schedule, shape (phases, m)."""
        return self.gpu_s[None] if self.gpu_s_of_phases is None else self.gpu_s_of_phases

    @property
    def split_phase_s(self) -> Float:
        """Seconds that a split adds, by phase of the schedule, shape (phases,)."""
        if self.split_s_of_phases is None:
            return np.array([self.split_s])
        return self.split_s_of_phases


@runtime_checkable
class CostModel(Protocol):
    """A model of the time and memory of placements; equal arguments give equal results.

    Inherit this class and override what your model knows. By default a step is one phase, GPUs do
    not slow each other, launches and arenas cost nothing, and dividing a table may save time.
    `uniform_splits` says that all shards of a table must have the same share of their rows in HBM.
    """

    name: str
    uniform_splits: bool = False

    def sharding_options(self, problem: Problem, table: int) -> tuple[ShardingOption, ...]:
        """Return the options that solvers search for table number `table`: the search space."""
        ...

    def sharding_overhead_s(self, problem: Problem) -> float | None:
        """Return the least GPU seconds that dividing a table adds; None if it may save time.

        These are seconds of the schedule's first chain. If a number is returned, bounds need
        finer options only for tables for which one GPU is not enough.

        Cost means seconds + price × bytes of HBM, without split costs, each shard on its best kind
        of GPU with its best number of hot rows. At any price, the shards of an option together cost
        at least this much more than the undivided shard with the same replicas and `cold`. The
        shards also take no less time of hosts, and no fewer bytes of HBM, or of HBM and DRAM.

        If the host pools cold rows, compare with the cheaper of the undivided shard and its
        `TableShard.stand_in` with any rows in HBM, not only the hottest: some of several shards may
        not need the host. For ``cached`` options the model promises no times, as each shard may
        choose between a cache, reads in place and HBM.
        """
        return None

    def schedule(self, problem: Problem, *, with_servers: bool = True) -> Schedule:
        """Return the phases of a step and their order; by default `ONE_PHASE`.

        `with_servers`: whether the machine's servers take part in exchanges. Servers without rows
        take no part.
        """
        return ONE_PHASE

    def launches(self, problem: Problem, gpu: int) -> Float:
        """Return the seconds that one arena adds on GPU number `gpu`, by phase, shape (phases,).

        An arena has all rows of one element type, width and optimizer that a GPU serves. One
        kernel looks them up, for any number of shards.
        """
        return np.zeros(len(self.schedule(problem).phases))

    def arena_costs(self, problem: Problem, gpu: int) -> "ArenaCosts | None":
        """Return other seconds of arenas on GPU number `gpu` than launches; None if there are none.

        They depend on how rows are read and are never negative. Bounds and the ratings of single
        moves in a search leave them out; costs of whole assignments and plans include them.
        """
        return None

    def evaluate(self, problem: Problem, plan: Plan) -> CostReport:
        """Return the cost of a whole plan, for reports and comparisons.

        Raises PlanMismatchError if the problem lacks a table or a device of the plan's shards, or
        the model does not know a kind of shard.
        """
        ...

    def cost_curve(self, problem: Problem, shard: TableShard, gpu: int) -> CostCurve:
        """Return the cost of a shard on GPU number `gpu`.

        The sum over a GPU's shards and replicas, plus `launches` and `arena_costs` of its arenas,
        equals `evaluate` of the same placement. The curve of replicas has one point.
        Tables that differ only in names have equal curves.
        """
        ...

    def with_buffers(
        self, problem: Problem, table: int, shard: Shard, *, returns_bags: bool
    ) -> Shard:
        """Return a shard of table number `table` with its `staging_rows` and `buffer_bytes` set.

        These are its HBM on each GPU besides rows, caches and maps. Set `returns_bags` for one of
        the table's shards with the same columns on a GPU: it includes their common pooled output.
        """
        ...


def require_match(problem: Problem, plan: Plan) -> None:
    """Raise PlanMismatchError if the problem lacks a table or device of the plan's shards."""
    numbers, tables = problem.profile.table_numbers, problem.profile.tables
    devices = problem.topology.gpus_by_id.keys() | problem.topology.hosts_by_id.keys()
    for name in dict.fromkeys(shard.table for shard in plan.shards):
        number, planned = numbers.get(name), plan.tables_by_name.get(name)
        if number is None or planned is None:
            owner = "profile" if number is None else "plan's list of tables"
            raise PlanMismatchError(f"the plan places table {name!r}, which the {owner} lacks")
        known = tables[number].table
        if (known.rows, known.dim) != (planned.rows, planned.dim):
            raise PlanMismatchError(
                f"table {name!r} is {planned.rows} × {planned.dim} in the plan "
                f"but {known.rows} × {known.dim} in the profile"
            )
    for device in sorted({device for shard in plan.shards for device in shard.devices} - devices):
        raise PlanMismatchError(
            f"the plan uses {device}, which the topology {problem.topology.name!r} lacks"
        )
