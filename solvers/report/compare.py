"""`placer compare`: machines × budgets × cost models × solvers on one workload."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from cost_models import CostReport
from placer.problem import Problem
from placer.report import section as form
from placer.report.section import Column, Report, Row, Section
from placer.units import format_bytes
from solvers.result import SolveResult


@dataclass(frozen=True, slots=True)
class CompareRow:
    """What one solver made of one budget, under one cost model.

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


def compare_row(
    problem: Problem,
    solver: str,
    cost_model: str,
    result: SolveResult,
    cost: CostReport | None,
    *,
    price_per_hour: float | None = None,
) -> CompareRow:
    """The row of a result; `cost` is the cost model's answer for its plan, None without one."""
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
    )


def compare_report(rows: Sequence[CompareRow], title: str = "Comparison") -> Report:
    """The rows, each beside the best of its machine, budget and cost model."""
    best: dict[tuple[str, int, str], float] = {}
    for row in rows:
        if row.step_time_s is not None:
            key = (row.topology, row.hbm_budget_bytes, row.cost_model)
            best[key] = min(row.step_time_s, best.get(key, row.step_time_s))
    values: list[Row] = []
    for row in rows:
        lead = best.get((row.topology, row.hbm_budget_bytes, row.cost_model))
        ratio = row.step_time_s / lead if row.step_time_s is not None and lead else None
        values.append({**asdict(row), "ratio_to_best": ratio})
    models = {row.cost_model for row in rows}
    without_plan = any(row.step_time_s is None for row in rows)
    several = len({row.topology for row in rows}) > 1
    priced = any(row.price_per_hour is not None for row in rows)
    columns = [
        *([Column("topology", "machine")] if several else []),
        Column("hbm_budget_bytes", "HBM/GPU", form.size),
        Column("solver", "solver"),
        *([Column("cost_model", "cost model")] if len(models) > 1 else []),
        Column("status", "status"),
        Column("step_time_s", "step", form.seconds),
        Column("ratio_to_best", "vs best", form.times, spare=True),
        *([Column("samples_per_s", "samples/s", form.count)] if several or priced else []),
        Column("cost_per_billion_samples", "cost/1G", form.number),
        Column("gap", "gap", form.share),
        Column("solve_s", "solve", form.seconds),
        Column("hbm_used_bytes", "HBM", form.size, spare=True),
        Column("dram_used_bytes", "DRAM", form.size, spare=True),
        Column("balance", "balance", form.fraction, spare=True),
        Column("hbm_lookup_share", "from HBM", form.share),
        *([Column("detail", "detail", wraps=True)] if without_plan else []),
    ]
    facts = {"cost_model": next(iter(models))} if len(models) == 1 else {}
    return Report(
        title,
        (Section("comparison", "Placements", tuple(columns), tuple(values)),),
        headline=tuple(f"cost model {name}" for name in facts.values()),
    )
