"""Branch and bound: what it leaves out, what it begins with, and when it stops."""

from dataclasses import replace
from typing import Any

import numpy as np
import plan_cases
import pytest
from fast_and_full import fewer, mostly_slow
from problem_cases import counted_table, problem_of, unequal_machine, zipf_table

from cost_models import ANY_SHARE, Roofline
from placer import Constraints, Problem, TableRule
from placer.constraints.unmet import unmet
from placer.topology.topology import Topology
from placer.workloads import named_workload
from solvers.bounds.lagrangian import lagrangian_bound
from solvers.model.assignment import Assignment
from solvers.model.build_plan import fitted_plan
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.result import Limits
from solvers.search import annealing
from solvers.search.branching import (
    BranchAndBound,
    branch_and_bound,
    formulation,
    nodes,
    program,
    tree,
)
from solvers.search.branching.branches import Branches, Examined, Scores
from solvers.search.branching.drives import DrivePoints
from solvers.search.branching.formulation import Layout
from solvers.search.branching.nodes import Relaxed
from solvers.search.branching.tree import relaxed
from solvers.search.construction import construct
from solvers.strategies._search import Search
from solvers.strategies._stages import construct as construct_plans
from solvers.strategies.auto import Auto, Ilp


def begun(workload: str, machine: Topology, batch_size: int = 4096) -> tuple[Assignment, float]:
    """A first assignment of a problem, and its price of HBM."""
    instance = Instance(Problem(named_workload(workload), machine, batch_size), Roofline())
    bound = lagrangian_bound(instance)
    first = construct(instance, bound, bound.step_time_s)
    assert first is not None
    return first, bound.price_s_per_byte


def begun_with_servers(workload: str) -> tuple[Assignment, float]:
    """The same on two GPUs with drives and two servers, with narrow rows."""
    machine = Topology.parse("2xt4+2xcpu", hbm="96MiB", dram="20MiB", ssd="1GiB")
    problem = Problem(named_workload(workload), machine, 4096, widths=("int8",))
    clock = Clock.start(Limits(time_limit_s=3600, max_steps=10_000))
    search = Search.start(Instance(problem, Roofline()), clock)
    first = construct_plans(search)
    assert first is not None
    return first, search.lagrangian.price_s_per_byte


def searched(
    first: Assignment,
    price: float,
    programs: int = 0,
    before: BranchAndBound | None = None,
) -> BranchAndBound:
    """Branch and bound by steps: this many programs, by default the first relaxation."""
    clock = Clock.start(Limits(time_limit_s=3600, max_steps=10_000))
    most_gap = np.inf if programs else 0.0
    found = branch_and_bound(
        first, price, clock=clock, most_gap=most_gap, programs=programs or 25, before=before
    )
    assert found is not None
    return found


def test_ways_to_serve_a_table_are_no_better_than_prices_say() -> None:
    """Branching leaves ways out by prices alone: relaxations of their own say no less."""
    first, price = begun("random-6@2", unequal_machine(1 << 29))
    search = searched(first, price)
    assert search.roots
    f, most, told_apart = search.formulation, search.limit, 0
    for table in range(fewer(4, 1)):
        layouts = nodes.layouts_of(f, search.roots[0], table)
        # Where all may be of use, none is lost.
        scores = Scores(f)
        scores.order = [table]
        branches = Branches(
            f,
            scores,
            False,
            lambda parts: (Examined(part, None) for part in parts),
            lambda: np.inf,
        )
        parts = branches.of(search.roots[0]) or []
        left = {str(layout) for part in parts for layout in nodes.layouts_of(f, part, table)}
        assert left == set(map(str, layouts))
        for layout in layouts[:4]:
            cut = nodes.within_layouts(f, search.roots[0], table, [layout])
            found = relaxed(f, cut, most, 60.0, rounds=8)
            ways = list(nodes.ways_to_serve(cut.groups, table, layout))
            if not found.is_solved or found.bound >= most or len(ways) < 2:
                continue
            bounds = nodes.bounds_of_ways(f, found, table, layout, ways)
            told_apart += int(np.ptp(bounds) > 0)
            for way, expected in zip(ways, bounds, strict=True):
                served = replace(cut, groups=way.groups, layouts={table: layout})
                own = relaxed(f, served, most, 60.0, rounds=8)
                assert own.is_solved
                assert max(own.bound, own.value) >= min(expected, most) * (1 - 1e-4)
    assert told_apart


