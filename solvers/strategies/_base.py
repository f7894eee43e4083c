"""What all strategies share: clock, instance, proof of infeasibility, bound and result."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import ClassVar, NamedTuple

import numpy as np

import placer
from cost_models import CostModel
from cost_models.step_equation.contention import slowdown
from placer.constraints.unmet import unmet
from placer.plan.fields import Provenance, SolverRecord
from placer.plan.plan import Plan
from placer.plan.verify import violations
from placer.problem import Problem
from solvers.bounds.binding import binding
from solvers.bounds.feasibility import impossible, nothing_fits
from solvers.bounds.lagrangian import LagrangianBound, lagrangian_bound
from solvers.model.assignment import Assignment
from solvers.model.build_plan import fitted_plan
from solvers.model.clock import Clock
from solvers.model.instance import Instance, ShardingOption
from solvers.result import Limits, SearchState, SolveResult, Termination
from solvers.search.construction import construct
from solvers.search.exact_program import fit
from solvers.search.moves import improve
from solvers.search.old_placement import old_assignment, old_tables
from solvers.search.room import make_room

_FITTED_PLACES = 60_000
"""Shards × GPUs × points of curves that CP-SAT looks at where no construction finds a plan."""

_WARM_SHARE = 0.3
"""Of the time, for improving a warm start."""

_CHAIN_SHARES = ((0.3, 0.6, 1.2), (0.6, 0.9, np.inf), (1.0, 1.2, np.inf))
"""What a chain of phases counts beside the main one, where a first placement's takes at least, and
less than, so many times as long as the main one."""

_WEIGHED_BOUNDS, _FINISH_BOUNDS = 10.0, 0.3
"""Times what the first bound took that has to be left for other weights of chains; and that is kept
for making and checking the plan."""

_NOTABLE = 0.98
"""Share of a first placement's time from which another one's is worth other weights."""

_EXACT = 1e-6
"""Share of itself to which a bound is known."""

_HOST_WAITS, _HOST_SHARES = 1.1, (0.1, 0.3, 0.6)
"""Times a placement's longest chain that its hosts' memory takes for that to count, and what it
then counts beside the main chain: little, as few rows in HBM spare a host most of its reads."""


@dataclass
class Search:
    """A running search: its problem, its limits, its bounds and its best assignment.

    Attributes
    ----------
    lagrangian : LagrangianBound
        The bound that every strategy starts with.
    bound_s : float
        The largest step time that is proven to be a lower limit of what is searched.
    delayed : Search or None
        The same with a chain of phases that counts delays, for bounds.
    best : Assignment or None
    failure : Termination or None
        A proof that there is no plan.
    stats : dict
        What the strategy counts, for `SolveResult.stats`.
    stage : str
        What the strategy is at.
    bounded_in_s : float
        Seconds that the Lagrangian bound took.
    warm_start : Plan or None
        Of a similar problem, to begin with.
    first : Assignment or None
        That for the bound's own step time, which weighing chains began with.
    others_s : float
        A lower limit of plans that the search leaves out.
    """

    instance: Instance
    clock: Clock
    lagrangian: LagrangianBound
    bound_s: float
    delayed: "Search | None" = None
    best: Assignment | None = None
    failure: Termination | None = None
    stats: dict[str, object] = field(default_factory=dict)
    stage: str = ""
    bounded_in_s: float = 0.0
    warm_start: Plan | None = None
    first: Assignment | None = None
    others_s: float = np.inf

    @classmethod
    def start(cls, instance: Instance, clock: Clock) -> "Search":
        """A search with nothing but its Lagrangian bound."""
        before_s = clock.left_s
        lagrangian = lagrangian_bound(instance)
        bound_s = lagrangian.step_time_s + instance.fixed_s
        return cls(instance, clock, lagrangian, bound_s, bounded_in_s=before_s - clock.left_s)

    @property
    def bounding(self) -> "Search":
        """The search whose instance gives the closest bounds."""
        return self.delayed or self

    @property
    def of_steps(self) -> "Search":
        """Whose Lagrangian bound is of steps: with hosts' memory weighed, its own is of none."""
        return self.bounding if self.instance.host_share else self

    @property
    def proven(self) -> LagrangianBound:
        """The Lagrangian bound of steps, which proofs may use."""
        return self.of_steps.lagrangian

    @property
    def proven_s(self) -> float:
        """The largest step time that is proven to be a lower limit of all plans."""
        return min(self.bound_s, self.others_s)

    @property
    def seed(self) -> int:
        """Seed of everything random."""
        return self.clock.limits.seed

    @property
    def target_s(self) -> float:
        """The step time at which the search ends."""
        return self.bound_s * (1 + self.clock.limits.gap)

    @property
    def is_open(self) -> bool:
        """Whether the plan can still improve and the limits allow another stage."""
        return not self.clock.spent and (self.best is None or self.best.step_time_s > self.target_s)

    @property
    def is_over(self) -> bool:
        """Whether an assignment exists, and is good enough or has to be."""
        return self.best is not None and not self.is_open

    def apart(self, share: float) -> "Search":
        """A search that knows no plan, with a share of the time or all steps, none taken off these.

        So that with equal steps a strategy finds as much within another as by itself.
        """
        clock = self.clock.part(share)
        if clock.repeats:
            clock = replace(clock, steps_left=clock.limits.max_steps, whole=None)
        return replace(self, clock=clock, best=None, stats={})

    def first_fit(self) -> Assignment | None:
        """Any assignment that fits, where no construction finds one; or a proof, in `failure`."""
        assignment = make_room(self.instance, self.seed, self.clock)
        if assignment is not None:
            return assignment
        answer = fit(self.instance, self.clock.limits, self.clock.left_s, _FITTED_PLACES)
        if answer.fewest_short_bytes:
            self.failure = nothing_fits(self.instance, answer.short_bytes)
        return answer.assignment

    def keep(self, assignment: Assignment | None) -> None:
        """Remember an assignment if it is the fastest so far."""
        if assignment is not None and (
            self.best is None or assignment.step_time_s < self.best.step_time_s
        ):
            self.best = assignment
            self.tell()

    def tell(self, stage: str | None = None) -> None:
        """Say how far the search is, to who wants to know: at a stage, or the one as before."""
        self.stage = self.stage if stage is None else stage
        on_state = self.clock.limits.on_state
        if on_state is not None:
            best_s = None if self.best is None else self.best.step_time_s
            on_state(SearchState(self.stage, best_s, self.proven_s))


