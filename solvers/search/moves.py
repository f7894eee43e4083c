"""Local search: what slow GPUs serve is moved, swapped or sharded anew while that helps.

Every candidate is rated by the sums of priced costs (`solvers.model.knapsack.phases_at`), many at
once; only the best few have their HBM filled exactly.
"""

from collections import Counter

import numpy as np

from cost_models.arenas import Arena
from solvers.model.arenas import arena_changes, arena_counts
from solvers.model.assignment import Assignment, Change, least_loaded, replicated, total
from solvers.model.clock import Clock
from solvers.model.instance import Instance, ShardingOption, TableShard
from solvers.model.knapsack import (
    GPU_S,
    OF_GPU,
    Float,
    Knapsack,
    phases_at,
    phases_of_swaps,
    phases_with,
)

_CANDIDATE_GPUS = 8
"""GPUs that a shard of the slowest one is tried on, least loaded first."""

_SLOW_GPUS = 3
"""GPUs that phases wait for, of which blocks are moved."""

_FINALISTS = 4
"""Candidates that are filled exactly before a kind of move is given up."""

_LARGEST_TABLES, _CHEAPEST_OPTIONS = 12, 32
"""Tables of the slowest GPU that are sharded anew, and sharding options of each that are tried."""

_MOST_SHARDS = 8
"""Finer sharding options than this are left to the construction."""

_ENOUGH = 12
"""Sharding options that gain, of which the best is made before other tables are looked at."""

_LEAST_GAIN = 1e-5


def improve(assignment: Assignment, clock: Clock, *, reshard_tables: bool = True) -> None:
    """Change an assignment, in place, until no move makes the step faster.

    Without `reshard_tables`, tables keep their sharding options: ten times as fast.
    """
    if assignment.instance.gpus == 1:
        return
    while not clock.spent:
        if not (exchange(assignment) or (reshard_tables and reshard_table(assignment, clock))):
            return
        clock.step()


def exchange(assignment: Assignment) -> bool:
    """Make the best move of a block off a slow GPU, or swap with one of another GPU's.

    Slow is the GPU that a phase of the step waits for, in each phase another.
    """
    phase_s = assignment.phase_s
    key_s = assignment.instance.objective.key_s(phase_s)
    for slow, phase in list(assignment.slow_gpus().items())[:_SLOW_GPUS]:
        least = np.argsort(phase_s[:, phase], kind="stable")[: _CANDIDATE_GPUS + 1].tolist()
        if _exchange_of(assignment, slow, [gpu for gpu in least if gpu != slow], key_s):
            return True
    return False


def _exchange_of(assignment: Assignment, slow: int, others: list[int], key_s: float) -> bool:
    """Make the best exchange of one GPU with some others."""
    instance = assignment.instance
    mine = instance.blocks(assignment.shards[slow])
    if not mine:
        return False
    candidates: list[tuple[float, int, int, int]] = []
    theirs = {}
    for other in others[:_CANDIDATE_GPUS]:
        theirs[other] = instance.blocks(assignment.shards[other])
        rated = _exchange_keys(assignment, slow, other, mine, theirs[other])
        rated[rated >= key_s * (1 - _LEAST_GAIN)] = np.inf
        # One best swap for each block of the slow GPU: finalists should differ.
        back = rated.argmin(axis=1)
        best = rated[np.arange(len(mine)), back]
        candidates += [
            (float(best[i]), other, i, int(back[i]))
            for i in np.flatnonzero(np.isfinite(best)).tolist()
        ]
    for _, other, i, j in sorted(candidates)[:_FINALISTS]:
        leaving = mine[i]
        arriving = theirs[other][j] if j < len(theirs[other]) else ()
        change = {
            slow: sorted([*(p for p in assignment.shards[slow] if p not in leaving), *arriving]),
            other: sorted([*(p for p in assignment.shards[other] if p not in arriving), *leaving]),
        }
        if _make(assignment, change, assignment.replicas, key_s):
            return True
    return False