def test_a_node_is_divided_by_options_until_each_table_has_one() -> None:
    first, price = begun("random-3@4", Topology.parse("2xh100", hbm="1GiB"))
    search = searched(first, price)
    assert search.roots
    f, root = search.formulation, replace(search.roots[0], cut=frozenset(range(3)))
    branches = replace(
        search._branches(np.inf), examined=lambda parts: (Examined(part, None) for part in parts)
    )

    for numbers in ((1, 1, 1), (2, 1, 1), (1, 1, 3), (1, 2, 2)):
        every = [root.options[f.table_of[root.options] == table] for table in range(3)]
        kept = np.concatenate([of[:number] for of, number in zip(every, numbers, strict=True)])
        node = root.within(np.isin(root.options, kept))
        parts = branches.of(node)
        several = [table for table in branches.scores.order if numbers[table] > 1]
        if not several:
            assert parts is None
            continue
        own = set(every[several[0]].tolist()) & set(kept.tolist())
        expected = [{*kept.tolist()} - own | {one} for one in sorted(own)]
        assert [set(part.options.tolist()) for part in parts or ()] == expected


def test_layouts_are_divided_down_to_single_ones_and_none_is_lost() -> None:
    first, price = begun("random-6@4", Topology.parse("4xh100", hbm="1GiB"))
    search = searched(first, price)
    assert search.roots
    whole = [nodes.layouts_of(search.formulation, search.roots[0], table) for table in range(6)]
    assert max(map(len, whole)) > 3
    for layouts in whole:
        parts: list[list[Layout]] = [layouts]
        while any(len(part) > 1 for part in parts):
            parts = [part for each in parts for part in nodes.divided_layouts(each)]
        assert sorted(map(str, layouts)) == sorted(str(part[0]) for part in parts)


@pytest.mark.slow
def test_a_search_begins_where_one_before_it_did_if_that_had_all_its_plans() -> None:
    first, price = begun("random-6@4", Topology.parse("4xh100", hbm="1GiB"))
    before = searched(first, price, 3)
    assert before.best.step_time_s < first.step_time_s
    again = searched(before.best, price, before=before)
    assert again.roots is before.roots
    assert again.bound_s <= before.best.step_time_s
    assert again.programs == 0
    further = searched(before.best, price, 200, before=before)
    assert searched(further.best, price, before=further).bound_s == further.bound_s > again.bound_s
    # What began with a faster plan has left out options that a slower one may have.
    narrow = searched(before.best, price)
    wider = searched(first, price, before=narrow)
    assert wider.formulation is narrow.formulation
    assert wider.roots is not narrow.roots
    other, _ = begun("random-6@5", Topology.parse("4xh100", hbm="1GiB"))
    assert searched(other, price, before=before).formulation is not before.formulation


@pytest.mark.slow
def test_a_search_continues_the_round_that_one_before_it_had_no_time_to_finish() -> None:
    """Searches of 20 programs each would otherwise examine the same nodes again."""
    first, price = begun("random-3@4", Topology.parse("2xh100", hbm="1GiB"))
    search = searched(first, price, 20)
    assert search.unfinished
    for _ in range(5):
        search = searched(search.best, price, 20, before=search)
    once = searched(first, price, 60)
    assert once.bound_s < search.bound_s <= once.best.step_time_s


def test_a_search_that_ends_early_proves_no_more_than_is_true() -> None:
    """In the middle of a division, parts are missing."""
    first, price = begun("random-3@4", Topology.parse("2xh100", hbm="1GiB"))
    known_s = searched(first, price, fewer(60, 20)).best.step_time_s
    for programs in (1, 2, 3, 5, 8, 13)[: fewer(6, 4)]:
        early = searched(first, price, programs)
        assert early.bound_s <= known_s * (1 + 1e-9)


