"""The generated log, and the law that its ids follow."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from fast_and_full import mostly_slow
from hypothesis import given
from hypothesis import strategies as st
from training_cases import plan_for
from zipf_sample import fit_zipf_to_sample

from placer.data.reader import open_log
from placer.errors import DataError
from placer.profile.cdf import ZipfMandelbrot
from placer.training.config import TrainConfig
from placer.training.loop import train
from placer.workloads.synthetic_log import (
    CATEGORICAL,
    INTEGER,
    MISSING_SHARE,
    _hashed_ids,
    scaled_rows,
    write_synthetic_log,
)

SAMPLES = 20_000
COLUMNS = ["label", *INTEGER, *CATEGORICAL]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    write_synthetic_log(path, samples=SAMPLES, scale=0.001, seed=3, format="parquet")
    return pa.parquet.read_table(path)


def test_columns_are_those_of_the_criteo_log(table: pa.Table) -> None:
    assert table.column_names == COLUMNS
    assert table.num_rows == SAMPLES
    assert len(INTEGER) == 13
    assert len(CATEGORICAL) == 26


def test_ids_are_eight_hexadecimal_digits_and_within_the_rows(table: pa.Table) -> None:
    rows = scaled_rows(0.001)
    for name in CATEGORICAL:
        ids = [value for value in table.column(name).unique().to_pylist() if value is not None]
        assert 1 < len(ids) <= rows[name]
        assert all(len(value) == 8 and int(value, 16) >= 0 for value in ids)


def test_values_are_missing_as_often_as_stated_and_together(table: pa.Table) -> None:
    for name, column in CATEGORICAL.items():
        share = table.column(name).null_count / SAMPLES
        assert share == pytest.approx(MISSING_SHARE[column.group], abs=0.015)
    for name, integer in INTEGER.items():
        assert table.column(name).null_count / SAMPLES == pytest.approx(integer.missing, abs=0.015)
    together = [np.asarray(table.column(name).is_null()) for name in ("C19", "C20", "C25", "C26")]
    assert all(np.array_equal(together[0], other) for other in together[1:])


def test_labels_are_clicks_at_the_stated_share(table: pa.Table) -> None:
    labels = table.column("label").to_numpy()
    assert set(np.unique(labels)) == {0, 1}
    assert labels.mean() == pytest.approx(0.22, abs=0.02)


def test_skew_is_that_of_the_law(table: pa.Table) -> None:
    column = CATEGORICAL["C3"]
    rows = scaled_rows(0.001)["C3"]
    counts = table.column("C3").drop_null().value_counts().field("counts").to_numpy()
    fitted = fit_zipf_to_sample(counts, rows)
    assert fitted.exponent == pytest.approx(column.exponent, abs=0.15)


def test_text_and_parquet_are_one_log(tmp_path: Path) -> None:
    text, parquet = tmp_path / "log.tsv", tmp_path / "log.parquet"
    write_synthetic_log(text, samples=500, seed=1)
    write_synthetic_log(parquet, samples=500, seed=1, format="parquet")
    read = pa.csv.read_csv(
        text,
        read_options=pa.csv.ReadOptions(column_names=COLUMNS),
        parse_options=pa.csv.ParseOptions(delimiter="\t"),
        convert_options=pa.csv.ConvertOptions(
            column_types=pa.parquet.read_schema(parquet), strings_can_be_null=True
        ),
    )
    assert read.equals(pa.parquet.read_table(parquet))


def test_seeds_tell_logs_apart_and_nothing_else_does(tmp_path: Path) -> None:
    contents = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_synthetic_log(tmp_path / name, samples=300, seed=seed)
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_ids_are_ranks_whose_bits_murmurhash3_mixes() -> None:
    def mixed(bits: int) -> int:
        bits = (bits ^ bits >> 16) * 0x85EBCA6B % 2**32
        bits = (bits ^ bits >> 13) * 0xC2B2AE35 % 2**32
        return bits ^ bits >> 16

    ranks = np.array([0, 1, 2, 40_000_000])
    ids = _hashed_ids(ranks, 2, np.array([False, False, True, False])).to_pylist()
    expected = [f"{mixed((rank + 3 * 0x9E3779B9) % 2**32):08x}" for rank in ranks.tolist()]
    assert ids == [*expected[:2], None, expected[3]]


def test_long_logs_are_written_chunk_by_chunk(tmp_path: Path) -> None:
    seen: list[int] = []
    write_synthetic_log(tmp_path / "log", samples=70_000, scale=0.0001, on_samples=seen.append)
    assert seen == [65_536, 70_000]
    assert sum(1 for _ in (tmp_path / "log").open("rb")) == 70_000


@pytest.mark.slow
def test_the_features_explain_the_label(tmp_path: Path) -> None:
    write_synthetic_log(tmp_path / "log", samples=60_000, scale=0.0001)
    log = open_log(tmp_path / "log", format="criteo", id_mapping="hash", rows=2000)
    config = TrainConfig(batch_size=512, lr=0.02, bottom_mlp=(16,), top_mlp=(16,))
    result = train(plan_for(log, "split", dim=8), log, config)
    assert result.auc > 0.72  # the true probabilities reach 0.83


def test_scaling_keeps_small_tables_and_the_published_sizes() -> None:
    published = {name: column.rows for name, column in CATEGORICAL.items()}
    assert scaled_rows(1) == published
    small = scaled_rows(0.001)
    assert small["C3"] == 10131
    assert small["C7"] == 1000
    assert small["C9"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0}, "log of 0 samples"),
        ({"samples": 5, "scale": 0.0}, "scale 0.0 must be above 0"),
        ({"samples": 5, "scale": 2.0}, "scale 2.0 must be above 0 and at most 1"),
        ({"samples": 5, "format": "csv"}, "'csv' is none of criteo, parquet"),
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_written(
    tmp_path: Path, arguments: dict, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        write_synthetic_log(tmp_path / "log", **arguments)
    assert not list(tmp_path.iterdir())


laws = st.builds(
    ZipfMandelbrot,
    st.integers(1, 300_000),
    st.floats(0, 3),
    st.sampled_from([0.0, 0.5, 8.0, 64.0]),
)


@given(laws, st.integers(0, 2**32 - 1))
def test_ranks_are_rows_and_follow_the_quantiles(law: ZipfMandelbrot, seed: int) -> None:
    quantiles = np.sort(np.random.default_rng(seed).random(200))
    ranks = law.ranks_at(np.append(quantiles, np.nextafter(1, 0)))
    assert ranks.min() >= 0
    assert ranks.max() < law.rows
    assert (np.diff(ranks) >= 0).all()


@pytest.mark.parametrize("law", [ZipfMandelbrot(20_000, 1.1, 2.0), ZipfMandelbrot(9000, 1.0)])
def test_probabilities_of_bins_are_those_of_their_ranks(law: ZipfMandelbrot) -> None:
    mass = np.cumsum((np.arange(law.rows) + 1 + law.shift) ** -law.exponent)
    assert law._shares[1:] == pytest.approx(mass[law._edges[1:] - 1] / mass[-1], rel=1e-9)


@pytest.mark.parametrize("law", [ZipfMandelbrot(20_000, 1.1, 2.0), ZipfMandelbrot(9000, 1.0)])
def test_frequencies_are_those_of_the_law_beyond_the_exact_ranks(law: ZipfMandelbrot) -> None:
    size = 400_000
    ranks = law.draw(np.random.default_rng(0), size)
    mass = (np.arange(law.rows) + 1 + law.shift) ** -law.exponent
    expected = np.cumsum(mass) / mass.sum()
    drawn = np.cumsum(np.bincount(ranks, minlength=law.rows)) / size
    # The Kolmogorov–Smirnov distance of a true sample exceeds 2 / √size once in 1,500 times.
    assert np.abs(drawn - expected).max() < 2 / np.sqrt(size)


@pytest.mark.parametrize(
    ("exponent", "shift"),
    mostly_slow([(0.7, 0.0), (1.05, 0.0), (1.3, 4.0), (2.5, 0.5)], (1.05, 0.0), (2.5, 0.5)),
)
def test_fitting_finds_the_law_of_a_sample(exponent: float, shift: float) -> None:
    law = ZipfMandelbrot(50_000, exponent, shift)
    ranks = law.draw(np.random.default_rng(5), 20_000)
    fitted = fit_zipf_to_sample(np.bincount(ranks)[np.unique(ranks)], law.rows)
    # Exponent and shift can stand in for one another; what they mean is where lookups fall.
    quantiles = np.linspace(0.01, 0.99, 50)
    one, two = law.ranks_at(quantiles), fitted.ranks_at(quantiles)
    np.testing.assert_allclose(np.log1p(one), np.log1p(two), atol=0.35)


@pytest.mark.parametrize(("counts", "rows"), [([], 5), ([1, 1, 1], 2)])
def test_samples_that_fit_no_law_are_refused(counts: list[int], rows: int) -> None:
    with pytest.raises(DataError, match=f"cannot fit the skew of {rows} rows"):
        fit_zipf_to_sample(counts, rows)


@pytest.mark.parametrize("arguments", [(0, 1.0, 0.0), (5, -1.0, 0.0), (5, 1.0, -0.5)])
def test_laws_that_are_none_are_refused(arguments: tuple[int, float, float]) -> None:
    with pytest.raises(DataError, match=f"rows={arguments[0]}"):
        ZipfMandelbrot(*arguments)
