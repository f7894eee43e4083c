"""Explanations: their costs are the cost model's, and their worth of HBM its differences."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import in_dram, in_hbm, machine
from problem_cases import counted_table, problem_of, problems, zipf_table

from cost_models import Roofline
from placer import Plan, Problem, Topology
from placer.errors import PlacerError
from placer.plan.verify import violations
from placer.report.explain import explain_report
from placer.workloads import named_workload
from solvers import solve
from solvers._build import build_plan, overfull
from solvers._instance import Instance, Placement
from solvers._placements import placements_of
from solvers.explain import Explanation, explain

MODEL = Roofline()


def planned(problem: Problem) -> Plan:
    plan = solve(problem, "greedy-cost").plan
    assert plan is not None
    return plan


def check_alternatives(problem: Problem, plan: Plan, found: Explanation) -> None:
    """Each is the plan with this one table placed otherwise, and costs what is said."""
    others = {shard for shard in plan.shards if shard.table != found.table}
    assert found.current.plan is plan
    for one in (found.current, *found.alternatives):
        assert one.step_time_s == MODEL.evaluate(problem, one.plan).step_time_s
        assert {shard for shard in one.plan.shards if shard.table != found.table} == others
        assert one.short_bytes == overfull(one.plan)
        broken = {violation.rule for violation in violations(one.plan)}
        assert broken == ({"capacity"} if one.short_bytes else set())


@settings(max_examples=25)
@given(problems(hbm_bytes=1 << 13), st.data())
def test_alternatives_cost_what_is_said(problem: Problem, data: st.DataObject) -> None:
    plan = solve(problem, "greedy-cost").plan
    if plan is None:
        return
    table = data.draw(st.sampled_from([profile.name for profile in problem.profile]))
    check_alternatives(problem, plan, explain(problem, plan, table, MODEL))


@settings(max_examples=25)
@given(problems(hbm_bytes=1 << 13))
def test_placements_are_read_back_from_a_plan(problem: Problem) -> None:
    plan = solve(problem, "greedy-cost").plan
    if plan is None:
        return
    instance = Instance(problem, MODEL)
    found = []
    for profile in problem.profile:
        placements = placements_of(instance, plan, profile.name)
        assert placements is not None
        found += placements
    again = build_plan(instance, found)
    assert set(again.shards) == set(plan.shards)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(named_workload("random-12@4"), Topology.parse("4xa100-40", hbm="1GiB"), 512)


@pytest.fixture(scope="module")
def plan(problem: Problem) -> Plan:
    return planned(problem)


def test_worth_of_hbm_is_the_difference_of_evaluations(problem: Problem, plan: Plan) -> None:
    splits = 0
    for profile in problem.profile:
        found = explain(problem, plan, profile.name, MODEL)
        check_alternatives(problem, plan, found)
        shards = plan.shards_by_table[profile.name]
        if [shard.lookup for shard in shards] != ["device", "staged"]:
            continue
        splits += 1
        (margin,) = found.margins
        assert margin.hot_rows == shards[0].row_count
        assert margin.last_s_per_byte is not None
        assert margin.next_s_per_byte is not None
        assert margin.last_s_per_byte >= margin.next_s_per_byte > 0
        instance = Instance(problem, MODEL)
        (placed,) = placements_of(instance, plan, profile.name) or ()
        step = max(1, placed.hot_rows // 10_000)
        more = build_plan(instance, [Placement(placed.piece, placed.gpu, placed.hot_rows + step)])
        now = build_plan(instance, [placed])
        costs = [MODEL.evaluate(problem, one) for one in (now, more)]
        saved = sum(g.total_s for g in costs[0].gpus) - sum(g.total_s for g in costs[1].gpus)
        extra = costs[1].memory[margin.device].total_bytes - (
            costs[0].memory[margin.device].total_bytes
        )
        assert saved / extra == pytest.approx(margin.next_s_per_byte, rel=0.05)
        # What splits a GPU's HBM well has the price of that GPU at its split.
        assert margin.gpu_price_s_per_byte == pytest.approx(margin.next_s_per_byte, rel=0.3)
        assert "hbm" in {binding.constraint for binding in found.bindings}
    assert splits >= 2


def test_a_table_with_all_rows_in_hbm_waits_for_work(problem: Problem) -> None:
    roomy = replace(problem, topology=problem.topology.with_memory(hbm="34GiB"))
    plan = planned(roomy)
    found = explain(roomy, plan, plan.tables[0].name, MODEL)
    assert {binding.constraint for binding in found.bindings} <= {"work", "hottest row"}
    assert found.margins[0].next_s_per_byte is None
    assert "all rows in HBM" not in {one.name for one in found.alternatives}


def test_the_hottest_row_binds_slices() -> None:
    table = counted_table("t", [1000, *([1] * 99)])
    problem = problem_of(table, topology=machine(4))
    plan = Plan(
        (table.table,),
        problem.topology,
        tuple(in_hbm("t", (n, 100, 4), (0, 16), f"gpu:{n}") for n in range(4)),
    )
    found = explain(problem, plan, "t", MODEL)
    hottest = [b for b in found.bindings if b.constraint == "hottest row"]
    assert [binding.device for binding in hottest] == ["gpu:0"]
    assert "91.0% of the lookups" in hottest[0].detail


def test_full_host_memory_binds() -> None:
    table = zipf_table("t", 1000)
    full = machine(1, dram_bytes=1000 * table.table.bytes_per_row())
    problem = problem_of(table, topology=full)
    plan = Plan((table.table,), full, (in_dram("t", (0, 1000, 1), (0, 16)),))
    assert "dram" in {b.constraint for b in explain(problem, plan, "t", MODEL).bindings}


def test_tables_that_cannot_be_explained(problem: Problem, plan: Plan) -> None:
    with pytest.raises(PlacerError, match=r"no table 'nope'; it has .* and 4 more"):
        explain(problem, plan, "nope", MODEL)
    table = zipf_table("t", 100)
    small = problem_of(table)
    shards = {
        "replicated": (in_hbm("t", (0, 100, 1), (0, 16), "gpu:0", "gpu:1"),),
        "in place": (replace(in_dram("t", (0, 100, 1), (0, 16)), lookup="uva"),),
        "blocks": (
            in_hbm("t", (0, 50, 1), (0, 16)),
            in_hbm("t", (50, 100, 1), (0, 16), "gpu:1"),
        ),
        "cold first": (in_dram("t", (0, 50, 1), (0, 16)), in_hbm("t", (50, 100, 1), (0, 16))),
    }
    for parts in shards.values():
        with pytest.raises(PlacerError, match="'t' is placed in a way that solvers do not search"):
            explain(small, Plan((table.table,), small.topology, parts), "t", MODEL)


def test_a_neighbour_outside_of_the_search_space_has_no_price() -> None:
    tables = zipf_table("t", 100), zipf_table("u", 100)
    problem = problem_of(*tables)
    shards = in_hbm("t", (0, 100, 1), (0, 16)), in_hbm("u", (0, 100, 1), (0, 16), "gpu:0", "gpu:1")
    plan = Plan(tuple(one.table for one in tables), problem.topology, shards)
    (margin,) = explain(problem, plan, "t", MODEL).margins
    assert margin.gpu_price_s_per_byte is None


def test_report(problem: Problem, plan: Plan) -> None:
    found = explain(problem, plan, plan.tables[0].name, MODEL)
    shown = explain_report(found).to_json()
    assert shown["alternatives"][0]["placement"] == "as planned"
    assert shown["alternatives"][0]["ratio"] == 1
    assert len(shown["alternatives"]) == len(found.alternatives) + 1
    assert [row["fits"] for row in shown["alternatives"][1:]] == [
        not one.short_bytes for one in found.alternatives
    ]