class Strategy(ABC):
    """A solver: subclasses say how they place tables, the rest is here."""

    name: str
    no_plan: ClassVar[str] = (
        "no placement was found: every GPU needs room for the buffers of its shards, every host "
        "for their cold rows; raise --hbm or the time limit, or lower --batch-size"
    )
    """What a result without a plan says."""

    warm_starts: ClassVar[bool] = False
    """Whether a search makes something of another problem's plan."""

    def solve(
        self,
        problem: Problem,
        cost_model: CostModel,
        limits: Limits,
        warm_start: Plan | None = None,
    ) -> SolveResult:
        """Search to the gap or a limit. See `Solver.solve`.

        Parameters
        ----------
        warm_start : Plan, optional
            Of a similar problem, to begin with: tables and devices are known by their names.
        """
        self.prepare(limits)
        clock = Clock.start(limits)
        instance = Instance(problem, cost_model)
        failure = impossible(instance)
        if failure:
            return SolveResult(None, failure)
        search = Search.start(instance, clock)
        clock.reserve(_FINISH_BOUNDS * search.bounded_in_s)
        search = _unreplicated(_weighed(search))
        search.warm_start = warm_start
        search.tell(self.name)
        outcome = self.place(search)
        if isinstance(outcome, Termination):
            return SolveResult(None, outcome, bound_s=search.proven_s, stats=search.stats)
        return _result(self.name, search, outcome)

    def prepare(self, limits: Limits) -> None:  # noqa: B027
        """Do what is done once for all searches, before the time of this one runs."""

    def place(self, search: Search) -> Plan | Termination:
        """The plan of the first of `assignments` that fits, any that fits, or why there is none."""
        for assignment in self.assignments(search):
            plan = fitted_plan(assignment)
            if plan is not None:
                return plan
        fitting = None if search.failure else search.first_fit()
        plan = None if fitting is None else fitted_plan(fitting)
        if plan is not None:
            return plan
        return search.failure or Termination("no_plan", search.clock.limit_hit, self.no_plan)

    @abstractmethod
    def assignments(self, search: Search) -> Iterable[Assignment]:
        """Search for assignments; yield them, the fastest first."""


