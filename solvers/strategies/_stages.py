"""Stages of strategies. Each takes a search and may return an assignment."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from solvers.bounds.option_costs import waits
from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.model.instance import Instance, ShardingOption
from solvers.model.objective import Delay
from solvers.search.arena_construction import assignments_by_arena, whole_tables
from solvers.search.branching import branch_and_bound, points_of
from solvers.search.candidates.shards import assigned
from solvers.search.construction import options_at_price, options_for, packed, short_options
from solvers.search.moves import improve
from solvers.strategies._search import Search

TARGETS = (1.0, 1.01, 1.03, 1.08, 1.2, 0.85, 0.7, 1.5, 2.5)
"""Target step times, as multiples of the bound, for which construction chooses sharding options."""

LONGEST_SHARES = (1.0, 2.0, 0.75, 0.5)
"""Limits of a shard's time in a phase, as multiples of the mean GPU's time in that phase."""

DEARER = (1.1, 1.5, 3.0)
"""Prices of HBM, as multiples of the bound's, for which lookups of cold rows are chosen. Where
buffers nearly fill HBM, the lookups for the bound's price leave a GPU no room for hot rows."""

_FAR = 1.1
"""Try these prices if all packings at the bound's price take more than this multiple of it."""

_CONSTRUCTION_SHARE = 0.5
"""Share of construction's time for packing shards; the rest improves the best packings."""

_CLOSE_ENOUGH = 1e-3

_PROMISING = 1.2
"""Improve only packings whose objective is at most this multiple of the best one's: local search
without resharding gains less."""

_IMPROVED = 5
"""Improve this many packings. On 17 of 17 problems the best result came from the first 3, and on a
tiny one from a later one."""

MANY_PLACES = 10_000
"""Above this many tables × GPUs, stop at the first target that fits. On 856 × 128 the other targets
take as long as the bound, and on 17 of 17 problems they led to no better plan."""

_BRANCHED_PLACES = 2000
"""Run branch and bound up to this many tables × GPUs."""

_TINY_PLACES = 30
"""Up to this many tables × GPUs, run it even at gaps that something outside the program may cause:
it soon examines all plans."""

_MOST_GAP = 10.0
"""Otherwise stop after the first relaxation at larger gaps: such plans wait for something outside
the program, such as a host's memory."""

_RELAXED_TABLES = 200
"""Beyond that, solve its first relaxation up to this many tables; GPUs hardly change its size."""

_DELAYED_BOUNDS = 1.2
"""Time of a bound with delays, as a multiple of the first bound's."""

_LEAST_S, _LEAST_S_PER_POINT = 0.5, 1.5e-6
"""Begin a first proof only with this many seconds left, and this many for each point of all curves.
Building the program and solving its first relaxation take about 1e-6 s a point."""


def construct(search: Search, share: float = 1.0, *, resharded: bool = True) -> Assignment | None:
    """Construct a few assignments, improve the most promising ones, and return the best.

    `share` is the share of the time left to use. One assignment is constructed even if it takes
    longer. Small problems may use all of it: that is seconds, and until then nothing else gains as
    much. `resharded`: whether to try other sharding options in the best one, which doubles the
    time.
    """
    clock = search.clock if is_branched(search.instance) else search.clock.part(share)
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
    ends = [best, made[0]]
    if resharded:
        improve(best, clock)
        # A move changes one table, which rarely saves a launch. So also improve whole tables.
        whole = whole_tables(search.instance, search.lagrangian)
        if whole is not None:
            improve(whole, clock)
            ends.append(whole)
    return min(ends, key=lambda one: one.step_time_s)


def _constructed(search: Search, clock: Clock) -> list[Assignment]:
    """Return constructed assignments, the most promising ones first."""
    made: list[Assignment] = []
    for assignment in _packed(search):
        if assignment is not None:
            made.append(assignment)
        if clock.spent and made:
            break
    return sorted(made, key=lambda one: (one.key_s, _all_chains_s(one)))[:_IMPROVED]


def _all_chains_s(assignment: Assignment) -> float:
    """Return the sum of all chains' seconds, which breaks ties; 0 without servers.

    Plans that wait for servers alone take equal steps, but may load drives differently.
    """
    instance = assignment.instance
    chains_s = instance.objective.schedule.chain_times_s(assignment.phase_s.T)
    return float(chains_s.sum()) if instance.servers else 0.0


