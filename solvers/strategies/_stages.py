"""Stages that strategies are made of: each takes a search and may find an assignment."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from solvers.bounds.least_cost import waits
from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.model.delays import Delay
from solvers.model.instance import Instance, ShardingOption
from solvers.search.arena_construction import assignments_by_arena, launches_share
from solvers.search.branching import BranchingParams, branch_and_bound
from solvers.search.construction import options_for, packed, short_options
from solvers.search.exact_program import ExactProgram
from solvers.search.iterated import IteratedParams, iterated_search
from solvers.search.moves import improve
from solvers.strategies._base import Run
from solvers.strategies._search import Search

if TYPE_CHECKING:
    from solvers.search.annealing import AnnealingParams

TARGETS = (1.0, 1.01, 1.03, 1.08, 1.2, 0.85, 0.7, 1.5, 2.5)
"""Step times, as shares of the bound, for which the cost greedy chooses sharding options."""

LONGEST_SHARES = (1.0, 2.0, 0.75, 0.5)
"""Most that a shard may take of a phase, as shares of the mean GPU's time in it."""

_CLOSE_ENOUGH = 1e-3

_PROMISING = 1.2
"""Times the best assignment's objective that a first one may have: improving gains less than that
without sharding anything anew."""

_NEARLY, _MOST_STARTS, _PLACES_OF_STARTS = 1.1, 5, 1_000_000
"""Times the fastest first assignment's step of those that annealing tries too, how many they are at
most, and tables × GPUs up to which they are kept."""

_MOSTLY_LAUNCHES = 0.25
"""Share of a step that all arenas' launches take from which GPUs are divided among arenas first."""


def cost_greedy(
    search: Search, share: float = 1.0, construction_share: float = 0.5
) -> Assignment | None:
    """The best of `TARGETS` and `LONGEST_SHARES`, improved; at least one is constructed.

    Of its share of the time, construction takes a share and improvement the rest.
    """
    clock = search.clock.part(share)
    enough_s = search.bound_s * (1 + _CLOSE_ENOUGH)
    made: list[Assignment] = []
    best: Assignment | None = None
    fastest: Assignment | None = None
    for assignment in _constructed(search, clock.part(construction_share)):
        if best is not None and assignment.key_s > _PROMISING * best.key_s:
            break
        improve(assignment, clock, reshard_tables=False)
        made.append(assignment)
        if best is None or assignment.key_s < best.key_s:
            best = assignment
        if fastest is None or assignment.step_time_s < fastest.step_time_s:
            fastest = assignment
        if clock.spent or best.step_time_s <= enough_s:
            break
    if best is None:
        best = search.first_fit()
    if len(made) > 1 and search.instance.tables * search.instance.gpus <= _PLACES_OF_STARTS:
        made.sort(key=lambda one: one.step_time_s)
        most_s = _NEARLY * made[0].step_time_s
        search.starts = [one.copy() for one in made if one.step_time_s <= most_s][:_MOST_STARTS]
    if best is not None and best.step_time_s > enough_s:
        improve(best, clock)
    found = [one for one in (best, fastest) if one is not None]
    return min(found, key=lambda one: one.step_time_s, default=None)


def _constructed(search: Search, clock: Clock) -> Iterator[Assignment]:
    """First assignments, those that promise most first."""
    made = []
    for assignment in _packed(search):
        made.append(assignment)
        if clock.spent and any(made):
            break
    yield from sorted(filter(None, made), key=lambda assignment: assignment.key_s)


def _packed(search: Search) -> Iterator[Assignment | None]:
    """Assignments of several choices of sharding options, the usual one first."""
    instance, bound = search.instance, search.lagrangian
    price = bound.price_s_per_byte
    are_launches_most = launches_share(instance, bound) >= _MOSTLY_LAUNCHES
    seen: set[tuple[ShardingOption, ...]] = set()
    for target in TARGETS:
        options = options_for(instance, bound, target * bound.step_time_s)
        if options is None:
            continue
        is_first = not seen
        if tuple(options) not in seen:
            seen.add(tuple(options))
            known = search.first if is_first and target == TARGETS[0] else None
            yield packed(instance, options, price) if known is None else known.copy()
        if not is_first or instance.gpus == 1:
            continue
        if are_launches_most:
            yield from assignments_by_arena(instance, bound)
        for share in LONGEST_SHARES:
            short = tuple(short_options(instance, options, price, share))
            if short not in seen:
                seen.add(short)
                yield packed(instance, short, price)
        if not are_launches_most:  # They take longest to make.
            yield from assignments_by_arena(instance, bound)


