"""The roofline model by hand."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from benchmark_cases import BENCHMARKS, imported_from
from calibration_cases import calibration
from fast_and_full import examples
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import in_dram, in_hbm, machine
from problem_cases import (
    counted_table,
    crossed_machine,
    plan_for,
    problem_of,
    unequal_machine,
    whole,
    zipf_table,
)

from cost_models import Calibrated, CostReport, Roofline, ShardingOption, TableShard, shards_of
from cost_models.cost_report import PARTS
from cost_models.roofline import UPDATE_KERNELS, RooflineConstants
from cost_models.step_equation.equation import StepEquation
from cost_models.step_equation.loads import ID_BYTES, LENGTH_BYTES, SORT_BYTES_PER_LOOKUP
from cost_models.step_equation.phases import LOOKUP_SHARES, _lookup_shares
from cost_models.step_equation.work import is_mapped
from placer import (
    AccessCdf,
    Constraints,
    Feature,
    Problem,
    Profile,
    Shard,
    Table,
    TableProfile,
    Topology,
)
from placer.constraints.file import TableRule
from placer.dense import DenseLayers
from placer.plan.fields import Lookup
from placer.plan.memory import (
    ROW_CACHE_ENTRY_BYTES,
    STEPS_IN_FLIGHT,
    device_memory,
    index_buffer_bytes,
    staged_rows,
    with_buffers,
)
from placer.plan.verify import violations
from placer.tables import DType
from placer.topology.devices import Drive
from solvers import solve
from solvers.model.build_plan import build_plan
from solvers.model.instance import Instance, Placement

PLAIN = Roofline(RooflineConstants(1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0))
"""The model whose kernels reach all of every bandwidth and move nothing besides rows."""

# The roofline by hand: 8 samples on one GPU of 1e12 B/s, a link of 1e10, host memory of 1e11.
# One table of 4 rows × 16 float32 (64 bytes) with 4 bytes of state, 2 lookups per sample,
# each row as hot as any other.
LOOKED_UP = 16.0
UNIQUE = 4 * (1 - (3 / 4) ** 16)
W, ROW = 64, 68
HBM_ROWS = LOOKED_UP * (ID_BYTES + 2 * W + SORT_BYTES_PER_LOOKUP) + 2 * UNIQUE * ROW
OUTPUT = 8 * W
"""One pooled row per sample, written once and its gradient read once."""

LENGTHS = 8 * LENGTH_BYTES
EXCHANGED = LOOKED_UP * ID_BYTES + LENGTHS + 2 * OUTPUT
"""What all samples ask of a table and get of it, and the gradients."""

IN_FLIGHT = 4 * (1 - (3 / 4) ** 32)
"""Distinct rows of two steps."""

LAUNCHED = (1 + UPDATE_KERNELS) * 1e-6
"""Kernels of an arena: all rows of a GPU are in one here."""

INDEX = index_buffer_bytes(zipf_table("t", 4, 16, lookups=2.0).table, LOOKED_UP, 16)
ENTRY = ROW + ROW_CACHE_ENTRY_BYTES
"""A row in HBM with what says which row it is."""


def uniform(gpus: int = 1, *, hosts: int = 1, pooling: str = "sum") -> Problem:
    table = zipf_table("t", 4, lookups=2.0, exponent=0.0, pooling=pooling)
    batch_size = 8 // (gpus * hosts)
    return problem_of(table, topology=machine(gpus, hosts), batch_size=batch_size)


def roofline(problem: Problem, *shards: Shard) -> CostReport:
    return PLAIN.evaluate(problem, plan_for(problem, *shards))


def evaluated(lookup: Lookup, **constants: float) -> CostReport:
    """The table of `uniform`, read in one way, by `PLAIN` with some other constants."""
    model = Roofline(replace(PLAIN.constants, **constants))
    return model.evaluate(uniform(), plan_for(uniform(), whole(uniform(), lookup)))


def phases_of(report: CostReport) -> dict[str, float]:
    return {phase.name: phase.slowest_s for phase in report.phases}


def parts_of(report: CostReport) -> set[str]:
    """The parts that a step's time is made of; together they are all of it."""
    assert report.parts_s.sum(axis=0) == pytest.approx(report.phase_times_s, abs=1e-18)
    return {part for part, seconds in zip(PARTS, report.parts_s, strict=True) if seconds.any()}


OWN = LOOKED_UP * (ID_BYTES + W + SORT_BYTES_PER_LOOKUP)
READ = LOOKED_UP * W + UNIQUE * ROW


@pytest.mark.parametrize(("lookup", "hbm", "link", "dram", "share"), [
    ("device", HBM_ROWS, 0, 0, 1),
    ("staged", HBM_ROWS + 2 * UNIQUE * ROW, UNIQUE * ROW, 2 * UNIQUE * ROW, 0),
    ("uva", OWN, READ, READ + UNIQUE * ROW, 0),
    # Half of the rows in the cache: half of the lookups hit, half of the rows are staged.
    ("cached", HBM_ROWS + UNIQUE * ROW, UNIQUE / 2 * ROW, UNIQUE * ROW, 0.5),
])  # fmt: skip
def test_ways_to_read_rows_by_hand(
    lookup: Lookup, hbm: float, link: float, dram: float, share: float
) -> None:
    report = evaluated(lookup)
    (gpu,), (host,) = report.gpus, report.hosts
    assert gpu.hbm_s == pytest.approx((hbm + 2 * OUTPUT) / 1e12)
    assert gpu.link_s == pytest.approx(link / 1e10)
    assert host.dram_s == pytest.approx(dram / 1e11)
    assert gpu.launch_s == pytest.approx(LAUNCHED)
    assert gpu.communication_s == 0
    assert report.hbm_lookup_share == pytest.approx(share)
    assert lookup != "device" or report.bottleneck == "gpu:0 update"
    assert parts_of(report) == {"hbm", "launches"} | ({"link"} if link else set())


