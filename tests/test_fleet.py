"""One workload on many machines: prices, the answer, and what machines share."""

import json
import os
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
from cli_cases import fail, invoke, json_of, succeed
from hypothesis import example, given
from hypothesis import strategies as st

from cost_models import Roofline
from cost_models.step_equation.loads import load_of
from placer import Problem, Topology
from placer.topology.kinds import GPU_KINDS, LIST_PRICES
from placer.workloads import named_workload
from solvers import Limits, solve, solver
from solvers.analysis.compare import FLEET, SAMPLES, CompareRow, cheapest, fleet, price_of
from solvers.report.compare import _front, fleet_report
from solvers.result import usable_cores

WORKLOAD = "random-1@3"
LIMITS = Limits(max_steps=1)


def on(machine: str) -> Problem:
    """A small problem on a machine."""
    return Problem(TABLES, Topology.parse(machine), batch_size=256)


TABLES = named_workload(WORKLOAD)


def rows_of(machines: list[str], prices: dict[str, float] | None = None) -> list[CompareRow]:
    return fleet(machines, on, solver("greedy-size"), Roofline(), LIMITS, prices)


def test_the_fleet_is_twenty_machines_with_what_is_assumed_of_them() -> None:
    assert len(set(FLEET)) == len(FLEET) == 20
    for name in FLEET:
        topology = Topology.parse(name)
        assert any("assum" in source for source in topology.sources.values()), name
        assert all(gpu.chip in GPU_KINDS for gpu in topology.gpus)


def test_list_prices_are_of_known_gpus_and_have_a_source_with_a_date() -> None:
    assert LIST_PRICES.keys() <= GPU_KINDS.keys()
    for price in LIST_PRICES.values():
        assert 0 < price.dollars_per_hour < 100
        assert "2025-11-30" in price.source or "2026-11-23" in price.source


def test_rows_are_in_order_and_say_what_a_solver_says() -> None:
    machines = ["2xh100", "1xt4", "1xmi350x"]
    rows = rows_of(machines)
    assert [row.topology for row in rows] == machines
    (named,) = fleet(["ours"], lambda _: on("1xt4"), solver("greedy-size"), Roofline(), LIMITS)
    assert (named.topology, named.step_time_s) == ("ours", rows[1].step_time_s)
    for row in rows:
        result = solve(on(row.topology), "greedy-size", max_steps=1)
        assert (row.step_time_s, row.gap) == (result.step_time_s, result.gap)
        assert row.samples_per_s == pytest.approx(256 * row.gpus / (row.step_time_s or 0))
        assert row.train_s == pytest.approx(SAMPLES / (row.samples_per_s or 0))
        assert 0 <= (row.memory_left or 0) <= 1
        assert row.least_share == pytest.approx(1 / (1 + (row.gap or 0)))
        assert (row.hbm_left_bytes or 0) >= 0
        assert "kernel launch" in row.assumed
    h100, t4, mi350x = rows
    assert h100.price_per_hour == pytest.approx(2 * 55.04 / 8)
    assert t4.cost_per_billion_samples == pytest.approx(7.824 / 8 * (t4.train_s or 0) / 3600)
    assert "g4dn.metal" in t4.price_source
    at_bound = replace(t4, step_time_s=t4.bound_s, samples_per_s=256 / (t4.bound_s or 0))
    dollars = 7.824 / 8 * (at_bound.train_s or 0) / 3600
    assert t4.least_cost == pytest.approx(dollars)
    assert (mi350x.price_per_hour, mi350x.cost_per_billion_samples) == (None, None)


def test_the_front_has_machines_that_none_beats() -> None:
    row = rows_of(["1xt4"])[0]
    shown = [(row, *one) for one in ((3.0, 2.0), (1.0, 5.0), (2.0, 5.0), (4.0, 2.0), (2.5, 6.0))]
    assert _front(shown) == [(1.0, 5.0), (3.0, 2.0)]


def test_own_prices_come_first() -> None:
    topology = Topology.parse("2xh100")
    for prices, dollars in (
        ({}, 2 * 6.88),
        ({"h100": 2.5}, 5.0),
        ({"2xh100": 3.0, "h100": 2.5}, 3.0),
    ):
        price = price_of(topology, "2xh100", prices)
        assert price.dollars_per_hour == pytest.approx(dollars)
        assert bool(price.source) == (not prices)
    mixed = replace(topology, gpus=(topology.gpus[0], replace(topology.gpus[1], chip="gaudi3")))
    assert price_of(mixed, "mixed", {}) is None
    with_servers = Topology.parse("1xh100+2xcpu")
    assert price_of(with_servers, "1xh100+2xcpu", {}) is None
    price = price_of(with_servers, "1xh100+2xcpu", {"h100": 3.0, "cpu": 1.0})
    assert price.dollars_per_hour == 5.0
    price = price_of(mixed, "mixed", {"gaudi3": 1.0})
    assert price.dollars_per_hour == pytest.approx(7.88)