def _exchange_keys(
    assignment: Assignment,
    slow: int,
    other: int,
    mine: list[tuple[TableShard, ...]],
    theirs: list[tuple[TableShard, ...]],
) -> Float:
    """About the objective when two GPUs swap blocks, shape (mine, theirs + 1).

    The last column is for a move that takes nothing back. Infinite where a swap is not
    allowed.
    """
    instance, objective = assignment.instance, assignment.instance.objective
    here = np.array([total(instance, block, slow) for block in mine])
    there = np.array([total(instance, block, other) for block in theirs])
    nothing = np.zeros((1, *here.shape[1:]))
    there = np.concatenate((there, nothing)) if theirs else nothing
    if instance.kind_of_gpu[slow] == instance.kind_of_gpu[other]:
        here_there, there_here = here, there
    else:
        here_there = np.array([total(instance, block, other) for block in mine])
        there_here = np.concatenate(
            [*(total(instance, block, slow)[None] for block in theirs), nothing]
        )
    hbm = instance.hbm_bytes
    of_slow = phases_of_swaps(assignment.sums[slow], here, there_here, hbm[slow])
    of_other = phases_of_swaps(assignment.sums[other], there, here_there, hbm[other])
    phase_s = assignment.phase_s
    for gpu, times, leaving, arriving in (
        (slow, of_slow, mine, [*theirs, ()]),
        (other, of_other, [*theirs, ()], mine),
    ):
        counts = arena_counts(assignment, gpu)
        arenas = len(counts) + arena_changes(instance, counts, leaving, arriving)
        times += arenas[..., None] * instance.launches_s[gpu] + assignment.arena_s([gpu])
    scale_s = objective.scale_s(phase_s)
    rest = objective.powers(np.delete(phase_s, [slow, other], axis=0), scale_s).sum(axis=0)
    changed = objective.powers(of_slow, scale_s)
    changed += objective.powers(np.swapaxes(of_other, 0, 1), scale_s)
    keys = objective.norm_s(scale_s, rest + changed)
    keys[~(_may_swap(assignment, slow, other, mine, theirs) & np.isfinite(keys))] = np.inf
    return keys


def _may_swap(
    assignment: Assignment,
    slow: int,
    other: int,
    mine: list[tuple[TableShard, ...]],
    theirs: list[tuple[TableShard, ...]],
) -> np.ndarray:
    """Which swaps keep shards of one table apart and each where it may be served."""
    instance = assignment.instance
    allowed = np.ones((len(mine), len(theirs) + 1), dtype=bool)
    tables_here = {shard.table for shard in assignment.shards[slow]}
    tables_there = {shard.table for shard in assignment.shards[other]}
    for i, block in enumerate(mine):
        if not all(instance.may_serve(shard, other) for shard in block):
            allowed[i] = False
        twice = {shard.table for shard in block} & tables_there
        if twice:
            allowed[i] &= [twice <= {p.table for p in back} for back in (*theirs, ())]
    for j, block in enumerate(theirs):
        if not all(instance.may_serve(shard, slow) for shard in block):
            allowed[:, j] = False
        twice = {shard.table for shard in block} & tables_here
        if twice:
            allowed[:, j] &= [twice <= {p.table for p in arriving} for arriving in mine]
    return allowed


def reshard_table(assignment: Assignment, clock: Clock) -> bool:
    """Make a new sharding option of a table of a slow GPU, its shards spread anew.

    The largest tables are tried first, each in the cheapest of its sharding options; the first
    table that gains by one has the best of its own.
    """
    instance = assignment.instance
    phase_s, weights = assignment.phase_s, instance.objective.weights
    key_s = instance.objective.key_s(phase_s)
    slow = next(iter(assignment.slow_gpus()))
    # What a new sharding option may cost in all: with more, the mean GPU would be as slow.
    slack_s = instance.gpus * float(weights @ phase_s.max(axis=0)) - float(assignment.times_s.sum())
    candidates: list[tuple[float, int, ShardingOption]] = []
    for table, now in _largest(assignment, slow):
        without = _Without(assignment, table)
        before = without.work_s
        rated = [
            (work_s, option)
            for option in instance.options_of(table)
            if option != now
            and option.shard_count <= _MOST_SHARDS
            and (work_s := _work_s(instance, table, option)) - before < slack_s
        ]
        for _, option in sorted(rated)[:_CHEAPEST_OPTIONS]:
            if clock.spent:
                return False
            after_s = without.spread(option)[0]
            if after_s < key_s * (1 - _LEAST_GAIN):
                candidates.append((after_s, table, option))
        if len(candidates) >= _ENOUGH and _make_best_of(assignment, candidates, key_s):
            return True
    return _make_best_of(assignment, candidates, key_s)


