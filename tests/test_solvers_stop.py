"""Searches that end when the caller says so, a signal included, with the best plan so far."""

import signal
import threading
import time
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from fast_and_full import mostly_slow
from problem_cases import problem_of, zipf_table

from cost_models import Roofline
from placer import Constraints, Problem, TableRule, Topology
from placer.errors import PlacerError
from placer.interrupt import deferred_interrupt
from placer.plan.verify import violations
from placer.workloads import named_workload
from solvers import SOLVERS, Limits, solve, solver
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.options import Effort
from solvers.result import SearchState
from solvers.search import fit_program
from solvers.search.fit_program import FitProgram, run_cp_sat
from solvers.strategies import _stages
from solvers.strategies._search import Search

SEARCHES = sorted({*SOLVERS} - {"greedy-size", "greedy-lookup", "greedy-size-lookup", "greedy-dim"})


@pytest.mark.parametrize("wrong", [{"time_limit_s": float("nan")}, {"gap": -0.1}, {"threads": -1}])
def test_limits_are_numbers(wrong: dict[str, float]) -> None:
    with pytest.raises(PlacerError, match="0 or more, not"):
        Limits(**wrong)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def open_problem() -> Problem:
    """One whose gap no search closes in a moment."""
    return Problem(named_workload("random-30@7"), Topology.parse("4xt4", hbm="1GiB"), 1024)


@pytest.fixture(scope="module")
def program() -> Any:
    """One that CP-SAT does not solve in a moment: a Golomb ruler of 16 marks."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    marks = [model.new_int_var(0, 256, "") for _ in range(16)]
    model.add_all_different([b - a for a, b in combinations(marks, 2)])
    for one, other in pairwise(marks):
        model.add(one < other)
    model.minimize(marks[-1])
    return model


def cp_sat_runs() -> bool:
    return "CP-SAT" in {thread.name for thread in threading.enumerate()}


def test_each_faster_plan_is_reported() -> None:
    found: list[SearchState] = []
    problem = Problem(named_workload("random-10@1"), Topology.parse("2xt4", hbm="1GiB"), 256)
    limits = Limits(3600.0, max_steps=3, on_state=found.append)
    result = solver("dp").solve(problem, Roofline(), limits)
    times = [state.step_time_s for state in found]
    assert times[0] is None, "nothing is found when the search begins"
    assert times[-1] == pytest.approx(result.step_time_s)
    assert (result.stats["proposals"], result.termination.limit) == (3, "steps")
    assert all(one is None or other < one for one, other in pairwise(times))


@pytest.mark.parametrize("name", mostly_slow(SEARCHES, "auto", "beam"))
def test_a_search_that_is_stopped_at_once_has_a_plan(name: str, open_problem: Problem) -> None:
    result = solve(open_problem, name, time_limit_s=600, gap=0.0, stop=lambda: True)
    assert violations(result.plan) == []
    assert result.termination.limit == "stop"
    assert result.plan.solver.status == "feasible"


def test_what_a_command_did_before_its_search_is_part_of_its_time() -> None:
    assert Clock.start(Limits(60, spent_s=59.5)).left_s <= 0.5
    assert Clock.start(Limits(1, spent_s=5)).left_s <= 0
    effort = Effort(time_limit=60.0, gap=1e-3, seed=0, steps=None)
    assert 5 <= effort.limits(began=time.monotonic() - 5).spent_s < 60


def test_ctrl_c_ends_cp_sat(program: Any) -> None:
    def stop() -> bool:
        if not interrupt.requested:
            assert cp_sat_runs()
            signal.raise_signal(signal.SIGINT)
        return interrupt.requested

    with deferred_interrupt() as interrupt:
        run_cp_sat(program, Limits(threads=2, stop=stop), 600)
    assert interrupt.requested
    assert not cp_sat_runs()


def test_an_exception_ends_cp_sat_too(program: Any) -> None:
    """As Ctrl-C raises where no one handles it."""

    def stop() -> bool:
        assert cp_sat_runs()
        signal.raise_signal(signal.SIGINT)
        return False

    with pytest.raises(KeyboardInterrupt):
        run_cp_sat(program, Limits(threads=2, stop=stop), 600)
    assert not cp_sat_runs()


def test_cp_sat_runs_to_its_end_in_any_thread(open_problem: Problem) -> None:
    instance = Instance(open_problem, Roofline())
    small = FitProgram(instance, [instance.options_of(t)[:1] for t in range(instance.tables)])
    answers = []
    thread = threading.Thread(target=lambda: answers.append(small.run(Limits(threads=1), 60)))
    thread.start()
    thread.join()
    assert len(answers) == 1
    assert answers[0].assignment is not None


def test_steps_limit_the_proof_that_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three tables that nothing may divide, two hosts hold one each."""
    tables = [zipf_table(name, 100_000) for name in "abc"]
    machine = Topology.parse("2x1xh100", hbm="1MiB", dram=tables[0].table.total_bytes * 17 // 10)
    whole = TableRule(forbid=frozenset({"row-wise", "column-wise", "replicated"}))
    problem = replace(
        problem_of(*tables, topology=machine), constraints=Constraints.of({"*": whole})
    )
    proven = solve(problem, "greedy-cost", max_steps=6).termination
    assert (proven.reason, proven.limit) == ("infeasible", None)
    assert proven.shortages
    monkeypatch.setattr(fit_program, "_LEAST_S", 0.0)
    ended = solve(problem, "greedy-cost", max_steps=0).termination
    assert (ended.reason, ended.limit) == ("no_plan", "steps")


@pytest.mark.parametrize(("is_small", "share"), [(True, 0.5), (False, 0.125)])
def test_small_problems_are_constructed_as_greedy_cost_does_in_the_same_time(
    is_small: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that `auto` is not behind it where there is little time."""
    shares = []
    constructed = _stages._constructed

    def noted(search: Search, clock: Clock) -> Any:
        shares.append(clock.left_s / search.clock.left_s)
        return constructed(search, clock)

    monkeypatch.setattr(_stages, "_constructed", noted)
    monkeypatch.setattr(_stages, "is_branched", lambda _: is_small)
    machine = Topology.parse("2xh100", hbm="1GiB")
    instance = Instance(Problem(named_workload("random-4@1"), machine, 512), Roofline())
    search = Search.start(instance, Clock.start(Limits(time_limit_s=3600)))
    assert _stages.construct(search, 0.25) is not None
    assert shares == [pytest.approx(share, rel=0.01)]