def test_shares_of_bandwidths_and_bytes_besides_rows_by_hand() -> None:
    """Lookups at half of the bandwidth, updates at a fourth, and 10 and 20 bytes of each lookup."""
    shares = {"lookup_share": 0.5, "update_share": 0.25}
    report = evaluated("device", **shares, lookup_bytes=10.0, update_bytes=20.0)
    lookup = 2 * (LOOKED_UP * (ID_BYTES + 10 + W))
    update = 4 * (LOOKED_UP * (SORT_BYTES_PER_LOOKUP + 20 + W) + 2 * UNIQUE * ROW)
    assert report.gpus[0].hbm_s == pytest.approx((lookup + update + 6 * OUTPUT) / 1e12)
    phases = phases_of(report)
    # What the output takes is half and half; an arena's first kernel is the lookup's.
    assert phases["lookup"] == pytest.approx((lookup + 3 * OUTPUT) / 1e12 + 1e-6)
    assert phases["update"] == pytest.approx((update + 3 * OUTPUT) / 1e12 + UPDATE_KERNELS * 1e-6)


def test_lookups_that_repeat_a_row_cost_a_part_of_it() -> None:
    """Each distinct row once, and a fourth of it for each further lookup; from the host alike."""
    read = UNIQUE * W + 0.25 * (LOOKED_UP - UNIQUE) * W
    saved = (LOOKED_UP * W - read) / 1e12
    before, after = evaluated("device"), evaluated("device", repeat_share=0.25)
    assert before.gpus[0].hbm_s - after.gpus[0].hbm_s == pytest.approx(saved)
    # Four bytes of state are taken for weights here, which the lookup does not read.
    saved_of_lookup = phases_of(before)["lookup"] - phases_of(after)["lookup"]
    assert saved_of_lookup == pytest.approx(saved, rel=0.15)
    in_place = evaluated("uva", repeat_share=0.25)
    assert in_place.gpus[0].link_s == pytest.approx((read + UNIQUE * ROW) / 1e10)
    assert in_place.hosts[0].dram_s == pytest.approx((read + 2 * UNIQUE * ROW) / 1e11)


def test_shares_of_the_host_link_by_hand() -> None:
    """Copies at half of it, rows read in place at a fourth, and their update at an eighth."""
    shares = {"copy_share": 0.5, "in_place_share": 0.25, "in_place_update_share": 0.125}
    staged, in_place = (evaluated(way, **shares).gpus[0].link_s for way in ("staged", "uva"))
    assert staged == pytest.approx(2 * UNIQUE * ROW / 1e10)
    assert in_place == pytest.approx((4 * LOOKED_UP * W + 8 * UNIQUE * ROW) / 1e10)


@pytest.mark.parametrize(("lookup", "serial_s", "ahead_s"), [
    ("device", 1.0, 1.0),
    ("uva", 1.0, 1.0),
    # Copies reach 1e2 bytes a second. Beside a step, half of their time counts.
    ("staged", 1.0 + 8.0 + UNIQUE * ROW / 1e2, 1.0 + 8.0 + UNIQUE * ROW / 2e2),
    # Two of four rows are in the cache.
    ("cached", 1.0 + 8.0 + UNIQUE * ROW / 2e2, 1.0 + 8.0 + UNIQUE * ROW / 4e2),
])  # fmt: skip
def test_what_an_executor_takes_besides_by_hand(
    lookup: Lookup, serial_s: float, ahead_s: float
) -> None:
    """Seconds beside which other bytes take none: of an arena, its staging, and its copies."""
    added = {"arena_s": 1.0, "staging_s": 8.0, "beside_copies_share": 0.5, "copy_share": 1e-8}
    model = Roofline(replace(PLAIN.constants, **added))
    for pipeline, expected in (("serial", serial_s), ("look-ahead", ahead_s)):
        problem = replace(uniform(), pipeline=pipeline)  # type: ignore[arg-type]
        plan = plan_for(problem, whole(problem, lookup))
        assert model.evaluate(problem, plan).step_time_s == pytest.approx(expected, rel=1e-4)


def test_a_cache_is_probed_for_every_lookup() -> None:
    """Hits and misses alike, ahead of the lookup; a table that is in HBM is not probed."""
    for lookup, bytes_each in (("cached", 1000.0), ("staged", 0.0), ("device", 0.0)):
        with_probes, plain = evaluated(lookup, probe_bytes=1000.0), evaluated(lookup)
        probed_s = with_probes.gpus[0].hbm_s - plain.gpus[0].hbm_s
        assert probed_s == pytest.approx(LOOKED_UP * bytes_each / 1e12, rel=1e-6, abs=0)