def _largest(assignment: Assignment, slow: int) -> list[tuple[int, ShardingOption]]:
    """Tables of a GPU with their sharding options, those that take most of its time first."""
    instance = assignment.instance
    # Replicas are on every GPU, so on the slowest one too.
    alone = [p for p in assignment.shards[slow] if not instance.in_group(p.table)]
    ranked = []
    for shards in (alone, assignment.replicas):
        times = [(-float(instance.priced_costs(p, slow)[GPU_S, -1]), p) for p in shards]
        ranked += [(p.table, p.option) for _, p in sorted(times)[:_LARGEST_TABLES]]
    return list(dict(ranked).items())


def _make_best_of(
    assignment: Assignment, candidates: list[tuple[float, int, ShardingOption]], key_s: float
) -> bool:
    """Make the best of some new sharding options that helps when filled exactly."""
    for _, table, option in sorted(candidates)[:_FINALISTS]:
        change, replicas = _Without(assignment, table).spread(option)[1:]
        if _make(assignment, change, replicas, key_s):
            return True
    return False


def resharded(assignment: Assignment, table: int, option: ShardingOption) -> Assignment | None:
    """An assignment with a table sharded anew, for better or worse; None if it does not fit."""
    after_s, change, replicas = _Without(assignment, table).spread(option)
    if not np.isfinite(after_s):
        return None
    changed = assignment.copy()
    return changed if _make(changed, change, replicas, np.inf) else None


