"""A plan as its processes hold it: which rows of which columns are served where, and how.

A *part* is what one process serves of one shard within one column slice: rows that are read
in one way from one place. Everything that the simulator counts, it counts for each part. A
*module* is what a process holds alone, or together with the same others; it resolves its own
row caches, as a `PlacedEmbeddings` of the executor does.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from placer.errors import PlanMismatchError
from placer.executor.distributed.placement.devices import holders_of, ranks_of_devices
from placer.executor.distributed.placement.division import ColumnSlice, Target, divide
from placer.executor.distributed.placement.row_slices import RowSlice
from placer.plan.plan import Plan
from placer.plan.shard import Lookup, Shard
from placer.plan.verify import violations
from placer.tables import OptimizerName, Table


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of some columns of a table that one process serves in one way.

    Attributes
    ----------
    table, shard : int
        Number in the plan's `tables` and `shards`.
    cols : (start, stop)
    rows : (start, stop, step)
        A slice of the table's ranks.
    device : str
        The GPU, or the host, that serves them.
    process : int
    module : int
        Number among all processes' modules.
    arena : int
        Number among all modules' arenas. Parts of one arena share their row cache.
    replicated : bool
        Whether other processes hold the same rows.
    lookup : str
    staging_rows, cache_rows : int
        Entries of HBM that the part adds to its row cache.
    weight_bytes, row_bytes : int
        Of a row: its weights, and these with the optimizer state.
    leads_shard : bool
        Whether no part before it is of the same shard on the same device.
    slot : int
        First slot of its rows among the arena's pooled ones; −1 for other parts.
    """

    table: int
    shard: int
    cols: tuple[int, int]
    rows: tuple[int, int, int]
    device: str
    process: int
    module: int
    arena: int
    replicated: bool
    lookup: Lookup
    staging_rows: int
    cache_rows: int
    weight_bytes: int
    row_bytes: int
    leads_shard: bool
    slot: int = -1

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return len(range(*self.rows))

    @property
    def is_pooled(self) -> bool:
        """Whether copies of its rows are brought to HBM."""
        return self.lookup in ("staged", "cached")


@dataclass(frozen=True, slots=True)
class Module:
    """What a process holds alone, or with the same others.

    Attributes
    ----------
    process : int
    holders : tuple of int
        Processes that hold the same.
    sources : tuple of int
        Processes whose samples it serves.
    """

    process: int
    holders: tuple[int, ...]
    sources: tuple[int, ...]

    @property
    def replicated(self) -> bool:
        """Whether other processes hold the same rows."""
        return len(self.holders) > 1


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """A plan over processes.

    Attributes
    ----------
    plan : Plan
    processes : int
    column_slices : mapping of table name to tuple of ColumnSlice
        Who holds which rows of which columns.
    modules : tuple of Module
    parts : tuple of Part
        Without those that have no rows.
    row_caches : mapping of arena to tuple of int
        The pooled parts of each arena that has any, in the order of their slots.
    """

    plan: Plan
    processes: int
    column_slices: Mapping[str, tuple[ColumnSlice, ...]]
    modules: tuple[Module, ...]
    parts: tuple[Part, ...]
    row_caches: Mapping[int, tuple[int, ...]]


def arrange(
    plan: Plan, processes: int | None = None, optimizer: OptimizerName | None = None
) -> Arrangement:
    """A plan over so many processes, by default one for each GPU, as the executor spreads it.

    Parameters
    ----------
    processes : int, optional
        From 1 to the number of GPUs; see `placer.executor.distributed.ShardedEmbeddings`.
    optimizer : str, optional
        Of all tables; by default each table's own.

    Raises
    ------
    PlanMismatchError
        If the plan is unsound, memory aside, or the number of processes is out of range.
    """
    broken = [found.message for found in violations(plan) if found.rule != "capacity"]
    if broken:
        raise PlanMismatchError(f"the plan cannot be simulated: {'; '.join(broken[:5])}")
    gpus = len(plan.topology.gpus)
    world = gpus if processes is None else processes
    if not 1 <= world <= gpus:
        raise PlanMismatchError(
            f"{world} processes cannot share {gpus} GPUs; take from 1 to {gpus} of them"
        )
    ranks = ranks_of_devices(plan.topology, world)
    optimizers = {table.name: optimizer or table.optimizer for table in plan.tables}
    column_slices = divide(plan, ranks, optimizers)
    builder = _Builder(plan, world, ranks, optimizers)
    held: dict[tuple[int, tuple[int, ...]], list[Target]] = defaultdict(list)
    for table_columns in column_slices.values():
        for columns in table_columns:
            for target in columns.targets:
                for process in target.holders:
                    held[process, target.holders].append(target)
    for (process, holders), targets in sorted(
        held.items(), key=lambda item: (item[0][0], len(item[0][1]) > 1, item[0][1])
    ):
        builder.add(process, holders, targets)
    return Arrangement(
        plan, world, column_slices, tuple(builder.modules), tuple(builder.parts), builder.row_caches
    )