def test_narrow_rows_take_more_than_their_bytes() -> None:
    """Rows of 128 columns were measured to take 4.65 times those of 16, not 8 times."""

    def lookup_s(dim: int) -> float:
        table = zipf_table("t", 100_000, dim, lookups=100.0, exponent=0.0)
        problem = problem_of(table, topology=machine(1))
        report = Roofline().evaluate(problem, plan_for(problem, whole(problem, "device")))
        return phases_of(report)["lookup"] - 1e-6

    assert lookup_s(128) / lookup_s(16) == pytest.approx(4.65, rel=0.15)
    assert 1.8 < lookup_s(128) / lookup_s(64) < 2


def test_trainers_add_to_steps_with_dense_layers() -> None:
    layers = DenseLayers(top=(1,), flops_per_s=1e12)
    model = Roofline(RooflineConstants(step_s=1.0, exchange_step_s=2.0))
    assert max(model.schedule(uniform()).fixed_s) < 1
    for gpus, fixed_s in ((2, 3.0), (1, 1.0)):
        with_dense = replace(uniform(gpus), dense=layers)
        assert model.schedule(with_dense).fixed_s[0] == pytest.approx(fixed_s, rel=1e-3)


def test_the_error_is_known_of_machines_that_others_have_measured() -> None:
    report = evaluated("device")
    assert report.relative_error == RooflineConstants().relative_error
    emulated = replace(uniform(), topology=replace(machine(1), emulated=True))
    assert roofline(emulated, whole(emulated, "device")).relative_error is None


def test_rows_pooled_by_the_host_by_hand() -> None:
    by_gpu = evaluated("host")
    (gpu,), (host,) = by_gpu.gpus, by_gpu.hosts
    # Vectors and their gradients, and until the host's processors are done.
    assert gpu.link_s == pytest.approx(2 * OUTPUT / 1e10 + HBM_ROWS / 1e11)
    assert host.dram_s == pytest.approx(HBM_ROWS / 1e11)
    assert parts_of(by_gpu) == {"hbm", "pooling", "launches"}
    # A host that serves by itself sends to each of its GPUs what that GPU's samples need.
    pair = uniform(2)
    by_host = roofline(pair, whole(pair, "host", "host:0"))
    each_s = OUTPUT / 1e10 + HBM_ROWS / 2 / 1e11
    assert [g.link_s for g in by_host.gpus] == pytest.approx([each_s] * 2)
    assert by_host.hosts[0].dram_s == pytest.approx(HBM_ROWS / 1e11)
    assert [g.launch_s for g in by_host.gpus] == [0, 0]
    # Processors that reach half of the memory's bandwidth take twice as long.
    halved = evaluated("host", host_pool_share=0.5)
    assert halved.gpus[0].link_s == pytest.approx(2 * OUTPUT / 1e10 + 2 * HBM_ROWS / 1e11)
    assert halved.hosts[0].dram_s == pytest.approx(2 * HBM_ROWS / 1e11)


def with_servers(servers: int, dram_bytes_per_s: float = 1e11) -> Problem:
    topology = machine(1, servers=servers)
    hosts = (replace(host, dram_bytes_per_s=dram_bytes_per_s) for host in topology.servers)
    return replace(
        uniform(), topology=replace(topology, hosts=(topology.hosts[0], *hosts)), batch_size=8
    )


def test_rows_pooled_by_a_server_by_hand() -> None:
    problem = replace(with_servers(1), pipeline="serial")
    report = roofline(problem, whole(problem, "host", "host:1"))
    gpu, server = report.gpus
    assert (server.device, gpu.total_s) == ("host:1", 0.0)
    assert (server.hbm_s, server.launch_s) == (0.0, 0.0)
    assert server.link_s == pytest.approx(HBM_ROWS / 1e11)
    assert [host.dram_s for host in report.hosts] == pytest.approx([0.0, HBM_ROWS / 1e11])
    # All of it crosses the network, even where a GPU alone would exchange nothing.
    assert server.communication_s == pytest.approx(EXCHANGED / 1e10)
    phases = {phase.name: (phase.slowest, phase.slowest_s) for phase in report.phases}
    assert phases["outputs"] == ("host:1", pytest.approx(OUTPUT / 1e10))
    assert phases["gradients"] == ("host:1", pytest.approx(OUTPUT / 1e10))
    lookup = LOOKED_UP * (ID_BYTES + W)
    assert phases["lookup"] == ("host:1", pytest.approx(lookup / 1e11))
    assert phases["update"] == ("host:1", pytest.approx((HBM_ROWS - lookup) / 1e11))
    assert report.balance == 0.0
    # Of two servers, each has half of the only GPU's link; slower memory takes longer.
    slow = with_servers(2, 5e10)
    (_, first, second) = roofline(slow, whole(slow, "host", "host:2")).gpus
    assert first.total_s == 0.0
    assert second.link_s == pytest.approx(2 * HBM_ROWS / 1e11)
    assert second.communication_s == pytest.approx(2 * EXCHANGED / 1e10)


