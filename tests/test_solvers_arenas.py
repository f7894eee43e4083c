"""Searches where arenas decide: by their launches, and under a model by how their rows are read."""

import random
from dataclasses import replace

import numpy as np
import pytest
from calibration_cases import calibration
from fast_and_full import fewer, mostly_slow
from plan_cases import machine
from problem_cases import problem_of, zipf_table
from test_solvers import with_hbm

from cost_models import Calibrated, Roofline, ShardingOption, TableShard
from cost_models.arenas import ArenaCosts, ArenaLoad, added_up, arena_loads, times_by_arena
from cost_models.base import Cold
from placer import Problem, Topology
from placer.constraints.constraints import Constraints
from placer.constraints.file import TableRule
from placer.measurement import random_cases
from solvers import Limits, solve
from solvers.bounds.lagrangian import lagrangian_bound
from solvers.model.assignment import Assignment
from solvers.model.build_plan import build_plan
from solvers.model.clock import Clock
from solvers.model.instance import Instance, Placement
from solvers.search.arena_construction import assignments_by_arena
from solvers.search.construction import construct
from solvers.search.moves import improve

MODEL = Calibrated(calibration(arena_cached=2e-3, arena_cached_lookup=2e-6))


def problem(gpus: int, seed: int) -> Problem:
    """Tables of two widths, of which about half fit in HBM."""
    rng = np.random.default_rng(seed)
    tables = [
        zipf_table(f"t{n}", int(rng.integers(200, 4000)), int(rng.choice([8, 16])),
                   lookups=float(rng.uniform(1, 8)), exponent=float(rng.uniform(0.3, 1.2)))
        for n in range(4)
    ]  # fmt: skip
    return with_hbm(problem_of(*tables, topology=machine(gpus), batch_size=64), 0.6)


def random_placements(instance: Instance, rng: random.Random) -> list[Placement]:
    """Any options that replicate nothing, any GPUs, any rows in HBM."""
    found = []
    for table in range(instance.tables):
        options = [one for one in instance.options_of(table) if not one.replicated_rows]
        shards = instance.shards(table, rng.choice(options))
        homes = rng.sample(range(instance.gpus), len(shards))
        for shard, gpu in zip(shards, homes, strict=True):
            rows = int(instance.curve(shard, gpu).hot_rows[-1])
            gpu = gpu if shard.home_gpu is None else shard.home_gpu
            found.append(Placement(shard, gpu, rng.choice([0, rows, rng.randint(0, rows)])))
    return found


def test_loads_of_a_plan_are_those_of_its_shards() -> None:
    """Of 1 GPU: lookups are counted once for each column slice, rows by how they are read."""
    for case in random_cases(8, 10):
        (loads,) = arena_loads(case.problem(), case.plan())
        widths = {shard.width for shard in case.shards}
        assert {arena[2] for arena in loads} == widths
        specs = {table.name: table for table in case.tables}
        for width in widths:
            own = [shard for shard in case.shards if shard.width == width]
            (load,) = (load for arena, load in loads.items() if arena[2] == width)
            slices = {(shard.table, shard.cols) for shard in own}
            lookups = sum(specs[name].lookups_per_sample for name, _ in slices) * case.batch_size
            assert load.lookups == pytest.approx(lookups)
            cached = [s.row_count for s in own if s.lookup in ("staged", "cached")]
            assert load.cached_rows == sum(cached)
            assert load.pooled_lookups <= load.lookups * (1 + 1e-12)
            assert (load.pooled_lookups > 0) == any(s.lookup == "host" for s in own)


def test_what_arenas_take_by_hand() -> None:
    costs = ArenaCosts(*(np.array([seconds]) for seconds in (100.0, 1.0, 0.01, 1e4)))
    loads = [ArenaLoad(30), ArenaLoad(20, 7), ArenaLoad(20, 50), ArenaLoad(20, 0, 5)]
    assert [costs.seconds([load])[0] for load in loads] == pytest.approx([0, 107, 120, 0.15])
    joined = loads[0].joined(loads[2]).joined(loads[3])
    assert costs.seconds([joined])[0] == pytest.approx(100 + 50 + 0.65)
    assert costs.seconds(loads)[0] == pytest.approx(227.15)
    replicas = [ArenaLoad(30, replicated=True), ArenaLoad(10, replicated=True)]
    assert costs.seconds([*loads, *replicas])[0] == pytest.approx(10227.15), "once for all of them"


