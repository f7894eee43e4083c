"""The linear relaxation's bound, against plans, against bounds by hand, and its prices."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from enumeration import Enumeration
from fast_and_full import examples, fewer, mostly_slow
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import machine
from problem_cases import (
    counted_table,
    problem_of,
    problems,
    resident_buffers,
    unequal_machine,
    zipf_table,
)
from test_solvers_bound import constrained, crossed

from cost_models import CostCurve, Roofline
from placer import Constraints, Problem, Topology
from placer.constraints.rules import TableRule
from placer.errors import BackendError
from solvers import solve
from solvers.bounds import linear_program_devices
from solvers.bounds.binding import binding, changes
from solvers.bounds.lagrangian import lagrangian_bound
from solvers.bounds.linear_program import LpBound, _Program, lp_bound
from solvers.bounds.linear_program_arrays import Space
from solvers.bounds.linear_program_devices import DeviceGroups, Prices
from solvers.bounds.linear_program_tables import BYTES, DRAM_BYTES, DRAM_S, GPU_S, within
from solvers.model.build_plan import build_plan
from solvers.model.instance import Instance, Placement, TableShard

MODEL = Roofline()
EPS = 1e-6


def relaxed(problem: Problem, upper_s: float | None = None) -> LpBound:
    found = lp_bound(Instance(problem, MODEL), upper_s, time_limit_s=600)
    assert found is not None
    return found


def hbm_price(found: LpBound) -> float:
    """Seconds of the step that one more byte of HBM on every GPU saves."""
    return sum(len(group.devices) * group.price_s_per_byte for group in found.gpus)


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


@pytest.fixture(scope="module")
def solved() -> list[tuple[Problem, float]]:
    """Problems, and the step times of plans for them."""
    slow = (7, 13)  # That nothing fits there takes a minute to prove.
    every = [random_problem(seed) for seed in range(fewer(20, 12)) if seed not in slow]
    results = [(problem, solve(problem, "greedy-cost").step_time_s) for problem in every]
    return [(problem, step_s) for problem, step_s in results if step_s is not None]


@pytest.mark.slow
def test_no_plan_beats_the_bound(solved: list[tuple[Problem, float]]) -> None:
    assert len(solved) > 12
    ratios = []
    for problem, step_s in solved:
        instance = Instance(problem, MODEL)
        pooled = lagrangian_bound(instance)
        found = lp_bound(instance, lagrangian=pooled, time_limit_s=600)
        assert found is not None
        assert pooled.step_time_s <= found.step_time_s <= step_s * (1 + EPS)
        bound_s = found.step_time_s + instance.fixed_s
        ratios.append((found.step_time_s / pooled.step_time_s, bound_s / step_s))
    gain, share = np.array(ratios).T
    # It is there for machines where HBM is not one pool; and it is close to plans.
    assert (gain > 1.02).sum() >= 4
    assert np.median(share) > 0.8


@pytest.mark.parametrize(
    "make", mostly_slow([crossed, constrained], crossed), ids=["crossed", "constrained"]
)
def test_the_bound_is_below_the_best_plan(make: Callable[[int], Problem]) -> None:
    """Of tiny problems that are solved by enumeration."""
    ratios = []
    for seed in range(fewer(8, 5)):
        problem = make(seed)
        best_s, _ = Enumeration(problem, MODEL).best()
        found = relaxed(problem)
        assert found.step_time_s <= best_s * (1 + 1e-9), seed
        if np.isfinite(best_s):
            assert relaxed(problem, best_s).step_time_s <= best_s * (1 + 1e-9), seed
            instance = Instance(problem, MODEL)
            pooled_s = lagrangian_bound(instance).step_time_s
            bounds = np.array([found.step_time_s, pooled_s]) + instance.fixed_s
            ratios.append(bounds / best_s)
    closeness, of_pooled = np.median(ratios, axis=0)
    # Few tables cannot keep all GPUs equally busy in every phase.
    assert closeness > max(0.7, of_pooled)


@pytest.mark.slow
def test_the_bound_is_at_most_the_step_time_of_a_known_plan(
    solved: list[tuple[Problem, float]],
) -> None:
    for problem, step_s in solved:
        alone_s = relaxed(problem).step_time_s
        # Prices are looked for until they are this close to the best.
        assert alone_s * (1 - 1e-4) <= relaxed(problem, step_s).step_time_s <= step_s * (1 + EPS)
        assert relaxed(problem, alone_s / 2).step_time_s == alone_s / 2


def test_what_a_known_plan_rules_out_makes_the_bound_closer() -> None:
    """A table that is slower in DRAM than the whole known plan: a part of it is not there."""
    large = zipf_table("large", 400_000, lookups=20.0, exponent=0.0)
    small = [zipf_table(f"t{n}", 80_000, lookups=4.0, exponent=0.0) for n in range(5)]
    problem = problem_of(large, *small, topology=machine(1, launch_s=0.0), batch_size=1024)
    topology = problem.topology.with_memory(hbm=resident_buffers(problem) + 45_000_000)
    rule = TableRule(forbid=frozenset({"split", "host", "cached"}))
    constraints = Constraints(tables=(("*", rule),))
    problem = replace(problem, topology=topology, constraints=constraints, pipeline="serial")
    curves_ = [Instance(problem, MODEL).curve(TableShard(table), 0) for table in range(2)]
    assert [curve.hot_rows.size for curve in curves_] == [2, 2]
    # The large table and two small ones in HBM.
    known_s = curves_[0].gpu_s[1] + 2 * curves_[1].gpu_s[1] + 3 * curves_[1].gpu_s[0]
    assert known_s < curves_[0].gpu_s[0]
    assert relaxed(problem, known_s).step_time_s > 1.002 * relaxed(problem).step_time_s


@given(problems(hbm_bytes=1 << 13))
@examples(15)
def test_no_plan_of_odd_tables_beats_the_bound(problem: Problem) -> None:
    step_s = solve(problem, "greedy-cost").step_time_s
    found = relaxed(problem)
    if step_s is not None:
        assert found.step_time_s <= step_s * (1 + EPS)
        assert relaxed(problem, step_s).step_time_s <= step_s * (1 + EPS)


def test_unequal_gpus_share_work_by_their_speed() -> None:
    """By hand: small tables, all in HBM, take the time of all over the sum of speeds."""
    topology = machine(2, launch_s=0.0)
    fast, slow = topology.gpus
    slow = replace(slow, hbm_bytes_per_s=slow.hbm_bytes_per_s / 4)
    problem = problem_of(
        *(zipf_table(f"t{n}", 500, lookups=20.0) for n in range(40)),
        topology=replace(topology, gpus=(fast, slow)),
        batch_size=256,
    )
    instance = Instance(problem, MODEL)
    # No rows are replicated: that would be another way.
    constraints = Constraints(tables=(("*", TableRule(forbid=frozenset({"replicated"}))),))
    problem = replace(problem, constraints=constraints)
    times = [float(instance.curve(TableShard(0), gpu).gpu_s[-1]) for gpu in range(2)]
    by_hand_s = 40 / sum(1 / time_s for time_s in times)
    found = relaxed(problem)
    assert found.step_time_s == pytest.approx(by_hand_s, rel=1e-4)
    assert found.step_time_s > lagrangian_bound(Instance(problem, MODEL)).step_time_s * 1.2
    # Where time is short on both GPUs, a second is worth the more, the faster the GPU.
    shares = [pool.time_share for pool in found.gpus]
    assert shares == pytest.approx([times[1] / sum(times), times[0] / sum(times)], rel=1e-3)


def test_pinned_tables_are_served_where_they_are_pinned() -> None:
    tables = [zipf_table(f"t{n}", 500, lookups=20.0) for n in range(8)]
    problem = problem_of(*tables, topology=machine(4), batch_size=256)
    pinned = replace(
        problem, constraints=Constraints(tables=(("*", TableRule(devices=("gpu:1",))),))
    )
    alone_s = sum(
        float(Instance(problem, MODEL).curve(TableShard(table), 1).gpu_s.min())
        for table in range(8)
    )
    assert relaxed(problem).step_time_s < alone_s / 3
    assert relaxed(pinned).step_time_s == pytest.approx(alone_s, rel=1e-4)


def short_of_dram(small_bytes: int = 200_000) -> Problem:
    """Two hosts; cold tables do not fit the small one, so that the other's GPUs get them."""
    topology = machine(2, 2, hbm_bytes=1_200_000, launch_s=0.0)
    small, large = topology.hosts
    small, large = replace(small, memory_bytes=small_bytes), replace(large, memory_bytes=1 << 30)
    tables = [zipf_table(f"t{n}", 20_000, 32, lookups=4.0, exponent=0.4) for n in range(8)]
    return problem_of(*tables, topology=replace(topology, hosts=(small, large)), batch_size=16)


