"""Step times: those that a roofline expects where batches are drawn from its profile."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from calibration_cases import SECONDS, calibration
from fast_and_full import examples
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import machine
from problem_cases import counted_table, plan_for, problem_of, whole, zipf_table
from simulator_cases import one_id_chunk

from cost_models import Calibrated, Roofline, TorchRec
from cost_models.calibrated.model import TERMS
from cost_models.replay import StepTimer, StepTimes
from cost_models.roofline import EXECUTOR, UPDATE_KERNELS, RooflineConstants
from cost_models.simulation import Replayed, TimeSummary, replayed, simulate
from cost_models.step_equation.equation import StepEquation
from cost_models.step_equation.phases import (
    COPIES,
    GRADIENTS,
    IDS,
    LINK_LOOKUP,
    LINK_UPDATE,
    LOOKUP,
    OUTPUTS,
    UPDATE,
    schedule_of,
)
from placer import Feature, Plan, Problem, Profile, Shard, Table
from placer.data.log import Chunk
from placer.errors import DataError, PlacerError, PlanMismatchError, ProfileError
from placer.measurement import random_cases
from placer.plan.fields import PIPELINES, Lookup, Pipeline
from placer.plan.memory import with_buffers
from placer.plan.plan import Ranks
from placer.profile.table_profile import RowCounts, TableProfile
from placer.simulator.counts import StepCounts
from placer.simulator.replay import ReplayOptions, Simulator
from placer.simulator.summary import (
    StepRecord,
    Window,
    device_totals,
    drifted,
    equal_windows,
    served,
)
from placer.tables import DType
from placer.workloads.batches import drawn_batches

BATCHES = 12
ON_LINK = [COPIES, LINK_LOOKUP, LINK_UPDATE]


def run(plan: Plan, batches: list[Chunk], problem: Problem | None = None, **options) -> Replayed:
    simulator = Simulator(plan, ReplayOptions(**options))
    profile = None if problem is None else problem.profile
    return replayed(simulator, StepTimer(simulator.arrangement, Roofline(), profile), batches)


def of_one_batch(
    plan: Plan, problem: Problem, model: StepEquation | None = None
) -> tuple[StepCounts, StepTimes]:
    """What a drawn batch does, and its times."""
    drawn = drawn_batches(problem.profile, problem.global_batch_size, 1, seed=0)
    ((counts, times),) = timed(plan, drawn, problem, model)
    return counts, times


def timed(
    plan: Plan, batches: Iterable[Chunk], problem: Problem, model: StepEquation | None = None
) -> list[tuple[StepCounts, StepTimes]]:
    """What each batch does, and its times."""
    simulator = Simulator(plan)
    timer = StepTimer(simulator.arrangement, model or Roofline(), problem.profile)
    return [(counts, timer.times(counts)) for counts in simulator.run(batches)]


def two_tables() -> Problem:
    """A small table and a large one, of which two batches hardly share a row."""
    small = zipf_table("a", 1000, 16, lookups=3)
    large = zipf_table("b", 400_000, 8, lookups=2.5, exponent=0.2)
    return problem_of(small, large, topology=machine(2), batch_size=256)


def sharded(problem: Problem, lookup: Lookup, tables: dict[int, tuple[str, ...]]) -> Plan:
    shards = []
    for table, devices in tables.items():
        shard = whole(problem, lookup, *devices, table=table)
        samples = problem.global_batch_size // len(devices)
        profile = problem.profile.tables[table]
        shards.append(with_buffers(profile, shard, samples=samples, returns_bags=True))
    return plan_for(problem, *shards)


@pytest.mark.parametrize(
    ("lookup", "dtype"), [("device", "float32"), ("uva", "float16"), ("host", "bfloat16")]
)
def test_drawn_batches_take_what_the_roofline_expects(lookup: Lookup, dtype: DType) -> None:
    problem = replace(two_tables(), exchange_dtype=dtype)
    plan = sharded(problem, lookup, {0: ("gpu:0",), 1: ("gpu:1",)})
    plan = replace(plan, exchange_dtype=dtype)
    expected = Roofline().evaluate(problem, plan)
    drawn = drawn_batches(problem.profile, problem.global_batch_size, BATCHES, seed=3)
    times = [one for _, one in timed(plan, drawn, problem)]
    for number, gpu in enumerate(expected.gpus):
        for phases, cost, fixed_s in (
            ([LOOKUP, UPDATE], gpu.hbm_s, gpu.launch_s),
            (ON_LINK, gpu.link_s, 0.0),
            ([IDS, OUTPUTS, GRADIENTS], gpu.communication_s, 0.0),
        ):
            mean = np.mean([one.phase_s[phases, number].sum() for one in times])
            assert mean - fixed_s == pytest.approx(cost, rel=0.01), (gpu.device, phases)
    dram_s = np.mean([one.dram_s[0] for one in times])
    assert dram_s == pytest.approx(expected.hosts[0].dram_s, rel=0.01)
    total = np.mean([one.sum_s for one in times])
    assert total == pytest.approx(expected.step_time_s, rel=0.01)


@pytest.mark.parametrize(("gpus", "servers"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_servers_take_what_the_roofline_expects(
    gpus: int, servers: int, pipeline: Pipeline
) -> None:
    """One of them holds a table, another one the cold rows of a table on a GPU."""
    small, large = two_tables().profile
    topology = machine(gpus, servers=servers)
    problem = problem_of(small, large, topology=topology, batch_size=512 // gpus)
    problem = replace(problem, pipeline=pipeline, exchange_dtype="bfloat16")
    last = f"host:{servers}"
    shards = [
        replace(whole(problem, "device", "gpu:0"), rows=(0, 100, 1)),
        replace(whole(problem, "host", last), rows=(100, 1000, 1)),
        whole(problem, "host", "host:1", table=1),
    ]
    plan = plan_for(problem, *shards)
    plan = replace(plan, exchange_dtype="bfloat16", pipeline=pipeline)
    expected = Roofline().evaluate(problem, plan)
    found = run(plan, list(drawn_batches(problem.profile, 512, BATCHES, seed=3)), problem)
    work_s = [device.total_s for device in expected.gpus]
    assert found.gpu_s == pytest.approx(work_s, rel=0.01)
    # The slowest phases of single batches vary a little; the last has no batch beside it.
    steps = [one.step_s for one in found.records[:-2]]
    assert np.mean(steps) == pytest.approx(expected.step_time_s, rel=0.01)
    assert expected.gpus[-1].total_s > expected.gpus[0].total_s


@pytest.mark.parametrize("gpus", [1, 2])
def test_what_a_plan_costs_however_little_it_reads_is_what_the_model_says(gpus: int) -> None:
    """Fixed times of calibrated constants: arenas, column slices and shards."""
    fixed = ("step", "arena", "arena_cached", "column_slice", "rowwise_slice", "shard")
    constants = {term: SECONDS[term] if term in fixed else 0.0 for term in TERMS}
    model = Calibrated(calibration(**constants))
    for case in random_cases(6, 12, gpus=gpus):
        problem, plan = case.problem(), case.plan()
        drawn = drawn_batches(problem.profile, 4, 1, seed=0)
        ((_, found),) = timed(plan, drawn, problem, model)
        expected = [gpu.launch_s for gpu in model.evaluate(problem, plan).gpus]
        assert found.gpu_s == pytest.approx(expected, rel=1e-9)
        assert model.schedule(problem).fixed_s == (SECONDS["step"],)


def test_lookups_of_rows_that_do_not_follow_ids_cost_more() -> None:
    """With hot and cold rows alone they do, where ranks are ids."""
    model = Calibrated(calibration(**dict.fromkeys(TERMS, 0.0) | {"mapped_lookup": 1e-6}))
    problem = problem_of(zipf_table("a", 5000, 8, lookups=4), topology=machine(1), batch_size=512)
    rows = ((0, 50, 1), (50, 2000, 1), (2000, 5000, 1))
    ways: tuple[Lookup, ...] = ("device", "uva", "host")
    for number in (1, 2, 3):
        cuts = [*rows[: number - 1], (rows[number - 1][0], 5000, 1)]
        each = zip(ways, cuts, strict=False)
        shards = [replace(whole(problem, way, "gpu:0"), rows=cut) for way, cut in each]
        plan = plan_for(problem, *shards)
        counts, found = of_one_batch(plan, problem, model)
        expected = 1e-6 * counts.parts.lookups.sum() if number > 2 else 0.0
        gpu = model.evaluate(problem, plan).gpus[0]
        assert found.gpu_s[0] - gpu.launch_s == pytest.approx(expected)
        assert gpu.total_s == pytest.approx(1e-6 * 4 * 512 if number > 2 else 0.0, abs=1e-6)


@pytest.mark.parametrize("ways", [["device"], ["device", "staged"], ["device", "staged", "host"]])
def test_arenas_take_what_all_their_lookups_do(ways: list[Lookup]) -> None:
    """Of one arena with a table for each way, whichever of them a lookup is of."""
    seconds = {"arena_cached_lookup": 1e-6, "arena_pooled_lookup": 1e-4}
    model = Calibrated(calibration(**dict.fromkeys(TERMS, 0.0) | seconds))
    tables = [zipf_table(f"t{number}", 5000, 8, lookups=4) for number in range(len(ways))]
    problem = problem_of(*tables, topology=machine(1), batch_size=512)
    shards = [whole(problem, way, "gpu:0", table=number) for number, way in enumerate(ways)]
    plan = plan_for(problem, *shards)
    counts, found = of_one_batch(plan, problem, model)
    lookups = int(counts.parts.lookups.sum())
    # The row cache has no more rows to find than there are staged ones.
    expected = ("staged" in ways) * 1e-6 * min(lookups, 5000) + ("host" in ways) * 1e-4 * lookups
    assert found.gpu_s[0] == pytest.approx(expected, abs=1e-6)
    predicted = model.evaluate(problem, plan).gpus[0].total_s
    assert predicted == pytest.approx(expected, rel=0.05, abs=1e-6)


def test_staged_rows_that_never_repeat_take_what_the_roofline_expects() -> None:
    problem = two_tables()
    shard = whole(problem, "staged", "gpu:1", table=1)
    profile = problem.profile.tables[1]
    shard = with_buffers(profile, shard, samples=problem.global_batch_size, returns_bags=True)
    plan = plan_for(problem, whole(problem, "device", "gpu:0"), shard)
    expected = Roofline().evaluate(problem, plan)
    drawn = drawn_batches(problem.profile, problem.global_batch_size, 20, seed=3)
    times = [one for _, one in timed(plan, drawn, problem)][4:]  # Rows go back from then.
    link_s = np.mean([one.phase_s[ON_LINK, 1].sum() for one in times])
    assert link_s == pytest.approx(expected.gpus[1].link_s, rel=0.02)
    assert np.mean([one.phase_s[[IDS, COPIES], 1].sum() for one in times]) > link_s
    overlap = [one.overlapped_s(one, one) for one in times]
    assert max(overlap) < min(one.sum_s for one in times)


def test_a_cache_that_keeps_its_rows_takes_what_the_roofline_expects() -> None:
    """By rank, a cache of the hottest rows holds what the model takes it to hold."""
    table = zipf_table("t", 300_000, 8, lookups=4, exponent=1.1)
    problem = problem_of(table, topology=machine(1), batch_size=512)
    shard = replace(whole(problem, "cached"), cache_rows=2000)
    shard = with_buffers(table, shard, samples=512, returns_bags=True)
    plan = plan_for(problem, shard)
    expected = Roofline().evaluate(problem, plan)
    found = run(plan, list(drawn_batches(problem.profile, 512, 20)), problem, cache_policy="rank")
    hits = found.totals.parts
    share = hits.hit_lookups.sum() / hits.lookups.sum()
    # Rows that are staged still from the batches before hit too.
    assert expected.hbm_lookup_share <= share < expected.hbm_lookup_share + 0.03
    assert found.gpu_s[0] == pytest.approx(expected.gpus[0].total_s, rel=0.05)


def test_replicas_update_what_all_of_them_read() -> None:
    problem = problem_of(zipf_table("a", 50, 16, lookups=2), topology=machine(2), batch_size=64)
    plan = sharded(problem, "device", {0: ("gpu:0", "gpu:1")})
    (batch,) = drawn_batches(problem.profile, 128, 1)
    plain = Roofline(RooflineConstants(1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0))
    ((counts, times),) = timed(plan, [batch], problem, plain)
    distinct = np.unique(batch.features["a"].ids).size
    work = counts.parts.lookups * (8 + 112 + 2 * 64) + 2 * distinct * 68
    work += 2 * counts.served.output_bytes[0]
    launched_s = (1 + UPDATE_KERNELS) * problem.topology.gpus[0].launch_s
    assert times.phase_s[[LOOKUP, UPDATE]].sum(axis=0) == pytest.approx(work / 1e12 + launched_s)
    assert counts.parts.update_rows.tolist() == [distinct, distinct]
    assert (counts.parts.rows <= distinct).all()
    # Of each row all but one of its holders send 64 bytes and an id, and it comes back once.
    own = [np.unique(part).size for part in np.split(batch.features["a"].ids, 2)]
    crossing = counts.sent["replicas"].sum() - np.diag(counts.sent["replicas"]).sum()
    assert crossing <= 72 * (sum(own) + distinct)


def times_of(ahead: float, within: float) -> StepTimes:
    none, phase_s = np.zeros(1), np.zeros((8, 1))
    phase_s[[COPIES, LOOKUP], 0] = ahead, within
    problem = problem_of(zipf_table("t0", 4, 16), topology=machine(1))
    schedules = {one: schedule_of(replace(problem, pipeline=one)) for one in PIPELINES}
    return StepTimes(phase_s, none, none, schedules)


def test_copies_run_beside_the_step_before() -> None:
    first, second = times_of(3, 10), times_of(12, 5)
    assert first.sum_s == 13
    assert first.overlapped_s(second) == 12  # The second one's copies take longer.
    assert second.overlapped_s(first) == 5
    assert second.overlapped_s() == 5


def test_without_look_ahead_steps_take_the_sum() -> None:
    problem = two_tables()
    plan = sharded(problem, "staged", {0: ("gpu:0",), 1: ("gpu:1",)})
    batches = list(drawn_batches(problem.profile, 64, 4))
    found = run(plan, batches, problem, look_ahead=False)
    assert all(one.step_s == one.sum_s for one in found.records)
    beside = run(plan, batches, problem)
    assert all(one.step_s < one.sum_s for one in beside.records[:-1])


def test_draws_follow_the_profile() -> None:
    counts = [1, 50, 0, 9, 40]
    table = counted_table("t", counts, lookups=2.5)
    cold = replace(table.table, features=(Feature("t", 2.5, 0.4),))
    problem = problem_of(replace(table, table=cold))
    ids, samples, bags = [], 0, 0
    for chunk in drawn_batches(problem.profile, 5000, 4, seed=1):
        found = chunk.features["t"]
        samples, bags = samples + chunk.samples, bags + np.count_nonzero(np.diff(found.offsets))
        ids.append(found.ids)
    drawn = np.bincount(np.concatenate(ids), minlength=5)
    assert drawn[2] == 0
    assert drawn.sum() == pytest.approx(samples, rel=0.05)  # 2.5 lookups in 0.4 of them.
    assert bags == pytest.approx(0.4 * samples, rel=0.05)
    assert drawn / drawn.sum() == pytest.approx(np.array(counts) / 100, abs=0.01)
    again = next(drawn_batches(problem.profile, 5000, 1, seed=1)).features["t"].ids
    assert np.array_equal(ids[0], again)
    with pytest.raises(ProfileError, match="0 batches of 5 samples"):
        next(drawn_batches(problem.profile, 5, 0))


def test_drawn_batches_follow_the_row_orders_of_tables_without_counts() -> None:
    profile = next(random_cases(2, 1)).profile
    table = next(iter(profile)).table
    orders = {table.name: Ranks.of(np.arange(500)[::-1])}
    straight, turned = (
        next(drawn_batches(profile, 32, 1, orders=given)).features for given in (None, orders)
    )
    feature = table.features[0].name
    hot = straight[feature].ids < 500
    assert hot.any()
    assert (turned[feature].ids[hot] == 499 - straight[feature].ids[hot]).all()
    assert (turned[feature].ids[~hot] == straight[feature].ids[~hot]).all()


def cached_plan(rows: int, entries: int, staging: int = 0) -> Plan:
    table = Table("t", rows, 4, features=(Feature("f"),), optimizer="sgd")
    shard = Shard("t", (0, rows, 1), (0, 4), ("gpu:0",), "dram", "cached", entries, staging)
    return Plan((table,), machine(1), (shard,))


def test_an_unknown_policy_is_told_with_those_that_there_are() -> None:
    with pytest.raises(PlacerError, match=r"'clock'.*lfu, rank"):
        Simulator(cached_plan(9, 3), ReplayOptions(cache_policy="clock"))  # type: ignore[arg-type]


def test_a_lookup_counts_once_whatever_the_column_slices() -> None:
    """A quarter of the columns is in HBM; claims and replays say that of the lookups, too."""
    table = Table("t", 8, 16, features=(Feature("f"),))
    near = Shard("t", (0, 8, 1), (0, 4), ("gpu:0",), "hbm", "device")
    far = Shard("t", (0, 8, 1), (4, 16), ("gpu:0",), "dram", "uva")
    plan = Plan((table,), machine(1), (near, far), batch_size=4)
    simulator = Simulator(plan, ReplayOptions(look_ahead=False))
    batches = [one_id_chunk(np.array([0, 1, 2, 3]))] * 3
    found = replayed(simulator, StepTimer(simulator.arrangement, Roofline()), batches)
    by = served(simulator.arrangement, found.totals.parts)
    assert (by.lookups, by.hbm_lookups) == (12, 3)
    [record] = {(one.lookups, one.hbm_lookups) for one in found.records}
    assert record == (4, 1)
    gpu = device_totals(simulator.arrangement, found.totals, simulator.cache_entries)[0]
    assert (gpu.lookups, gpu.hbm_share) == (12, 0.25)
    profile = TableProfile.counted(table, RowCounts.from_dense(np.ones(8, np.uint32)), {})
    problem = Problem(Profile((profile,), samples=8), machine(1), batch_size=4)
    assert Roofline().evaluate(problem, plan).hbm_lookup_share == pytest.approx(0.25)


def test_bytes_of_a_small_case_by_hand() -> None:
    """Four rows of 16 bytes; two entries, of which the warm-up takes one."""
    plan = cached_plan(4, 1, 1)
    simulator = Simulator(plan, ReplayOptions(look_ahead=False))
    batches = [one_id_chunk(np.array(ids)) for ids in ([0, 0, 1], [1, 2, 3], [1, 1])]
    found = replayed(simulator, StepTimer(simulator.arrangement, Roofline()), batches)
    # Step 1: 0 hits twice, 1 takes the free entry. Step 2: 1 hits, 2 takes 0's entry, which was
    # updated and goes back, 3 stays in place. Step 3: 1 hits.
    gpu, host = device_totals(simulator.arrangement, found.totals, simulator.cache_entries)
    assert (gpu.lookups, gpu.rows, gpu.hbm_lookups) == (8, 6, 5)
    assert (gpu.staged_rows, gpu.in_place_rows, gpu.written_back_rows) == (2, 1, 1)
    assert (gpu.link_in_bytes, gpu.link_out_bytes) == (2 * 16 + 2 * 16, 16 + 16)
    assert (host.dram_read_bytes, host.dram_written_bytes) == (64, 32)
    assert gpu.hbm_read_bytes == 7 * 16 + 5 * 16 + 16
    assert gpu.hbm_written_bytes == 5 * 16 + 2 * 16
    assert (gpu.cache_entries, gpu.most_held, gpu.most_needed) == (2, 2, 3)
    assert served(simulator.arrangement, found.totals.parts).slow_rows == 3


@given(st.integers(0, 2**32), st.booleans())
@examples(15)
def test_more_entries_never_ask_for_more_and_hold_no_less(seed: int, ahead: bool) -> None:
    rng = np.random.default_rng(seed)
    batches = [one_id_chunk((60 * rng.random(40) ** 2).astype(np.int64)) for _ in range(6)]
    few, many = (run(cached_plan(60, entries, 5), batches, look_ahead=ahead) for entries in (5, 60))
    assert few.totals.needed == many.totals.needed
    assert (few.totals.parts.in_place_rows >= many.totals.parts.in_place_rows).all()
    assert many.totals.parts.in_place_rows.sum() == 0


def test_windows_tell_what_was_lost_and_when_another_plan_pays() -> None:
    def record(hits: int, step_s: float) -> StepRecord:
        return StepRecord(100, hits, 100 - hits, 0, 0, step_s, step_s)

    day = [record(90, 1.0)] * 3 + [record(60, 3.0)] * 4
    first, second = equal_windows("day", day, 2)
    assert (first.steps, second.steps) == (3, 4)
    assert (first.hbm_share, second.hbm_share) == (0.9, 0.6)
    assert second.slow_lookups == second.slow_rows == 40
    other = [Window.of("day", [record(85, 1.5)] * 3)] * 2
    before, after = drifted((first, second), other, 30.0)
    assert (before.lost_share, before.break_even_steps) == (0.0, None)  # It is slower there.
    assert after.lost_share == pytest.approx(0.3)
    assert after.break_even_steps == pytest.approx(20.0)  # 30 s over 1.5 s a step.
    assert drifted((second,), other[:1], 0.0)[0].break_even_steps == 0
    assert drifted((second,), None, None)[0].break_even_steps is None
    with pytest.raises(DataError, match="7 steps, which do not make 8 windows"):
        equal_windows("day", day, 8)


def test_copies_delay_kernels_only_if_they_run_beside_them() -> None:
    problem = two_tables()
    plan = sharded(problem, "staged", {0: ("gpu:0",), 1: ("gpu:1",)})
    batches = list(drawn_batches(problem.profile, 64, 1))
    serial, ahead = (
        timed(replace(plan, pipeline=one), batches, problem, Roofline(EXECUTOR))[0][1].gpu_s
        for one in ("serial", "look-ahead")
    )
    assert (serial < ahead).all()


def test_what_cannot_be_timed_is_refused() -> None:
    problem = two_tables()
    plan = sharded(problem, "device", {0: ("gpu:0",), 1: ("gpu:1",)})
    beside = problem_of(zipf_table("t", 10), topology=machine(3, servers=1))
    on_server = plan_for(beside, whole(beside, "host", "host:1"))
    with pytest.raises(PlanMismatchError, match="host:1 without a GPU serves rows, which takes"):
        Simulator(on_server, ReplayOptions(2))
    with pytest.raises(PlanMismatchError, match="3 processes cannot share 2 GPUs"):
        Simulator(plan, ReplayOptions(3))
    fewer = Profile((problem.profile["a"],))
    longer = Profile((zipf_table("a", 1001, 16), problem.profile["b"]))
    all_of, alone = Simulator(plan), Simulator(plan, ReplayOptions(1))
    for simulator, model, profile, error, words in (
        (Simulator(on_server, ReplayOptions(1)), Roofline(), None, PlanMismatchError,
         "of the 3 GPUs and each of 1 servers, not 1 proc"),
        (alone, Roofline(), None, PlanMismatchError, "one process for each of the 2 GPUs"),
        (all_of, TorchRec(), None, PlacerError, "'torchrec' has no constants"),
        (all_of, Roofline(), fewer, ProfileError, "no table 'b' in the profile"),
        (all_of, Roofline(), longer, PlanMismatchError,
         "'a' is 1000 × 16 in the plan but 1001 × 16 in"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            StepTimer(simulator.arrangement, model, profile)
    with pytest.raises(DataError, match="no batch"):
        run(plan, [], problem)
    with pytest.raises(DataError, match="no log to replay"):
        simulate(plan, [], Roofline())
    with pytest.raises(PlanMismatchError, match=r"lacks features \['a'\]"):
        run(plan, [one_id_chunk(np.zeros(3, np.int64))], problem)
    with pytest.raises(DataError, match="id 9 is not a row of table 't'"):
        run(cached_plan(9, 3), [one_id_chunk(np.array([9]))])
    summary = TimeSummary.of([1.0, 2.0, 6.0])
    assert (summary.mean_s, summary.p50_s) == (3.0, 2.0)
    assert summary.p99_s == pytest.approx(2.0 + 0.98 * 4.0)
