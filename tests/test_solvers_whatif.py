"""Effects of changed machines: a plan's own, solutions and proofs that check one another."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from calibration_cases import calibration
from fast_and_full import examples
from hypothesis import given
from plan_cases import machine
from problem_cases import problem_of, problems, zipf_table

from cost_models import Calibrated, Roofline
from placer import AccessCdf, Constraints, Problem, Profile, Table, TableProfile, Topology
from placer.errors import PlacerError
from placer.report import section as form
from placer.workloads import named_workload
from solvers import Limits, SolveResult, solve
from solvers.analysis.whatif import Effect, FrontPoint, WhatIf, _with_servers, front, whatif
from solvers.bounds.binding import binding
from solvers.report import plan_report
from solvers.report.whatif import plot_front, whatif_report
from solvers.result import Termination

MODEL = Roofline()
HBM = 1 << 29


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(named_workload("random-4@4"), Topology.parse("2xa100-40", hbm=HBM), 512)


@pytest.fixture(scope="module")
def answer(problem: Problem) -> WhatIf:
    return whatif(problem, MODEL)


def problem_at(problem: Problem) -> Callable[[int], Problem]:
    """The problem at budgets of HBM."""
    return lambda hbm: replace(problem, topology=problem.topology.with_memory(hbm=hbm))


def effect(answer: WhatIf, words: str) -> Effect:
    (found,) = [one for one in answer.effects if words in one.change]
    return found


def test_nothing_gains_where_steps_take_no_time() -> None:
    """No feature reads the table, and launches are free."""
    profile = TableProfile(Table("t", 9, 16), AccessCdf.zipf(9, 1.0))
    unread = problem_of(profile, topology=machine(2, launch_s=0.0))
    answer = whatif(unread, MODEL)
    assert answer.base.step_time_s == 0
    assert {one.gain for one in answer.effects} == {0.0}


def test_effects_are_those_of_solving_anew(problem: Problem, answer: WhatIf) -> None:
    base = solve(problem, "greedy-cost")
    double = solve(replace(problem, batch_size=1024), "greedy-cost")
    found = effect(answer, "batch")
    assert answer.base.step_time_s == base.step_time_s
    assert found.step_time_s == double.step_time_s
    assert found.gain == pytest.approx(2 * base.step_time_s / double.step_time_s - 1)
    roomy = problem.topology.with_memory(hbm=int(1.1 * HBM))
    more = solve(replace(problem, topology=roomy), "greedy-cost")
    assert effect(answer, "HBM +10%").step_time_s == more.step_time_s


def test_what_is_proven_holds_for_the_solutions(answer: WhatIf) -> None:
    for one in answer.effects:
        assert one.least_gain <= one.gain <= one.most_gain
        # Every change but a larger batch makes the machine better.
        assert one.most_gain >= 0


@pytest.mark.parametrize(
    ("least", "most", "proven"),
    [(0.01, 0.02, True), (-0.01, 0.02, False), (-0.02, -0.01, True), (None, 0.1, False)],
)
def test_an_effect_within_the_gap_is_not_proven(
    least: float | None, most: float | None, proven: bool
) -> None:
    one = Effect("x", 1.0, 1.0, 0.0, 0.0, None, least, most)
    assert one.is_proven == proven
    problem = problem_of(zipf_table("t", 10))
    answer = WhatIf(solve(problem, "greedy-cost"), (one,))
    shown = whatif_report(problem, answer, solver="greedy-cost").to_json()
    expected = "no bound" if least is None else "proven" if proven else "within the gap"
    assert shown["effects"][0]["verdict"] == expected


def test_the_plan_as_it_is_gains_what_the_changed_machine_says(answer: WhatIf) -> None:
    """A plan's gain is one that exists, so that solving anew gains as much at least."""
    for one in answer.effects:
        if "batch" in one.change:
            assert one.plan_gain is None
            continue
        assert 0 <= one.plan_gain <= one.gain + 1e-3
    best = max(answer.effects[:-1], key=lambda one: one.plan_gain or 0.0)
    assert answer.binding.gain == best.plan_gain
    assert form.share(answer.binding.gain) in answer.binding.words


