"""The interface of solvers: `Solver`, its `Limits` and its `SolveResult`."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from cost_models import CostModel
from placer.errors import ProblemError
from placer.plan.memory import Shortage
from placer.plan.plan import Plan
from placer.problem import Problem
from placer.units import Summarized, format_seconds

Reason = Literal["optimal", "feasible", "infeasible", "no_plan"]
Limit = Literal["time", "steps", "stop"]

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""File with a container's quota of processor time and the quota's period, both in microseconds.

See Linux's documentation of control groups, version 2.
"""


class SearchState(NamedTuple):
    """The progress of a search."""

    stage: str  # The present stage of the strategy.
    step_time_s: float | None  # Step time of the best placement so far.
    bound_s: float  # Proven lower limit of the step time.


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits at which a search stops.

    >>> Limits(time_limit_s=10, seed=1).gap
    0.001

    Raises ProblemError if the time limit, the gap or the threads are negative or not a number.

    Attributes
    ----------
    time_limit_s : float
        Wall-clock seconds of the whole call. Then the solver returns its best plan.
    gap : float
        Relative gap at which a plan counts as optimal.
    seed : int
        Seed of all random numbers. Equal seeds give equal plans if no stage of the search ends by
        its share of the time limit.
    threads : int
        Number of search threads; 0 means one for each core that this process may use.
    max_steps : int or None
        Largest number of steps of local search; few steps also shorten the proof that nothing fits.
        If it is given and the time limit is not reached, equal problems have equal plans on all
        machines.
    stop : callable or None
        Called regularly; if it returns true, the search ends at once with its best plan. Ctrl-C and
        other threads end a search in this way.
    on_state : callable or None
        Called at the start of each stage, and for each better placement.
    spent_s : float
        Seconds of the time limit that are already spent, such as for reading the profile.
    """

    time_limit_s: float = 60.0
    gap: float = 1e-3
    seed: int = 0
    threads: int = 0
    max_steps: int | None = None
    stop: Callable[[], bool] | None = None
    on_state: Callable[[SearchState], None] | None = None
    spent_s: float = 0.0

    def __post_init__(self) -> None:
        named = ("time limit", self.time_limit_s), ("gap", self.gap), ("thread count", self.threads)
        for name, value in named:
            if not value >= 0:
                raise ProblemError(f"a {name} must be 0 or more, not {value}")
        object.__setattr__(self, "seed", int(self.seed))  # NumPy's integers have no JSON.

    @property
    def thread_count(self) -> int:
        """The number of threads that search at the same time."""
        return self.threads or usable_cores()


def usable_cores() -> int:
    """Return the number of cores that this process may use, within a container's quota.

    >>> usable_cores() >= 1
    True
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # There is no control group, or it has no limit ("max").
        return cores


@dataclass(frozen=True, slots=True)
class Termination:
    """Why a solver stopped.

    `reason` is ``optimal`` for a plan within the gap of the bound, ``feasible`` for a plan without
    this proof, ``infeasible`` if it is proven that no plan exists, and ``no_plan`` if none was
    found without such a proof. `limit` is the limit that ended the search, if any. `detail` is an
    explanation for people. Without a plan, `shortages` has the memories that are too small, and by
    how many bytes.
    """

    reason: Reason
    limit: Limit | None = None
    detail: str = ""
    shortages: tuple[Shortage, ...] = ()

    @property
    def summary(self) -> str:
        """The reason and the limit in words, such as ``feasible (time limit)``."""
        if self.limit is None:
            return self.reason
        return f"{self.reason} ({'stopped' if self.limit == 'stop' else f'{self.limit} limit'})"


def gap_of(step_time_s: float | None, bound_s: float | None) -> float | None:
    """Return (step time − bound) / bound; None without a plan or a bound."""
    if step_time_s is None or not bound_s:
        return None
    return max(0.0, step_time_s / bound_s - 1)


@dataclass(frozen=True, slots=True, repr=False)
class SolveResult(Summarized):
    """The result of a search: a plan, why the search ended, and a bound of the step time.

    >>> result = SolveResult(None, Termination("feasible"), step_time_s=1.25, bound_s=1.0)
    >>> result.gap
    0.25
    >>> result
    SolveResult(plan: none, ended: feasible, step: 1.25 s, bound: 1 s, gap: 25%)

    `step_time_s` is the plan's by `CostModel.evaluate`. `bound_s` is a proven lower limit of the
    step time over the search space that `stats["search_space"]` describes. `stats` also has the
    seconds of the search, and counts of the solver.
    """

    plan: Plan | None
    termination: Termination
    step_time_s: float | None = None
    bound_s: float | None = None
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def gap(self) -> float | None:
        """See `gap_of`."""
        return gap_of(self.step_time_s, self.bound_s)

    def summary(self) -> dict[str, str]:
        """Return the plan, the end, the step time, the bound and the gap in words."""
        shards = "none" if self.plan is None else f"{len(self.plan.shards)} shards"
        facts = {"plan": shards, "ended": self.termination.summary}
        if self.step_time_s is not None:
            facts["step"] = format_seconds(self.step_time_s)
        if self.bound_s is not None:
            facts["bound"] = format_seconds(self.bound_s)
        if self.gap is not None:
            facts["gap"] = f"{100 * self.gap:.3g}%"
        return facts


@runtime_checkable
class Solver(Protocol):
    """A search strategy without state. If nothing fits, it returns a result and does not raise."""

    name: str

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Return the best placement found within the limits."""
        ...
