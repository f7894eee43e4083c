"""Capacities that the plan chooses, beside all others that there are."""

import itertools
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cli_cases import Workbench, misuse, succeed
from fast_and_full import fewer, is_fast, mostly_slow
from growing_cases import click_samples
from hypothesis import given
from hypothesis import strategies as st

from cost_models import Roofline
from placer import AccessCdf, Feature, Plan, Problem, Profile, Table, Topology
from placer.errors import ProblemError
from placer.growing import Growing, HitRate
from placer.profile.growing_tables import growing_of, hit_rate_for
from placer.profile.table_profile import TableProfile
from solvers import choose_capacities, solve
from solvers.analysis.capacities import Step, divide, steps_of

CURVES = {
    "item": ((100, 0.2), (400, 0.25), (1000, 0.6), (4000, 0.9)),
    "user": ((50, 0.5), (500, 0.7), (9000, 0.8)),
}


def _table(name: str, rates: tuple[tuple[int, float], ...], reads: float) -> TableProfile:
    rows = rates[-1][0] + 1
    table = Table(name, rows, 64, features=(Feature(name, reads),))
    measured = tuple(HitRate(capacity, "lfu", rate) for capacity, rate in rates)
    return TableProfile(table, AccessCdf.zipf(rows, 0.8), hit_rates=measured)


def _profile() -> Profile:
    fixed = Table("city", 20_000, 64, features=(Feature("city", 4.0),))
    tables = [_table(name, rates, 5.0) for name, rates in CURVES.items()]
    return Profile((*tables, TableProfile(fixed, AccessCdf.zipf(20_000, 1.1))), 1000, "test")


def _problem(memory: int, gpus: int = 1) -> Problem:
    machine = Topology.parse(f"{gpus}xh100", hbm=2 << 20, dram=memory)
    growing, auto = growing_of(_profile(), ["item,user"])
    assert auto == ["item", "user"]
    return Problem(_profile(), machine, 64, growing=growing)


def _missed(problem: Problem) -> float:
    """Percent of the lookups of both tables."""
    rates = [hit_rate_for(problem.profile[n], problem.growing[n].capacity) for n in CURVES]
    return 100 * (1 - sum(rates) / 2)


@st.composite
def _steps(draw: st.DrawFn) -> list[Step]:
    """Concave curves of a few tables, as `steps_of` has them."""
    steps = []
    for table in "abc"[: draw(st.integers(1, 3))]:
        slopes = sorted(draw(st.lists(st.integers(1, 40), max_size=4)), reverse=True)
        capacity = 0
        for slope in slopes:
            rows = draw(st.integers(1, 9))
            capacity += rows
            steps.append(Step(table, capacity, float(rows), float(rows * slope)))
    return sorted(steps, key=lambda step: -step.hits / step.nbytes)


@given(_steps(), st.integers(0, 60))
def test_bytes_are_divided_as_well_as_can_be_up_to_one_step(steps: list[Step], nbytes: int) -> None:
    def of(table: str, capacity: int) -> tuple[float, float]:
        own = [step for step in steps if step.table == table and step.capacity <= capacity]
        return sum(step.nbytes for step in own), sum(step.hits for step in own)

    ways = {step.table: [0] for step in steps}
    for step in steps:
        ways[step.table].append(step.capacity)
    best = 0.0
    for chosen in itertools.product(*ways.values()):
        taken, hits = zip(*map(of, ways, chosen), strict=True) if ways else ((), ())
        if sum(taken) <= nbytes:
            best = max(best, sum(hits))
    found = divide(steps, nbytes)
    taken, hits = zip(*(of(*one) for one in found.items()), strict=True) if found else ((), ())
    assert sum(taken) <= nbytes
    left = float(nbytes)
    for step in steps:
        if step.nbytes > left:
            assert sum(hits) > best - step.hits
            break
        left -= step.nbytes
    else:
        assert sum(hits) == best


def test_steps_follow_the_curves_from_above() -> None:
    problem = _problem(1 << 30)
    steps = steps_of(problem, list(CURVES))
    slopes = [step.hits / step.nbytes for step in steps]
    assert slopes == sorted(slopes, reverse=True)
    for name, rates in CURVES.items():
        own = [step for step in steps if step.table == name]
        assert [step.capacity for step in own] == sorted(step.capacity for step in own)
        assert sum(step.hits for step in own) == pytest.approx(5.0 * rates[-1][1])
        hits = 0.0
        for step in own:
            hits += step.hits
            assert hits == pytest.approx(5.0 * hit_rate_for(problem.profile[name], step.capacity))
    # Between its second and third capacity the curve of items bends upwards.
    assert not any(300 < step.capacity < 800 for step in steps if step.table == "item")


def test_rows_take_their_part_of_the_key_map_and_of_its_only_copy() -> None:
    many = Growing(capacity=2**20)
    for gpus, copy_bytes in ((1, many.copy_nbytes), (2, 0)):
        steps = steps_of(_problem(1 << 30, gpus), list(CURVES))
        row_bytes = 64 * 4 + 4 + (many.nbytes + copy_bytes) / 2**20
        for name, rates in CURVES.items():
            taken = sum(step.nbytes for step in steps if step.table == name)
            assert taken == pytest.approx(rates[-1][0] * row_bytes)


