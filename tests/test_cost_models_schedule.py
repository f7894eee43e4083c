"""The schedule of phases: by hand, and against events of threads, barriers and lanes."""

import random
from dataclasses import replace

import numpy as np
import pytest
from plan_cases import roomy
from problem_cases import problem_of, zipf_table
from schedule_events import finished_at, threads_of

from cost_models import Roofline, Schedule
from cost_models.arenas import added_up, arena_loads, times_by_arena
from cost_models.cost_report import PARTS, CostReport, GpuCost, HostCost, PhaseCost
from cost_models.step_equation.phases import (
    COPIES,
    GRADIENTS,
    HOST,
    IDS,
    LINK_LOOKUP,
    LINK_UPDATE,
    LOOKUP,
    NAMES,
    OUTPUTS,
    ROWS,
    UPDATE,
    ReadKind,
    parts_of,
    with_lanes,
)
from cost_models.step_equation.work import work_of
from placer import Plan, Problem, Topology
from placer.plan.fields import PIPELINES
from placer.workloads import named_workload
from solvers.model.build_plan import build_plan
from solvers.model.instance import Instance, Placement

MACHINES = ("1xh100", "2xt4", "4xv100-16", "8xh100", "2x4xa100-40", "2x8xh100")


def test_a_chain_takes_the_slowest_of_each_phase_and_a_step_the_longest_chain() -> None:
    phase_s = np.array([[1.0, 3.0], [4.0, 2.0], [5.0, 6.0]])
    assert Schedule(("a", "b", "c"), ((0, 1, 2),)).step_time_s(phase_s) == 3 + 4 + 6
    beside = Schedule(("a", "b", "c"), ((0, 1), (2,)), (0.5, 2.0))
    assert beside.chain_times_s(phase_s).tolist() == [7.5, 8.0]
    assert beside.step_time_s(phase_s) == 8.0


def random_plan(seed: int) -> tuple[Problem, Plan]:
    """A plan with random sharding options, GPUs and hot rows; memory is no limit."""
    rng = random.Random(seed)
    topology = roomy(rng.choice(MACHINES))
    problem = Problem(
        named_workload(f"random-{rng.randint(1, 8)}@{seed}"),
        topology,
        batch_size=rng.choice([64, 1024, 8192]),
    )
    instance = Instance(problem, Roofline())
    options = [rng.choice(instance.options_of(table)) for table in range(instance.tables)]
    shards, replicas = instance.sharded(options)
    free: dict[int, list[int]] = {}
    placements = []
    for shard in shards:
        gpus = free.setdefault(shard.table, rng.sample(range(instance.gpus), instance.gpus))
        rows = len(range(*shard.rows(instance.rows(shard.table))))
        hot = rng.choice([0, rows, rng.randint(0, rows)])
        gpu = shard.row_slice if shard.option.blocked else gpus.pop()
        placements.append(Placement(shard, gpu, hot))
    return problem, build_plan(instance, placements, replicas)


def simulated_step_s(problem: Problem, plan: Plan) -> float:
    """A step in the middle of a training, event by event."""
    model, gpus = Roofline(), problem.topology.gpus
    phase_s = np.zeros((ROWS, len(gpus)))
    for work in work_of(problem, plan):
        gpus = list(work.gpus)
        costs = model.unit_costs(problem, work.table, gpus[0])
        phase_s[:, gpus] += work.seconds(costs, model.lookup_shares)[:HOST, None]
    serial, loads = replace(problem, pipeline="serial"), arena_loads(problem, plan)
    phase_s[: len(NAMES)] += added_up(times_by_arena(model, serial, loads), len(NAMES))
    steps, latency_s = 7, problem.topology.exchange_latency_s
    threads = threads_of(
        phase_s,
        steps,
        look_ahead=problem.pipeline == "look-ahead",
        between_s=2 * latency_s,
        ids_s=2 * latency_s,
    )
    ended = finished_at(threads, "updated", steps)
    return float(ended[4] - ended[3])


def off(problem: Problem, plan: Plan) -> float:
    """By how much the predicted step is longer than the simulated one, as a share of it."""
    report = Roofline().evaluate(problem, plan)
    predicted = report.schedule.step_time_s(report.phase_times_s)
    return predicted / simulated_step_s(problem, plan) - 1


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 120), marks=pytest.mark.slow)])
def test_predicted_steps_are_those_of_simulated_threads(seeds: range) -> None:
    """With rows read in place beside copies, and ids beside pooled rows, too."""
    for seed in seeds:
        problem, plan = random_plan(seed)
        for pipeline in PIPELINES if seed % 5 == 0 else ("look-ahead",):
            share = off(replace(problem, pipeline=pipeline), plan)
            assert abs(share) <= 1e-9, (seed, pipeline)