def test_dram_that_is_short_lifts_the_bound_and_has_a_price() -> None:
    problem = short_of_dram()
    found = relaxed(problem)
    assert found.step_time_s > 1.2 * lagrangian_bound(Instance(problem, MODEL)).step_time_s
    small, large = sorted(found.hosts, key=lambda pool: pool.memory_bytes)
    assert small.price_s_per_byte > 0
    assert large.price_s_per_byte == 0
    more = 20_000
    hosts = problem.topology.hosts
    roomier = replace(hosts[0], memory_bytes=hosts[0].memory_bytes + more)
    changed = replace(problem, topology=replace(problem.topology, hosts=(roomier, hosts[1])))
    saved_s = found.step_time_s - relaxed(changed).step_time_s
    assert saved_s == pytest.approx(small.price_s_per_byte * more, rel=0.1)


def test_the_price_of_hbm_is_the_slope_of_the_bound() -> None:
    tables = [zipf_table(f"t{n}", 20_000, 32, lookups=4.0) for n in range(8)]
    problem = problem_of(*tables, topology=machine(4, hbm_bytes=2_000_000), batch_size=64)
    found = relaxed(problem)
    assert hbm_price(found) > 0
    more = 40_000
    larger = problem.topology.with_memory(hbm=2_000_000 + more)
    saved_s = found.step_time_s - relaxed(replace(problem, topology=larger)).step_time_s
    assert saved_s == pytest.approx(hbm_price(found) * more, rel=0.1)


