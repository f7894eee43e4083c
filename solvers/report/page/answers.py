"""The answers that a page shows, as values and reports without HTML."""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cost_models
from cost_models import CostReport
from cost_models.report import simulate_report
from placer.constraints.constraints import Constraints
from placer.errors import PlacerError
from placer.plan.diff import diff
from placer.plan.drift import assumed_even
from placer.plan.origin import open_log_of, profile_of
from placer.plan.plan import Plan
from placer.plan.verify import check_shards
from placer.problem import Problem, before_dense, machine_of
from placer.report import section as form
from placer.report.moves import diff_report
from placer.report.section import Report
from placer.units import parse_sizes
from solvers.analysis.compare import compare
from solvers.analysis.explain import ShardMargin, explain, split_margin
from solvers.analysis.whatif import FrontPoint, front, whatif
from solvers.bounds.binding import Binding, binding
from solvers.bounds.lagrangian import lagrangian_bound
from solvers.model.instance import Instance
from solvers.model.read_plan import placements_of
from solvers.registry import solver as solver_called
from solvers.report.compare import compare_report
from solvers.report.explain import explain_report
from solvers.report.page import Questions
from solvers.report.plan import bound_holds, plan_report
from solvers.report.whatif import whatif_report
from solvers.result import Limits, SolveResult

EXPLAINED, MOST_EXPLAINED = 3, 512
"""Number of tables to explain by default, if tables × GPUs are at most this many.

A table takes three seconds with 26 tables on 8 GPUs, over a minute with 2,002 on 128 GPUs.
"""

_MOST_REASONS = 1000
"""Give reasons of splits for at most this many tables, as they take most of a page's time."""

