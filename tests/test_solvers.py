"""Solvers: what each of them promises, whatever its strategy."""

import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fast_and_full import examples, fewer, mostly_slow
from hypothesis import given
from plan_cases import enlarged, machine, sized
from problem_cases import (
    counted_table,
    crossed_machine,
    problem_of,
    problems,
    resident_buffers,
    unequal_machine,
    zipf_table,
)

from cost_models import Roofline, ShardingOption
from placer import Plan, Problem, TableProfile, Topology
from placer.constraints.constraints import Constraints
from placer.constraints.file import TableRule
from placer.constraints.unmet import unmet
from placer.errors import PlacerError
from placer.growing import Growing
from placer.plan.memory import device_memory, key_map_bytes
from placer.plan.verify import verify, violations
from placer.workloads import named_workload
from solvers import SOLVERS, Limits, Solver, SolveResult, solve, solver
from solvers.bounds.feasibility import impossible
from solvers.model.clock import Clock
from solvers.model.constraint_rules import search_space, ways_to_shard
from solvers.model.instance import Instance
from solvers.strategies import _stages

GAP = 2e-2
TIME_LIMIT_S = 0.3


def tables(number: int = 5, rows: int = 4000) -> list[TableProfile]:
    """Tables of unequal sizes, dims, lookups and skew."""
    found = []
    for n in range(number):
        dim, lookups = (32, 16, 64)[n % 3], (2.0, 0.5, 6.0)[(n + 1) % 3]
        sizes = f"t{n}", rows // (n + 1), dim
        found.append(zipf_table(*sizes, lookups=lookups, exponent=0.6 + 0.2 * n))
    return found


def three_with_large_buffers() -> tuple[list[TableProfile], int]:
    """Tables, and room for the buffers of 1.5 of them."""
    each = [zipf_table(f"t{n}", 50, 32, lookups=50.0) for n in range(3)]
    return each, resident_buffers(problem_of(each[0])) * 3 // 2


def with_hbm(problem: Problem, share: float) -> Problem:
    """The problem on GPUs that hold together `share` of the tables, in the given proportions.

    Outputs and integers of a step come on top, staged rows do not.
    """
    needed = share * problem.profile.total_bytes + resident_buffers(problem)
    total = sum(gpu.memory_bytes for gpu in problem.topology.gpus)
    memory = {gpu.id: needed * gpu.memory_bytes / total for gpu in problem.topology.gpus}
    return replace(problem, topology=sized(problem.topology, memory))


def log_counts(rows: int, seed: int) -> list[int]:
    """Access counts of a log: skewed, many rows never read, hot rows anywhere."""
    rng = np.random.default_rng(seed)
    counts = np.floor(200.0 / np.arange(1, rows + 1) ** 0.8).astype(int)
    return [int(count) for count in rng.permutation(counts)]


# Steps of tiny tables take microseconds: launches that took as long would hide all the rest.
def server(gpus: int = 2, hosts: int = 1) -> Topology:
    return machine(gpus, hosts, launch_s=1e-8)


def short_of_hbm(
    share: float, *tables: TableProfile, batch_size: int = 64, on: Topology
) -> Problem:
    return with_hbm(problem_of(*tables, topology=on, batch_size=batch_size), share)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "roomy": lambda: problem_of(*tables(), topology=server()),
    "tight": lambda: short_of_hbm(0.5, *tables(), on=server()),
    "very tight": lambda: short_of_hbm(0.2, *tables(), batch_size=16, on=server()),
    "one gpu": lambda: short_of_hbm(0.5, *tables(), batch_size=16, on=server(1)),
    "one table": lambda: short_of_hbm(0.5, *tables(1), on=server()),
    "one table on one gpu": lambda: short_of_hbm(0.6, *tables(1), on=server(1)),
    "more gpus than tables": lambda: problem_of(*tables(2), topology=server(4)),
    "unequal gpus": lambda: short_of_hbm(
        0.7, *tables(rows=9000), batch_size=32, on=unequal_machine(launch_s=1e-8)
    ),
    "each gpu better at something": lambda: short_of_hbm(
        0.5, *tables(), batch_size=32, on=crossed_machine(launch_s=1e-8)
    ),
    "two hosts": lambda: short_of_hbm(0.7, *tables(rows=9000), batch_size=32, on=server(2, 2)),
    "tables of no and one row": lambda: problem_of(
        zipf_table("none", 0), zipf_table("one", 1), *tables(2), topology=server()
    ),
    "tables that nobody reads": lambda: short_of_hbm(
        0.7,
        zipf_table("unread", 900, lookups=0.0),
        counted_table("cold", [0] * 500),
        *tables(2),
        on=server(),
    ),
    "without pooling": lambda: short_of_hbm(
        0.6, zipf_table("t", 2000, lookups=3.0, pooling="none"), *tables(2, 3000), on=server()
    ),
    "counts of a log": lambda: short_of_hbm(
        0.5, *(counted_table(f"c{n}", log_counts(1500, n), 32) for n in range(3)), on=server()
    ),
}


