"""A solver that looks into the cache before it searches."""

import math
from collections.abc import Callable
from dataclasses import replace

from cost_models import CostModel
from placer.constraints.unmet import unmet
from placer.errors import PlacerError
from placer.plan.verify import violations
from placer.problem import Problem
from solvers.bounds.lagrangian import lagrangian_bound
from solvers.cache.entry import Entry
from solvers.cache.folder import PlanCache
from solvers.cache.key import key_of
from solvers.model.instance import Instance
from solvers.result import Limits, Solver, SolveResult

_EXACT = 1e-6
"""Share by which sums of floats may differ from one processor to another."""


class CachedSolver:
    """A solver whose plans are kept: the same search has the same answer at once.

    A plan is taken for the same time limit or a shorter one, and for any if it is proven to be
    within the gap. Its step time is computed, and a bound that it cannot have is not believed.
    Kept is what has a plan and was not stopped by hand. Files that are damaged, altered or of
    something else are left out with a note, and written anew; where nothing can be written, the
    search goes on without.

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
            entry = cache.load(key)
            found = None
            if entry is not None:
                found = _taken(entry, self.name, problem, cost_model, limits)
        except PlacerError as error:
            self._note(f"not taken from the cache: {error}")
            found = None
        if found is not None and found.plan is not None:
            made = found.plan.provenance.created
            self._note(f"the plan is that of {made}, from the cache in {cache.folder}; --no-cache "
                       "searches anew")  # fmt: skip
            return found
        result = self._solver.solve(problem, cost_model, limits)
        # Who edits the source while it searches has a plan of neither version.
        keep = result.plan is not None and result.termination.limit != "stop"
        if keep and key_of(problem, cost_model, self._solver, limits) == key:
            try:
                cache.save(Entry(key, limits.time_limit_s, result))
            except PlacerError as error:
                self._note(f"the plan is not kept: {error}")
        return result


def _taken(
    entry: Entry, solver: str, problem: Problem, cost_model: CostModel, limits: Limits
) -> SolveResult | None:
    """The result of an entry, with the words of this problem; None if it needs more time.

    Others may have written the entry. What can be computed is computed: the step time, and the
    bound that every search begins with. A higher bound is believed up to the step time.

    Raises
    ------
    PlacerError
        If the plan breaks a rule, or has another step time or a bound than it can have.
    """
    kept, profile = entry.result, problem.profile
    has_time = limits.time_limit_s <= entry.time_limit_s
    if kept.plan is None or not (has_time or kept.termination.reason == "optimal"):
        return None
    plan = replace(
        kept.plan,
        tables=tuple(one.table for one in profile),
        topology=problem.topology,
        dense=problem.dense,
    )
    for fault in violations(plan) + unmet(plan, problem.constraints):
        raise PlacerError(f"it is of no plan here: {fault.message}")
    step_s, bound_s = cost_model.evaluate(problem, plan).step_time_s, kept.bound_s or 0.0
    if not math.isclose(step_s, kept.step_time_s or 0.0, rel_tol=_EXACT):
        raise PlacerError(f"it says {kept.step_time_s} s of a plan that takes {step_s} s")
    if not 0 < bound_s <= step_s * (1 + _EXACT):
        raise PlacerError(f"it says that no plan takes less than {bound_s} s, and its own does")
    instance = Instance(problem, cost_model)
    least_s = lagrangian_bound(instance).step_time_s + instance.fixed_s
    bound_s = min(step_s, max(bound_s, least_s))
    is_optimal = step_s <= bound_s * (1 + limits.gap)
    if not is_optimal and not has_time:
        return None
    record = replace(
        plan.solver,
        name=solver,
        status="optimal" if is_optimal else "feasible",
        step_time_s=step_s,
        bound_s=bound_s,
        seed=limits.seed,
        cost_model=cost_model.name,
        search_space=instance.search_space,
    )
    source = replace(
        plan.provenance,
        problem_sha256=problem.sha256,
        profile=profile.reference,
        ids_sha256=profile.ids_sha256,
    )
    end = replace(kept.termination, reason=record.status)
    stats = kept.stats | {"from_cache": True, "search_space": record.search_space}
    return SolveResult(replace(plan, solver=record, provenance=source), end, step_s, bound_s, stats)
