"""Solvers side by side on one problem, and one workload on many machines: `compare`, `fleet`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cost_models as models
from cost_models import CostModel, CostReport
from placer.errors import ProblemError
from placer.problem import Problem
from placer.topology.kinds import LIST_PRICES, Price
from placer.topology.topology import Topology
from placer.units import format_bytes
from solvers.registry import solver as solver_called
from solvers.result import Limits, Solver, SolveResult, Termination

CLASSIC = ("greedy-size", "greedy-lookup", "greedy-size-lookup", "greedy-dim")
"""Strategies of trainers that have no cost model."""


SAMPLES = 1_000_000_000
"""What prices and times are of."""


@dataclass(frozen=True, slots=True)
class CompareRow:
    """The result of one solver on one machine, under one memory budget and cost model.

    Without a plan, what is of one is None. The budget is memory of each GPU that embeddings may
    take, `status` the termination's reason and the limit that was hit; bytes and samples are over
    all GPUs and hosts, `balance` is the mean over the maximum of the GPUs' times. `detail` says
    what is short where there is no plan, else what the step waits for. Prices are of the whole
    machine, in the user's currency; the source is empty for a price of the user's own. `dense_s` is
    None where the step is embeddings alone. `memory_left` is the share of all HBM and DRAM for
    embeddings that the plan leaves free, `hbm_left_bytes` what is free on the fullest GPU: solvers
    fill HBM where not all tables fit. `assumed` are constants that nobody has measured.
    """

    hbm_budget_bytes: int
    solver: str
    cost_model: str
    status: str
    step_time_s: float | None = None
    bound_s: float | None = None
    gap: float | None = None
    solve_s: float | None = None
    hbm_used_bytes: int | None = None
    dram_used_bytes: int | None = None
    balance: float | None = None
    hbm_lookup_share: float | None = None
    detail: str = ""
    topology: str = ""
    samples_per_s: float | None = None
    price_per_hour: float | None = None
    cost_per_billion_samples: float | None = None
    binding: str = ""
    dense_s: float | None = None
    gpus: int = 0
    hosts: int = 0
    memory_left: float | None = None
    hbm_left_bytes: int | None = None
    price_source: str = ""
    assumed: tuple[str, ...] = ()

    @property
    def train_s(self) -> float | None:
        """Return the seconds to train `SAMPLES`."""
        return SAMPLES / self.samples_per_s if self.samples_per_s else None

    @property
    def least_share(self) -> float | None:
        """Return the proven bound beside the step time."""
        return self.bound_s / self.step_time_s if self.bound_s and self.step_time_s else None

    @property
    def least_cost(self) -> float | None:
        """Return the cost of `SAMPLES` if a step took no longer than its proven bound."""
        cost, share = self.cost_per_billion_samples, self.least_share
        return None if cost is None or share is None else cost * share


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
    cost model holds for all, and every row has it. Rows are by cost model, then by solver.

    Parameters
    ----------
    solvers, cost_models : sequence of str
        Names of `solvers.SOLVERS`, and those that `cost_models.cost_model` takes.
    limits : Limits, optional
        Of each solver.
    on_solved : callable
        Called with the results so far and their number in all.

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
            of = problem, name, model_name, replace(result, bound_s=bound_s), cost
            rows.append(compare_row(*of, None if price_per_hour is None else Price(price_per_hour)))
    return rows


def compare_row(
    problem: Problem,
    solver: str,
    cost_model: str,
    result: SolveResult,
    cost: CostReport | None,
    price: Price | None = None,
) -> CompareRow:
    """Make the row of a result; `cost` is the cost model's answer for its plan, if any."""
    samples_per_s = problem.global_batch_size / result.step_time_s if result.step_time_s else None
    end, topology = result.termination, problem.topology
    dollars = None if price is None else price.dollars_per_gpu_hour
    known: dict[str, Any] = {
        "detail": "; ".join(
            f"{one.device} {'lack' if one.device.startswith('all ') else 'lacks'} "
            f"{format_bytes(one.short_bytes)} of {one.resource.upper()}"
            for one in end.shortages
        )
        or end.detail
    }
    if cost is not None:
        of_gpus = [cost.memory[gpu.id] for gpu in topology.gpus]
        hbm_bytes = sum(use.total_bytes for use in of_gpus)
        total, free, capacity = (
            sum(getattr(use, name) for use in cost.memory.values())
            for name in ("total_bytes", "free_bytes", "capacity_bytes")
        )
        known = {
            "hbm_used_bytes": hbm_bytes,
            "dram_used_bytes": total - hbm_bytes,
            "balance": cost.balance,
            "hbm_lookup_share": cost.hbm_lookup_share,
            "detail": f"waits for {cost.bottleneck}",
            "binding": end.detail,
            "dense_s": cost.dense_s,
            "memory_left": free / max(1, capacity),
            "hbm_left_bytes": min(use.free_bytes for use in of_gpus),
        }
    if dollars is not None and samples_per_s is not None:
        known["cost_per_billion_samples"] = dollars / 3600 * SAMPLES / samples_per_s
    return CompareRow(
        hbm_budget_bytes=max(gpu.memory_bytes for gpu in topology.gpus),
        solver=solver,
        cost_model=cost_model,
        status=end.summary,
        step_time_s=result.step_time_s,
        bound_s=result.bound_s,
        gap=result.gap,
        solve_s=result.stats.get("seconds"),
        topology=topology.name,
        samples_per_s=samples_per_s,
        price_per_hour=dollars,
        gpus=len(topology.gpus),
        hosts=len(topology.hosts),
        price_source="" if price is None else price.source,
        assumed=tuple(name for name, source in topology.sources.items() if "assum" in source),
        **known,
    )