@pytest.mark.parametrize("model", [PLAIN, Roofline(), Calibrated(calibration())])
def test_curves_of_servers_are_what_their_plans_cost(model: StepEquation) -> None:
    problem = with_servers(2)
    assert model.arena_costs(problem, 1) is None
    for option in (ShardingOption(), ShardingOption(2), ShardingOption(1, (8, 8), cold="uva")):
        rows = (0, 4, option.row_slices)
        cols = (0, 8) if option.column_widths else (0, 16)
        shard = Shard("t", rows, cols, ("host:1",), "dram", "host")
        plan = plan_for(problem, model.with_buffers(problem, 0, shard, returns_bags=True))
        # The rest of a table in column slices says that there are some.
        rest = replace(shard, cols=(8, 16), devices=("host:2",))
        plan = replace(plan, shards=(*plan.shards, rest) if option.column_widths else plan.shards)
        report = model.evaluate(problem, plan)
        curve = model.cost_curve(problem, TableShard(0, option), 1)
        assert curve.hot_rows.tolist() == [0]
        assert curve.gpu_s[0] == pytest.approx(report.gpus[1].total_s)
        assert curve.dram_s[0] == pytest.approx(report.hosts[1].dram_s)
        used = device_memory(plan)["host:1"].total_bytes
        assert used <= curve.hbm_bytes[0] <= used + 1
        assert curve.phase_s[:, 0] == pytest.approx(np.array(report.phase_s)[:, 1])


@pytest.mark.parametrize(
    "option",
    [
        ShardingOption(),
        ShardingOption(2),
        ShardingOption(2, blocked=True),
        ShardingOption(replicated_rows=1),
    ],
    ids=str,
)
def test_curves_of_servers_count_the_maps_of_their_rows(option: ShardingOption) -> None:
    problem = problem_of(counted_table("t", [4, 3, 2, 1]), topology=machine(1, servers=2))
    instance = Instance(problem, Roofline())
    shards = instance.shards(0, option)
    placements = [Placement(shard, gpu, 0) for gpu, shard in enumerate(shards, 1)]
    memory = device_memory(build_plan(instance, placements, instance.replicas(0, option)))
    for gpu, shard in enumerate(shards, 1):
        used = memory[f"host:{gpu}"].total_bytes
        assert used <= instance.curve(shard, gpu).hbm_bytes[0] <= used + 1


def test_hosts_pool_as_slowly_as_an_h100_waited_for() -> None:
    """The steps of a host that pools: predictions are as often too long as too short."""
    predictions = imported_from(BENCHMARKS, "_gpu_predictions").predictions
    recording = BENCHMARKS / "results" / "gpu-nvidia-h100-80gb-hbm3.json"
    measured = json.loads(recording.read_text())
    few = [r for r in measured["records"] if r["contender"] == "host" and r["skew"] != "criteo"]
    ratios = [
        predicted_s / record["step_s"]
        for record, predicted_s, _ in predictions({**measured, "records": few}, "1xh100")
    ]
    assert len(ratios) == 8
    assert 0.85 < np.exp(np.mean(np.log(ratios))) < 1.15
    assert min(ratios) > 0.5
    assert max(ratios) < 1.5


def test_a_host_does_not_pool_while_hbm_is_empty() -> None:
    """4M rows of 128 with Adam on an A10 of 4 GiB: a host was taken for 1%, 92% of HBM free."""
    table = Table("t", 4_000_000, 128, "float32", "adam", (Feature("f", 20.0),))
    profile = Profile((TableProfile(table, AccessCdf.zipf(4_000_000, 1.05)),))
    problem = Problem(profile, Topology.parse("1xa10", hbm="4GiB"), 8192)
    plan = solve(problem, "greedy-cost").plan
    rule = TableRule(forbid=frozenset({"staged", "uva", "cached"}))
    only_host = Constraints(tables=(("t", rule),))
    by_host = solve(replace(problem, constraints=only_host), "greedy-cost")
    assert {shard.lookup for shard in plan.shards} == {"device", "staged"}
    assert device_memory(plan)["gpu:0"].total_bytes > 0.9 * 4 * 2**30
    assert by_host.step_time_s > Roofline().evaluate(problem, plan).step_time_s


def test_ways_to_read_rows_do_not_depend_on_the_order_of_gpus() -> None:
    """Whether a host may pool was asked of the first GPU alone."""
    topology = machine(1, 2)
    links = tuple(
        replace(link, bytes_per_s=1e8 if link.a == "gpu:1" else 1e14) for link in topology.links
    )
    table = zipf_table("t", 1_000_000, lookups=50.0, exponent=0.0)
    ways = []
    for gpus in (topology.gpus, topology.gpus[::-1]):
        unequal = replace(topology, links=links, gpus=gpus)
        problem = problem_of(table, topology=unequal, batch_size=1024)
        ways.append(Roofline().sharding_options(problem, 0))
    assert "host" in {option.cold for option in ways[1]}
    assert ways[0] == ways[1]


def test_the_exchange_by_hand() -> None:
    """Of what a GPU of two serves, half is another's: ids and lengths come, rows go, gradients
    come."""
    pair = uniform(2)
    report = roofline(pair, whole(pair, "device", "gpu:1"))
    idle, busy = report.gpus
    assert idle.total_s == 0
    assert busy.communication_s == pytest.approx(EXCHANGED / 2 / 1e11)
    assert report.balance == 0.5
    # Two hosts of one GPU: the network of 1e10 B/s takes what NVLink took before.
    pair = uniform(1, hosts=2)
    busy = roofline(pair, whole(pair, "device", "gpu:1")).gpus[1]
    assert busy.communication_s == pytest.approx(EXCHANGED / 2 / 1e10)


