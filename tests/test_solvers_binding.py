"""What binds a plan, and how much more a tenth more of it gains: against solving again."""

import random
from dataclasses import replace

import pytest
from fast_and_full import fewer
from plan_cases import machine
from problem_cases import (
    counted_table,
    plan_for,
    problem_of,
    resident_buffers,
    unequal_machine,
    whole,
    zipf_table,
)

from cost_models import Roofline, ShardingOption
from placer import Problem, Topology
from placer.plan.memory import device_memory
from solvers import solve
from solvers.bounds.binding import _placed, binding, changes
from solvers.model.build_plan import build_plan
from solvers.model.instance import Instance, Placement, TableShard
from solvers.model.knapsack import costs_of, costs_with

MODEL = Roofline()


def hosts_with(topology: Topology, **changes: float) -> Topology:
    """The same machine with other values of all its hosts."""
    hosts = tuple(replace(host, **changes) for host in topology.hosts)  # type: ignore[arg-type]
    return replace(topology, hosts=hosts)


def random_problem(seed: int, *, alike: bool = False) -> Problem:
    """A few tables on machines whose HBM, DRAM or its bandwidth is short.

    GPUs differ, or they differ in HBM alone.
    """
    rng = random.Random(seed)
    tables = []
    for number in range(rng.randint(1, 6)):
        rows, dim = rng.randint(1, 3000), rng.choice([16, 32, 64])
        lookups, pooling = rng.choice([0.1, 1.0, 8.0]), rng.choice(["sum", "none"])
        if rng.random() < 0.3:
            counts = [rng.randint(0, 20) for _ in range(min(rows, 200))]
            tables.append(counted_table(f"t{number}", counts, dim, lookups=lookups))
        else:
            exponent = rng.uniform(0, 1.5)
            tables.append(
                zipf_table(
                    f"t{number}", rows, dim, lookups=lookups, exponent=exponent, pooling=pooling
                )
            )
    size = sum(t.table.bytes_per_row() * t.table.rows for t in tables)
    topology = rng.choice([machine(1), machine(4), machine(2, 2)])
    topology = topology if alike or rng.random() < 0.7 else unequal_machine()
    share, batch_size = rng.choice([0.3, 0.7, 1.5]), rng.choice([4, 64, 200])
    buffers = resident_buffers(problem_of(*tables, topology=topology, batch_size=batch_size))
    hbm = (size * share + buffers) / len(topology.gpus) + 30_000
    gpus = tuple(
        replace(gpu, memory_bytes=int(hbm * (1 if rng.random() < 0.7 else 0.5)))
        for gpu in topology.gpus
    )
    gpus = tuple(
        replace(
            gpu, hbm_bytes_per_s=gpu.hbm_bytes_per_s * (1 if alike or rng.random() < 0.7 else 0.3)
        )
        for gpu in gpus
    )
    dram = size / len(topology.hosts) * rng.choice([0.5, 0.9, 2.0, 50.0])
    topology = hosts_with(
        replace(topology, gpus=gpus),
        memory_bytes=int(dram),
        dram_bytes_per_s=topology.hosts[0].dram_bytes_per_s * rng.choice([1, 1, 0.1]),
    )
    return problem_of(*tables, topology=topology, batch_size=batch_size)


def short_of_hbm(hbm_bytes: int) -> Problem:
    """Eight tables whose rows are read alike: what is not in HBM crosses a slow link."""
    tables = [zipf_table(f"t{n}", 20_000, 32, lookups=4.0, exponent=0.1) for n in range(8)]
    return problem_of(*tables, topology=machine(4, hbm_bytes=hbm_bytes, launch_s=0.0))


