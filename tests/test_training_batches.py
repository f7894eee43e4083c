"""Batches do not depend on how a reader cuts its chunks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from training_cases import ArrayLog, small_log

from placer.data.log import Bags, Chunk, joined
from placer.training.batches import batches, slice_chunk

LOG = small_log(60)


@dataclass(frozen=True)
class UnevenLog(ArrayLog):
    """A log whose chunks end where its files do, as `Log` allows."""

    ends: tuple[int, ...] = ()

    def chunks(self, samples: int = 65536, skip: int = 0) -> Iterator[Chunk]:
        start = skip
        for end in sorted({*self.ends, self.chunk.samples}):
            while start < end:
                yield slice_chunk(self.chunk, start, min(start + samples, end))
                start = min(start + samples, end)


def assert_equal(one: Chunk, two: Chunk) -> None:
    assert one.samples == two.samples
    np.testing.assert_array_equal(one.dense, two.dense)
    np.testing.assert_array_equal(one.labels, two.labels)
    for name, bags in one.features.items():
        np.testing.assert_array_equal(bags.ids, two.features[name].ids)
        np.testing.assert_array_equal(lengths(bags), lengths(two.features[name]))
        np.testing.assert_array_equal(bags.weights, two.features[name].weights)


def lengths(bags: Bags) -> np.ndarray:
    return np.ones(bags.ids.size) if bags.offsets is None else np.diff(bags.offsets)


@given(
    ends=st.lists(st.integers(1, 59), max_size=5),
    size=st.integers(1, 70),
    done=st.integers(0, 6),
)
def test_uneven_chunks_and_skipping_give_the_same_batches(
    ends: list[int], size: int, done: int
) -> None:
    uneven = UnevenLog(LOG.chunk, LOG.tables, LOG.feature_tables, LOG.dense_names, tuple(ends))
    whole = list(batches(LOG, size))
    assert [batch.samples for batch in whole[:-1]] == [size] * (len(whole) - 1)
    again = list(batches(uneven, size, skip=done * size))
    assert len(again) == max(len(whole) - done, 0)
    for one, two in zip(whole[done:], again, strict=True):
        assert_equal(one, two)


@given(st.integers(0, 60))
def test_a_cut_chunk_can_be_joined_again(where: int) -> None:
    bags = LOG.chunk.features["b"]
    weighted = replace(bags, weights=np.linspace(0, 1, bags.ids.size, dtype=np.float32))
    chunk = replace(LOG.chunk, features={**LOG.chunk.features, "b": weighted})
    assert_equal(joined([slice_chunk(chunk, 0, where), slice_chunk(chunk, where, 60)]), chunk)