Run = Callable[[Search], Assignment | None]
"""A stage's function: it takes a search and may find an assignment."""


class Stage(NamedTuple):
    """One step of a strategy: a function that may find an assignment, and whether to run it."""

    name: str
    run: Run
    wanted: bool = True


class StagedStrategy(Strategy):
    """A strategy that is a list of stages; the best assignment goes from one to the next.

    A warm start comes before them, so that what the first stage finds may still be better.
    """

    warm_starts = True

    @abstractmethod
    def stages(self, instance: Instance) -> list[Stage]:
        """The stages in order: the first is always run, others while there is something to gain."""

    def admitted(self, assignment: Assignment, search: Search) -> Assignment | None:
        """An assignment as it may become a plan."""
        return assignment

    def assignments(self, search: Search) -> Iterable[Assignment]:
        """Run the stages."""
        first, *others = self.stages(search.instance)
        if self.warm_starts and search.warm_start is not None:
            self._run(Stage("warm", _warm), search)
        if search.best is None or search.is_open:
            self._run(first, search)
        for stage in others:
            if stage.wanted and search.is_open:
                self._run(stage, search)
        if search.best is not None:
            search.stats["moves"] = search.best.moves
            yield search.best

    def _run(self, stage: Stage, search: Search) -> None:
        search.tell(stage.name)
        assignment = stage.run(search)
        assignment = None if assignment is None else self.admitted(assignment, search)
        if assignment is not None:
            search.stats[f"{stage.name}_s"] = assignment.step_time_s
            search.keep(assignment)


def _warm(search: Search) -> Assignment | None:
    """The sharding options and GPUs of the plan to begin with, HBM filled anew, and improved.

    Tables that it does not have get the option that the bound has for them.
    """
    instance, bound, plan = search.instance, search.lagrangian, search.warm_start

    def option_of_new(table: int) -> ShardingOption:
        works = bound.option_for(table, bound.step_time_s)
        return instance.options_of(table)[0] if works is None else works.option

    assert plan is not None, "the stage is left out without one"
    assignment = old_assignment(instance, old_tables(instance, plan), option_of_new)
    if assignment is not None:
        improve(assignment, search.clock.part(_WARM_SHARE))
    return assignment


def _weighed(search: Search) -> Search:
    """The search with the chains of phases weighed so that a first placement takes least time.

    At first the main chain alone counts. If a first placement waits for another one, such as the
    host link, mixtures of the two are tried; if it waits for a host's memory, mixtures with that.
    """
    instance, bound = search.instance, search.lagrangian
    first = search.first = construct(instance, bound, bound.step_time_s)
    many = search.clock.left_s < _WEIGHED_BOUNDS * search.bounded_in_s
    if first is None or (many and not search.clock.repeats):
        return search
    times_s = instance.objective.schedule.chain_times_s(first.phase_s.T)
    longest = int(times_s[1:].argmax()) + 1 if times_s.size > 1 else 0
    waits_for_host = first.step_time_s > _HOST_WAITS * float(times_s.max())
    if not longest and not waits_for_host:
        return search
    best, best_s, bound_s = search, first.step_time_s, search.bound_s
    tried: Sequence[float] = _HOST_SHARES
    if not waits_for_host:  # Shares near that of what the chain takes.
        ratio = float(times_s[longest] / times_s[0]) if times_s[0] else np.inf
        tried = [s for s, low, high in _CHAIN_SHARES if low <= ratio < high]
    for share in tried:
        weights = np.eye(times_s.size)[0]
        if not waits_for_host:
            weights[0], weights[longest] = 1 - share, share
        host_share = share if waits_for_host else 0.0
        other = Search.start(
            Instance(
                instance.problem,
                instance.cost_model,
                weights,
                like=instance,
                host_share=host_share,
                with_replicas=instance.with_replicas,
            ),
            search.clock,
        )
        if waits_for_host:
            # A single shard may take its host's memory for all of its time, but not once for each
            # GPU: bounds are still those of the chains.
            other = replace(other, delayed=search)
        else:
            bound_s = max(bound_s, other.bound_s)
        found = construct(other.instance, other.lagrangian, other.lagrangian.step_time_s)
        other.first = found
        if found is not None and found.step_time_s < _NOTABLE * best_s:
            best, best_s = other, found.step_time_s
    return replace(best, bound_s=bound_s)


