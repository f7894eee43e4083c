"""Rows on drives and narrow rows: plans against enumeration, curves against whole plans."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from enumeration import Enumeration
from fast_and_full import combinations, mostly_slow
from plan_cases import machine, sized
from problem_cases import problem_of, zipf_table
from tiny_problems import driven

import cost_models.sharding_options as sharding_options
from cost_models import ColdHome, Roofline, ShardingOption, TableShard, drawn_stream, simulate
from cost_models.base import ANY_SHARE
from placer import AccessCdf, Feature, Plan, Problem, Profile, Shard, TableProfile, Topology
from placer.constraints.constraints import Constraints
from placer.constraints.file import TableRule
from placer.constraints.unmet import unmet
from placer.errors import PlanError, ProblemError
from placer.plan.diff import diff
from placer.plan.memory import device_memory, record_bytes
from placer.plan.migration import migration
from placer.plan.verify import verify, violations
from placer.profile.table_profile import RowCounts
from placer.tables import ColdDType, Table
from placer.topology.devices import Drive
from placer.units import format_bytes
from placer.workloads import named_workload
from solvers import compare, solve
from solvers.bounds.binding import MORE, binding, changes
from solvers.model.build_plan import build_plan
from solvers.model.instance import Instance, Placement
from solvers.model.read_plan import placements_of
from solvers.report.compare import compare_report
from solvers.report.plan import plan_report

SERVED = [0, 2, 13, 18]
"""Seeds of problems with a server."""


@pytest.fixture
def few_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of few rows may be on drives, in three shares: all plans can be tried."""
    monkeypatch.setattr(sharding_options, "_LEAST_SHARED_BYTES", 0)


@pytest.mark.parametrize(("rows", "shares"), [(1 << 14, [1.0, ANY_SHARE]), ((1 << 14) - 1, [1.0])])
def test_tables_of_a_mib_may_be_on_drives_in_part(rows: int, shares: list[float]) -> None:
    table = zipf_table("t", rows, 16, optimizer="sgd")
    topology = machine(1).with_memory(ssd="1GiB")
    homes = sharding_options.cold_homes(problem_of(table, topology=topology), table.table)
    assert [home.drive_share for home in homes] == shares


@pytest.mark.usefixtures("few_shares")
@pytest.mark.parametrize("seed", mostly_slow([5, 6, 9, 16, 26, 28, 31, 54, 222], 6))
def test_plans_on_drives_against_the_best_of_all(seed: int) -> None:
    """On 222, drives of hosts differ, and are slower than what the bound takes for all of them."""
    check(driven(seed))


@pytest.mark.usefixtures("few_shares")
@pytest.mark.parametrize("seed", mostly_slow(SERVED, 2, 18))
def test_plans_on_drives_and_servers_against_the_best_of_all(seed: int) -> None:
    """On 13, all tables are on the server, and no GPU launches anything.

    Of 150 problems the plan is 1.4 and 8% from the best in 4 and 276.
    """
    check(driven(seed, served=True))


def check(problem: Problem) -> None:
    """Hold the bound and the plan of `auto` against the best of all plans."""
    best_s, _ = Enumeration(problem, Roofline()).best()
    result = solve(problem, gap=1e-3, time_limit_s=60, max_steps=60, threads=1)
    assert result.bound_s <= best_s * (1 + 1e-6)
    assert best_s * (1 - 1e-9) <= result.step_time_s <= best_s * 1.01


def small_memories() -> Problem:
    """Three tables of 880 MB on two GPUs of 96 MiB, with 12 MiB of host memory."""
    topology = Topology.parse("2xt4", hbm="96MiB", dram="12MiB", ssd="1GiB")
    return Problem(named_workload("random-3@1"), topology, 512, widths=("int8",))


@pytest.mark.usefixtures("few_shares")
@combinations(
    "row_slices, home", [1, 2], [ColdHome(0.75), ColdHome(1.0, "int8"), ColdHome(0.0, "bfloat16")]
)
def test_curves_equal_plans(row_slices: int, home: ColdHome) -> None:
    problem = small_memories()
    model, option = Roofline(), ShardingOption(row_slices, home=home)
    instance = Instance(problem, model)
    for table in range(instance.tables):
        shards = instance.shards(table, option)
        curves = [instance.curve(shard, 0) for shard in shards]
        for share in (0.0, 0.3, 1.0):
            hot = [int(share * int(curve.hot_rows[-1])) for curve in curves]
            placements = [
                Placement(s, gpu, h) for gpu, (s, h) in enumerate(zip(shards, hot, strict=True))
            ]
            plan = build_plan(instance, placements)
            report = model.evaluate(problem.in_plan_order(plan), plan)
            phases = np.array(report.phase_s)
            for gpu, (curve, rows) in enumerate(zip(curves, hot, strict=True)):
                split = curve.split_phase_s if 0 < rows < curve.hot_rows[-1] else 0.0
                between = [np.interp(rows, curve.hot_rows, each) for each in curve.phase_s]
                expected = np.array(between) + split + instance.launches_s[gpu]
                assert phases[:, gpu] == pytest.approx(expected, rel=1e-6, abs=1e-12)
                # Each buffer is rounded up to whole rows or bytes.
                bytes_ = np.interp(rows, curve.hot_rows, curve.hbm_bytes)
                bytes_ += curve.split_hbm_bytes if 0 < rows < curve.hot_rows[-1] else 0.0
                assert device_memory(plan)[f"gpu:{gpu}"].total_bytes == pytest.approx(bytes_, abs=4)