def test_replicas_by_hand() -> None:
    """Each GPU looks its own samples up; the gradients of touched rows are all-reduced."""
    pair = uniform(2)
    report = roofline(pair, whole(pair, "device", "gpu:0", "gpu:1"))
    one, two = report.gpus
    assert one == replace(two, device="gpu:0")
    unique = 4 * (1 - (3 / 4) ** 8)
    own = LOOKED_UP / 2 * (ID_BYTES + 2 * W + SORT_BYTES_PER_LOOKUP) + 2 * unique * ROW
    assert one.hbm_s == pytest.approx((own + OUTPUT) / 1e12)
    assert one.communication_s == pytest.approx((unique + UNIQUE) * (W + ID_BYTES) / 2 / 1e11)
    assert report.hbm_lookup_share == pytest.approx(1)


@pytest.mark.parametrize(("pooling", "dtype", "exchanged", "sent"), [
    ("none", "float32", "float32", LOOKED_UP * ID_BYTES + LENGTHS + 2 * LOOKED_UP * W),
    ("max", "float32", "float32", EXCHANGED),
    ("sum", "float16", "float32", EXCHANGED),  # Pooled rows of half precision are float32.
    ("sum", "float32", "bfloat16", LOOKED_UP * ID_BYTES + LENGTHS + OUTPUT),
])  # fmt: skip
def test_what_a_gpu_of_two_sends(pooling: str, dtype: DType, exchanged: Any, sent: float) -> None:
    pair = replace(uniform(2, pooling=pooling), exchange_dtype=exchanged)
    (profile,) = pair.profile
    typed = replace(profile, table=replace(profile.table, dtype=dtype))
    problem = replace(pair, profile=replace(pair.profile, tables=(typed,)))
    busy = roofline(problem, whole(problem, "device")).gpus[0]
    assert busy.communication_s == pytest.approx(sent / 2 / 1e11)
    usual = replace(problem, exchange_dtype="float32")
    assert busy.hbm_s == roofline(usual, whole(usual, "device")).gpus[0].hbm_s
    curve = PLAIN.cost_curve(problem, TableShard(0, ShardingOption(1)), 0)
    assert curve.gpu_s[-1] + LAUNCHED == pytest.approx(busy.total_s)


def test_row_slices_each_send_a_part_of_the_bag_and_shards_of_one_gpu_pool_together() -> None:
    pair = uniform(2)
    apart = roofline(pair, *(in_hbm("t", (i, 4, 2), (0, 16), f"gpu:{i}") for i in range(2)))
    half = (LOOKED_UP / 2 * ID_BYTES + LENGTHS + 2 * OUTPUT) / 2 / 1e11
    assert [gpu.communication_s for gpu in apart.gpus] == pytest.approx([half, half])
    together = roofline(pair, in_hbm("t", (0, 2, 1), (0, 16)), in_dram("t", (2, 4, 1), (0, 16)))
    assert together.gpus[0].communication_s == pytest.approx(EXCHANGED / 2 / 1e11)
    assert together.gpus[0].launch_s == pytest.approx(LAUNCHED)
    assert together.hbm_lookup_share == pytest.approx(0.5)


def test_strips_of_columns_send_their_columns() -> None:
    pair = uniform(2)
    strips = enumerate([(0, 4), (4, 16)])
    shards = [in_hbm("t", (0, 4, 1), cols, f"gpu:{i}") for i, cols in strips]
    narrow, wide = roofline(pair, *shards).gpus
    ids = LOOKED_UP * ID_BYTES + LENGTHS
    squares = 4 * UNIQUE  # All of it goes to the other GPU.
    assert narrow.communication_s == pytest.approx(((ids + OUTPUT / 2) / 2 + squares) / 1e11)
    assert wide.communication_s == pytest.approx(((ids + OUTPUT * 3 / 2) / 2 + squares) / 1e11)


def test_row_slices_under_max_send_rows_one_by_one() -> None:
    pair = uniform(2, pooling="max")
    (profile,) = pair.profile
    features = (*profile.table.features, Feature("in no sample", coverage=0.0, pooling="max"))
    more = replace(profile, table=replace(profile.table, features=features))
    unread = replace(pair, profile=replace(pair.profile, tables=(more,)))
    slices = [in_hbm("t", (i, 4, 2), (0, 16), f"gpu:{i}") for i in range(2)]
    sent = LOOKED_UP / 2 * ID_BYTES + LENGTHS + 2 * LOOKED_UP / 2 * W
    for gpu in (*roofline(pair, *slices).gpus, *roofline(unread, *slices).gpus):
        assert gpu.communication_s == pytest.approx(sent / 2 / 1e11)
    curve = PLAIN.cost_curve(pair, TableShard(0, ShardingOption(2)), 0)
    assert curve.gpu_s[-1] + LAUNCHED == pytest.approx(roofline(pair, *slices).gpus[0].total_s)


def test_rows_in_the_order_of_their_ids_need_no_map() -> None:
    drawn, counted = zipf_table("t", 4), counted_table("t", [4, 3, 2, 1])
    hot, cold, sliced = (in_hbm("t", rows, (0, 16)) for rows in ((0, 1, 1), (1, 4, 1), (1, 4, 2)))
    assert [is_mapped(drawn, [hot, other]) for other in (cold, sliced)] == [False, True]
    assert [is_mapped(counted, shards) for shards in ([cold], [hot, cold])] == [False, True]
    curves = [
        Calibrated(calibration()).cost_curve(problem_of(table), TableShard(0), 0)
        for table in (drawn, counted)
    ]
    of_drawn, of_counted = (curve.split_phase_s.sum() for curve in curves)
    assert of_drawn < of_counted


