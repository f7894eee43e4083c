"""Explanations: their costs are the cost model's, and their worth of HBM its differences."""

import random
from dataclasses import replace

import pytest
from fast_and_full import examples
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import in_dram, in_hbm, machine, sized
from problem_cases import counted_table, problem_of, problems, zipf_table

from cost_models import Roofline, ShardingOption
from placer import Constraints, Plan, Problem, Shard, TableRule, Topology
from placer.constraints.unmet import unmet
from placer.errors import PlacerError
from placer.plan.verify import violations
from placer.workloads import named_workload
from solvers import solve
from solvers.analysis import Explanation, explain
from solvers.analysis.explain import ShardMargin
from solvers.model.assignment import Assignment
from solvers.model.build_plan import build_plan, overfull
from solvers.model.instance import Instance, Placement
from solvers.model.read_plan import is_one_of, placements_of
from solvers.report.explain import explain_report

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
        cost = MODEL.evaluate(problem, one.plan)
        assert one.step_time_s == pytest.approx(cost.step_time_s)
        assert one.table_s == pytest.approx(cost.tables[found.table].gpu_s)
        assert {shard for shard in one.plan.shards if shard.table != found.table} == others
        assert one.short_bytes == overfull(one.plan)
        broken = {violation.rule for violation in violations(one.plan)}
        assert broken == ({"capacity"} if one.short_bytes else set())


@examples(25)
@given(problems(hbm_bytes=1 << 13), st.data())
def test_alternatives_cost_what_is_said(problem: Problem, data: st.DataObject) -> None:
    plan = solve(problem, "greedy-cost").plan
    if plan is None:
        return
    table = data.draw(st.sampled_from([profile.name for profile in problem.profile]))
    check_alternatives(problem, plan, explain(problem, plan, table, MODEL))


def test_alternatives_count_the_network_of_servers() -> None:
    """Whether the explained table has rows on the server, or another table."""
    tables = zipf_table("t", 1000), zipf_table("u", 1000)
    problem = problem_of(*tables, topology=Topology.parse("2xl4+1xcpu"))
    on_server = Shard("t", (0, 1000, 1), (0, 16), ("host:1",), "dram", "host")
    shards = on_server, in_hbm("u", (0, 1000, 1), (0, 16))
    plan = Plan(tuple(one.table for one in tables), problem.topology, shards)
    for table in ("t", "u"):
        check_alternatives(problem, plan, explain(problem, plan, table, MODEL))


def test_alternatives_keep_the_row_orders_of_other_tables() -> None:
    tables = [counted_table(name, list(range(90))) for name in "tu"]
    problem = problem_of(*tables, topology=machine(1, hbm_bytes=24 << 10))
    plan = planned(problem)
    assert plan.hot_ids.keys() == {"t"}
    check_alternatives(problem, plan, explain(problem, plan, "u", MODEL))


def some_placement(
    problem: Problem,
    rng: random.Random,
    options_of: dict[int, tuple[ShardingOption, ...]] | None = None,
) -> Plan:
    """Each table in one of its cuts, its pieces on any GPUs, any number of rows in HBM."""
    instance = Instance(problem, MODEL)
    placements, replicas = [], []
    for number in range(instance.tables):
        option = rng.choice((options_of or {}).get(number) or instance.options_of(number))
        shards = instance.shards(number, option)
        for shard, gpu in zip(shards, rng.sample(range(instance.gpus), len(shards)), strict=True):
            rows = len(range(*shard.rows(instance.rows(number))))
            hot = rng.choice([0, rows, rng.randint(0, rows)])
            placements.append(Placement(shard, gpu, hot))
        replicas += instance.replicas(number, option)
    return build_plan(instance, placements, replicas)


def check_read_back(problem: Problem, plan: Plan) -> None:
    """What a plan's shards are read as makes the same shards."""
    instance = Instance(problem, MODEL)
    read = [placements_of(instance, plan, profile.name) for profile in problem.profile]
    placements = [placed for one in read for placed in one.placements]
    again = build_plan(instance, placements, [shard for one in read for shard in one.replicas])
    assert set(again.shards) == set(plan.shards)