def test_a_plan_with_drives_is_sound_and_reads_back(tmp_path: Path) -> None:
    problem = small_memories()
    result = solve(problem, "greedy-cost", max_steps=30, threads=1)
    plan = result.plan
    assert not violations(plan)
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert (read.shards, read.widths) == (plan.shards, plan.widths)
    assert read.topology.hosts == plan.topology.hosts
    assert Problem.of_plan(plan, problem.profile).sha256 == problem.sha256
    instance = Instance(problem, Roofline())
    found = [placements_of(instance, plan, name) for name in problem.profile.table_names]
    placements = [placed for one in found for placed in one.placements]
    again = build_plan(instance, placements, [shard for one in found for shard in one.replicas])
    assert set(again.shards) == set(plan.shards)


@pytest.mark.slow
def test_leaving_out_a_choice_is_never_better() -> None:
    profile = named_workload("random-3@1")
    base = Topology.parse("2xt4+1xcpu", hbm="96MiB", dram="1GiB")
    less = tuple(
        replace(h, memory_bytes=200 << 20) if base.gpus_of(h.id) else h for h in base.hosts
    )
    small = replace(base, hosts=less)

    def step_s(topology: Topology, *widths: str) -> float:
        problem = Problem(profile, topology, 512, widths=widths)  # type: ignore[arg-type]
        found = solve(problem, time_limit_s=600, max_steps=10, threads=1)
        return float("inf") if found.step_time_s is None else found.step_time_s

    both = step_s(small.with_memory(ssd="1GiB"), "int8")
    assert both <= 1.01 * step_s(small.with_memory(ssd="1GiB"))
    # Without drives, only the server has room for all rows.
    assert both <= 1.01 * step_s(small, "int8")


def test_drives_bind_where_they_hold_rows_that_are_read() -> None:
    topology = Topology.parse("1xt4", hbm="256MiB", dram="1MiB", ssd="1TiB")
    problem = Problem(named_workload("random-3@1"), topology, 512)
    plan = solve(problem, time_limit_s=20, max_steps=50, threads=1).plan
    assert any(shard.memory == "ssd" for shard in plan.shards)
    assert binding(problem.in_plan_order(plan), plan, Roofline()).resource == "drives"
    assert unmet(plan, Constraints.of({"*": TableRule(forbid=frozenset({"ssd"}))}))
    (faster,) = (one.topology for one in changes(topology) if one.resource == "drives")
    drives = [one.hosts[0].drive for one in (topology, faster)]
    assert drives[0] is not None
    assert drives[1] == drives[0].faster(MORE)


def test_bytes_on_drives_are_not_said_to_be_in_dram() -> None:
    topology = Topology.parse("1xt4", hbm="256MiB", dram="1MiB", ssd="1GiB")
    problem = Problem(named_workload("random-3@1"), topology, 512)
    plan = solve(problem, "greedy-cost").plan
    used = device_memory(plan)
    on_drive = used["host:0 ssd"].total_bytes
    shown = plan_report(plan)
    assert shown.facts["dram_used_bytes"] == used["host:0"].total_bytes <= 1 << 20
    assert shown.facts["ssd_used_bytes"] == on_drive > 1 << 20
    assert f" and {format_bytes(on_drive)} on SSD" in shown.headline[0]
    (row,) = compare(problem, ["greedy-cost"])
    assert (row.dram_used_bytes, row.ssd_used_bytes) == (used["host:0"].total_bytes, on_drive)
    assert row.memory_left == (used["gpu:0"].free_bytes + used["host:0"].free_bytes) / (257 << 20)
    (compared,) = compare_report([row]).sections
    assert compared.rows[0]["ssd_used_bytes"] == on_drive


