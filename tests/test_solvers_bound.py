"""The Lagrangian bound, and what it costs options at."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from enumerated import KINDS, short_of_memory
from fast_and_full import fewer
from plan_cases import machine, sized
from problem_cases import problem_of, unequal_machine, zipf_table

from cost_models import Roofline
from placer import AccessCdf, Feature, Problem, Profile, Table, TableProfile
from placer.constraints.constraints import Constraints
from placer.constraints.file import TableRule
from placer.dense import MeasuredDense
from placer.topology.topology import Topology
from placer.workloads import named_workload
from solvers import solve
from solvers.bounds import lagrangian
from solvers.bounds.hbm_prices import constrained_bound
from solvers.bounds.lagrangian import lagrangian_bound
from solvers.bounds.option_costs import OptionCosts, OptionPricer, distinct_shards
from solvers.model.clock import Clock
from solvers.model.instance import Instance, TableShard
from solvers.model.knapsack import BYTES
from solvers.result import Limits
from solvers.search.construction import construct
from solvers.strategies import _search
from solvers.strategies._search import Search


# Shards of mostly empty bags of max return fewer vectors than the whole table.
@pytest.mark.parametrize(("lookups", "pooling"), [(4.0, "sum"), (0.5, "max")])
def test_tables_that_few_gpus_may_serve_raise_the_bound(lookups: float, pooling: str) -> None:
    tables = [zipf_table(f"t{n}", 20_000, 32, lookups=lookups, pooling=pooling) for n in range(4)]
    free = problem_of(*tables, topology=machine(4, launch_s=0.0))
    on_one, on_two = (
        replace(free, constraints=Constraints.of({"*": TableRule(devices=devices)}))
        for devices in (("gpu:1",), ("gpu:1", "gpu:2"))
    )
    together = replace(free, constraints=Constraints.of({}, [[f"t{n}" for n in range(4)]]))
    of_free_s = lagrangian_bound(Instance(free, Roofline())).step_time_s
    for problem, times in ((on_one, 3), (on_two, 1.5), (together, 3)):
        instance = Instance(problem, Roofline())
        bound_s = lagrangian_bound(instance).step_time_s
        best_s = solve(problem, "greedy-cost").step_time_s
        assert times * of_free_s < bound_s <= (best_s - instance.fixed_s) * (1 + 1e-9)


def test_tables_of_few_gpus_by_hand() -> None:
    """Their work is divided by their GPUs; all tables of a subset of these GPUs count, too."""
    tables = [zipf_table(f"t{n}", 20_000, 32, lookups=4.0) for n in range(4)]
    table_bytes = tables[0].table.total_bytes

    def bound(devices: list[list[int]], group: str = "", hbm: Sequence[float] = ()) -> float:
        """In times of one table that is in HBM; `hbm` in sizes of tables, by GPU."""
        rules = {
            f"t{n}": TableRule(devices=tuple(f"gpu:{gpu}" for gpu in gpus))
            for n, gpus in enumerate(devices)
        }
        together = [[f"t{n}" for n in group]] if group else []
        memory = {f"gpu:{n}": size * table_bytes for n, size in enumerate(hbm)}
        problem = problem_of(*tables, topology=sized(machine(4, launch_s=0.0), memory))
        ruled = replace(problem, constraints=Constraints.of(rules, together))
        instance = Instance(ruled, Roofline())
        return constrained_bound(instance) / float(instance.curve(instance.whole(0), 0).gpu_s.min())

    assert bound([[0], [0, 1], [0, 1], [0, 1]]) == pytest.approx(2.0)
    assert bound([[0], [0, 1], [2]]) == pytest.approx(1.0)
    assert bound([[0, 1, 2], [0, 1, 2]]) == pytest.approx(2 / 3)
    assert bound([], "012") == pytest.approx(3.0)
    # GPUs of a table share all their memory, and a group has that of the largest GPU.
    equal, unequal = (bound([[0], *[[0, 1]] * 3], hbm=each) for each in ((1.5, 1.5), (2, 1)))
    assert 2 < equal == pytest.approx(unequal, rel=1e-3)
    equal, unequal = (bound([], "012", each) for each in ((2, 2, 2, 2), (2, 1, 0.9, 0.8)))
    assert 3 < equal == pytest.approx(unequal, rel=1e-3)


@pytest.mark.parametrize(
    ("devices", "group", "times"),
    [
        ((("host:1",), ("host:1", "host:2"), ("host:1", "host:2")), "", 1.5),
        ((("host:1",), ("host:1",), ("host:2",)), "", 2.0),
        ((("host:1", "host:2"), ("host:1", "host:2"), ("host:2", "gpu:0")), "01", 2.0),
        ((("host:1", "gpu:0"),) * 3, "", 0.0),
    ],
)
def test_tables_of_servers_alone_take_their_time(
    devices: tuple[tuple[str, ...], ...], group: str, times: float
) -> None:
    tables = [zipf_table(f"t{n}", 20_000, 32, lookups=4.0) for n in range(3)]
    rules = {f"t{n}": TableRule(devices=of) for n, of in enumerate(devices)}
    constraints = Constraints.of(rules, [[f"t{n}" for n in group]] if group else [])
    topology = machine(2, servers=2, launch_s=1e-4)
    problem = replace(problem_of(*tables, topology=topology), constraints=constraints)
    instance = Instance(problem, Roofline())
    of_one_s = float(instance.curve(instance.whole(0), instance.gpus - 1).gpu_s.min())
    bound_s = constrained_bound(instance)
    assert bound_s == pytest.approx(times * of_one_s)
    step_time_s = solve(problem, "greedy-cost").step_time_s
    assert 0 <= bound_s + instance.fixed_s <= step_time_s


def test_dense_layers_run_beside_what_host_memory_takes() -> None:
    """A bound by the hosts' memory alone includes the fixed time of a step once, not twice."""
    tables = [zipf_table(f"t{n}", 20_000, 32, lookups=4.0, exponent=0.3) for n in range(4)]
    topology = machine(2, hbm_bytes=4_000_000, launch_s=0.0)
    hosts = tuple(replace(host, dram_bytes_per_s=1e9) for host in topology.hosts)
    problem = problem_of(*tables, topology=replace(topology, hosts=hosts))
    alone_s = lagrangian_bound(Instance(problem, Roofline())).step_time_s
    assert 1e-4 < alone_s <= solve(problem, "greedy-cost").step_time_s < 1.05 * alone_s
    dense = replace(problem, dense=MeasuredDense(2e-3))
    instance = Instance(dense, Roofline())
    step_time_s = solve(dense, "greedy-cost").step_time_s
    assert lagrangian_bound(instance).step_time_s + instance.fixed_s <= step_time_s


