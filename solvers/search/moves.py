"""Local search: move, swap or reshard what slow GPUs serve while that helps.

Candidates are rated many at once by sums of priced costs (`solvers.model.knapsack.phases_at`). Only
the best few have their HBM filled exactly.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from cost_models.arenas import Arena
from solvers.model.assignment import Assignment, Change
from solvers.model.clock import Clock
from solvers.model.instance import Block, ShardingOption, TableShard
from solvers.model.knapsack import GPU_S, Bool, Float, Int, Knapsack, phases_of_swaps
from solvers.model.shared_costs import total
from solvers.search.resharding import MOST_SHARDS, Without

_CANDIDATE_GPUS = 8
"""Try a shard of the slowest GPU on this many others, least loaded first."""

_SLOW_GPUS = 3
"""Move blocks off this many GPUs that phases wait for."""

_FINALISTS = 4
"""Fill this many candidates exactly before giving up a kind of move."""

_LARGEST_TABLES, _CHEAPEST_OPTIONS = 4, 12
"""Reshard this many tables of the slowest GPU, and try this many sharding options of each. With 6
and 32, plans were 0 to 0.6% faster on six problems, in 0.04 to 0.6 s more."""

_EXACT_TRIALS = 100
"""Try every sharding option exactly if all tables together have at most this many. Beyond that it
takes longer than all other moves, and gains little."""

_ENOUGH = 12
"""Stop looking at other tables once this many sharding options gain."""

_LEAST_GAIN = 1e-5


def improve(assignment: Assignment, clock: Clock, *, reshard_tables: bool = True) -> None:
    """Improve an assignment in place until no move makes the step faster.

    Without `reshard_tables`, tables keep their sharding options, which is ten times as fast.
    """
    instance = assignment.instance
    many, has_arenas = instance.gpus > 1, instance.arena_times.is_any
    exchanges = Exchanges(assignment)
    while not clock.spent:
        if not (
            (many and exchange(assignment, exchanges))
            or (reshard_tables and many and reshard_table(assignment, clock))
            or (reshard_tables and has_arenas and reshard_exactly(assignment, clock))
        ):
            return
        clock.step()


def exchange(assignment: Assignment, exchanges: "Exchanges") -> bool:
    """Move a block off a slow GPU or swap it with another GPU's, whichever is best.

    A GPU is slow if a phase of the step waits for it.
    """
    phase_s = assignment.phase_s
    key_s = assignment.instance.objective.key_s(phase_s)
    for slow, phase in list(assignment.slow_gpus().items())[:_SLOW_GPUS]:
        least = np.argsort(phase_s[:, phase], kind="stable")[: _CANDIDATE_GPUS + 1].tolist()
        others = [gpu for gpu in least if gpu != slow][:_CANDIDATE_GPUS]
        for change in exchanges.best(slow, others, key_s * (1 - _LEAST_GAIN), _FINALISTS):
            if make(assignment, change, assignment.replicas, key_s):
                return True
    return False


def reshard_table(assignment: Assignment, clock: Clock) -> bool:
    """Give a table of a slow GPU another sharding option, and spread its shards again.

    Try the largest tables first, each in its cheapest options. Take the best option of the first
    table that gains by one.
    """
    instance = assignment.instance
    phase_s, weights = assignment.phase_s, instance.objective.weights
    key_s = instance.objective.key_s(phase_s)
    slow = next(iter(assignment.slow_gpus()))
    # Limit of an option's total cost: beyond it the mean GPU would be as slow.
    slack_s = instance.gpus * float(weights @ phase_s.max(axis=0)) - float(assignment.times_s.sum())
    candidates: list[tuple[float, int, ShardingOption]] = []
    for table, now in _largest(assignment, slow):
        without = Without(assignment, table)
        # With all useful rows in HBM.
        before = instance.option_costs_at(table, now, -1)[GPU_S]
        works = [
            (option_s, option)
            for option in instance.options_of(table)
            if option != now
            and option.shard_count <= MOST_SHARDS
            and (option_s := instance.option_costs_at(table, option, -1)[GPU_S]) - before < slack_s
        ]
        if clock.spent:
            return False
        options = [option for _, option in sorted(works)[:_CHEAPEST_OPTIONS]]
        for after_s, option in zip(without.rated(options), options, strict=True):
            if after_s < key_s * (1 - _LEAST_GAIN):
                candidates.append((after_s, table, option))
        if len(candidates) >= _ENOUGH and _make_best_of(assignment, candidates, key_s):
            return True
    return _make_best_of(assignment, candidates, key_s)


def reshard_exactly(assignment: Assignment, clock: Clock) -> bool:
    """Reshard tables whose gain shows only when HBM is filled exactly.

    Ratings and bounds leave out that an arena's time depends on how its rows are looked up. If
    there are many options, try only those with another lookup of cold rows, on a single GPU.
    """
    instance = assignment.instance
    options = {
        table: (now, instance.options_of(table))
        for table, now in assignment.option_of.items()
        if not instance.in_group(table)
    }
    few = sum(len(others) for _, others in options.values()) <= _EXACT_TRIALS
    if not few and instance.gpus > 1:
        return False
    gains = False
    for table, (now, others) in options.items():
        for option in others:
            if option == now or option.shard_count > MOST_SHARDS or clock.spent:
                continue
            if few or option._replace(cold=now.cold, home=now.home) == now:
                spread = Without(assignment, table).spread(option)
                gains |= spread is not None and make(assignment, *spread, assignment.key_s)
    return gains


def _largest(assignment: Assignment, slow: int) -> list[tuple[int, ShardingOption]]:
    """Return a GPU's tables with their options, the slowest table first."""
    instance = assignment.instance
    # Every GPU has replicas, and so does the slowest.
    alone = [p for p in assignment.shards[slow] if not instance.in_group(p.table)]
    ranked = []
    for shards in (alone, assignment.replicas):
        times = [(-float(instance.priced_costs(p, slow)[GPU_S, -1]), p) for p in shards]
        ranked += [(p.table, p.option) for _, p in sorted(times)[:_LARGEST_TABLES]]
    return list(dict(ranked).items())


