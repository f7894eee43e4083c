"""Iterated local search over assignments: shake a few GPUs, improve, keep what is not worse."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.model.instance import Block, Instance, TableShard
from solvers.model.knapsack import GPU_S, Float, least_times
from solvers.model.replicas import total
from solvers.search.moves import improve, resharded


@dataclass(frozen=True, slots=True)
class IteratedParams:
    """Knobs of `iterated_search`.

    Attributes
    ----------
    shaken_gpus : int
        GPUs that a shake touches at most, besides those that a resharded table brings in.
    patience : int
        Shakes without a gain after which the search starts again from the best assignment.
    kick : int
        Shakes away from the best assignment at which it starts again.
    restarts : int
        Times that it does so in a row before it ends: small problems need no more.
    most_shards : int
        Finer sharding options than this are not tried.
    """

    shaken_gpus: int = 3
    patience: int = 400
    kick: int = 6
    restarts: int = 8
    most_shards: int = 4


def iterated_search(
    start: Assignment, *, target_s: float, seed: int, clock: Clock, params: IteratedParams
) -> Assignment:
    """The best assignment found until the clock is spent, or `target_s` seconds are reached.

    Ends before that when it has started again a few times without a gain.

    Each shake takes the slowest GPU and others at random, shards one of their tables anew,
    deals their shards out again in a random order, and improves the result (Lourenço et
    al. 2003, doi:10.1007/0-306-48056-5_11).
    """
    rng = random.Random(seed)
    best = current = start
    idle = restarts = 0
    while not clock.spent and best.step_time_s > target_s:
        clock.step()
        trial = _shaken(current, rng, params)
        idle += 1
        if trial is not None:
            improve(trial, clock, reshard_tables=False)
            if trial.key_s <= current.key_s:
                current = trial
            if trial.step_time_s < best.step_time_s * (1 - 1e-9):
                best, idle, restarts = trial, 0, 0
        if idle > params.patience:
            current, idle, restarts = _kicked(best, rng, params), 0, restarts + 1
            if restarts > params.restarts:
                break
    return best


def _kicked(assignment: Assignment, rng: random.Random, params: IteratedParams) -> Assignment:
    """An assignment some shakes away, good or bad: the way out of a valley."""
    for _ in range(params.kick):
        assignment = _shaken(assignment, rng, params) or assignment
    return assignment


def _shaken(
    assignment: Assignment, rng: random.Random, params: IteratedParams
) -> Assignment | None:
    """Some GPUs' shards dealt out anew, one of their tables sharded anew; None if none fits."""
    instance = assignment.instance
    if instance.gpus == 1:
        return None
    slow = rng.choice(list(assignment.slow_gpus()))
    others = [gpu for gpu in range(instance.gpus) if gpu != slow]
    touched = [slow, *rng.sample(others, min(len(others), rng.randint(1, params.shaken_gpus - 1)))]
    trial = assignment.copy()
    if rng.random() < 0.5:
        with_other_option = _resharded(trial, touched, rng, params)
        if with_other_option is not None:
            trial, touched = with_other_option
    blocks = instance.blocks(shard for gpu in touched for shard in trial.shards[gpu])
    if not blocks:
        return None
    noise = {block: _time(trial, block) * rng.uniform(0.6, 1.0) for block in blocks}
    blocks.sort(key=lambda block: (-noise[block], block))
    shards = _dealt(blocks, touched, instance.replicated(trial.replicas).totals, instance)
    return None if shards is None else trial.changed(shards)


def _dealt(
    blocks: Iterable[Block], gpus: Sequence[int], replica_costs: Sequence[Float], instance: Instance
) -> dict[int, list[TableShard]] | None:
    """Shards of each of some empty GPUs: each block goes where it makes the GPU's time least."""
    sums = np.array([replica_costs[instance.kind_of_gpu[gpu]] for gpu in gpus])
    hbm_bytes = instance.hbm_bytes[gpus]
    dealt: list[list[TableShard]] = [[] for _ in gpus]
    for block in blocks:
        # Where would the GPU that takes it be done first, its HBM filled anew?
        added = np.array([total(instance, block, gpu) for gpu in gpus])
        after = least_times(sums + added, hbm_bytes)
        for at, gpu in enumerate(gpus):
            if not _may_join(block, dealt[at], gpu, instance):
                after[at] = np.inf
        at = int(after.argmin())
        if not np.isfinite(after[at]):
            return None
        dealt[at].extend(block)
        sums[at] += added[at]
    return {gpu: sorted(shards) for gpu, shards in zip(gpus, dealt, strict=True)}


def _may_join(block: Block, present: Iterable[TableShard], gpu: int, instance: Instance) -> bool:
    """Whether a GPU may serve a block, and has no other shard of its tables."""
    tables = {shard.table for shard in block}
    return not any(shard.table in tables for shard in present) and all(
        instance.may_serve(shard, gpu) for shard in block
    )


def _resharded(
    assignment: Assignment, touched: list[int], rng: random.Random, params: IteratedParams
) -> tuple[Assignment, list[int]] | None:
    """Shard one table anew; GPUs that hold its other shards are shaken too."""
    instance = assignment.instance
    shaken = [shard.table for gpu in touched for shard in assignment.shards[gpu]]
    tables = [t for t in shaken if not instance.in_group(t)]
    tables += [shard.table for shard in assignment.replicas]
    if not tables:
        return None
    table = rng.choice(tables)
    before = assignment.holders(table)
    most = min(params.most_shards, instance.gpus)
    options = [option for option in instance.options_of(table) if option.shard_count <= most]
    changed = resharded(assignment, table, rng.choice(options)) if options else None
    if changed is None:
        return None
    return changed, sorted({*touched, *before, *changed.holders(table)})


def _time(assignment: Assignment, block: Block) -> float:
    """GPU time of shards with all their rows in HBM."""
    gpu = assignment.instance.kinds[0]
    return sum(float(assignment.instance.priced_costs(p, gpu)[GPU_S, -1]) for p in block)