def assignment_of(instance: Instance, plan: Plan) -> Assignment | None:
    """The plan's shards on their GPUs, with HBM filled again."""
    names = (profile.name for profile in instance.problem.profile)
    read = [one for name in names if (one := placements_of(instance, plan, name))]
    pairs = [(placed.shard, placed.gpu) for one in read for placed in one.placements]
    return Assignment.of(instance, pairs, [shard for one in read for shard in one.replicas])


@examples(100)
@given(problems(), st.integers())
def test_placements_are_read_back_from_a_plan(problem: Problem, seed: int) -> None:
    plan = some_placement(problem, random.Random(seed))
    check_read_back(problem, plan)
    instance = Instance(problem, MODEL)
    for number, profile in enumerate(problem.profile):
        found = placements_of(instance, plan, profile.name)
        assert is_one_of(found.option, instance.options_of(number))
    assignment = assignment_of(instance, plan)
    if assignment is not None:
        where = {(p.shard, p.gpu) for p in assignment.placements()}
        assert len(where) == sum(map(len, assignment.shards))


ODD_OPTIONS = (
    ShardingOption(1, (5, 11)),
    ShardingOption(1, (11, 5), cold="host"),
    ShardingOption(3, blocked=True),
    ShardingOption(4, blocked=True),  # Of 5 rows, the last block is empty.
    ShardingOption(2, (1, 15), cold="uva"),
    ShardingOption(2, (8, 8), replicated_rows=3),
    ShardingOption(2, replicated_rows=2, cold="cached"),
    ShardingOption(3, replicated_rows=1, cold="host"),
    ShardingOption(4, cold="cached"),
    ShardingOption(replicated_rows=4),
    ShardingOption(replicated_rows=5),
)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("option", ODD_OPTIONS, ids=str)
def test_placements_of_any_option_are_read_back(option: ShardingOption, counted: bool) -> None:
    for rows in (5, 60):
        counts = list(range(rows, 0, -1))
        table = counted_table("t", counts) if counted else zipf_table("t", rows)
        problem = problem_of(table, topology=machine(4))
        for seed in range(12):
            plan = some_placement(problem, random.Random(seed), {0: (option,)})
            check_read_back(problem, plan)
            found = placements_of(Instance(problem, MODEL), plan, "t")
            assert found.option.replicated_rows == min(option.replicated_rows, rows)
            assert found.option.column_widths == option.column_widths


def test_assignments_of_plans(problem: Problem, plan: Plan) -> None:
    instance = Instance(problem, MODEL)
    assignment = assignment_of(instance, plan)
    assert assignment.step_time_s == pytest.approx(plan.solver.step_time_s)
    # A table of more rows than its GPU holds does not fit where all of them have to.
    full = Constraints.of({"t1": TableRule(tier="hbm")})
    assert assignment_of(Instance(replace(problem, constraints=full), MODEL), plan) is None


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(named_workload("random-8@4"), Topology.parse("4xa100-40", hbm="768MiB"), 512)


@pytest.fixture(scope="module")
def plan(problem: Problem) -> Plan:
    return planned(problem)