def _packed(search: Search) -> Iterator[Assignment | None]:
    """Yield assignments for several choices of sharding options, the usual choice first."""
    instance, bound = search.instance, search.lagrangian
    price = bound.price_s_per_byte
    seen: dict[tuple[ShardingOption, ...], None] = {}
    best_s = np.inf

    def noted(assignment: Assignment | None) -> Assignment | None:
        """Note the step of an assignment."""
        nonlocal best_s
        best_s = min(best_s, np.inf if assignment is None else assignment.step_time_s)
        return assignment

    def packed_once(options: Sequence[ShardingOption], price: float) -> Iterator[Assignment | None]:
        """Pack these options unless they were packed before."""
        if tuple(options) not in seen:
            seen[tuple(options)] = None
            yield noted(packed(instance, options, price))

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
        seen[tuple(options)] = None
        known = search.first if is_first and target == TARGETS[0] else None
        assignment = packed(instance, options, price) if known is None else known.copy()
        yield noted(assignment)
        if is_first and instance.gpus > 1:
            for share in LONGEST_SHARES:
                yield from packed_once(short_options(instance, options, price, share), price)
            yield from map(noted, assignments_by_arena(instance, bound))
        if is_first and price and best_s > _FAR * bound.step_time_s:
            for factor, of_bound in product(DEARER, tuple(seen)):
                dearer = factor * price
                yield from packed_once(options_at_price(instance, of_bound, dearer), dearer)
        if best_s < np.inf and instance.tables * instance.gpus > MANY_PLACES:
            return


def choose(search: Search) -> Assignment | None:
    """Choose one candidate for each table; construct an assignment if no candidates fit."""
    found, limit_s = assigned(search.instance, search.clock)
    if found is None:
        return construct(search)
    search.prove(limit_s)
    return found


def anneal(search: Search, share: float) -> Assignment | None:
    """Anneal the best assignment."""
    # Import here: loading the compiler takes longer than a small problem's greedy search.
    from solvers.search import annealing

    if search.best is None:
        return None
    instance = search.instance
    other: Assignment | None = None
    if instance.problem.widths and instance.servers and instance.dram_price:
        # Single moves rarely turn a whole table on a server into one that servers and GPUs share.
        # So one search may get stuck. Several short searches from the first plan end differently.
        other = (*search.earlier, search.best)[0]
    return annealing.anneal(
        search.best,
        other=other,
        target_s=search.target_s,
        seed=search.another_seed(),
        clock=search.clock.part(share),
    )


def is_branched(instance: Instance) -> bool:
    """Return true if the problem is small enough for branch and bound."""
    return instance.gpus > 1 and instance.tables * instance.gpus <= _BRANCHED_PLACES


def prove(search: Search, share: float) -> Assignment | None:
    """Raise the bound by counting delays and by branch and bound, which may find a better plan."""
    instance, clock = search.instance, search.clock.part(share)
    if search.best is None or instance.gpus == 1:
        return None
    if clock.repeats or clock.left_s >= _DELAYED_BOUNDS * search.bounded_in_s:
        _count_delays(search)
    is_whole = is_branched(instance)
    if not is_whole and (search.branched is not None or instance.tables > _RELAXED_TABLES):
        return None
    if search.branched is None and not clock.repeats:
        left_s = search.clock.left_s
        if left_s < _LEAST_S or left_s < _LEAST_S_PER_POINT * points_of(instance):
            search.lacks_time = True
            return None
    is_tiny = instance.tables * instance.gpus <= _TINY_PLACES
    most_gap = 0.0 if not is_whole else np.inf if is_tiny else _MOST_GAP
    found = branch_and_bound(
        search.best,
        search.lagrangian.price_s_per_byte,
        clock=clock,
        gap=search.clock.limits.gap,
        most_gap=most_gap,
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
    """Raise this bound and later ones by the time that phases delay one another."""
    instance = search.instance
    delay = Delay.of(instance.objective.schedule)
    if search.best is None or search.delayed or delay is None:
        return
    has_servers = instance.needs_servers
    if not has_servers and not delay.is_likely(search.best.phase_s):
        return
    if not waits(instance, delay.lane.before, delay.lane.begin_s):
        return
    # Only bounds count delays: searches find better plans without.
    chains = len(instance.objective.schedule.chains)
    if has_servers:  # They exchange many ids. Branch and bound alone counts what that delays.
        weights = np.append(instance.objective.chain_weights, 0.0)
        counted = {"dram_price": instance.dram_price, "server_share": instance.server_share}
        other = instance.recounted(weights, delay=delay, **counted)
        search.delayed = replace(search, instance=other)
        return
    other = instance.recounted(np.eye(1 + chains)[-1], delay=delay)
    # The known `part_s` excludes the fixed time of a step, which differs here.
    known = search.lagrangian
    part_s = max(0.0, known.part_s + instance.fixed_s - other.fixed_s)
    search.delayed = Search.start(other, search.clock, replace(known, part_s=part_s))
    search.prove(search.delayed.bound_s)
