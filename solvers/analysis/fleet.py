"""One workload on many machines: step time, memory left, price, and which to take."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cost_models import CostModel
from placer.errors import ProblemError
from placer.problem import Problem
from placer.topology.kinds import LIST_PRICES, Price
from placer.topology.topology import Topology
from solvers.result import Limits, Solver, SolveResult, Termination

FLEET = (
    "gb200-nvl72", "8xmi300x", "8xmi350x", "8xmi355x", "8xb200", "8xh200", "8xh100", "2x8xh100",
    "4x8xh100", "8xa100-80", "2x8xa100-80", "2x8xa100-40", "4x8xv100-32", "8xl40s", "2x8xl4",
    "2x8xa10g", "4x4xa10", "4x8xt4", "8xgaudi2", "8xgaudi3",
)  # fmt: skip
"""Machines that are compared where none are named."""

SAMPLES = 1_000_000_000
"""What prices and times are of."""


@dataclass(frozen=True, slots=True)
class FleetRow:
    """A workload on one machine. Without a plan, all is None but the bound and the prices.

    `train_s` and `cost` are seconds and dollars to train `SAMPLES`. `memory_left` is the share of
    all HBM and DRAM for embeddings that the plan leaves free, `hbm_left_bytes` what is free on the
    fullest GPU: solvers fill HBM where not all tables fit. The price is of the whole machine, None
    where nobody says; its source is empty for a price of the user's own. `assumed` are constants
    that nobody has measured. `detail` says what is short where there is no plan, else what the step
    waits for.
    """

    machine: str
    gpus: int
    hosts: int
    status: str
    step_time_s: float | None = None
    bound_s: float | None = None
    gap: float | None = None
    samples_per_s: float | None = None
    train_s: float | None = None
    memory_left: float | None = None
    hbm_left_bytes: int | None = None
    price_per_hour: float | None = None
    price_source: str = ""
    cost: float | None = None
    assumed: tuple[str, ...] = ()
    detail: str = ""

    @property
    def least_cost(self) -> float | None:
        """What it would cost at the proven bound of the step time."""
        if self.cost is None or self.step_time_s is None or self.bound_s is None:
            return None
        return self.cost * self.bound_s / self.step_time_s


class Cheapest(NamedTuple):
    """The machine that trains `SAMPLES` in time for least money.

    `row` is None if no machine with a price is fast enough; `rivals` are machines that a better
    plan, within what bounds allow, could make cheaper, and those `without_price` are fast enough.
    """

    row: FleetRow | None
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
) -> list[FleetRow]:
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
    >>> [(row.machine, round(row.price_per_hour, 2)) for row in rows]
    [('8xt4', 7.82), ('8xl4', 13.35)]
    """
    problems: dict[str, Problem] = {}
    rows: dict[str, FleetRow] = {}
    for name in machines:
        try:
            problems[name] = problem_on(name)
        except ProblemError as error:  # As where the dense layers alone do not fit.
            rows[name] = FleetRow(name, 0, 0, "infeasible", detail=str(error))
    # Machines of few GPUs first.
    for name in sorted(problems, key=lambda name: len(problems[name].topology.gpus)):
        problem, result = problems[name], SolveResult(None, Termination("no_plan", "stop"))
        if limits.stop is None or not limits.stop():
            result = solver.solve(problem, cost_model, limits)
        rows[name] = _row(name, problem, cost_model, result, prices or {})
        on_solved(len(rows), len(problems))
    return [rows[name] for name in machines]


def cheapest(rows: Iterable[FleetRow], within_s: float) -> Cheapest:
    """Find the machine that trains `SAMPLES` within so many seconds for least money."""
    rows = list(rows)
    fast = [row for row in rows if row.train_s is not None and row.train_s <= within_s]
    priced = [row for row in fast if row.cost is not None]
    best = min(priced, key=lambda row: row.cost or 0.0, default=None)
    rivals = [] if best is None else [row for row in rows if _may_beat(row, best, within_s)]
    return Cheapest(
        best,
        tuple(row.machine for row in rivals),
        tuple(row.machine for row in fast if row.cost is None),
    )


def _may_beat(row: FleetRow, best: FleetRow, within_s: float) -> bool:
    """Return whether a better plan could make a machine both fast enough and the cheaper one."""
    if row is best or row.least_cost is None or row.train_s is None or best.cost is None:
        return False
    assert row.bound_s is not None, "it has a least cost"
    assert row.step_time_s is not None, "it has a least cost"
    least_s = row.train_s * row.bound_s / row.step_time_s
    return least_s <= within_s and row.least_cost < best.cost


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


def _row(
    name: str,
    problem: Problem,
    cost_model: CostModel,
    result: SolveResult,
    prices: Mapping[str, float],
) -> FleetRow:
    topology, end, step_time_s = problem.topology, result.termination, result.step_time_s
    price = price_of(topology, name, prices)
    known: dict[str, Any] = {
        "bound_s": result.bound_s,
        "price_per_hour": None if price is None else price.dollars_per_gpu_hour,
        "price_source": "" if price is None else price.source,
        "assumed": tuple(n for n, source in topology.sources.items() if "assum" in source),
    }
    machine = name, len(topology.gpus), len(topology.hosts), end.summary
    if result.plan is None or not step_time_s:
        return FleetRow(*machine, **known, detail=end.detail)
    report = cost_model.evaluate(problem, result.plan)
    samples_per_s = problem.global_batch_size / step_time_s
    train_s, uses = SAMPLES / samples_per_s, report.memory.values()
    free_bytes = sum(use.free_bytes for use in uses)
    return FleetRow(
        *machine,
        **known,
        step_time_s=step_time_s,
        gap=result.gap,
        samples_per_s=samples_per_s,
        train_s=train_s,
        memory_left=free_bytes / sum(use.capacity_bytes for use in uses),
        hbm_left_bytes=min(report.memory[gpu.id].free_bytes for gpu in topology.gpus),
        cost=None if price is None else price.dollars_per_gpu_hour * train_s / 3600,
        detail=f"waits for {report.bottleneck}",
    )