@pytest.mark.slow
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
        assert margin.last_s_per_byte >= margin.next_s_per_byte > 0
        instance = Instance(problem, MODEL)
        read = placements_of(instance, plan, profile.name)
        (placed,) = read.placements
        step = max(1, placed.hot_rows // 10_000)
        more = build_plan(instance, [Placement(placed.shard, placed.gpu, placed.hot_rows + step)])
        now = build_plan(instance, [placed])
        costs = [MODEL.evaluate(problem, one) for one in (now, more)]
        saved = sum(g.total_s for g in costs[0].gpus) - sum(g.total_s for g in costs[1].gpus)
        used = [one.memory[margin.device].total_bytes for one in costs]
        extra = used[1] - used[0]
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
    slices = (in_hbm("t", (n, 100, 4), (0, 16), f"gpu:{n}") for n in range(4))
    plan = Plan((table.table,), problem.topology, tuple(slices))
    found = explain(problem, plan, "t", MODEL)
    hottest = [b for b in found.bindings if b.constraint == "hottest row"]
    assert [binding.device for binding in hottest] == ["gpu:0"]
    assert "91.0% of the lookups" in hottest[0].detail
    work = next(binding for binding in found.bindings if binding.constraint == "work")
    assert work.detail == "96% of its time there is kernel launches; the slowest device"


def test_full_host_memory_binds() -> None:
    table = zipf_table("t", 1000)
    full = machine(1, dram_bytes=1000 * table.table.bytes_per_row())
    problem = problem_of(table, topology=full)
    plan = Plan((table.table,), full, (in_dram("t", (0, 1000, 1), (0, 16)),))
    assert "dram" in {b.constraint for b in explain(problem, plan, "t", MODEL).bindings}
    # A full GPU does not, once it has all rows.
    held = replace(plan, shards=(in_hbm("t", (0, 1000, 1), (0, 16)),))
    full = machine(1, hbm_bytes=MODEL.evaluate(problem, held).memory["gpu:0"].total_bytes)
    problem, held = problem_of(table, topology=full), replace(held, topology=full)
    assert "hbm" not in {b.constraint for b in explain(problem, held, "t", MODEL).bindings}


@pytest.mark.parametrize("memory", ["hbm", "dram"])
def test_a_memory_binds_from_99_percent_on(memory: str) -> None:
    table = zipf_table("t", 1000)
    device = "gpu:0" if memory == "hbm" else "host:0"

    def bindings(share: float) -> dict[str, str]:
        roomy = problem_of(table, topology=machine(1))
        halves = in_hbm("t", (0, 500, 1), (0, 16)), in_dram("t", (500, 1000, 1), (0, 16))
        plan = Plan((table.table,), roomy.topology, halves)
        used = MODEL.evaluate(roomy, plan).memory[device].total_bytes
        tight = sized(roomy.topology, {device: used / share})
        plan = replace(plan, topology=tight)
        found = explain(problem_of(table, topology=tight), plan, "t", MODEL)
        return {one.constraint: one.device for one in found.bindings}

    assert memory not in bindings(0.985)
    assert bindings(0.995)[memory] == device


def test_a_table_on_every_gpu_has_alternatives_and_no_margin() -> None:
    table, other = zipf_table("t", 50, lookups=20), zipf_table("u", 100)
    problem = problem_of(table, other, topology=machine(3))
    shards = (
        in_hbm("t", (0, 50, 1), (0, 16), "gpu:0", "gpu:1", "gpu:2"),
        in_hbm("u", (0, 100, 1), (0, 16)),
    )
    plan = Plan((table.table, other.table), problem.topology, shards)
    found = explain(problem, plan, "t", MODEL)
    check_alternatives(problem, plan, found)
    assert found.margins == ()
    assert {"in one piece", "3 row slices"} <= {one.name for one in found.alternatives}
    assert "margins" not in explain_report(found).to_json()
    # A neighbour's price knows the room that the replicas take.
    (margin,) = explain(problem, plan, "u", MODEL).margins
    assert margin.gpu_price_s_per_byte is not None


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("pin", TableRule(devices=("gpu:0",))),
        ("tier", TableRule(tier="dram")),
        ("forbidden", TableRule(forbid=frozenset({"row-wise", "column-wise", "replicated"}))),
    ],
)
def test_what_the_user_asks_binds(kind: str, rule: TableRule) -> None:
    tables = zipf_table("t", 1000, lookups=50), zipf_table("u", 1000, lookups=40)
    asked = Constraints.of({"t": rule})
    # With the tier, what uses the other GPU is faster, with it and without, but does not fit.
    topology = sized(machine(2), {"gpu:1": 1} if kind == "tier" else {})
    problem = replace(problem_of(*tables, topology=topology), constraints=asked)
    memory, lookup = ("dram", "staged") if rule.tier == "dram" else ("hbm", "device")
    shards = tuple(
        replace(in_hbm(name, (0, 1000, 1), (0, 16)), memory=memory, lookup=lookup) for name in "tu"
    )
    plan = Plan(tuple(table.table for table in tables), problem.topology, shards)
    found = explain(problem, plan, "t", MODEL)
    check_alternatives(problem, plan, found)
    for one in found.alternatives:
        assert [v for v in unmet(one.plan, asked) if v.where == "t"] == []
    (binding,) = [b for b in found.bindings if b.constraint == kind]
    assert binding.device == "gpu:0"
    assert "instead of" in binding.detail
    # Free of it, the placement that is named is found.
    free = explain(replace(problem, constraints=Constraints()), plan, "t", MODEL)
    best = min((a for a in free.alternatives if not a.short_bytes), key=lambda a: a.step_time_s)
    if kind != "forbidden":
        assert best.step_time_s < found.current.step_time_s
        assert best.name in binding.detail
    assert {b.constraint for b in free.bindings}.isdisjoint({"pin", "tier", "forbidden"})