_ORDER: dict[Lookup, int] = {"device": 0, "staged": 1, "cached": 2, "uva": 3, "host": 4}


class _Builder:
    """Lays modules out one after the other, in the order in which the executor does."""

    def __init__(
        self,
        plan: Plan,
        world: int,
        ranks: Mapping[str, int],
        optimizers: Mapping[str, OptimizerName],
    ) -> None:
        self.plan, self.world, self.ranks, self.optimizers = plan, world, ranks, optimizers
        self.modules: list[Module] = []
        self.parts: list[Part] = []
        self.row_caches: dict[int, tuple[int, ...]] = {}
        self._arenas = 0
        self._led: set[tuple[int, str]] = set()
        self._tables = {table.name: number for number, table in enumerate(plan.tables)}
        self._shards: dict[str, list[tuple[int, Shard]]] = defaultdict(list)
        for number, shard in enumerate(plan.shards):
            self._shards[shard.table].append((number, shard))

    def add(self, process: int, holders: tuple[int, ...], targets: list[Target]) -> None:
        sources = tuple(s for s in range(self.world) if targets[0].holder_for(s) == process)
        module = len(self.modules)
        self.modules.append(Module(process, holders, sources))
        arenas: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for target in targets:
            optimizer = self.optimizers[target.table.name]
            pieces = [
                (number, shard, rows)
                for number, shard in self._shards[target.table.name]
                if holders_of(shard, dict(self.ranks)) == holders
                for rows in _met(shard, target)
            ]
            # One process takes the plan as it is, with the edges of shards that have no rows.
            cut_by = [shard for _, shard, _ in pieces]
            if self.world == 1:
                cut_by = [shard for _, shard in self._shards[target.table.name]]
            inner = {edge for shard in cut_by for edge in shard.cols if _within(edge, target)}
            edges = sorted({*target.cols, *inner})
            row_cut = optimizer == "rowwise_adagrad" and (len(edges) > 2 or bool(target.peers))
            for cols in pairwise(edges):
                key = (target.table.dtype, cols[1] - cols[0], optimizer, row_cut)
                mine = arenas[key]
                for number, shard, rows in pieces:
                    if shard.cols[0] <= cols[0] and cols[1] <= shard.cols[1]:
                        mine.append(len(self.parts))
                        self.parts.append(
                            self._part(target.table, number, shard, cols, rows, process, module)
                        )
        for members in arenas.values():
            self._finish_arena(members)

    def _part(
        self,
        table: Table,
        number: int,
        shard: Shard,
        cols: tuple[int, int],
        rows: RowSlice,
        process: int,
        module: int,
    ) -> Part:
        share = rows.count / shard.row_count
        device = next(device for device in shard.devices if self.ranks[device] == process)
        leads = (number, device) not in self._led
        self._led.add((number, device))
        width, state = cols[1] - cols[0], _state_bytes(table, self.optimizers[table.name], cols)
        weight_bytes = table.weight_bytes_per_row(width)
        staging, cache = shard.staging_rows, shard.cache_rows
        if rows.count != shard.row_count:
            staging = min(rows.count, int(staging * share))
            cache = max(int(cache > 0), min(rows.count, int(cache * share)))
        return Part(
            self._tables[table.name],
            number,
            cols,
            (rows.start, rows.stop, rows.step),
            device,
            process,
            module,
            -1,
            self.modules[module].replicated,
            shard.lookup,
            staging,
            cache,
            weight_bytes,
            weight_bytes + state,
            leads,
        )

    def _finish_arena(self, members: list[int]) -> None:
        """Number an arena, and the slots of its pooled parts: rows read alike lie side by side."""
        arena = self._arenas
        self._arenas += 1
        ordered = sorted(members, key=lambda at: self._order(self.parts[at]))
        pooled, slot = [], 0
        for at in ordered:
            part = self.parts[at]
            first = -1
            if part.is_pooled:
                pooled.append(at)
                first, slot = slot, slot + part.row_count
            self.parts[at] = replace(part, arena=arena, slot=first)
        if pooled:
            self.row_caches[arena] = tuple(pooled)

    def _order(self, part: Part) -> tuple[int, str]:
        home = ""
        if self.world == 1:  # One process may hold rows of several hosts.
            gpu = self.plan.topology.gpus_by_id.get(part.device)
            home = part.device if gpu is None or part.lookup == "device" else gpu.host
        return _ORDER[part.lookup], home


def _met(shard: Shard, target: Target) -> Iterator[RowSlice]:
    """The rows of a shard within a target, if they share columns: slices of ranks."""
    if max(shard.cols[0], target.cols[0]) >= min(shard.cols[1], target.cols[1]):
        return
    if not shard.row_count:
        return
    for part in target.parts:
        met = part.meet(RowSlice(*shard.rows))
        if met is not None:
            yield met


def _within(edge: int, target: Target) -> bool:
    return target.cols[0] < edge < target.cols[1]


def _state_bytes(table: Table, optimizer: OptimizerName, cols: tuple[int, int]) -> int:
    return replace(table, optimizer=optimizer).state_bytes_per_row(cols[1] - cols[0])
