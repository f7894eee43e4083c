"""benchmarks/slow_memory.py: what bounds caches, what it counts, and a small run of a part."""

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from fast_and_full import examples
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def imported(name: str) -> ModuleType:
    """A module beside the benchmark."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return __import__(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


def most_hits_by_trying(keys: list[int], capacity: int) -> int:
    """The most hits over all ways to hold `capacity` rows, let rows in and throw them out."""
    rows = max(keys) + 1
    states = {frozenset(held): 0 for held in combinations(range(rows), min(capacity, rows))}
    for key in keys:
        after: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            choices = [held] if key in held else [held, *(held - {x} | {key} for x in held)]
            for choice in choices:
                after[choice] = max(after.get(choice, 0), hits + (key in held))
        states = after
    return max(states.values())


@examples(25)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=10), st.integers(1, 3))
def test_no_policy_hits_more_than_the_optimum(keys: list[int], capacity: int) -> None:
    found = imported("_replays").most_hits(np.array(keys), capacity)
    assert found == most_hits_by_trying(keys, capacity)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=200), st.integers(1, 15))
def test_the_optimum_bounds_caches_and_static_sets(keys: list[int], capacity: int) -> None:
    best = imported("_replays").most_hits(np.array(keys), capacity)
    caches = imported("_access_caches")
    assert best >= caches.LruCache(capacity).replay(keys).sum()
    assert best >= caches.LfuCache(capacity).replay(keys).sum()
    assert best >= np.sort(np.bincount(keys))[::-1][:capacity].sum()


def test_half_static_half_cache_splits_the_rows() -> None:
    seen = []

    def cache(rows, counts):
        seen.append((rows.tolist(), counts.tolist()))
        return np.array([False, True])

    step = imported("_fang").both(10, cache)
    hits = step(np.array([3, 9, 10, 25]), np.array([1, 2, 3, 4]))
    assert hits.tolist() == [True, True, False, True]
    assert seen == [([0, 15], [3, 4])]


def test_the_static_share_is_that_of_the_hottest_rows_of_all_tables() -> None:
    fang = imported("_fang")
    tables = [fang.ZipfMandelbrot(50, 1.2), fang.ZipfMandelbrot(30, 0.8, 2.0)]
    chance = [np.arange(1, 51) ** -1.2, (np.arange(1, 31) + 2.0) ** -0.8]
    alone = np.sort(np.concatenate([part / part.sum() for part in chance]))[::-1]
    for rows in (1, 7, 40):
        assert fang.best_static_share(tables, rows) == pytest.approx(
            alone[:rows].sum() / 2, rel=1e-3
        )


def test_a_drawn_batch_counts_what_a_plan_reads_from_host_memory() -> None:
    recshard = imported("_recshard")
    _, _, case = next(iter(recshard.cases(["rm1"])))
    problem = case.problem()
    table = problem.profile.tables[0].table
    shard = recshard.Shard(
        table.name, (4, table.rows, 3), (0, 32), ("gpu:0",), "dram", "staged", staging_rows=8
    )
    hot = recshard.Shard(table.name, (0, 4, 1), (0, 64), ("gpu:0",), "hbm", "device")
    plan = recshard.Plan((table,), problem.topology, (shard, hot))
    batch = recshard.DrawnBatch([(table.name, np.array([0, 1, 4, 4, 5, 7, 10, 10, 10, 11]))])
    reads = batch.reads(plan)
    # Ranks 4, 7 and 10, of which the shard has half the columns.
    assert (reads.lookups, reads.rows) == (3.0, 1.5)
    assert reads.of_lookups == 5.0


def test_the_page_has_the_tables_of_the_results() -> None:
    slow_memory = imported("slow_memory")
    page = (BENCHMARKS.parent / "docs" / "studies.md").read_text(encoding="utf-8")
    assert slow_memory.with_tables(page, BENCHMARKS / "results") == page
    assert page.count(slow_memory.CLOSE) == 6


@pytest.mark.slow
def test_a_small_run_writes_figures_and_a_plot(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(BENCHMARKS / "slow_memory.py")),
            *("--part", "fang", "--quick", "--output", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "slow-memory-fang.json").read_text())
    for record in report["skews"].values():
        shares = record["hit_share"]
        # Where lookups are independent and the chances known, no cache beats the hottest rows.
        assert shares["static"] == pytest.approx(record["expected_static"], abs=0.01)
        assert 0.5 < min(shares.values()) <= max(shares.values()) <= shares["static"] + 0.01
    assert (tmp_path / "slow-memory-fang.png").stat().st_size > 10_000
