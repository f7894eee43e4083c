"""The state of a running search, which stages hand on to each other, and what it minimises.

"What a second counts" in docs/solvers.md says what a search minimises.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cost_models import CostModel
from placer.problem import Problem
from solvers.bounds.feasibility import nothing_fits, rows_beyond_their_memories, usable_options
from solvers.bounds.lagrangian import LagrangianBound, lagrangian_bound
from solvers.model.assignment import Assignment
from solvers.model.build_plan import fitted_plan
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.result import SearchState, Termination
from solvers.search.branching import BranchAndBound
from solvers.search.construction import construct
from solvers.search.fit_program import fit
from solvers.search.room import make_room

_BOUND_SHARE = 0.4
"""Share of the time left that a closer Lagrangian bound of a large problem may take."""


@dataclass
class Search:
    """A running search: its problem, its limits, its bounds and its best assignment."""

    instance: Instance
    clock: Clock
    lagrangian: LagrangianBound  # The bound that every strategy starts with.
    # The largest proven lower bound of the step time of all plans that are searched.
    bound_s: float
    # A search with one more chain, which counts how phases delay each other. It gives bounds.
    delayed: "Search | None" = None
    # The last branch and bound; the next one reuses its formulation and first relaxation.
    branched: BranchAndBound | None = None
    best: Assignment | None = None
    # The best ones before it, in case it makes no plan: only plans count bytes of drives.
    earlier: list[Assignment] = field(default_factory=list)
    failure: Termination | None = None  # A proof that there is no plan.
    looked_for_room: bool = False  # Whether `first_fit` has run.
    # Counters of the strategy, for `SolveResult.stats`.
    stats: dict[str, object] = field(default_factory=dict)
    stage: str = ""  # Name of the current stage.
    bounded_in_s: float = 0.0  # Seconds that the Lagrangian bound took.
    first: Assignment | None = None  # The first placement, constructed for the bound's step time.
    others_s: float = np.inf  # A lower bound of plans that the search leaves out.
    repeated: int = 0  # Number of calls of `another_seed`.
    lacks_time: bool = False  # Whether a stage was left out, as the time left is too short for it.

    @classmethod
    def start(
        cls, instance: Instance, clock: Clock, known: LagrangianBound | None = None
    ) -> "Search":
        """Return a search with a Lagrangian bound and no plan; `lagrangian_bound` takes `known`."""
        before_s = clock.left_s
        part = clock.part(_BOUND_SHARE)
        lagrangian = lagrangian_bound(instance, known, lambda: part.left_s < 0 and not part.repeats)
        if lagrangian.dram_price:
            instance = instance.recounted(
                instance.chain_weights,
                delay=instance.delay,
                host_share=instance.host_share,
                dram_price=lagrangian.dram_price,
                server_share=lagrangian.server_share,
            )
        bound_s = lagrangian.step_time_s + instance.fixed_s
        return cls(instance, clock, lagrangian, bound_s, bounded_in_s=before_s - clock.left_s)

    @property
    def bounding(self) -> "Search":
        """The search with the closest bounds: the one that counts delays, if there is one."""
        return self.delayed or self

    @property
    def of_steps(self) -> "Search":
        """The search whose Lagrangian bound holds for steps; not this one if it weighs DRAM."""
        return self.bounding if self.instance.host_share else self

    @property
    def weighed_bound_s(self) -> float:
        """The Lagrangian bound of a whole step, in seconds."""
        search = self.of_steps
        return search.lagrangian.step_time_s + search.instance.fixed_s

    @property
    def proven_s(self) -> float:
        """The largest proven lower bound of the step time of all plans."""
        return min(self.bound_s, self.others_s)

    def prove(self, bound_s: float) -> None:
        """Raise the bound: every plan of this search takes at least `bound_s`."""
        self.bound_s = max(self.bound_s, bound_s)

    @property
    def seed(self) -> int:
        """Seed of everything random."""
        return self.clock.limits.seed

    def another_seed(self) -> int:
        """Return another seed, so that a repeated search takes another way."""
        self.repeated += 1
        return self.seed + self.repeated - 1

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
        """Whether there is an assignment, and it is good enough or the limits are reached."""
        return self.best is not None and not self.is_open

    def first_fit(self) -> Assignment | None:
        """Return any assignment that fits; None with a proof in `failure`, or if none was found.

        Only the first call searches.
        """
        if self.failure is not None or self.looked_for_room:
            return None
        self.looked_for_room = True
        # A proof has to hold for all plans, not only for those that are searched.
        instance = self.instance
        if not instance.with_replicas or instance.lacks_dram:
            instance = instance.recounted(
                with_replicas=True,
                dram_price=instance.dram_price,
                server_share=instance.server_share,
            )
            instance.dram_bytes = instance.all_dram_bytes  # Searches leave some of it free.
        options = usable_options(instance)
        if isinstance(options, Termination):
            self.failure = options
            return None
        self.failure = rows_beyond_their_memories(instance)
        if self.failure is not None:
            return None
        # Drives may be too small for the rows that options without a share leave to them.
        off_drives = [[o for o in of if not o.home.drive_share] for of in options]
        for tried in [options] + [off_drives] * (all(off_drives) and off_drives != options):
            assignment = make_room(instance, tried, self.seed, self.clock)
            # The plan may need row maps that the assignment does not count.
            if assignment is not None and fitted_plan(assignment) is not None:
                return assignment
        # On small problems CP-SAT also finds which memory is short, and by how much.
        answer = fit(instance, self.clock.limits, self.clock.left_s)
        if answer.lacks_steps:
            self.clock.step(self.clock.steps_left or 0)
        if answer.is_impossible:
            self.failure = nothing_fits(instance, answer.short_bytes or {})
        return answer.assignment

    def keep(self, assignment: Assignment | None) -> None:
        """Remember an assignment if it is the fastest so far."""
        if assignment is not None and (
            self.best is None or assignment.step_time_s < self.best.step_time_s
        ):
            self.earlier += [] if self.best is None else [self.best]
            self.best = assignment
            self.tell()

    def tell(self, stage: str | None = None) -> None:
        """Report the stage, the best step time and the bound to the caller's `on_state`."""
        self.stage = self.stage if stage is None else stage
        on_state = self.clock.limits.on_state
        if on_state is not None:
            best_s = None if self.best is None else self.best.step_time_s
            on_state(SearchState(self.stage, best_s, self.proven_s))


