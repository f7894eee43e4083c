"""What a cost model is asked and what it answers."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from cost_models.cost_report import CostReport
from cost_models.schedule import ONE_PHASE, Schedule
from placer.errors import PlanMismatchError
from placer.plan.plan import Plan
from placer.plan.shard import Shard
from placer.problem import Problem
from placer.tables import ColdDType

if TYPE_CHECKING:
    from cost_models.arenas import ArenaCosts

Cold = Literal["staged", "uva", "host", "cached"]
"""How rows in DRAM are read; see docs/plan-format.md."""

ANY_SHARE = -1.0
"""`ColdHome.drive_share` where shards may have any number of their rows on a drive."""

_REPLICA, _STAND_IN = -1, -2
"""`TableShard.column_slice` of the replicated rows, and of a stand-in."""

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


class ColdHome(NamedTuple):
    """Where the cold rows of a sharding option lie, and in which type; empty if their table's.

    `drive_share` of each shard's rows are on the host's drive: the coldest ones, but for those in
    HBM. `ANY_SHARE`: each shard has a share of its own, which solvers choose.

    Examples
    --------
    >>> ColdHome(0.75).first_on_drive(1000)
    250
    """

    drive_share: float = 0.0
    dtype: ColdDType | Literal[""] = ""

    def first_on_drive(self, rows: int) -> int:
        """Return the first row on the drive, of `rows` rows with the hottest first."""
        return rows - round(rows * self.drive_share)


IN_DRAM = ColdHome()


class ShardingOption(NamedTuple):
    """One way to divide a table into shards; GPUs and rows in HBM are chosen separately.

    The ranks that are not replicated are in `row_slices`: strided ones, or if `blocked` contiguous
    blocks of equally many rows, the i-th on GPU number `first_gpu` + i, and those of the next
    column slice on the GPUs behind. `column_widths` are empty if the columns stay together. Row
    slices and column slices together make a grid of `shard_count` shards. `replicated_rows` of the
    hottest rows are in the HBM of every GPU; if all rows are, the table is data-parallel, and there
    are no other shards. `cold` is how rows in DRAM are read: ``cached`` shards have all rows there
    and a cache in HBM. `home` is where cold rows lie; other than `IN_DRAM` only if ``staged``.

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
        """Number of shards, replicas aside; meaningless if all rows are replicated."""
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
        """Return the replicated rows of a table, as every GPU holds them."""
        return cls(table, option, 0, _REPLICA)

    @property
    def is_replica(self) -> bool:
        """Whether the shard is the replicated rows, which every GPU holds."""
        return self.column_slice == _REPLICA

    def stand_in(self) -> "TableShard":
        """Return the shard whose curve stands in bounds for all ways to divide this one.

        It is the shard itself, unless the host pools cold rows: then its curve is a sum over rows.
        The host sends vectors even of none, and lookups of rows in HBM pay nothing for others.
        """
        return self._replace(column_slice=_STAND_IN) if self.option.cold == "host" else self

    @property
    def is_stand_in(self) -> bool:
        """Whether the shard is one of `stand_in`."""
        return self.column_slice == _STAND_IN

    @property
    def home_gpu(self) -> int | None:
        """The number of the only GPU that may serve the shard; None if any may."""
        option = self.option
        if not option.blocked or self.is_replica:
            return None
        return option.first_gpu + self.column_slice * option.row_slices + self.row_slice

    @property
    def cost_key(self) -> tuple[object, ...]:
        """Equal for shards that cost the same on any GPU.

        Of other column slices, a shard's cost depends on their number alone; that of replicas does
        not depend on how the other rows are divided.
        """
        option = self.option
        if self.is_replica:
            return self.table, option.replicated_rows
        widths = option.column_widths
        width = widths[self.column_slice] if widths else self.column_slice
        return self.table, self.row_slice, width, len(widths), option._replace(column_widths=())

    def rows(self, table_rows: int) -> tuple[int, int, int]:
        """Return the ranks of the shard as a slice."""
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
        """Return the range of columns of the shard."""
        if self.is_replica or not self.option.column_widths:
            return 0, dim
        first = sum(self.option.column_widths[: self.column_slice])
        return first, first + self.option.column_widths[self.column_slice]


