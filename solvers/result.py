"""What a solver is asked and what it answers."""

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
from placer.summary import Summarized
from placer.units import format_seconds

Reason = Literal["optimal", "feasible", "infeasible", "no_plan"]
Limit = Literal["time", "steps", "stop"]

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Of a container's control group: processor time that it may use in a time, both in microseconds.

From Linux's documentation of control groups, version 2.
"""


class SearchState(NamedTuple):
    """How far a search is.

    Attributes
    ----------
    stage : str
        What the strategy is at.
    step_time_s : float or None
        Of the best placement so far.
    bound_s : float
        What is proven that none is faster than.
    """

    stage: str
    step_time_s: float | None
    bound_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits at which a search stops.

    >>> Limits(time_limit_s=10, seed=1).gap
    0.001

    Attributes
    ----------
    time_limit_s : float
        Wall-clock seconds for the whole call; a solver returns the best plan it has.
    gap : float
        Relative gap at which a plan counts as optimal.
    seed : int
        Of everything random; equal seeds give equal plans where no stage of the search ends by
        its share of the time limit.
    threads : int
        That search at once; 0 for one on each core that this process may use.
    max_steps : int or None
        Steps of local search. With it, and a time limit that is not hit, the same problem has
        the same plan on any machine.
    stop : callable or None
        Asked now and then whether to end at once with the best plan so far: how Ctrl-C, or
        a thread, ends a search.
    on_state : callable or None
        Called when a stage begins, and when a stage has found a better placement.
    spent_s : float
        Of the time limit, what is spent already, as by reading what is to be placed.

    Raises
    ------
    ProblemError
        If a time limit or a gap is negative or no number.
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
        for name, value in (("time limit", self.time_limit_s), ("gap", self.gap)):
            if not value >= 0:
                raise ProblemError(f"a {name} must be 0 or more, not {value}")

    @property
    def thread_count(self) -> int:
        """Threads that may search at once."""
        return self.threads or usable_cores()


def usable_cores() -> int:
    """Cores that this process may use: those it is bound to, or a container's share of them.

    >>> usable_cores() >= 1
    True
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # No control group, or one without a limit ("max").
        return cores


@dataclass(frozen=True, slots=True)
class Termination:
    """Why a solver stopped.

    Attributes
    ----------
    reason : {"optimal", "feasible", "infeasible", "no_plan"}
        ``optimal``: the gap to the bound is closed. ``feasible``: a plan without that
        proof. ``infeasible``: proven that no plan exists. ``no_plan``: none was found, by
        a strategy that does not prove there is none or before its limit.
    limit : {"time", "steps", "stop", None}
        The limit that ended the search, if one did.
    detail : str
        For people.
    shortages : tuple of Shortage
        What is missing, and by how many bytes, where there is no plan.
    """

    reason: Reason
    limit: Limit | None = None
    detail: str = ""
    shortages: tuple[Shortage, ...] = ()

    @property
    def summary(self) -> str:
        """Reason and limit in words: ``optimal``, ``feasible (time limit)``."""
        if self.limit is None:
            return self.reason
        return f"{self.reason} ({'stopped' if self.limit == 'stop' else f'{self.limit} limit'})"


@dataclass(frozen=True, slots=True, repr=False)
class SolveResult(Summarized):
    """A plan, why the search ended, and how far from the best possible the plan can be.

    >>> result = SolveResult(None, Termination("feasible"), step_time_s=1.25, bound_s=1.0)
    >>> result.gap
    0.25
    >>> result
    SolveResult(plan: none, ended: feasible, step: 1.25 s, bound: 1 s, gap: 25%)

    Attributes
    ----------
    plan : Plan or None
    step_time_s : float or None
        The cost model's time of the plan, of `CostModel.evaluate`.
    bound_s : float or None
        Proven lower limit of the step time over the search space that
        `stats["search_space"]` states.
    stats : dict
        Seconds, and what the solver counts.
    """

    plan: Plan | None
    termination: Termination
    step_time_s: float | None = None
    bound_s: float | None = None
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def gap(self) -> float | None:
        """(step time − bound) / bound; None without a plan or a bound."""
        if self.step_time_s is None or not self.bound_s:
            return None
        return max(0.0, self.step_time_s / self.bound_s - 1)

    def summary(self) -> dict[str, str]:
        """See `Summarized`."""
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
    """One strategy. Stateless; infeasibility is a result, exceptions mean a broken backend."""

    name: str

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """Search for a placement of small step time."""
        ...


__all__ = [
    "Limit",
    "Limits",
    "Reason",
    "SearchState",
    "Shortage",
    "SolveResult",
    "Solver",
    "Termination",
]
