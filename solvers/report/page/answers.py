"""The answers that a page shows, as values and reports without HTML."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import cost_models
from cost_models import CostReport
from placer.constraints.constraints import Constraints
from placer.errors import PlacerError
from placer.plan.diff import diff
from placer.plan.drift import assumed_even
from placer.plan.origin import profile_of
from placer.plan.plan import Plan
from placer.plan.verify import check_shards
from placer.problem import Problem, before_dense, machine_of
from placer.report.moves import diff_report
from placer.report.section import Report
from placer.units import parse_sizes
from solvers.analysis.explain import explain
from solvers.analysis.whatif import FrontPoint, front, whatif
from solvers.bounds.binding import Binding, binding
from solvers.registry import solver as solver_called
from solvers.report.explain import explain_report
from solvers.report.plan import plan_report
from solvers.report.whatif import front_section, whatif_report
from solvers.result import Limits, SolveResult

EXPLAINED, MOST_EXPLAINED = 3, 512
"""Number of tables to explain by default, if tables × GPUs are at most this many.

A table takes three seconds with 26 tables on 8 GPUs, over a minute with 2,002 on 128 GPUs.
"""

Progress = Callable[[int, int | None, str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """All answers that a page shows.

    The problem's accesses are over the plan's row order. `shown` is the report of `placer show`,
    and `binding` says what limits the plan. `parts` has the reports of questions that were asked:
    ``budgets`` and ``moves``. `explanations` has those of some tables.
    """

    plan: Plan
    problem: Problem
    cost: CostReport
    shown: Report
    binding: Binding
    parts: Mapping[str, Report] = field(default_factory=dict)
    explanations: Mapping[str, Report] = field(default_factory=dict)


def ask(
    path: Path,
    other_path: Path | None = None,
    profile_path: Path | None = None,
    constraints_path: Path | None = None,
    cost_model: str = "roofline",
    *,
    hbm_steps: str | None = None,
    changes: bool = False,
    solver: str = "greedy-cost",
    explained: int | None = None,
    limits: Limits | None = None,
    on_progress: Progress = lambda done, total, name: None,
) -> Answers:
    """Read a plan and answer the questions about it.

    With a second plan, also report the moves from the first to the second. Profile and constraints
    are like those of `placer show`.

    - `hbm_steps`: also show step times with these budgets of each GPU, such as ``2GiB,4GiB``.
    - `changes`: also show what changes of the machine gain.
    - `solver`, `limits`: of each search for the two.
    - `explained`: explain this many tables, the slowest ones; the default depends on the plan.
    - `on_progress`: called with the work done, all work if known, and the name of the work.

    Raises PlacerError if a file cannot be read, or the plan's profile is not there.
    """
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
    shown = plan_report(plan, cost, binds=found, even=even, problem_sha256=problem.sha256)
    parts: dict[str, Report] = {}

    def shows(words: str) -> Callable[[int, int | None], None]:
        return lambda done, total: on_progress(done, total, words)

    points: tuple[FrontPoint, ...] = ()
    if hbm_steps:
        strategy, how = solver_called(solver), limits or Limits(20.0)

        def at(budget: int) -> Problem:
            machine, left = machine_of(plan, rules or Constraints(), hbm=budget)
            dense = before_dense(plan.dense)
            return replace(problem, topology=machine, constraints=left, dense=dense)

        def solved(with_budget: Problem) -> SolveResult:
            shows("budgets")(0, None)
            return strategy.solve(with_budget, model, how)

        points = front(at, parse_sizes(hbm_steps), solved)
        section = front_section(points, problem.global_batch_size)
        parts["budgets"] = Report(f"What if: {problem.topology.name}", (section,))
    if changes:
        search = problem, model, limits
        gains = whatif(*search, solver=solver, on_solved=shows("what if"))
        parts["budgets"] = whatif_report(problem, gains, points, solver=solver)
    if other is not None:
        parts["moves"] = diff_report(diff(plan, other))
    few = EXPLAINED if len(plan.tables) * len(plan.topology.gpus) <= MOST_EXPLAINED else 0
    most = min(len(plan.tables), few if explained is None else explained)
    slowest = sorted(shown.to_json()["tables"], key=lambda row: -(row["time_s"] or 0.0))[:most]
    explanations = {}
    for number, name in enumerate(row["table"] for row in slowest):
        shows("explanations")(number, most)
        # Skip tables whose placement no sharding option describes.
        with contextlib.suppress(PlacerError):
            explanations[name] = explain_report(explain(problem, plan, name, model))
    return Answers(plan, ordered, cost, shown, found, parts, explanations)
