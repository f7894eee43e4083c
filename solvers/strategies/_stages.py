"""Stages that strategies are made of: each takes a search and may find an assignment."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from solvers.bounds.least_cost import waits
from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.model.delays import Delay
from solvers.model.instance import Instance, ShardingOption
from solvers.search.arena_construction import assignments_by_arena
from solvers.search.branching import BranchingParams, branch_and_bound, points_of
from solvers.search.candidates.shards import assigned
from solvers.search.construction import options_for, packed, short_options
from solvers.search.moves import improve
from solvers.strategies._search import Search

TARGETS = (1.0, 1.01, 1.03, 1.08, 1.2, 0.85, 0.7, 1.5, 2.5)
"""Step times, as shares of the bound, for which the cost greedy chooses sharding options."""

LONGEST_SHARES = (1.0, 2.0, 0.75, 0.5)
"""Most that a shard may take of a phase, as shares of the mean GPU's time in it."""

_CONSTRUCTION_SHARE = 0.5
"""Of the time for a first plan, for ways to shard tables; the rest improves the best of them."""

_CLOSE_ENOUGH = 1e-3

_PROMISING = 1.2
"""Times the best assignment's objective that a first one may have: improving gains less than that
without sharding anything again."""

_IMPROVED = 5
"""Constructions that are improved: the best one after that was among the first 3 on 17 of 17
problems, and later on a tiny one."""

MANY_PLACES = 10_000
"""Tables × GPUs from which only the first target is tried, if anything fits then: on 856 × 128 the
others take as long as the bound, and on 17 of 17 problems they led to no better plan."""

_BRANCHED_PLACES = 2000
"""Tables × GPUs up to which branch and bound is worth its time."""

_RELAXED_TABLES = 200
"""Tables up to which its first relaxation alone is, whose size hardly depends on the GPUs."""

_DELAYED_BOUNDS = 1.2
"""Times the first bound that one with delays takes."""

_LEAST_S, _LEAST_S_PER_POINT = 0.5, 1.5e-6
"""Seconds that have to be left for a first proof, at least and for each point of all curves: the
program and its first relaxation take about 1e-6 for each."""


def construct(search: Search, share: float = 1.0, *, resharded: bool = True) -> Assignment | None:
    """Construct a few plans and improve those that promise most.

    Parameters
    ----------
    share : float
        Of the time that is left, at most; one plan is constructed in any case. Small problems may
        take all of it: that is seconds, and until then nothing else gains as much.
    resharded : bool
        Whether tables of the best one are sharded again, which takes as long as all the rest.
    """
    is_small = is_branched(search.instance) and not search.clock.repeats
    clock = search.clock if is_small else search.clock.part(share)
    enough_s = search.bound_s * (1 + _CLOSE_ENOUGH)
    made: list[Assignment] = []
    for assignment in _constructed(search, clock.part(_CONSTRUCTION_SHARE)):
        if made and assignment.key_s > _PROMISING * min(one.key_s for one in made):
            break
        improve(assignment, clock, reshard_tables=False)
        made.append(assignment)
        if clock.spent or assignment.step_time_s <= enough_s:
            break
    if not made:
        fitting = search.first_fit()
        made = [] if fitting is None else [fitting]
    made.sort(key=lambda one: (one.step_time_s, _all_chains_s(one)))
    if not made or made[0].step_time_s <= enough_s:
        return made[0] if made else None
    best = min(made, key=lambda one: (one.key_s, _all_chains_s(one))).copy()
    if resharded:
        improve(best, clock)
    return min(best, made[0], key=lambda one: one.step_time_s)


def _constructed(search: Search, clock: Clock) -> list[Assignment]:
    """Construct assignments, those that promise most first."""
    made: list[Assignment] = []
    for assignment in _packed(search):
        if assignment is not None:
            made.append(assignment)
        if clock.spent and made:
            break
    return sorted(made, key=lambda one: (one.key_s, _all_chains_s(one)))[:_IMPROVED]


def _all_chains_s(assignment: Assignment) -> float:
    """Return seconds of all chains: of plans that wait for servers alone, drives may differ.

    Without servers, 0: the first of equally fast ones is the best.
    """
    instance = assignment.instance
    chains_s = instance.objective.schedule.chain_times_s(assignment.phase_s.T)
    return float(chains_s.sum()) if instance.servers else 0.0


