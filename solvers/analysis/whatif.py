"""What more memory, faster links or a larger batch would gain.

Three answers to each question, so that one checks another: the prices that the linear
relaxation puts on memory and its bandwidth (`solvers.bounds.linear_program`), the problem solved
anew, and what the bounds of both problems prove. With step times T and proven bounds B, old and
new, and the batch k times as large, the best placements' throughputs differ by a factor within
k·B/T' .. k·T/B'; where that range contains 1, the effect is smaller than what the solver leaves
open.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from cost_models import CostModel
from placer.dense import MeasuredDense
from placer.errors import ProblemError
from placer.plan.plan import Plan
from placer.problem import Problem
from placer.topology.devices import Gpu, Host, LinkKind
from placer.topology.topology import Topology
from placer.units import format_bytes
from solvers.bounds.binding import binding
from solvers.bounds.lagrangian import LagrangianBound, lagrangian_bound
from solvers.bounds.linear_program import LpBound, lp_bound
from solvers.model.instance import Instance
from solvers.registry import solver as solver_called
from solvers.result import Limits, SolveResult

HBM_STEP_BYTES = 2**30
"""How much HBM per GPU the first question adds."""

DRAM_STEP_BYTES = 2**36
"""How much memory per host the second question adds."""

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
        By the prices of memory and of a host's time; None for other changes. A price is what
        the first byte more is worth: all together are worth at most that, about.
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
        """Whether the effect, good or bad, is larger than the uncertainty that the gaps leave."""
        if self.least_gain is None or self.most_gain is None:
            return False
        return self.least_gain > 0 or self.most_gain < 0


@dataclass(frozen=True, slots=True)
class MemoryPrices:
    """Seconds of the step that one more byte of each memory saves.

    Attributes
    ----------
    hbm_s_per_byte : float
        Seconds, for one more byte on every GPU.
    dram_s_per_byte : float
        Seconds, for one more byte on every host.
    dram_time_share : float
        The share of the step that waits for hosts' memory.
    """

    hbm_s_per_byte: float = 0.0
    dram_s_per_byte: float = 0.0
    dram_time_share: float = 0.0


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A problem as it is, and the effects of changes to it.

    Attributes
    ----------
    base : SolveResult
        Of the problem as it is.
    prices : MemoryPrices
    effects : tuple of Effect
    binding : str
        What keeps the plan from being faster, in words.
    """

    base: SolveResult
    prices: MemoryPrices
    effects: tuple[Effect, ...]
    binding: str = ""


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
    limits: Limits | None = None,
    *,
    solver: str = "greedy-cost",
    on_solved: Callable[[int, int], None] = lambda done, total: None,
) -> WhatIf:
    """The effects of more and faster HBM and DRAM, faster links, and a batch twice as large.

    Parameters
    ----------
    problem : Problem
    cost_model : CostModel
    limits : Limits, optional
        Of each problem; by default 20 seconds.
    solver : str
        Solves each changed problem; a better one leaves smaller gaps.
    on_solved : callable
        Called with how many problems are solved, and of how many.

    Returns
    -------
    WhatIf
        Without effects if the problem as it is has no plan; `base` says why. After a stop, with
        those that were known already.

    Examples
    --------
    >>> from cost_models import Roofline
    >>> from placer import Problem, Topology
    >>> from placer.workloads import named_workload
    >>> from solvers import Limits
    >>> problem = Problem(named_workload("random-3@1"), Topology.parse("2xt4", hbm="1GiB"), 64)
    >>> answer = whatif(problem, Roofline(), Limits(max_steps=10))
    >>> answer.effects[2].change
    'HBM bandwidth +10%'
    """
    limits = limits or Limits(time_limit_s=20.0)
    strategy = solver_called(solver)
    base = strategy.solve(problem, cost_model, limits)
    if base.plan is None or base.step_time_s is None:
        return WhatIf(base, MemoryPrices(), ())
    instance = Instance(problem, cost_model)
    lagrangian = lagrangian_bound(instance)
    relaxed = lp_bound(
        instance,
        base.step_time_s - instance.fixed_s,
        lagrangian=lagrangian,
        time_limit_s=limits.time_limit_s,
        stop=limits.stop,
    )
    prices = _prices(lagrangian, relaxed)
    report = cost_model.evaluate(problem, base.plan)
    words = binding(instance, relaxed or lagrangian, report).words
    changes = _changes(problem)
    on_solved(1, len(changes) + 1)
    effects = []
    for number, (name, changed) in enumerate(changes):
        saved_s = _priced_s(prices, base.step_time_s, problem.topology, changed.topology)
        result = strategy.solve(changed, cost_model, limits)
        if limits.stop is not None and limits.stop():
            break  # What was searched for less long than the base says nothing beside it.
        result = _or_kept(result, base.plan, changed, cost_model)
        effects.append(_effect(name, problem, base, changed, result, saved_s))
        on_solved(number + 2, len(changes) + 1)
    return WhatIf(base, prices, tuple(effects), words)


def _or_kept(
    result: SolveResult, plan: Plan, changed: Problem, cost_model: CostModel
) -> SolveResult:
    """The result, or the plan as it is where that is faster: more of a resource is no loss.

    A larger batch has larger buffers, which the plan as it is does not have.
    """
    if changed.batch_size != plan.batch_size:
        return result
    step_time_s = cost_model.evaluate(changed, plan).step_time_s
    if result.step_time_s is not None and result.step_time_s <= step_time_s:
        return result
    kept = replace(plan, topology=changed.topology)
    bound_s = None if result.bound_s is None else min(result.bound_s, step_time_s)
    return replace(result, plan=kept, step_time_s=step_time_s, bound_s=bound_s)