def test_replicas_on_some_gpus_serve_the_others_too() -> None:
    """Two replicas on four GPUs: each serves its own fourth of the samples and another's."""
    four = uniform(4)
    report = roofline(four, whole(four, "device", "gpu:0", "gpu:1"))
    unique = 4 * (1 - (3 / 4) ** 8)
    reduced = (unique + UNIQUE) * (W + ID_BYTES) / 2
    served = EXCHANGED / 4  # A fourth of all samples, none of them its own.
    assert report.gpus[0].communication_s == pytest.approx((reduced + served) / 1e11)
    assert report.gpus[2].communication_s == 0


def test_the_step_waits_for_host_memory_that_gpus_share() -> None:
    topology = machine(4)
    slow = replace(topology, hosts=(replace(topology.hosts[0], dram_bytes_per_s=1e7),))
    tables = [zipf_table(f"t{n}", 500, lookups=4.0) for n in range(4)]
    problem = problem_of(*tables, topology=slow)
    shards = [whole(problem, "staged", f"gpu:{n}", table=n) for n in range(4)]
    report = roofline(problem, *shards)
    assert report.bottleneck == "host:0 dram"
    assert report.step_time_s == report.hosts[0].dram_s > report.gpus[0].total_s
    assert [(one.name, one.slowest) for one in report.phases] == [("dram", "host:0")]
    assert sum(one.slowest_s for one in report.phases) == report.step_time_s


def test_a_table_that_nobody_reads_costs_a_launch() -> None:
    problem = problem_of(counted_table("t", [0, 0, 0], lookups=0.0))
    report = roofline(problem, whole(problem, "device"))
    assert report.hbm_lookup_share == 1.0
    assert report.gpus[0].link_s == 0


@pytest.mark.parametrize("lookup", ["device", "uva", "staged", "host"])
@pytest.mark.parametrize("output", [False, True])
def test_buffers_by_hand(lookup: Lookup, output: bool) -> None:
    """Of two steps: integers, and the distinct rows with four standard deviations to spare."""
    problem = uniform()
    shard = replace(whole(problem, lookup), staging_rows=3, buffer_bytes=1)
    found = with_buffers(problem.profile.tables[0], shard, samples=8, returns_bags=output)
    size = INDEX + output * 2 * OUTPUT
    if lookup == "staged":
        size += (IN_FLIGHT + 4 * math.sqrt(IN_FLIGHT)) * ENTRY
    # There are no more rows than four, so no more are staged.
    staging_rows = 4 if lookup == "staged" else 0
    assert found == replace(shard, staging_rows=staging_rows, buffer_bytes=math.ceil(size))


def test_two_steps_share_the_rows_that_both_touch() -> None:
    """1,000 rows and 8 × 100 lookups: of the second step, fewer than half are new."""
    problem = problem_of(zipf_table("t", 1000, lookups=100.0, exponent=0.0), topology=machine(1))
    profile = problem.profile.tables[0]
    found = with_buffers(profile, whole(problem, "staged"), samples=8, returns_bags=False)
    one, two = (1000 * (1 - 0.999 ** (800 * steps)) for steps in (1, 2))
    assert found.staging_rows == math.floor(two + 4 * math.sqrt(two))
    assert two < found.staging_rows < 2 * one
    assert 0.999**1600 * 1000 < 1000 - one < 0.45 * 1000


@given(st.integers(1, 400), st.integers(1, 64), st.sampled_from(["staged", "cached"]), st.data())
@examples(150)
def test_buffers_hold_the_rows_that_are_staged(
    rows: int, samples: int, lookup: Lookup, data: st.DataObject
) -> None:
    """Weights, state and bookkeeping of all staging rows, and the integers; no row too many."""
    exponent, lookups = data.draw(st.floats(0, 1.5)), data.draw(st.floats(0, 30))
    profile = zipf_table("t", rows, lookups=lookups, exponent=exponent)
    table, cdf = profile.table, profile.cdf
    start = data.draw(st.integers(0, rows - 1))
    cache_rows = data.draw(st.integers(1, rows - start)) if lookup == "cached" else 0
    shard = Shard("t", (start, rows, 1), (0, 16), ("gpu:0",), "dram", lookup, cache_rows)
    found = with_buffers(profile, shard, samples=samples, returns_bags=True)
    in_flight = STEPS_IN_FLIGHT * samples * table.lookups_per_sample
    cold = start + cache_rows
    before = np.interp([cold, rows], cdf.ranks, cdf.unique_at_ranks(in_flight))
    expected = min(rows - cold, float(staged_rows(before[1] - before[0])))
    assert expected - 1 - 1e-6 <= found.staging_rows <= expected + 1e-6
    entries = found.staging_rows * (table.bytes_per_row(16) + ROW_CACHE_ENTRY_BYTES)
    index = index_buffer_bytes(table, in_flight / STEPS_IN_FLIGHT, 16)
    index *= 1 - float(cdf.share(start))
    assert found.buffer_bytes >= entries + index - 1e-6
    plan = plan_for(problem_of(profile), found)
    assert [v for v in violations(plan) if v.rule != "coverage"] == []


