"""Estimate the gain of more memory, faster links or a larger batch.

Three answers check each other: the gain of the present plan (`solvers.bounds.binding`), the gain of
solving the changed problem, and bounds of the gain (docs/questions.md).
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from cost_models import CostModel
from placer.dense import MeasuredDense
from placer.errors import ProblemError
from placer.plan.plan import Plan
from placer.problem import Problem
from placer.topology.devices import Link
from placer.topology.kinds import CPU_SERVER, NETWORK_LATENCY_S
from placer.topology.presets import cpu_server
from placer.topology.topology import Topology
from solvers.bounds.binding import Binding, binding, changes
from solvers.registry import solver as solver_called
from solvers.result import Limits, SolveResult, gap_of

_KNOWN = 1e-6
"""Skip a change if the evaluated gain is less than this share of the gain predicted from parts."""

_MORE_SERVERS = 2
"""Number of additional hosts without GPUs to try."""

Solve = Callable[[Problem], SolveResult]


@dataclass(frozen=True, slots=True)
class Effect:
    """One change of the machine or the batch, and its effect on throughput.

    Gains are relative: 0.02 means 2% more samples per second. `gain` comes from solving again with
    the same solver. `plan_gain` is the gain of the present plan, with HBM filled again if there is
    more memory; None for a larger batch, or if unknown. `least_gain` and `most_gain` are proven
    limits for the best placements. If the changed problem has no plan, `detail` says why.
    """

    change: str
    step_time_s: float | None = None
    bound_s: float | None = None
    gap: float | None = None
    gain: float | None = None
    plan_gain: float | None = None
    least_gain: float | None = None
    most_gain: float | None = None
    detail: str = ""

    @property
    def is_proven(self) -> bool:
        """Whether the effect, good or bad, is larger than the uncertainty of the gaps."""
        if self.least_gain is None or self.most_gain is None:
            return False
        return self.least_gain > 0 or self.most_gain < 0


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The result of `whatif`: the present result, the effects of changes, and what binds the plan.

    `effects` leave out changes that the cost model ignores: measured constants do not change with
    the machine.
    """

    base: SolveResult
    effects: tuple[Effect, ...]
    binding: Binding | None = None


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A budget of HBM per GPU, and its step time; `detail` says why there is no plan."""

    hbm_bytes: int
    step_time_s: float | None = None
    bound_s: float | None = None
    gap: float | None = None
    detail: str = ""


def whatif(
    problem: Problem,
    cost_model: CostModel,
    limits: Limits | None = None,
    *,
    solver: str = "greedy-cost",
    on_solved: Callable[[int, int], None] = lambda done, total: None,
) -> WhatIf:
    """Return the effects of 10% more of each resource, and of a batch twice as large.

    If hosts have a network, try two more hosts without GPUs, which serve tables, as well.

    If the present problem has no plan, there are no effects, and `base` says why. After a stop,
    there are only the effects so far.

    Parameters
    ----------
    limits : Limits, optional
        Limits of each problem; by default 20 seconds.
    solver : str
        Name of the solver of each problem. A better solver leaves smaller gaps.
    on_solved : callable
        Called with the number of solved problems, and of all problems.

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
        return WhatIf(base, ())
    found = binding(problem, base.plan, cost_model)
    asked = _changes(problem, base.plan, base.step_time_s, cost_model, found)
    on_solved(1, len(asked) + 1)
    effects = []
    for number, (name, changed, plan_gain) in enumerate(asked):
        result = strategy.solve(changed, cost_model, limits)
        if limits.stop is not None and limits.stop():
            break  # A shorter search than the base's cannot be compared.
        # A plan need not use the new hosts. Then they take no part of the network.
        unused = len(changed.topology.hosts) > len(problem.topology.hosts)
        filled_s = base.step_time_s / (1 + (plan_gain or 0.0))
        result = _or_kept(result, base.plan, problem if unused else changed, cost_model, filled_s)
        effects.append(_effect(name, problem, base, changed, result, plan_gain))
        on_solved(number + 2, len(asked) + 1)
    return WhatIf(base, tuple(effects), found)


def _or_kept(
    result: SolveResult, plan: Plan, changed: Problem, cost_model: CostModel, filled_s: float
) -> SolveResult:
    """Return the result, with the present plan's time if that is shorter.

    With more resources, the present plan remains possible. `filled_s` is its step time once its HBM
    is filled again.
    """
    # The present plan lacks the buffers of a larger batch.
    if changed.batch_size != plan.batch_size:
        return result
    step_time_s = min(filled_s, cost_model.evaluate(changed, plan).step_time_s)
    if result.step_time_s is not None and result.step_time_s <= step_time_s:
        return result
    bound_s = None if result.bound_s is None else min(result.bound_s, step_time_s)
    return replace(result, step_time_s=step_time_s, bound_s=bound_s)