def test_a_gpu_that_serves_nothing_waits_for_others_launches_and_not_for_its_own() -> None:
    """Its own would be ten times as long as the whole step of the others."""
    one_gpu = plan_cases.machine(1)
    (gpu,), links = one_gpu.gpus, one_gpu.links
    slow = replace(gpu, id="gpu:1", launch_s=10 * gpu.launch_s)
    more = [replace(link, a="gpu:1") for link in links]
    machine = replace(one_gpu, gpus=(gpu, slow), links=(*links, *more))
    problem = problem_of(*(zipf_table(c, 40, 8) for c in "abc"), batch_size=4, topology=machine)
    bound = lagrangian_bound(instance := Instance(problem, Roofline()))
    first = construct(instance, bound, bound.step_time_s)
    assert not first.shards[1]
    (root,) = searched(first, bound.price_s_per_byte).roots or ()
    assert root.bound <= 1000 * (1 + 1e-9), "the step of `first`, in units"


@pytest.mark.slow
def test_where_launches_are_much_branching_begins_with_arenas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On two GPUs the relaxation has a share of each arena's launches, and plans all of them."""
    first, price = begun("random-12@3", Topology.parse("2xh100"), 64)
    launches_s = first.instance.launches_weighed_s(0)
    assert launches_s > 0.2 * first.step_time_s
    proven = {}
    for gpus in (0, 4):
        monkeypatch.setattr(tree, "_ARENA_GPUS", gpus)
        proven[gpus] = searched(first, price, 100)
    # Which relaxations are rounded differs.
    assert proven[4].best.step_time_s <= proven[0].best.step_time_s * 1.001
    gaps = {gpus: one.best.step_time_s / one.bound_s - 1 for gpus, one in proven.items()}
    assert gaps[4] < 0.6 * gaps[0]