FLEET = (
    "gb200-nvl72", "8xmi300x", "8xmi350x", "8xmi355x", "8xb200", "8xh200", "8xh100", "2x8xh100",
    "4x8xh100", "8xa100-80", "2x8xa100-80", "2x8xa100-40", "4x8xv100-32", "8xl40s", "2x8xl4",
    "2x8xa10g", "4x4xa10", "4x8xt4", "8xgaudi2", "8xgaudi3",
)  # fmt: skip
"""Machines that are compared where none are named."""


class Cheapest(NamedTuple):
    """The machine that trains `SAMPLES` in time for least money.

    `row` is None if no machine with a price is fast enough; `rivals` are machines that a better
    plan, within what bounds allow, could make cheaper, and those `without_price` are fast enough.
    """

    row: CompareRow | None
    rivals: tuple[str, ...]
    without_price: tuple[str, ...]


def fleet(
    machines: Sequence[str],
    problem_on: Callable[[str], Problem],
    solver: Solver,
    cost_model: CostModel,
    limits: Limits,
    prices: Mapping[str, float] | None = None,
    *,
    on_solved: Callable[[int, int], None] = lambda done, total: None,
) -> list[CompareRow]:
    """Solve one workload on each of several machines.

    Machines of as many GPUs follow one another, as then a step has as many lookups, and what it
    reads of each table is worked out once.

    Parameters
    ----------
    problem_on : callable
        The problem on a machine of that name, with the same profile each time.
    solver, cost_model, limits
        Of each machine.
    prices : mapping, optional
        Dollars an hour, of a whole machine or of one GPU of a kind; others are `LIST_PRICES`.
    on_solved : callable
        Called with the machines that are done and their number.

    Examples
    --------
    >>> from cost_models import Roofline
    >>> from placer.workloads import named_workload
    >>> from solvers import solver
    >>> tables = named_workload("random-4@2")
    >>> on = lambda name: Problem(tables, Topology.parse(name), batch_size=1024)
    >>> rows = fleet(["8xt4", "8xl4"], on, solver("greedy-size"), Roofline(), Limits())
    >>> [(row.topology, round(row.price_per_hour, 2)) for row in rows]
    [('8xt4', 7.82), ('8xl4', 13.35)]
    """
    problems: dict[str, Problem] = {}
    rows: dict[str, CompareRow] = {}
    for name in machines:
        try:
            problems[name] = problem_on(name)
        except ProblemError as error:  # As where the dense layers alone do not fit.
            of = 0, solver.name, cost_model.name, "infeasible"
            rows[name] = CompareRow(*of, topology=name, detail=str(error))
    # Machines of few GPUs first.
    for name in sorted(problems, key=lambda name: len(problems[name].topology.gpus)):
        problem, result = problems[name], SolveResult(None, Termination("no_plan", "stop"))
        if limits.stop is None or not limits.stop():
            result = solver.solve(problem, cost_model, limits)
        cost = None if result.plan is None else cost_model.evaluate(problem, result.plan)
        price = price_of(problem.topology, name, prices or {})
        row = compare_row(problem, solver.name, cost_model.name, result, cost, price)
        detail = result.termination.detail if cost is None else row.detail
        rows[name] = replace(row, topology=name, detail=detail)
        on_solved(len(rows), len(problems))
    return [rows[name] for name in machines]


def cheapest(rows: Iterable[CompareRow], within_s: float) -> Cheapest:
    """Find the machine that trains `SAMPLES` within so many seconds for least money."""
    rows = list(rows)
    fast = [row for row in rows if row.train_s is not None and row.train_s <= within_s]
    priced = [row for row in fast if row.cost_per_billion_samples is not None]
    best = min(priced, key=lambda row: row.cost_per_billion_samples or 0.0, default=None)
    # A better plan could make these both fast enough and the cheaper ones.
    rivals = (
        row
        for row in rows
        if best is not None and row is not best and row.least_cost is not None
        if row.least_cost < (best.cost_per_billion_samples or 0.0)
        if (row.train_s or 0.0) * (row.least_share or 0.0) <= within_s
    )
    return Cheapest(
        best,
        tuple(row.topology for row in rivals),
        tuple(row.topology for row in fast if row.cost_per_billion_samples is None),
    )


def price_of(topology: Topology, name: str, prices: Mapping[str, float]) -> Price | None:
    """Return dollars an hour of a machine, and their source; None if a GPU has no price.

    Hosts without GPUs are called ``cpu`` in `prices`, and on no list.
    """
    if name in prices:
        return Price(prices[name])
    total, sources = 0.0, dict[str, None]()
    for gpu in topology.gpus:
        if gpu.chip in prices:
            total += prices[gpu.chip]
        elif gpu.chip in LIST_PRICES:
            total += LIST_PRICES[gpu.chip].dollars_per_gpu_hour
            sources[LIST_PRICES[gpu.chip].source] = None
        else:
            return None
    for _ in topology.servers:
        if "cpu" not in prices:
            return None
        total += prices["cpu"]
    return Price(total, "; ".join(sources))
