"""Large-neighbourhood search: a few GPUs at a time are packed anew, exactly, by CP-SAT.

Shaw 1998, doi:10.1007/3-540-49481-2_30. The cost greedy's plan, improved by local search, is
the start. A round takes the slowest GPU and some others, gives CP-SAT the tables that they
alone serve, each in any of its sharding options without replicas, and the shards of other tables
that stay cut as they are (`solvers.search.integer_program`), and keeps what is not worse. On few
GPUs every other round takes all of them, and some tables of which sharding options and replicas are
decided anew.
"""

import random
import time
from dataclasses import replace

import numpy as np

from cost_models import CostModel
from placer.problem import Problem
from solvers.bounds.feasibility import impossible
from solvers.bounds.lagrangian import LagrangianBound, lagrangian_bound
from solvers.model.assignment import Assignment, Change
from solvers.model.build_plan import result_of
from solvers.model.clock import Clock
from solvers.model.instance import Instance, ShardingOption, TableShard
from solvers.result import Limits, SolveResult
from solvers.search.integer_program import Program, price_list
from solvers.search.iterated import iterated_search, load_key
from solvers.search.moves import improve
from solvers.strategies.greedy_cost import greedy_assignment

_SEARCH_SHARE = 0.25
"""Share of the time for local search before the first round."""

_ROUND_S = 2.0
"""Seconds of CP-SAT in a round."""

_FEWEST_GPUS = 3
_MOST_GPUS = 6
_MOST_PLACES = 3000
"""Shards × GPUs of a round; fewer GPUs are taken where there would be more."""

_FEW_GPUS = 8
_RECUT_TABLES = 6
_CHEAPEST_OPTIONS = 16
"""On so few GPUs, so many tables have so many of their cheapest sharding options to choose from."""

_IDLE_ROUNDS = 40
"""Rounds in a row without a gain after which the search ends."""


