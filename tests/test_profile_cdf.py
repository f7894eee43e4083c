"""The access CDF, row orders and what a profile says of its tables."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placer import AccessCdf, Profile, Table, TableProfile
from placer.errors import ProblemError, ProfileError
from placer.profile.table_profile import RowCounts

COUNTS = st.lists(st.integers(0, 1000), min_size=1, max_size=200)
ANY_CDF = st.one_of(
    COUNTS.map(AccessCdf.from_counts),
    st.builds(
        AccessCdf.zipf, st.integers(1, 10**6), st.floats(0, 2), st.sampled_from([0.0, 0.5, 20.0])
    ),
)


@given(ANY_CDF)
def test_a_cdf_is_monotone_and_concave(cdf: AccessCdf) -> None:
    assert cdf.shares[0] == 0
    assert cdf.shares[-1] in (0, 1)
    assert (np.diff(cdf.shares) >= 0).all()
    assert (np.diff(cdf.row_share) <= 1e-12).all()


@given(COUNTS)
def test_a_cdf_of_counts_is_exact_at_every_rank(counts: list[int]) -> None:
    cdf = AccessCdf.from_counts(counts)
    total = max(1, sum(counts))
    ranks = np.arange(len(counts) + 1)
    exact = np.concatenate(([0], np.cumsum(sorted(counts, reverse=True)))) / total
    np.testing.assert_allclose(cdf.share(ranks), exact, atol=1e-12)


@given(ANY_CDF, st.floats(0, 1))
def test_the_fewest_hot_rows_that_take_a_share(cdf: AccessCdf, share: float) -> None:
    rows = cdf.hot_rows_for(share)
    if cdf.shares[-1] < share:
        assert rows == cdf.rows
    else:
        assert cdf.share(rows) >= share - 1e-9
        assert rows == 0 or cdf.share(rows - 1) < share + 1e-9


@given(ANY_CDF, st.just(0.0) | st.floats(1, 1e7))
def test_unique_rows_are_no_more_than_rows_or_lookups(cdf: AccessCdf, lookups: float) -> None:
    unique = cdf.unique(lookups)
    assert -1e-9 <= unique <= min(cdf.rows, lookups) * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.3])
@pytest.mark.parametrize("shift", [0.0, 10.0])
def test_a_zipf_cdf_is_that_of_the_sum(exponent: float, shift: float) -> None:
    weights = (np.arange(100_000) + 1.0 + shift) ** -exponent
    exact = np.concatenate(([0], np.cumsum(weights) / weights.sum()))
    cdf = AccessCdf.zipf(100_000, exponent, shift)
    np.testing.assert_allclose(cdf.share(np.arange(100_001)), exact, atol=2e-3)
    assert AccessCdf.zipf(0, exponent).rows == 0


def test_unique_rows_of_a_step_match_a_simulation() -> None:
    rng = np.random.default_rng(0)
    share = np.arange(1, 501.0) ** -1.1
    share /= share.sum()
    cdf = AccessCdf.from_counts(share)
    drawn = [np.unique(rng.choice(500, 800, p=share)).size for _ in range(200)]
    assert cdf.unique(800) == pytest.approx(np.mean(drawn), rel=0.01)


@pytest.mark.parametrize(
    ("ranks", "shares", "message"),
    [
        ([0, 1], [0.0], "equally many ranks and shares"),
        ([1, 2], [0.0, 1.0], "starting at rank 0"),
        ([0, 2, 2], [0.0, 0.5, 1.0], "ranks must increase"),
        ([0, 1], [0.5, 1.0], "shares start at 0"),
        ([0, 1, 2], [0.0, 0.4, 1.0], "concave"),
        ([0, 1], [0.0, 0.9], "end at 1, not at 0.9"),
    ],
)
def test_what_is_no_cdf(ranks: list[int], shares: list[float], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        AccessCdf(np.array(ranks), np.array(shares))


def test_wrong_numbers_for_a_cdf() -> None:
    assert AccessCdf(np.array([0, 2]), np.array([0, 1])).shares.dtype == np.float64
    with pytest.raises(ProfileError, match="3 counts for a table of 2 rows"):
        AccessCdf.from_counts([1, 2, 3], rows=2)
    with pytest.raises(ProfileError, match=r"within 0\.\.1, not 2"):
        AccessCdf.from_counts([1]).hot_rows_for(2)


@given(COUNTS, st.integers(0, 200))
def test_the_hottest_rows_come_first(counts: list[int], rows: int) -> None:
    rows = min(rows, len(counts))
    hottest = RowCounts.from_dense(counts).hottest(rows)
    assert hottest.dtype == np.int64
    assert hottest.tolist() == sorted(range(len(counts)), key=lambda i: (-counts[i], i))[:rows]


def test_what_are_no_counts() -> None:
    for ids, counts, message in [
        ([0, 1], [1], r"\(2,\) ids with \(1,\) counts"),
        ([1, 0], [1, 1], r"ascend strictly within 0\.\.2"),
        ([0, 3], [1, 1], r"ascend strictly within 0\.\.2"),
        ([0, 1], [1, 0], "at least 1"),
    ]:
        with pytest.raises(ProfileError, match=message):
            RowCounts(3, np.array(ids), np.array(counts))


def test_a_profile_finds_its_tables() -> None:
    def table(name: str, rows: int = 10) -> TableProfile:
        return TableProfile(Table(name, rows, 8), AccessCdf.zipf(rows, 1.0))

    profile = Profile((table("a"), table("b", 20)))
    assert profile["b"].table.rows == 20
    assert (profile["a"].lookups, len(profile)) == (0, 2)
    assert np.isnan(profile.sampling_error("a"))
    assert profile.total_bytes == 30 * (8 * 4 + 4)
    changed = profile.with_tables(dim=4, optimizer="sgd", names=["b"])
    assert changed.total_bytes == 20 * 4 * 4
    with pytest.raises(ProblemError, match="dim"):
        profile.with_tables(dim=0)
    with pytest.raises(ProfileError, match=r"no table 'c' in the profile; it has \['a', 'b'\]"):
        profile["c"]
    with pytest.raises(ProfileError, match=r"more than once in a profile: \['a'\]"):
        Profile((table("a"), table("a")))
    with pytest.raises(ProfileError, match="'a' has 10 rows but an access CDF of 9"):
        TableProfile(Table("a", 10, 8), AccessCdf.zipf(9, 1.0))


ZIPF = "placer.AccessCdf.zipf(10_000_000, {}, 2.5).shares.tobytes()"


def test_a_zipf_law_is_the_same_to_the_bit_without_avx512() -> None:
    """A plan knows its problem on another machine: hashes of problems are over these bits."""
    laws = ", ".join(ZIPF.format(exponent) for exponent in (0.3, 1.0, 1.05))
    command = f"import hashlib, placer; print(hashlib.sha256(b''.join([{laws}])).hexdigest())"
    hashes = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", command],
            env=os.environ | {"NPY_DISABLE_CPU_FEATURES": without},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for without in ("", "X86_V4 AVX512_ICL AVX512_SPR", "AVX512_SKX AVX512_CLX AVX512_ICL")
    }
    assert len(hashes) == 1
