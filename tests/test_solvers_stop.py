"""Searches that end when the caller says so, a signal included, with the best plan so far."""

import signal
import threading
import time

import pytest
from fast_and_full import mostly_slow

from cost_models import Roofline
from placer import Problem, Topology
from placer.errors import PlacerError
from placer.interrupt import deferred_interrupt
from placer.plan.verify import violations
from placer.workloads import named_workload
from solvers import SOLVERS, Limits, solve
from solvers.bounds.claims import every_option
from solvers.bounds.lagrangian import lagrangian_bound
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.options import Effort
from solvers.search.exact_program import ExactProgram

SEARCHES = sorted({*SOLVERS} - {"greedy-size", "greedy-lookup", "greedy-size-lookup", "greedy-dim"})


@pytest.mark.parametrize("wrong", [{"time_limit_s": float("nan")}, {"gap": -0.1}])
def test_limits_are_numbers(wrong: dict[str, float]) -> None:
    with pytest.raises(PlacerError, match="0 or more, not"):
        Limits(**wrong)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def open_problem() -> Problem:
    """One whose gap no search closes in a moment."""
    return Problem(named_workload("random-30@7"), Topology.parse("4xt4", hbm="1GiB"), 1024)


@pytest.fixture(scope="module")
def program() -> ExactProgram:
    """One that CP-SAT does not solve in a moment."""
    problem = Problem(named_workload("criteo-kaggle"), Topology.parse("4xh100", hbm="1GiB"), 8192)
    instance = Instance(problem, Roofline())
    bound = lagrangian_bound(instance)
    upper_s = 1.3 * bound.step_time_s + instance.fixed_s
    made = ExactProgram.build(instance, "time", 1_000_000, upper_s, most_points=2)
    assert made is not None
    return made


def cp_sat_runs() -> bool:
    return "CP-SAT" in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("name", mostly_slow(SEARCHES, "auto", "beam"))
def test_a_search_that_is_stopped_at_once_has_a_plan(name: str, open_problem: Problem) -> None:
    result = solve(open_problem, name, time_limit_s=600, gap=0.0, stop=lambda: True)
    assert result.plan is not None
    assert violations(result.plan) == []
    assert result.termination.limit == "stop"
    assert result.plan.solver.status == "feasible"


def test_what_a_command_did_before_its_search_is_part_of_its_time() -> None:
    assert Clock.start(Limits(60, spent_s=59.5)).left_s <= 0.5
    assert Clock.start(Limits(1, spent_s=5)).left_s <= 0
    effort = Effort(time_limit=60.0, gap=1e-3, seed=0, steps=None)
    assert 5 <= effort.limits(began=time.monotonic() - 5).spent_s < 60


@pytest.mark.parametrize("name", mostly_slow(SEARCHES, "auto", "beam"))
def test_steps_end_a_search_at_the_same_plan(name: str, open_problem: Problem) -> None:
    one, two = (solve(open_problem, name, time_limit_s=600, gap=0.0, max_steps=2) for _ in "12")
    assert one.termination.limit == two.termination.limit == "steps"
    assert one.plan is not None
    assert two.plan is not None
    assert one.plan.shards == two.plan.shards


def test_ctrl_c_ends_cp_sat(program: ExactProgram) -> None:
    def stop() -> bool:
        if not interrupt.requested:
            assert cp_sat_runs()
            signal.raise_signal(signal.SIGINT)
        return interrupt.requested

    with deferred_interrupt() as interrupt:
        answer = program.run(Limits(gap=0.0, threads=2, stop=stop), 600)
    assert interrupt.requested
    assert answer.claim.step_time_s < program.unit_s * 10_000_000


def test_an_exception_ends_cp_sat_too(program: ExactProgram) -> None:
    """As Ctrl-C raises where no one handles it."""

    def stop() -> bool:
        assert cp_sat_runs()
        signal.raise_signal(signal.SIGINT)
        return False

    with pytest.raises(KeyboardInterrupt):
        program.run(Limits(gap=0.0, threads=2, stop=stop), 600)
    assert not cp_sat_runs()


def test_cp_sat_runs_to_its_end_in_any_thread(open_problem: Problem) -> None:
    instance = Instance(open_problem, Roofline())
    small = ExactProgram(instance, "fit", [of[:1] for of in every_option(instance)], 2)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(small.run(Limits(threads=1), 60)))
    thread.start()
    thread.join()
    assert len(answers) == 1
    assert answers[0].assignment is not None
