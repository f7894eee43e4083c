"""Caches of tables in id order begin with the rows that a plan lists, not with ids 0…k."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from fast_and_full import mostly_slow
from problem_cases import counted_table
from simulator_cases import executor_rates, one_id_chunk, replay, simulated_rates

from cost_models import Roofline
from placer import Plan, Problem, Profile, Shard, Topology
from placer.plan.fields import RowOrder
from placer.plan.plan import listed_ids, warm_members
from placer.plan.verify import violations
from placer.simulator.replay import ReplayOptions
from solvers.model.build_plan import _warm_ids

ROWS, HOT = 400, 60


def made() -> tuple[Problem, Plan, np.ndarray]:
    """A table whose hot rows are its last ones, a cache over all of them, and the lookups."""
    rng = np.random.default_rng(0)
    ids = ROWS - 1 - np.minimum(rng.zipf(1.3, 6400) - 1, ROWS - 1)
    profile = counted_table("t", np.bincount(ids, minlength=ROWS))
    problem = Problem(Profile((profile,)), Topology.parse("1xt4", hbm="1GiB"), 64)
    shard = Shard("t", (0, ROWS, 1), (0, profile.table.dim), ("gpu:0",), "dram", "cached", HOT)
    shard = Roofline().with_buffers(problem, 0, shard, returns_bags=True)
    warm = _warm_ids(profile.counts.hottest(), [shard])
    plan = Plan(
        (profile.table,), problem.topology, (shard,), {"t": RowOrder("id")}, {"t": warm}, 64
    )
    return problem, plan, ids


def test_a_plan_lists_rows_without_moving_them(tmp_path: Path) -> None:
    _, plan, _ = made()
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.order_of("t").kind == "id"
    assert listed_ids(loaded, "t").size == 0  # Ranks are ids.
    np.testing.assert_array_equal(loaded.hot_ids["t"], plan.hot_ids["t"])
    assert loaded.hot_ids["t"].size == HOT
    first = int(plan.hot_ids["t"].min())
    every_second = warm_members(loaded, "t", (first, ROWS, 2))
    assert set(first + 2 * every_second) == {
        one for one in plan.hot_ids["t"] if (one - first) % 2 == 0
    }
    assert not violations(loaded)
    wrong = replace(loaded, hot_ids={"t": np.array([ROWS])})
    assert [one.rule for one in violations(wrong)] == ["row_order"]


def test_each_cache_begins_with_the_hottest_rows_of_its_shard() -> None:
    shards = [
        Shard("t", rows, (0, 8), ("gpu:0",), "dram", "cached", cache_rows=2)
        for rows in ((0, 3, 2), (3, 6, 1))
    ]
    assert _warm_ids(np.array([5, 1, 0, 4, 2, 3]), shards).tolist() == [5, 0, 4, 2]


@pytest.mark.parametrize("policy", mostly_slow(["lfu", "rank"], "lfu"))
def test_the_share_from_hbm_is_the_one_that_is_claimed(policy: str) -> None:
    problem, plan, ids = made()
    claimed = Roofline().evaluate(problem, plan).hbm_lookup_share
    feature = plan.tables[0].features[0].name
    batches = [one_id_chunk(part, feature) for part in islice(ids.reshape(-1, 64), 100)]
    options = ReplayOptions(1, policy, look_ahead=False)  # type: ignore[arg-type]
    expected = executor_rates(plan, batches, policy=policy, ahead=False)  # type: ignore[arg-type]
    assert simulated_rates(*replay(plan, batches, options)) == expected
    assert expected.hbm_hit_rate == pytest.approx(claimed, abs=0.01 if policy == "rank" else 0.05)
    cold = replace(plan, row_order={}, hot_ids={})
    before = executor_rates(cold, batches, policy=policy, ahead=False)  # type: ignore[arg-type]
    assert before.hbm_hit_rate < expected.hbm_hit_rate - 0.01