@given(st.integers(1, 300), st.integers(1, 5), st.booleans(), st.data())
@examples(60)
def test_slices_share_out_all_lookups_and_rows(
    rows: int, row_slices: int, blocked: bool, data: st.DataObject
) -> None:
    """Loads of the slices of a table, strided or in blocks, add up to the table's."""
    counts = data.draw(st.lists(st.integers(0, 50), min_size=rows, max_size=rows))
    profile = counted_table("t", counts, lookups=3.0)
    problem = problem_of(profile, topology=machine(1))
    shards = shards_of(0, ShardingOption(row_slices, blocked=blocked), rows)
    curves = [PLAIN.cost_curve(problem, shard, 0) for shard in shards]
    single = PLAIN.cost_curve(problem, TableShard(0), 0)
    assert len(curves) == row_slices
    assert sum(int(curve.hot_rows[-1]) for curve in curves) == rows
    assert sum(float(c.dram_s[0]) for c in curves) == pytest.approx(float(single.dram_s[0]))
    assert sum(float(c.dram_bytes[0]) for c in curves) == float(single.dram_bytes[0])


def test_the_hottest_rows_on_every_gpu_by_hand() -> None:
    """Two of four rows on both GPUs, the other two in HBM of one: half of all lookups each."""
    pair = uniform(2)
    option = ShardingOption(replicated_rows=2)
    replicated_rows = PLAIN.cost_curve(pair, TableShard.replica(0, option), 1)
    rest = PLAIN.cost_curve(pair, TableShard(0, option), 1)
    unique = 2 * (1 - (3 / 4) ** 8)
    own = LOOKED_UP / 4 * (ID_BYTES + 2 * W + SORT_BYTES_PER_LOOKUP) + 2 * unique * ROW
    reduced = (unique + UNIQUE / 2) * (W + ID_BYTES) / 2 / 1e11
    assert replicated_rows.gpu_s == pytest.approx([(own + OUTPUT) / 1e12 + reduced])
    # Of the lookups of half of the samples, half read the head.
    assert replicated_rows.hbm_bytes == pytest.approx([2 * ROW + OUTPUT + INDEX / 4])
    served = (HBM_ROWS / 2 + 2 * OUTPUT) / 1e12
    exchanged = (LOOKED_UP / 2 * ID_BYTES + LENGTHS + 2 * OUTPUT) / 2 / 1e11
    assert rest.hot_rows.tolist() == [0, 1, 2]
    assert rest.gpu_s[-1] == pytest.approx(served + exchanged)


def test_a_cache_of_every_size_by_hand() -> None:
    """None reads in place, one of all rows is no cache; between, misses are staged."""
    problem = uniform()
    curve = PLAIN.cost_curve(problem, TableShard(0, ShardingOption(cold="cached")), 0)
    assert curve.hot_rows.tolist() == [0, 1, 2, 3, 4]
    in_place = roofline(problem, whole(problem, "uva")).gpus[0].total_s
    resident = roofline(problem, whole(problem, "device")).gpus[0].total_s
    assert curve.gpu_s[[0, -1]] + LAUNCHED == pytest.approx([in_place, resident])
    missed = UNIQUE * 3 / 4
    staged = missed * ROW * (1 / 1e10 + 2 / 1e12)
    assert curve.gpu_s[1] + curve.split_s + LAUNCHED == pytest.approx(resident + staged)
    in_flight = IN_FLIGHT * 3 / 4
    buffers = 2 * OUTPUT + INDEX + (in_flight + 4 * math.sqrt(in_flight)) * ENTRY
    assert curve.hbm_bytes[1] + curve.split_hbm_bytes == pytest.approx(ENTRY + buffers)
    none, rows = 2 * OUTPUT + INDEX, 4 * ROW
    assert curve.hbm_bytes[[0, -1]] == pytest.approx([none, rows + none])
    assert curve.dram_bytes.tolist() == [4 * ROW] * 4 + [0]
    half = replace(whole(problem, "cached"), cache_rows=1)
    found = PLAIN.with_buffers(problem, 0, half, returns_bags=True)
    assert (found.staging_rows, found.buffer_bytes) == (3, math.ceil(buffers))


def test_a_host_that_pools_sends_a_bag_however_few_rows_it_has() -> None:
    problem = uniform()
    curve = PLAIN.cost_curve(problem, TableShard(0, ShardingOption(cold="host")), 0)
    assert curve.hot_rows.tolist() == [0, 1, 2, 3, 4]
    by_host, resident = (
        roofline(problem, whole(problem, lookup)).gpus[0].total_s for lookup in ("host", "device")
    )
    assert curve.gpu_s[[0, -1]] + LAUNCHED == pytest.approx([by_host, resident])
    sent = 2 * OUTPUT / 1e10 + 2 * OUTPUT / 1e12 + HBM_ROWS / 4 / 1e11
    assert curve.gpu_s[3] + LAUNCHED == pytest.approx(resident - HBM_ROWS / 4 / 1e12 + sent)
    assert curve.dram_s == pytest.approx(HBM_ROWS * np.linspace(1, 0, 5) / 1e11)


def options(problem: Problem, table: int = 0) -> tuple[ShardingOption, ...]:
    return PLAIN.sharding_options(problem, table)


