"""Local search and annealing where DRAM has no room for all rows, and drives hold the others.

First, tables of slow GPUs get rows back from the drive as long as DRAM has room. Then annealing:
the compiled moves (`solvers.search.annealing`) count bytes of HBM alone, so that it is here. A
table of a slow GPU gets rows back from the drive, alone or beside one that gives some up; shards
change GPUs; and tables are sharded anew. Each change is filled exactly, and made only where it
fits.
"""

import math
import random
from collections.abc import Iterable, Iterator

from solvers.model.assignment import Assignment, Change
from solvers.model.clock import Clock
from solvers.model.instance import Instance, ShardingOption, TableShard
from solvers.search.resharding import Without

_HOTTEST, _COLDEST = 0.02, 2e-4
"""Shares of its objective by which a step may get worse in one change, at first and at last."""

_SLOW = 0.7
"""How often the slowest GPU's tables change, and not any GPU's."""

_USUAL = 0.8
"""How often a slow GPU's table gets rows back from the drive, and another one gives some up."""

_STEPS = (1, 2, 4)
"""By how many shares less on the drive a table is tried to have."""

_LEAST_GAIN = 1e-4
"""Share of its objective that a step has to gain for rows to be given back."""

_BATCH = 16
"""Changes after which temperature and time are looked at."""


def with_rows_back(assignment: Assignment, clock: Clock) -> Assignment:
    """Return the assignment with rows of slow GPUs' tables back in DRAM, while that helps."""
    best = assignment
    while not clock.spent:
        found = min(_with_rows_back(best), key=lambda one: one.key_s, default=best)
        if found.key_s >= best.key_s * (1 - _LEAST_GAIN):
            break
        best = found
    return best


def _with_rows_back(assignment: Assignment) -> Iterator[Assignment]:
    """Yield what fits of the slowest GPU's tables with fewer rows on the drive."""
    for shard in assignment.shards[next(iter(assignment.slow_gpus()))]:
        ways = _homes(assignment.instance, shard.table, shard.option)
        at = ways.index(shard.option) if shard.option in ways else 0
        for step in _STEPS:
            if step <= at:
                after = _with_options(assignment, {shard.table: ways[at - step]})
                if after is not None:
                    yield after


def anneal_drive_shares(assignment: Assignment, seed: int, clock: Clock) -> Assignment:
    """Return the best assignment that a random walk of changes meets."""
    rng, began_s = random.Random(seed), clock.left_s
    walk, best = assignment, assignment
    while not clock.spent:
        left = max(0.0, clock.left_s / began_s) if began_s > 0 else 0.0
        temperature = _COLDEST * (_HOTTEST / _COLDEST) ** left
        for _ in range(_BATCH):
            after = _changed(walk, rng)
            if after is None:
                continue
            if after.key_s < walk.key_s * (1 + temperature * rng.expovariate(1.0)):
                walk = after
                if walk.step_time_s < best.step_time_s:
                    best = walk
        clock.step(_BATCH)
    return best


def _changed(walk: Assignment, rng: random.Random) -> Assignment | None:
    """The assignment after a random change; None if it does not fit."""
    slow = next(iter(walk.slow_gpus()))
    gpu = slow if rng.random() < _SLOW else rng.randrange(walk.instance.gpus)
    if not walk.shards[gpu]:
        return None
    shard, kind = rng.choice(walk.shards[gpu]), rng.random()
    if kind < 0.25:
        return _rehomed(walk, [shard], rng)
    if kind < 0.6:
        others = walk.shards[rng.randrange(walk.instance.gpus)]
        return _rehomed(walk, [shard, rng.choice(others)], rng) if others else None
    if kind < 0.8:
        return _moved(walk, gpu, shard, rng)
    return _resharded(walk, shard, rng)


def _rehomed(
    walk: Assignment, shards: Iterable[TableShard], rng: random.Random
) -> Assignment | None:
    """Tables whose cold rows lie elsewhere, on the same GPUs: mostly the first one's in DRAM."""
    options: dict[int, ShardingOption] = {}
    way = -1
    for shard in shards:
        ways = _homes(walk.instance, shard.table, shard.option)
        if ways:
            # Mostly little changes: options are in the order of their shares.
            at = ways.index(shard.option) if shard.option in ways else 0
            step = (way if rng.random() < _USUAL else -way) * math.ceil(rng.expovariate(0.7))
            options[shard.table] = ways[min(max(at + step, 0), len(ways) - 1)]
        way = 1
    return _with_options(walk, options)


def _with_options(walk: Assignment, options: dict[int, ShardingOption]) -> Assignment | None:
    """Tables with other options on the same GPUs; None if that changes nothing or does not fit."""
    change: Change = {}
    for gpu, mine in enumerate(walk.shards):
        if any(s.table in options and s.option != options[s.table] for s in mine):
            changed = (s._replace(option=options.get(s.table, s.option)) for s in mine)
            change[gpu] = sorted(changed)
    return walk.changed(change) if change else None


def _homes(instance: Instance, table: int, now: ShardingOption) -> list[ShardingOption]:
    """Options that differ from one in where cold rows lie, those with few rows on drives first."""
    alike = [o for o in instance.options_of(table) if o._replace(home=now.home) == now]
    return sorted(alike, key=lambda option: (option.home.dtype, option.home.drive_share))


def _moved(walk: Assignment, gpu: int, shard: TableShard, rng: random.Random) -> Assignment | None:
    """A shard on another GPU, perhaps in exchange for one of that GPU's."""
    instance, to = walk.instance, rng.randrange(walk.instance.gpus)
    here, there = list(walk.shards[gpu]), list(walk.shards[to])
    if to == gpu or instance.in_group(shard.table) or not instance.may_serve(shard, to):
        return None
    if any(other.table == shard.table for other in there):
        return None
    here.remove(shard)
    if there and rng.random() < 0.7:
        back = rng.choice(there)
        is_open = instance.may_serve(back, gpu) and not instance.in_group(back.table)
        if is_open and not any(other.table == back.table for other in here):
            there.remove(back)
            here.append(back)
    there.append(shard)
    return walk.changed({gpu: sorted(here), to: sorted(there)})


def _resharded(walk: Assignment, shard: TableShard, rng: random.Random) -> Assignment | None:
    """A table in another way, its shards where they delay the step least; mostly only its cut."""
    instance, table, home = walk.instance, shard.table, shard.option.home
    options = [o for o in instance.options_of(table) if not o.replicated_rows]
    if rng.random() < 0.8:
        options = [o for o in options if o.home == home and o.cold == shard.option.cold]
    if instance.in_group(table) or any(one.table == table for one in walk.replicas) or not options:
        return None
    spread = Without(walk, table).spread(rng.choice(options))
    return None if spread is None else walk.changed(spread[0])
