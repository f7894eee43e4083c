"""The constants of the generator against the real sample that they were fitted to."""

import lzma
from pathlib import Path

import numpy as np
import pytest
from zipf_sample import fit_zipf_to_sample

from placer.profile.cdf import ZipfMandelbrot
from placer.workloads.synthetic_log import CATEGORICAL, INTEGER, MISSING_SHARE

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def columns(real_data: Path) -> dict[str, np.ndarray]:
    with lzma.open(real_data / "criteo_sample.train.xz", "rt") as file:
        lines = [line.rstrip("\n").split("\t") for line in file]
    names = ["label", *INTEGER, *CATEGORICAL]
    return dict(zip(names, np.array(lines).T, strict=True))


@pytest.mark.parametrize("name", CATEGORICAL)
def test_exponents_and_shifts_are_the_fitted_ones(columns, name: str) -> None:
    column, values = CATEGORICAL[name], columns[name]
    counts = np.unique(values[values != ""], return_counts=True)[1]
    fitted = fit_zipf_to_sample(counts, column.rows)
    assert fitted.shift == column.shift
    assert fitted.exponent == pytest.approx(column.exponent, abs=0.02)


@pytest.mark.parametrize("name", ["C3", "C4", "C7", "C12", "C16", "C21", "C24", "C26"])
def test_samples_of_the_law_look_like_the_real_one(columns, name: str) -> None:
    column, values = CATEGORICAL[name], columns[name]
    present = values[values != ""]
    real = np.sort(np.unique(present, return_counts=True)[1])[::-1]
    law = ZipfMandelbrot(column.rows, column.exponent, column.shift)
    ranks = law.draw(np.random.default_rng(11), present.size)
    drawn = np.sort(np.unique(ranks, return_counts=True)[1])[::-1]
    assert drawn.size == pytest.approx(real.size, rel=0.12)
    for hottest in (1, 10, 100, 1000):
        share = drawn[:hottest].sum() / present.size
        assert share == pytest.approx(real[:hottest].sum() / present.size, abs=0.05)


def test_missing_shares_and_integers_match(columns) -> None:
    for name, column in CATEGORICAL.items():
        missing = np.mean(columns[name] == "")
        assert MISSING_SHARE[column.group] == pytest.approx(missing, abs=1e-4)
    for name, integer in INTEGER.items():
        values = columns[name]
        logs = np.log1p(np.maximum(values[values != ""].astype(float), 0))
        assert integer.missing == pytest.approx(np.mean(values == ""), abs=1e-3)
        assert integer.log_mean == pytest.approx(logs.mean(), abs=0.006)
        assert integer.log_sigma == pytest.approx(logs.std(), abs=0.006)


def test_the_click_share_matches(columns) -> None:
    assert np.mean(columns["label"] == "1") == pytest.approx(0.22, abs=0.005)