@pytest.mark.parametrize("gpus", [1, 3])
def test_assignments_take_what_their_plans_do(gpus: int) -> None:
    """Before and after local search, whose ratings leave arenas out."""
    for seed in range(fewer(6, 2)):
        instance = Instance(problem(gpus, seed), MODEL)
        placements = random_placements(instance, random.Random(seed))
        found = Assignment.of(instance, [(one.shard, one.gpu) for one in placements])
        if found is None:
            continue
        before_s = found.key_s
        for _ in range(2):
            plan = build_plan(instance, found.placements())
            report = MODEL.evaluate(instance.problem, plan)
            assert found.step_time_s == pytest.approx(report.step_time_s, rel=1e-9)
            loads = arena_loads(instance.problem, plan)
            phases = MODEL.launches(instance.problem, 0).size
            arenas_s = added_up(times_by_arena(MODEL, instance.problem, loads), phases).T
            launched = [len(instance.arenas(shards)) for shards in found.shards]
            launches_s = np.array(launched)[:, None] * np.array(instance.launches_s)
            np.testing.assert_allclose(
                found.arena_s(range(gpus)), arenas_s - launches_s, atol=1e-12
            )
            improve(found, Clock.start(Limits(time_limit_s=1e9, max_steps=30)))
        assert found.key_s <= before_s * (1 + 1e-12)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("cold", ["staged", "host", "cached"])
def test_an_arena_takes_what_its_plan_does_with_one_row_in_hbm_or_all_but_one(
    cold: Cold, gpus: int
) -> None:
    rows = 300  # More than the lookups of a step.
    tables = [zipf_table(name, rows, 16, lookups=1.0) for name in ("t", "in hbm", "everywhere")]
    asked = problem_of(*tables[: gpus + 1], topology=machine(gpus))
    instance = Instance(asked, MODEL)
    (shard,), (other,) = (instance.shards(n, ShardingOption(cold=cold)) for n in range(2))
    replicas = [TableShard.replica(2, ShardingOption(replicated_rows=rows))] * (gpus > 1)
    launch_s = MODEL.launches(asked, 0)
    for hot_rows in (0, 1, rows - 1, rows):
        placements = [Placement(shard, 0, hot_rows), Placement(other, 0, rows)]
        plan = build_plan(instance, placements, replicas)
        loads = arena_loads(asked, plan)
        expected_s = added_up(times_by_arena(MODEL, asked, loads), launch_s.size)[:, 0]
        served = [(shard, hot_rows), (other, rows)]
        found_s = instance.arena_times.seconds(0, served, replicas)
        np.testing.assert_allclose(found_s, expected_s - instance.launches_s[0], atol=1e-12)


@pytest.mark.parametrize("solver", mostly_slow(["greedy-cost", "ilp", "auto"], "greedy-cost"))
def test_no_plan_of_a_solver_is_faster_than_its_bound(solver: str) -> None:
    for seed in range(2):
        asked = problem(2, seed)
        result = solve(asked, solver=solver, cost_model=MODEL, max_steps=4, seed=0)
        assert result.step_time_s == MODEL.evaluate(asked, result.plan).step_time_s
        assert result.bound_s <= result.step_time_s * (1 + 1e-9)


def test_no_plan_at_all_is_faster_than_the_bound() -> None:
    for seed in range(fewer(4, 1)):
        asked = problem(2, seed)
        roomy = replace(asked, topology=asked.topology.with_memory(hbm=1 << 30))
        instance, rng = Instance(roomy, MODEL), random.Random(seed)
        bound_s = solve(roomy, solver="greedy-cost", cost_model=MODEL, max_steps=9).bound_s
        assert bound_s is not None
        for _ in range(20):
            plan = build_plan(instance, random_placements(instance, rng))
            assert MODEL.evaluate(roomy, plan).step_time_s >= bound_s * (1 - 1e-9)