def test_lanes_add_up_what_phases_ask_of_a_link_and_of_the_network() -> None:
    phase_s = np.arange(1.0, 9.0)[:, None]
    lanes = [2 + 7 + 8, 1 + 4 + 5, 7]
    assert with_lanes(phase_s, "look-ahead")[:, 0].tolist() == [1, 2, 3 + 7, 4, 5, 6 + 8, *lanes]
    assert with_lanes(phase_s, "serial")[:, 0].tolist() == [1, 2, 3 + 7, 4, 5, 6 + 8]


def test_dense_layers_scale_with_the_first_chain_alone() -> None:
    gpu = GpuCost("gpu:0", hbm_s=3.0, link_s=1.0, communication_s=0.0, launch_s=0.0)
    schedule = Schedule(("a", "b"), ((0,), (1,)), (2.5, 1.0))
    parts_s = np.zeros((len(PARTS), 2, 1))
    parts_s[0] = [[3.0], [4.0]]
    report = CostReport("roofline", (gpu,), (), {}, 1.0, None, schedule, (), 2.0, parts_s)
    # The chains take 3 + 0.5 + dense layers, and 4 + 1.
    assert [report.step_time_if({}, dense=scale) for scale in (1, 0.5, 0, 3)] == [5.5, 5, 5, 9.5]
    # Dense layers are a phase of the longest chain only if that is the first.
    for second_s, is_first in ((4.0, True), (5.0, False)):
        one = replace(report, phase_s=((3.0,), (second_s,)))
        assert (one.has_dense_phase, one.longest_chain[0]) == (
            is_first,
            ("a" if is_first else "b",),
        )
        assert not replace(one, dense_s=None).has_dense_phase


def test_a_phase_has_its_slowest_gpu_and_the_mean_of_gpus_alone() -> None:
    gpus = [GpuCost(name, 1.0, 0.0, 0.0, 0.0) for name in ("gpu:0", "gpu:1", "host:1")]
    hosts = HostCost("host:0", 2.0), HostCost("host:1", 1.0)
    times = (1.0, 4.0, 7.0), (2.0, 1.0, 0.0)
    schedule = Schedule(("a", "b"), ((0, 1),), (0.5,))
    parts_s = np.array([times] + [np.zeros_like(times)] * (len(PARTS) - 1))
    report = CostReport(
        "roofline", tuple(gpus), hosts, {}, 1.0, None, schedule, times, None, parts_s
    )
    assert report.phases == (PhaseCost("a", "host:1", 7.0, 2.5), PhaseCost("b", "gpu:0", 2.0, 1.5))
    # A step that waits for a host's memory has this one phase.
    busy = replace(report, hosts=(HostCost("host:0", 10.0), HostCost("host:1", 1.0)))
    assert busy.phases == (PhaseCost("dram", "host:0", 10.0, 5.5),)
    assert (busy.step_time_s, busy.bottleneck) == (10.0, "host:0 dram")
    assert busy.step_time_if({}, dram=0.5) == report.step_time_s == 9.5


@pytest.mark.parametrize(("kind", "on_link"), [("staged", "link"), ("host", "pooling")])
def test_parts_of_phases_by_hand(kind: ReadKind, on_link: str) -> None:
    """What launches, links, exchanges and drives do not take is spent in HBM."""
    parts_s = parts_of(np.full(ROWS, 10.0), kind, 6.0, 4.0)
    expected = {
        ("hbm", LOOKUP): 7.0, ("hbm", UPDATE): 7.0,
        ("launches", LOOKUP): 3.0, ("launches", UPDATE): 3.0,
        ("link", COPIES): 6.0, ("drive", COPIES): 4.0,
        (on_link, LINK_LOOKUP): 10.0, (on_link, LINK_UPDATE): 10.0,
        **{("communication", phase): 10.0 for phase in (IDS, OUTPUTS, GRADIENTS)},
    }  # fmt: skip
    spent = {(PARTS[part], phase): parts_s[part, phase] for part, phase in np.argwhere(parts_s)}
    assert spent == expected


def test_gpus_wait_unless_it_is_a_rounding_error() -> None:
    assert PhaseCost("lookup", "gpu:0", 1e-3, 1e-3 - 1e-10).waits_s == pytest.approx(1e-10)
    assert PhaseCost("lookup", "gpu:0", 1e-3, 1e-3 * (1 - 1e-14)).waits_s == 0.0


def test_servers_without_rows_add_no_latency_to_exchanges() -> None:
    machine = Topology.parse("2xl4+1xcpu")
    problem = problem_of(zipf_table("t", 100), topology=machine)
    both = [Roofline().schedule(problem, with_servers=has).fixed for has in (True, False)]
    assert np.sum(both[0]) > np.sum(both[1])