VARIED = ("two hosts", "tables that nobody reads")
"""Problems of which the fast tests ask every solver."""

CONSTRAINTS: dict[str, Constraints] = {
    "pinned": Constraints.of({"t0": TableRule(devices=("gpu:3",)), "t2": TableRule(("host:1",))}),
    "in one tier": Constraints.of({"t0": TableRule(tier="dram"), "t1": TableRule(tier="hbm")}),
    "not split": Constraints.of({"*": TableRule(forbid=frozenset({"split"}))}),
    "never cut": Constraints.of(
        {"*": TableRule(forbid=frozenset({"row-wise", "column-wise", "replicated"}))}
    ),
    "not staged": Constraints.of({"t*": TableRule(forbid=frozenset({"staged"}))}),
    "together": Constraints.of(together=[("t0", "t1", "t3")]),
}
"""What users ask of the tables of "unequal gpus"."""


def assert_same(one: SolveResult, two: SolveResult) -> None:
    """Two results with the same plan, row orders included."""
    assert one.plan.shards == two.plan.shards
    assert (one.step_time_s, one.bound_s) == (two.step_time_s, two.bound_s)
    assert one.plan.hot_ids.keys() == two.plan.hot_ids.keys()
    for name, ids in one.plan.hot_ids.items():
        np.testing.assert_array_equal(ids, two.plan.hot_ids[name])