@pytest.mark.parametrize("gpus", mostly_slow([1, 2], 1))
def test_all_memory_beside_the_other_tables_is_for_rows(gpus: int) -> None:
    problem = _problem(7 - 2 * gpus << 20, gpus)
    chosen = choose_capacities(problem, list(CURVES), Roofline())
    assert solve(chosen, "greedy-cost").plan is not None
    assert min(how.capacity for how in chosen.growing.values()) > 100
    hows = chosen.growing.items()
    more = {name: replace(how, capacity=how.capacity * 11 // 10) for name, how in hows}
    assert solve(replace(problem, growing=more), "greedy-cost").plan is None
    roomy = choose_capacities(_problem(1 << 30, gpus), list(CURVES), Roofline()).growing
    assert roomy == {"item": Growing(4000), "user": Growing(9000)}
    # Problems whose capacities are written down are the same.
    assert Problem(_profile(), problem.topology, 64, growing=chosen.growing).sha256 == chosen.sha256


def test_a_price_weighs_misses_against_time() -> None:
    problem, model = _problem(1 << 30), Roofline()

    def costs(one: Problem) -> tuple[float, float]:
        return solve(one, "greedy-cost").step_time_s, _missed(one)

    most = fewer(4, 2)
    capacities = itertools.product((1, 1000, 400, 4000)[:most], (1, 500, 50, 9000)[:most])
    others = [
        costs(replace(problem, growing={"item": Growing(item), "user": Growing(user)}))
        for item, user in capacities
    ]
    missed = []
    for price in (0.0, 1e-6, 1.0) if is_fast() else (0.0, 2e-8, 1e-7, 1e-6, 1.0):
        step_s, percent = costs(choose_capacities(problem, list(CURVES), model, price))
        missed.append(percent)
        least = min(other_s + price * other for other_s, other in others)
        assert step_s + price * percent <= 1.05 * least
    assert missed == sorted(missed, reverse=True)
    assert missed[0] > 60
    assert missed[-1] == pytest.approx(15.0)


def test_admission_and_eviction_stay_and_others_are_left_alone() -> None:
    growing, auto = growing_of(_profile(), ["user:lru:admit=3:ttl=9,item=77"])
    assert auto == ["user"]
    problem = Problem(_profile(), Topology.parse("1xh100"), 64, growing=growing)
    chosen = choose_capacities(problem, auto, Roofline()).growing
    assert chosen == {"user": Growing(9000, 3, "lru", 9), "item": Growing(77)}


def test_without_a_hit_there_is_nothing_to_choose_by() -> None:
    new = _table("item", ((10, 0.0), (90, 0.0)), 1.0)
    profile = Profile((new,), 1000, "test")
    growing, auto = growing_of(profile, ["item"])
    problem = Problem(profile, Topology.parse("1xh100"), 64, growing=growing)
    words = "'item': all of its lookups in the log read an id for the"
    with pytest.raises(ProblemError, match=words):
        choose_capacities(problem, auto, Roofline())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("item=many", "it is of another form. Write TABLE=KEYS"),
        ("item=x%", "it is of another form"),
        ("item=", "it is of another form"),
        ("item=9:fifo", "it is of another form"),
        ("item=9:admit=x", "it is of another form"),
        ("item=9:lru:lfu", "it is of another form"),
        ("item=0", "capacity 0 is not within 1 to"),
        ("item=9:admit=999", "admission 999 is not within 1 to 255"),
        ("city=auto", "the hit rate of table 'city' with fewer rows is not known"),
        ("shop=9", r"begins with no table of the profile \(item, user, city"),
        ("=5%", "begins with no table"),
        ("item,item=9", "names table 'item' twice"),
        ("item=99%", "no number of rows gives table 'item' a hit rate of 99%"),
        ("city=101%", "a hit rate of 101% is not above 0% and at most 100%"),
        ("item=0%", "a hit rate of 0% is not above 0% and at most 100%"),
    ],
)
def test_what_is_of_another_form_is_refused(text: str, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        growing_of(_profile(), [text])


def test_names_may_have_the_signs_that_separate() -> None:
    tables = [_table(name, CURVES["item"], 1.0) for name in ("a", "a=b", "a:lru")]
    growing, _ = growing_of(Profile(tuple(tables), 1000, "test"), ["a=b=50", "a=50:lru", "a:lru=9"])
    assert growing == {"a=b": Growing(50), "a": Growing(50, eviction="lru"), "a:lru": Growing(9)}


def test_the_command_chooses(workbench: Workbench, tmp_path: Path) -> None:
    log, profile = tmp_path / "log.parquet", tmp_path / "profile"
    pq.write_table(click_samples(), log)
    sparse = ("--label", "label", "--sparse", "item,city")
    succeed("profile", log, *sparse, "--window", "100", "--dim", "4", "-o", profile)
    command = ("plan", *workbench.machine(), "--profile", profile, "--solver", "greedy-cost")
    price = "--miss-price", "1s"
    answer = succeed(*command, "--growing", "item:admit=2,city", *price, "-o", tmp_path / "p.json")
    plan = Plan.load(tmp_path / "p.json")
    assert (plan.growing["item"].admission, plan.growing["city"].admission) == (2, 1)
    assert f"item grows: a row for each of {plan.growing['item'].capacity:,} key" in answer.stderr
    assert "--growing TABLE=auto" in misuse(*command, "--growing", "item=9", *price)
