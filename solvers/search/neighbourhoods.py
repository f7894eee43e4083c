"""Large neighbourhoods: a few GPUs at a time are packed anew, exactly, by CP-SAT.

Shaw 1998, doi:10.1007/3-540-49481-2_30. A round takes the slowest GPU and some others, gives
CP-SAT the tables that they alone serve, each in any of its sharding options without replicas,
and the shards of other tables that keep their options (`solvers.search.integer_program`), and
keeps what is not worse. On few GPUs every other round takes all of them, and decides sharding
options and replicas of some tables anew.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from solvers.bounds.lagrangian import LagrangianBound
from solvers.model.assignment import Assignment, Change
from solvers.model.clock import Clock
from solvers.model.instance import ShardingOption, TableShard
from solvers.search.integer_program import Answer, Program, price_list
from solvers.search.moves import improve


@dataclass(frozen=True, slots=True)
class NeighbourhoodParams:
    """Knobs of `neighbourhood_search`.

    Attributes
    ----------
    round_s : float
        Seconds of CP-SAT in a round.
    fewest_gpus, most_gpus : int
        GPUs of the first rounds; one more at a time after rounds without a gain.
    most_places : int
        Shards × GPUs of a round; fewer GPUs are taken where there would be more.
    few_gpus : int
        On so few GPUs, every other round takes them all.
    resharded_tables, cheapest_options : int
        In such a round, so many tables have so many of their cheapest options to choose from.
    idle_rounds : int
        Rounds in a row without a gain after which the search ends.
    """

    round_s: float = 2.0
    fewest_gpus: int = 3
    most_gpus: int = 6
    most_places: int = 3000
    few_gpus: int = 8
    resharded_tables: int = 6
    cheapest_options: int = 16
    idle_rounds: int = 40


def neighbourhood_search(
    start: Assignment,
    bound: LagrangianBound,
    *,
    target_s: float,
    seed: int,
    clock: Clock,
    params: NeighbourhoodParams,
) -> tuple[Assignment, int]:
    """The best assignment that rounds of CP-SAT find, and how many rounds there were."""
    rounds = _Rounds(bound, random.Random(seed), clock, params)
    best = current = start
    number = idle = 0
    gpus = params.fewest_gpus
    while not clock.spent and best.step_time_s > target_s and idle < params.idle_rounds:
        clock.step()
        number += 1
        idle += 1
        everywhere = start.instance.gpus <= params.few_gpus and number % 2 == 0
        trial = rounds.of_tables(current) if everywhere else rounds.of_gpus(current, gpus)
        if trial is None:
            continue
        improve(trial, clock)
        if trial.key_s < current.key_s * (1 - 1e-7):
            current = trial
        if trial.step_time_s < best.step_time_s * (1 - 1e-7):
            best, idle = trial, 0
        elif idle % 8 == 0:  # Wider where a few GPUs have nothing left to gain.
            gpus = min(gpus + 1, params.most_gpus)
    return best, number


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Rounds over a few GPUs, and over a few tables."""

    bound: LagrangianBound
    rng: random.Random
    clock: Clock
    params: NeighbourhoodParams

    def of_gpus(self, assignment: Assignment, number: int) -> Assignment | None:
        """An assignment in which CP-SAT places the shards of a few GPUs anew, the slowest too."""
        instance, rng = assignment.instance, self.rng
        times = assignment.times_s
        slow = rng.choice(list(assignment.slow_gpus()))
        others = [gpu for gpu in range(instance.gpus) if gpu != slow]
        # Half of the time those with room to take work over, else any.
        if rng.random() < 0.5:
            others = [others[i] for i in np.argsort(times[others], kind="stable")[: 2 * number]]
        chosen = [slow, *rng.sample(others, min(number - 1, len(others)))]
        while len(chosen) > 1:
            free, loose = _content(assignment, chosen)
            options = {
                table: [
                    option
                    for option in instance.options_of(table)
                    if option.shard_count <= len(chosen) and not option.replicated_rows
                ]
                for table in free
            }
            if self._is_small(loose, options, len(chosen)):
                break
            chosen.pop()
        else:
            return None
        answer = self._packed(assignment, chosen, options, loose, assignment.replicas)
        if answer.pairs is None:
            return None
        change: Change = {gpu: [] for gpu in chosen}
        for shard, gpu in answer.pairs:
            change[gpu].append(shard)
        return assignment.changed({gpu: sorted(shards) for gpu, shards in change.items()})

    def of_tables(self, assignment: Assignment) -> Assignment | None:
        """An assignment in which some tables are sharded anew, and all are placed anew."""
        instance, params = assignment.instance, self.params
        option_of = assignment.option_of
        tables = sorted(table for table in option_of if not instance.in_group(table))
        free = set(self.rng.sample(tables, min(params.resharded_tables, len(tables))))
        upper_s = assignment.own_step_time_s - instance.fixed_s
        options = {}
        for table in sorted(free):
            costs = [cost for cost in self.bound.options_of(table) if cost.longest_s <= upper_s]
            costs.sort(key=lambda cost: (cost.priced_s, cost.option))
            cheapest = [cost.option for cost in costs[: params.cheapest_options]]
            options[table] = list(dict.fromkeys([option_of[table], *cheapest]))
        loose = [shard for held in assignment.shards for shard in held if shard.table not in free]
        replicas = [replica for replica in assignment.replicas if replica.table not in free]
        if not self._is_small(loose, options, instance.gpus):
            return None
        answer = self._packed(assignment, range(instance.gpus), options, loose, replicas)
        if answer.pairs is None:
            return None
        return Assignment.of(instance, answer.pairs, [*replicas, *answer.replicas])

    def _is_small(
        self,
        loose: Sequence[TableShard],
        options: Mapping[int, Sequence[ShardingOption]],
        gpus: int,
    ) -> bool:
        """Whether a program has few enough shards × GPUs."""
        shards = sum(option.shard_count for of_table in options.values() for option in of_table)
        return (len(loose) + shards) * gpus <= self.params.most_places

    def _packed(
        self,
        assignment: Assignment,
        gpus: Sequence[int],
        options: Mapping[int, Sequence[ShardingOption]],
        loose: Iterable[TableShard],
        replicas: Iterable[TableShard],
    ) -> Answer:
        """CP-SAT's answer for some GPUs, from what they serve now."""
        prices = price_list(self.bound.price_s_per_byte)
        others = np.delete(assignment.phase_s, list(gpus), axis=0)
        program = Program(
            assignment.instance,
            gpus,
            options,
            assignment.own_step_time_s,
            prices,
            loose=loose,
            replicas=replicas,
            least_s=others.max(axis=0, initial=0.0),
        )
        program.hint(assignment)
        limits = replace(self.clock.limits, seed=self.rng.randrange(1 << 30), gap=1e-5)
        return program.run(limits, min(self.params.round_s, max(0.1, self.clock.left_s)))


def _content(assignment: Assignment, gpus: list[int]) -> tuple[list[int], list[TableShard]]:
    """Tables that these GPUs alone serve, and their shards of other tables."""
    instance = assignment.instance
    held = {shard for gpu in gpus for shard in assignment.shards[gpu]}
    options = {shard.table: shard.option for shard in held}
    count = Counter(shard.table for shard in held)
    replicated = {shard.table for shard in assignment.replicas}
    whole = {
        table
        for table, option in options.items()
        if len(instance.shards(table, option)) == count[table]
        and table not in replicated
        and not instance.in_group(table)
    }
    return sorted(whole), sorted(shard for shard in held if shard.table not in whole)
