"""The schedule of phases: by hand, and against events of threads, barriers and lanes."""

import random
from dataclasses import replace

import numpy as np
import pytest
from schedule_events import finished_at, threads_of

from cost_models import Roofline, Schedule
from cost_models.step_equation.phases import IN_PLACE, with_lanes
from cost_models.step_equation.work import arena_count, work_of
from placer import Plan, Problem, Topology
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
    topology = Topology.parse(rng.choice(MACHINES), hbm="4TiB", dram="64TiB")
    problem = Problem(
        named_workload(f"random-{rng.randint(1, 12)}@{seed}"),
        topology,
        batch_size=rng.choice([64, 1024, 8192]),
        pipeline=rng.choice(["serial", "look-ahead"]),
    )
    instance = Instance(problem, Roofline())
    options = [rng.choice(instance.options_of(table)) for table in range(instance.tables)]
    shards, replicas = instance.sharded(options)
    free: dict[int, list[int]] = {}
    placements = []
    for shard in shards:
        gpus = free.setdefault(shard.table, rng.sample(range(instance.gpus), instance.gpus))
        rows = int(instance.curve(shard, 0).hot_rows[-1])
        hot = rng.choice([0, rows, rng.randint(0, rows)])
        gpu = shard.row_slice if shard.option.blocked else gpus.pop()
        placements.append(Placement(shard, gpu, hot))
    return problem, build_plan(instance, placements, replicas)


def simulated_step_s(problem: Problem, plan: Plan) -> float:
    """A step of a long training, event by event."""
    model, gpus = Roofline(), problem.topology.gpus
    phase_s = np.zeros((7, len(gpus)))
    for work in work_of(problem, plan):
        assert work.gpu is not None
        costs = model.unit_costs(problem, work.table, work.gpu)
        phase_s[:, work.gpu] += work.phase_s(costs, model.lookup_shares)
    serial = replace(problem, pipeline="serial")
    for number, gpu in enumerate(gpus):
        launches = arena_count(plan, gpu.id) * model.launches(serial, number)
        phase_s[:IN_PLACE, number] += launches
    steps, schedule = 12, model.schedule(problem)
    look_ahead = problem.pipeline == "look-ahead"
    fixed = schedule.fixed.tolist()
    threads = threads_of(
        phase_s,
        steps,
        look_ahead=look_ahead,
        between_s=fixed[0],
        ahead_s=fixed[1] if look_ahead else 0.0,
    )
    ended = finished_at(threads, "updated", steps)
    return float(ended[-2] - ended[3]) / (steps - 5)


def off(seed: int) -> float:
    """By how much the predicted step is longer than the simulated one, as a share of it."""
    problem, plan = random_plan(seed)
    report = Roofline().evaluate(problem, plan)
    predicted = report.schedule.step_time_s(report.phase_times_s)
    return predicted / simulated_step_s(problem, plan) - 1


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 500), marks=pytest.mark.slow)])
def test_predicted_steps_are_those_of_simulated_threads(seeds: range) -> None:
    """Nearly all within 2%: rows read in place beside copies share the link, and delay lookups."""
    shares = np.array([off(seed) for seed in seeds])
    serial = [random_plan(seed)[0].pipeline == "serial" for seed in seeds]
    assert np.abs(shares[serial]).max() <= 1e-9
    assert np.quantile(np.abs(shares), 0.75) <= 0.02
    assert -0.25 <= shares.min() <= shares.max() <= 1e-9


def test_lanes_add_up_what_phases_ask_of_a_link_and_of_the_network() -> None:
    phase_s = np.arange(1.0, 8.0)[:, None]
    assert with_lanes(phase_s, "look-ahead")[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 2 + 7, 1 + 4 + 5]
    assert with_lanes(phase_s, "serial")[:, 0].tolist() == [1, 2, 3, 4, 5, 6]