@pytest.mark.parametrize(
    ("replicas_s", "replicates"),
    mostly_slow([(0.0, True), (1e-4, True), (1.0, False)], (1e-4, True), (1.0, False)),
)
def test_nothing_is_replicated_where_its_collectives_take_longer(
    replicas_s: float, replicates: bool
) -> None:
    """Small tables whose rows are read again and again, and dear bytes between GPUs."""
    model = Calibrated(calibration(exchange_byte=1e-6, replicas=replicas_s))
    tables = [zipf_table(f"t{n}", 20, 8, lookups=20) for n in range(4)]
    asked = problem_of(*tables, topology=machine(2), batch_size=256)
    for solver in ("greedy-cost", "auto")[: fewer(2, 1)]:
        result = solve(asked, solver=solver, cost_model=model, max_steps=60)
        assert any(len(shard.devices) > 1 for shard in result.plan.shards) == replicates
        free = Calibrated(calibration(exchange_byte=1e-6, replicas=0.0))
        least_s = solve(asked, solver=solver, cost_model=free, max_steps=60).bound_s
        assert least_s * (1 - 1e-9) <= result.bound_s <= result.step_time_s * (1 + 1e-9)


def launched(widths: tuple[int, ...], gpus: int) -> Problem:
    """Small batches, so that launches are most of a step."""
    tables = [
        zipf_table(f"t{n}", 1000 + 300 * n, width, lookups=3.0) for n, width in enumerate(widths)
    ]
    return problem_of(*tables, topology=Topology.parse(f"{gpus}xt4"), batch_size=16)


def test_gpus_are_divided_among_arenas_where_launches_are_most_of_a_step() -> None:
    problem = launched((16, 32, 64) * 4, 3)
    result = solve(problem, "greedy-cost")
    assert result.plan is not None
    arenas = {
        gpu.id: {shard.width for shard in result.plan.shards if gpu.id in shard.devices}
        for gpu in problem.topology.gpus
    }
    assert [len(widths) for widths in arenas.values()] == [1, 1, 1]


def test_wide_tables_are_cut_where_that_makes_one_arena_of_two() -> None:
    """One GPU for width 32 and one for 64 leaves one of them with most of the work."""
    instance = Instance(launched((32,) + (64,) * 5, 2), Roofline())
    bound = lagrangian_bound(instance)
    found = list(assignments_by_arena(instance, bound))
    assert any(
        len({instance.arena_of(shard) for held in one.shards for shard in held}) == 1
        for one in found
    )
    usual = construct(instance, bound, bound.step_time_s)
    assert min(one.step_time_s for one in found) <= usual.step_time_s


def test_tables_of_one_width_are_not_divided_by_arenas() -> None:
    instance = Instance(launched((32,) * 6, 2), Roofline())
    assert not list(assignments_by_arena(instance, lagrangian_bound(instance)))


def test_homes_of_arenas_give_way_to_what_users_ask_for() -> None:
    """Tables of two widths that are pinned to one GPU are there, arenas or not."""
    problem = launched((16, 16, 32, 32), 2)
    pinned = TableRule(devices=("gpu:1",))
    rules = Constraints(tables=(("t0", pinned), ("t2", pinned)))
    instance = Instance(replace(problem, constraints=rules), Roofline())
    found = list(assignments_by_arena(instance, lagrangian_bound(instance)))
    assert found
    for one in found:
        assert {0, 2} <= {shard.table for shard in one.shards[1]}


@pytest.mark.slow
def test_many_arenas_of_few_rows_stay_whole() -> None:
    """Launches take most of a step, so cut tables would take almost twice as long as whole ones."""
    sizes = [(30_000_000, 8, "adagrad"), (44_926, 8, "rowwise_adagrad"), (27, 64, "adam"),
             (303, 32, "adagrad"), (270, 8, "sgd"), (7451, 4, "adam"), (16_334, 16, "adagrad"),
             (3139, 16, "adagrad"), (5070, 4, "adagrad"), (28, 4, "adam")]  # fmt: skip
    tables = [
        zipf_table(f"t{n}", rows, dim, lookups=2.0, exponent=0.9, optimizer=optimizer)
        for n, (rows, dim, optimizer) in enumerate(sizes)
    ]
    machine = Topology.parse("8xh100", hbm="13MB", dram="5GB")
    problem = problem_of(*tables, topology=machine, batch_size=128)
    whole, found = (solve(problem, name, max_steps=60) for name in ("greedy-lookup", "greedy-cost"))
    assert found.step_time_s < 0.6 * whole.step_time_s
