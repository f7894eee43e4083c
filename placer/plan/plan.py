"""Describe a plan: the place of each shard, how its rows are read, and the ranks of ids.

docs/plan-format.md describes the file, which `placer.plan.file` reads and writes.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from placer.data.files.stores import COPY_THERE, here
from placer.dense import Dense
from placer.errors import PlanError, check_kinds
from placer.growing.options import Growing
from placer.plan.fields import Memory, Pipeline, Provenance, RowOrder, Shard, SolverRecord
from placer.tables import ColdDType, DType, Table
from placer.topology.topology import Topology
from placer.units import Summarized, format_bytes, format_seconds


@dataclass(frozen=True, repr=False)
class Plan(Summarized):
    """A placement of all tables of a model on a machine.

    The `shards` cover every row × column of every table exactly once, apart from replicas.
    `row_order` and `hot_ids` are by table. Tables without a row order have order ``id``. `hot_ids`
    are the ids that the row order lists, hottest first; they are saved beside the plan.
    `batch_size`, `pipeline`, `dense`, `widths`, `growing` and `exchange_dtype` are those of the
    `placer.Problem` that the plan solves.

    Examples
    --------
    >>> import tempfile
    >>> from placer import Shard, Table, Topology
    >>> shard = Shard("C3", (0, 1000, 1), (0, 16), ("gpu:0",), "hbm", "device")
    >>> plan = Plan((Table("C3", 1000, 16),), Topology.parse("1xh100"), (shard,))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plan.save(f"{folder}/plan.json")
    ...     Plan.load(f"{folder}/plan.json").shards_by_table["C3"] == (shard,)
    True
    """

    tables: tuple[Table, ...]
    topology: Topology
    shards: tuple[Shard, ...]
    row_order: dict[str, RowOrder] = field(default_factory=dict)
    hot_ids: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict, compare=False)
    batch_size: int = 1
    solver: SolverRecord = field(default_factory=SolverRecord)
    provenance: Provenance = field(default_factory=Provenance)
    pipeline: Pipeline = "look-ahead"
    dense: Dense | None = None
    widths: tuple[ColdDType, ...] = ()
    growing: dict[str, Growing] = field(default_factory=dict)
    exchange_dtype: DType = "float32"

    def __post_init__(self) -> None:
        check_kinds(topology=(self.topology, Topology))

    @cached_property
    def tables_by_name(self) -> dict[str, Table]:
        """Tables by name."""
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
        """Return the row order of a table."""
        return self.row_order.get(table, RowOrder())

    def summary(self) -> dict[str, str]:
        """See `Summarized`."""
        used: dict[Memory, int] = {"hbm": 0, "dram": 0}
        for shard in self.shards:
            row_bytes = self.tables_by_name[shard.table].bytes_per_row(shard.width, shard.dtype)
            held_bytes = shard.row_count * row_bytes * len(shard.devices)
            used[shard.memory] = used.get(shard.memory, 0) + held_bytes
        facts = {
            "tables": str(len(self.tables)),
            "shards": str(len(self.shards)),
            "GPUs": str(len(self.topology.gpus)),
            **{f"rows in {memory.upper()}": format_bytes(size) for memory, size in used.items()},
        }
        if self.solver.name:
            facts["solver"] = self.solver.name
        if self.solver.step_time_s is not None:
            facts["step"] = format_seconds(self.solver.step_time_s)
        return facts

    def of_tables(self, names: Iterable[str]) -> "Plan":
        """Return the plan of only these tables, in this order."""
        names = list(names)
        return replace(
            self,
            tables=tuple(self.tables_by_name[name] for name in names),
            shards=tuple(shard for name in names for shard in self.shards_by_table[name]),
            row_order={name: self.row_order[name] for name in names if name in self.row_order},
            hot_ids={name: self.hot_ids[name] for name in names if name in self.hot_ids},
            growing={name: self.growing[name] for name in names if name in self.growing},
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a plan and its row order.

        Raises PlanError if the file is truncated, breaks the format or has a newer version, or its
        row order is missing or was altered.
        """
        from placer.plan import file  # not above: pydantic and safetensors load slowly

        return cls(**file.read(here(path)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan and its row order atomically.

        If the plan names its profile by an absolute path, as solvers do, write the path relative to
        the plan's folder, so that both can move together.
        """
        from placer.plan import file

        path, named = here(path, COPY_THERE), self.provenance.profile
        if Path(named).is_absolute():
            named = os.path.relpath(named, Path(path).resolve().parent)
        provenance = replace(self.provenance, profile=named)
        file.write(replace(self, provenance=provenance), path)


Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """A row order: listed ids come first, and all others follow in id order."""

    listed: Int  # Listed ids by rank, shape (n,).
    ascending: Int  # The same ids, sorted, shape (n,).
    rank_of_ascending: Int  # The rank of each of them, shape (n,).

    @classmethod
    def of(cls, listed: npt.ArrayLike) -> "Ranks":
        """Return the row order that lists these ids."""
        ids = np.asarray(listed, dtype=np.int64)
        order = np.argsort(ids, kind="stable")
        return cls(ids, ids[order], order.astype(np.int64))

    @classmethod
    def in_plan(cls, plan: Plan, table: str) -> "Ranks":
        """Return the row order of a plan's table."""
        return cls.of(listed_ids(plan, table))

    def ranks(self, ids: Int) -> Int:
        """Return the row ranks of `ids`, listed or not, shape (n,)."""
        below = np.searchsorted(self.ascending, ids)
        ranks = ids + self.listed.size - below
        if self.listed.size:
            at = np.minimum(below, self.listed.size - 1)
            known = self.ascending[at] == ids
            ranks[known] = self.rank_of_ascending[at[known]]
        return ranks

    def offsets(self, ids: Int) -> Int:
        """Return rank − id for ids that are not listed, shape (n,)."""
        offset: Int = self.listed.size - np.searchsorted(self.ascending, ids)
        return offset.astype(np.int64)

    def ids(self, ranks: Int) -> Int:
        """Return the ids at `ranks`, listed or not, shape (n,)."""
        hot = ranks < self.listed.size
        ids = np.empty_like(ranks)
        ids[hot] = self.listed[ranks[hot]]
        ids[~hot] = self.unlisted_ids(ranks[~hot])
        return ids

    def unlisted_ids(self, ranks: npt.ArrayLike) -> Int:
        """Return the ids at `ranks`, which must all be ranks of unlisted ids, shape (n,)."""
        number = np.asarray(ranks, dtype=np.int64) - self.listed.size
        # Number of unlisted ids below each listed id.
        before = self.ascending - np.arange(self.listed.size)
        ids: Int = number + np.searchsorted(before, number, side="right")
        return ids.astype(np.int64)


def distinct(ids: Int) -> Int:
    """Return the distinct ids, ascending. Sorting is faster than hashing for millions of ids."""
    ascending = np.sort(ids)
    first = np.ones(ascending.size, dtype=bool)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    return ascending[first]


def listed_ids(plan: Plan, table: str) -> Int:
    """Return the ids that a table's row order lists, hottest first."""
    if plan.order_of(table).kind == "id":
        return np.zeros(0, dtype=np.int64)
    return plan.hot_ids[table]


def warm_members(plan: Plan, table: str, rows: tuple[int, int, int]) -> Int | None:
    """Return the members of a slice of ids that its cache begins with, hottest first.

    Members are numbered from 0. Returns None if the plan lists none: with a row order, the first
    members are the hottest.
    """
    if plan.order_of(table).kind != "id" or table not in plan.hot_ids:
        return None
    start, stop, step = rows
    ids = plan.hot_ids[table]
    within: Int = ids[(ids >= start) & (ids < stop) & ((ids - start) % step == 0)]
    return (within - start) // step


def knows_hot_rows(plan: Plan, table: str) -> bool:
    """Return whether a plan knows a table's hot rows, by its row order or by a list."""
    return plan.order_of(table).kind != "id" or table in plan.hot_ids
