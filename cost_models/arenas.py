"""Arenas: the rows of one element type, optimizer and width that a GPU serves, and what they take.

One kernel of a GPU serves an arena, in however many shards, and rows that are staged or cached
share one row cache. Gradients of all replicated rows are added up at once. What that takes belongs
to no shard: it comes on top of what shards cost.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import add
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cost_models.base import CostModel
from cost_models.step_equation.loads import slice_load
from cost_models.step_equation.work import group_of, groups_of, host_pools
from placer.plan.plan import Plan
from placer.problem import Problem
from placer.tables import DType, OptimizerName, Table

Float = npt.NDArray[np.float64]

Arena = tuple[DType, OptimizerName, int]
"""Element type, optimizer and width of rows."""


class ArenaLoad(NamedTuple):
    """What a step of a GPU does in one arena, or in a shard of it."""

    lookups: float = 0.0  # Of a step, however their rows are read.
    cached_rows: int = 0  # Rows that are staged or cached, read by the step or not.
    pooled_lookups: float = 0.0  # Those of `lookups` in groups of which the host pools some rows.
    replicated: bool = False  # Whether other GPUs hold any of the rows too.

    def joined(self, other: "ArenaLoad") -> "ArenaLoad":
        """Return the sum of both, as one arena."""
        lookups, cached_rows, pooled_lookups = map(add, self[:3], other[:3])
        replicated = self.replicated or other.replicated
        return ArenaLoad(lookups, cached_rows, pooled_lookups, replicated)


class ArenaCosts(NamedTuple):
    """Seconds of each phase that arenas take besides their launches; of shape (phases,) each.

    None is negative.
    """

    cached_s: Float  # Of an arena with staged or cached rows.
    # Of each lookup there that may be of such a row: an executor makes room to look up as many rows
    # as the step has lookups in the arena, or as many as there are such rows if fewer.
    cached_lookup_s: Float
    # Of each lookup in an arena of which the host pools rows: it goes through all of them. Those of
    # the same group pay for themselves (`UnitCosts.pooled_lookup_s`), and not here.
    pooled_lookup_s: Float
    # Of a GPU that holds any replicated rows, however many: the collectives that add their
    # gradients up.
    replicas_s: Float

    def seconds(self, loads: Iterable[ArenaLoad]) -> Float:
        """Return what these arenas take together, shape (phases,)."""
        cached = located = pooled = replicated = 0.0
        for load in loads:
            if load.cached_rows:
                cached += 1.0
                located += min(load.lookups, load.cached_rows)
            if load.pooled_lookups:
                pooled += max(0.0, load.lookups - load.pooled_lookups)
            replicated = max(replicated, float(load.replicated))
        total: Float = (
            cached * self.cached_s
            + located * self.cached_lookup_s
            + pooled * self.pooled_lookup_s
            + replicated * self.replicas_s
        )
        return total


def arena_of(table: Table, width: int) -> Arena:
    """Return the arena of a shard of a table with so many columns."""
    return table.dtype, table.optimizer, width


Loads = Mapping[Arena, ArenaLoad]
"""What a step of one GPU does in each of its arenas."""


def arena_loads(problem: Problem, plan: Plan) -> list[dict[Arena, ArenaLoad]]:
    """Return the arenas of each GPU of a plan, by the GPU's number, and what a step does in them.

    Servers, after the GPUs, have none: they launch no kernels.
    """
    numbers = problem.topology.gpu_numbers
    pooled = {group for group, shards in groups_of(plan).items() if host_pools(shards)}
    # Many tables may be replicated on the same GPUs, whose loads are then summed once.
    by_devices: dict[tuple[str, ...], dict[Arena, ArenaLoad]] = defaultdict(dict)
    for shard in plan.shards:
        profile = problem.profile[shard.table]
        samples = problem.global_batch_size // len(shard.devices)
        step_lookups = samples * profile.table.lookups_per_sample
        lookups = slice_load(profile, shard.rows, step_lookups)[0]
        load = ArenaLoad(
            lookups,
            shard.row_count if shard.lookup in ("staged", "cached") else 0,
            lookups if group_of(shard) in pooled else 0.0,
            len(shard.devices) > 1,
        )
        arena, loads = arena_of(profile.table, shard.width), by_devices[shard.devices]
        loads[arena] = loads.get(arena, ArenaLoad()).joined(load)
    found: list[dict[Arena, ArenaLoad]] = [{} for _ in problem.topology.serving]
    for devices, loads in by_devices.items():
        for mine in (found[numbers[device]] for device in devices if device in numbers):
            for arena, load in loads.items():
                mine[arena] = mine.get(arena, ArenaLoad()).joined(load)
    return found


def joined_loads(some: Sequence[Loads], others: Sequence[Loads]) -> list[Loads]:
    """Return the arenas of each GPU that has both."""
    return [
        one or other
        if not (one and other)
        else dict(other)
        | {arena: load.joined(other.get(arena, ArenaLoad())) for arena, load in one.items()}
        for one, other in zip(some, others, strict=True)
    ]


def times_by_arena(
    model: CostModel, problem: Problem, loads: Sequence[Loads]
) -> list[dict[Arena, Float]]:
    """Return seconds of each phase that each arena takes of each GPU, of shape (phases,).

    What a GPU takes once for all replicated rows is shared alike by the arenas that have some.
    """
    times: list[dict[Arena, Float]] = []
    for gpu, arenas in enumerate(loads):
        if not arenas:
            times.append({})
            continue
        launches_s, costs = model.launches(problem, gpu), model.arena_costs(problem, gpu)
        own_s = dict.fromkeys(arenas, launches_s)
        if costs is not None:
            holders = sum(load.replicated for load in arenas.values())
            for arena, load in arenas.items():
                own_s[arena] = launches_s + costs.seconds([load._replace(replicated=False)])
                if load.replicated:
                    own_s[arena] = own_s[arena] + costs.replicas_s / holders
        times.append(own_s)
    return times


def tables_by_arena(problem: Problem, plan: Plan) -> dict[Arena, npt.NDArray[np.bool_]]:
    """Return which tables are on each GPU with rows of each arena, of shape (tables, GPUs)."""
    numbers, tables = problem.topology.gpu_numbers, problem.profile.table_numbers
    shape = len(tables), len(problem.topology.serving)
    members: dict[Arena, npt.NDArray[np.bool_]] = defaultdict(lambda: np.zeros(shape, dtype=bool))
    for shard in plan.shards:
        arena = arena_of(problem.profile[shard.table].table, shard.width)
        gpus = [numbers[device] for device in shard.devices if device in numbers]
        members[arena][tables[shard.table], gpus] = True
    return members


def added_up(times: Sequence[Mapping[Arena, Float]], phases: int) -> Float:
    """Return seconds of each phase of all arenas of each GPU, shape (phases, GPUs)."""
    nothing = np.zeros(phases)
    return np.stack([sum(of_gpu.values(), nothing) for of_gpu in times], axis=1)
