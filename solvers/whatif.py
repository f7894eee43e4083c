"""What more memory, faster links or a larger batch would gain.

Three answers to each question, so that one checks another: the price that the pooled bound
puts on HBM (`solvers._bound`), the problem solved anew, and what the bounds of both problems
prove. With step times T and proven bounds B, old and new, and the batch k times as large, the
best placements' throughputs differ by a factor within k·B/T' .. k·T/B'; where that range
contains 1, the effect is smaller than what the solver leaves open.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cost_models import CostModel
from placer.problem import Problem
from placer.topology.topology import LinkKind, Topology
from placer.units import format_bytes
from solvers import solve
from solvers._base import SolveResult
from solvers._bound import pooled_bound
from solvers._instance import Instance

HBM_STEP_BYTES = 2**30
"""How much HBM per GPU the first question adds."""

FASTER = 1.1
"""By how much the other questions widen a bandwidth."""

Solve = Callable[[Problem], SolveResult]


@dataclass(frozen=True, slots=True)
class Effect:
    """One change of the machine or batch, and what it does to throughput.

    Gains are relative: 0.02 means 2% more samples per second.

    Attributes
    ----------
    change : str
        For people.
    step_time_s, bound_s, gap : float or None
        Of the changed problem; None if the solver found no plan, as all that follows.
    gain : float or None
        By solving anew, with the same solver.
    priced_gain : float or None
        By the price of HBM; None for changes that are not of HBM.
    least_gain, most_gain : float or None
        What is proven of the best placements' gain.
    detail : str
        Why there is no plan.
    """

    change: str
    step_time_s: float | None
    bound_s: float | None
    gap: float | None
    gain: float | None
    priced_gain: float | None
    least_gain: float | None
    most_gain: float | None
    detail: str = ""

    @property
    def is_proven(self) -> bool:
        """Whether the effect, for better or worse, is larger than what the gaps leave open."""
        if self.least_gain is None or self.most_gain is None:
            return False
        return self.least_gain > 0 or self.most_gain < 0


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A problem as it is, and the effects of changes to it.

    Attributes
    ----------
    base : SolveResult
        Of the problem as it is.
    price_s_per_byte : float
        What one more byte of HBM on every GPU saves of the step, in seconds, at the margin.
    effects : tuple of Effect
    """

    base: SolveResult
    price_s_per_byte: float
    effects: tuple[Effect, ...]


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A budget of HBM, and the step time that it buys.

    Attributes
    ----------
    hbm_bytes : int
        Of each GPU.
    step_time_s, bound_s, gap : float or None
        None without a plan or bound.
    detail : str
        Why there is no plan.
    """

    hbm_bytes: int
    step_time_s: float | None
    bound_s: float | None
    gap: float | None
    detail: str = ""


def whatif(
    problem: Problem,
    cost_model: CostModel,
    *,
    solver: str = "greedy-cost",
    time_limit_s: float = 20.0,
    gap: float = 1e-3,
    seed: int = 0,
    on_solved: Callable[[int, int], None] = lambda done, total: None,
) -> WhatIf:
    """The effects of more HBM, faster HBM, links and DRAM, and of a batch twice as large.

    Parameters
    ----------
    problem : Problem
    cost_model : CostModel
    solver : str
        Solves each changed problem within `time_limit_s`; a better one leaves smaller gaps.
    on_solved : callable
        Told how many problems are solved, of how many.

    Returns
    -------
    WhatIf
        Without effects if the problem as it is has no plan; `base` says why.
    """

    def solved(changed: Problem) -> SolveResult:
        return solve(
            changed, solver, cost_model, time_limit_s=time_limit_s, gap=gap, seed=seed, threads=0
        )

    base = solved(problem)
    if base.plan is None:
        return WhatIf(base, 0.0, ())
    price = pooled_bound(Instance(problem, cost_model)).price_s_per_byte
    changes = _changes(problem)
    on_solved(1, len(changes) + 1)
    effects = []
    for number, (words, changed) in enumerate(changes):
        added = changed.topology.gpus[0].memory_bytes - problem.topology.gpus[0].memory_bytes
        effects.append(_effect(words, problem, base, changed, solved(changed), price * added))
        on_solved(number + 2, len(changes) + 1)
    return WhatIf(base, price, tuple(effects))


def front(
    problem: Problem, budgets_bytes: Sequence[int], solve_problem: Solve
) -> tuple[FrontPoint, ...]:
    """The step time and the bound at each HBM budget of a GPU, in ascending order.

    More memory never makes the best placement slower: a plan for less memory is one for more,
    and a bound for more memory is one for less. Each point has the best of both.
    """
    budgets = sorted(set(budgets_bytes))
    results = [
        solve_problem(replace(problem, topology=problem.topology.with_memory(hbm=budget)))
        for budget in budgets
    ]
    times: list[float | None] = []
    for result in results:
        known = [t for t in (result.step_time_s, times[-1] if times else None) if t is not None]
        times.append(min(known, default=None))
    bounds: list[float | None] = []
    for result in reversed(results):
        known = [b for b in (result.bound_s, bounds[-1] if bounds else None) if b is not None]
        bounds.append(max(known, default=None))
    points = []
    for budget, result, step_time_s, bound_s in zip(
        budgets, results, times, reversed(bounds), strict=True
    ):
        found = step_time_s is not None and bool(bound_s)
        points.append(
            FrontPoint(
                budget,
                step_time_s,
                bound_s if step_time_s is not None else None,
                max(0.0, (step_time_s or 0.0) / (bound_s or 1.0) - 1) if found else None,
                "" if step_time_s is not None else result.termination.detail,
            )
        )
    return tuple(points)


def _changes(problem: Problem) -> list[tuple[str, Problem]]:
    """Changed problems with their names; links that the machine lacks are left out."""
    machine = problem.topology
    larger = replace(
        machine,
        gpus=tuple(replace(g, memory_bytes=g.memory_bytes + HBM_STEP_BYTES) for g in machine.gpus),
    )
    faster_hbm = replace(
        machine,
        gpus=tuple(replace(g, hbm_bytes_per_s=g.hbm_bytes_per_s * FASTER) for g in machine.gpus),
    )
    faster_dram = replace(
        machine,
        hosts=tuple(
            replace(h, dram_bytes_per_s=h.dram_bytes_per_s * FASTER) for h in machine.hosts
        ),
    )
    machines = [
        (f"+{format_bytes(HBM_STEP_BYTES)} of HBM per GPU", larger),
        ("HBM bandwidth +10%", faster_hbm),
        ("host link bandwidth +10%", _with_faster(machine, "pcie")),
        ("DRAM bandwidth +10%", faster_dram),
    ]
    kinds = {link.kind for link in machine.links}
    if "nvlink" in kinds:
        machines.append(("peer bandwidth +10%", _with_faster(machine, "nvlink")))
    if "network" in kinds and len(machine.hosts) > 1:
        machines.append(("network bandwidth +10%", _with_faster(machine, "network")))
    changed = [(words, replace(problem, topology=other)) for words, other in machines]
    return [*changed, ("batch size x2", replace(problem, batch_size=2 * problem.batch_size))]


def _with_faster(machine: Topology, kind: LinkKind) -> Topology:
    return replace(
        machine,
        links=tuple(
            replace(link, bytes_per_s=link.bytes_per_s * FASTER) if link.kind == kind else link
            for link in machine.links
        ),
    )


def _effect(
    words: str,
    problem: Problem,
    base: SolveResult,
    changed: Problem,
    result: SolveResult,
    priced_s: float,
) -> Effect:
    if result.step_time_s is None or base.step_time_s is None:
        detail = result.termination.detail
        return Effect(words, None, result.bound_s, None, None, None, None, None, detail)
    scale = changed.global_batch_size / problem.global_batch_size
    before, after = base.step_time_s, result.step_time_s
    # A price holds at the margin: of a saving larger than the step it says nothing.
    priced = before / (before - priced_s) - 1 if 0 < priced_s < before else None
    return Effect(
        words,
        after,
        result.bound_s,
        result.gap,
        scale * before / after - 1,
        priced,
        None if not base.bound_s else scale * base.bound_s / after - 1,
        None if not result.bound_s else scale * before / result.bound_s - 1,
    )