def _unreplicated(search: Search) -> Search:
    """A search of plans without replicas, where a first one takes less time; else the same search.

    Replicas of a first table may take a step's worth of collectives, which those of others then
    share, and which neither bounds nor changes of a placement are rated by.
    """
    instance, first = search.instance, search.first
    if not instance.replicas_s or first is None or not first.replicas:
        return search
    other = _weighed(
        Search.start(
            Instance(instance.problem, instance.cost_model, like=instance, with_replicas=False),
            search.clock,
        )
    )
    if other.first is None or other.first.step_time_s >= first.step_time_s:
        return search
    # A plan has replicas, and takes what all of them take once, or it has none.
    others_s = _contended_s(search.of_steps.instance, search.proven)
    return replace(other, others_s=others_s + search.of_steps.instance.replicas_s)


def _contended_s(instance: Instance, bound: LagrangianBound) -> float:
    """The Lagrangian bound, where GPUs of one host slow each other.

    The mean GPU then takes so many times as long; a single shard may be served while all other GPUs
    are idle, so that the limits of shards stay as they are.
    """
    lowest_s = bound.step_time_s + instance.fixed_s
    longer = slowdown(instance.problem.topology, instance.cost_model.contention)
    if longer == 1:
        return lowest_s
    launches_s = instance.fixed_s - instance.objective.fixed_s

    def needed_s(step_time_s: float) -> float:
        work_s = bound.work_s(step_time_s - instance.fixed_s) / instance.gpus
        return longer * (work_s + launches_s) + instance.objective.fixed_s

    low, high = lowest_s, max(lowest_s, needed_s(lowest_s))
    while high - low > _EXACT * high:  # Work falls as steps grow.
        middle = (low + high) / 2
        low, high = (low, middle) if needed_s(middle) <= middle else (middle, high)
    return low


def _result(name: str, search: Search, plan: Plan) -> SolveResult:
    """The result of a search that ended with `plan`; everything is recomputed from the plan.

    Raises
    ------
    AssertionError
        If the plan breaks a rule or beats the bound: a bug in the solver.
    """
    instance, limits, bound_s = search.instance, search.clock.limits, search.proven_s
    broken = violations(plan) + unmet(plan, instance.problem.constraints)
    assert not broken, f"{name} made an unsound plan: {broken[0].message}"
    report = instance.cost_model.evaluate(instance.problem, plan)
    step_time_s = report.step_time_s
    of_steps_s = _contended_s(search.of_steps.instance, search.proven)
    bound_s = max(bound_s, min(of_steps_s, search.others_s))
    assert step_time_s >= bound_s * (1 - 1e-6), f"{name} beat a bound: {step_time_s} < {bound_s}"
    bound_s = min(bound_s, step_time_s)
    optimal = step_time_s <= bound_s * (1 + limits.gap)
    seconds = search.clock.spent_s
    record = SolverRecord(
        name=name,
        status="optimal" if optimal else "feasible",
        step_time_s=step_time_s,
        bound_s=bound_s,
        seconds=round(seconds, 3),
        seed=limits.seed,
        cost_model=instance.cost_model.name,
        search_space=instance.search_space,
    )
    return SolveResult(
        replace(plan, solver=record, provenance=_provenance(instance.problem)),
        Termination(
            record.status,
            None if optimal else search.clock.limit_hit,
            binding(instance, search.proven, report).words,
        ),
        step_time_s,
        bound_s,
        {"seconds": seconds, "search_space": record.search_space, **search.stats},
    )


def _provenance(problem: Problem) -> Provenance:
    return Provenance(
        problem_sha256=problem.sha256,
        placer_version=placer.__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        profile=problem.profile.reference,
        ids_sha256=problem.profile.ids_sha256,
    )