class _Without:
    """An assignment with one table taken off all GPUs."""

    def __init__(self, assignment: Assignment, table: int) -> None:
        self.assignment = assignment
        self.table = table
        self.holders = assignment.holders(table)
        instance = assignment.instance
        self.phase_s = assignment.phase_s
        self._arenas: dict[int, Counter[Arena]] = {}
        self.least_loaded = least_loaded(assignment, instance.allowed(table), instance.gpus)
        self.replicas = tuple(shard for shard in assignment.replicas if shard.table != table)
        self.sums = assignment.sums
        dropped = [shard for shard in assignment.replicas if shard.table == table]
        if dropped:
            base = np.array(replicated(instance, dropped))
            self.sums = assignment.sums - base[instance.kind_of_gpu]
        self.kept = {
            gpu: [shard for shard in assignment.shards[gpu] if shard.table != table]
            for gpu in self.holders
        }
        self.sums_of_holders = {
            gpu: self.sums[gpu]
            - total(instance, (p for p in assignment.shards[gpu] if p.table == table), gpu)
            for gpu in self.holders
        }

    def arenas_of(self, gpu: int) -> Counter[Arena]:
        """Shards of each arena on a GPU, the table's aside."""
        if gpu not in self._arenas:
            self._arenas[gpu] = arena_counts(self.assignment, gpu, without=self.table)
        return self._arenas[gpu]

    @property
    def work_s(self) -> float:
        """GPU seconds that the table takes with its present option."""
        held = [p for gpu in self.holders for p in self.assignment.shards[gpu]]
        shards = {shard.option for shard in (*held, *self.assignment.replicas)
                  if shard.table == self.table}  # fmt: skip
        return sum(_work_s(self.assignment.instance, self.table, option) for option in shards)

    def spread(self, option: ShardingOption) -> tuple[float, Change, tuple[TableShard, ...]]:
        """The table's shards on the GPUs where they delay the step least.

        Returns about the objective then, the change, and what is then replicated.
        """
        assignment, instance = self.assignment, self.assignment.instance
        shards = instance.shards(self.table, option)
        replica = instance.replica(self.table, option)
        sums, replicas = self.sums, self.replicas
        everywhere = sums is not assignment.sums or replica is not None
        if replica is not None:
            replicas = tuple(sorted((*replicas, replica)))
            sums = sums + np.array(replicated(instance, [replica]))[instance.kind_of_gpu]
        near = self.least_loaded[: len(shards) + _CANDIDATE_GPUS]
        homes = range(instance.gpus) if option.blocked else near
        candidates = list(dict.fromkeys((*self.holders, *homes)))
        open_sums = sums[candidates].copy()
        for at, gpu in enumerate(candidates):
            if gpu in self.sums_of_holders:
                extra = sums[gpu] - self.sums[gpu]
                open_sums[at] = self.sums_of_holders[gpu] + extra
        objective, hbm = instance.objective, instance.hbm_bytes[candidates]
        arenas = [set(self.arenas_of(gpu)) for gpu in candidates]
        if replica is not None:
            for present in arenas:
                present.add(instance.arena_of(replica))
        launch_s = np.array([instance.launches_s[gpu] for gpu in candidates])
        launches_s = np.array([len(present) for present in arenas])[:, None] * launch_s
        launches_s += assignment.arena_s(candidates)
        phase_s = self.phase_s.copy() if everywhere else self.phase_s
        if everywhere and len(candidates) < instance.gpus:
            others = np.delete(np.arange(instance.gpus), candidates)
            phase_s[others] += phases_at(sums[others], instance.hbm_bytes[others]) - phases_at(
                assignment.sums[others], instance.hbm_bytes[others]
            )
        scale_s = objective.scale_s(phase_s)
        rest = objective.powers(np.delete(phase_s, candidates, axis=0), scale_s).sum(axis=0)
        powers = objective.powers(phases_at(open_sums, hbm) + launches_s, scale_s)
        free = np.ones(len(candidates), dtype=bool)
        alike = len({instance.kind_of_gpu[gpu] for gpu in candidates}) == 1
        change: Change = {gpu: list(mine) for gpu, mine in self.kept.items()}
        for shard in shards:
            if alike:
                added = instance.priced_costs(shard, candidates[0])[OF_GPU]
            else:
                added = np.array([instance.priced_costs(shard, gpu) for gpu in candidates])
                added = added[:, OF_GPU]
            may = free & instance.open_gpus((shard,))[candidates]
            arena = instance.arena_of(shard)
            new = np.array([arena not in present for present in arenas])
            then = phases_with(open_sums, added, hbm) + launches_s + new[:, None] * launch_s
            after = objective.powers(then, scale_s)
            with np.errstate(invalid="ignore"):  # Of GPUs that replicas have no room on.
                powers_then = rest + powers.sum(axis=0) - powers + after
            keys = objective.norm_s(scale_s, powers_then)
            keys = np.where(may & np.isfinite(keys), keys, np.inf)
            at = int(keys.argmin())
            if not np.isfinite(keys[at]):
                return np.inf, {}, replicas
            gpu = candidates[at]
            open_sums[at] += added if added.ndim == 2 else added[at]
            powers[at] = after[at]
            free[at] = False  # One shard of a table on a GPU.
            change.setdefault(gpu, list(assignment.shards[gpu])).append(shard)
        key_s = float(objective.norm_s(scale_s, rest + powers.sum(axis=0)))
        return key_s, {gpu: sorted(mine) for gpu, mine in change.items()}, replicas


def _work_s(instance: Instance, table: int, option: ShardingOption) -> float:
    """GPU seconds of a table sharded in this way, with all rows in HBM that are worth any."""
    return float(instance.option_costs(table, option)[GPU_S, -1])


def _make(
    assignment: Assignment, change: Change, replicas: tuple[TableShard, ...], below_s: float
) -> bool:
    """Make a change if, filled exactly, the objective is then less than `below_s`."""
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