def _make_best_of(
    assignment: Assignment, candidates: list[tuple[float, int, ShardingOption]], key_s: float
) -> bool:
    """Make the best new sharding option that helps when HBM is filled exactly.

    Then make those of other tables that help as well, until a few do not.
    """
    changed: set[int] = set()
    failures = 0
    for _, table, option in sorted(candidates):
        if table in changed:
            continue
        spread = Without(assignment, table).spread(option)
        if spread is not None and make(assignment, *spread, key_s):
            changed.add(table)
            key_s = assignment.instance.objective.key_s(assignment.phase_s)
        else:
            failures += 1
            if failures == _FINALISTS:
                break
    return bool(changed)


def resharded(assignment: Assignment, table: int, option: ShardingOption) -> Assignment | None:
    """Return an assignment with a table resharded, even if it is worse; None if it does not fit."""
    spread = Without(assignment, table).spread(option)
    if spread is None:
        return None
    changed = assignment.copy()
    return changed if make(changed, *spread, np.inf) else None


def make(
    assignment: Assignment, change: Change, replicas: tuple[TableShard, ...], below_s: float
) -> bool:
    """Make a change if it brings the objective, with HBM filled exactly, below `below_s`."""
    instance = assignment.instance
    touched = range(instance.gpus) if replicas != assignment.replicas else change
    knapsacks: dict[int, Knapsack] = {}
    phase_s = assignment.phase_s
    for gpu in touched:
        shards = change.get(gpu, assignment.shards[gpu])
        knapsack = assignment.knapsack(gpu, shards, replicas=replicas)
        if knapsack is None:
            return False
        knapsacks[gpu] = knapsack
        phase_s[gpu] = knapsack.phase_s
    key_s = instance.objective.key_s(phase_s)
    if key_s >= below_s * (1 - _LEAST_GAIN):
        return False
    host_s, used = assignment.hosts(knapsacks)
    if (used > instance.dram_bytes).any():
        return False
    if np.isfinite(below_s) and host_s.max() > max(key_s, assignment.hosts({})[0].max()):
        return False
    assignment.apply(change, knapsacks, replicas)
    return True


class _Served:
    """The blocks of a GPU as arrays for swaps; the last block is empty.

    - `tables`: of each block.
    - `open_gpus`, bool, shape (blocks, GPUs): where each may be served.
    - `arenas`, `every_arena`, int64, shapes (blocks, arenas) and (arenas,): shards of each block in
      each arena, by `numbers`; and all shards, replicas included.
    """

    def __init__(self, assignment: Assignment, gpu: int, numbers: dict[Arena, int]) -> None:
        instance = self._instance = assignment.instance
        self._shards, self._replicas = assignment.shards[gpu], assignment.replicas
        self.blocks: list[Block] = [*instance.blocks(self._shards), ()]
        self.tables = [frozenset(shard.table for shard in block) for block in self.blocks]
        self.every_table = frozenset[int]().union(*self.tables)
        self.open_gpus = np.array([instance.open_gpus(block) for block in self.blocks])
        members = [Counter(map(instance.arena_of, block)) for block in self.blocks]
        members.append(instance.replicated(self._replicas).arenas)
        for arena in itertools.chain(*members):
            numbers.setdefault(arena, len(numbers))
        counts = np.zeros((len(members), len(numbers)), dtype=np.int64)
        for row, arenas in zip(counts, members, strict=True):
            for arena, count in arenas.items():
                row[numbers[arena]] = count
        self.arenas, self.every_arena = counts[:-1], counts.sum(axis=0)
        self._costs: dict[int, Float] = {}

    def is_of(self, assignment: Assignment, gpu: int) -> bool:
        """Return whether the GPU still serves this list of shards: changes replace lists."""
        return self._shards is assignment.shards[gpu] and self._replicas is assignment.replicas

    def costs(self, kind: int) -> Float:
        """Return costs of blocks on a kind of GPU, shape (blocks, 2 + phases, prices)."""
        if kind not in self._costs:
            gpu = self._instance.kinds[kind]
            costs = np.array([total(self._instance, block, gpu) for block in self.blocks])
            self._costs[kind] = costs
        return self._costs[kind]


