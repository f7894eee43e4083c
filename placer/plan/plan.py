"""The plan: which rectangle of which table lives where, and how its rows are read.

docs/plan-format.md describes the file; `placer.plan.file`, below, reads and writes it.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from placer.data.files.stores import uri_of
from placer.dense import Dense
from placer.errors import PlanError
from placer.growing.options import Growing
from placer.pipeline import Pipeline
from placer.plan.fields import Provenance, RowOrder, SolverRecord
from placer.plan.shard import Memory, Shard
from placer.summary import Summarized
from placer.tables import ColdDType, DType, Table
from placer.topology.topology import Topology
from placer.units import format_bytes, format_seconds


@dataclass(frozen=True, repr=False)
class Plan(Summarized):
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
    widths : tuple of str
        Types that cold rows might have had besides their table's; see `placer.Problem`.
    pipeline : {"look-ahead", "serial"}
        How steps follow one another.
    dense : DenseLayers, MeasuredDense or None
        What is trained beside the embeddings; None where nobody says.
    growing : dict of table name to Growing
        Tables whose ids may be any int64: rows are given to them as they are read.
    exchange_dtype : {"float32", "bfloat16", "float16"}
        Type in which pooled rows and their gradients travel between processes.

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
        """Return the part of the plan that is about some of its tables, in this order."""
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
        """Read a plan and the row order beside it, on this machine or at a URI of a store.

        Raises PlanError if the file is truncated, breaks the format, is of a newer version, or its
        row order is missing or was altered.
        """
        if uri_of(path) and isinstance(path, str):
            from placer.data.files.staging import Staging

            with Staging() as staging:
                return cls.load(staging.input(path))
        from placer.plan import file  # not above: pydantic and safetensors load slowly

        return cls(**file.read(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan, and the row order beside it, atomically.

        A profile that the plan names by an absolute path, as solvers do where it was loaded from a
        folder, is named as seen from the plan's own folder: both can then move together. On a
        store, to which the path may be a URI, the plan is sent after its row order.
        """
        uri = uri_of(path)
        if uri and isinstance(path, str):
            from placer.data.files.staging import Staging

            with Staging() as staging:
                return self.save(staging.output(path))
        from placer.plan import file

        named = self.provenance.profile
        if not uri and Path(named).is_absolute():
            named = os.path.relpath(named, Path(path).resolve().parent)
        provenance = replace(self.provenance, profile=named)
        file.write(replace(self, provenance=provenance), path)
