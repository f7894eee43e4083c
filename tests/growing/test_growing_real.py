"""Traces of real caches: the next day has the hit rate that was predicted."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from plan_cases import machine

from cost_models import Roofline, log_stream, simulate
from placer import Problem
from placer.data import open_log
from placer.data.log import Chunk
from placer.data.reader import EncodedLog
from placer.executor import BagBatch, make_embeddings
from placer.growing import Growing, KeyMap, working_sets
from placer.growing.working_set import BETWEEN, SHARES
from placer.profile.count import profile_log
from placer.profile.growing_tables import growing_of, hit_rate_for, with_hit_rates
from placer.training.reading import batches
from solvers import solve

pytestmark = pytest.mark.real

BATCH = 4096


def _log(ids: np.ndarray) -> EncodedLog:
    """A log whose ids need 64 bits."""
    return open_log(pa.table({"id": ids * 2**33 - 2**60}), sparse=["id"], id_mapping="vocabulary")


@pytest.mark.parametrize(
    ("trace", "samples", "target"),
    [
        ("scarab-recs", 1_245_184, 50),
        ("orm-busy", 5_000_000, 90),
    ],
)
def test_the_next_day_has_the_hit_rate_that_was_predicted(
    trace: str, samples: int, target: int, real_data: Path
) -> None:
    ids = np.load(real_data / f"{trace}.npz")["id"][:samples].astype(np.int64)
    day = samples // 4 // BATCH * BATCH
    first = _log(ids[: 3 * day])
    found = working_sets(first, day, batch_size=BATCH)
    profile = with_hit_rates(profile_log(first, dim=1, optimizer="sgd"), found)
    growing, _ = growing_of(profile, [f"id={target}%"])
    problem = Problem(profile, machine(1), BATCH, growing=growing)
    plan = solve(problem, "greedy-cost").plan
    assert plan is not None
    encoding = problem.profile.encoding
    assert encoding is not None
    whole = EncodedLog(_log(ids[: 4 * day]).source, encoding)
    embeddings = make_embeddings(plan)

    def trained(chunks: Iterator[Chunk], steps: int) -> tuple[int, int]:
        for _ in range(steps):
            batch = BagBatch.from_chunk(next(chunks), embeddings.feature_names)
            embeddings(batch)["id"].sum().backward()
        counts = embeddings.key_counts()["id"]
        return counts.hits, counts.misses

    chunks = batches(whole, BATCH)
    hits, misses = trained(chunks, 3 * day // BATCH)
    all_hits, all_misses = trained(chunks, day // BATCH)
    executed = (all_hits - hits) / (all_hits - hits + all_misses - misses)
    predicted = hit_rate_for(profile["id"], growing["id"].capacity)
    print(f"{trace} {growing['id'].capacity}: predicted {predicted:.4f}, executed {executed:.4f}")
    assert predicted == pytest.approx(target / 100, abs=0.001)
    assert executed == pytest.approx(predicted, abs=0.01)
    replayed = simulate(plan, [log_stream(plan, whole, BATCH)], Roofline())
    assert replayed.keys == embeddings.key_counts()


@pytest.mark.parametrize(
    ("trace", "column", "often", "furthest"),
    [
        ("scarab-recs", "id", 0.9, 0.03),
        ("orm-busy", "id", 0.8, 0.11),
        ("gowalla_1m", "item", 0.8, 0.09),
    ],
)
def test_the_next_window_is_most_often_in_the_range_of_those_before(
    trace: str, column: str, often: float, furthest: float, real_data: Path
) -> None:
    """docs/growing.md has the figures that this prints."""
    read = np.load(real_data / f"{trace}.npz")[column].astype(np.int64)
    size, steps = read.size // 20, 10
    outside = []
    for share in sorted({*SHARES, *BETWEEN}):
        keys = KeyMap(Growing(round(share * np.unique(read).size)))
        rates = []
        for window in range(20):
            before = keys.counts
            for ids in np.array_split(read[window * size :][:size], steps):
                keys.read(ids)
            hits, misses = keys.counts.hits - before.hits, keys.counts.misses - before.misses
            rates.append(hits / (hits + misses))
            if window >= 3:  # Two windows, at least, have been seen behind the first.
                past = rates[1:-1]
                outside.append(max(min(past) - rates[-1], rates[-1] - max(past), 0))
    inside = np.mean(np.array(outside) <= 0.01)
    print(f"{trace}: {inside:.0%} of {len(outside)} within a point, at most {max(outside):.1%} off")
    assert inside >= often
    assert max(outside) <= furthest