class Exchanges:
    """Moves and swaps of an assignment, which may change between calls."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._numbers: dict[Arena, int] = {}
        self._known: dict[int, _Served] = {}

    def best(self, slow: int, others: Sequence[int], key_s: float, most: int) -> Iterator[Change]:
        """Yield at most this many of the best exchanges of one GPU with some others.

        `key_s`: limit of the rated objective.
        """
        mine = self._served(slow)
        if len(mine.blocks) == 1:
            return
        objective, phase_s = self._assignment.instance.objective, self._assignment.phase_s
        scale_s = objective.scale_s(phase_s)
        powers = objective.powers(phase_s, scale_s)
        candidates: list[tuple[float, int, int, int]] = []
        for other in others:
            rest = np.delete(powers, [slow, other], axis=0).sum(axis=0)
            rated = self._rated(slow, other, scale_s, rest)
            rated[rated >= key_s] = np.inf
            # Keep the best swap of each block of the slow GPU, so that finalists differ.
            back = rated.argmin(axis=1)
            best = rated[np.arange(len(back)), back]
            candidates += [
                (float(best[i]), other, i, int(back[i]))
                for i in np.flatnonzero(np.isfinite(best)).tolist()
            ]
        shards = self._assignment.shards
        for _, other, i, j in sorted(candidates)[:most]:
            leaving, arriving = mine.blocks[i], self._served(other).blocks[j]
            yield {
                slow: sorted([*(p for p in shards[slow] if p not in leaving), *arriving]),
                other: sorted([*(p for p in shards[other] if p not in arriving), *leaving]),
            }

    def _served(self, gpu: int) -> _Served:
        known = self._known.get(gpu)
        if known is None or not known.is_of(self._assignment, gpu):
            known = self._known[gpu] = _Served(self._assignment, gpu, self._numbers)
        return known

    def _rated(self, slow: int, other: int, scale_s: Float, rest: Float) -> Float:
        """Rate the objective for each swap of blocks of two GPUs, shape (mine, theirs + 1).

        The last column is for moves without a block in return. Swaps that are not allowed are
        infinite. `rest`, shape (phases,): the sum of the other GPUs' powers.
        """
        objective = self._assignment.instance.objective
        mine, theirs = self._served(slow), self._served(other)
        changed = objective.powers(self._phase_s(slow, mine, theirs), scale_s)
        changed += np.swapaxes(objective.powers(self._phase_s(other, theirs, mine), scale_s), 0, 1)
        keys = objective.norm_s(scale_s, rest + changed)[:-1]
        keys[~(_may_swap(mine, theirs, slow, other) & np.isfinite(keys))] = np.inf
        return keys

    def _wide(self, counts: Int) -> Int:
        """Return counts over all arenas; some may have been unknown when these were made."""
        more = len(self._numbers) - counts.shape[-1]
        return np.pad(counts, [*[(0, 0)] * (counts.ndim - 1), (0, more)]) if more else counts

    def _phase_s(self, gpu: int, leaving: _Served, arriving: _Served) -> Float:
        """Return a GPU's phases after each swap of its blocks, (leaving, arriving, phases)."""
        assignment, instance = self._assignment, self._assignment.instance
        kind = instance.kind_of_gpu[gpu]
        kept = assignment.sums[gpu] - leaving.costs(kind)
        phase_s = phases_of_swaps(kept, arriving.costs(kind), instance.hbm_bytes[gpu])
        gone, every, coming = map(
            self._wide, (leaving.arenas, leaving.every_arena, arriving.arenas)
        )
        arenas = np.count_nonzero((every - gone)[:, None] + coming, axis=-1)
        phase_s += arenas[..., None] * np.array(instance.launches_s[gpu])
        return phase_s + assignment.arena_s([gpu])


def _may_swap(mine: _Served, theirs: _Served, slow: int, other: int) -> Bool:
    """Return which swaps keep shards of one table apart and each where it may be served."""
    allowed: Bool = mine.open_gpus[:-1, other, None] & theirs.open_gpus[:, slow]
    for i, tables in enumerate(mine.tables[:-1]):
        if twice := tables & theirs.every_table:
            allowed[i] &= [twice <= back for back in theirs.tables]
    for j, tables in enumerate(theirs.tables[:-1]):
        if twice := tables & mine.every_table:
            allowed[:, j] &= [twice <= arriving for arriving in mine.tables[:-1]]
    return allowed