def annealing(search: Search, share: float, params: "AnnealingParams") -> Assignment | None:
    """Annealing from the best assignment, and at first from others that are nearly as good."""
    # Here, as loading the compiler takes longer than a small greedy's search.
    from solvers.search.annealing import anneal

    if search.best is None:
        return None
    others = [one for one in search.starts if one.step_time_s != search.best.step_time_s]
    starts, search.starts = [search.best, *others], []
    return anneal(
        starts,
        target_s=search.target_s,
        seed=search.another_seed(),
        clock=search.clock.part(share),
        params=params,
    )


def iterated(search: Search, share: float, params: IteratedParams) -> Assignment | None:
    """Iterated local search from the best assignment."""
    if search.best is None:
        return None
    clock = search.clock.part(share)
    return iterated_search(
        search.best, target_s=search.target_s, seed=search.seed, clock=clock, params=params
    )


def delays(search: Search) -> Assignment | None:
    """Lift this bound and later ones by what phases delay one another; it places nothing."""
    instance = search.instance
    delay = Delay.of(instance.objective.schedule)
    if (
        search.best is None
        or search.delayed
        or delay is None
        or not delay.is_likely(search.best.phase_s)
    ):
        return None
    if waits(instance, delay.lane.before, delay.lane.begin_s):
        # Searches do better with the phases themselves.
        weights = np.eye(1 + len(instance.objective.schedule.chains))[-1]
        other = Instance(
            instance.problem,
            instance.cost_model,
            weights,
            delay,
            instance,
            with_replicas=instance.with_replicas,
        )
        # Of the hosts' memory it is known beside what every step takes, which is not the same.
        known = search.lagrangian
        dram_s = max(0.0, known.dram_s + instance.fixed_s - other.fixed_s)
        search.delayed = Search.start(other, search.clock, replace(known, dram_s=dram_s))
        search.prove(search.delayed.claim)
    return None


def relaxation(search: Search, share: float, params: BranchingParams) -> Assignment | None:
    """The first relaxation of `branching`, once."""
    known = search.branched is not None
    return None if known else branching(search, share, replace(params, most_gap=0.0))


def branching(search: Search, share: float, params: BranchingParams) -> Assignment | None:
    """Branch and bound: a better plan, and a closer bound; None where it does not apply."""
    if search.best is None:
        return None
    found = branch_and_bound(
        search.best,
        search.lagrangian.price_s_per_byte,
        clock=search.clock.part(share),
        gap=search.clock.limits.gap,
        params=params,
        bounding=search.bounding.instance,
        before=search.branched,
    )
    if found is None:
        return None
    search.branched = found
    search.stats |= {"branching_bound_s": found.bound_s, "linear_programs": found.programs}
    search.prove(found.claim)
    return found.best


def with_time(least_s: float, run: Run, *, bounds: float = 0.0) -> Run:
    """A stage that is left out where less than `least_s` seconds are left.

    Or less than so many times what the first bound took.
    """

    def run_with_time(search: Search) -> Assignment | None:
        needed_s = max(least_s, bounds * search.bounded_in_s)
        enough = search.clock.repeats or search.clock.left_s >= needed_s
        return run(search) if enough else None

    return run_with_time


def exact_program(search: Search, share: float, most_places: int) -> Assignment | None:
    """The whole problem by CP-SAT, numbers of hot rows included, if it is small."""
    if search.best is None or search.best.own_step_time_s <= 0:
        return None
    program = ExactProgram.build(search.instance, "time", most_places, search.best.own_step_time_s)
    if program is None:
        return None
    program.hint(search.best)
    answer = program.run(search.clock.limits, search.clock.left_s * share)
    search.stats["exact_variables"] = answer.variables
    search.prove(answer.claim)
    return answer.assignment
