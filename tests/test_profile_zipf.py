"""The fitted law is the one that the counts were drawn from."""

from pathlib import Path

import numpy as np
import pytest

from placer import AccessCdf, Table, TableProfile
from placer.data import open_log
from placer.errors import ProfileError
from placer.profile.count import profile_log
from placer.profile.counts import RowCounts
from placer.profile.zipf import fit_zipf


def draw(rows: int, lookups: int, exponent: float, shift: float = 0.0, seed: int = 0) -> np.ndarray:
    """Counts of independent lookups, rows in random order."""
    rng = np.random.default_rng(seed)
    share = (np.arange(rows) + 1.0 + shift) ** -exponent
    counts = rng.multinomial(lookups, share / share.sum())
    rng.shuffle(counts)
    return counts


@pytest.mark.parametrize("exponent", [0.6, 0.8, 1.0, 1.15, 1.3])
@pytest.mark.parametrize(
    ("rows", "lookups"), [(100_000, 20_000), (100_000, 1_000_000), (2_000, 5_000_000)]
)
def test_the_exponent_is_recovered(rows: int, lookups: int, exponent: float) -> None:
    # From tables that were hardly read to tables whose every row was read often.
    fit = fit_zipf(draw(rows, lookups, exponent))
    assert fit.exponent == pytest.approx(exponent, abs=0.02)
    assert fit.exponent_error < 0.02
    assert fit.distance < 0.02
    assert fit.shift == 0


def test_ranks_by_luck_would_be_too_steep() -> None:
    counts = draw(100_000, 50_000, 0.8)
    ranked = np.sort(counts[counts > 0])[::-1]
    line = -np.polyfit(np.log(np.arange(1, ranked.size + 1)), np.log(ranked), 1)[0]
    assert abs(line - 0.8) > 0.1, "the usual line through observed ranks is far off"
    assert abs(fit_zipf(counts).exponent - 0.8) < 0.02


@pytest.mark.parametrize("shift", [0.0, 3.0, 30.0])
def test_the_shift_is_recovered(shift: float) -> None:
    fit = fit_zipf(draw(50_000, 1_000_000, 1.1, shift), shift=None)
    assert fit.exponent == pytest.approx(1.1, abs=0.02)
    assert fit.shift == pytest.approx(shift, rel=0.15, abs=0.15)
    assert fit.distance < 0.01


def test_a_law_that_does_not_hold_shows() -> None:
    uniform_but_two = np.append(np.full(1000, 100), [50_000, 1])
    assert fit_zipf(uniform_but_two).distance > 0.2


def test_counts_may_come_as_profile_or_without_unread_rows() -> None:
    dense = draw(1000, 5000, 1.0)
    counts = RowCounts.from_dense(dense)
    profile = TableProfile(Table("t", 1000, 4), AccessCdf.from_counts(dense), counts)
    fits = [
        fit_zipf(dense),
        fit_zipf(counts),
        fit_zipf(profile),
        fit_zipf(dense[dense > 0], rows=1000),
        fit_zipf(RowCounts(counts.ids.size, np.arange(counts.ids.size), counts.counts), rows=1000),
    ]
    assert len(set(fits)) == 1
    assert fits[0].cdf.rows == 1000
    assert fits[0].cdf.share(100) == pytest.approx(profile.cdf.share(100), abs=0.05)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("counts", [[10**6, *[0] * 600_000], [1000, 1, *[0] * 1_000_000]])
def test_few_rows_of_very_many_are_fitted_without_a_warning(counts: list[int]) -> None:
    assert 3 < fit_zipf(counts).exponent < 4


def test_what_cannot_be_fitted() -> None:
    with pytest.raises(ProfileError, match="no row was read"):
        fit_zipf(np.zeros(5))
    with pytest.raises(ProfileError, match="3 rows were read, more than the 2 given"):
        fit_zipf([1, 2, 3], rows=2)
    with pytest.raises(ProfileError, match="'t' has no counts to fit"):
        fit_zipf(TableProfile(Table("t", 9, 4), AccessCdf.zipf(9, 1.0)))


@pytest.mark.real
def test_the_real_sample(real_data: Path) -> None:
    profile = profile_log(open_log(real_data / "criteo_sample.train.xz"))
    # C3 has 10,131,227 ids in the published log, of which the sample shows some 5,500.
    fit = fit_zipf(profile["C3"], rows=10_131_227, shift=None)
    assert 0.8 < fit.exponent < 1.6
    assert fit.distance < 1e-3
