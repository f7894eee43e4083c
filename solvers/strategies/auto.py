"""What `placer plan` runs unless told otherwise: a portfolio within the time limit.

One assignment goes from strategy to strategy, until it is within the gap of the bound or time
is up: the cost greedy's first plan; annealing, where there are not too many GPUs and tables;
the integer program where it is small enough to be solved; iterated local search; large
neighbourhoods for the time that is left. Where GPUs are unequal or memory binds, the linear
program may lift the bound. Whenever it is stopped, it returns the best plan so far.
"""

import math
import time
from dataclasses import dataclass, field

from cost_models import CostModel
from placer.problem import Problem
from solvers.bounds.feasibility import impossible
from solvers.bounds.lagrangian import LagrangianBound, lagrangian_bound
from solvers.bounds.linear_program import lp_bound
from solvers.model.assignment import Assignment
from solvers.model.build_plan import result_of
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.result import Limits, SolveResult
from solvers.search.annealing import anneal
from solvers.search.integer_program import Program
from solvers.search.iterated import iterated_search
from solvers.search.uniform_splits import with_common_shares
from solvers.strategies.greedy_cost import greedy_assignment
from solvers.strategies.lns import neighbourhood_search

_GREEDY_SHARE, _ANNEALING_SHARE, _PROGRAM_SHARE, _SEARCH_SHARE = 0.6, 0.5, 0.5, 0.6
"""Shares of the time that is left when each of these begins."""

_ANNEALED = 2000
"""Tables × GPUs up to which there is annealing: beyond, chosen moves find more."""

_LIFTED, _LIFTING_SHARE = 20_000, 0.1
"""Tables × GPUs up to which the linear program is solved, in so large a share of the time."""

_SMALL = 1500
"""Shards × GPUs up to which the integer program is tried: it mostly proves its answer."""

_SETTLING_SHARE = 0.05
"""Share of the time for moves that suit what the cost model asks of all shards of a table."""


class Auto:
    """The strategy of this module's docstring."""

    name = "auto"

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Search to the gap or a limit. See `Solver.solve`.

        Raises
        ------
        BackendError
            If CP-SAT or the linear program's solver breaks.
        """
        started, clock = time.monotonic(), Clock.start(limits)
        instance = Instance(problem, cost_model)
        failure = impossible(instance)
        if failure:
            return SolveResult(None, failure)
        search = _Portfolio(instance, lagrangian_bound(instance), clock)
        search.run()
        return result_of(
            self.name,
            instance,
            search.best,
            bound=search.pooled,
            bound_s=search.bound_s,
            clock=clock,
            started=started,
            stats=search.stats,
        )


@dataclass
class _Portfolio:
    """The best assignment and bound so far, and what each stage made of them."""

    instance: Instance
    pooled: LagrangianBound
    clock: Clock
    best: Assignment | None = None
    bound_s: float = 0.0
    stats: dict[str, object] = field(default_factory=dict)

    @property
    def target_s(self) -> float:
        """The step time at which the search ends."""
        return self.bound_s * (1 + self.clock.limits.gap)

    @property
    def is_open(self) -> bool:
        """Whether there is something to gain, and time to do so."""
        return not self.clock.spent and (self.best is None or self.best.step_time_s > self.target_s)

    def take(self, stage: str, assignment: Assignment | None) -> None:
        """Keep a stage's assignment if it is the best, made into what a plan may be."""
        assignment = with_common_shares(assignment, self.clock.part(_SETTLING_SHARE))
        if assignment is None:
            return
        self.stats[f"{stage}_s"] = assignment.step_time_s
        if self.best is None or assignment.step_time_s < self.best.step_time_s:
            self.best = assignment

    def run(self) -> None:
        """All stages, as far as they are needed."""
        instance, clock, seed = self.instance, self.clock, self.clock.limits.seed
        self.bound_s = self.pooled.step_time_s
        self.stats["lagrangian_bound_s"] = self.bound_s
        self.take("greedy", greedy_assignment(instance, self.pooled, clock.part(_GREEDY_SHARE)))
        size = instance.tables * instance.gpus
        if self.best and self.is_open and size <= _LIFTED:
            self.lift(self.best)
        if self.best and self.is_open and size <= _ANNEALED:
            part = clock.part(_ANNEALING_SHARE)
            self.take("annealed", anneal(self.best, target_s=self.target_s, seed=seed, clock=part))
        if self.is_open:
            self.prove()
        if self.best and self.is_open and instance.gpus > 1:
            part = clock.part(_SEARCH_SHARE)
            found = iterated_search(self.best, target_s=self.target_s, seed=seed, clock=part)
            self.take("searched", found)
        if self.best and self.is_open and instance.gpus > 1:
            found, self.stats["rounds"] = neighbourhood_search(
                self.best,
                self.pooled,
                target_s=self.target_s,
                seed=seed,
                clock=clock.part(1 - _SETTLING_SHARE),
            )
            self.take("neighbourhoods", found)

    def lift(self, assignment: Assignment) -> None:
        """A closer bound by linear programming."""
        lifted = lp_bound(
            self.instance,
            assignment.step_time_s,
            lagrangian=self.pooled,
            time_limit_s=self.clock.part(_LIFTING_SHARE).left_s,
            stop=self.clock.limits.stop,
        )
        if lifted is not None:
            self.bound_s = max(self.bound_s, lifted.step_time_s)
            self.stats["lp_bound_s"] = lifted.step_time_s

    def prove(self) -> None:
        """The integer program, where it is small."""
        upper_s = self.best.step_time_s if self.best else math.inf
        program = Program.build(self.instance, self.pooled, self.best, upper_s, most_places=_SMALL)
        if program is None:
            return
        answer = program.run(self.clock.limits, self.clock.left_s * _PROGRAM_SHARE)
        self.stats |= {"cp_sat_status": answer.status, "variables": answer.variables}
        self.bound_s = max(self.bound_s, min(answer.bound_s, upper_s))
        if answer.pairs is not None:
            self.take("exact", Assignment.of(self.instance, answer.pairs, answer.replicas))
