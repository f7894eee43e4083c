"""Compare solvers on one problem (`compare`), and machines for one workload (`fleet`)."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cost_models as models
from cost_models import CostModel
from placer.errors import PlacerError, ProblemError, TopologyError
from placer.problem import Problem
from placer.topology.kinds import LIST_PRICES, Price
from placer.topology.topology import Topology
from placer.units import format_bytes
from solvers.registry import solver as solver_called
from solvers.result import Limits, Solver, SolveResult, Termination

CLASSIC = ("greedy-size", "greedy-lookup", "greedy-size-lookup", "greedy-dim")
"""Strategies of trainers without a cost model."""

SAMPLES = 1_000_000_000
"""Number of training samples for which prices and times are given."""


@dataclass(frozen=True, slots=True)
class CompareRow:
    """The result of one solver on one machine, under one memory budget and cost model.

    Without a plan, values of a plan are None. `hbm_budget_bytes` is each GPU's memory for
    embeddings, and `status` the termination's reason and limit. Bytes and samples are totals of all
    GPUs and hosts. `balance` is the GPUs' mean time over the slowest GPU's. `detail` says what the
    step waits for, or without a plan, what is short. Prices are of the whole machine, in the user's
    currency; `price_source` is empty for the user's own prices. `dense_s` is None for embeddings
    alone. `memory_left` is the free share of all HBM and DRAM for embeddings, and `hbm_left_bytes`
    the free bytes of the fullest GPU: solvers fill HBM if not all tables fit. `assumed` names
    constants that were not measured.
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
    ssd_used_bytes: int | None = None
    price_source: str = ""
    assumed: tuple[str, ...] = ()

    @property
    def train_s(self) -> float | None:
        """The seconds to train `SAMPLES`."""
        return SAMPLES / self.samples_per_s if self.samples_per_s else None

    @property
    def least_share(self) -> float | None:
        """The proven bound as a share of the step time."""
        return self.bound_s / self.step_time_s if self.bound_s and self.step_time_s else None

    @property
    def least_cost(self) -> float | None:
        """The cost of `SAMPLES` if a step took only its proven bound."""
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

    All solvers search parts of the same space. So the best bound of any solver under a cost model
    holds for all, and every row has it. Rows are sorted by cost model, then by solver.

    Parameters
    ----------
    solvers, cost_models : sequence of str
        Names of `solvers.SOLVERS`, and names that `cost_models.cost_model` accepts.
    limits : Limits, optional
        Limits of each solver.
    on_solved : callable
        Called with the number of results so far, and of all results.

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
        price = None if price_per_hour is None else Price(price_per_hour)
        for name, result in zip(solvers, results, strict=True):
            known = replace(result, bound_s=bound_s)
            rows.append(compare_row(problem, name, model, known, price))
    return rows


def refused_rows(
    machine: Topology,
    hbm_bytes: int | None,
    solvers: Sequence[str],
    cost_models: Sequence[str],
    error: PlacerError,
) -> list[CompareRow]:
    """Return the rows of a machine for which there is no problem, in the order of `compare`.

    For example, constraints pin a table to a GPU that the machine lacks, or its GPUs have less
    memory than a budget of `hbm_bytes`.
    """
    hbm_bytes = hbm_bytes or max(gpu.memory_bytes for gpu in machine.gpus)
    why: Any = {"topology": machine.name, "detail": str(error)}
    rows = itertools.product(cost_models, solvers)
    return [CompareRow(hbm_bytes, solver, model, "infeasible", **why) for model, solver in rows]


