"""Divide a plan over processes: which rows and columns each process serves, and how.

A *part* is one process's rows of one shard within one column slice, read in one way from one place.
The simulator counts everything by part. A *module* has the tables that a process holds alone, or
that the same set of processes holds. It resolves its own row caches, as a `PlacedEmbeddings` of the
executor does.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from placer.errors import PlanMismatchError
from placer.executor.distributed.channels import LocalPlan, local_plan, shards_by_holders
from placer.executor.distributed.division import Target, divide, ranks_of_devices, servers_of
from placer.executor.distributed.table_routes import TableRoutes, table_routes
from placer.executor.memory.layout import (
    ArenaKey,
    ArenaShard,
    SlicedColumns,
    SlotRange,
    slice_columns,
    slot_range,
)
from placer.plan.fields import Lookup
from placer.plan.plan import Plan
from placer.plan.verify import violations


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of some columns of a table that one process serves in one way from one place."""

    # Numbers in the plan's `tables` and `shards`.
    table: int
    shard: int
    cols: tuple[int, int]
    rows: tuple[int, int, int]  # A slice of the table's ranks.
    device: str  # The GPU or host that serves the rows.
    process: int
    module: int  # Number among all processes' modules.
    arena: int  # Number among all modules' arenas. Parts of an arena share a row cache.
    replicated: bool  # Whether other processes hold the same rows.
    lookup: Lookup
    # Bytes of a row: weights alone, and weights with optimizer state.
    weight_bytes: int
    row_bytes: int
    slots: SlotRange | None = None  # Slots in the arena's row cache, if it is staged or cached.

    @property
    def uses_row_cache(self) -> bool:
        """Whether its rows are copied to HBM when they are read."""
        return self.slots is not None


@dataclass(frozen=True, slots=True)
class Module:
    """Tables that a process holds alone, or together with the same other processes."""

    process: int
    holders: tuple[int, ...]  # Processes that hold these tables.
    sources: tuple[int, ...]  # Processes whose samples it serves.

    @property
    def replicated(self) -> bool:
        """Whether other processes hold the same rows."""
        return len(self.holders) > 1