def _packed(search: Search) -> Iterator[Assignment | None]:
    """Pack several choices of sharding options, the usual one first."""
    instance, bound = search.instance, search.lagrangian
    price = bound.price_s_per_byte
    seen: set[tuple[ShardingOption, ...]] = set()
    fits, best_s = False, np.inf
    for target in (*TARGETS, np.inf):
        target_s = target * bound.step_time_s
        if target == np.inf:  # Drives may be far slower than all of them together.
            if not instance.lacks_dram or best_s <= max(TARGETS) * bound.step_time_s:
                return
            target_s = best_s
        options = options_for(instance, bound, target_s)
        if options is None or tuple(options) in seen:
            continue
        is_first = not seen
        seen.add(tuple(options))
        known = search.first if is_first and target == TARGETS[0] else None
        assignment = packed(instance, options, price) if known is None else known.copy()
        fits |= assignment is not None
        best_s = min(best_s, np.inf if assignment is None else assignment.step_time_s)
        yield assignment
        if is_first and instance.gpus > 1:
            for share in LONGEST_SHARES:
                short = tuple(short_options(instance, options, price, share))
                if short not in seen:
                    seen.add(short)
                    assignment = packed(instance, short, price)
                    fits |= assignment is not None
                    yield assignment
            for assignment in assignments_by_arena(instance, bound):
                fits = True
                yield assignment
        if fits and instance.tables * instance.gpus > MANY_PLACES:
            return


def choose(search: Search) -> Assignment | None:
    """Choose among candidates of all tables; construct a plan where none of theirs fits."""
    found, limit_s = assigned(search.instance, search.clock)
    if found is None:
        return construct(search)
    search.prove(limit_s)
    return found


def anneal(search: Search, share: float) -> Assignment | None:
    """Anneal the best assignment."""
    # Here, as loading the compiler takes longer than a small greedy's search.
    from solvers.search import annealing

    if search.best is None:
        return None
    instance = search.instance
    if instance.needs_servers and not instance.dram_price:
        # Annealing does not count DRAM here, where GPUs' hosts are mostly full.
        moved = search.best.copy()
        improve(moved, search.clock.part(share))
        return moved
    near: Assignment | None = None
    if instance.problem.widths and instance.servers and instance.dram_price and not search.repeated:
        # Moves rarely lead from whole tables on servers to tables that servers and GPUs share, so
        # runs also begin near the relaxation. Without narrow rows such runs found worse plans.
        prove(search, share, is_first=True)
        near = None if search.branched is None else search.branched.near
    return annealing.anneal(
        search.best,
        other=near,
        target_s=search.target_s,
        seed=search.another_seed(),
        clock=search.clock.part(share),
    )


def is_branched(instance: Instance) -> bool:
    """Return true if branch and bound is worth its time; else it ends with its first relaxation."""
    return instance.gpus > 1 and instance.tables * instance.gpus <= _BRANCHED_PLACES


def prove(search: Search, share: float, *, is_first: bool = False) -> Assignment | None:
    """Lift the bound by delays and by branch and bound, which may find a better plan, too.

    With `is_first`, by its first relaxation alone.
    """
    instance, clock = search.instance, search.clock.part(share)
    if search.best is None or instance.gpus == 1:
        return None
    if clock.repeats or clock.left_s >= _DELAYED_BOUNDS * search.bounded_in_s:
        _count_delays(search)
    is_whole = is_branched(instance) and not is_first
    if not is_whole and (search.branched is not None or instance.tables > _RELAXED_TABLES):
        return None
    is_begun = search.branched is not None or clock.repeats
    least_s = max(_LEAST_S, _LEAST_S_PER_POINT * points_of(instance))
    if not is_begun and search.clock.left_s < least_s:
        return None
    found = branch_and_bound(
        search.best,
        search.lagrangian.price_s_per_byte,
        clock=clock,
        gap=search.clock.limits.gap,
        params=BranchingParams() if is_whole else BranchingParams(most_gap=0.0),
        bounding=search.bounding.instance,
        before=search.branched,
    )
    if found is None:
        return None
    search.branched = found
    search.stats |= {"branching_bound_s": found.bound_s, "linear_programs": found.programs}
    search.prove(found.proven_s)
    return found.best


def _count_delays(search: Search) -> None:
    """Lift this bound and later ones by what phases delay one another."""
    instance = search.instance
    delay = Delay.of(instance.objective.schedule)
    if (
        search.best is None
        or search.delayed
        or delay is None
        or not delay.is_likely(search.best.phase_s)
    ):
        return
    if waits(instance, delay.lane.before, delay.lane.begin_s):
        # Searches do better with the phases themselves.
        weights = np.eye(1 + len(instance.objective.schedule.chains))[-1]
        other = instance.recounted(weights, delay=delay)
        # Of the hosts' memory it is known beside what every step takes, which is not the same.
        known = search.lagrangian
        dram_s = max(0.0, known.dram_s + instance.fixed_s - other.fixed_s)
        search.delayed = Search.start(other, search.clock, replace(known, dram_s=dram_s))
        search.prove(search.delayed.bound_s)