@pytest.mark.slow
def test_hbm_does_not_bind_where_more_of_it_gains_nothing() -> None:
    """Too little HBM was said to bind where a tenth more of it gains nothing."""
    problem = Problem(named_workload("nvidia-small"), Topology.parse("1xh100", hbm="8GiB"), 8192)
    answer = whatif(problem, MODEL, Limits(time_limit_s=30))
    assert answer.binding.resource == "hbm bandwidth"
    gains = {one.change: one.gain or 0.0 for one in answer.effects if "batch" not in one.change}
    assert gains["HBM bandwidth +10%"] == max(gains.values())
    assert gains["HBM bandwidth +10%"] == pytest.approx(answer.binding.gain, abs=2e-3)
    assert gains["HBM +10%"] < 1e-3


def test_all_say_the_same_of_what_binds(answer: WhatIf, problem: Problem) -> None:
    plan = answer.base.plan
    words = answer.binding.words
    assert answer.base.termination.detail == words
    assert binding(problem, plan, MODEL).words == words
    assert words in whatif_report(problem, answer, solver="greedy-cost").headline
    cost = MODEL.evaluate(problem, plan)
    shown = plan_report(plan, cost, binds=binding(problem, plan, MODEL, cost))
    assert words in shown.headline
    assert shown.to_json()["binding"] == words


def test_no_price_is_multiplied(answer: WhatIf, problem: Problem) -> None:
    """A GiB more was said to save 44% where solving says 0.2%: only what is solved is said."""
    shown = whatif_report(problem, answer, solver="greedy-cost")
    text = json.dumps(shown.to_json()) + " ".join(shown.headline)
    assert "price" not in text
    assert "GiB of HBM on every GPU" not in text


def test_changes_that_measured_constants_do_not_know_are_left_out() -> None:
    problem = problem_of(zipf_table("t", 20_000, 32, lookups=4.0), topology=machine(2))
    answer = whatif(problem, Calibrated(calibration()))
    words = [one.change for one in answer.effects]
    assert "HBM bandwidth +10%" not in words
    assert "batch size x2" in words
    assert answer.binding.gains["hbm bandwidth"] > 0


@pytest.mark.slow
def test_host_memory_binds_where_it_is_slow(problem: Problem) -> None:
    (host,) = problem.topology.hosts
    slow = replace(host, dram_bytes_per_s=host.dram_bytes_per_s / 100)
    answer = whatif(replace(problem, topology=replace(problem.topology, hosts=(slow,))), MODEL)
    found = effect(answer, "DRAM bandwidth")
    assert found.plan_gain == pytest.approx(found.gain, abs=0.02)
    assert found.gain > 0.05
    assert answer.binding.resource == "dram bandwidth"
    shown = whatif_report(problem, answer, solver="greedy-cost")
    assert answer.binding.words in shown.headline


@pytest.mark.slow
def test_what_is_not_solved_when_it_is_stopped_is_left_out(problem: Problem) -> None:
    """Plans that were searched for a moment only say nothing beside one that was not."""
    answer = whatif(problem, MODEL, Limits(20, stop=lambda: True))
    assert answer.base.plan is not None
    assert answer.binding
    assert answer.effects == ()
    shown = whatif_report(problem, answer, solver="greedy-cost")
    assert shown.sections == ()
    solved: list[int] = []
    limits = Limits(20, stop=lambda: 3 in solved)
    some = whatif(problem, MODEL, limits, on_solved=lambda done, _: solved.append(done))
    assert len(some.effects) == 2


def test_more_of_a_resource_is_never_a_loss() -> None:
    """This greedy's plan with a tenth more HBM is a quarter slower: the plan as it is stays.

    So it does with its HBM filled again.
    """
    machine = Topology.parse("2xa100-40", hbm="600MiB")
    problem = Problem(named_workload("random-6@5"), machine, 256)
    answer = whatif(problem, MODEL, Limits(time_limit_s=60), solver="greedy-size")
    more = [one for one in answer.effects if "batch" not in one.change]
    assert len(more) >= 5
    assert all(one.gain is not None and one.gain >= 0 for one in more)
    gains = [(one.gain, one.plan_gain) for one in more if one.plan_gain is not None]
    assert all(gain >= plan_gain - 1e-9 for gain, plan_gain in gains)
    assert all(one.bound_s is not None and one.bound_s <= one.step_time_s for one in more)


def test_links_that_a_machine_lacks_are_not_asked_about(answer: WhatIf) -> None:
    words = " ".join(one.change for one in answer.effects)
    assert "peer" in words
    assert "network" not in words
    two = problem_of(zipf_table("t", 1000), topology=Topology.parse("2x1xh100"))
    linked = whatif(two, MODEL)
    assert effect(linked, "network").gain is not None
    assert effect(linked, "2 more hosts without GPUs").gain >= 0