@dataclass(frozen=True, slots=True, eq=False)
class Arrangement:
    """A plan divided over processes."""

    plan: Plan
    processes: int  # Those that train, then one for each serving host without GPUs.
    trainers: int
    routes: Mapping[str, TableRoutes]  # Holders of rows and columns, by table.
    modules: tuple[Module, ...]
    parts: tuple[Part, ...]  # Without parts that have no rows.
    parts_of: Mapping[int, Sequence[int]]  # Numbers of each table's parts, if it has any.
    # For each arena with a row cache: the parts that use it, in the order of their slots.
    row_caches: Mapping[int, tuple[int, ...]]

    def ends(self, samples: int) -> list[int]:
        """Return the first sample of each process, and the end. Servers get no samples."""
        trainers = self.trainers
        return [samples * min(one, trainers) // trainers for one in range(self.processes + 1)]


def arrange(plan: Plan, processes: int | None = None) -> Arrangement:
    """Divide a plan over processes as the executor does, by default with one for each GPU.

    Each host without GPUs that serves shards gets another process, unless there is only one
    process.
    """
    faults = [violation.message for violation in violations(plan) if violation.rule != "capacity"]
    if faults:
        raise PlanMismatchError(f"the plan cannot be simulated: {'; '.join(faults[:5])}")
    gpus = len(plan.topology.gpus)
    trainers = gpus if processes is None else processes
    if not 1 <= trainers <= gpus:
        raise PlanMismatchError(
            f"{trainers} processes cannot share {gpus} GPUs; take from 1 to {gpus} of them"
        )
    servers = () if processes == 1 else servers_of(plan)
    if servers and trainers < gpus:
        raise PlanMismatchError(
            f"{', '.join(servers)} without a GPU serves rows, which takes one process for each of "
            f"the {gpus} GPUs, or 1 for all; {trainers} are too few"
        )
    world = trainers + len(servers)
    ranks = ranks_of_devices(plan.topology, world, servers)
    optimizers = {table.name: table.optimizer for table in plan.tables}
    column_slices = divide(plan, ranks, optimizers)
    held: dict[tuple[int, tuple[int, ...]], list[Target]] = defaultdict(list)
    for columns in chain.from_iterable(column_slices.values()):
        for target in columns.targets:
            for process in target.holders:
                held[process, target.holders].append(target)
    shards = shards_by_holders(plan, ranks)
    builder = _Builder(plan, ranks)
    for process, holders in sorted(held, key=lambda key: (key[0], len(key[1]) > 1, key[1])):
        targets = held[process, holders]
        sources = tuple(s for s in range(world) if targets[0].holder_for(s) == process)
        module = Module(process, holders, sources)
        if world == 1:  # One process holds the whole plan.
            origins = [(n, range(*shard.rows)) for n, shard in enumerate(plan.shards)]
            builder.add(module, LocalPlan(plan, tuple(origins)))
            continue
        own_gpus = [gpu for gpu in plan.topology.gpus if ranks[gpu.id] == process]
        local = local_plan(plan, targets, {}, shards, optimizers, own_gpus)
        builder.add(module, local, {target.name: target for target in targets})
    parts_of: dict[int, list[int]] = defaultdict(list)
    for number, part in enumerate(builder.parts):
        parts_of[part.table].append(number)
    return Arrangement(
        plan,
        world,
        trainers,
        table_routes(plan, column_slices, torch.device("cpu")),
        tuple(builder.modules),
        tuple(builder.parts),
        dict(parts_of),
        builder.row_caches,
    )


class _Builder:
    """Collects parts and modules, and numbers them and their arenas."""

    def __init__(self, plan: Plan, ranks: Mapping[str, int]) -> None:
        self.plan, self.ranks = plan, ranks
        self.modules: list[Module] = []
        self.parts: list[Part] = []
        self.row_caches: dict[int, tuple[int, ...]] = {}
        self._arenas = 0
        self._tables = {table.name: number for number, table in enumerate(plan.tables)}

    def add(
        self, module: Module, local: LocalPlan, targets: Mapping[str, Target] | None = None
    ) -> None:
        """Add a module with its local plan. Without targets, the tables are the plan's own."""
        self.modules.append(module)
        targets = targets or {}
        optimizers = {table.name: table.optimizer for table in local.plan.tables}
        sliced_elsewhere = [name for name, target in targets.items() if target.peers]
        arenas: dict[ArenaKey, list[tuple[ArenaShard, int]]] = defaultdict(list)
        for columns in slice_columns(local.plan, optimizers, sliced_elsewhere):
            members = arenas[columns.key]
            for part in columns.shards:
                if part.shard.row_count:
                    members.append((part, len(self.parts)))
                    target = targets.get(columns.table.name)
                    self.parts.append(self._part(module, columns, part, local, target))
        for members in arenas.values():
            cached, slot = [], 0
            for part, at in sorted(members, key=lambda member: member[0].order):
                slots = None
                if part.shard.lookup in ("staged", "cached"):
                    cached.append(at)
                    slots = slot_range(local.plan, part, slot)
                    slot = slots.stop
                self.parts[at] = replace(self.parts[at], arena=self._arenas, slots=slots)
            if cached:
                self.row_caches[self._arenas] = tuple(cached)
            self._arenas += 1

    def _part(
        self,
        module: Module,
        columns: SlicedColumns,
        part: ArenaShard,
        local: LocalPlan,
        target: Target | None,
    ) -> Part:
        table, name, first = columns.table, columns.table.name, 0
        if target is not None:
            name, first = target.table.name, target.cols[0]
        number, rows = local.origins[part.number]
        devices = self.plan.shards[number].devices
        device = next(device for device in devices if self.ranks[device] == module.process)
        start, stop = columns.cols
        weight_bytes = table.weight_bytes_per_row(stop - start)
        return Part(
            self._tables[name],
            number,
            (first + start, first + stop),
            (rows.start, rows.stop, rows.step),
            device,
            module.process,
            len(self.modules) - 1,
            -1,
            module.replicated,
            part.shard.lookup,
            weight_bytes,
            weight_bytes + table.state_bytes_per_row(stop - start),
        )
