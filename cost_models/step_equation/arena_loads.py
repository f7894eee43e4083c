"""Which arenas a plan's GPUs have, what a step does in them, and how long that takes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from cost_models.arenas import Arena, ArenaLoad, arena_of
from cost_models.base import CostModel, Float
from cost_models.step_equation.slice_load import slice_load
from cost_models.step_equation.work import group_of, groups_of, host_pools
from placer.plan.plan import Plan
from placer.problem import Problem

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
