"""The strategies after NeuroShard and after TorchRec."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from fast_and_full import combinations, examples, fewer, mostly_slow
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import machine, sized
from problem_cases import problem_of, problems, zipf_table
from test_solvers import (
    GAP,
    OF_ALL,
    PROBLEMS,
    TIME_LIMIT_S,
    SolverContract,
    short_of_hbm,
    tables,
    three_with_large_buffers,
)

from cost_models import Roofline, ShardingOption, TableShard
from placer import Constraints, Problem, Profile, TableRule, Topology
from placer.constraints.unmet import unmet
from placer.plan.fields import Memory
from placer.plan.verify import verify
from placer.units import format_bytes
from placer.workloads import named_workload
from solvers import Limits, Solver, SolveResult, solve
from solvers.bounds.feasibility import nothing_fits, rows_beyond_their_memories
from solvers.model.assignment import Assignment
from solvers.model.instance import Instance
from solvers.result import Termination
from solvers.strategies import published
from solvers.strategies.greedy import GreedyDim, GreedyLookup, GreedySize, GreedySizeLookup
from solvers.strategies.published import Beam, DynamicProgramming, Needs, pack

STRATEGIES: dict[str, Callable[[], Solver]] = {"beam": Beam, "dp": DynamicProgramming}
FAR_S = 60.0
WHOLE = TableRule(None, None, frozenset({"row-wise", "column-wise", "replicated"}))


def run(name: str, problem: Problem, **limits: object) -> SolveResult:
    limits = {"time_limit_s": FAR_S, "gap": 0.0, "threads": 1} | limits
    return STRATEGIES[name]().solve(problem, Roofline(), Limits(**limits))  # type: ignore[arg-type]


class StrategyContract(SolverContract):
    """The contract of all solvers, for strategies by themselves."""

    def solve(self, problem: Problem, *, time_limit_s: float = TIME_LIMIT_S) -> SolveResult:
        return run(self.name, problem, time_limit_s=time_limit_s, gap=GAP, seed=3)

    def test_it_is_a_solver_by_its_name(self) -> None:
        strategy = STRATEGIES[self.name]()
        assert isinstance(strategy, Solver)
        assert strategy.name == self.name


class TestBeam(StrategyContract):
    name = "beam"


class TestDynamicProgramming(StrategyContract):
    name = "dp"
    slow_tests = OF_ALL


every_strategy = pytest.mark.parametrize("name", STRATEGIES)


# What each of them promises


def equal_tables(number: int, dim: int = 16) -> list:
    return [zipf_table(f"t{n}", 1000, dim, lookups=4.0) for n in range(number)]


@every_strategy
def test_equal_tables_on_equal_gpus_are_shared_evenly(name: str) -> None:
    """Eight equal tables of 16 columns on four GPUs: two each, and no GPU waits."""
    problem = problem_of(*equal_tables(8), topology=machine(4, launch_s=1e-3))
    result = run(name, problem)
    report = Roofline().evaluate(problem, result.plan)
    assert report.balance == pytest.approx(1.0)
    # A launch takes far longer than all the rest: nothing was cut.
    assert len(result.plan.shards) == 8
    assert [gpu.launch_s for gpu in report.gpus] == pytest.approx([report.gpus[0].launch_s] * 4)


@every_strategy
def test_a_slow_gpu_gets_less(name: str) -> None:
    """Six equal tables; a GPU of half the speed serves fewer of them than the other."""
    topology = machine(2, launch_s=0.0)
    slow = replace(topology.gpus[1], hbm_bytes_per_s=topology.gpus[1].hbm_bytes_per_s / 2)
    unequal = replace(topology, gpus=(topology.gpus[0], slow))
    result = run(name, problem_of(*equal_tables(6), topology=unequal))
    of_gpu = {gpu.id: 0 for gpu in topology.gpus}
    for shard in result.plan.shards:
        for device in shard.devices:
            of_gpu[device] += shard.row_count * shard.width
    assert of_gpu["gpu:1"] < of_gpu["gpu:0"]


@every_strategy
def test_one_gpu_needs_no_search(name: str) -> None:
    result = run(name, PROBLEMS["one gpu"]())
    assert result.gap < 0.02


@every_strategy
@pytest.mark.parametrize(
    "case", mostly_slow(["roomy", "tight", "unequal gpus", "two hosts"], "roomy")
)
def test_they_beat_the_classic_greedies(name: str, case: str) -> None:
    problem = PROBLEMS[case]()
    greedies = (GreedySize, GreedyLookup, GreedySizeLookup, GreedyDim)
    times = [g().solve(problem, Roofline(), Limits()).step_time_s for g in greedies]
    mine = run(name, problem).step_time_s
    assert mine <= min(time for time in times if time is not None) * (1 + 1e-9)


@pytest.mark.slow
@every_strategy
def test_constraints_hold(name: str) -> None:
    topology = machine(2, 2, launch_s=1e-8)
    problem = short_of_hbm(0.8, *tables(7, 9000), batch_size=32, on=topology)
    rules = {
        "t0": TableRule(("gpu:1",)),
        "t1": TableRule(("host:1",)),
        "t2": TableRule(None, "dram"),
        "t5": WHOLE,
    }
    asked = Constraints.of(rules, [["t3", "t4"]], {"gpu": 1000})
    problem = replace(problem, constraints=asked)
    result = run(name, problem)
    assert result.plan is not None, result.termination
    verify(result.plan)
    assert unmet(result.plan, problem.constraints) == []
    free = run(name, replace(problem, constraints=Constraints())).step_time_s
    assert result.step_time_s > free


@every_strategy
@given(problems(hbm_bytes=60_000))
@examples(10)
def test_small_problems_short_of_memory(name: str, problem: Problem) -> None:
    """Every strategy checks its plan; here, that there is one or a reason for there being none."""
    result = run(name, problem, time_limit_s=0.3)
    if result.plan is None:
        assert result.termination.reason in ("infeasible", "no_plan")
        assert result.termination.detail
    else:
        assert unmet(result.plan, problem.constraints) == []


@combinations("name, limit", STRATEGIES, ["time", "steps", "stop"])
def test_limits_that_are_reached_at_once(name: str, limit: str) -> None:
    limits: dict[str, dict[str, object]] = {
        "time": {"time_limit_s": 0.0},
        "steps": {"max_steps": 0},
        "stop": {"stop": lambda: True},
    }
    result = run(name, PROBLEMS["tight"](), **limits[limit])
    assert result.plan is not None
    assert result.termination.limit == limit


@pytest.mark.parametrize(
    ("workload", "gpus", "hbm"),
    [
        ("random-26@424398", "8xa100-40", "319MiB"),
        ("mlperf-dcnv2", "8xa100-40", "628MiB"),
        ("mlperf-dcnv2", "8xh100", "512MiB"),
    ],
)
def test_buffers_of_lookups_that_nearly_fill_hbm(workload: str, gpus: str, hbm: str) -> None:
    """Some tables are cut, others read with fewer buffers, and fewer replicated."""
    problem = Problem(named_workload(workload), Topology.parse(gpus, hbm=hbm), 8192)
    found = solve(problem, "greedy-cost", time_limit_s=60.0)
    assert found.step_time_s < 2.5 * found.bound_s


@pytest.mark.slow
@every_strategy
def test_more_steps_are_no_worse(name: str) -> None:
    problem = PROBLEMS["two hosts"]()
    times = [run(name, problem, max_steps=steps).step_time_s for steps in (0, 3, 40)]
    # Bytes of which curves make a little less than plans cost a little time now and then.
    assert all(later <= earlier * 1.001 for earlier, later in pairwise(times))  # type: ignore[operator]


@every_strategy
def test_no_gpu_has_room_though_all_together_have(name: str) -> None:
    """The buffers of three tables that may not be cut, on two GPUs with room for 1.5 each."""
    each, room = three_with_large_buffers()
    problem = problem_of(*each, topology=machine(hbm_bytes=room))
    result = run(name, replace(problem, constraints=Constraints.of({"t*": WHOLE})))
    assert result.plan is None
    # Two tables on one GPU want twice the room of one, and it has 1.5 times that.
    assert result.termination.reason == "infeasible"
    (shortage,) = result.termination.shortages
    assert shortage.short_bytes == pytest.approx(room / 3, rel=1e-3)
    assert shortage.device in result.termination.detail


def test_a_classic_greedy_says_how_many_bytes_of_buffers_have_no_room() -> None:
    """The buffers of three tables in DRAM, on two GPUs that each have room for those of one."""
    each, room = three_with_large_buffers()
    first, second = machine(hbm_bytes=room).gpus
    gpus = first, replace(second, memory_bytes=room * 7 // 6)
    problem = problem_of(*each, topology=replace(machine(), gpus=gpus))
    end = GreedySize().solve(problem, Roofline(), Limits(time_limit_s=TIME_LIMIT_S)).termination
    instance = Instance(problem, Roofline())
    buffers = int(np.ceil(instance.curve(instance.whole(0), 0).hbm_bytes[0]))
    (shortage,) = end.shortages
    assert (shortage.device, shortage.resource) == ("gpu:1", "hbm")
    # Two bytes of each shard are kept free, for rounding.
    assert shortage.short_bytes == 2 * buffers + 2 - room * 7 // 6
    assert f"have at most {format_bytes(room * 7 // 6 - buffers)} of HBM left" in end.detail


@every_strategy
def test_blocks_of_rows_are_in_the_order_of_the_gpus(name: str) -> None:
    """A cost model that cuts the largest table into blocks alone."""

    class Blocks(Roofline):
        def sharding_options(self, problem: Problem, table: int) -> tuple[ShardingOption, ...]:
            blocks = ShardingOption(len(problem.topology.gpus), blocked=True)
            return (ShardingOption(), blocks) if table == 0 else (ShardingOption(),)

    large = zipf_table("large", 20_000, 32, lookups=50.0, exponent=0.1)
    problem = problem_of(large, *tables(3), topology=machine(4, launch_s=0.0))
    result = STRATEGIES[name]().solve(problem, Blocks(), Limits(FAR_S))
    starts = {s.devices[0]: s.rows[0] for s in result.plan.shards_by_table["large"]}
    if name == "beam":
        assert len(starts) == 1
    else:
        assert starts == {f"gpu:{gpu}": 5000 * gpu for gpu in range(4)}


# beam


def test_the_beam_options_by_columns_only() -> None:
    for case in ("tight", "roomy", "unequal gpus")[: fewer(3, 1)]:
        problem = PROBLEMS[case]()
        plan = run("beam", problem).plan
        assert all(len(shard.devices) == 1 for shard in plan.shards)
        for name, shards in plan.shards_by_table.items():
            rows_of = {shard.cols: set() for shard in shards}
            for shard in shards:
                rows_of[shard.cols] |= {*range(*shard.rows)}
            # Every strip has all rows, on one GPU.
            assert all(len(rows) == plan.tables_by_name[name].rows for rows in rows_of.values())
            assert all(len({s.devices for s in shards if s.cols == cols}) == 1 for cols in rows_of)


def test_the_beam_halves_one_large_table() -> None:
    """One table of 64 columns on four GPUs with nothing but its reading to pay: 4 strips."""
    problem = problem_of(zipf_table("t", 5000, 64, lookups=50.0), topology=machine(4, launch_s=0.0))
    result = run("beam", problem)
    strips = sorted(shard.cols for shard in result.plan.shards)
    assert strips == [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert result.stats["beam_steps"] >= 3


# dp


@given(st.integers(0, 10_000))
@examples(30)
def test_the_program_finds_the_least_total_time(seed: int) -> None:
    """Against every choice of options, with bytes that are whole bins."""
    rng = np.random.default_rng(seed)
    instance = Instance(problem_of(*tables(1), topology=machine(2)), Roofline())
    bins = 200
    size = float(instance.hbm_bytes.sum()) / bins
    options = []
    for _ in range(3):
        number = int(rng.integers(1, 5))
        cuts = np.fromiter((ShardingOption(n) for n in range(1, number + 1)), dtype=object)
        bytes_ = rng.integers(0, 80, number) * size
        time_s = rng.integers(1, 50, number).astype(float)
        choices = published.Choices(cuts, np.arange(number), bytes_, time_s, np.zeros(number))
        options.append(choices)
    best = np.full(bins, np.inf)
    for at in np.ndindex(*(one.time_s.size for one in options)):
        used = sum(one.bytes_[n] for one, n in zip(options, at, strict=True)) / size
        if used < bins:
            total = sum(one.time_s[n] for one, n in zip(options, at, strict=True))
            best[round(used)] = min(best[round(used)], total)
    proposals = list(published.cheapest(instance, options))
    if np.isinf(best).all():
        assert proposals == []
        return
    assert proposals[0].total_s == best.min()
    totals = [proposal.total_s for proposal in proposals]
    assert totals == sorted(totals)
    for proposal in proposals:
        indices = [
            one.options.tolist().index(option)
            for one, option in zip(options, proposal.options, strict=True)
        ]
        assert list(proposal.price_indices) == indices
        chosen = zip(options, indices, strict=True)
        assert sum(one.time_s[n] for one, n in chosen) == proposal.total_s


def test_proposals_with_less_hbm_take_longer() -> None:
    instance = Instance(PROBLEMS["tight"](), Roofline())
    options = [
        published.choices_of(instance, table, instance.options_of(table)).within(np.inf)
        for table in range(instance.tables)
    ]
    proposals = list(published.cheapest(instance, options))
    used, totals = [], []
    for proposal in proposals:
        picked = []
        for one, *chosen in zip(options, proposal.options, proposal.price_indices, strict=True):
            pairs = [[*pair] for pair in zip(one.options, one.price_indices, strict=True)]
            picked.append((one, pairs.index(chosen)))
        used.append(sum(one.bytes_[n] for one, n in picked))
        totals.append(sum(one.time_s[n] for one, n in picked))
    assert len(proposals) > 5
    assert used == sorted(used, reverse=True)
    assert used[0] <= instance.hbm_bytes.sum()
    assert totals == pytest.approx([proposal.total_s for proposal in proposals])
    assert totals == sorted(totals)


def test_a_shortage_beside_a_server_with_room_that_may_not_serve() -> None:
    topology = Topology.parse("2xt4+1xcpu", hbm="1GiB", dram="1MiB")
    problem = problem_of(zipf_table("t", 3_000_000, 128), topology=topology)
    pinned = Constraints.of({"t": TableRule(devices=("gpu:0", "gpu:1"))})
    problem = replace(problem, constraints=pinned)
    result = GreedySize().solve(problem, Roofline(), Limits(time_limit_s=TIME_LIMIT_S))
    assert result.termination.reason == "no_plan"
    assert "have at most 1 GiB of HBM left" in result.termination.detail
    assert result.termination.shortages[0].device == "host:0"


@pytest.mark.parametrize(
    ("batch_size", "rows", "words"),
    [
        (10**9, 1, "the GPUs have 1 KiB and hosts without GPUs 2 MiB together"),
        (1, 50_000, "HBM (1 KiB) and DRAM (3 MiB)"),
        (1, 40_000, "Take hosts with more memory (--dram is of hosts with GPUs)"),
    ],
)
def test_memory_of_servers_is_not_called_that_of_gpus(
    batch_size: int, rows: int, words: str
) -> None:
    sizes = {"gpu:0": 1 << 10, "host:0": 1 << 20, "host:1": 2 << 20}
    problem = problem_of(
        zipf_table("t", rows), topology=sized(machine(1, servers=1), sizes), batch_size=batch_size
    )
    pinned = Constraints.of({"t": TableRule(devices=("host:1",))})
    end = run("beam", replace(problem, constraints=pinned), time_limit_s=5.0).termination
    assert end.reason == "infeasible"
    assert words in end.detail


def test_with_the_shortage_more_tables_that_stay_together_fit() -> None:
    each = [zipf_table(f"t{n}", 1000, lookups=8.0) for n in range(5)]
    rules = Constraints(together=(("t0", "t1"), ("t2", "t3")))
    hbm_bytes, refused = 200_000, []
    for _ in range(3):
        problem = problem_of(*each, topology=machine(2, hbm_bytes=hbm_bytes))
        result = GreedySize().solve(replace(problem, constraints=rules), Roofline(), Limits())
        refused.append(result.termination.detail.partition(" of ")[0])
        hbm_bytes += sum(shortage.short_bytes for shortage in result.termination.shortages)
    assert refused[:2] == ["tables 't0', 't1'", "table 't4'"]
    assert result.plan is not None


@every_strategy
@pytest.mark.parametrize(("tier", "devices"), [("dram", ("host:1",)), ("ssd", None)])
def test_rows_that_may_be_in_too_small_a_memory_alone(
    name: str, tier: Memory, devices: tuple[str, ...] | None
) -> None:
    each = [zipf_table(f"t{n}", 1000, 32) for n in range(3)]
    taken = sum(one.table.total_bytes for one in each[:2])
    topology = machine(1, 2).with_memory(ssd="100kB")
    topology = sized(topology, {"host:1": 100_000})
    rule = TableRule(devices, tier, frozenset())
    problem = problem_of(*each, topology=topology)
    problem = replace(problem, constraints=Constraints.of({"t0": rule, "t1": rule}))
    end = run(name, problem, time_limit_s=5.0).termination
    assert end.reason == "infeasible"
    (shortage,) = end.shortages
    has = 100_000 * (1 if devices else 2)
    assert (shortage.resource, shortage.short_bytes) == (tier, taken - has)
    assert f"({taken - has} bytes)" in end.detail or f"({taken} bytes)" in end.detail
    assert f"{format_bytes(has)}" in end.detail
    proof = rows_beyond_their_memories(Instance(problem, Roofline()))
    assert proof.shortages[0].short_bytes == taken - has
    where = "the DRAM of host:1" if devices else "the SSD of host:0, the SSD of host:1"
    take, there_are = (f"{format_bytes(one)} ({one} bytes)" for one in (taken, has))
    rows = f"rows of t0, t1 may only be in {where}, and take {take} with optimizer state"
    assert proof.detail.startswith(f"{rows}; there are {there_are}")
    more = {"host:1": taken} if devices else {}
    roomy = sized(topology.with_memory(ssd=f"{(taken + 1) // 2}B"), more)
    fits = Instance(replace(problem, topology=roomy), Roofline())
    assert rows_beyond_their_memories(fits) is None


def test_rows_share_their_memories_with_rows_that_may_be_in_some_of_these() -> None:
    each = [zipf_table(f"t{n}", 1000, 32) for n in range(2)]
    size = each[0].table.total_bytes
    rules = {"t0": TableRule(("gpu:1",), "dram"), "t1": TableRule(("gpu:1",))}

    def proof(hbm_bytes: int) -> Termination | None:
        topology = sized(machine(1, 2), {"host:1": size, "gpu:1": hbm_bytes})
        problem = replace(problem_of(*each, topology=topology), constraints=Constraints.of(rules))
        return rows_beyond_their_memories(Instance(problem, Roofline()))

    assert proof(size) is None
    found = proof(size - 8)
    assert [(one.device, one.short_bytes) for one in found.shortages] == [("gpu:1, host:1", 8)]


def test_where_nothing_fits_memories_are_named() -> None:
    """Rows have room, but not with what blocks of a drive add to them."""
    each = [zipf_table(f"t{n}", 1000, 31) for n in range(3)]
    taken = sum(one.table.total_bytes for one in each)
    topology = machine(1, hbm_bytes=30_000, dram_bytes=30_000).with_memory(ssd=f"{taken - 55_000}B")
    problem = problem_of(*each, topology=topology, batch_size=2)
    end = run("beam", problem, time_limit_s=5.0).termination
    assert end.shortages
    has = {"ssd": taken - 55_000, "hbm": 30_000, "dram": 30_000}
    for one in end.shortages:
        assert f"on {one.device}, which has {format_bytes(has[one.resource])}" in end.detail
    unknown = nothing_fits(Instance(problem, Roofline()), {}).detail
    assert f"rows take {format_bytes(taken)} with optimizer state, beside buffers; " in unknown
    sizes = ", ".join(f"{format_bytes(has[m])} of {m.upper()}" for m in ("hbm", "dram", "ssd"))
    assert f"there are {sizes}. " in unknown
    # Only rows of float32 tables are narrow, unless that is forbidden.
    float16 = replace(each[1], table=replace(each[1].table, dtype="float16"))
    of_types = Profile((each[0], float16, each[2]))
    rules = Constraints.of({"t0": TableRule(forbid=frozenset({"narrow"}))})
    narrow = replace(problem, profile=of_types, constraints=rules, widths=("int8",))
    taken = each[0].table.total_bytes + float16.table.total_bytes + 1000 * (31 + 8 + 4)
    unknown = nothing_fits(Instance(narrow, Roofline()), {}).detail
    assert f"rows take {format_bytes(taken)} with" in unknown


def test_blocks_go_where_their_host_has_memory_left() -> None:
    two = problem_of(*(zipf_table(name, 10) for name in "abc"), topology=machine(1, 2))
    instance = Instance(two, Roofline())
    needs = Needs(np.ones(2), np.zeros(2), 0.6 * instance.dram_bytes)
    blocks = {(TableShard(table, ShardingOption()),): needs for table in range(3)}
    gpu_of = pack(instance, blocks, np.array([0.0, 9.0]), np.zeros(2))
    assert [*gpu_of.values()] == [0, 1, -1]


def test_rows_may_fill_a_host_exactly() -> None:
    def assigned(dram_bytes: int) -> Assignment | None:
        topology = machine(1, hbm_bytes=1 << 15, dram_bytes=dram_bytes)
        instance = Instance(problem_of(zipf_table("t", 1000), topology=topology), Roofline())
        return Assignment.of(instance, [(TableShard(0, ShardingOption(cold="uva")), 0)])

    roomy = assigned(1 << 20)
    needed = int(roomy.hosts({})[1][0])
    assert assigned(needed) is not None
    assert assigned(needed - 1) is None
