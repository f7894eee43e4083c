"""A running search: what strategies are given, and what their stages hand on."""

from dataclasses import dataclass, field

import numpy as np

from solvers.bounds.feasibility import nothing_fits, rows_beyond_their_memories, usable_options
from solvers.bounds.lagrangian import LagrangianBound, lagrangian_bound
from solvers.model.assignment import Assignment
from solvers.model.build_plan import fitted_plan
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.result import SearchState, Termination
from solvers.search.branching import BranchAndBound
from solvers.search.fit_program import fit
from solvers.search.room import make_room

_BOUND_SHARE = 0.4
"""Of the time that is left, for a closer Lagrangian bound of large problems."""

_SHORTAGES_S = 2.0
"""Seconds to find out by how much devices fall short, where it is known that nothing fits."""


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
    branched : BranchAndBound or None
        The last branch and bound, whose beginning the next one need not make again.
    best : Assignment or None
    failure : Termination or None
        A proof that there is no plan.
    looked_for_room : bool
        Whether `first_fit` has run.
    stats : dict
        What the strategy counts, for `SolveResult.stats`.
    stage : str
        What the strategy is at.
    bounded_in_s : float
        Seconds that the Lagrangian bound took.
    first : Assignment or None
        That for the bound's own step time, which weighing chains began with.
    others_s : float
        A lower limit of plans that the search leaves out.
    repeated : int
        How often `another_seed` was asked for.
    """

    instance: Instance
    clock: Clock
    lagrangian: LagrangianBound
    bound_s: float
    delayed: "Search | None" = None
    branched: BranchAndBound | None = None
    best: Assignment | None = None
    failure: Termination | None = None
    looked_for_room: bool = False
    stats: dict[str, object] = field(default_factory=dict)
    stage: str = ""
    bounded_in_s: float = 0.0
    first: Assignment | None = None
    others_s: float = np.inf
    repeated: int = 0

    @classmethod
    def start(
        cls, instance: Instance, clock: Clock, known: LagrangianBound | None = None
    ) -> "Search":
        """Return a search that has a Lagrangian bound only: see `lagrangian_bound` for `known`."""
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
    def weighed_bound_s(self) -> float:
        """The Lagrangian bound of whole steps."""
        return self.proven.step_time_s + self.of_steps.instance.fixed_s

    @property
    def proven_s(self) -> float:
        """The largest step time that is proven to be a lower limit of all plans."""
        return min(self.bound_s, self.others_s)

    def prove(self, bound_s: float) -> None:
        """Lift the bound to a step time that no plan of this search is below."""
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
        """Whether an assignment exists, and is good enough or has to be."""
        return self.best is not None and not self.is_open

    def first_fit(self) -> Assignment | None:
        """Any assignment that fits, where no construction finds one; or a proof, in `failure`.

        What is looked for in vain is not looked for again.
        """
        if self.failure is not None or self.looked_for_room:
            return None
        self.looked_for_room = True
        # A proof has to be about all plans, and not only those that are searched.
        instance = self.instance
        if not instance.with_replicas:
            instance = instance.recounted(with_replicas=True)
        options = usable_options(instance)
        proof = (
            options if isinstance(options, Termination) else rows_beyond_their_memories(instance)
        )
        if proof is None and not isinstance(options, Termination):
            assignment = make_room(instance, options, self.seed, self.clock)
            # Its plan may need a map of rows on GPUs where the assignment counts none.
            if assignment is not None and fitted_plan(assignment) is not None:
                return assignment
        # Of small problems, CP-SAT says what is short; of others a proof will do.
        left_s = self.clock.left_s if proof is None else min(self.clock.left_s, _SHORTAGES_S)
        answer = fit(instance, self.clock.limits, left_s)
        if answer.is_impossible and (proof is None or answer.short_bytes):
            proof = nothing_fits(instance, answer.short_bytes or {})
        self.failure = proof
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
