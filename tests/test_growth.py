"""Work that grows no faster than the tables: calls are counted, as times depend on the machine.

Twice the tables are every table twice, so that what is done for each of them is done twice as
often. What is done for each of them with all others is done four times as often.
"""

import cProfile
import pstats
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fast_and_full import mostly_slow

from cost_models import Roofline
from placer import Plan, Problem, Profile, Topology
from placer.adapters.hugectr import to_hugectr
from placer.adapters.torchrec.export import document
from placer.plan.diff import diff
from placer.plan.peak_memory import peak_memory
from placer.plan.verify import violations
from placer.workloads import named_workload
from solvers import Limits, solve
from solvers.analysis import explain
from solvers.analysis.replan import replan
from solvers.analysis.whatif import whatif
from solvers.bounds import lagrangian
from solvers.report import plan_report
from solvers.report.page import ask, write_page

TABLES, BATCH = 12, 512
ONCE, MOST = 8, 2.6
"""Calls for each table that may be by chance, and how much more often calls for each may be."""

LIMITS = Limits(time_limit_s=1e9, max_steps=0)


def problem_of(copies: int) -> Problem:
    few = named_workload(f"random-{TABLES}@5")

    def copied(number: int, copy: int) -> str:
        return f"t{number + 1}_{copy}"

    tables = tuple(
        replace(
            one,
            table=replace(
                one.table,
                name=copied(number, copy),
                features=tuple(
                    replace(feature, name=copied(number, copy)) for feature in one.table.features
                ),
            ),
        )
        for number, one in enumerate(few)
        for copy in range(copies)
    )
    machine = Topology.parse("2x2xh100", hbm=f"{35 * copies}GiB")
    return Problem(Profile(tables, few.samples), machine, BATCH)


@pytest.fixture(scope="module")
def problems() -> list[tuple[Problem, Plan]]:
    """Tables once and twice, each with a plan."""
    found = []
    for copies in (1, 2):
        problem = problem_of(copies)
        plan = solve(problem, "greedy-size").plan
        assert plan is not None
        found.append((problem, plan))
    return found


@pytest.fixture(autouse=True)
def many_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of few and of many tables look at sharding options alike."""
    monkeypatch.setattr(lagrangian, "_ALL_OPTIONS", 0)


Calls = dict[tuple[str, int, str], int]


def calls_of(work: Callable[[], object]) -> Calls:
    """How often each function is called."""
    profiler = cProfile.Profile()
    profiler.runcall(work)
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    # Methods that dataclasses generate all have one name, under which only one of them is counted.
    every = {function: calls for function, (_, calls, *_) in stats.items()}
    return {function: calls for function, calls in every.items() if function[0] != "<string>"}


def check(works: Sequence[Callable[[], object]]) -> None:
    """Count the calls of work for the tables and for twice as many, after both filled caches."""
    for work in works:
        work()
    few, many = map(calls_of, works)
    enough = ONCE * TABLES
    grown = {f: (few.get(f, 0), n) for f, n in many.items() if n > MOST * few.get(f, 0) + enough}
    assert not grown, "\n".join(f"{f}: {before} → {after}" for f, (before, after) in grown.items())


QUESTIONS: dict[str, Callable[[Problem, Plan], object]] = {
    "show": lambda problem, plan: plan_report(plan, Roofline().evaluate(problem, plan)),
    "verify": lambda problem, plan: violations(plan),
    "diff": lambda problem, plan: diff(plan, plan),
    "memory": lambda problem, plan: peak_memory(plan, problem.profile),
    "torchrec": lambda problem, plan: document(plan, staged_as="uva"),
    "hugectr": lambda problem, plan: to_hugectr(plan),
    "greedy-size": lambda problem, plan: solve(problem, "greedy-size", max_steps=0),
    "greedy-dim": lambda problem, plan: solve(problem, "greedy-dim", max_steps=0),
}


@pytest.mark.parametrize("name", mostly_slow(QUESTIONS, *(QUESTIONS.keys() - {"greedy-dim"})))
def test_questions(name: str, problems: list[tuple[Problem, Plan]]) -> None:
    check([partial(QUESTIONS[name], *one) for one in problems])


SEARCHES: dict[str, Callable[[Problem, Plan], object]] = {
    "explain": lambda problem, plan: explain(problem, plan, "t6_0", Roofline()),
    "replan": lambda problem, plan: replan(problem, Roofline(), plan, LIMITS, solver="greedy-size"),
    "whatif": lambda problem, plan: whatif(problem, Roofline(), LIMITS, solver="greedy-size"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHES)
def test_searches(name: str, problems: list[tuple[Problem, Plan]]) -> None:
    check([partial(SEARCHES[name], *one) for one in problems])


@pytest.mark.slow
def test_page(problems: list[tuple[Problem, Plan]], tmp_path: Path) -> None:
    def page(number: int) -> None:
        files = tmp_path / f"{number}.json", None, tmp_path / f"{number}"
        write_page(ask(*files, explained=0), tmp_path / "page.html")

    for number, (problem, plan) in enumerate(problems):
        problem.profile.save(tmp_path / f"{number}")
        plan.save(tmp_path / f"{number}.json")
    check([partial(page, number) for number in range(2)])
