"""Plans that could follow an old one, weighed against the move to them."""

from collections.abc import Iterable
from dataclasses import dataclass

from placer.plan.diff import PlanDiff
from placer.plan.migration import Migration
from placer.plan.plan import Plan
from solvers.result import SolveResult


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that could follow the old one.

    Attributes
    ----------
    name : str
        For people.
    plan : Plan
    step_time_s : float
        With the rows that are in HBM under the plan's row order.
    moved_bytes, migration_s, waits_for
        See `placer.plan.migration.Migration`.
    cost_s : float
        Steps of the horizon, and the migration.
    break_even_steps : float or None
        Steps after which the migration has paid for itself, against the old placement; 0
        where nothing moves. None if it never does, or the old placement does not work.
    on_front : bool
        Whether no other candidate moves as little and is as fast.
    """

    name: str
    plan: Plan
    step_time_s: float
    moved_bytes: int
    migration_s: float
    waits_for: str
    cost_s: float
    break_even_steps: float | None
    on_front: bool


@dataclass(frozen=True, slots=True)
class Replanned:
    """The candidates to follow an old plan, and the chosen one.

    Attributes
    ----------
    horizon_steps : int
    candidates : tuple of Candidate
        Fewest bytes first; none if nothing fits.
    chosen : Candidate or None
        The one of least cost over the horizon; of equal ones the one that moves least.
    old_step_time_s : float or None
        Of the old placement on the new problem.
    old_refused : str
        Why the old placement does not work any more, if it does not.
    fresh : SolveResult
        Of the plan from scratch, its bound included.
    moves : PlanDiff or None
        From the old plan to the chosen one.
    """

    horizon_steps: int
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    old_step_time_s: float | None
    old_refused: str
    fresh: SolveResult
    moves: PlanDiff | None


@dataclass(frozen=True, slots=True)
class CostedPlan:
    """A sound plan, its step time and the way to it from the old one."""

    name: str
    plan: Plan
    step_time_s: float
    migration: Migration


def weighed(
    plans: Iterable[CostedPlan], old_step_s: float | None, horizon_steps: int
) -> tuple[Candidate, ...]:
    """Candidates, fewest bytes first, those on the front marked."""
    candidates: list[Candidate] = []
    fastest_s = float("inf")
    for one in sorted(plans, key=lambda one: (one.migration.moved_bytes, one.step_time_s)):
        way = one.migration
        candidates.append(
            Candidate(
                one.name,
                one.plan,
                one.step_time_s,
                way.moved_bytes,
                way.seconds,
                way.waits_for,
                cost_s=one.step_time_s * horizon_steps + way.seconds,
                break_even_steps=_break_even_steps(one, old_step_s),
                on_front=one.step_time_s < fastest_s,
            )
        )
        fastest_s = min(fastest_s, one.step_time_s)
    return tuple(candidates)


def _break_even_steps(one: CostedPlan, old_step_s: float | None) -> float | None:
    if old_step_s is None:
        return None
    if not one.migration.moved_bytes:
        return 0.0
    saved_s = old_step_s - one.step_time_s
    return one.migration.seconds / saved_s if saved_s > 0 else None


def cheapest(candidates: Iterable[Candidate]) -> Candidate | None:
    """The candidate of least cost; of equal ones the one that moves least, then the fastest."""
    return min(
        candidates, key=lambda one: (one.cost_s, one.moved_bytes, one.step_time_s), default=None
    )