def test_the_options_that_are_searched() -> None:
    """Widths of strips fall, as which strip is left of the others does not matter."""
    counted = counted_table("t", [9, 5, 1, 1, 1, 1, 1, 1], 48)
    found = set(options(problem_of(counted, topology=machine(4), batch_size=4)))
    usual = {c for c in found if c.cold == "staged" and not c.replicated_rows}
    assert {c for c in usual if not c.column_widths} == {ShardingOption(w) for w in (1, 2, 3, 4)}
    strips = {c.column_widths for c in usual if c.column_widths and c.row_slices == 1}
    assert strips >= {(32, 16), (16, 16, 16)}
    for column_widths in strips:
        assert sum(column_widths) == 48
        assert list(column_widths) == sorted(column_widths, reverse=True)
        assert all(width % 8 == 0 for width in column_widths)
    both = {c for c in usual if c.column_widths and c.row_slices > 1}
    assert both == {ShardingOption(2, (32, 16))}
    assert {c.row_slices for c in found if c.replicated_rows == 8} == {1}
    assert {c.row_slices for c in found if 0 < c.replicated_rows < 8} >= {1, 2, 4}
    in_place = {c for c in found if c.cold == "uva"}
    assert in_place == {ShardingOption(w, cold="uva") for w in (1, 2, 4)}
    cached = {(c.row_slices, c.column_widths) for c in found if c.cold == "cached"}
    assert cached == {(1, ()), (1, (32, 16))}


def test_the_options_of_a_table_without_much_to_option() -> None:
    whole_table = ShardingOption(1), ShardingOption(1, cold="uva")
    alone = problem_of(zipf_table("t", 100, 64), topology=machine(1))
    assert options(alone) == whole_table
    narrow = problem_of(zipf_table("t", 1, 20), topology=machine(4))
    assert options(narrow) == (*whole_table, ShardingOption(replicated_rows=1))
    none = problem_of(zipf_table("t", 0, 20), topology=machine(4))
    assert options(none) == whole_table


def test_replicas_take_a_part_of_the_smallest_gpu_at_most() -> None:
    profile = zipf_table("t", 1000, 16)
    for share, kinds in ((5, {"none", "some", "all"}), (3, {"none", "some"}), (1e-3, {"none"})):
        gpu_bytes = int(profile.table.total_bytes * share)
        problem = problem_of(profile, topology=machine(2, hbm_bytes=gpu_bytes))
        heads = {option.replicated_rows for option in options(problem)}
        assert {"none" if not h else "all" if h == 1000 else "some" for h in heads} == kinds
        assert all(h * profile.table.bytes_per_row() <= gpu_bytes / 4 for h in heads)


def test_a_host_that_pools_is_searched_where_bags_are_large_and_rows_hardly_repeat() -> None:
    fast = machine(1)
    fast = replace(fast, hosts=(replace(fast.hosts[0], dram_bytes_per_s=1e12),))
    wide = zipf_table("t", 1_000_000, 64, lookups=50.0, exponent=0.1)
    repeated = zipf_table("t", 10, 64, lookups=2.0, exponent=0.1)
    assert "host" in {c.cold for c in options(problem_of(wide, topology=fast))}
    assert "host" not in {c.cold for c in options(problem_of(repeated, topology=fast))}
    assert "host" not in {c.cold for c in options(problem_of(wide, topology=machine(8)))}


def test_what_a_option_adds_is_known_where_one_kind_of_gpu_is_best_at_everything() -> None:
    table = zipf_table("t", 100)
    assert PLAIN.sharding_overhead_s(problem_of(table, topology=unequal_machine())) == 0
    assert PLAIN.sharding_overhead_s(problem_of(table, topology=crossed_machine())) is None


@pytest.mark.parametrize("faster", ["dram_bytes_per_s", "drive"])
def test_what_a_option_adds_is_unknown_where_the_slower_gpus_have_the_better_host(
    faster: str,
) -> None:
    """Hot rows are then best on one kind of GPU, and those of another shard on another."""
    even = machine(2, 2)
    hosts = [replace(host, drive=Drive(1 << 40)) for host in even.hosts]
    better = Drive(1 << 40, 4e6, 1e6) if faster == "drive" else 2 * hosts[1].dram_bytes_per_s
    hosts[1] = replace(hosts[1], **{faster: better})
    gpus = [
        replace(gpu, hbm_bytes_per_s=gpu.hbm_bytes_per_s / (1 + number // 2))
        for number, gpu in enumerate(even.gpus)
    ]
    links = [
        replace(link, bytes_per_s=link.bytes_per_s / 2)
        if "host:1" in (link.a, link.b) and link.kind == "network"
        else link
        for link in even.links
    ]
    crossed = replace(even, gpus=tuple(gpus), hosts=tuple(hosts), links=tuple(links))
    table = zipf_table("t", 100)
    assert PLAIN.sharding_overhead_s(problem_of(table, topology=crossed)) is None
    of_links = Calibrated(calibration())
    of_links.calibration.constants.pop("exchange_byte")
    known = of_links.sharding_overhead_s(problem_of(table, topology=crossed)) is not None
    # What it has measured it takes of any host; drives and links are the topology's.
    assert known == (faster != "drive")


def test_a_roofline_leaves_the_lookups_shares_of_other_models_as_they_are() -> None:
    Roofline()
    assert np.array_equal(LOOKUP_SHARES, _lookup_shares())
