"""Solvers side by side on one problem: the Python face of `placer compare`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import cost_models as models
from cost_models import CostReport
from placer.problem import Problem
from placer.units import format_bytes
from solvers.registry import solver as solver_called
from solvers.result import Limits, SolveResult

CLASSIC = ("greedy-size", "greedy-lookup", "greedy-size-lookup", "greedy-dim")
"""Strategies of trainers that have no cost model."""


@dataclass(frozen=True, slots=True)
class CompareRow:
    """The result of one solver under one memory budget and cost model.

    Attributes
    ----------
    hbm_budget_bytes : int
        Memory of each GPU that embeddings may take.
    status : str
        The termination's reason, and the limit that was hit.
    hbm_used_bytes, dram_used_bytes : int or None
        Over all GPUs and hosts; None without a plan, as all that follows.
    balance : float or None
        Mean over maximum of the GPUs' times.
    hbm_lookup_share : float or None
        Share of lookups that are served from HBM.
    detail : str
        What is short where there is no plan, else what the step waits for.
    topology : str
        Name of the machine.
    samples_per_s : float or None
        Over all its GPUs.
    price_per_hour : float or None
        Of the whole machine, in the user's currency, if given.
    cost_per_billion_samples : float or None
        At that price and `samples_per_s`.
    binding : str
        What keeps the plan from being faster, in words.
    dense_s : float or None
        What dense layers take of the step; None where it is embeddings alone.
    """

    hbm_budget_bytes: int
    solver: str
    cost_model: str
    status: str
    step_time_s: float | None
    bound_s: float | None
    gap: float | None
    solve_s: float | None
    hbm_used_bytes: int | None
    dram_used_bytes: int | None
    balance: float | None
    hbm_lookup_share: float | None
    detail: str
    topology: str = ""
    samples_per_s: float | None = None
    price_per_hour: float | None = None
    cost_per_billion_samples: float | None = None
    binding: str = ""
    dense_s: float | None = None


def compare(
    problem: Problem,
    solvers: Sequence[str] = (*CLASSIC, "greedy-cost", "ilp"),
    cost_models: Sequence[str] = ("roofline",),
    limits: Limits | None = None,
    *,
    price_per_hour: float | None = None,
    on_solved: Callable[[int, int], None] = lambda done, total: None,
) -> list[CompareRow]:
    """Solve a problem with each solver under each cost model.

    All solvers search parts of one space, so the best bound that one of them proves under a
    cost model holds for all, and every row has it.

    Parameters
    ----------
    solvers, cost_models : sequence of str
        Names of `solvers.SOLVERS`, and those that `cost_models.cost_model` takes.
    limits : Limits, optional
        Of each solver.
    price_per_hour : float, optional
        Of the whole machine, for the cost of a billion samples.
    on_solved : callable
        Called with the results so far and their number in all.

    Returns
    -------
    list of CompareRow
        By cost model, then by solver; `solvers.report.compare_report` makes a table of them.

    Examples
    --------
    >>> from placer import Topology
    >>> from placer.workloads import named_workload
    >>> machine = Topology.parse("8xh100", hbm="512MiB")
    >>> problem = Problem(named_workload("criteo-kaggle"), machine, batch_size=1024)
    >>> by_size, by_cost = compare(problem, ["greedy-size", "greedy-cost"])
    >>> by_cost.step_time_s < by_size.step_time_s
    True
    """
    limits = limits or Limits()
    rows: list[CompareRow] = []
    for model_name in cost_models:
        model = models.cost_model(model_name)
        results: list[SolveResult] = []
        for name in solvers:
            results.append(solver_called(name).solve(problem, model, limits))
            on_solved(len(rows) + len(results), len(cost_models) * len(solvers))
        bound_s = max((one.bound_s for one in results if one.bound_s is not None), default=None)
        for name, result in zip(solvers, results, strict=True):
            cost = None if result.plan is None else model.evaluate(problem, result.plan)
            bounded = replace(result, bound_s=bound_s)
            rows.append(
                compare_row(problem, name, model_name, bounded, cost, price_per_hour=price_per_hour)
            )
    return rows


def compare_row(
    problem: Problem,
    solver: str,
    cost_model: str,
    result: SolveResult,
    cost: CostReport | None,
    *,
    price_per_hour: float | None = None,
) -> CompareRow:
    """Make the row of a result; `cost` is the cost model's answer for its plan, if any."""
    samples_per_s = problem.global_batch_size / result.step_time_s if result.step_time_s else None
    end = result.termination
    gpus = problem.topology.gpus_by_id
    hbm = dram = None
    if cost is not None:
        hbm = sum(use.total_bytes for name, use in cost.memory.items() if name in gpus)
        dram = sum(use.total_bytes for name, use in cost.memory.items() if name not in gpus)
    short = "; ".join(
        f"{one.device} {'lack' if one.device.startswith('all ') else 'lacks'} "
        f"{format_bytes(one.short_bytes)} of {one.resource.upper()}"
        for one in end.shortages
    )
    return CompareRow(
        hbm_budget_bytes=max(gpu.memory_bytes for gpu in problem.topology.gpus),
        solver=solver,
        cost_model=cost_model,
        status=end.summary,
        step_time_s=result.step_time_s,
        bound_s=result.bound_s,
        gap=result.gap,
        solve_s=result.stats.get("seconds"),
        hbm_used_bytes=hbm,
        dram_used_bytes=dram,
        balance=None if cost is None else cost.balance,
        hbm_lookup_share=None if cost is None else cost.hbm_lookup_share,
        detail=(short or end.detail) if cost is None else f"waits for {cost.bottleneck}",
        topology=problem.topology.name,
        samples_per_s=samples_per_s,
        price_per_hour=price_per_hour,
        cost_per_billion_samples=None
        if price_per_hour is None or samples_per_s is None
        else price_per_hour / 3600 * 1e9 / samples_per_s,
        binding="" if cost is None else end.detail,
        dense_s=None if cost is None else cost.dense_s,
    )