class Lns:
    """The strategy of this module's docstring."""

    name = "lns"

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Search to the gap or a limit. See `Solver.solve`.

        Raises
        ------
        BackendError
            If CP-SAT rejects a model.
        """
        started, clock = time.monotonic(), Clock.start(limits)
        instance = Instance(problem, cost_model)
        failure = impossible(instance)
        if failure:
            return SolveResult(None, failure)
        bound = lagrangian_bound(instance)
        target_s = bound.step_time_s * (1 + limits.gap)
        assignment = greedy_assignment(instance, bound, clock)
        rounds = 0
        if assignment is not None and instance.gpus > 1:
            assignment = iterated_search(
                assignment, target_s=target_s, seed=limits.seed, clock=clock.part(_SEARCH_SHARE)
            )
            assignment, rounds = neighbourhood_search(
                assignment, bound, target_s=target_s, seed=limits.seed, clock=clock
            )
        return result_of(
            self.name,
            instance,
            assignment,
            bound=bound,
            clock=clock,
            started=started,
            stats={"rounds": rounds},
        )


def neighbourhood_search(
    assignment: Assignment, bound: LagrangianBound, *, target_s: float, seed: int, clock: Clock
) -> tuple[Assignment, int]:
    """The best assignment that rounds of CP-SAT find, and how many rounds there were."""
    rng = random.Random(seed)
    best = current = assignment
    rounds = idle = 0
    gpus = _FEWEST_GPUS
    while not clock.spent and best.step_time_s > target_s and idle < _IDLE_ROUNDS:
        clock.step()
        rounds += 1
        idle += 1
        everywhere = assignment.instance.gpus <= _FEW_GPUS and rounds % 2 == 0
        found = (
            _recut_round(current, bound, rng, clock)
            if everywhere
            else _round(current, bound, gpus, rng, clock)
        )
        if found is None:
            continue
        improve(found, clock)
        if load_key(found) < load_key(current) * (1 - 1e-7):
            current = found
        if found.step_time_s < best.step_time_s * (1 - 1e-7):
            best, idle = found, 0
        elif idle % 8 == 0:  # Wider where a few GPUs have nothing left to gain.
            gpus = min(gpus + 1, _MOST_GPUS)
    return best, rounds


def _round(
    assignment: Assignment, bound: LagrangianBound, number: int, rng: random.Random, clock: Clock
) -> Assignment | None:
    """An assignment in which some GPUs are packed anew, the slowest one among them."""
    instance = assignment.instance
    times = assignment.times_s
    slow = int(times.argmax())
    others = [gpu for gpu in range(instance.gpus) if gpu != slow]
    # Half of the time those with room to take work over, else any.
    if rng.random() < 0.5:
        others = [others[i] for i in np.argsort(times[others], kind="stable")[: 2 * number]]
    chosen = [slow, *rng.sample(others, min(number - 1, len(others)))]
    while len(chosen) > 1:
        free, loose = _content(assignment, chosen)
        sharding_options = {
            table: _options(assignment, bound, table, len(chosen)) for table in free
        }
        shards = len(loose) + sum(
            option.shard_count for options in sharding_options.values() for option in options
        )
        if shards * len(chosen) <= _MOST_PLACES:
            break
        chosen.pop()
    else:
        return None
    program = Program(
        instance,
        chosen,
        sharding_options,
        float(times[slow]),
        price_list(bound.price_s_per_byte),
        loose=loose,
        replicas=assignment.replicas,
    )
    program.hint(assignment)
    limits = replace(clock.limits, seed=rng.randrange(1 << 30), gap=1e-5)
    answer = program.run(limits, min(_ROUND_S, max(0.1, clock.left_s)))
    if answer.pairs is None:
        return None
    change: Change = {gpu: [] for gpu in chosen}
    for shard, gpu in answer.pairs:
        change[gpu].append(shard)
    return assignment.changed({gpu: sorted(mine) for gpu, mine in change.items()})


def _recut_round(
    assignment: Assignment, bound: LagrangianBound, rng: random.Random, clock: Clock
) -> Assignment | None:
    """An assignment in which some tables are cut, replicated or not, and all are placed anew."""
    instance = assignment.instance
    option_of = {shard.table: shard.option for mine in assignment.shards for shard in mine}
    option_of |= {shard.table: shard.option for shard in assignment.replicas}
    tables = sorted(table for table in option_of if not instance.in_group(table))
    free = set(rng.sample(tables, min(_RECUT_TABLES, len(tables))))
    upper_s = assignment.step_time_s
    sharding_options = {}
    for table in sorted(free):
        works = [w for w in bound.options[table] if w.longest_s <= upper_s]
        works.sort(key=lambda work: (work.priced_s, work.option))
        options = [work.option for work in works[:_CHEAPEST_OPTIONS]]
        sharding_options[table] = list(dict.fromkeys([option_of[table], *options]))
    loose = [shard for mine in assignment.shards for shard in mine if shard.table not in free]
    kept = [replica for replica in assignment.replicas if replica.table not in free]
    shards = len(loose) + sum(
        option.shard_count for options in sharding_options.values() for option in options
    )
    if shards * instance.gpus > _MOST_PLACES:
        return None
    program = Program(
        instance,
        range(instance.gpus),
        sharding_options,
        upper_s,
        price_list(bound.price_s_per_byte),
        loose=loose,
        replicas=kept,
    )
    program.hint(assignment)
    limits = replace(clock.limits, seed=rng.randrange(1 << 30), gap=1e-5)
    answer = program.run(limits, min(_ROUND_S, max(0.1, clock.left_s)))
    if answer.pairs is None:
        return None
    return Assignment.of(instance, answer.pairs, [*kept, *answer.replicas])


def _content(assignment: Assignment, gpus: list[int]) -> tuple[list[int], list[TableShard]]:
    """Tables that these GPUs alone serve, and their shards of other tables."""
    held = {shard for gpu in gpus for shard in assignment.shards[gpu]}
    count: dict[int, int] = {}
    for shard in held:
        count[shard.table] = count.get(shard.table, 0) + 1
    option_of = {shard.table: shard.option for shard in held}
    replicated = {shard.table for shard in assignment.replicas}
    whole = [
        table
        for table, shards in count.items()
        if len(assignment.instance.shards(table, option_of[table])) == shards
        and table not in replicated
        and not assignment.instance.in_group(table)
    ]
    free = sorted(whole)
    return free, sorted(shard for shard in held if shard.table not in set(free))


def _options(
    assignment: Assignment, bound: LagrangianBound, table: int, most: int
) -> list[ShardingOption]:
    """Sharding options for a table that stays without replicas, the one that it has among them."""
    return [
        option
        for option in assignment.instance.options_of(table)
        if option.shard_count <= most and not option.replicated_rows
    ]