def front(
    problem_at: Callable[[int], Problem], budgets_bytes: Sequence[int], solve_problem: Solve
) -> tuple[FrontPoint, ...]:
    """Return the step time and the bound at each HBM budget of a GPU, in ascending order.

    A plan for less memory also works with more memory, and a bound for more memory also holds with
    less. So each point has the best plan and bound of all budgets that apply. `problem_at` returns
    the problem with this many bytes of HBM on each GPU; constraints may reserve some of them.
    """
    budgets = sorted(set(budgets_bytes))
    results = [solve_problem(problem_at(budget)) for budget in budgets]
    times = (math.inf if one.step_time_s is None else one.step_time_s for one in results)
    bounds = (-math.inf if one.bound_s is None else one.bound_s for one in reversed(results))
    least = zip(accumulate(times, min), [*accumulate(bounds, max)][::-1], strict=True)
    points = []
    for budget, result, (step_time_s, bound) in zip(budgets, results, least, strict=True):
        if math.isinf(step_time_s):
            points.append(FrontPoint(budget, detail=result.termination.detail))
            continue
        bound_s = None if math.isinf(bound) else bound
        points.append(FrontPoint(budget, step_time_s, bound_s, gap_of(step_time_s, bound_s)))
    return tuple(points)


def _changes(
    problem: Problem, plan: Plan, step_time_s: float, cost_model: CostModel, found: Binding
) -> list[tuple[str, Problem, float | None]]:
    """Return the changed problems with their names, and the gain of the present plan."""
    asked: list[tuple[str, Problem, float | None]] = []
    for change in changes(problem.topology):
        changed, gain = replace(problem, topology=change.topology), found.gains.get(change.resource)
        of_memory = change.resource in ("hbm", "dram")
        if not of_memory and gain is not None and gain > _KNOWN:
            # Skip the change if the cost model ignores it.
            after_s = cost_model.evaluate(changed, plan).step_time_s
            if step_time_s / after_s - 1 < gain * _KNOWN:
                continue
        asked.append((change.words, changed, gain))
    served = _with_servers(problem.topology)
    if served is not None:
        words = f"{_MORE_SERVERS} more hosts without GPUs"
        asked.append((words, replace(problem, topology=served), None))
    dense = problem.dense
    if isinstance(dense, MeasuredDense):
        dense = MeasuredDense(2 * dense.step_s)
    with contextlib.suppress(ProblemError):  # The dense layers may not fit then.
        larger = replace(problem, batch_size=2 * problem.batch_size, dense=dense)
        asked.append(("batch size x2", larger, None))
    return asked


def _with_servers(machine: Topology) -> Topology | None:
    """Return a machine with more hosts without GPUs, like its last such host or a preset.

    Return None if a host has no network link, or there is only one host.
    """
    on_network = [machine.link_of(host.id, "network") for host in machine.hosts]
    if None in on_network or len(machine.hosts) < 2:
        return None
    server, port = cpu_server(), CPU_SERVER.network.bytes_per_s
    like = Link("", "network", "network", port, NETWORK_LATENCY_S)
    if machine.servers:
        server = machine.servers[-1]
        like = machine.link_of(server.id, "network") or like
    names = [f"host:+{number}" for number in range(1, _MORE_SERVERS + 1)]
    hosts = tuple(replace(server, id=name) for name in names)
    links = tuple(replace(like, a=name) for name in names)
    return replace(machine, hosts=(*machine.hosts, *hosts), links=(*machine.links, *links))


def _effect(
    words: str,
    problem: Problem,
    base: SolveResult,
    changed: Problem,
    result: SolveResult,
    plan_gain: float | None,
) -> Effect:
    if result.step_time_s is None or base.step_time_s is None:
        return Effect(words, bound_s=result.bound_s, detail=result.termination.detail)
    scale = changed.global_batch_size / problem.global_batch_size
    before, after = base.step_time_s, result.step_time_s
    least = scale * base.bound_s / after - 1 if base.bound_s else None
    most = scale * before / result.bound_s - 1 if result.bound_s else None
    gain = scale * before / after - 1 if after else 0.0  # Steps that read nothing take no time.
    return Effect(words, after, result.bound_s, result.gap, gain, plan_gain, least, most)