def shards_of(table: int, option: ShardingOption, table_rows: int) -> list[TableShard]:
    """Return a table's shards, column slice by column slice, for `table_rows` rows; no replicas."""
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

    The shard's hottest rows are in HBM and the rest in DRAM, or the coldest of them on a drive; of
    a ``cached`` shard, the cache holds the hottest rows, and no cache means rows read in place, a
    cache of all rows just rows in HBM. All arrays have shape (m,) over `hot_rows`, and linear in
    between, where times are exact and bytes may be understated: buffers are concave.

    Where cold rows are ``staged`` or read in place (``uva``), over links that are not nearly as
    fast as HBM, `gpu_s` and `dram_s` fall and are convex. Curves of ``host`` and ``cached`` shards
    may jump between none and one row in HBM, and between all but one and all, so they have
    points at each of these. Of every curve `dram_s` and `dram_bytes` do not rise, and where
    more rows take fewer bytes of HBM, as they save more buffers, they take no more time; but
    for the upkeep of a cache, which may grow with its rows.

    `hot_rows` rise from 0 to all rows; of replicas there are all. `gpu_s` is time of the GPU, all
    phases together, `dram_s` that of the host's memory, and bytes are in the memory of both.
    `split_s` and `split_hbm_bytes` are added between none and all rows in HBM: one more shard, a
    row map. `gpu_s_of_phases`, shape (phases, m), and `split_s_of_phases` say the same by phases of
    the model's schedule; by default there is one phase. Of options with any share of rows on a
    drive, all of this is with none there, and `drive_s`, or `drive_s_of_phases`, what `gpu_s` grows
    by if all rows from each of `hot_rows` on are there. If `only_points`, solvers may have no other
    numbers of rows in HBM than `hot_rows`, because times in between are not linear.
    """

    hot_rows: Int
    gpu_s: Float
    dram_s: Float
    hbm_bytes: Float
    dram_bytes: Float
    split_s: float
    split_hbm_bytes: float
    gpu_s_of_phases: Float | None = None
    split_s_of_phases: Float | None = None
    drive_s: Float | None = None
    drive_s_of_phases: Float | None = None
    only_points: bool = False

    @property
    def phase_s(self) -> Float:
        """`gpu_s` by phase, shape (phases, m)."""
        return self.gpu_s[None] if self.gpu_s_of_phases is None else self.gpu_s_of_phases

    @property
    def split_phase_s(self) -> Float:
        """`split_s` by phase, shape (phases,)."""
        if self.split_s_of_phases is None:
            return np.array([self.split_s])
        return self.split_s_of_phases


@runtime_checkable
class CostModel(Protocol):
    """Time and memory of placements. Stateless: the same question has the same answer.

    Inherit this class and override what your model knows. By default a step is one phase, GPUs do
    not slow each other, launches and arenas cost nothing, and dividing a table may cost anything.

    Attributes
    ----------
    name : str
    uniform_splits : bool
        Whether all shards of a table must have the same share of their rows in HBM.
    """

    name: str
    uniform_splits: bool = False

    def sharding_options(self, problem: Problem, table: int) -> tuple[ShardingOption, ...]:
        """Return the options of table number `table` that are searched: the search space."""
        ...

    def sharding_overhead_s(self, problem: Problem) -> float | None:
        """Return least GPU seconds that dividing a table adds; None if it may save time.

        Seconds of the schedule's main chain, which is its first.

        At any price of a byte of HBM, the shards of an option together, each on the kind of GPU
        that is best for it, cost at least this more than the one shard of the option that has
        the same replicas and the same `cold` but neither row nor column slices: seconds plus
        price × bytes, its rows in HBM as is best, split costs of both aside. Where the host
        pools cold rows, that is the less of what the one shard costs and what its
        `TableShard.stand_in` does with any rows in HBM, not only the hottest: of several
        shards, some may do without the host. The shards take as much time of hosts at least,
        and their fewest bytes in HBM, and in HBM and DRAM, are no fewer either. Bounds then
        need finer options only of tables for which one GPU is not enough.

        Nothing is promised of the times of ``cached`` options: of their shards one may be read
        through a cache, another in place, and a third be in HBM.
        """
        return None

    def schedule(self, problem: Problem) -> Schedule:
        """Return the phases of a step, and what they wait for; `ONE_PHASE` if there are none."""
        return ONE_PHASE

    def launches(self, problem: Problem, gpu: int) -> Float:
        """Return seconds of each phase that GPU number `gpu` takes for each arena, shape (phases,).

        An arena has all rows of one element type, width and optimizer that a GPU serves: one
        kernel looks them up, however many shards there are.
        """
        return np.zeros(len(self.schedule(problem).phases))

    def arena_costs(self, problem: Problem, gpu: int) -> "ArenaCosts | None":
        """Return what arenas of GPU number `gpu` take besides launches, by how their rows are read.

        None if nothing. Bounds leave it out, as it is never negative, and searches rate changes
        of a placement without it; whole assignments, and plans, have it.
        """
        return None

    def evaluate(self, problem: Problem, plan: Plan) -> CostReport:
        """Return the cost of a whole plan, as reports and comparisons show it.

        Raises PlanMismatchError if the plan's shards are of tables or on devices that the problem
        does not have, or of a kind that the model does not know.
        """
        ...

    def cost_curve(self, problem: Problem, shard: TableShard, gpu: int) -> CostCurve:
        """Return the cost of a shard on GPU number `gpu`.

        Summed over the shards of a GPU, and the replicas that every GPU holds, and with
        `launches` and `arena_costs` for each arena, it equals `evaluate` of the same placement.
        The curve of replicas has one point.
        """
        ...

    def with_buffers(
        self, problem: Problem, table: int, shard: Shard, *, returns_bags: bool
    ) -> Shard:
        """Return a shard of table number `table` with its `staging_rows` and `buffer_bytes`.

        They are what it takes of each GPU's HBM besides rows, caches and maps. `returns_bags`
        charges the pooled output of all of a table's shards with the same columns on a GPU to
        this one of them.
        """
        ...


def require_match(problem: Problem, plan: Plan) -> None:
    """Raise unless the problem has the tables and devices of all the plan's shards."""
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
