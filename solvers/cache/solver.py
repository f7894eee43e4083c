"""A solver that looks into the cache before it searches."""

from collections.abc import Callable
from dataclasses import replace

from cost_models import CostModel
from placer.constraints.unmet import unmet
from placer.errors import PlacerError
from placer.plan.plan import Plan
from placer.plan.verify import violations
from placer.problem import Problem
from solvers.cache.entry import Entry
from solvers.cache.folder import PlanCache
from solvers.cache.key import key_of
from solvers.cache.nearest import nearest
from solvers.result import Limits, Solver, SolveResult
from solvers.strategies._base import Strategy


class CachedSolver:
    """A solver whose plans are kept: the same search has the same answer at once.

    A plan is taken for the same time limit or a shorter one, and for any if it is proven to be
    within the gap. Kept is what has a plan and was not stopped by hand. Files that are damaged,
    altered or of something else are left out with a note, and written anew; where nothing can be
    written, the search goes on without.

    Where no plan is kept, a search begins with that of a similar problem, if there is one
    (`solvers.cache.nearest`). Searches that are limited by steps do not, so that they have the same
    plan anywhere.

    Parameters
    ----------
    solver : Solver
        One of placer's own; others search each time.
    cache : PlanCache, optional
        By default that of the user.
    note : callable
        Takes what a person may want to know, in one line.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from cost_models import Roofline
    >>> from placer import Topology
    >>> from placer.workloads import named_workload
    >>> from solvers import solver
    >>> problem = Problem(named_workload("random-3@7"), Topology.parse("2xh100"), batch_size=64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kept = CachedSolver(solver("greedy-cost"), PlanCache(Path(folder)))
    ...     results = [kept.solve(problem, Roofline(), Limits()) for _ in range(2)]
    >>> [result.stats.get("from_cache", False) for result in results]
    [False, True]
    """

    def __init__(
        self,
        solver: Solver,
        cache: PlanCache | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.name = solver.name
        self._solver, self._cache, self._note = solver, cache, note

    def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
        """The kept result, or a new one, which is kept from now on. See `Solver.solve`."""
        key = key_of(problem, cost_model, self._solver, limits)
        try:
            cache = PlanCache() if self._cache is None else self._cache
        except PlacerError as error:
            self._note(f"plans are not kept: {error}")
            key = None
        if key is None:
            return self._solver.solve(problem, cost_model, limits)
        try:
            kept = cache.load(key)
        except PlacerError as error:
            self._note(f"not taken from the cache: {error}")
            kept = None
        if kept is not None and kept.holds_for(limits.time_limit_s):
            found = _for(problem, kept.result)
            assert found.plan is not None, "others are not kept"
            faults = violations(found.plan) + unmet(found.plan, problem.constraints)
            if not faults:
                self._note(_taken(found.plan, cache))
                return found
            # Only who writes the hash anew can make such a file.
            self._note(f"not taken from the cache, as it is of no plan here: {faults[0].message}")
        result = self._searched(problem, cost_model, limits, cache)
        # Who edits the source while it searches has a plan of neither version.
        keep = result.plan is not None and result.termination.limit != "stop"
        if keep and key_of(problem, cost_model, self._solver, limits) == key:
            try:
                cache.save(Entry(key, limits.time_limit_s, result))
            except PlacerError as error:
                self._note(f"the plan is not kept: {error}")
        return result

    def _searched(
        self, problem: Problem, cost_model: CostModel, limits: Limits, cache: PlanCache
    ) -> SolveResult:
        strategy = self._solver
        if not isinstance(strategy, Strategy) or not strategy.warm_starts or limits.max_steps:
            return strategy.solve(problem, cost_model, limits)
        similar = nearest(cache, problem)
        result = strategy.solve(problem, cost_model, limits, similar)
        if similar is not None and result.plan is not None:
            self._note(
                f"began with the plan of {similar.provenance.created} for a similar problem, from "
                f"the cache in {cache.folder}; --no-cache begins without"
            )
        return result


def _for(problem: Problem, kept: SolveResult) -> SolveResult:
    """A kept result with the words of this problem, which may be called otherwise."""
    assert kept.plan is not None, "others are not kept"
    profile = problem.profile
    named = replace(
        kept.plan,
        tables=tuple(one.table for one in profile),
        topology=problem.topology,
        dense=problem.dense,
        provenance=replace(
            kept.plan.provenance, profile=profile.reference, ids_sha256=profile.ids_sha256
        ),
    )
    return replace(kept, plan=named, stats=kept.stats | {"from_cache": True})


def _taken(plan: Plan, cache: PlanCache) -> str:
    return (
        f"the plan is that of {plan.provenance.created}, from the cache in {cache.folder}; "
        "--no-cache searches anew"
    )
