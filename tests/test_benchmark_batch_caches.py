"""The caches against an independent library, against brute force, and against their rules."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_benchmark_slow_memory import imported

from placer.errors import DataError, PlanError

caches = imported("_batch_caches")
FACTORIES, WAYS, cache_sets, set_of = (
    caches.FACTORIES,
    caches.WAYS,
    caches.cache_sets,
    caches.set_of,
)
LruBatchCache, SetAssociativeCache = caches.LruBatchCache, caches.SetAssociativeCache

steps = st.lists(
    st.lists(
        st.tuples(st.integers(0, 39), st.integers(1, 4)), max_size=12, unique_by=lambda x: x[0]
    ),
    max_size=12,
)


# A step at a time.


class PlainLru:
    """LRU by step, from its description."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: dict[int, tuple[int, int]] = {}
        self.now = 0

    def step(self, rows: list[int], counts: list[int]) -> list[bool]:
        hits = [row in self.held for row in rows]
        for place, (row, hit) in enumerate(zip(rows, hits, strict=True)):
            if hit:
                self.held[row] = (self.now, -place)
        for place, (row, hit) in enumerate(zip(rows, hits, strict=True)):
            if hit:
                continue
            if len(self.held) == self.capacity:
                oldest = min(self.held, key=lambda other: self.held[other])
                if self.held[oldest][0] == self.now:
                    continue
                del self.held[oldest]
            self.held[row] = (self.now, -place)
        self.now += 1
        return hits


class PlainSets:
    """FBGEMM's cache, one set after the other."""

    def __init__(self, sets: int, policy: str) -> None:
        self.policy = policy
        self.rows: list[list[int | None]] = [[None] * WAYS for _ in range(sets)]
        self.last_step = [[-1] * WAYS for _ in range(sets)]
        self.lookups: dict[int, int] = {}
        self.now = 0

    def step(self, rows: list[int], counts: list[int]) -> list[bool]:
        own = {row: murmur(row) % len(self.rows) for row in rows}
        hits = [row in self.rows[own[row]] for row in rows]
        for row, count, hit in zip(rows, counts, hits, strict=True):
            self.lookups[row] = self.lookups.get(row, 0) + count
            if hit:
                self.last_step[own[row]][self.rows[own[row]].index(row)] = self.now
        for number in range(len(self.rows)):
            missing = [
                row for row, hit in zip(rows, hits, strict=True) if own[row] == number and not hit
            ]
            self.fill(number, sorted(missing))
        self.now += 1
        return hits

    def fill(self, number: int, missing: list[int]) -> None:
        held, times = self.rows[number], self.last_step[number]
        if self.policy == "lru":
            worth = list(times)
        else:
            missing = sorted(missing, key=lambda row: -self.lookups[row])
            worth = [-1 if row is None else self.lookups[row] for row in held]
        places = sorted(range(WAYS), key=lambda place: worth[place])
        for row, place in zip(missing, places, strict=False):
            limit = self.now - 1 if self.policy == "lru" else self.lookups[row]
            if worth[place] > limit:
                break
            held[place], times[place] = row, self.now


def murmur(row: int) -> int:
    """The 64-bit finalizer of MurmurHash3 on Python's integers."""
    bits = 2**64 - 1
    row ^= row >> 33
    row = row * 0xFF51AFD7ED558CCD & bits
    row ^= row >> 33
    row = row * 0xC4CEB9FE1A85EC53 & bits
    return row ^ row >> 33


def hits_of(cache: Any, batches: list[list[tuple[int, int]]]) -> list[list[bool]]:
    """The hits of each step."""
    hits = []
    for batch in batches:
        pairs = np.array(batch, dtype=np.int64).reshape(-1, 2)
        hits.append(cache.step(pairs[:, 0], pairs[:, 1]).tolist())
    return hits


def plain_hits(
    cache: PlainLru | PlainSets, batches: list[list[tuple[int, int]]]
) -> list[list[bool]]:
    """The hits of each step, of a plain cache."""
    return [cache.step([row for row, _ in b], [count for _, count in b]) for b in batches]


@given(steps, st.integers(1, 20))
def test_lru_by_step_agrees_with_brute_force(batches, capacity: int) -> None:
    assert hits_of(LruBatchCache(capacity, 40), batches) == plain_hits(PlainLru(capacity), batches)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@given(batches=steps)
def test_set_associative_agrees_with_brute_force(policy, batches) -> None:
    # Row numbers are multiplied, so that 40 rows are many for one set of 32.
    assert hits_of(SetAssociativeCache(1, 40, policy), batches) == plain_hits(
        PlainSets(1, policy), batches
    )


