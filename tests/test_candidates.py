"""The search over candidates, against all plans of small problems."""

import itertools
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
from fast_and_full import mostly_slow
from plan_cases import machine
from problem_cases import problem_of, zipf_table

from cost_models import Roofline
from placer.constraints.constraints import Constraints, TableRule
from solvers import solve
from solvers.model.clock import Clock
from solvers.model.instance import Instance
from solvers.model.knapsack import Float
from solvers.result import Limits
from solvers.search.candidates.placement import Group, Place, Space, State
from solvers.search.candidates.search import (
    Pool,
    _descend,
    _exchange,
    _fill,
    _refine,
    prices_of,
    search,
)
from solvers.search.candidates.shards import _groups

RANKS = 2


def drawn_group(rng: np.random.Generator, span: int) -> Group:
    """A few candidates, of which those that take less memory take more time."""
    count = int(rng.integers(1, 4))
    seconds = np.sort(rng.uniform(1, 10, count))[:, None, None] + rng.uniform(
        0, 1, (count, 1, span)
    )
    tier_bytes = np.sort(rng.uniform(1, 10, count))[::-1, None, None, None] + np.zeros(
        (1, 1, span, 1)
    )
    allowed = np.array([True, bool(rng.integers(3))]) if span == 1 else None
    return Group(span, False, False, seconds, tier_bytes, [*range(count)], allowed)