@pytest.mark.parametrize(
    ("kind", "resource"),
    [
        ("roomy", "hbm bandwidth"),
        pytest.param("host memory", "dram bandwidth", marks=pytest.mark.slow),
        pytest.param("little HBM", "hbm", marks=pytest.mark.slow),
        ("less HBM", "hbm"),
        pytest.param("enough HBM", "hbm bandwidth", marks=pytest.mark.slow),
        pytest.param("kernels", "launches", marks=pytest.mark.slow),
        pytest.param("link", "link", marks=pytest.mark.slow),
        ("unused HBM", "free hbm"),
    ],
)
def test_what_binds_gains_most_when_solved_anew(kind: str, resource: str) -> None:
    tables = [zipf_table(f"t{n}", 20_000, 32, lookups=4.0) for n in range(8)]
    one_mb = machine(4, hbm_bytes=1_000_000, launch_s=0.0)
    problem = {
        "roomy": lambda: problem_of(*tables, topology=machine(4, launch_s=0.0)),
        "host memory": lambda: problem_of(
            *tables, topology=hosts_with(one_mb, dram_bytes_per_s=1e9)
        ),
        "little HBM": lambda: short_of_hbm(3_000_000),
        "less HBM": lambda: short_of_hbm(4_400_000),
        "enough HBM": lambda: short_of_hbm(5_200_000),
        "kernels": lambda: problem_of(*tables, topology=machine(4, hbm_bytes=2_000_000)),
        "link": lambda: problem_of(*tables, topology=one_mb),
        "unused HBM": lambda: problem_of(*tables, topology=machine(4, hbm_bytes=2_000_000)),
    }[kind]()
    plan = solve(problem, "greedy-cost").plan
    if kind == "unused HBM":
        placements = [Placement(TableShard(n), n % 4, 0) for n in range(8)]
        plan = build_plan(Instance(problem, MODEL), placements)
    found = binding(problem, plan, MODEL)
    assert found.resource == resource
    step_time_s = MODEL.evaluate(problem, plan).step_time_s
    if kind == "unused HBM":
        anew = solve(problem, "greedy-cost").step_time_s
        assert step_time_s / anew - 1 >= found.gain > 0.3
        return
    solved = {}
    for change in changes(problem.topology):
        other = solve(replace(problem, topology=change.topology), "greedy-cost").step_time_s
        solved[change.resource] = max(0.0, step_time_s / other - 1)
    assert max(solved, key=lambda one: solved[one]) == resource
    for name, gain in solved.items():
        assert found.gains[name] == pytest.approx(gain, abs=2e-3), name


def test_host_memory_that_is_left_over_changes_no_gain() -> None:
    problem = short_of_hbm(4_400_000)
    plan = solve(problem, "greedy-cost").plan
    gains = binding(problem, plan, MODEL).gains
    assert gains["hbm"] > 0.01
    used = device_memory(plan)["host:0"].total_bytes
    topology = hosts_with(problem.topology, memory_bytes=used + 1000)
    full = binding(replace(problem, topology=topology), replace(plan, topology=topology), MODEL)
    assert full.gains["hbm"] == pytest.approx(gains["hbm"], rel=1e-6)


def test_the_gain_of_a_plan_is_that_of_the_changed_machine() -> None:
    """Of every bandwidth and of launches: as the model says when it is asked again."""
    for seed in (0, 3, 5)[: fewer(3, 1)]:  # Of the first six those that have a plan.
        problem = random_problem(seed)
        plan = solve(problem, "greedy-cost").plan
        assert all(shard.lookup != "host" for shard in plan.shards)
        report = MODEL.evaluate(problem, plan)
        gains = binding(problem, plan, MODEL, report).gains
        for change in changes(problem.topology):
            if change.resource in ("hbm", "dram"):
                continue
            faster = MODEL.evaluate(replace(problem, topology=change.topology), plan)
            gain = report.step_time_s / faster.step_time_s - 1
            assert gains[change.resource] == pytest.approx(gain, abs=1e-9), change.words


def test_a_faster_network_of_a_server_gains_what_the_model_says() -> None:
    problem = problem_of(zipf_table("t", 20_000, 64, lookups=8.0), topology=machine(1, servers=1))
    slow = (
        replace(link, bytes_per_s=1e8) if link.kind == "network" else link
        for link in problem.topology.links
    )
    problem = replace(problem, topology=replace(problem.topology, links=tuple(slow)))
    shard = MODEL.with_buffers(problem, 0, whole(problem, "host", "host:1"), returns_bags=True)
    plan = plan_for(problem, shard)
    step_time_s = MODEL.evaluate(problem, plan).step_time_s
    found = binding(problem, plan, MODEL)
    assert found.resource == "network"
    (faster,) = (one for one in changes(problem.topology) if one.resource == "network")
    changed = MODEL.evaluate(replace(problem, topology=faster.topology), plan)
    gain = step_time_s / changed.step_time_s - 1
    assert found.gains["network"] == pytest.approx(gain, abs=1e-9)


def test_only_shards_with_hot_and_cold_rows_have_the_costs_of_a_split() -> None:
    problem = problem_of(counted_table("t", list(range(90))), topology=machine(1))
    instance = Instance(problem, Roofline())
    (shard,) = instance.shards(0, ShardingOption())
    curve = instance.curve(shard, 0)
    assert curve.split_hbm_bytes > 0
    for hot_rows, end in ((0, 0), (90, -1)):
        plan = build_plan(instance, [Placement(shard, 0, hot_rows)])
        _, costs = _placed(instance, plan, {"t"})[shard]
        assert costs[:, 0] == pytest.approx(costs_of(curve)[:, end])
    curve = replace(curve, split_s=2.0, split_s_of_phases=1 + curve.split_s_of_phases)
    for costs, hot_rows in zip(costs_of(curve).T, curve.hot_rows, strict=True):
        assert costs == pytest.approx(costs_with(curve, hot_rows))