def test_a_constraint_that_no_faster_placement_breaks() -> None:
    table = zipf_table("t", 1000, lookups=50)
    asked = Constraints.of({"t": TableRule(tier="hbm")})
    problem = replace(problem_of(table, topology=machine(1)), constraints=asked)
    plan = Plan((table.table,), problem.topology, (in_hbm("t", (0, 1000, 1), (0, 16)),))
    (binding,) = [b for b in explain(problem, plan, "t", MODEL).bindings if b.constraint == "tier"]
    assert binding.detail.endswith(
        "no other placement that fits beside the other tables would be faster"
    )


def test_tables_that_stay_together_stay() -> None:
    tables = [zipf_table(name, 1000, lookups=50) for name in "tuv"]
    problem = problem_of(*tables, topology=machine(2))
    problem = replace(problem, constraints=Constraints.of(together=[["t", "u"]]))
    shards = tuple(in_hbm(name, (0, 1000, 1), (0, 16)) for name in "tuv")
    plan = Plan(tuple(table.table for table in tables), problem.topology, shards)
    found = explain(problem, plan, "t", MODEL)
    assert all(not unmet(one.plan, problem.constraints) for one in found.alternatives)
    (binding,) = [b for b in found.bindings if b.constraint == "together"]
    assert binding.detail.startswith("has to be with u; without that")


def test_tables_that_cannot_be_explained() -> None:
    many = problem_of(*(zipf_table(f"t{number}", 10) for number in range(12)))
    with pytest.raises(PlacerError, match=r"no table 'nope'; it has .* and 4 more"):
        explain(many, planned(many), "nope", MODEL)
    table = zipf_table("t", 100)
    small = problem_of(table)
    three = replace(small, topology=machine(3))
    shards = {
        "on some": (in_hbm("t", (0, 100, 1), (0, 16), "gpu:0", "gpu:1"),),
        "two on one": (in_hbm("t", (0, 100, 2), (0, 16)), in_hbm("t", (1, 100, 2), (0, 16))),
        "uneven blocks": (
            in_hbm("t", (0, 40, 1), (0, 16)),
            in_hbm("t", (40, 100, 1), (0, 16), "gpu:1"),
        ),
        "cold first": (in_dram("t", (0, 50, 1), (0, 16)), in_hbm("t", (50, 100, 1), (0, 16))),
        "two ways to read": (
            in_dram("t", (0, 100, 2), (0, 16)),
            replace(in_dram("t", (1, 100, 2), (0, 16), "gpu:1"), lookup="host"),
        ),
        "replicated cold": (in_dram("t", (0, 100, 1), (0, 16), "gpu:0", "gpu:1", "gpu:2"),),
    }
    for parts in shards.values():
        with pytest.raises(PlacerError, match="'t' is placed in a way that solvers do not search"):
            explain(three, Plan((table.table,), three.topology, parts), "t", MODEL)


def test_a_neighbour_outside_of_the_search_space_has_no_price() -> None:
    tables = zipf_table("t", 100), zipf_table("u", 100)
    problem = problem_of(*tables, topology=machine(3))
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
    fits = [row["fits"] for row in shown["alternatives"][1:]]
    assert fits == [not one.short_bytes for one in found.alternatives]


@pytest.mark.parametrize("price", [0.0, 1e-25, 2e-12])
def test_rows_that_take_time_from_hbm_are_said_to_cost_time(
    problem: Problem, plan: Plan, price: float
) -> None:
    found = explain(problem, plan, plan.tables[0].name, MODEL)
    margins = (ShardMargin("gpu:0", 100, 10, 3e-12, -5e-11, 0.0),)
    shown = explain_report(replace(found, margins=margins, pooled_price_s_per_byte=price))
    section = next(one for one in shown.sections if one.name == "margins")
    cells = {column.key: column.cell(section.rows[0]) for column in section.columns}
    assert cells["next_s_per_byte"] == "costs time"
    assert cells["last_s_per_byte"] == ("1.50x" if price > 1e-20 else "more")
    assert section.rows[0]["next_s_per_byte"] == -5e-11