_CHAIN_SHARES = ((0.3, 0.6, 1.2), (0.6, 0.9, np.inf), (1.0, 1.2, np.inf))
"""Weights of the longest other chain, each with two limits. A weight is tried if that chain takes
at least the first limit and less than the second, times the time of the main chain. Of 59 problems,
one step was 5% longer without weights, and another's bound was 45% lower."""

_WEIGHED_BOUNDS = 10.0
"""Try other weights of chains only if this many times the first bound's time is left."""

_NOTABLE = 0.98
"""Take other weights if they shorten the first placement's step to less than this share of it."""

_HOST_WAITS, _HOST_SHARES = 1.1, (0.1, 0.3, 0.6)
"""Count hosts' memory if it takes this many times as long as the longest chain, with these weights.
They are small, as a few rows in HBM spare a host most of its reads. With DRAM four times as slow as
usual, steps were 0.7 and 7% longer without them."""


def first_instance(problem: Problem, cost_model: CostModel) -> Instance:
    """Return the instance that a search begins with.

    If drives must hold rows, only the chain of phases that copies them counts.
    """
    instance = Instance(problem, cost_model)
    if not instance.lacks_dram:
        return instance
    schedule = instance.objective.schedule
    copies = {n for n, name in enumerate(schedule.phases) if name in ("copies", "link")}
    with_copies = [n for n, chain in enumerate(schedule.chains) if copies & {*chain}]
    return instance.recounted(np.eye(len(schedule.chains))[with_copies[-1] if with_copies else 0])


def weighed(search: Search) -> Search:
    """Return a search whose weights of chains suit what a first placement waits for.

    See "What a second counts" in docs/solvers.md.
    """
    instance, bound = search.instance, search.lagrangian
    first = search.first = construct(instance, bound, bound.step_time_s)
    many = search.clock.left_s < _WEIGHED_BOUNDS * search.bounded_in_s
    if first is not None and instance.lacks_dram:
        on_gpus = first.phase_s[: instance.gpus - instance.servers]
        chains_s = instance.objective.schedule.chain_times_s(on_gpus.T)
        if instance.objective.chain_weights.argmax() == chains_s.argmax():
            return search
    if first is None or (many and not search.clock.repeats):
        return search
    times_s = instance.objective.schedule.chain_times_s(first.phase_s.T)
    longest = int(times_s[1:].argmax()) + 1 if times_s.size > 1 else 0
    waits_for_host = first.step_time_s > _HOST_WAITS * float(times_s.max())
    if not longest and not waits_for_host:
        return search
    best, best_s, bound_s = search, first.step_time_s, search.bound_s
    tried: Sequence[float] = _HOST_SHARES
    if not waits_for_host:  # Weights near the chain's share of the time.
        ratio = float(times_s[longest] / times_s[0]) if times_s[0] else np.inf
        tried = [s for s, low, high in _CHAIN_SHARES if low <= ratio < high]
        if instance.lacks_dram and not tried:
            tried = [0.0]
    for share in tried:
        weights = np.eye(times_s.size)[0]
        if not waits_for_host:
            weights[0], weights[longest] = 1 - share, share
        host_share = share if waits_for_host else 0.0
        other = Search.start(instance.recounted(weights, host_share=host_share), search.clock)
        if waits_for_host:
            # One shard may keep its host's memory busy all the time, but not once for each GPU. So
            # this sum gives no bound, and bounds are still those of the chains.
            other = replace(other, delayed=search)
        else:
            bound_s = max(bound_s, other.bound_s)
        found = construct(other.instance, other.lagrangian, other.lagrangian.step_time_s)
        other.first = found
        if found is not None and found.step_time_s < _NOTABLE * best_s:
            best, best_s = other, found.step_time_s
    best.prove(bound_s)
    return best


def unreplicated(search: Search) -> Search:
    """Return a search without replicas if a first placement is faster without them.

    Neither bounds nor single changes of a placement count what the first replicated table costs.
    """
    instance, first = search.instance, search.first
    if not instance.replicas_s or first is None or not first.replicas:
        return search
    if search.clock.left_s < search.bounded_in_s and not search.clock.repeats:
        return search
    other = weighed(Search.start(instance.recounted(with_replicas=False), search.clock))
    if other.first is None or other.first.step_time_s >= first.step_time_s:
        return search
    # Every plan has no replicas, or takes the time of their collectives once.
    replicas_s = search.of_steps.instance.replicas_s
    return replace(other, others_s=search.weighed_bound_s + replicas_s)