class SolverContract:
    """What every solver promises. A solver's test class says which it is."""

    name: str

    def solve(self, problem: Problem, *, time_limit_s: float = TIME_LIMIT_S) -> SolveResult:
        return solve(problem, self.name, time_limit_s=time_limit_s, gap=GAP, seed=3, threads=1)

    def check(self, problem: Problem, result: SolveResult) -> Plan:
        """The promises about a result, recomputed from its plan alone."""
        plan = result.plan
        assert plan is not None, result.termination
        assert violations(plan) == []
        assert plan.tables == tuple(profile.table for profile in problem.profile)
        assert plan.topology == problem.topology
        assert plan.batch_size == problem.batch_size
        assert result.step_time_s == Roofline().evaluate(problem, plan).step_time_s
        assert 0 <= result.bound_s <= result.step_time_s
        if result.bound_s:
            assert result.gap == pytest.approx(result.step_time_s / result.bound_s - 1)
            assert (result.termination.reason == "optimal") == (result.gap <= GAP)
        record = plan.solver
        assert (record.step_time_s, record.bound_s) == (result.step_time_s, result.bound_s)
        assert record.status == result.termination.reason
        assert record.seed == 3
        assert record.cost_model == "roofline"
        assert record.search_space == result.stats["search_space"]
        assert plan.provenance.problem_sha256 == problem.sha256
        return plan

    def test_it_is_a_solver_by_its_name(self) -> None:
        assert isinstance(solver(self.name), Solver)
        assert solver(self.name).name == self.name

    @pytest.mark.parametrize("case", mostly_slow(PROBLEMS, *VARIED))
    def test_plans_are_sound_and_times_true(self, case: str) -> None:
        problem = PROBLEMS[case]()
        self.check(problem, self.solve(problem))

    @given(problems())
    @examples(15)
    def test_random_problems_with_room(self, problem: Problem) -> None:
        self.check(problem, self.solve(problem, time_limit_s=0.1))

    @pytest.mark.parametrize("case", mostly_slow(["one gpu", "one table on one gpu"], "one gpu"))
    def test_equal_seeds_give_equal_plans(self, case: str) -> None:
        one, two = (self.solve(PROBLEMS[case](), time_limit_s=60.0) for _ in range(2))
        assert one.termination.limit is None, "choose a problem that is solved before its limit"
        assert_same(one, two)

    def test_plans_survive_their_file(self, tmp_path: Path) -> None:
        problem = PROBLEMS["counts of a log"]()
        plan = self.check(problem, self.solve(problem))
        plan.save(tmp_path / "plan.json")
        loaded = Plan.load(tmp_path / "plan.json")
        verify(loaded)
        assert loaded.shards == plan.shards
        again = Problem(problem.profile, loaded.topology, loaded.batch_size)
        assert again.sha256 == loaded.provenance.problem_sha256
        assert Roofline().evaluate(again, loaded).step_time_s == plan.solver.step_time_s

    def test_rows_in_hbm_are_the_ids_that_the_log_reads_most(self) -> None:
        """The share of the log's lookups that HBM serves, counted id by id."""
        problem = PROBLEMS["counts of a log"]()
        plan = self.check(problem, self.solve(problem))
        served = looked_up = 0.0
        for profile in problem.profile:
            counts = np.zeros(profile.table.rows)
            counts[profile.counts.ids] = profile.counts.counts
            listed = plan.hot_ids.get(profile.name, np.zeros(0, np.int64))
            others = np.setdiff1d(np.arange(profile.table.rows), listed)
            id_of_rank = np.concatenate((listed, others))
            if plan.order_of(profile.name).kind == "profile":
                assert (np.diff(counts[listed]) <= 0).all()
                assert counts[others].max(initial=0) <= counts[listed].min(initial=np.inf)
            per_count = profile.table.lookups_per_sample / counts.sum() / profile.table.dim
            for shard in plan.shards_by_table[profile.name]:
                read = counts[id_of_rank[slice(*shard.rows)]] * per_count * shard.width
                # A cache has the rows that are read most, whatever their ranks.
                hits = np.sort(read)[::-1][: shard.cache_rows] if shard.memory == "dram" else read
                looked_up += read.sum()
                served += hits.sum()
        report = Roofline().evaluate(problem, plan)
        assert report.hbm_lookup_share == pytest.approx(served / looked_up, rel=1e-9)

    def shortage(self, problem: Problem, device: str, resource: str) -> tuple[int, str]:
        """By how many bytes a problem has no plan, and what is said of it."""
        result = self.solve(problem)
        assert (result.plan, result.step_time_s, result.gap) == (None, None, None)
        assert result.termination.reason == "infeasible"
        (shortage,) = result.termination.shortages
        assert (shortage.device, shortage.resource) == (device, resource)
        return shortage.short_bytes, result.termination.detail

    def test_buffers_that_do_not_fit(self) -> None:
        problem = problem_of(*tables(), topology=machine(hbm_bytes=10_000))
        short_bytes, detail = self.shortage(problem, "all GPUs", "hbm")
        assert "--batch-size" in detail
        self.assert_exactly(problem, short_bytes, "hbm")

    def test_tables_that_do_not_fit(self) -> None:
        topology = machine(hbm_bytes=300_000, dram_bytes=123_456)
        problem = problem_of(*tables(), topology=topology, batch_size=8)
        short_bytes, detail = self.shortage(problem, "all hosts", "dram")
        assert f"({short_bytes} bytes)" in detail
        self.assert_exactly(problem, short_bytes, "dram")

    def test_key_maps_that_do_not_fit(self) -> None:
        """They are where they are however tables are placed, and not only where rows have room."""
        problem = problem_of(*tables(), topology=machine(dram_bytes=1 << 20), batch_size=8)
        problem = replace(problem, growing={tables()[0].name: Growing(1 << 20)})
        short_bytes, detail = self.shortage(problem, "host:0", "dram")
        maps = key_map_bytes(problem.topology, problem.growing)["host:0"]
        assert short_bytes == maps - (1 << 20)
        assert f"{short_bytes} bytes too many. Raise --dram" in detail

    def test_drives_that_are_too_small(self) -> None:
        topology = machine(hbm_bytes=300_000, dram_bytes=0).with_memory(ssd="1000B")
        problem = problem_of(*tables(), topology=topology, batch_size=8)
        short_bytes, detail = self.shortage(problem, "all hosts", "ssd")
        room = 2 * 300_000 + 1000
        assert short_bytes == sum(one.table.total_bytes for one in problem.profile) - room
        assert "Raise --ssd" in detail

    def assert_exactly(self, problem: Problem, short_bytes: int, resource: str) -> None:
        """So many bytes more take the proof of infeasibility away, one byte fewer does not."""

        def proof(more: int) -> bool:
            device = "gpu:0" if resource == "hbm" else "host:0"
            changed = enlarged(problem.topology, {device: more})
            return impossible(Instance(replace(problem, topology=changed), Roofline())) is not None

        assert proof(short_bytes - 1)
        assert not proof(short_bytes)