def test_a_machine_that_is_too_small_has_a_row_that_says_so() -> None:
    def small(machine: str) -> Problem:
        memory = "100KiB" if machine == "1xt4" else "80GiB"
        topology = Topology.parse(machine, hbm=memory, dram=memory)
        return Problem(TABLES, topology, batch_size=256)

    t4, h100 = fleet(["1xt4", "1xh100"], small, solver("greedy-cost"), Roofline(), LIMITS)
    assert t4.status == "infeasible"
    assert t4.step_time_s is None
    assert t4.cost_per_billion_samples is None
    assert t4.price_per_hour is not None
    assert t4.detail
    assert h100.step_time_s is not None


@pytest.mark.slow
def test_machines_of_as_many_gpus_share_the_loads_of_slices() -> None:
    load_of.cache_clear()
    missed = []
    for machines in (["2xt4"], ["2xl4"], ["4xl4"]):
        before = load_of.cache_info().misses
        fleet(machines, on, solver("greedy-cost"), Roofline(), Limits(max_steps=0))
        missed.append(load_of.cache_info().misses - before)
    assert missed[1] <= missed[0] / 10
    assert missed[2] > missed[1]


def test_machines_are_told_as_they_are_searched() -> None:
    asked = ["2xh100", "1xt4", "1xmi350x"], on, solver("greedy-size"), Roofline()
    done: list[tuple[int, int]] = []
    fleet(*asked, LIMITS, on_solved=lambda *counts: done.append(counts))
    assert done == [(1, 3), (2, 3), (3, 3)]
    stopped = fleet(*asked, replace(LIMITS, stop=lambda: True))
    assert {(row.status, row.step_time_s) for row in stopped} == {("no_plan (stopped)", None)}