def test_without_an_arena_that_a_table_needs_there_is_no_plan() -> None:
    first, price = begun("random-12@3", Topology.parse("2xh100"), 64)
    search = searched(first, price)
    assert search.roots
    f, root = search.formulation, search.roots[0]

    def bound_without(arenas: set[int]) -> float:
        without = replace(root, arenas=dict.fromkeys(arenas, (0, 0)))
        found = relaxed(f, without, search.limit, 60.0, rounds=3)
        assert found.is_solved
        return found.bound

    for table in range(0, first.instance.tables, 4)[: fewer(3, 1)]:
        of_shards = f.arena_of[f.part_table == table]
        of_replicas = f.replica_arena[(f.table_of == table) & (f.replica_arena >= 0)]
        arenas = {*of_shards.tolist(), *of_replicas.tolist()}
        assert bound_without(arenas) >= search.limit
        # Without any one of them, it is cut or not.
        assert min(bound_without({arena}) for arena in arenas) < search.limit


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 1e9])
def test_the_first_relaxation_is_the_same_whatever_options_it_begins_with(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, price = begun("random-12@3", unequal_machine(1 << 29))
    usual = searched(first, price)
    monkeypatch.setattr(formulation, "_CHEAP", share)
    other = searched(first, price)
    cheap = other.formulation.cheap_options
    assert cheap.all() if share else cheap.sum() < 0.5 * cheap.size
    # A table's cheapest option is always there.
    assert np.unique(other.formulation.table_of[cheap]).size == first.instance.tables
    assert other.bound_s == pytest.approx(usual.bound_s, rel=1e-3)


@pytest.mark.slow
def test_threads_prove_no_more_than_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    first, price = begun("random-6@4", Topology.parse("4xh100", hbm="1GiB"))
    root_s = searched(first, price).bound_s
    solved: list[Relaxed] = []

    def counted(*arguments: Any) -> Relaxed:
        solved.append(relaxed(*arguments))
        return solved[-1]

    monkeypatch.setattr(tree, "relaxed", counted)
    found = []
    for threads in (1, 3):
        solved.clear()
        # Stop by relaxations, so that a busy machine searches as far as an idle one.
        limits = Limits(time_limit_s=3600, threads=threads, stop=lambda: len(solved) >= 120)
        one = branch_and_bound(first, price, clock=Clock.start(limits))
        assert one.bound_s > root_s
        found.append(one)
    fastest_s = min(one.best.step_time_s for one in found)
    assert all(one.bound_s <= fastest_s * (1 + 1e-9) for one in found)


def test_annealing_that_is_done_again_has_another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, anneal = [], annealing.anneal

    def told(start: Assignment, *, seed: int, **options: object) -> Assignment:
        seeds.append(seed)
        return anneal(start, seed=seed, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(annealing, "anneal", told)
    problem = Problem(named_workload("random-4@4"), Topology.parse("2xh100", hbm="1GiB"), 4096)
    limits = Limits(time_limit_s=3600, seed=7, max_steps=fewer(40, 15), gap=0.0)
    Auto().solve(problem, Roofline(), limits)
    assert len(seeds) > 1
    assert seeds == list(range(7, 7 + len(seeds)))


def test_branch_and_bound_knows_kinds_of_gpus_apart() -> None:
    """The pooled bound has the fastest GPUs do all the work."""
    mixed = unequal_machine(1 << 30)
    slow = [replace(gpu, hbm_bytes_per_s=gpu.hbm_bytes_per_s / 8) for gpu in mixed.gpus[2:]]
    first, price = begun("random-6@4", replace(mixed, gpus=(*mixed.gpus[:2], *slow)))
    instance = first.instance
    assert len(instance.kinds) == 2
    pooled_s = lagrangian_bound(instance).step_time_s + instance.fixed_s
    assert pooled_s * 1.02 < searched(first, price).bound_s <= first.step_time_s


def test_points_that_differ_more_become_one_where_there_are_more_of_them() -> None:
    problem = problem_of(zipf_table("a", 40, 8), topology=plan_cases.machine(2), batch_size=4)
    instance = Instance(problem, Roofline())
    count = formulation.points_of(instance)
    nearly = [
        formulation.Formulation(instance, 1.0, 0.0, most).nearly
        for most in (10 * count, 10 * count - 1, count, count - 1)
    ]
    assert nearly[0] == 0 < nearly[1] == nearly[2] < nearly[3]


@pytest.mark.parametrize("most_points", mostly_slow([0, 10_000], 10_000))
def test_points_that_are_nearly_the_same_become_one(most_points: int) -> None:
    first, price = begun("random-6@4", Topology.parse("4xh100", hbm="1GiB"), 1024)
    fine, coarse = (
        formulation.Formulation(first.instance, first.step_time_s, price, most)
        for most in (10**9, most_points)
    )
    assert coarse.nearly > fine.nearly == 0
    assert coarse.points.shape[1] < 0.9 * fine.points.shape[1]
    # What stands for others is no worse than any of them.
    for part in range(fine.sizes.size):
        mine, other = (
            one.points[:, one.starts[part] : one.starts[part] + one.sizes[part]]
            for one in (fine, coarse)
        )
        below = (other[:, None] <= mine[:, :, None]).all(axis=0)
        assert below.any(axis=1).all()


def test_least_costs_of_drives_are_those_of_all_pairs() -> None:
    """Of each point of a curve with each first row on the drive that is not in HBM."""
    rng = np.random.default_rng(3)
    rows, sizes, drive_sizes = 3, np.array([4, 2, 5]), [6, 0, 3]
    part_of_point = np.repeat(np.arange(sizes.size), sizes)
    first = [np.array([0, 2, 5, 6]), np.array([0, 0]), np.array([0, 1, 1, 2, 3])]
    points = [rng.normal(size=(rows, size)) for size in drive_sizes]
    drives = DrivePoints(rows, points, part_of_point, first)
    numbers = np.array([0, 1, 2, 3, 5, 6, 8, 9, 10])
    for _ in range(20):
        prices = rng.normal(size=(rows, sizes.size)) * 10 ** rng.uniform(-6, 6)
        least, columns = drives.least(prices, numbers)
        for number, cost, column in zip(numbers, least, columns, strict=True):
            part = part_of_point[number]
            every = prices[:, part] @ points[part][:, np.concatenate(first)[number] :]
            assert cost == pytest.approx(min(0.0, every.min(initial=0.0)), rel=1e-9)
            assert column // drives.number == number
            added = prices[:, part] @ drives.costs[:, column % drives.number]
            assert added == pytest.approx(cost, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("ssd", [None, "1GiB"])
def test_the_first_relaxation_counts_dram_drives_and_servers(ssd: str | None) -> None:
    """It proves more than the Lagrangian bound, and no plan is faster."""
    machine = Topology.parse("2xt4+2xcpu", hbm="96MiB", dram="20MiB", ssd=ssd)
    problem = Problem(named_workload("random-3@1"), machine, 4096)
    instance = Instance(problem, Roofline())
    assert instance.needs_servers
    search = Search.start(instance, Clock.start(Limits(time_limit_s=3600, max_steps=10_000)))
    first = construct_plans(search)
    found = searched(first, search.lagrangian.price_s_per_byte)
    assert search.bound_s * (1 - 1e-6) <= found.bound_s <= first.step_time_s
    without_dram = Instance(problem, Roofline())
    unlimited = branch_and_bound(
        first, 0.0, clock=search.clock, most_gap=0.0, bounding=without_dram
    )
    assert unlimited.bound_s < 0.9 * found.bound_s


@pytest.mark.slow
def test_it_is_decided_first_which_tables_servers_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relaxation may take part of a table whole on a server, and the rest of it on GPUs."""
    first, price = begun_with_servers("random-3@1")
    decided = searched(first, price)
    assert decided.roots
    assert any(part.sides for part in decided.roots)
    f = decided.formulation
    for part in decided.roots:
        for table, sides in part.sides.items():
            mine = part.options[f.table_of[part.options] == table].tolist()
            shards = [f.layouts[option].shards for option in mine]
            # One GPU or server has one shard of a table, so both sides need two.
            assert min(shards) >= all(sides) * 2
            assert max(shards) <= 2 * (1 + all(sides))
        # What is decided is not decided again, however far a relaxation is from it.
        every = dict.fromkeys(range(3), (True, False))
        split = replace(part, sides=every, undecided=np.full(3, 0.25))
        assert decided._branches(0.0).by_side(split) is None
        # The program says so if no plan of a part is possible: one shard cannot be on both sides.
        whole = np.array([f.layouts[option].shards == 1 for option in part.options.tolist()])
        both = replace(part.within(whole | (f.table_of[part.options] > 0)), depth=0)
        found = relaxed(f, replace(both, sides={**part.sides, 0: (True, True)}), 2000.0, 60.0, 8)
        assert found.is_solved
        assert found.bound > 2000.0
    monkeypatch.setattr(Branches, "by_side", lambda *_: None)
    open_ = searched(first, price)
    assert open_.bound_s * 1.02 < decided.bound_s <= first.step_time_s


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_servers_are_too_small_for_a_table_alone() -> None:
    counts = [[9] * 1000 + [1] * 32_000, *([7] * 50 + [1] * rows for rows in (3000, 6000, 9000))]
    tables = [counted_table(f"t{n}", of, 32) for n, of in enumerate(counts)]
    machine = plan_cases.machine(1, hbm_bytes=1 << 20, dram_bytes=3 << 20, servers=1)
    problem = problem_of(*tables, topology=machine.with_memory(ssd="1GiB"), batch_size=8)
    result = Ilp().solve(problem, Roofline(), Limits(max_steps=20, threads=1))
    assert result.termination.reason == "optimal"
    assert any(shard.devices == ("gpu:0",) for shard in result.plan.shards_by_table["t0"])


def test_with_servers_tables_that_close_most_of_the_gap_are_divided_first() -> None:
    found = searched(*begun_with_servers("random-5@1"))
    assert found.roots
    f = found.formulation
    # An open share of rows on drives includes none and all of them.
    shares: dict[object, set[float]] = {}
    for table, option in zip(f.table_of.tolist(), f.options, strict=True):
        same = table, option._replace(home=option.home._replace(drive_share=0.0))
        shares.setdefault(same, set()).add(option.home.drive_share)
    assert {ANY_SHARE} in shares.values()
    assert all(of == {ANY_SHARE} for of in shares.values() if ANY_SHARE in of)
    scores = Scores(f)
    heaviest, second, third, *_ = scores.order
    on_gpus = dict.fromkeys(range(5), (True, False))
    node = replace(found.roots[0], bound=900.0, sides=on_gpus, cut=frozenset())
    assert scores.best(node) == heaviest
    assert scores.best(replace(node, cut=frozenset({heaviest}))) == second
    assert scores.best(replace(node, cut=frozenset(scores.order))) is None
    # Servers come first, and of these the tables that they share with GPUs.
    alone = {**on_gpus, third: (False, True)}
    assert scores.best(replace(node, sides=alone)) == third
    assert scores.best(replace(node, sides={**alone, second: (True, True)})) == second
    # One table leaves many parts that are hardly nearer to the target, another one leaves none.
    scores.note(heaviest, node, [replace(node, bound=910.0)] * 20, 1000.0)
    scores.note(third, node, [], 1000.0)
    assert scores.best(node) == third
    scores.note(second, node, [replace(node, bound=999.0)] * 2, 1000.0)
    assert scores.best(node) == third
    # Without servers the heaviest table comes first, whatever was proven.
    assert scores.best(replace(node, sides={})) == heaviest


def test_programs_have_few_options_of_a_table_yet_their_bounds_count_all() -> None:
    first, price = begun("random-6@4", Topology.parse("4xh100", hbm="1GiB"))
    search = searched(first, price)
    assert search.roots
    f, root, most = search.formulation, search.roots[0], search.limit
    few = program.GroupProgram(f, root, most)
    tables = f.table_of[root.options]
    least = np.array([root.extra[tables == table].min() for table in range(6)])
    beyond = (root.extra - least[tables]) / (f.table_costs[tables] / f.devices)
    assert few.tried.any()
    assert not few.tried[beyond > program._TRIED_OF_TABLE * 1.001].any()
    bound = relaxed(f, root, most, 60.0, rounds=8).bound
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "_TRIED_OF_TABLE", np.inf)
        assert program.GroupProgram(f, root, most).tried.sum() > few.tried.sum()
        assert bound == pytest.approx(relaxed(f, root, most, 60.0, rounds=8).bound, rel=1e-3)


HEAVY = [zipf_table(name, 200_000, 64, lookups=20.0) for name in "abcd"]


def ruled(*together: str, **devices: str) -> Problem:
    """Four equal tables on four GPUs; some of them on GPUs with these numbers, some together."""
    rules = {
        table: TableRule(devices=tuple(f"gpu:{number}" for number in numbers))
        for table, numbers in devices.items()
    }
    whole = {table: TableRule(forbid=frozenset({"row-wise", "column-wise"})) for table in "abcd"}
    machine = Topology.parse("4xh100", hbm="1GiB")
    problem = problem_of(*HEAVY, topology=machine, batch_size=4096)
    return replace(problem, constraints=Constraints.of(whole | rules, [together] * bool(together)))


@pytest.mark.parametrize(
    ("together", "devices"),
    [
        ("", {"a": "0", "b": "01", "c": "01"}),
        pytest.param("ab", {}, marks=pytest.mark.slow),
        pytest.param("", {"a": "0", "b": "0"}, marks=pytest.mark.slow),
    ],
)
def test_bounds_count_pins_and_tables_that_stay_together(
    together: str, devices: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = lagrangian_bound(Instance(ruled(), Roofline()))
    instance = Instance(ruled(*together, **devices), Roofline())
    bound = lagrangian_bound(instance)
    assert bound.step_time_s > 1.4 * free.step_time_s
    first = construct(instance, bound, bound.step_time_s)
    assert first is not None
    found = searched(first, bound.price_s_per_byte, 40)
    best = found.best
    assert found.bound_s >= 0.99 * best.step_time_s
    plan = fitted_plan(best)
    assert unmet(plan, instance.problem.constraints) == []
    # With too many sets of pinned tables it leaves them out.
    monkeypatch.setattr(formulation, "_MOST_PINS", 0)
    blind = searched(first, bound.price_s_per_byte, 40)
    assert blind.bound_s <= found.bound_s * (1 + 1e-9)
    assert bool(devices) == (blind.bound_s < 0.99 * best.step_time_s)