def medium(seed: int) -> Problem:
    """Up to six tables of up to 10,000 rows, often one of them heavy, often short of memory."""
    rng = random.Random(seed)
    tables = [
        zipf_table(
            f"t{n}",
            int(10 ** rng.uniform(1, 4)),
            rng.choice([16, 32, 64]),
            lookups=rng.choice([0.1, 0.5, 1.0] if n else [0.5, 2.0, 8.0, 40.0]),
            exponent=rng.uniform(0.3, 1.6),
            pooling=rng.choice(["sum", "sum", "none"]),
        )
        for n in range(rng.randint(1, 6))
    ]
    topology = machine(rng.choice([2, 4, 8]), launch_s=rng.choice([1e-9, 1e-8, 1e-6]))
    if rng.random() < 0.3:
        topology = unequal_machine(launch_s=1e-8)
    problem = problem_of(*tables, topology=topology, batch_size=rng.choice([4, 32, 256]))
    return short_of_memory(rng, problem)


def test_whole_tables_stand_for_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not all cuts are looked at, the bound is lower, if at all different."""
    ratios = []
    for seed in range(fewer(12, 2)):
        instance, bounds = Instance(medium(seed), Roofline()), []
        for all_options in (0, 2500):
            monkeypatch.setattr(lagrangian, "_ALL_OPTIONS", all_options)
            bounds.append(lagrangian_bound(instance).step_time_s)
        assert bounds[0] <= bounds[1] * (1 + 1e-3), seed  # Ranges of replicas differ a little.
        if np.isfinite(bounds[1]):
            ratios.append(bounds[0] / bounds[1])
    assert np.median(ratios) > 0.9


def test_what_hosts_enforce_is_taken_over_from_a_known_bound() -> None:
    instance = Instance(KINDS["four"][0](0), Roofline())
    bound = lagrangian_bound(instance)
    known = replace(bound, part_s=3 * bound.step_time_s)
    assert lagrangian_bound(instance, known).step_time_s == pytest.approx(known.part_s)


def test_a_step_of_next_to_no_time_has_a_bound() -> None:
    """Floats below the smallest normal one have no middle, which a bisection could wait for."""
    instance, shortest_s = Instance(problem_of(zipf_table("t", 10)), Roofline()), 5e-324
    options = instance.options_of(0)[:2]
    costs = OptionCosts(options, np.array([0.0, shortest_s]), np.zeros(2), np.eye(2)[:, :1])
    bound_s, best, _ = lagrangian._best_bound(np.ones(1), [costs], np.zeros(1), 0.0, 0.0)
    assert (bound_s, best) == (0.0, 0)


@pytest.mark.parametrize("coverage", [1e-300, 1e-311, 1e-312, 1e-313])
def test_rows_that_are_hardly_ever_read_have_prices(coverage: float) -> None:
    """What HBM saves is then less than the smallest normal float for each byte."""
    features = (Feature("t", pooling_factor=2.0, coverage=coverage, pooling="none"),)
    table = Table("t", 2, 3, optimizer="sgd", features=features)
    profile = Profile((TableProfile(table, AccessCdf(np.arange(3), np.array([0, 0.5, 1]))),))
    problem = Problem(profile, Topology.parse("1xh100", hbm=60_000), 5)
    instance = Instance(problem, Roofline())
    assert instance.prices[[0, -1]].tolist() == [np.inf, 0.0]
    assert lagrangian_bound(instance).step_time_s >= 0


def test_stand_ins_cost_the_least_extra_time_once() -> None:
    """And their shards may be arbitrarily short, unless all is known of the option."""
    problem = problem_of(zipf_table("t", 100_000, 64, lookups=8.0), topology=machine(2))
    pricer = OptionPricer(
        Instance(problem, Roofline()), np.array([0.0, 1e-9]), np.zeros(2), np.ones(2), np.inf
    )
    free, dearer = pricer.uncut(0, 0.0), pricer.uncut(0, 0.25)
    assert free.stood_for
    assert np.allclose(dearer.priced_s[free.own :] - free.priced_s[free.own :], 0.25)
    assert np.array_equal(dearer.priced_s[: free.own], free.priced_s[: free.own])
    assert free.longest_s[free.own :].tolist() == free.replica_s[list(free.stood_for)].tolist()
    known = lagrangian._at_price(free, 0)
    cut = lagrangian._at_price(free, 0, may_be_cut=True)
    assert (
        [one.option for one in known] == [one.option for one in cut] == [*free.options[: free.own]]
    )
    assert [one.longest_s for one in known] == free.longest_s[: free.own].tolist()
    for stand_in, number in enumerate(free.stood_for, free.own):
        assert cut[number].longest_s == free.longest_s[stand_in] < known[number].longest_s


def test_shards_that_are_not_costed_have_a_shard_of_no_more_work() -> None:
    problem = problem_of(zipf_table("t", 10_000, 64, lookups=8.0), topology=machine(8))
    instance = Instance(problem, Roofline())

    def least_s(shard: TableShard) -> float:
        return float(instance.curve(shard, 0).gpu_s.min())

    options = instance.options_of(0)
    assert {2, 4, 8} <= {option.row_slices for option in options}
    assert {2, 4} <= {len(option.column_widths) for option in options}
    for shards in (each for one in options if (each := instance.shards(0, one))):
        costed = distinct_shards(shards)
        assert sum(times for _, times in costed) == len(shards)
        stand_ins = sorted(least_s(shard) for shard, times in costed for _ in range(times))
        for mine, true in zip(stand_ins, sorted(map(least_s, shards)), strict=True):
            assert mine <= true * (1 + 1e-9)
        assert stand_ins[-1] == pytest.approx(max(map(least_s, shards)))


def test_an_option_costs_what_rows_in_its_tables_tier_take() -> None:
    """Not what they would take in HBM, where there is room."""
    problem = problem_of(zipf_table("t", 100_000, 64, lookups=8.0), topology=machine(1))
    seconds = {}
    for tier in ("hbm", "dram"):
        ruled = replace(problem, constraints=Constraints.of({"t": TableRule(tier=tier)}))
        instance = Instance(ruled, Roofline())
        pricer = OptionPricer(instance, np.zeros(1), np.zeros(1), np.ones(1), np.inf)
        found, whole = pricer.every(0), instance.whole(0)
        seconds[tier] = found.longest_s[found.options.index(whole.option)]
        (row_count,) = instance.curve(whole, 0).hot_rows
        assert row_count == (100_000 if tier == "hbm" else 0)
    assert seconds["hbm"] < seconds["dram"]


@pytest.mark.slow
def test_rows_fill_hbm_to_spare_the_hosts_memory_where_a_step_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPUs by themselves would leave to a host all rows that it pools for them."""
    profile = named_workload("random-30@40")
    rules = {"*": TableRule(forbid=frozenset({"staged", "uva", "cached"}))}
    topology = Topology.parse("4xh100").with_memory(hbm=profile.total_bytes * 3 // 40)
    slow = tuple(replace(h, dram_bytes_per_s=h.dram_bytes_per_s / 5) for h in topology.hosts)
    topology = replace(topology, hosts=slow)
    problem = Problem(profile, topology, 16384, constraints=Constraints.of(rules))
    search = Search.start(Instance(problem, Roofline()), Clock.start(Limits()))
    weighed = _search.weighed(search)
    assert weighed.instance.host_share > 0
    assert (weighed.bound_s, weighed.of_steps.lagrangian) == (search.bound_s, search.lagrangian)
    spared = solve(problem, "greedy-cost")
    assert spared.step_time_s < 1.5 * spared.bound_s
    monkeypatch.setattr(_search, "_HOST_WAITS", math.inf)
    waiting = solve(problem, "greedy-cost")
    assert spared.step_time_s < 0.97 * waiting.step_time_s


def test_hbm_has_a_price_where_the_buffers_of_staging_are_larger() -> None:
    """Then some tables have to be read in ways that need fewer of them."""
    profile = named_workload("random-30@11")
    topology = Topology.parse("4xa100-40").with_memory(hbm=profile.total_bytes // 40)
    instance = Instance(Problem(profile, topology, 16384), Roofline())
    whole = [instance.priced_costs(instance.whole(table), 0) for table in range(30)]
    assert sum(costs[BYTES].min() for costs in whole) > instance.hbm_bytes.sum()
    bound = lagrangian_bound(instance)
    assert bound.price_s_per_byte > 0
    assignment = construct(instance, bound, bound.step_time_s)
    assert assignment.step_time_s < 2 * (bound.step_time_s + instance.fixed_s)


def test_hbm_has_a_price_where_one_shard_is_the_bound() -> None:
    """What GPUs have no room for is still worth something."""
    heavy = zipf_table("t0", 2000, 32, lookups=200.0)
    others = [zipf_table(f"t{n}", 20_000, 32, lookups=1.0) for n in range(1, 5)]
    rules = {"t0": TableRule(forbid=frozenset({"row-wise", "column-wise", "replicated"}))}
    problem = problem_of(heavy, *others, topology=machine(4), batch_size=256)
    small = problem.topology.with_memory(hbm=problem.profile.total_bytes // 8)
    problem = replace(problem, topology=small, constraints=Constraints.of(rules))
    instance = Instance(problem, Roofline())
    bound = lagrangian_bound(instance)
    longest_s = max(min(o.longest_s for o in options) for options in bound.cheapest)
    assert bound.step_time_s == pytest.approx(longest_s, rel=1e-6)
    assert bound.price_s_per_byte > 0


def test_a_clock_keeps_time_for_what_comes_after_the_search() -> None:
    clock = Clock.start(Limits(time_limit_s=100.0))
    clock.reserve(40.0)
    assert 50 < clock.left_s <= 60
    clock.reserve(1000.0)
    assert clock.spent
    assert clock.spent_s < 50


def test_a_slow_bound_leaves_time_for_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for writing the plan of a few tables is little, whatever the bound took."""
    start = Search.start

    def slow(instance: Instance, clock: Clock) -> Search:
        return replace(start(instance, clock), bounded_in_s=1000.0)

    monkeypatch.setattr(Search, "start", slow)
    kept: list[float] = []
    monkeypatch.setattr(Clock, "reserve", lambda clock, seconds: kept.append(seconds))
    tables = [zipf_table(f"t{n}", 20_000, 32, lookups=1.0 + n) for n in range(9)]
    problem = problem_of(*tables, topology=machine(3), batch_size=256)
    assert solve(problem, solver="greedy-cost", time_limit_s=600.0).plan is not None
    assert len(kept) == 1
    assert kept[0] < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["random-24", "mlperf-dcnv2"])
def test_options_that_cannot_be_cheapest_are_not_missed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = Topology.parse("4x8xh100", hbm="8GiB")
    instance = Instance(Problem(named_workload(name), topology, batch_size=8192), Roofline())
    late_s = lagrangian_bound(instance, is_late=lambda: True).step_time_s
    bound_s = lagrangian_bound(instance).step_time_s
    every = OptionPricer.every
    monkeypatch.setattr(OptionPricer, "promising", lambda self, table, *_: every(self, table))
    of_every_s = lagrangian_bound(instance).step_time_s
    assert 0 < late_s <= bound_s <= of_every_s * (1 + 1e-5)
    assert bound_s >= of_every_s * 0.99


def test_tables_that_no_gpu_spends_time_on_and_no_server_has_room_for() -> None:
    unread = Table("t", 1000, 16, features=(Feature("f", 0.0, 1.0, "none"),))
    topology = sized(machine(1, servers=1, launch_s=0.0), {"host:1": 1000})
    problem = problem_of(TableProfile(unread, AccessCdf.zipf(1000, 1.0)), topology=topology)
    with np.errstate(invalid="raise"):
        assert lagrangian_bound(Instance(problem, Roofline())).step_time_s == 0