@pytest.mark.parametrize(
    ("rule", "keeps_off"),
    [
        (TableRule(forbid=frozenset({"ssd"})), lambda shard: shard.memory == "ssd"),
        pytest.param(
            TableRule(forbid=frozenset({"narrow"})),
            lambda shard: shard.dtype is not None,
            marks=pytest.mark.slow,
        ),
        (TableRule(tier="ssd"), lambda shard: shard.memory != "ssd"),
    ],
)
def test_rules_of_drives_and_widths(rule: TableRule, keeps_off: object) -> None:
    problem = replace(small_memories(), topology=Topology.parse("2xt4", hbm="1GiB", ssd="8GiB"))
    ruled = replace(problem, constraints=Constraints.of({"*": rule}))
    plan = solve(ruled, time_limit_s=600, max_steps=15, threads=1).plan
    assert not any(keeps_off(shard) for shard in plan.shards if shard.row_count)  # type: ignore[operator]


TABLE = Table("t", 1000, 8)
COLD = Shard("t", (0, 1000, 1), (0, 8), ("gpu:0",), "ssd", "staged", staging_rows=10)


def plan_of(shard: Shard, ssd: str | None = "1MiB") -> Plan:
    return Plan((TABLE,), Topology.parse("1xt4", ssd=ssd), (shard,))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_of(COLD, None), "the host of gpu:0 has no drive"),
        (plan_of(replace(COLD, lookup="uva", staging_rows=0)), "not read by lookup 'uva'"),
        (
            plan_of(replace(COLD, memory="dram", lookup="host", dtype="int8", staging_rows=0)),
            "int8",
        ),
        (plan_of(COLD, "4KiB"), "host:0 ssd would hold"),
    ],
)
def test_plans_that_drives_cannot_hold(plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        verify(plan)


def test_bytes_of_a_drive_are_blocks() -> None:
    assert record_bytes(TABLE, COLD) == -(-4096 // ((4096 - 4) // 36))
    assert record_bytes(TABLE, replace(COLD, dtype="int8")) == -(-4096 // ((4096 - 4) // 20))
    wide = Table("t", 10, 2048)
    assert record_bytes(wide, replace(COLD, cols=(0, 2048))) == 3 * 4096


def test_rows_move_between_drives_and_memory() -> None:
    on_drive, in_dram = plan_of(COLD), plan_of(replace(COLD, memory="dram"))
    moves = diff(on_drive, in_dram).moves
    assert [move.kind for move in moves] == ["SSD to DRAM"]
    assert migration(diff(on_drive, in_dram)).waits_for == "host:0 ssd"


def test_a_width_that_is_none() -> None:
    with pytest.raises(ProblemError, match="int4"):
        replace(small_memories(), widths=("int4",))  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="exchange type 'int8' is none of float32"):
        replace(small_memories(), exchange_dtype="int8")  # type: ignore[arg-type]


def test_costs_of_shards_on_drives_name_their_shard() -> None:
    option = ShardingOption(home=ColdHome(0.5))
    assert TableShard(0, option).cost_key != TableShard(0).cost_key


@pytest.mark.parametrize("widths", [(), ("int8",)])
def test_replayed_batches_wait_for_drives_as_planned(widths: tuple[ColdDType, ...]) -> None:
    topology = Topology.parse("1xt4", hbm="256MiB", dram="1MiB", ssd="1TiB")
    problem = Problem(named_workload("random-3@1"), topology, 512, widths=widths)
    plan = solve(problem, time_limit_s=20, max_steps=50, threads=1).plan
    assert any(shard.memory == "ssd" for shard in plan.shards)
    streams = [drawn_stream(problem.profile, 512, 8)]
    simulated = simulate(plan, streams, Roofline(), problem.profile)
    assert simulated.step_times.mean_s == pytest.approx(plan.solver.step_time_s, rel=0.2)


@pytest.mark.parametrize("gpus", mostly_slow([1, 2], 1))
def test_a_proof_counts_all_of_a_hosts_memory(gpus: int) -> None:
    """Searches leave a thousandth of DRAM free; a table that fills it was proven not to fit."""
    tables = zipf_table("a", 25_000), zipf_table("b", 25_000)
    size = tables[0].table.total_bytes
    topology = machine(gpus, hbm_bytes=1 << 20, dram_bytes=size).with_memory(ssd="1GiB")
    few = TableRule(forbid=frozenset({"column-wise", "replicated"}))  # For a proof in a moment.
    rules = Constraints.of({"a": TableRule(tier="dram"), "*": few})
    problem = replace(problem_of(*tables, topology=topology), constraints=rules)
    plan = solve(problem, "greedy-cost", max_steps=20, threads=1).plan
    assert device_memory(plan)["host:0"].free_bytes == 0
    with_less = replace(problem, topology=topology.with_memory(dram=size - 1))
    ended = solve(with_less, "greedy-cost", max_steps=20, threads=1).termination
    assert [(s.device, s.short_bytes) for s in ended.shortages] == [("host:0", 1)]


def unread(rows: int, dim: int) -> TableProfile:
    table = Table("t", rows, dim, "float32", "sgd")
    return TableProfile(table, AccessCdf.zipf(rows, 1.0))


def test_a_drive_has_no_more_rows_than_it_holds() -> None:
    """Two halves of the columns fill two GPUs; a drive of a block less was taken to have room."""
    size = 2 * 8 * 4
    topology = machine(2, hbm_bytes=size, dram_bytes=0).with_memory(ssd=0)
    problem = problem_of(unread(2, 16), topology=topology)
    plan = solve(problem, "greedy-cost", max_steps=20, threads=1).plan
    assert {shard.memory for shard in plan.shards} == {"hbm"}
    # Of three rows one is left, which takes 66 bytes there, a 63rd part of a block.
    topology = machine(2, hbm_bytes=64, dram_bytes=0).with_memory(ssd=65)
    problem = problem_of(unread(3, 16), topology=topology)
    ended = solve(problem, "greedy-cost", max_steps=20, threads=1).termination
    assert ended.reason == "infeasible"
    assert [(s.device, s.resource, s.short_bytes) for s in ended.shortages] == [
        ("host:0", "ssd", 1)
    ]


def test_a_plan_is_not_lost_for_one_that_drives_have_no_room_for() -> None:
    """`auto` went on from the greedy's plan to assignments with rows on a drive of no bytes."""
    rows = Table("t0", 3, 7, "float16", "adam", (Feature("f0", 0.01, 0.1, "none"),))
    one = Table("t1", 1, 512, "float16", "adam", (Feature("f1", 0.01, 1.0, "none"),))
    counts = [0, 0, 1], [0]
    profile = Profile(
        tuple(
            TableProfile(table, AccessCdf.from_counts(of), RowCounts.from_dense(np.array(of)))
            for table, of in zip((rows, one), counts, strict=True)
        )
    )
    topology = machine(2, dram_bytes=0, launch_s=1e-5).with_memory(ssd=0)
    topology = sized(topology, {"gpu:0": 163, "gpu:1": 5233})
    problem = Problem(profile, topology, 7, pipeline="serial")
    assert solve(problem, "auto", max_steps=25, threads=1).plan is not None


@combinations("widths, drive_bytes", [(), ("bfloat16",)], [0, 57_000])
def test_rows_that_nothing_reads_fill_memories_too(
    widths: tuple[ColdDType, ...], drive_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrow rows take more bytes in HBM, and all rows are more than a drive holds.

    CP-SAT found a plan, too, if it had a minute.
    """
    monkeypatch.setattr("solvers.strategies._search.fit", lambda *_: pytest.fail("no room found"))
    table = Table("t", 1000, 30, "float32", "sgd", (Feature("t", 2.5, 0.0),))
    topology = machine(2, 2, hbm_bytes=1 << 16, dram_bytes=7000)
    drive = Drive(drive_bytes) if drive_bytes else None
    hosts = tuple(replace(host, drive=drive) for host in topology.hosts)
    problem = problem_of(
        TableProfile(table, AccessCdf.zipf(1000, 1.3)), topology=replace(topology, hosts=hosts)
    )
    result = solve(replace(problem, widths=widths), "greedy-cost", max_steps=0)
    assert violations(result.plan) == []


@pytest.mark.parametrize(("skew", "other_skew"), [(1.0, 2.0), (2.0, 8.0)])
def test_dram_is_full_in_spite_of_other_buffers(skew: float, other_skew: float) -> None:
    """Rows that leave the drive changed buffers in HBM, by a few rows too many for DRAM.

    Plans then left DRAM empty, and took 9.5 and 9,900 times as long as the bound.
    """
    few = Table("c", 1000, 16, "float32", "rowwise_adagrad", (Feature("c", 0.01),))
    tables = (
        Table("a", 3_000_000, 32, "float16", "adagrad", (Feature("a", 0.5),)),
        Table("b", 3_000_000, 8, "bfloat16", "sgd", (Feature("b", 3.0),)),
    )
    profiles = [
        TableProfile(table, AccessCdf.zipf(table.rows, alpha))
        for table, alpha in zip((*tables, few), (skew, other_skew, 1.0), strict=True)
    ]
    topology = Topology.parse("1xh100", hbm="8264656", dram="188769535", ssd="1TiB")
    host = replace(topology.hosts[0], drive=Drive(1 << 50, 3e7, 1800.0))
    topology = replace(topology, hosts=(host,))
    problem = Problem(Profile(tuple(profiles)), topology, 1, widths=("int8", "bfloat16"))
    result = solve(problem, "greedy-cost", max_steps=25, threads=1)
    assert result.step_time_s < 1.01 * result.bound_s