@pytest.mark.parametrize("name", FACTORIES)
@given(batches=steps)
def test_rows_held_and_let_in_are_those_that_hit_next(name: str, batches) -> None:
    cache = FACTORIES[name](7, 40)
    everything = np.arange(40)
    for batch in batches:
        pairs = np.array(batch, dtype=np.int64).reshape(-1, 2)
        before = deepcopy(cache).step(everything, np.ones_like(everything))
        cache.step(pairs[:, 0], pairs[:, 1])
        after = deepcopy(cache).step(everything, np.ones_like(everything))
        assert cache.held == after.sum()
        assert cache.admitted == (after & ~before).sum()


@pytest.mark.parametrize("name", FACTORIES)
def test_long_runs_agree_with_brute_force(name: str) -> None:
    rng = np.random.default_rng(3)
    capacity, rows = 4 * WAYS, 3000
    batches = []
    for _ in range(60):
        found, counts = np.unique(np.minimum(rng.zipf(1.15, 400), rows) - 1, return_counts=True)
        batches.append(list(zip(found.tolist(), counts.tolist(), strict=True)))
    plain = PlainLru(capacity) if name == "lru" else PlainSets(4, name[-3:])
    hits = hits_of(FACTORIES[name](capacity, rows), batches)
    assert hits == plain_hits(plain, batches)
    assert 0.2 < np.mean(np.concatenate(hits)) < 0.9


def test_lru_by_step_keeps_no_long_log() -> None:
    cache = LruBatchCache(10, 20)
    rows = np.arange(10)
    for _ in range(100):
        cache.step(rows, np.ones_like(rows))
    assert cache._logged <= 3 * 10


def test_a_step_that_reads_more_rows_than_there_is_room_for_keeps_the_first() -> None:
    cache = LruBatchCache(3, 10)
    rows = np.arange(5)
    cache.step(rows, np.ones_like(rows))
    assert cache.step(rows, np.ones_like(rows)).tolist() == [True, True, True, False, False]


def test_lfu_of_fbgemm_keeps_a_row_that_is_read_more_often() -> None:
    cache = SetAssociativeCache(1, 100, "lfu")
    hot, once = np.arange(WAYS), np.arange(WAYS, 2 * WAYS)
    cache.step(hot, np.full(WAYS, 2))
    cache.step(once, np.ones_like(once))
    assert cache.step(hot, np.ones_like(hot)).all()
    # As often is enough to come in.
    cache.step(once, np.full(WAYS, 3))
    assert cache.step(once, np.ones_like(once)).any()


def test_lru_of_fbgemm_keeps_no_row_for_its_count() -> None:
    cache = SetAssociativeCache(1, 100, "lru")
    hot, once = np.arange(WAYS), np.arange(WAYS, 2 * WAYS)
    cache.step(hot, np.full(WAYS, 2))
    cache.step(once, np.ones_like(once))
    assert not cache.step(hot, np.ones_like(hot)).any()


def test_sets_are_those_of_the_published_hash() -> None:
    rows = np.array([0, 1, 12345, 2**31, 2**40 + 7])
    for sets in (1, 7, 1000, 2**24 - 2):
        assert set_of(rows, sets).tolist() == [murmur(row) % sets for row in rows.tolist()]
    # MurmurHash3's own test of its finalizer.
    assert murmur(1) == 0xB456BCFC34C2CB2C


def test_rows_spread_evenly_over_sets() -> None:
    filled = np.bincount(set_of(np.arange(100_000), 100), minlength=100)
    assert filled.min() > 850
    assert filled.max() < 1150


@pytest.mark.parametrize(
    ("rows", "load_factor", "sets"), [(1000, 0.2, 7), (1024, 0.25, 8), (10, 0.01, 1), (33, 1.0, 2)]
)
def test_caches_are_sized_as_torchrec_sizes_them(rows: int, load_factor: float, sets: int) -> None:
    assert cache_sets(rows, load_factor) == sets


@pytest.mark.parametrize(
    "make",
    [lambda n: LruBatchCache(n, 5), lambda n: SetAssociativeCache(n, 5)],
)
def test_a_cache_without_room_is_refused(make: Callable[[int], object]) -> None:
    with pytest.raises(PlanError, match="cache of 0 rows"):
        make(0)


@pytest.mark.parametrize("name", FACTORIES)
def test_rows_beyond_the_last_are_refused(name: str) -> None:
    cache = FACTORIES[name](4, 10)
    for wrong in (-1, 10):
        with pytest.raises(DataError, match="over 10 rows"):
            cache.step(np.array([wrong]), np.array([1]))
