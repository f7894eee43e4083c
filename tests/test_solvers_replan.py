"""Plans that follow others: what they cost, what they move, and that rows stay where they can."""

import json
import sys
import time
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fast_and_full import examples, fewer, mostly_slow
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import in_dram, in_hbm, machine
from problem_cases import counted_table, problem_of, problems, zipf_table
from test_plan_drift import ids_by_rank

from cost_models import CostModel, CostReport, Roofline, ShardingOption
from placer import AccessCdf, Constraints, Plan, Problem, TableProfile, TableRule, Topology
from placer.constraints.unmet import unmet
from placer.errors import ProblemError
from placer.plan.diff import diff
from placer.plan.fields import Pipeline
from placer.plan.memory import index_buffer_bytes
from placer.plan.plan import Ranks
from placer.plan.verify import violations
from placer.profile.table_profile import RowCounts
from placer.workloads import named_workload
from solvers import Limits, solve
from solvers.analysis import Candidate, Replanned, replan
from solvers.analysis.kept_plan import matched_gpus, order_within_slices, with_matched_slices
from solvers.model.assignment import Assignment
from solvers.model.build_plan import build_plan, fitted_plan
from solvers.model.instance import Instance, Placement
from solvers.model.read_plan import placements_of
from solvers.registry import SOLVERS
from solvers.report.whatif import replan_report
from solvers.result import SolveResult
from solvers.search.old_placement import OldTable, old_assignment
from solvers.strategies.greedy import GreedySize

MODEL = Roofline()
LIMITS = Limits(time_limit_s=600, max_steps=fewer(60, 20))

INDEX_BYTES = int(index_buffer_bytes(zipf_table("t", 1).table, 1, 1))
HBM = (50 << 10) + 160 * INDEX_BYTES
"""Of each of four GPUs that share 640 lookups."""


def skewed(name: str, rows: int, seed: int, *, lookups: float = 4.0) -> TableProfile:
    """A counted table whose hot rows are anywhere among its ids."""
    rng = np.random.default_rng(seed)
    counts = np.rint(2000 / (1 + np.arange(rows)))
    profile = counted_table(name, rng.permutation(counts).astype(np.int64), lookups=lookups)
    # So that bytes are those of rows, however their columns are cut.
    return replace(profile, table=replace(profile.table, optimizer="sgd"))


