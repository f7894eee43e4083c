"""Caches of one access after the other against an independent library and against their rules."""

import sys
from pathlib import Path

import numpy as np
import pytest
from cachetools import Cache, LFUCache, LRUCache
from hypothesis import given
from hypothesis import strategies as st
from test_benchmark_slow_memory import imported

caches = imported("_access_caches")
LfuCache, LruCache = caches.LfuCache, caches.LruCache

keys = st.lists(st.integers(-3, 12), max_size=120)


def library_hits(cache: Cache, accesses: list[int]) -> list[bool]:
    """Which accesses the library's cache has."""
    hits = []
    for key in accesses:
        try:
            cache[key]
            hits.append(True)
        except KeyError:
            cache[key] = True
            hits.append(False)
    return hits


@given(keys, st.integers(1, 10))
def test_lru_agrees_with_the_library(accesses: list[int], capacity: int) -> None:
    hits = LruCache(capacity).replay(accesses)
    assert hits.tolist() == library_hits(LRUCache(capacity), accesses)


@given(keys, st.integers(1, 10))
def test_lfu_agrees_with_the_library(accesses: list[int], capacity: int) -> None:
    hits = LfuCache(capacity).replay(accesses)
    assert hits.tolist() == library_hits(LFUCache(capacity), accesses)


@given(keys, st.integers(1, 10))
def test_lfu_evicts_the_least_frequent_then_the_least_recent(
    accesses: list[int], capacity: int
) -> None:
    held: dict[int, tuple[int, int]] = {}
    hits = []
    for now, key in enumerate(accesses):
        hits.append(key in held)
        if key not in held and len(held) == capacity:
            del held[min(held, key=lambda other: held[other])]
        held[key] = (held.get(key, (0, 0))[0] + 1, now)
    assert LfuCache(capacity).replay(accesses).tolist() == hits


@pytest.mark.real
@pytest.mark.parametrize("trace", ["scarab-recs", "orm-busy"])
@pytest.mark.parametrize(("ours", "theirs"), [(LruCache, LRUCache), (LfuCache, LFUCache)])
def test_real_traces_hit_as_in_the_library(
    real_data: Path, trace: str, ours: type, theirs: type[Cache]
) -> None:
    with np.load(real_data / f"{trace}.npz") as file:
        accesses = file["id"][:300_000]
    distinct = np.unique(accesses).size
    for share in (0.01, 0.1, 0.4):
        capacity = int(share * distinct)
        hits = ours(capacity).replay(accesses)
        assert hits.sum() == sum(library_hits(theirs(capacity), accesses.tolist()))
        assert 0 < hits.sum() < accesses.size - distinct


@pytest.mark.parametrize("kind", [LruCache, LfuCache])
def test_hits_are_the_same_without_numba(kind: type, monkeypatch) -> None:
    accesses = np.random.default_rng(0).zipf(1.2, 5000)
    compiled = kind(40).replay(accesses)
    monkeypatch.setattr(caches, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert (kind(40).replay(accesses) == compiled).all()
    assert compiled.any()


def test_no_accesses_have_no_hits() -> None:
    assert LruCache(1).replay([]).size == LfuCache(1).replay([]).size == 0
