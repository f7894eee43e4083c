"""Profiles for tests, and their equality."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from placer import AccessCdf, Profile, Table, TableProfile
from placer.profile.hook import profile_batches
from placer.profile.table_profile import RowCounts

TABLES = {"t": 12, "u": 5}
FEATURES = {"a": "t", "b": "t", "c": "u"}


def profile_of(counts: dict[str, RowCounts], **fields: Any) -> Profile:
    """A profile of tables with these counts and no feature."""
    return Profile(
        tuple(
            TableProfile(Table(name, c.rows, 64), AccessCdf.from_counts(c.counts, c.rows), c)
            for name, c in counts.items()
        ),
        **fields,
    )


def assert_same_profile(one: Profile, two: Profile, *, same_source: bool = True) -> None:
    """Bit by bit."""
    assert (one.samples, one.sampling, one.encoding) == (two.samples, two.sampling, two.encoding)
    assert not same_source or one.source == two.source
    assert one.table_names == two.table_names
    for left, right in zip(one, two, strict=True):
        assert left.table == right.table
        assert left.features == right.features
        assert left.zipf_exponent == right.zipf_exponent
        np.testing.assert_array_equal(left.cdf.ranks, right.cdf.ranks)
        np.testing.assert_array_equal(left.cdf.shares, right.cdf.shares)
        assert (left.counts is None) == (right.counts is None)
        if left.counts is not None and right.counts is not None:
            np.testing.assert_array_equal(left.counts.ids, right.counts.ids)
            np.testing.assert_array_equal(left.counts.counts, right.counts.counts)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A batch of bags of every feature."""
    samples = draw(st.integers(1, 6))
    batch = {}
    for feature, table in FEATURES.items():
        bag = st.lists(st.integers(0, TABLES[table] - 1), max_size=4)
        bags = draw(st.lists(bag, min_size=samples, max_size=samples))
        ids = np.array([row for one in bags for row in one], dtype=np.int64)
        batch[feature] = (ids, np.cumsum([0, *map(len, bags)]))
    return batch


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """A profile of a few batches."""
    return count(draw(st.lists(batches(), min_size=1, max_size=4)))


def count(log: list[dict[str, tuple[np.ndarray, np.ndarray]]]) -> Profile:
    """The profile of a log that is a list of batches."""
    return profile_batches(log, tables=TABLES, feature_tables=FEATURES, source="batches")
