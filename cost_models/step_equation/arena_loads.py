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
    numbers = problem.topology.gpu_numbers
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
            len(shard.devices) > 1,
        )
        arena = arena_of(profile.table, shard.width)
        for number in (numbers[device] for device in shard.devices if device in numbers):
            found[number][arena] = found[number].get(arena, ArenaLoad()).joined(load)
    return found


def arena_times(model: CostModel, problem: Problem, plan: Plan) -> Float:
    """Seconds of each phase that arenas take of each GPU of a plan, shape (phases, GPUs)."""
    gpus = range(len(problem.topology.gpus))
    costs = [model.arena_costs(problem, gpu) for gpu in gpus]
    counts = _arena_counts(problem, plan)
    times = np.stack([counts[gpu] * model.launches(problem, gpu) for gpu in gpus], axis=1)
    if any(cost is not None for cost in costs):
        for gpu, (cost, loads) in enumerate(zip(costs, arena_loads(problem, plan), strict=True)):
            times[:, gpu] += 0.0 if cost is None else cost.seconds(loads.values())
    return times


def _arena_counts(problem: Problem, plan: Plan) -> list[int]:
    """How many arenas each GPU has."""
    tables = plan.tables_by_name
    served: dict[str, set[Arena]] = {gpu.id: set() for gpu in problem.topology.gpus}
    for shard in plan.shards:
        arena = arena_of(tables[shard.table], shard.width)
        for device in shard.devices:
            if device in served:
                served[device].add(arena)
    return [len(arenas) for arenas in served.values()]
