"""Which arenas a plan's GPUs have, what a step does in them, and how long that takes."""

import numpy as np

from cost_models.arenas import Arena, ArenaLoad, arena_of
from cost_models.base import CostModel, Float
from cost_models.step_equation.slice_load import slice_load
from cost_models.step_equation.work import group_of, groups_of, host_pools
from placer.plan.plan import Plan
from placer.problem import Problem


def arena_loads(problem: Problem, plan: Plan) -> list[dict[Arena, ArenaLoad]]:
    """The arenas of each GPU of a plan, by the GPU's number, and what a step does in them."""
    numbers = {gpu.id: number for number, gpu in enumerate(problem.topology.gpus)}
    profiles = {profile.name: profile for profile in problem.profile}
    pooled = {group for group, shards in groups_of(plan).items() if host_pools(shards)}
    found: list[dict[Arena, ArenaLoad]] = [{} for _ in numbers]
    for shard in plan.shards:
        profile = profiles[shard.table]
        samples = problem.global_batch_size // len(shard.devices)
        step_lookups = samples * profile.table.lookups_per_sample
        lookups = slice_load(profile, shard.rows, step_lookups)[0]
        load = ArenaLoad(
            lookups,
            shard.row_count if shard.lookup in ("staged", "cached") else 0,
            lookups if group_of(shard) in pooled else 0.0,
        )
        arena = arena_of(profile.table, shard.width)
        for number in (numbers[device] for device in shard.devices if device in numbers):
            found[number][arena] = found[number].get(arena, ArenaLoad()).joined(load)
    return found


def arena_times(model: CostModel, problem: Problem, plan: Plan) -> Float:
    """Seconds of each phase that arenas take of each GPU of a plan, shape (phases, GPUs)."""
    times = []
    for gpu, loads in enumerate(arena_loads(problem, plan)):
        costs = model.arena_costs(problem, gpu)
        taken_s = len(loads) * model.launches(problem, gpu)
        times.append(taken_s if costs is None else taken_s + costs.seconds(loads.values()))
    return np.stack(times, axis=1)