Progress = Callable[[int, int | None, str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """All answers that a page shows; None for questions that were not asked.

    The problem's accesses are over the plan's row order. `shown` is the report of `placer show`,
    and `binding` says what limits the plan. `bound_holds` says that the plan's bound is for this
    problem and cost model. `front` has step times over budgets of HBM, `explanations` the costs of
    alternatives of some tables, and `reasons` the worth of HBM at each table's split.
    """

    plan: Plan
    problem: Problem
    cost: CostReport
    shown: Report
    binding: Binding
    bound_holds: bool
    comparison: Report | None = None
    front: tuple[FrontPoint, ...] = ()
    whatif: Report | None = None
    simulated: Report | None = None
    moves: Report | None = None
    other: Plan | None = None
    explanations: Mapping[str, Report] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


def ask(
    path: Path,
    other_path: Path | None = None,
    questions: Questions | None = None,
    profile_path: Path | None = None,
    constraints_path: Path | None = None,
    cost_model: str = "roofline",
    *,
    limits: Limits | None = None,
    on_progress: Progress = lambda done, total, name: None,
) -> Answers:
    """Read a plan and answer the questions about it.

    With a second plan, also report the moves from the first to the second. Profile and constraints
    are like those of `placer show`. `limits` hold for each search. `on_progress` is called with the
    work done, all work if known, and the name of the work.

    Raises PlacerError if a file cannot be read, or the plan's profile is not there.
    """
    asked = questions or Questions()
    plan = Plan.load(path)
    check_shards(plan)
    other = None if other_path is None else Plan.load(other_path)
    profile = profile_of(plan, path, profile_path, needed_for="a page")
    assert profile is not None, "else an error says that it is needed"
    rules = None if constraints_path is None else Constraints.load(constraints_path)
    problem = Problem.of_plan(plan, profile, rules)
    model = cost_models.cost_model(cost_model)
    ordered = problem.in_plan_order(plan)
    on_progress(0, None, "cost")
    cost = model.evaluate(ordered, plan)
    on_progress(1, None, "what binds")
    found = binding(ordered, plan, model, cost)
    even = assumed_even(plan, profile)
    shown = plan_report(
        plan, lambda _: cost, binds=lambda _: found, even=even, problem_sha256=problem.sha256
    )
    holds = bound_holds(plan, problem.sha256, cost)
    answers = Answers(plan, ordered, cost, shown, found, holds)
    added: dict[str, Any] = {}

    def shows(words: str) -> Callable[[int, int | None], None]:
        return lambda done, total: on_progress(done, total, words)

    if asked.compared is not None:
        names = [name.strip() for name in asked.compared.split(",")]
        rows = compare(problem, names, (cost_model,), limits, on_solved=shows("solvers"))
        added["comparison"] = compare_report(rows, "Solvers on the plan's problem")
    if sizes := parse_sizes(asked.hbm_steps) if asked.hbm_steps else []:
        strategy, how = solver_called(asked.solver), limits or Limits(20.0)

        def at(budget: int) -> Problem:
            machine, left = machine_of(plan, rules or Constraints(), hbm=budget)
            dense = before_dense(plan.dense)
            return replace(problem, topology=machine, constraints=left, dense=dense)

        def solved(with_budget: Problem) -> SolveResult:
            shows("budgets")(0, None)
            return strategy.solve(with_budget, model, how)

        added["front"] = front(at, sizes, solved)
    if asked.whatif:
        search = problem, model, limits
        gains = whatif(*search, solver=asked.solver, on_solved=shows("what if"))
        added["whatif"] = whatif_report(problem, gains, solver=asked.solver)
    if asked.data:
        log = open_log_of(plan, path, asked.data, asked.data_format, profile_path, ids_alone=True)
        size = plan.batch_size * len(plan.topology.gpus)
        streams = [cost_models.log_stream(plan, log, size, asked.batches)]
        options: Any = {"other": other, "windows": asked.windows}
        simulated = cost_models.simulate(plan, streams, model, profile, **options)
        added["simulated"] = simulate_report(simulated)
    if other is not None:
        added |= {"moves": diff_report(diff(plan, other)), "other": other}
    if len(plan.tables) <= _MOST_REASONS:
        added["reasons"] = _reasons(Instance(problem, model), plan)
    few = EXPLAINED if len(plan.tables) * len(plan.topology.gpus) <= MOST_EXPLAINED else 0
    most = min(len(plan.tables), few if asked.explained is None else asked.explained)
    slowest = sorted(shown.to_json()["tables"], key=lambda row: -(row["time_s"] or 0.0))[:most]
    explanations = {}
    for number, name in enumerate(row["table"] for row in slowest):
        shows("explanations")(number, most)
        # Skip tables whose placement no sharding option describes.
        with contextlib.suppress(PlacerError):
            explanations[name] = explain_report(explain(problem, plan, name, model))
    return replace(answers, **added, explanations=explanations)


def _reasons(instance: Instance, plan: Plan) -> dict[str, str]:
    """Return for each table a sentence that explains its split between HBM and DRAM.

    Placements that no solver searches have no sentence. With several shards, the sentence is about
    the shard that would gain most.
    """
    told: dict[str, str] = {}
    price = lagrangian_bound(instance).price_s_per_byte
    for table in plan.tables:
        try:
            placed = placements_of(instance, plan, table.name)
        except PlacerError:
            continue
        if placed is None or not placed.placements:
            continue
        margins = [split_margin(instance, one) for one in placed.placements]
        most = max(margins, key=lambda margin: margin.next_s_per_byte or 0.0)
        told[table.name] = _sentence(most, price)
    return told


def _sentence(margin: ShardMargin, price: float) -> str:
    """Return a sentence that compares savings per byte, which do not hold for many bytes."""
    if not price:
        return "Another byte of HBM is worth nothing to this plan's tables."
    beside = " what the last byte of HBM saves this plan's tables"

    def effect(verb: str, rows: str, saved: float | None, beside: str = beside) -> str:
        if saved is not None and saved < 0:
            return f"{verb.replace('save', 'cost')} {rows} time"
        # Rows that take no HBM have an infinite saving per byte.
        number = "any number of" if saved == math.inf else form.number((saved or 0.0) / price)
        return f"{verb} {rows} {number} times{beside}"

    last, after = margin.last_s_per_byte, margin.next_s_per_byte
    if margin.hot_rows == 0:
        return f"A byte of HBM {effect('would save', 'its hottest rows', after)}."
    if margin.hot_rows == margin.rows:
        return f"A byte of HBM {effect('saves', 'its coldest rows', last)}."
    later = effect("would save", "the hottest rows in DRAM", after)
    now = effect("saves", "the coldest rows there", last, "" if later.endswith(beside) else beside)
    return f"At its split, a byte of HBM {now}, and {later}."