@pytest.mark.slow
def test_hosts_without_gpus_help_where_memory_is_short_and_nowhere_do_harm() -> None:
    # Cold rows of some tables are read over the network in any case, or all tables are in HBM.
    for hbm, helps in (("64MiB", True), ("8GiB", False)):
        machine = Topology.parse("2x1xt4", hbm=hbm, dram="2GiB")
        problem = Problem(named_workload("criteo-kaggle"), machine, batch_size=4096)
        found = effect(whatif(problem, MODEL), "2 more hosts without GPUs")
        assert (found.gain > 0.01) == helps
        assert found.gain >= 0


def test_hosts_without_gpus_that_are_added_are_like_those_that_are_there() -> None:
    topology = Topology.parse("1xt4+1xcpu")
    fast = replace(topology.servers[0], dram_bytes_per_s=1e12)
    served = _with_servers(replace(topology, hosts=(topology.hosts[0], fast)))
    assert [host.dram_bytes_per_s for host in served.servers] == [1e12] * 3


def test_a_problem_without_a_plan_has_no_effects() -> None:
    tight = problem_of(zipf_table("t", 1000), topology=Topology.parse("1xt4", hbm=0))
    answer = whatif(tight, MODEL)
    assert answer.effects == ()
    assert answer.base.termination.reason == "infeasible"


@examples(10)
@given(problems(hbm_bytes=1 << 13))
def test_more_memory_is_never_slower(problem: Problem) -> None:
    budgets = [1 << 16, 1 << 11, 1 << 13, 1 << 11]
    points = front(problem_at(problem), budgets, lambda changed: solve(changed, "greedy-cost"))
    assert [point.hbm_bytes for point in points] == sorted(set(budgets))
    solved = [point for point in points if point.step_time_s is not None]
    times = [point.step_time_s or 0.0 for point in solved]
    assert times == sorted(times, reverse=True)
    for point in solved:
        assert point.bound_s <= (point.step_time_s or 0.0) * (1 + 1e-6)
    for point in points[: len(points) - len(solved)]:
        assert point.step_time_s is None
        assert point.detail


def test_budgets_of_the_front_are_before_what_users_reserve() -> None:
    reserve = Constraints(reserve=(("gpu", 3_000),))
    asked: list[int] = []

    def problem_at(hbm_bytes: int) -> Problem:
        topology = machine(2, hbm_bytes=hbm_bytes)
        return Problem(Profile((zipf_table("t", 1000),)), topology, 4, reserve)

    def solved(problem: Problem) -> SolveResult:
        asked.append(problem.topology.gpus[0].memory_bytes)
        return solve(problem, "greedy-cost")

    points = front(problem_at, [1 << 20, 1 << 14], solved)
    assert asked == [(1 << 14) - 3_000, (1 << 20) - 3_000]
    assert [point.hbm_bytes for point in points] == [1 << 14, 1 << 20]


def test_points_of_the_front_share_their_best_plans_and_bounds() -> None:
    """A plan holds with more memory, a bound with less."""
    found = {100: (None, None), 200: (5.0, 1.0), 300: (6.0, 3.0), 400: (4.0, 2.0), 500: (7.0, None)}

    def solved(problem: Problem) -> SolveResult:
        step_time_s, bound_s = found[problem.topology.gpus[0].memory_bytes]
        end = Termination("feasible" if step_time_s else "infeasible", detail="too little")
        return SolveResult(None, end, step_time_s, bound_s)

    points = front(problem_at(problem_of(zipf_table("t", 10))), [*found, 200], solved)
    assert points == (
        FrontPoint(100, detail="too little"),
        FrontPoint(200, 5.0, 3.0, 5 / 3 - 1),
        FrontPoint(300, 5.0, 3.0, 5 / 3 - 1),
        FrontPoint(400, 4.0, 2.0, 1.0),
        FrontPoint(500, 4.0, None, None),
    )


def test_pictures_of_the_front(problem: Problem, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = front(problem_at(problem), [0, 2**30, 2**31], lambda p: solve(p, "greedy-cost"))
    plot_front(points, tmp_path / "front.svg")
    assert "<!-- proven bound" in (tmp_path / "front.svg").read_text()
    with pytest.raises(PlacerError, match="no budget has a plan"):
        plot_front(points[:1], tmp_path / "none.png")
    assert [path.name for path in tmp_path.iterdir()] == ["front.svg"]
