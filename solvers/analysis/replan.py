"""Choose a new plan after accesses or the machine have changed, weighing it against the migration.

docs/replan.md lists the candidates. Each costs its step time times a horizon of steps, plus the
time of the migration. The step time is that of the rows that the plan really has in HBM
(`placer.plan.drift`), not of the hottest rows of the new profile.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from cost_models import CostModel, ShardingOption
from placer.constraints.unmet import unmet
from placer.errors import PlanMismatchError, ProblemError
from placer.plan.diff import PlanDiff, diff
from placer.plan.migration import break_even_steps, migration
from placer.plan.plan import Plan
from placer.plan.verify import check_shards, violations
from placer.problem import Problem
from placer.units import counted
from solvers.analysis import kept_plan as staying
from solvers.model.assignment import Assignment
from solvers.model.build_plan import build_plan, fitted_plan
from solvers.model.clock import Clock
from solvers.model.read_plan import placements_of
from solvers.registry import solver as solver_called
from solvers.result import Limits, SolveResult
from solvers.search.moves import improve
from solvers.search.old_placement import old_assignment, old_tables
from solvers.strategies._base import recorded
from solvers.strategies._search import Search, first_instance

HORIZON_STEPS, _MOST_HORIZON_STEPS = 100_000, 10**15
"""Default and largest number of steps for which a new plan is used."""
KEEP = "keep"
"""Name of the candidate that keeps the old placement."""
_MOST_STEPS = 1 << 12
_FRESH_SHARE = 0.6
"""The plan from scratch takes at most this share of the time limit."""
_OLD_PLAN_READS = 5.0
"""Reserve this many times what reading the old plan took for the steps after that plan. On 3,000
tables and 64 GPUs, reading takes 5.4 s and these steps 25 s."""

_COSTINGS_AFTER_SEARCH = 6
"""Time to reserve after the search, in costings: 11 s against 2.7 s each for 10,000 tables."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that could follow the old one.

    `step_time_s` is the step time with the rows that are in HBM under the plan's row order.
    `cost_s` is the time of all steps of the horizon and of the migration (see
    `placer.plan.migration.Migration`). After `break_even_steps`, the migration has paid for itself,
    compared with the old placement: 0 if nothing moves; None if it never pays, or the old placement
    does not work. `on_front` says that no other candidate moves as little and is as fast.
    """

    name: str
    plan: Plan
    step_time_s: float
    moved_bytes: int
    migration_s: float
    waits_for: str
    cost_s: float
    break_even_steps: float | None = None
    on_front: bool = False


@dataclass(frozen=True, slots=True)
class Replanned:
    """The result of `replan`: all candidates, those that move fewest bytes first, and the best.

    `chosen` has the least cost over the horizon; of equal candidates, it moves least. `moves` lead
    from the old plan to it. `old_step_time_s` is the old placement's step time on the new problem.
    If that placement does not work, `old_refused` says why. `fresh` is the result from scratch.
    """

    horizon_steps: int
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    old_step_time_s: float | None
    old_refused: str
    fresh: SolveResult
    moves: PlanDiff | None


def replan(
    problem: Problem,
    cost_model: CostModel,
    old: Plan,
    limits: Limits | None = None,
    *,
    horizon_steps: int = HORIZON_STEPS,
    solver: str = "greedy-cost",
    on_candidate: Callable[[str], None] = lambda name: None,
) -> Replanned:
    """Return the plan that should follow `old` on a changed problem.

    Raises PlanError if `old` does not cover a table exactly once, or has a malformed shard. Raises
    ProblemError if the horizon is negative or too large.

    Parameters
    ----------
    problem : Problem
        The present tables, accesses and machine. Devices and tables are matched by name.
    limits : Limits, optional
        Limits of the whole call.
    horizon_steps : int
        Number of steps until the next change, within which a migration must pay.
    solver : str
        Name of the solver for the plan from scratch.
    on_candidate : callable
        Called with the name of each candidate once it is found.

    Examples
    --------
    >>> from cost_models import Roofline
    >>> from placer import Problem, Topology
    >>> from placer.workloads import named_workload
    >>> from solvers import solve
    >>> tables = named_workload("random-3@1")
    >>> old = solve(Problem(tables, Topology.parse("2xt4", hbm="1GiB"), 64), "greedy-cost").plan
    >>> now = Problem(tables, Topology.parse("1xt4", hbm="1GiB"), 64)
    >>> replan(now, Roofline(), old).old_refused
    "the old plan uses gpu:1, which '1xt4' lacks"
    """
    if not 0 <= horizon_steps <= _MOST_HORIZON_STEPS:
        raise ProblemError(
            f"the horizon must be 0 to {_MOST_HORIZON_STEPS:,} steps, not {horizon_steps:,}"
        )
    check_shards(old)
    limits = limits or Limits()
    search = _Replanning(problem, cost_model, old, limits, horizon_steps)
    kept, refused = staying.kept_plan(problem, cost_model, old)
    left_s = limits.time_limit_s - _OLD_PLAN_READS * (time.monotonic() - search.started)
    fresh_s = max(0.0, min(left_s, limits.time_limit_s * _FRESH_SHARE))
    fresh = solver_called(solver).solve(problem, cost_model, replace(limits, time_limit_s=fresh_s))
    found: list[Candidate] = []
    as_it_is = [] if kept is None else [(KEEP, kept)]
    for name, plan in itertools.chain(as_it_is, search.refilled(fresh.plan)):
        began = time.monotonic()
        if name != KEEP:
            on_candidate(name)
        if (one := search.costed(name, plan)) is not None:
            found.append(one)
        search.keep_time(time.monotonic() - began)
    anew = None if fresh.plan is None else search.anew(f"from scratch, {solver}", fresh.plan)
    if anew is not None:
        on_candidate(anew.name)
        found.append(anew)
    old_step_s = next((one.step_time_s for one in found if one.name == KEEP), None)
    candidates = _weighed(found, old_step_s)
    # They are sorted: of equal costs, the first one moves least.
    chosen = min(candidates, key=attrgetter("cost_s"), default=None)
    if chosen is not None:
        recorded = replace(chosen, plan=search.recorded(chosen, fresh))
        candidates = tuple(recorded if one is chosen else one for one in candidates)
        chosen = recorded
    moves = None if chosen is None else diff(old, chosen.plan)
    return Replanned(horizon_steps, candidates, chosen, old_step_s, refused, fresh, moves)


def _weighed(found: Iterable[Candidate], old_step_s: float | None) -> tuple[Candidate, ...]:
    """Sort candidates by moved bytes, and set `break_even_steps` and `on_front`."""
    candidates: list[Candidate] = []
    fastest_s = float("inf")
    for one in sorted(found, key=attrgetter("moved_bytes", "step_time_s")):
        pays = None
        if old_step_s is not None:
            pays = break_even_steps(one.migration_s, old_step_s, one.step_time_s)
        on_front = one.step_time_s < fastest_s
        candidates.append(replace(one, break_even_steps=pays, on_front=on_front))
        fastest_s = min(fastest_s, one.step_time_s)
    return tuple(candidates)


class _Replanning:
    """Makes candidates to follow an old plan, and costs them."""

    def __init__(
        self, problem: Problem, cost_model: CostModel, old: Plan, limits: Limits, horizon: int
    ) -> None:
        self.problem, self.cost_model, self.old, self.limits = problem, cost_model, old, limits
        self.horizon_steps = horizon
        self.started, self.clock = time.monotonic(), Clock.start(limits)
        self.instance = first_instance(problem, cost_model)
        self.old_tables = old_tables(self.instance, old)
        self.kept_s = 0.0

    def keep_time(self, costing_s: float) -> None:
        """Reserve time for the work after the search, estimated by the longest costing so far."""
        wanted_s = _COSTINGS_AFTER_SEARCH * costing_s
        self.clock.reserve(max(0.0, wanted_s - self.kept_s))
        self.kept_s = max(self.kept_s, wanted_s)

    def refilled(self, fresh: Plan | None) -> Iterator[tuple[str, Plan]]:
        """Yield the old options and GPUs with HBM filled again, then improved by search steps.

        New tables get their sharding options of the plan from scratch.
        """

        def option_of_new(number: int) -> ShardingOption:
            name = self.problem.profile.table_names[number]
            placement = fresh and placements_of(self.instance, fresh, name)
            return placement.option if placement else self.instance.options_of(number)[0]

        if self.instance.lacks_dram:
            # The bound's price of DRAM says which rows belong on drives.
            self.instance = Search.start(self.instance, self.clock).instance
        assignment = old_assignment(self.instance, self.old_tables, option_of_new)
        if assignment is None:
            return
        yield from self._built("refill HBM", assignment)
        steps = 0
        while steps < _MOST_STEPS and not self.clock.spent:
            before = assignment.moves
            improve(assignment, replace(self.clock, steps_left=max(1, steps)))
            if assignment.moves == before:
                return
            steps += assignment.moves - before
            yield from self._built(f"{counted(steps, 'step')} of search", assignment)

    def _built(self, name: str, assignment: Assignment) -> Iterator[tuple[str, Plan]]:
        if plan := fitted_plan(assignment):
            every = itertools.chain(assignment.replicas, *assignment.shards)
            options = {shard.table: shard.option for shard in every}
            yield name, self._ordered(plan, [options[n] for n in range(self.instance.tables)])

    def _ordered(self, plan: Plan, options: Sequence[ShardingOption]) -> Plan:
        return staying.with_old_slices(self.instance, plan, self.old, self.old_tables, options)

    def anew(self, name: str, fresh: Plan) -> Candidate | None:
        """Return the candidate from scratch on GPUs with most of its rows; None if unsound."""
        plans = itertools.chain(self._matched(fresh), (fresh,))
        return next((one for plan in plans if (one := self.costed(name, plan))), None)

    def _matched(self, fresh: Plan) -> Iterator[Plan]:
        """Yield the plan with equal GPUs exchanged: with equal slices exchanged, then without."""
        instance, names = self.instance, self.problem.profile.table_names
        read = [placements_of(instance, fresh, name) for name in names]
        placements = [placement for placement in read if placement is not None]
        if len(placements) < len(read):
            return
        gpus = staying.matched_gpus(instance, fresh, self.old, placements, self.old_tables)
        moved = [
            replace(one, placements=tuple(replace(p, gpu=gpus[p.gpu]) for p in one.placements))
            for one in placements
        ]
        devices = [gpu.id for gpu in self.problem.topology.serving]
        sliced = [
            staying.with_matched_slices(one, self.old_tables.get(n), devices, instance.rows(n))
            for n, one in enumerate(moved)
        ]
        for parts in (sliced, moved):
            placed = [one for part in parts for one in part.placements]
            replicas = [shard for part in parts for shard in part.replicas]
            plan = build_plan(instance, placed, replicas)
            yield self._ordered(plan, [part.option for part in parts])

    def costed(self, name: str, plan: Plan) -> Candidate | None:
        """Return the candidate with its step time and migration; None if the plan is not sound."""
        if violations(plan) or unmet(plan, self.problem.constraints):
            return None
        ordered, model = self.problem.in_plan_order(plan), self.cost_model
        try:
            step_time_s = model.evaluate(ordered, plan).step_time_s
            # Rows that do not fit in the old plan's staging buffers are read in place.
            share = staying.in_place_share(self.problem, model, plan) if name == KEEP else 0.0
            if share:
                in_place_s = model.evaluate(ordered, staying.read_in_place(plan)).step_time_s
                step_time_s += share * max(0.0, in_place_s - step_time_s)
        except PlanMismatchError:
            return None
        # A machine of one host has no network link, and yet the rows of other hosts come to it.
        way = migration(diff(self.old, plan), in_files=True)
        move = way.moved_bytes, way.seconds, way.waits_for
        cost_s = step_time_s * self.horizon_steps + way.seconds
        return Candidate(name, plan, step_time_s, *move, cost_s)

    def recorded(self, chosen: Candidate, fresh: SolveResult) -> Plan:
        """Return the chosen plan with its solver record and provenance."""
        bound_s = fresh.bound_s
        if bound_s is not None and bound_s > chosen.step_time_s:
            bound_s = None  # The old placement is outside the search space.
        return recorded(
            chosen.plan,
            self.instance,
            name="replan",
            status="feasible",
            step_time_s=chosen.step_time_s,
            bound_s=bound_s,
            seconds=round(time.monotonic() - self.started, 3),
            seed=self.limits.seed,
        )