class SearchContract(SolverContract):
    """What solvers promise that search beyond whole tables, for as long as they may."""

    def run(self, problem: Problem, **limits: Any) -> SolveResult:
        """Solve without a gap that would be good enough."""
        chosen: dict[str, Any] = {"time_limit_s": 60.0, "gap": 0.0, "seed": 3, "threads": 1}
        return solver(self.name).solve(problem, Roofline(), Limits(**{**chosen, **limits}))

    @pytest.mark.parametrize("case", mostly_slow(CONSTRAINTS, "pinned"))
    def test_constraints_are_obeyed(self, case: str) -> None:
        free = PROBLEMS["unequal gpus"]()
        assert unmet(self.check(free, self.solve(free)), CONSTRAINTS[case]), "choose ones that bind"
        problem = replace(free, constraints=CONSTRAINTS[case])
        plan = self.check(problem, self.solve(problem))
        assert unmet(plan, problem.constraints) == []

    def test_reserved_memory_stays_free(self) -> None:
        problem = PROBLEMS["tight"]()
        whole_bytes = problem.topology.gpus[0].memory_bytes
        kept = Constraints.of(reserve={"gpu:0": whole_bytes // 3})
        problem = replace(problem, constraints=kept)
        plan = self.check(problem, self.solve(problem))
        used = device_memory(plan)["gpu:0"]
        assert used.total_bytes <= used.capacity_bytes == whole_bytes - whole_bytes // 3

    @pytest.mark.parametrize(
        "case", mostly_slow(["tight", "unequal gpus", "counts of a log"], "tight")
    )
    def test_equal_steps_give_equal_plans(self, case: str) -> None:
        one, two = (self.run(PROBLEMS[case](), max_steps=fewer(6, 2), gap=GAP) for _ in range(2))
        assert one.termination.limit in (None, "steps"), "choose a problem that ends before"
        assert_same(one, two)
        self.check(PROBLEMS[case](), one)

    @pytest.mark.parametrize("asked", mostly_slow([1, 3, 30], 3))
    def test_who_stops_it_gets_the_best_plan_so_far(self, asked: int) -> None:
        """As with Ctrl-C: after being asked a few times whether to."""
        left = iter(range(asked))
        problem = PROBLEMS["unequal gpus"]()
        result = self.run(problem, stop=lambda: next(left, None) is None)
        assert result.termination.limit == "stop"
        verify(result.plan)

    def test_no_plan_is_better_than_with_more_gpus(self) -> None:
        """Twice the GPUs of each kind never take longer, if the search is worth its time."""
        problem = short_of_hbm(0.5, *tables(4), on=server(1))
        larger = problem_of(*tables(4), topology=server(2), batch_size=32)
        (gpu,) = problem.topology.gpus
        larger = replace(larger, topology=larger.topology.with_memory(hbm=gpu.memory_bytes))
        alone, both = self.solve(problem).step_time_s, self.solve(larger).step_time_s
        assert both < alone


OF_ALL = frozenset(
    {
        "test_buffers_that_do_not_fit",
        "test_drives_that_are_too_small",
        "test_equal_seeds_give_equal_plans",
        "test_equal_steps_give_equal_plans",
        "test_key_maps_that_do_not_fit",
        "test_no_plan_is_better_than_with_more_gpus",
        "test_plans_survive_their_file",
        "test_random_problems_with_room",
        "test_reserved_memory_stays_free",
        "test_rows_in_hbm_are_the_ids_that_the_log_reads_most",
        "test_tables_that_do_not_fit",
    }
)
"""What solvers share: the fast tests ask one of a kind."""


class WholeTableContract(SolverContract):
    """The classic greedies: tables are never cut, and may find no place though there is one."""

    @pytest.mark.parametrize("case", mostly_slow(PROBLEMS, *VARIED))
    def test_tables_stay_whole(self, case: str) -> None:
        plan = self.solve(PROBLEMS[case]()).plan
        assert all(len(shards) == 1 for shards in plan.shards_by_table.values())

    @pytest.mark.parametrize("resource", ["dram", "hbm"])
    def test_a_table_too_large_to_stay_whole(self, resource: str) -> None:
        """The shortage names a device; with so much more there the table is placed."""
        if resource == "dram":
            topology = machine(hbm_bytes=300_000, dram_bytes=200_000)
            problem = problem_of(zipf_table("t", 4000, 32), topology=topology, batch_size=8)
        else:
            each, room = three_with_large_buffers()
            problem = problem_of(*each, topology=machine(hbm_bytes=room))
        result = self.solve(problem)
        assert result.plan is None
        assert result.termination.reason == "no_plan"
        assert "`greedy-cost` can" in result.termination.detail
        (shortage,) = result.termination.shortages
        assert shortage.resource == resource
        more = enlarged(problem.topology, {shortage.device: shortage.short_bytes})
        self.check(replace(problem, topology=more), self.solve(replace(problem, topology=more)))


class TestGreedySize(WholeTableContract):
    name = "greedy-size"


class TestGreedyLookup(WholeTableContract):
    name = "greedy-lookup"
    slow_tests = OF_ALL


class TestGreedySizeLookup(WholeTableContract):
    name = "greedy-size-lookup"
    slow_tests = OF_ALL


class TestGreedyDim(WholeTableContract):
    name = "greedy-dim"
    slow_tests = OF_ALL


class TestGreedyCost(SearchContract):
    name = "greedy-cost"
    slow_tests = OF_ALL


class TestIlp(SearchContract):
    name = "ilp"
    slow_tests = OF_ALL

    @pytest.mark.slow
    def test_equal_seeds_and_steps_give_equal_answers_of_programs(self) -> None:
        """With steps, branch and bound does not end by the clock."""
        limits = Limits(time_limit_s=3600.0, gap=GAP, seed=3, threads=1, max_steps=40)
        problem = PROBLEMS["more gpus than tables"]()
        one, two = (solver(self.name).solve(problem, Roofline(), limits) for _ in range(2))
        greedy_s, branched_s = one.stats["greedy_s"], one.stats["branched_s"]
        assert isinstance(greedy_s, float)
        assert isinstance(branched_s, float)
        assert branched_s < greedy_s, "choose a problem that needs programs"
        for stat in ("branched_s", "branching_bound_s", "linear_programs", "moves"):
            assert one.stats[stat] == two.stats[stat], stat
        assert_same(one, two)


class TestAuto(SearchContract):
    name = "auto"


@pytest.mark.parametrize("gpus", [2, 3])
def test_a_table_is_replicated_where_all_gpus_may_serve_it(gpus: int) -> None:
    pinned = TableRule(devices=tuple(f"gpu:{number}" for number in range(gpus)))
    problem = problem_of(zipf_table("t", 40, lookups=9.0), topology=machine(3))
    problem = replace(problem, constraints=Constraints.of({"t": pinned}))
    options = Instance(problem, Roofline()).options_of(0)
    assert any(option.replicated_rows for option in options) is (gpus == 3)
    assert max(option.shard_count for option in options) == gpus


def test_every_solver_is_held_to_the_contract() -> None:
    import_module("test_solvers_strategies")  # Has the classes of other solvers.

    def names(kind: type) -> set[str]:
        own = {kind.name} if hasattr(kind, "name") else set()
        return own.union(*(names(derived) for derived in kind.__subclasses__()))

    assert names(SolverContract) == set(SOLVERS)


@pytest.mark.parametrize("case", mostly_slow(PROBLEMS, "tight"))
def test_the_cost_greedy_beats_the_classic_ones(case: str) -> None:
    problem = PROBLEMS[case]()
    best = solve(problem, "greedy-cost").step_time_s
    for name in ("greedy-size", "greedy-lookup", "greedy-size-lookup", "greedy-dim"):
        assert best <= solve(problem, name).step_time_s * (1 + 1e-9), name


@pytest.mark.parametrize("case", mostly_slow(["tight", "unequal gpus", "two hosts"], "tight"))
def test_the_ilp_is_no_worse_than_the_greedy_that_starts_it(case: str) -> None:
    problem = PROBLEMS[case]()
    greedy = solve(problem, "greedy-cost")
    exact = solve(problem, "ilp", max_steps=fewer(40, 5), threads=1)
    assert exact.step_time_s <= greedy.step_time_s * (1 + 1e-9)
    assert exact.bound_s >= greedy.bound_s * (1 - 1e-9)


@pytest.mark.parametrize("name", mostly_slow(["greedy-cost", "ilp", "auto"], "greedy-cost"))
def test_hosts_too_small_for_a_table(name: str) -> None:
    """A table larger than a GPU and than the host: it has to be cut for its rows to fit."""
    each = *tables(1, 40_000), *tables(3)[1:]
    problem = short_of_hbm(1.3, *each, batch_size=16, on=server(4))
    small = problem.topology.with_memory(dram=problem.profile.total_bytes // 10)
    result = solve(replace(problem, topology=small), name, time_limit_s=1.0)
    assert result.plan is not None, result.termination
    verify(result.plan)


@pytest.mark.parametrize("name", ["greedy-cost", "ilp", "auto"])
def test_a_time_limit_that_is_already_over(name: str) -> None:
    result = solve(PROBLEMS["tight"](), name, time_limit_s=0.0)
    assert result.termination.limit == "time"
    verify(result.plan)


def test_too_little_time_to_prove_more_counts_as_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_stages, "_LEAST_S", np.inf)
    result = solve(PROBLEMS["tight"](), "ilp", time_limit_s=600)
    assert result.termination.reason == "feasible"
    assert result.termination.limit == "time"


@pytest.mark.slow
def test_auto_leaves_easy_problems_to_the_greedy_and_hard_ones_to_programs() -> None:
    easy = solve(PROBLEMS["one gpu"](), "auto", gap=0.05)
    greedy = solve(PROBLEMS["one gpu"](), "greedy-cost", gap=0.05)
    assert easy.step_time_s == greedy.step_time_s
    assert easy.step_time_s == pytest.approx(easy.stats["greedy_s"], rel=1e-12)
    assert "linear_programs" not in easy.stats
    problem = PROBLEMS["more gpus than tables"]()
    greedy = solve(problem, "greedy-cost")
    assert greedy.gap > 0.01, "choose a problem that the greedy leaves open"
    hard = solve(problem, "auto", time_limit_s=20.0)
    assert "linear_programs" in hard.stats
    assert hard.bound_s > greedy.bound_s
    assert hard.termination.reason == "optimal"


@pytest.mark.slow
def test_published_tables_on_a_server_short_of_memory() -> None:
    """26 tables of 98 GB on 8 GPUs of 8 GiB: the cost greedy is within 10% of its bound."""
    topology = Topology.parse("8xh100", hbm="8GiB")
    result = solve(Problem(named_workload("mlperf-dcnv2"), topology, 8192), "greedy-cost")
    assert result.gap < 0.1
    verify(result.plan)


def test_only_tables_of_equal_cost_share_their_curves() -> None:
    """In this workload t81 to t84 are alike, and a rule, a group or growing sets one apart."""
    problem = Problem(named_workload("hugectr-t180"), Topology.parse("2xh100"), batch_size=64)
    number = problem.profile.table_numbers
    alike = Instance(problem, Roofline()).alike
    assert len(set(alike)) == 14
    for table, first in enumerate(alike):
        named, other = problem.profile.tables[table].table, problem.profile.tables[first].table
        assert (named.rows, named.dim) == (other.rows, other.dim)
        assert named.lookups_per_sample == other.lookups_per_sample
        assert alike[first] == first
    four = ["t81", "t82", "t83", "t84"]
    assert len({alike[number[name]] for name in four}) == 1
    constraints = Constraints.of({"t81": TableRule(tier="hbm")}, together=[("t82", "t3")])
    growing = {"t83": Growing(capacity=1000)}
    apart = Instance(replace(problem, constraints=constraints, growing=growing), Roofline()).alike
    assert len({apart[number[name]] for name in four}) == 4


def test_unknown_names_list_the_valid_ones() -> None:
    with pytest.raises(PlacerError, match="no solver is called 'magic'; choose from auto, "):
        solver("magic")
    with pytest.raises(PlacerError, match="no cost model is called 'magic'"):
        solve(PROBLEMS["roomy"](), cost_model="magic")
    assert {solver(name).name for name in SOLVERS} == set(SOLVERS)


def test_the_strategy_of_the_contributors_page(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parent.parent / "CONTRIBUTING.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    space: dict[str, Any] = {}
    exec(code, space)
    problem = Problem(named_workload("random-6"), Topology.parse("2xh100"), batch_size=64)
    pinned = Constraints.of({"t1": TableRule(devices=("gpu:1",))}, together=[("t2", "t3")])
    problem = replace(problem, constraints=pinned)
    found = space["Random"]().solve(problem, Roofline(), Limits(seed=3))
    verify(found.plan)
    assert not unmet(found.plan, pinned)
    assert found.bound_s <= found.step_time_s


def test_a_cost_model_of_ones_own() -> None:
    class Twice(Roofline):
        name = "twice"

    result = solver("greedy-cost").solve(PROBLEMS["roomy"](), Twice(), Limits())
    assert result.plan.solver.cost_model == "twice"
    assert solve(PROBLEMS["roomy"](), "greedy-cost", Twice()).step_time_s == result.step_time_s


def test_what_a_cost_model_imports_takes_no_time_of_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = []

    class Importing(Roofline):
        def sharding_options(self, problem: Problem, table: int) -> tuple[ShardingOption, ...]:
            used.append(table)
            return super().sharding_options(problem, table)

    def start(limits: Limits) -> Clock:
        assert used == [0]
        return Clock(limits, np.inf, None)

    monkeypatch.setattr(Clock, "start", start)
    assert solve(PROBLEMS["roomy"](), "greedy-cost", Importing()).plan is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([ShardingOption()], "whole"),
        ([ShardingOption(4), ShardingOption(2)], "whole, in 2, 4 strided row slices"),
        ([ShardingOption(2, blocked=True)], "whole, in 2 blocks of rows"),
        ([ShardingOption(1, (8, 8))], "whole, in 2 column slices"),
        ([ShardingOption(2, (8, 8, 8))], "whole, in grids of 2×3"),
        ([ShardingOption(replicated_rows=1)], "whole, with all or its hottest rows replicated"),
    ],
)
def test_the_search_space_names_ways_to_shard(options: list[ShardingOption], words: str) -> None:
    assert ways_to_shard(options) == words
    for is_constrained, end in ((False, ""), (True, ", within the constraints")):
        space = search_space(set(options), is_constrained=is_constrained)
        assert space.startswith(f"each table {words};")
        assert space.endswith(f"rest in DRAM, staged{end}")
