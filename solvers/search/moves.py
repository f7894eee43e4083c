"""Local search: what slow GPUs serve is moved, swapped or sharded anew while that helps.

Every candidate is rated by the sums of priced costs (`solvers.model.knapsack.phases_at`), many at
once; only the best few have their HBM filled exactly.
"""

from collections import Counter

import numpy as np

from cost_models.arenas import Arena
from solvers.model.arenas import arena_counts
from solvers.model.assignment import Assignment, Change, least_loaded, replicated, total
from solvers.model.clock import Clock
from solvers.model.instance import Instance, ShardingOption, TableShard
from solvers.model.knapsack import (
    GPU_S,
    OF_GPU,
    Knapsack,
    phases_at,
    phases_with,
)
from solvers.search.exchanges import Exchanges

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
    exchanges = Exchanges(assignment)
    while not clock.spent:
        if not (
            exchange(assignment, exchanges) or (reshard_tables and reshard_table(assignment, clock))
        ):
            return
        clock.step()


def exchange(assignment: Assignment, exchanges: Exchanges) -> bool:
    """Make the best move of a block off a slow GPU, or swap with one of another GPU's.

    Slow is the GPU that a phase of the step waits for, in each phase another.
    """
    phase_s = assignment.phase_s
    key_s = assignment.instance.objective.key_s(phase_s)
    for slow, phase in list(assignment.slow_gpus().items())[:_SLOW_GPUS]:
        least = np.argsort(phase_s[:, phase], kind="stable")[: _CANDIDATE_GPUS + 1].tolist()
        others = [gpu for gpu in least if gpu != slow][:_CANDIDATE_GPUS]
        for change in exchanges.best(slow, others, key_s * (1 - _LEAST_GAIN), _FINALISTS):
            if _make(assignment, change, assignment.replicas, key_s):
                return True
    return False


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
    return float(instance.option_costs_at(table, option, -1)[GPU_S])


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
