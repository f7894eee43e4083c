"""The chain of phases that counts delays: no step is shorter, and bounds come closer by it."""

import random

import numpy as np
import pytest
from fast_and_full import fewer, mostly_slow

from cost_models import Roofline
from cost_models.schedule import Schedule, SharedLane
from placer import Problem, Topology
from placer.workloads import named_workload
from solvers import solve
from solvers.bounds.lagrangian import lagrangian_bound
from solvers.bounds.option_costs import waits
from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.model.objective import Delay
from solvers.result import Limits
from solvers.search.branching import branch_and_bound
from solvers.search.construction import construct


def hosts_apart(tables: int, seed: int = 0, batch_size: int = 4096) -> Problem:
    """A problem on two hosts, whose network delays the exchange of pooled rows."""
    profile = named_workload(f"random-{tables}@{seed}")
    return Problem(profile, Topology.parse("2x4xh100"), batch_size)


def test_no_step_is_shorter_than_the_chain_of_delays() -> None:
    """Shards of any seconds, where the wait before lasts until the phase beside begins."""
    rng, longer = np.random.default_rng(0), 0
    for _ in range(500):
        lane = SharedLane(1, 1, 3, (0,), begin_s=rng.uniform(0, 1))
        schedule = Schedule(
            ("lookup", "outputs", "update", "ids"), ((0, 1, 2), (3,)), (0.1, 0.0), (lane,)
        )
        delay = Delay.of(schedule)
        gpus, shards = rng.integers(1, 4), rng.integers(1, 8)
        phase_s = rng.exponential(rng.uniform(0.1, 2, (4, 1)), (4, shards))
        on = rng.integers(gpus, size=shards)
        loads = np.zeros((5, gpus))
        np.add.at(loads.T, on, delay.with_row(phase_s).T)
        loads[0] += rng.uniform(0, 1)
        if loads[0].max() < lane.begin_s:
            continue
        whole, delayed = delay.schedule(schedule).chain_times_s(loads)[[0, 2]]
        assert delayed <= whole * (1 + 1e-12)
        plain = loads[:3].max(axis=1).sum() + 0.1
        longer += delayed > plain * (1 + 1e-9)
    assert longer > 50  # The chain says something that the phases by themselves do not.


@pytest.mark.parametrize("seed", mostly_slow([0, 2], 2))
def test_step_times_stay_the_same_with_the_chain(seed: int) -> None:
    problem, rng = hosts_apart(20, seed, 32_768), random.Random(seed)
    plain = Instance(problem, Roofline())
    delay = Delay.of(plain.objective.schedule)
    assert waits(plain, delay.lane.before, delay.lane.begin_s)
    delayed = Instance(problem, Roofline(), delay=delay)
    met = 0
    for _ in range(fewer(30, 6)):
        options = [rng.choice(plain.options_of(table)) for table in range(plain.tables)]
        shards, replicas = plain.sharded(options)
        pairs = []
        for table in range(plain.tables):
            mine = [shard for shard in shards if shard.table == table]
            pairs += list(zip(mine, rng.sample(range(plain.gpus), len(mine)), strict=True))
        one = Assignment.of(plain, pairs, replicas)
        other = Assignment.of(delayed, pairs, replicas)
        if one is None or other is None:
            continue
        met += 1
        assert other.step_time_s == pytest.approx(one.step_time_s, rel=1e-9)
    assert met >= fewer(10, 2)


def test_a_wait_that_may_be_shorter_is_not_counted() -> None:
    instance = Instance(hosts_apart(12), Roofline())
    delay = Delay.of(instance.objective.schedule)
    rows = list(delay.lane.before)
    whole_s = sum(
        float(instance.curve(instance.whole(table), 0).phase_s[rows].sum(axis=0).min())
        for table in range(instance.tables)
    )
    assert waits(instance, delay.lane.before, 0.5 * whole_s / instance.gpus)
    assert not waits(instance, delay.lane.before, 1.01 * whole_s / instance.gpus)


@pytest.mark.slow
def test_bounds_count_delays() -> None:
    """The Lagrangian bound and the one of branching are closer, and below the plan."""
    problem = hosts_apart(12)
    plain = Instance(problem, Roofline())
    delay = Delay.of(plain.objective.schedule)
    first_bound = lagrangian_bound(plain)
    first = construct(plain, first_bound, first_bound.step_time_s)
    assert delay.is_likely(first.phase_s)
    weights = np.eye(1 + len(plain.objective.schedule.chains))[-1]
    delayed = Instance(problem, Roofline(), weights, delay)
    closer_s = lagrangian_bound(delayed).step_time_s + delayed.fixed_s
    assert first_bound.step_time_s + plain.fixed_s < closer_s
    found = []
    for bounding in (plain, delayed):
        clock = Clock.start(Limits(time_limit_s=3600, max_steps=10_000))
        search = branch_and_bound(
            first,
            first_bound.price_s_per_byte,
            clock=clock,
            programs=5,
            bounding=bounding,
        )
        assert search is not None
        found.append(search)
    best_s = min(search.best.step_time_s for search in found)
    assert found[0].bound_s < found[1].bound_s <= best_s
    assert all(search.best.instance is plain for search in found)


@pytest.mark.slow
def test_the_solver_counts_them() -> None:
    problem = hosts_apart(12)
    result = solve(problem, "auto", time_limit_s=600, max_steps=50)
    plain = Instance(problem, Roofline())
    assert lagrangian_bound(plain).step_time_s + plain.fixed_s < result.bound_s
    assert result.bound_s <= result.step_time_s