def compare_row(
    problem: Problem,
    solver: str,
    cost_model: CostModel,
    result: SolveResult,
    price: Price | None = None,
) -> CompareRow:
    """Return the row of a solver's result under a cost model."""
    samples_per_s = problem.global_batch_size / result.step_time_s if result.step_time_s else None
    end, topology = result.termination, problem.topology
    dollars = None if price is None else price.dollars_per_hour
    known: dict[str, Any] = {
        "detail": "; ".join(
            f"{one.device} {'lack' if one.device.startswith('all ') else 'lacks'} "
            f"{format_bytes(one.short_bytes)} of {one.resource.upper()}"
            for one in end.shortages
        )
        or end.detail
    }
    if result.plan is not None:
        cost = cost_model.evaluate(problem, result.plan)
        of_gpus = [cost.memory[gpu.id] for gpu in topology.gpus]
        of_hosts = [cost.memory[host.id] for host in topology.hosts]
        hbm_bytes, dram_bytes = (sum(u.total_bytes for u in one) for one in (of_gpus, of_hosts))
        free, capacity = (
            sum(getattr(use, name) for use in (*of_gpus, *of_hosts))
            for name in ("free_bytes", "capacity_bytes")
        )
        all_bytes = sum(use.total_bytes for use in cost.memory.values())
        known = {
            "hbm_used_bytes": hbm_bytes,
            "dram_used_bytes": dram_bytes,
            "balance": cost.balance,
            "hbm_lookup_share": cost.hbm_lookup_share,
            "detail": f"waits for {cost.bottleneck}",
            "binding": end.detail,
            "dense_s": cost.dense_s,
            "memory_left": free / max(1, capacity),
            "hbm_left_bytes": min(use.free_bytes for use in of_gpus),
            "ssd_used_bytes": all_bytes - hbm_bytes - dram_bytes,
        }
    if dollars is not None and samples_per_s is not None:
        known["cost_per_billion_samples"] = dollars / 3600 * SAMPLES / samples_per_s
    return CompareRow(
        hbm_budget_bytes=max(gpu.memory_bytes for gpu in topology.gpus),
        solver=solver,
        cost_model=cost_model.name,
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
"""The machines to compare by default."""


class Cheapest(NamedTuple):
    """The machine that trains `SAMPLES` in a given time for the least money.

    `row` is None if no machine with a price is fast enough. `rivals` are machines that bounds allow
    to be cheaper with a better plan, or a first one. Machines `without_price` are fast enough, too.
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

    Machines with equal numbers of GPUs are solved one after the other. Their steps have equally
    many lookups, so each table's load is computed once.

    - `problem_on`: returns the problem on a machine, by its name, always with the same profile.
    - `prices`: dollars an hour, by machine or by kind of GPU; the default is `LIST_PRICES`.
    - `on_solved`: called with the number of machines done, and of all machines to solve.

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
        # For example, the dense layers alone do not fit, or a host has less memory than a budget.
        except (ProblemError, TopologyError) as error:
            of = 0, solver.name, cost_model.name, "infeasible"
            rows[name] = CompareRow(*of, topology=name, detail=str(error))
    # Start with machines of few GPUs.
    for name in sorted(problems, key=lambda name: len(problems[name].topology.gpus)):
        problem, result = problems[name], SolveResult(None, Termination("no_plan", "stop"))
        if limits.stop is None or not limits.stop():
            result = solver.solve(problem, cost_model, limits)
        price = price_of(problem.topology, name, prices or {})
        row = compare_row(problem, solver.name, cost_model, result, price)
        detail = result.termination.detail if result.plan is None else row.detail
        rows[name] = replace(row, topology=name, detail=detail)
        on_solved(len(rows), len(problems))
    return [rows[name] for name in machines]


def cheapest(rows: Iterable[CompareRow], within_s: float) -> Cheapest:
    """Find the machine that trains `SAMPLES` within `within_s` seconds for the least money."""
    rows = list(rows)
    fast = [row for row in rows if row.train_s is not None and row.train_s <= within_s]
    priced = [row for row in fast if row.cost_per_billion_samples is not None]
    best = min(priced, key=lambda row: row.cost_per_billion_samples or 0.0, default=None)
    # A better plan could make these machines fast enough and cheaper, or a first plan, if a search
    # found none where there may be one.
    rivals = (
        row
        for row in rows
        if best is not None and row is not best
        if (row.price_per_hour is not None and row.status.startswith("no_plan"))
        or (
            row.least_cost is not None
            and row.least_cost < (best.cost_per_billion_samples or 0.0)
            and (row.train_s or 0.0) * (row.least_share or 0.0) <= within_s
        )
    )
    return Cheapest(
        best,
        tuple(row.topology for row in rivals),
        tuple(row.topology for row in fast if row.cost_per_billion_samples is None),
    )


def price_of(topology: Topology, name: str, prices: Mapping[str, float]) -> Price | None:
    """Return a machine's price in dollars an hour, and its source; None if a part has no price.

    Hosts without GPUs are called ``cpu`` in `prices`, and have no list price.
    """
    if name in prices:
        return Price(prices[name])
    total, sources = 0.0, dict[str, None]()
    for gpu in topology.gpus:
        if gpu.chip in prices:
            total += prices[gpu.chip]
        elif gpu.chip in LIST_PRICES:
            total += LIST_PRICES[gpu.chip].dollars_per_hour
            sources[LIST_PRICES[gpu.chip].source] = None
        else:
            return None
    for _ in topology.servers:
        if "cpu" not in prices:
            return None
        total += prices["cpu"]
    return Price(total, "; ".join(sources))