def _prices(lagrangian: LagrangianBound, relaxed: LpBound | None) -> MemoryPrices:
    """Prices of the linear relaxation, or of the Lagrangian bound if there was no time for it."""
    if relaxed is None:
        return MemoryPrices(lagrangian.price_s_per_byte)
    return MemoryPrices(
        relaxed.hbm_price_s_per_byte, relaxed.dram_price_s_per_byte, relaxed.dram_time_share
    )


def _priced_s(
    prices: MemoryPrices, step_time_s: float, before: Topology, after: Topology
) -> float | None:
    """Seconds that a change of memory saves, by its price; None for other changes.

    A change is the same on all GPUs, or on all hosts.
    """
    gpu, host = (before.gpus[0], after.gpus[0]), (before.hosts[0], after.hosts[0])
    saved_s = [
        prices.hbm_s_per_byte * (gpu[1].memory_bytes - gpu[0].memory_bytes),
        prices.dram_s_per_byte * (host[1].memory_bytes - host[0].memory_bytes),
        step_time_s
        * prices.dram_time_share
        * (1 - host[0].dram_bytes_per_s / host[1].dram_bytes_per_s),
    ]
    changed = gpu[1].memory_bytes, host[1].memory_bytes, host[1].dram_bytes_per_s
    as_is = gpu[0].memory_bytes, host[0].memory_bytes, host[0].dram_bytes_per_s
    return None if changed == as_is else sum(saved_s)


def front(
    problem_at: Callable[[int], Problem], budgets_bytes: Sequence[int], solve_problem: Solve
) -> tuple[FrontPoint, ...]:
    """The step time and the bound at each HBM budget of a GPU, in ascending order.

    More memory never makes the best placement slower: a plan for less memory is one for more,
    and a bound for more memory is one for less. Each point has the best of both.

    Parameters
    ----------
    problem_at : callable
        The problem with so many bytes of HBM on each GPU, of which the user's constraints may
        reserve some.
    budgets_bytes : sequence of int
    solve_problem : callable
    """
    budgets = sorted(set(budgets_bytes))
    results = [solve_problem(problem_at(budget)) for budget in budgets]
    times = _running(min, [result.step_time_s for result in results])
    bounds = _running(max, [result.bound_s for result in reversed(results)])[::-1]
    points = []
    for budget, result, step_time_s, bound_s in zip(budgets, results, times, bounds, strict=True):
        if step_time_s is None:
            points.append(FrontPoint(budget, None, None, None, result.termination.detail))
        else:
            gap = max(0.0, step_time_s / bound_s - 1) if bound_s else None
            points.append(FrontPoint(budget, step_time_s, bound_s, gap))
    return tuple(points)


def _running(
    best: Callable[[Iterable[float]], float], values: Sequence[float | None]
) -> list[float | None]:
    """The best of the values up to each; None before the first that is known."""
    known: list[float] = []
    running = []
    for value in values:
        known += [] if value is None else [value]
        running.append(best(known) if known else None)
    return running


def _changes(problem: Problem) -> list[tuple[str, Problem]]:
    """Changed problems with their names; links that the machine lacks are left out."""
    machine = problem.topology

    def with_gpus(change: Callable[[Gpu], Gpu]) -> Topology:
        return replace(machine, gpus=tuple(map(change, machine.gpus)))

    def with_hosts(change: Callable[[Host], Host]) -> Topology:
        return replace(machine, hosts=tuple(map(change, machine.hosts)))

    machines = [
        (
            f"+{format_bytes(HBM_STEP_BYTES)} of HBM per GPU",
            with_gpus(lambda gpu: replace(gpu, memory_bytes=gpu.memory_bytes + HBM_STEP_BYTES)),
        ),
        (
            f"+{format_bytes(DRAM_STEP_BYTES)} of DRAM per host",
            with_hosts(lambda h: replace(h, memory_bytes=h.memory_bytes + DRAM_STEP_BYTES)),
        ),
        (
            "HBM bandwidth +10%",
            with_gpus(lambda gpu: replace(gpu, hbm_bytes_per_s=gpu.hbm_bytes_per_s * FASTER)),
        ),
        ("host link bandwidth +10%", _with_faster(machine, "pcie")),
        (
            "DRAM bandwidth +10%",
            with_hosts(lambda h: replace(h, dram_bytes_per_s=h.dram_bytes_per_s * FASTER)),
        ),
    ]
    kinds = {link.kind for link in machine.links}
    if "nvlink" in kinds:
        machines.append(("peer bandwidth +10%", _with_faster(machine, "nvlink")))
    if "network" in kinds and len(machine.hosts) > 1:
        machines.append(("network bandwidth +10%", _with_faster(machine, "network")))
    changed = [(words, replace(problem, topology=other)) for words, other in machines]
    return [*changed, *_twice_the_batch(problem)]


def _twice_the_batch(problem: Problem) -> list[tuple[str, Problem]]:
    """Nothing where so many samples' dense layers do not fit; measured ones take twice as long."""
    dense = problem.dense
    if isinstance(dense, MeasuredDense):
        dense = MeasuredDense(2 * dense.step_s)
    try:
        larger = replace(problem, batch_size=2 * problem.batch_size, dense=dense)
    except ProblemError:
        return []
    return [("batch size x2", larger)]


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
    priced_s: float | None,
) -> Effect:
    if result.step_time_s is None or base.step_time_s is None:
        detail = result.termination.detail
        return Effect(words, None, result.bound_s, None, None, None, None, None, detail)
    scale = changed.global_batch_size / problem.global_batch_size
    before, after = base.step_time_s, result.step_time_s
    # A price holds at the margin: of a saving larger than the step it says nothing.
    known = priced_s is not None and 0 <= priced_s < before
    priced = before / (before - (priced_s or 0.0)) - 1 if known else None
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