@pytest.mark.parametrize(
    ("written", "cores"),
    [("150000 100000", 2), ("10000 100000", 1), ("max 100000", 64), (None, 64)],
)
def test_cores_are_those_of_the_container(
    written: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if written is not None:
        (tmp_path / "cpu.max").write_text(written)
    monkeypatch.setattr("solvers.result._CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    assert usable_cores() == cores
    assert Limits().thread_count == cores
    assert Limits(threads=3).thread_count == 3


def row(number: int, seconds: float | None, dollars: float | None, gap: float) -> CompareRow:
    """A machine that takes so long and costs so much."""
    if seconds is None:
        return CompareRow(0, "auto", "roofline", "infeasible", topology=f"m{number}")
    bound_s = 1 / (1 + gap)
    known = {"topology": f"m{number}", "cost_per_billion_samples": dollars}
    times = {"step_time_s": 1.0, "bound_s": bound_s, "samples_per_s": SAMPLES / seconds}
    return CompareRow(0, "auto", "roofline", "feasible", gap=gap, **times, **known)


NUMBERS = st.floats(1, 100)
ROWS = st.lists(
    st.tuples(st.none() | NUMBERS, st.none() | NUMBERS, st.floats(0, 2)), max_size=6
).map(lambda drawn: [row(number, *one) for number, one in enumerate(drawn)])


cost_of = attrgetter("cost_per_billion_samples")


@example([row(0, 10.0, 5.0, 0.0), row(1, 10.5, 4.0, 0.0)], 10.0)
@example([row(0, 10.0, 10.0, 0.0), row(1, 40.0, 8.0, 1.0)], 15.0)
@example([row(0, 10.0, 10.0, 0.0), row(1, 40.0, 8.0, 1.0)], 20.0)
@example([row(0, 10.0, 5.0, 0.0), row(1, 40.0, 10.0, 1.0)], 20.0)
@given(ROWS, NUMBERS)
def test_the_answer_is_the_cheapest_that_is_in_time(
    rows: list[CompareRow], within_s: float
) -> None:
    answer = cheapest(rows, within_s)
    in_time = [one for one in rows if one.train_s is not None and one.train_s <= within_s]
    costs = [cost_of(one) for one in in_time if cost_of(one) is not None]
    assert (answer.row is None) == (not costs)
    if answer.row is not None:
        assert answer.row in in_time
        assert cost_of(answer.row) == min(costs)
    assert answer.without_price == tuple(one.topology for one in in_time if cost_of(one) is None)
    for one in rows:
        at_best = one.bound_s and one.train_s and one.train_s * one.bound_s
        beats = bool(
            answer.row is not None
            and one is not answer.row
            and cost_of(one) is not None
            and at_best
            and at_best <= within_s
            and cost_of(one) * (one.bound_s or 0) < (cost_of(answer.row) or 0)
        )
        assert (one.topology in answer.rivals) == beats


def test_a_machine_whose_search_found_no_plan_may_be_cheaper() -> None:
    found, known = row(0, 10.0, 5.0, 0.0), {"topology": "m1", "price_per_hour": 1.0}
    for status, rivals in (("no_plan", ("m1",)), ("infeasible", ())):
        other = CompareRow(0, "greedy-size", "roofline", status, **known)
        answer = cheapest([found, other], 20.0)
        assert answer.rivals == rivals
        words = fleet_report([found, other], answer, 20.0, "").headline[1]
        assert words.startswith("a better plan, or a first one, if") == bool(rivals)


def test_the_command(tmp_path: Path) -> None:
    asked = (
        "fleet", "--workload", WORKLOAD, "--batch-size", "256", "--solver", "greedy-size",
        "--topology", "2xh100,1xl4,1xgaudi3",
    )  # fmt: skip
    prices = tmp_path / "prices.toml"
    prices.write_text("h100 = 2.5\n1xl4 = 1000\n")
    document = json_of(*asked, "--price", prices)
    assert document["cheapest"] == "2xh100"
    assert document["without_price"] == ["1xgaudi3"]
    h100, l4, gaudi = document["fleet"]
    assert (h100["price_per_hour"], l4["price_per_hour"], gaudi["cost"]) == (5.0, 1000.0, None)
    assert h100["answer"]
    shown = succeed(*asked, "--within", "1ms").stdout
    assert "no machine with a price trains a billion samples in 1 ms" in " ".join(shown.split())
    refused = invoke(*asked, "--price", "h900=1")
    assert refused.exit_code == 2
    assert "names 'h900', which is none of 2xh100, 1xl4, 1xgaudi3, " in refused.stderr


def test_the_exit_code_is_of_all_machines(tmp_path: Path) -> None:
    asked = "fleet", "--workload", WORKLOAD, "--solver", "greedy-size", "--format", "json"
    picture = tmp_path / "fleet.png"
    machines = "--topology", "1xt4,1xh100"  # Of a T4's host at most 384 GiB, of an H100's 2 TiB.
    some = succeed(*asked, *machines, "--dram", "1TiB")
    t4, h100 = json.loads(some.stdout)["fleet"]
    assert (t4["status"], h100["status"]) == ("infeasible", "optimal")
    none = invoke(*asked, *machines, "--dram", "4TiB", "--plot", picture)
    assert none.exit_code == 3
    assert {row["status"] for row in json.loads(none.stdout)["fleet"]} == {"infeasible"}
    assert none.stderr == "no picture is written, as no solver found a plan\n"
    assert not picture.exists()
    (tmp_path / "rules.yaml").write_text('tables: {"*": {gpus: 1}}')
    assert "no such field" in fail(*asked, *machines, "--constraints", tmp_path / "rules.yaml")
    (tmp_path / "machine.yaml").write_text("gpus: 1")
    assert "machine.yaml" in fail(*asked, "--topology", f"1xt4,{tmp_path / 'machine.yaml'}")


@pytest.mark.slow
def test_the_picture(tmp_path: Path) -> None:
    asked = "fleet", "--workload", WORKLOAD, "--solver", "greedy-size", "--topology"
    picture = tmp_path / "fleet.png"
    succeed(*asked, "1xh100,1xl4,1xgaudi3", "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    # Matplotlib keeps words as comments: ticks are hours and dollars, none a power of ten.
    drawn = tmp_path / "fleet.svg"
    succeed(*asked, "2xh100,1xl4", "--plot", drawn)
    assert "<!-- 1xl4 -->" in drawn.read_text()
    assert "mathdefault" not in drawn.read_text()
    nothing = invoke(*asked, "1xgaudi2", "--plot", picture)
    assert nothing.exit_code == 1
    assert "nothing to draw" in nothing.stderr
    assert "1xgaudi2" in nothing.stdout  # What was found is shown all the same.
