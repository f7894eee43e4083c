"""Costs of arenas: an arena has a GPU's rows of one element type, optimizer and width.

One kernel serves all shards of an arena, and its staged and cached rows share one row cache. One
collective adds up the gradients of all replicated rows. These costs belong to no single shard, so
they are added to the costs of shards.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import add
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cost_models.base import CostModel, Float
from cost_models.step_equation.loads import slice_load
from cost_models.step_equation.work import group_of, groups_of, host_pools
from placer.plan.plan import Plan
from placer.problem import Problem
from placer.tables import DType, OptimizerName, Table

Arena = tuple[DType, OptimizerName, int]
"""The element type, optimizer and width of an arena's rows."""


class ArenaLoad(NamedTuple):
    """The work of one step in one arena of a GPU, or in one shard."""

    lookups: float = 0.0  # Lookups of a step, in all kinds of rows.
    cached_rows: int = 0  # All staged or cached rows, read or not.
    pooled_lookups: float = 0.0  # Lookups in groups with rows that the host pools.
    replicated: bool = False  # Whether other GPUs have copies of any of the rows.

    def joined(self, other: "ArenaLoad") -> "ArenaLoad":
        """Return the work of both together, in one arena."""
        lookups, cached_rows, pooled_lookups = map(add, self[:3], other[:3])
        replicated = self.replicated or other.replicated
        return ArenaLoad(lookups, cached_rows, pooled_lookups, replicated)


class ArenaCosts(NamedTuple):
    """Seconds that arenas take besides launches, by phase: each field has shape (phases,).

    No value is negative.
    """

    cached_s: Float  # For an arena with staged or cached rows.
    # For each lookup there that may need such a row. The executor reserves as many places as the
    # step has lookups in the arena, but no more than the arena has staged and cached rows.
    cached_lookup_s: Float
    # For each lookup in an arena with rows that the host pools, as the host goes through all of
    # them. Lookups of the same group are paid by `UnitCosts.pooled_lookup_s` instead.
    pooled_lookup_s: Float
    # For a GPU with any number of replicated rows: the collectives that add up their
    # gradients.
    replicas_s: Float

    def seconds(self, loads: Iterable[ArenaLoad]) -> Float:
        """Return the seconds of these arenas together, shape (phases,)."""
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
    """Return the arena of a table's shard with `width` columns."""
    return table.dtype, table.optimizer, width


Loads = Mapping[Arena, ArenaLoad]
"""The work of one step in each arena of one GPU."""


def arena_loads(problem: Problem, plan: Plan) -> list[dict[Arena, ArenaLoad]]:
    """Return the work in each arena of each GPU of a plan, in the order of GPU numbers.

    Servers follow the GPUs and have no arenas, as they launch no kernels.
    """
    numbers = problem.topology.gpu_numbers
    pooled = {group for group, shards in groups_of(plan).items() if host_pools(shards)}
    # Many tables may be replicated on the same GPUs: sum their loads once for all these GPUs.
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
    """Return for each GPU the arenas of `some` and `others` together, with their work added."""
    return [
        dict(other)
        | {arena: load.joined(other.get(arena, ArenaLoad())) for arena, load in one.items()}
        for one, other in zip(some, others, strict=True)
    ]


def times_by_arena(
    model: CostModel, problem: Problem, loads: Sequence[Loads]
) -> list[dict[Arena, Float]]:
    """Return the seconds of each arena of each GPU, by phase, each of shape (phases,).

    Arenas with replicated rows share the GPU's one cost of replicas in equal parts.
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
    """Return for each arena which tables have rows in it on which GPU, of shape (tables, GPUs)."""
    numbers, tables = problem.topology.gpu_numbers, problem.profile.table_numbers
    shape = len(tables), len(problem.topology.serving)
    members: dict[Arena, npt.NDArray[np.bool_]] = defaultdict(lambda: np.zeros(shape, dtype=bool))
    for shard in plan.shards:
        arena = arena_of(problem.profile[shard.table].table, shard.width)
        gpus = [numbers[device] for device in shard.devices if device in numbers]
        members[arena][tables[shard.table], gpus] = True
    return members


def added_up(times: Sequence[Mapping[Arena, Float]], phases: int) -> Float:
    """Return the seconds of all arenas of each GPU together, shape (phases, GPUs)."""
    nothing = np.zeros(phases)
    return np.stack([sum(of_gpu.values(), nothing) for of_gpu in times], axis=1)
