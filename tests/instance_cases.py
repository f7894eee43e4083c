"""Random plans of small problems, with all that a plan may have, for the checker of instances."""

import random
from collections import Counter
from typing import Any

from plan_cases import roomy

from placer import Plan, Problem, Profile, Shard, Table, TableProfile
from placer.plan.fields import PIPELINES
from placer.plan.memory import with_buffers
from placer.profile.cdf import AccessCdf
from placer.tables import Feature

MACHINES = ("1xh100", "2xt4", "4xv100-16", "8xh100", "2x2xa100-40", "2x4xh100")
LOOKUPS = ("device", "device", "staged", "uva", "cached", "host")


def random_problem(rng: random.Random) -> Problem:
    """Two to four tables of all types, optimizers and poolings, on a machine with ample memory."""
    profiles = tuple(_table(rng, f"t{number}") for number in range(rng.randint(2, 4)))
    topology = roomy(rng.choice(MACHINES))
    return Problem(
        Profile(profiles),
        topology,
        rng.choice([16, 512, 4096]),
        pipeline=rng.choice(PIPELINES),
    )


def _table(rng: random.Random, name: str) -> TableProfile:
    rows, exponent = rng.choice([1, 7, 300, 20_000, 5_000_000]), rng.uniform(0.5, 1.3)
    features = tuple(
        Feature(
            f"{name}_{number}",
            rng.uniform(1, 30),
            rng.choice([0.0, 0.4, 1.0]),
            rng.choice(["sum", "mean", "max", "none"]),
        )
        for number in range(rng.randint(1, 3))
    )
    table = Table(
        name,
        rows,
        rng.choice([4, 16, 96, 256]),
        rng.choice(["float32", "float16", "bfloat16"]),
        rng.choice(["sgd", "adagrad", "rowwise_adagrad", "adam"]),
        features,
    )
    return TableProfile(table, AccessCdf.zipf(rows, exponent), zipf_exponent=exponent)


def random_plan(rng: random.Random, problem: Problem) -> Plan:
    """A sound plan: columns and rows divided, hottest rows replicated, every lookup kind."""
    shards: list[Shard] = []
    for profile in problem.profile:
        shards += _shards(rng, problem, profile)
    return plan_of(problem, shards)


def plan_of(problem: Problem, shards: list[Shard]) -> Plan:
    """The plan of these shards, with their buffers."""
    profiles = {profile.name: profile for profile in problem.profile}
    seen: Counter[tuple[Any, ...]] = Counter()
    buffered = []
    for shard in shards:
        group = (shard.table, shard.cols, shard.devices)
        seen[group] += 1
        samples = problem.global_batch_size // len(shard.devices)
        profile, first = profiles[shard.table], seen[group] == 1
        buffered.append(with_buffers(profile, shard, samples=samples, returns_bags=first))
    return Plan(
        tuple(profiles[name].table for name in profiles),
        problem.topology,
        tuple(buffered),
        batch_size=problem.batch_size,
        pipeline=problem.pipeline,
    )


def _shards(rng: random.Random, problem: Problem, profile: TableProfile) -> list[Shard]:
    table, gpus = profile.table, [gpu.id for gpu in problem.topology.gpus]
    hosts = [host.id for host in problem.topology.hosts]
    cuts = sorted(rng.sample(range(1, table.dim), rng.choice([0, 0, 1, 2])))
    shards: list[Shard] = []
    for cols in zip([0, *cuts], [*cuts, table.dim], strict=True):
        first = 0
        if len(gpus) > 1 and rng.random() < 0.3:
            first = rng.randint(0, table.rows)
            some = tuple(rng.sample(gpus, rng.randint(2, len(gpus))))
            shards.append(Shard(table.name, (0, first, 1), cols, some, "hbm", "device"))
        step = rng.choice([1, 1, 2, 3])
        for residue in range(step):
            start = min(first + residue, table.rows)
            size = len(range(start, table.rows, step))
            hot = rng.choice([0, size, rng.randint(0, size)])
            edge = min(table.rows, start + hot * step)
            for rows in ((start, edge, step), (edge, table.rows, step)):
                lookup = "device" if rows[0] == start and hot else rng.choice(LOOKUPS)
                count = len(range(*rows))
                if lookup == "cached" and not count:
                    lookup = "uva"
                served = rng.choice(hosts if lookup == "host" and rng.random() < 0.4 else gpus)
                shards.append(
                    Shard(
                        table.name,
                        rows,
                        cols,
                        (served,),
                        "hbm" if lookup == "device" else "dram",
                        lookup,
                        cache_rows=rng.randint(1, count) if lookup == "cached" else 0,
                    )
                )
    return shards