def every_state(space: Space) -> list[State]:
    places = [
        [
            Place(number, candidate, (slot,))
            for number, group in enumerate(groups)
            for candidate in range(len(group.sources))
            for slot in range(RANKS // group.span)
            if group.allowed is None or group.allowed[slot]
        ]
        for groups in space.tables
    ]
    return [State(space, dict(enumerate(chosen))) for chosen in itertools.product(*places)]


@pytest.mark.parametrize("seed", mostly_slow(range(12), 0, 3, 4, 10))
def test_the_best_of_all_plans_is_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = [[drawn_group(rng, span) for span in (1, RANKS)] for _ in range(4)]
    memory = np.full((RANKS, 1), rng.uniform(15, 40))
    bundles = [(table,) for table in range(len(tables))]
    fitting = [s for s in every_state(Space(tables, bundles, memory, RANKS, 1.0)) if s.fits]
    found = search(tables, bundles, memory, RANKS, Clock.start(Limits(60.0, max_steps=200)))
    assert (found.state is None) == (not fitting)
    if found.state is not None:
        assert found.state.fits
        best = min(state.step_s for state in fitting)
        assert found.state.step_s == pytest.approx(best, rel=1e-9)
        assert found.limit_s <= best * (1 + 1e-9)
    pool = Pool(tables, memory)
    groups = [group for table in tables for group in table]
    held = [float(one.sum()) for group in groups for one in group.tier_bytes]
    assert pool.tier_bytes[:, 0] == pytest.approx(held)
    cheapest = np.minimum.reduceat(pool.seconds + 0.5 * np.array(held), pool.starts).sum()
    limit_s = (cheapest - 0.5 * memory.sum()) / RANKS
    assert pool.limit_s(np.array([0.5])) == pytest.approx(limit_s)
    least = np.minimum.reduceat(pool.tier_bytes, pool.starts).sum()
    for share in (0.4, 0.6, 0.8):  # At such prices, the cheapest candidates fit if any do.
        used = pool.used(pool.priced(prices_of(pool, share))).sum()
        assert used <= max(least, pool.capacity.sum() * share) * (1 + 1e-9)


def test_candidates_that_others_are_as_good_as_are_left_out() -> None:
    kinds = {
        "usual": ([2, 2], [5, 5]),
        "one shard takes longer": ([1, 3], [5, 5]),
        "one shard is larger": ([2, 2], [2, 8]),
        "fast and large": ([1, 1], [9, 9]),
        "too large": ([0, 0], [9, 10]),
    }
    seconds = np.array([[own] for own, _ in kinds.values()], dtype=float)
    tier_bytes = np.array([[own] for _, own in kinds.values()], dtype=float)[..., None]
    group = Group(RANKS, False, False, seconds, tier_bytes, [*kinds])
    kept = group.worthwhile(np.full((2 * RANKS, 1), 9.0))
    assert set(kept.sources) == {"usual", "fast and large"}
    assert group.worthwhile(np.full((2 * RANKS, 1), 4.0)) is None


def test_shards_of_the_first_table_are_exchanged_too() -> None:
    groups = [
        [Group(1, False, False, np.full((1, 1, 1), s), np.full((1, 1, 1, 1), 5.0), [0])]
        for s in (2.0, 1.0, 1.0)
    ]
    space = Space(groups, [(0,), (1,), (2,)], np.full((RANKS, 1), 15.0), RANKS, 1.0)
    state = State(space, {table: Place(0, 0, (0,)) for table in range(3)})
    assert _exchange(state, 0)
    assert state.seconds.tolist() == [2.0, 2.0]
    assert state.free.tolist() == [[5.0], [10.0]]


def test_a_table_on_all_ranks_gives_memory_to_their_whole_tables() -> None:
    sizes = np.array([8.0, 6.0, 4.0])
    shared_s, whole_s = np.array([1.0, 2.0, 3.0]), np.array([1.0, 5.0, 9.0])

    def group(seconds: Float, tier_bytes: Float, span: int) -> Group:
        shape = seconds.size, 1, span
        held = np.broadcast_to(tier_bytes[:, None, None], shape)[..., None]
        return Group(
            span, False, False, np.broadcast_to(seconds[:, None, None], shape), held, [0, 1, 2]
        )

    tables = [[group(shared_s, sizes, RANKS)], *[[group(whole_s, sizes, 1)]] * RANKS]
    space = Space(tables, [(0,), (1,), (2,)], np.full((RANKS, 1), 12.0), RANKS, 1.0)
    state = State(space, {0: Place(0, 0, (0,)), 1: Place(0, 2, (0,)), 2: Place(0, 2, (1,))})
    clock = Clock.start(Limits(60.0))
    _descend(state, clock)
    assert state.step_s == 10
    _refine(state, clock)
    assert state.step_s == 4
    assert state.fits


def test_candidates_may_fill_a_rank_exactly() -> None:
    seconds, tier_bytes = np.array([2.0, 1.0]), np.array([5.0, 10.0])
    group = Group(1, False, False, seconds[:, None, None], tier_bytes[:, None, None, None], [0, 1])
    space = Space([[group]] * 2, [(0,), (1,)], np.full((RANKS, 1), 15.0), RANKS, 1.0)
    state = State(space, {table: Place(0, 0, (0,)) for table in range(2)})
    assert _fill(state, 0)
    assert (state.seconds.tolist(), state.free.tolist()) == ([3.0, 0.0], [[0.0], [15.0]])
    assert not _fill(state, 0)


def test_shards_of_a_table_are_on_different_ranks() -> None:
    problem = problem_of(zipf_table("t", 8_000, 64, lookups=20.0), topology=machine(4))
    instance = Instance(problem, Roofline())
    groups = [*_groups(instance, [instance.whole(0)])]
    sizes = {group.units * group.span for group in groups}
    assert min(sizes) == 1 < max(sizes) <= 4
    for group in groups:
        assert group.distinct == (group.units * group.span > 1)
        assert group.is_loose == (group.units == group.span == 1)


@pytest.mark.skipif(find_spec("torchrec") is None, reason="torchrec is not installed")
def test_constraints_hold_under_torchrecs_costs() -> None:
    tables = [zipf_table(f"t{n}", 8_000, 64, lookups=20.0) for n in range(5)]
    problem = problem_of(*tables, topology=machine(4).with_memory(hbm="2MiB"), batch_size=512)
    rules = Constraints(
        tables=(("t0", TableRule(devices=("gpu:3",))), ("t4", TableRule(tier="dram"))),
        together=(("t1", "t2"),),
    )
    result = solve(replace(problem, constraints=rules), cost_model="torchrec", max_steps=30)
    devices = {
        name: {device for shard in shards for device in shard.devices}
        for name, shards in result.plan.shards_by_table.items()
    }
    assert devices["t0"] == {"gpu:3"}
    assert devices["t1"] == devices["t2"]
    assert len(devices["t1"]) == 1
    assert all(shard.memory == "dram" for shard in result.plan.shards_by_table["t4"])
    assert result.step_time_s >= result.bound_s