def drifted(profile: TableProfile, seed: int) -> TableProfile:
    """The same table, with a fifth of its rows in each other's places."""
    dense = np.zeros(profile.table.rows, dtype=np.int64)
    dense[profile.counts.ids] = profile.counts.counts
    rng = np.random.default_rng(seed)
    some = rng.choice(dense.size, dense.size // 5, replace=False)
    dense[some] = dense[rng.permutation(some)]
    cdf, counts = AccessCdf.from_counts(dense, dense.size), RowCounts.from_dense(dense)
    return replace(profile, cdf=cdf, counts=counts)


@cache
def before(pipeline: Pipeline = "look-ahead") -> tuple[Problem, Plan]:
    """Five tables that two hosts' four GPUs do not hold, and a plan.

    Copies cost nothing here unless they are within the step, as with ``serial``.
    """
    tables = [skewed(f"t{n}", rows, n) for n, rows in enumerate((2000, 900, 600, 300, 100))]
    topology = machine(2, 2, hbm_bytes=HBM, launch_s=1e-9)
    problem = problem_of(*tables, topology=topology, batch_size=8)
    problem = replace(problem, pipeline=pipeline)
    plan = solve(problem, "greedy-cost").plan
    assert any(shard.memory == "dram" for shard in plan.shards)
    return problem, plan


def later(problem: Problem) -> Problem:
    """The problem after its accesses have drifted, with room for what is staged then."""
    topology = problem.topology.with_memory(hbm=problem.topology.gpus[0].memory_bytes + (8 << 10))
    tables = tuple(drifted(profile, at) for at, profile in enumerate(problem.profile))
    profile = replace(problem.profile, tables=tables)
    return replace(problem, profile=profile, topology=topology)


def moved_bytes(old: Plan, new: Plan) -> int:
    """Bytes that have no copy in the memory where they go to, counted cell by cell.

    Cells are of 8 columns: narrower strips are not made.
    """
    total = 0
    for table in new.tables:
        if table.name not in old.tables_by_name:
            continue
        assert table.optimizer == "sgd"
        places: list[dict[tuple[int, int], list[str]]] = []
        for plan in (old, new):
            ids, hosts = ids_by_rank(plan, table.name), plan.topology.gpus_by_id
            where = defaultdict(list)
            for shard in plan.shards_by_table[table.name]:
                for rank in range(*shard.rows):
                    for column in range(*shard.cols, 8):
                        where[ids[rank], column] += [
                            d if shard.memory == "hbm" else hosts[d].host for d in shard.devices
                        ]
            places.append(where)
        was, now = places
        cells = sum(place not in was[cell] for cell, homes in now.items() for place in homes)
        assert all(edge % 8 == 0 for shard in (*old.shards, *new.shards) for edge in shard.cols)
        total += cells * table.weight_bytes_per_row(1) * 8
    return total


def check(problem: Problem, old: Plan, found: Replanned) -> Candidate:
    """Every candidate is sound and costs what is said, and the chosen one costs least."""
    for one in found.candidates:
        assert violations(one.plan) == []
        assert unmet(one.plan, problem.constraints) == []
        cost = MODEL.evaluate(problem.in_plan_order(one.plan), one.plan)
        if one.name == "keep":  # Rows that lack room in its buffers are read in place.
            assert one.step_time_s >= cost.step_time_s * (1 - 1e-9)
        else:
            assert one.step_time_s == pytest.approx(cost.step_time_s)
        assert one.moved_bytes == moved_bytes(old, one.plan)
        assert one.cost_s == pytest.approx(found.horizon_steps * one.step_time_s + one.migration_s)
        assert found.chosen.cost_s <= one.cost_s
        better = [c for c in found.candidates if c.moved_bytes <= one.moved_bytes
                  and c.step_time_s < one.step_time_s]  # fmt: skip
        assert not (one.on_front and better)
        saved_s = (found.old_step_time_s or 0.0) - one.step_time_s
        if one.break_even_steps:
            assert one.break_even_steps * saved_s == pytest.approx(one.migration_s)
    moved = [one.moved_bytes for one in found.candidates]
    assert moved == sorted(moved)
    assert found.chosen in found.candidates
    record = found.chosen.plan.solver
    assert (record.name, record.step_time_s) == ("replan", found.chosen.step_time_s)
    assert found.chosen.plan.provenance.problem_sha256 == problem.sha256
    return found.chosen


def named(found: Replanned, start: str) -> Candidate:
    return next(one for one in found.candidates if one.name.startswith(start))


def test_nothing_moves_where_nothing_has_changed() -> None:
    problem, old = before()
    found = replan(problem, MODEL, old, LIMITS)
    chosen = check(problem, old, found)
    assert (chosen.name, chosen.moved_bytes, chosen.migration_s) == ("keep", 0, 0.0)
    assert chosen.break_even_steps == 0
    assert found.old_step_time_s == pytest.approx(old.solver.step_time_s)
    # The same solver finds the same plan, on the same GPUs.
    assert named(found, "from scratch").moved_bytes == 0
    shown = replan_report(found).to_json()
    assert shown["candidates"][0]["break_even"] == "never needed"
    assert "tables" not in shown


def test_refilling_leaves_rows_on_drives_that_are_seldom_read() -> None:
    """Rows went to drives as if reading them took no time, and steps took twice as long."""
    topology = Topology.parse("2xt4", hbm="256MiB", dram="512MiB", ssd="1TiB")
    problem = Problem(named_workload("random-6@2"), topology, 512)
    old = solve(problem, "greedy-cost", max_steps=30, threads=1).plan
    found = replan(problem, MODEL, old, LIMITS)
    assert named(found, "refill").step_time_s < 1.01 * found.old_step_time_s


@examples(15)
@given(problems(hbm_bytes=1 << 13))
def test_small_problems_keep_their_plans(problem: Problem) -> None:
    result = solve(problem, "greedy-cost")
    if result.plan is None:
        return
    found = replan(problem, MODEL, result.plan, LIMITS)
    assert found.old_step_time_s == pytest.approx(result.step_time_s)
    assert found.chosen.cost_s <= found.old_step_time_s * found.horizon_steps


@pytest.mark.parametrize("steps", [-1, 10**400])
def test_a_horizon_that_no_machine_runs_is_refused(steps: int) -> None:
    problem = problem_of(zipf_table("t", 10))
    old = solve(problem, "greedy-size").plan
    with pytest.raises(ProblemError, match="the horizon must be 0 to"):
        replan(problem, MODEL, old, LIMITS, horizon_steps=steps)


def test_drift_is_weighed_over_the_horizon() -> None:
    problem, old = before("serial")
    now = later(problem)
    at_once, far = (replan(now, MODEL, old, LIMITS, horizon_steps=steps) for steps in (0, 10**9))
    # Without steps to come nothing pays, with many only the step time counts.
    none, many = check(now, old, at_once), check(now, old, far)
    assert (none.name, none.moved_bytes) == ("keep", 0)
    assert many.moved_bytes > 0
    fastest = min(one.step_time_s for one in far.candidates)
    assert many.step_time_s == pytest.approx(fastest)
    assert fastest <= named(far, "from scratch").step_time_s
    assert named(far, "1 step of search").step_time_s < named(far, "refill").step_time_s
    # Hot rows are not where they were: what is kept is slower than it was.
    assert at_once.old_step_time_s > old.solver.step_time_s * 1.01
    assert 0 < many.break_even_steps < 10**9
    # Without room for more buffers, the share of staged rows that lack them is read in place.
    same = replace(now, topology=problem.topology)
    kept = check(same, old, replan(same, MODEL, old, LIMITS, horizon_steps=0))
    assert kept.name == "keep"
    room, needed = (sum(s.staging_rows for s in p.shards) for p in (kept.plan, none.plan))
    assert room < needed
    in_place = [
        replace(shard, lookup="uva", staging_rows=0) if shard.lookup == "staged" else shard
        for shard in kept.plan.shards
    ]
    plans = kept.plan, replace(kept.plan, shards=tuple(in_place))
    staged_s, in_place_s = (MODEL.evaluate(same.in_plan_order(p), p).step_time_s for p in plans)
    share = 1 - room / needed
    assert kept.step_time_s == pytest.approx(staged_s + share * (in_place_s - staged_s))
    assert staged_s < in_place_s


def test_refilling_moves_little_of_a_table_that_is_option_by_rows() -> None:
    profile = skewed("t", 3000, 5, lookups=20)
    topology = machine(3, hbm_bytes=(60 << 10) + 160 * INDEX_BYTES, launch_s=1e-9)
    problem = problem_of(profile, topology=topology, batch_size=8)
    instance = Instance(problem, MODEL)
    homes = [(p, gpu) for gpu, p in enumerate(instance.shards(0, ShardingOption(3)))]
    old = fitted_plan(Assignment.of(instance, homes))
    now = later(problem)
    found = replan(now, MODEL, old, LIMITS)
    check(now, old, found)
    refilled = named(found, "refill")
    assert refilled.step_time_s < (found.old_step_time_s or 0)
    # All rows keep their GPU: they move between its two tiers at most.
    kinds = {move.kind for move in diff(old, refilled.plan).moves}
    assert kinds <= {"HBM to DRAM", "DRAM to HBM"}
    # Dealt out anew, two of three rows would go to another GPU.
    assert refilled.moved_bytes < profile.table.total_bytes / 3


def test_a_gpu_that_is_gone() -> None:
    problem, old = before("serial")
    # Those that are left get more lookups each, and room for their buffers.
    gpus = tuple(replace(g, memory_bytes=HBM + (16 << 10)) for g in problem.topology.gpus[:3])
    left = replace(problem.topology, gpus=gpus,
                   links=tuple(k for k in problem.topology.links if k.a != "gpu:3"))  # fmt: skip
    now = replace(problem, topology=left, batch_size=10)
    found = replan(now, MODEL, old, LIMITS)
    check(now, old, found)
    assert found.old_step_time_s is None
    assert found.old_refused == "the old plan uses gpu:3, which '2x2' lacks"
    refilled = named(found, "refill")
    for name, shards in old.shards_by_table.items():
        stays = {d for shard in shards for d in shard.devices} - {"gpu:3"}
        assert stays <= {d for s in refilled.plan.shards_by_table[name] for d in s.devices}
    assert all(one.break_even_steps is None for one in found.candidates)
    assert "gpu:3, which" in " ".join(replan_report(found).headline)


@pytest.mark.parametrize(
    ("gpus", "hbm_bytes"),
    mostly_slow([(3, HBM), (2, HBM * 2), (2, HBM * 7 // 8)], (2, HBM * 7 // 8)),
)
def test_a_machine_that_grew_or_shrank(gpus: int, hbm_bytes: int) -> None:
    problem, old = before()
    topology = machine(gpus, 2, hbm_bytes=hbm_bytes, launch_s=1e-9)
    if gpus == 3:  # As many hosts, each with one GPU more: those there were keep their host.
        hosts = {gpu.id: gpu.host for gpu in problem.topology.gpus}
        ids = [gpu.id for gpu in topology.gpus]
        order = [*hosts, *(one for one in ids if one not in hosts)]
        home = hosts | {"gpu:4": "host:0", "gpu:5": "host:1"}
        all_gpus = tuple(replace(topology.gpus_by_id[one], host=home[one]) for one in order)
        links = tuple(replace(k, b=home[k.a]) if k.a in home else k for k in topology.links)
        topology = replace(topology, gpus=all_gpus, links=links)
    now = replace(problem, topology=topology, batch_size=32 // (2 * gpus))
    found = replan(now, MODEL, old, LIMITS, horizon_steps=10**9)
    chosen = check(now, old, found)
    if hbm_bytes < HBM:
        assert "bytes too many" in found.old_refused
    else:
        assert chosen.step_time_s <= found.old_step_time_s
    if gpus == 3:
        assert {d for shard in chosen.plan.shards for d in shard.devices} >= {"gpu:4", "gpu:5"}


def test_tables_that_come_go_and_change_shape() -> None:
    problem, old = before()
    one, two, _, *rest = problem.profile
    wider = skewed("t1", 950, 9)
    come = skewed("new", 500, 7)
    tables = (one, wider, *rest, come)
    now = replace(problem, profile=replace(problem.profile, tables=tables))
    found = replan(now, MODEL, old, LIMITS)
    assert found.old_refused == "table 't1' was 900 × 16 and is 950 × 16"
    assert {one.name for one in found.candidates} > {"refill HBM"}
    statuses = {table.table: table.status for table in diff(old, found.chosen.plan).tables}
    assert (statuses["new"], statuses["t1"], statuses["t2"]) == ("added", "reshaped", "removed")
    words = replan_report(found).headline[-1]
    assert words == "not counted as moved: t1 (reshaped), t2 (removed), new (added)"
    more = replace(problem, profile=replace(problem.profile, tables=(one, two, come)))
    added = replan(more, MODEL, old, LIMITS)
    assert added.old_refused == "the old plan has no table 'new'"


def test_constraints_that_have_come() -> None:
    problem, old = before()
    devices = {device for shard in old.shards_by_table["t4"] for device in shard.devices}
    other = next(gpu.id for gpu in problem.topology.gpus if gpu.id not in devices)
    rules = {"t4": TableRule((other,)), "t0": TableRule(forbid=frozenset({"column-wise"}))}
    asked = Constraints.of(rules, together=[["t2", "t3"]])
    # What has to stay together needs more room.
    roomier = problem.topology.with_memory(hbm=2 * HBM)
    now = replace(problem, topology=roomier, constraints=asked)
    found = replan(now, MODEL, old, LIMITS)
    check(now, old, found)
    assert found.old_step_time_s is None
    assert found.old_refused
    (pinned,) = named(found, "refill").plan.shards_by_table["t4"]
    assert pinned.devices == (other,)


def test_nothing_fits() -> None:
    problem, old = before()
    tiny = replace(problem, topology=problem.topology.with_memory(hbm=100, dram=100))
    found = replan(tiny, MODEL, old, LIMITS)
    assert (found.chosen, found.candidates, found.moves) == (None, (), None)
    assert found.fresh.termination.reason == "infeasible"
    assert replan_report(found).headline[-1] == "nothing fits"


class SlowModel(Roofline):
    def evaluate(self, problem: Problem, plan: Plan) -> CostReport:
        time.sleep(0.3)
        return super().evaluate(problem, plan)


@pytest.mark.parametrize(("limit_s", "fresh_s"), [(1.0, 0.0), (1000.0, 600.0)])
def test_the_plan_from_scratch_leaves_time_for_the_rest(
    limit_s: float, fresh_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old plan takes 0.3 s to read, and the rest five times as long."""
    problem, old = before()
    given: list[float] = []

    class Recorded(GreedySize):
        def solve(self, problem: Problem, cost_model: CostModel, limits: Limits) -> SolveResult:
            given.append(limits.time_limit_s)
            return super().solve(problem, cost_model, limits)

    monkeypatch.setitem(sys.modules, "a_solver", SimpleNamespace(Recorded=Recorded))
    monkeypatch.setitem(SOLVERS, "recorded", "a_solver.Recorded")
    found = replan(problem, SlowModel(), old, Limits(limit_s, max_steps=2), solver="recorded")
    assert given == [fresh_s]
    assert found.chosen is not None


@pytest.mark.parametrize("seed", mostly_slow(range(2), 1))
def test_equal_gpus_and_hosts_take_the_part_that_they_had(seed: int) -> None:
    problem, plan = before()
    rng = np.random.default_rng(seed)
    hosts = rng.permutation(2).tolist()
    renamed = {
        f"gpu:{2 * host + gpu}": f"gpu:{2 * hosts[host] + other}"
        for host in range(2)
        for gpu, other in enumerate(rng.permutation(2).tolist())
    }
    devices = (tuple(sorted(renamed[d] for d in shard.devices)) for shard in plan.shards)
    shards = map(lambda shard, on: replace(shard, devices=on), plan.shards, devices)
    found = replan(problem, MODEL, replace(plan, shards=tuple(shards)), LIMITS)
    assert named(found, "from scratch").moved_bytes == 0


def test_gpus_of_other_kinds_and_pins_keep_their_parts() -> None:
    tables = [replace(skewed(name, 50, 1), counts=None) for name in "tu"]
    topology = machine(3)
    small = replace(topology.gpus[2], memory_bytes=1 << 30)
    topology = replace(topology, gpus=(*topology.gpus[:2], small))
    for pins, expected in (({}, {0: 1, 1: 0, 2: 2}), ({"t": "gpu:0"}, {0: 0, 1: 1, 2: 2})):
        asked = Constraints.of({name: TableRule((gpu,)) for name, gpu in pins.items()})
        problem = replace(problem_of(*tables, topology=topology), constraints=asked)
        instance = Instance(problem, MODEL)
        each = [instance.shards(n, ShardingOption())[0] for n in range(2)]
        new = build_plan(instance, [Placement(shard, n, 50) for n, shard in enumerate(each)])
        swap = {"gpu:0": "gpu:1", "gpu:1": "gpu:2"}
        shards = tuple(replace(s, devices=(swap[s.devices[0]],)) for s in new.shards)
        old = replace(new, shards=shards)
        found = [placements_of(instance, new, name) for name in "tu"]
        assert matched_gpus(instance, new, old, found, {}) == expected


def test_gpus_keep_column_slices_whose_row_slices_move() -> None:
    instance = Instance(problem_of(skewed("t", 90, 3), topology=machine(4)), MODEL)
    option = ShardingOption(2, (4, 12))
    shards = instance.shards(0, option)
    plans = [
        build_plan(instance, [Placement(s, gpu, 7) for s, gpu in zip(shards, gpus, strict=True)])
        for gpus in ((0, 1, 2, 3), (3, 2, 1, 0))
    ]
    was = {
        0: OldTable(option, tuple(zip(shards, ("gpu:3", "gpu:2", "gpu:1", "gpu:0"), strict=True)))
    }
    found = [placements_of(instance, plans[0], "t")]
    gpus = matched_gpus(instance, *plans, found, was)
    assert [{gpus[0], gpus[1]}, {gpus[2], gpus[3]}] == [{2, 3}, {0, 1}]


def test_an_old_option_stays_if_others_of_its_kind_are_searched() -> None:
    instance = Instance(problem_of(zipf_table("t", 1000), topology=machine(4)), MODEL)
    options = instance.options_of(0)
    own, too_many = ShardingOption(3, replicated_rows=3), ShardingOption(5)
    for option, slices in ((own, [[], [1], [2], [0]]), (too_many, [[0], [], [], []])):
        assert option not in options
        homes = zip(instance.shards(0, option), ("gpu:3", "gpu:1", "gpu:2"), strict=False)
        was = {0: OldTable(option, tuple(homes))}
        kept = old_assignment(instance, was, lambda _: ShardingOption())
        assert [[shard.row_slice for shard in of] for of in kept.shards] == slices


def test_tables_that_lost_their_gpus_are_placed_together_if_they_fit() -> None:
    """If they do not, because a host has little memory, they are placed one by one."""
    tables = [zipf_table(f"t{n}", 1000) for n in range(6)]
    topology = machine(1, 2, hbm_bytes=1 << 17)
    for few, expected, moves in ((False, [3, 3], 1), (True, [2, 4], 4)):
        table_bytes = tables[0].table.total_bytes
        has = table_bytes * 3 // 2 if few else 10 * table_bytes
        hosts = [replace(topology.hosts[0], memory_bytes=has), *topology.hosts[1:]]
        problem = problem_of(*tables, topology=replace(topology, hosts=tuple(hosts)))
        instance, option = Instance(problem, MODEL), ShardingOption(cold="uva")
        was = {n: OldTable(option, ((instance.shards(n, option)[0], "gpu:7"),)) for n in range(6)}
        kept = old_assignment(instance, was, lambda _: ShardingOption())
        assert [len(of) for of in kept.shards] == expected
        assert kept.moves == moves
        assert kept.fits_dram()


def test_slices_stay_on_their_gpus() -> None:
    problem = problem_of(skewed("t", 90, 3), topology=machine(3))
    instance = Instance(problem, MODEL)
    shards = instance.shards(0, ShardingOption(3))
    plan = build_plan(instance, [Placement(p, gpu, 7) for gpu, p in enumerate(shards)])
    read = placements_of(instance, plan, "t")
    devices = ["gpu:0", "gpu:1", "gpu:2"]
    # The second GPU had the third slice, the third one something else.
    homes = (shards[2], "gpu:1"), (shards[0], "gpu:7"), (shards[1], "gpu:0")
    was = OldTable(ShardingOption(3), homes)
    kept = with_matched_slices(read, was, devices, 90)
    assert {p.gpu: p.shard.row_slice for p in kept.placements} == {0: 1, 1: 2, 2: 0}
    assert with_matched_slices(read, OldTable(ShardingOption(2), ()), devices, 90) is read


def test_a_slice_that_stays_has_no_more_hot_rows_than_rows() -> None:
    instance = Instance(problem_of(skewed("t", 91, 3), topology=machine(3)), MODEL)
    long, short, last = instance.shards(0, ShardingOption(3))
    plan = build_plan(instance, [Placement(long, 0, 31), Placement(short, 1, 30),
                                 Placement(last, 2, 30)])  # fmt: skip
    read = placements_of(instance, plan, "t")
    was = OldTable(ShardingOption(3), ((short, "gpu:0"), (long, "gpu:1"), (last, "gpu:2")))
    kept = with_matched_slices(read, was, ["gpu:0", "gpu:1", "gpu:2"], 91)
    found = {(p.gpu, p.shard.row_slice, p.hot_rows) for p in kept.placements}
    assert found == {(0, 1, 30), (1, 0, 30), (2, 2, 30)}


@st.composite
def reorderings(draw: st.DrawFn) -> tuple[np.ndarray, list[int], int, int, int]:
    rows = draw(st.integers(8, 50))
    counts = np.array(draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows)))
    size = draw(st.integers(0, rows))
    listed = draw(st.permutations(range(rows)))[:size]
    row_slices, replicated_rows = draw(st.integers(2, 4)), draw(st.integers(0, 4))
    told_apart = draw(st.integers(replicated_rows, rows))
    return counts, list(listed), row_slices, replicated_rows, told_apart


@given(reorderings())
def test_rows_stay_in_their_slices(case: tuple[np.ndarray, list[int], int, int, int]) -> None:
    dense, listed, row_slices, replicated_rows, told_apart = case
    rows, counts = dense.size, RowCounts.from_dense(dense)
    ids = np.array(listed, dtype=np.int64)
    order = order_within_slices(counts, ids, row_slices, replicated_rows, told_apart)
    assert len(set(order.tolist())) == order.size
    every = np.arange(rows)
    was, now = Ranks.of(listed).ranks(every), Ranks.of(order).ranks(every)
    if not told_apart:
        assert np.array_equal(was, now)
        return
    in_head = now < replicated_rows
    stayed = ~in_head & (was >= replicated_rows)
    before, after = ((ranks[stayed] - replicated_rows) % row_slices for ranks in (was, now))
    assert np.array_equal(before, after)
    # What has to be listed is, but for ids at the end that are too few for all slices.
    missing = set(counts.hottest(told_apart).tolist()) - set(order.tolist())
    assert len(missing) < row_slices
    if replicated_rows:
        others = dense[order[replicated_rows:]].max(initial=0)
        assert dense[order[:replicated_rows]].min() >= others
    for number in range(row_slices):
        heat = dense[order[replicated_rows + number :: row_slices]]
        assert (np.diff(heat) <= 0).all()


def test_report() -> None:
    problem, old = before("serial")
    now = later(problem)
    found = replan(now, MODEL, old, LIMITS, horizon_steps=10**9)
    shown = replan_report(found).to_json()
    assert json.loads(json.dumps(shown)) == shown
    (chosen,) = [row for row in shown["candidates"] if row["chosen"]]
    assert chosen["candidate"] == shown["chosen"] == found.chosen.name
    assert chosen["break_even"].endswith(" steps")
    moved_bytes = [row["moved_bytes"] for row in shown["tables"]]
    assert sum(moved_bytes) == found.chosen.moved_bytes
    assert min(moved_bytes) > 0
    assert len(moved_bytes) < len(old.tables), "choose a problem in which a table stays"


def test_a_replicated_table_follows_the_machine(tmp_path: Path) -> None:
    profile = zipf_table("t", 40, optimizer="sgd", lookups=30)
    other = zipf_table("u", 400, optimizer="sgd")
    old_problem = problem_of(profile, other, topology=machine(2))
    shards = (
        in_hbm("t", (0, 40, 1), (0, 16), "gpu:0", "gpu:1"),
        in_hbm("u", (0, 100, 1), (0, 16)),
        in_dram("u", (100, 400, 1), (0, 16)),
    )
    tables = (profile.table, other.table)
    old = Plan(tables, old_problem.topology, shards, batch_size=64)
    now = replace(old_problem, topology=machine(3), batch_size=42)
    found = replan(now, MODEL, old, LIMITS)
    check(now, old, found)
    (shard,) = named(found, "refill").plan.shards_by_table["t"]
    assert shard.devices == ("gpu:0", "gpu:1", "gpu:2")
    # What is written is read back as the same plan.
    found.chosen.plan.save(tmp_path / "new.json")
    again = Plan.load(tmp_path / "new.json")
    assert diff(found.chosen.plan, again).moves == ()