def test_memory_that_is_slow_is_what_the_step_waits_for() -> None:
    tables = [zipf_table(f"t{n}", 20_000, 32, lookups=4.0) for n in range(8)]
    topology = hosts_with(machine(4, hbm_bytes=1_000_000), dram_bytes_per_s=1e9)
    problem = problem_of(*tables, topology=topology, batch_size=64)
    found = relaxed(problem)
    assert sum(group.time_share for group in found.hosts) == pytest.approx(1.0)
    assert hbm_price(found) > 0
    faster = hosts_with(topology, dram_bytes_per_s=1.01e9)
    saved = 1 - relaxed(replace(problem, topology=faster)).step_time_s / found.step_time_s
    assert saved == pytest.approx(0.01, rel=0.1)


@pytest.mark.slow
def test_whole_tables_stand_for_their_options_in_large_problems(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bound is then weaker, and still one."""
    every = [random_problem(seed, alike=True) for seed in range(24)]
    exact = np.array([relaxed(problem).step_time_s for problem in every])
    monkeypatch.setattr(linear_program_devices, "_ALL_OPTIONS", 0)
    weaker = np.array([relaxed(problem).step_time_s for problem in every])
    ratios = weaker[np.isfinite(exact)] / exact[np.isfinite(exact)]
    assert ratios.size > 12
    assert ratios.max() <= 1 + 1e-4
    assert ratios.min() < 1 - 1e-4
    closer = [
        lp_bound(Instance(problem, MODEL), all_options=True, time_limit_s=600) for problem in every
    ]
    assert [found.step_time_s for found in closer if found is not None] == exact.tolist()


def test_many_kinds_of_pools_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = short_of_dram()
    exact = relaxed(problem)
    assert len(exact.gpus) == 2
    monkeypatch.setattr(linear_program_devices, "_MOST_GROUPS", 1)
    found = relaxed(problem)
    assert len(found.gpus) == 1
    assert found.gpus[0].devices == (0, 1, 2, 3)
    assert found.step_time_s <= exact.step_time_s * (1 + EPS)


@pytest.mark.slow
def test_all_prices_give_bounds(solved: list[tuple[Problem, float]]) -> None:
    """Not only those that a linear program finds: its solver is not to be trusted."""
    rng = np.random.default_rng(0)
    for problem, step_s in solved[:10]:
        instance = Instance(problem, MODEL)
        pools = DeviceGroups.of(instance)
        space = Space.of(instance, pools, 0.0, math.inf, math.inf)
        assert isinstance(space, Space)
        for _ in range(10):
            seconds = rng.random(len(pools.gpus)), rng.random(len(pools.hosts))
            weight = seconds[0] @ pools.gpu_counts + seconds[1] @ pools.host_counts
            hbm, dram = (
                rng.random(memory.size) * step_s / np.maximum(memory, 1)
                for memory in (pools.hbm_bytes, pools.dram_bytes)
            )
            prices = Prices(seconds[0] / weight, hbm, seconds[1] / weight, dram)
            least_s = np.minimum.reduceat(space.priced(prices), space.first_option).sum()
            assert least_s - pools.credit_s(prices) <= step_s * (1 + EPS)


def test_without_time_there_is_no_bound() -> None:
    assert lp_bound(Instance(random_problem(0), MODEL), time_limit_s=0.0) is None


def test_tables_that_fit_nowhere_have_an_infinite_bound() -> None:
    problem = problem_of(zipf_table("t", 1000), topology=machine(2, hbm_bytes=10))
    assert relaxed(problem).step_time_s == math.inf
    assert relaxed(problem, 1.0).step_time_s == 1.0


@pytest.mark.slow
def test_a_broken_program_is_a_backend_error() -> None:
    instance = Instance(random_problem(0), MODEL)
    space = Space.of(instance, DeviceGroups.of(instance), 0.0, math.inf, math.inf)
    assert isinstance(space, Space)
    program = _Program(space, 1.0)
    program.times[0].upper_bound = math.nan
    with pytest.raises(BackendError, match="GLOP"):
        program.solve(1.0)


@st.composite
def curves(draw: st.DrawFn) -> CostCurve:
    """A curve of a piece whose memory may rise or fall."""
    points = draw(st.integers(1, 7))
    several = st.lists(st.integers(1, 40), min_size=points - 1, max_size=points - 1)
    hot = np.concatenate(([0], np.cumsum(draw(several)))).astype(np.int64)
    slopes = np.array(sorted(draw(several)), dtype=float)[::-1]
    gpu_s = 5.0 + np.concatenate((np.cumsum((slopes * np.diff(hot))[::-1])[::-1], [0.0]))
    change = st.lists(st.integers(-20, 80), min_size=points - 1, max_size=points - 1)
    return CostCurve(
        hot,
        gpu_s,
        gpu_s / 3,
        200.0 + np.concatenate(([0.0], np.cumsum(draw(change)))),
        10.0 * (hot[-1] - hot),
        float(draw(st.sampled_from([0, 7, math.inf]))),
        float(draw(st.integers(0, 30))),
    )


@given(curves(), st.lists(st.floats(0, 1), min_size=4, max_size=4), st.data())
@examples(200)
def test_what_is_within_limits_is_between_the_corners(
    curve: CostCurve, shares: list[float], data: st.DataObject
) -> None:
    every = []
    for hot in range(int(curve.hot_rows[-1]) + 1):
        point = np.empty(4)
        for row, of in (
            (BYTES, curve.hbm_bytes),
            (GPU_S, curve.gpu_s),
            (DRAM_S, curve.dram_s),
            (DRAM_BYTES, curve.dram_bytes),
        ):
            point[row] = np.interp(hot, curve.hot_rows, of)
        if 0 < hot < curve.hot_rows[-1]:
            point[GPU_S] += curve.split_s
            point[BYTES] += curve.split_hbm_bytes
        every.append(point)
    tried = np.array(every).T
    sane = np.where(np.isfinite(tried), tried, 0.0)
    limits = sane.min(axis=1) + np.array(shares) * 1.2 * np.ptp(sane, axis=1)
    corners = within(curve, limits)
    assert (corners <= limits[:, None] * (1 + 1e-6) + 1e-6).all()
    fits = tried[:, (tried <= limits[:, None]).all(axis=0)]
    if not fits.size:
        return
    prices = np.array(data.draw(st.lists(st.floats(0, 9), min_size=4, max_size=4)))
    assert (prices @ corners).min() <= (prices @ fits).min() * (1 + 1e-9) + 1e-9


def short_of_hbm(hbm_bytes: int) -> Problem:
    """Eight tables whose rows are read alike: what is not in HBM crosses a slow link."""
    tables = [zipf_table(f"t{n}", 20_000, 32, lookups=4.0, exponent=0.1) for n in range(8)]
    return problem_of(*tables, topology=machine(4, hbm_bytes=hbm_bytes, launch_s=0.0))


@pytest.mark.parametrize(
    ("kind", "resource"),
    [
        ("roomy", "hbm bandwidth"),
        ("host memory", "dram bandwidth"),
        ("little HBM", "hbm"),
        ("less HBM", "hbm"),
        ("enough HBM", "hbm bandwidth"),
        ("kernels", "launches"),
        ("link", "link"),
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
    assert plan is not None
    found = binding(problem, plan, MODEL)
    assert found.resource == resource
    step_time_s = MODEL.evaluate(problem, plan).step_time_s
    if kind == "unused HBM":
        anew = solve(problem, "greedy-cost").step_time_s
        assert anew is not None
        assert step_time_s / anew - 1 >= found.gain > 0.3
        return
    solved = {}
    for change in changes(problem.topology):
        other = solve(replace(problem, topology=change.topology), "greedy-cost").step_time_s
        assert other is not None
        solved[change.resource] = max(0.0, step_time_s / other - 1)
    assert max(solved, key=lambda one: solved[one]) == resource
    for name, gain in solved.items():
        assert found.gains[name] == pytest.approx(gain, abs=2e-3), name


def test_the_gain_of_a_plan_is_that_of_the_changed_machine() -> None:
    """Of every bandwidth and of launches: as the model says when it is asked again."""
    for seed in range(6):
        problem = random_problem(seed)
        plan = solve(problem, "greedy-cost").plan
        if plan is None or any(shard.lookup == "host" for shard in plan.shards):
            continue
        report = MODEL.evaluate(problem, plan)
        gains = binding(problem, plan, MODEL, report).gains
        for change in changes(problem.topology):
            if change.resource in ("hbm", "dram"):
                continue
            faster = MODEL.evaluate(replace(problem, topology=change.topology), plan)
            gain = report.step_time_s / faster.step_time_s - 1
            assert gains[change.resource] == pytest.approx(gain, abs=1e-9), change.words
