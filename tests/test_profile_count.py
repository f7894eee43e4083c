"""Counting a log: exact counts, pooling, coverage, sampling."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fast_and_full import examples
from hypothesis import given
from hypothesis import strategies as st

from placer.data import open_log
from placer.data.log import Bags, Chunk
from placer.errors import DataError, ProfileError
from placer.profile.cdf import AccessCdf
from placer.profile.count import AccessCounter, DenseCounts, profile_log
from placer.profile.table_profile import RowCounts

ROWS = 30
BAG = st.lists(st.integers(0, ROWS - 1), max_size=5)


def write_log(path: Path, bags: list[list[int]]) -> Path:
    kinds = pa.list_(pa.int64())
    pq.write_table(
        pa.table(
            {"many": pa.array(bags, kinds), "one": [len(bag) for bag in bags]},
        ),
        path,
    )
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("csv", "label,user,price\n1,7,1.5\n0,7,2\nmaybe,7,much\n"),
        (
            "jsonl",
            '{"label": 1, "user": 7, "price": 1.5}\n{"label": "x", "user": 7, "price": "x"}\n',
        ),
    ],
)
def test_a_profile_reads_ids_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """Labels and numbers are for training, which refuses these."""
    monkeypatch.setattr("placer.data.formats.text.HEAD_BYTES", 40)
    path = tmp_path / f"log.{name}"
    path.write_text(text)
    log = open_log(path)
    assert profile_log(log)["user"].lookups == text.count("7")
    assert profile_log(log).encoding == log.encoding
    with pytest.raises(DataError, match="which is not a number"):
        list(log.chunks())


class ListLog:
    """A log that is not ours, made of chunks in memory."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self.tables = {"t": ROWS}
        self.feature_tables = {"a": "t"}
        self.dense_names = ()
        self._chunks = chunks

    def chunks(self, samples: int = 65536, skip: int = 0) -> list[Chunk]:
        return self._chunks


@examples(40)
@given(st.lists(BAG, min_size=1, max_size=40))
def test_counts_are_exact(tmp_path_factory: pytest.TempPathFactory, bags: list[list[int]]) -> None:
    path = write_log(tmp_path_factory.mktemp("log") / "log.parquet", bags)
    profile = profile_log(open_log(path, rows=ROWS), dim=8, pooling={"many": "mean"})
    expected = Counter(row for bag in bags for row in bag)
    counts = profile["many"].counts
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == expected
    assert counts.hottest().tolist() == sorted(expected, key=lambda row: (-expected[row], row))
    (feature,) = profile["many"].table.features
    filled = sum(bool(bag) for bag in bags)
    assert feature.coverage == filled / len(bags)
    assert feature.pooling_factor == (expected.total() / filled if filled else 0)
    assert (feature.pooling, profile["one"].table.features[0].pooling) == ("mean", "sum")
    assert profile["one"].features["one"].lookups == profile.samples == len(bags)
    if expected:
        shares = [count for _, count in expected.most_common()]
        assert profile["many"].cdf.share(3) == pytest.approx(sum(shares[:3]) / sum(shares))
    assert profile["many"].cdf.rows == ROWS


@given(st.lists(st.integers(0, 200_000), max_size=200))
def test_the_cdf_of_many_counts_equals_that_of_a_sort(counts: list[int]) -> None:
    array = np.array(counts, dtype=np.uint32)
    exact = AccessCdf.from_counts(array.astype(np.float64))
    fast = AccessCdf.from_counts(array)
    np.testing.assert_array_equal(fast.ranks, exact.ranks)
    np.testing.assert_allclose(fast.shares, exact.shares, rtol=1e-12)


def test_features_of_one_table_are_counted_together(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.parquet", [[1, 2], [], [2]])
    log = open_log(path, rows=ROWS, feature_tables={"many": "t", "one": "t"})
    profile = profile_log(log, source="two features")
    assert profile.table_names == ["t"]
    assert profile["t"].lookups == 6
    assert {name: f.lookups for name, f in profile["t"].features.items()} == {"many": 3, "one": 3}
    assert profile.source == "two features"
    assert profile.encoding == log.encoding


def test_progress_is_told(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.parquet", [[1]] * 1000)
    calls: list[tuple[int, int | None]] = []
    profile_log(open_log(path), sample=0.5, progress=lambda *call: calls.append(call))
    assert calls == [(256, 1000), (512, 1000), (768, 1000), (1000, 1000)]


def test_a_sample_keeps_blocks_by_chance(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    rng = np.random.default_rng(0)
    pq.write_table(pa.table({"item": rng.zipf(1.5, 200_000) % 1000}), path, row_group_size=5000)
    log = open_log(path)
    full = profile_log(log)
    part = profile_log(log, sample=0.2, seed=1)
    assert full.sampling == 1
    assert full.sampling_error("item") == 0
    # 782 blocks: five standard errors of the share that is kept are 7%.
    assert part.sampling == pytest.approx(0.2, abs=0.07)
    assert part.samples == round(part.sampling * 200_000)
    again = profile_log(log, sample=0.2, seed=1)
    other = profile_log(log, sample=0.2, seed=2)
    assert other["item"].counts is not None
    np.testing.assert_array_equal(part["item"].counts.counts, again["item"].counts.counts)
    assert part.samples != other.samples or not np.array_equal(
        part["item"].counts.ids, other["item"].counts.ids
    )
    error = part.sampling_error("item", 0.5)
    hot = full["item"].cdf.hot_rows_for(0.5)
    share = full["item"].cdf.share(hot)
    assert part["item"].cdf.share(hot) == pytest.approx(share, abs=5 * error)


def test_a_sample_equals_counting_the_blocks_that_it_kept(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.parquet", [[i % ROWS] for i in range(3000)])
    ours = open_log(path, rows=ROWS, sparse=["many"], feature_tables={"many": "t"})
    foreign = ListLog(
        [
            Chunk(chunk.samples, {"a": chunk.features["many"]}, chunk.dense)
            for chunk in ours.chunks(256)
        ]
    )
    for seed in range(5):
        one = profile_log(ours, sample=0.6, seed=seed)
        two = profile_log(foreign, sample=0.6, seed=seed)
        assert one.samples == two.samples
        np.testing.assert_array_equal(one["t"].counts.counts, two["t"].counts.counts)
        assert two.encoding is None


def test_counts_that_are_larger_than_memory_are_refused() -> None:
    with pytest.raises(DataError, match=r"counts of 1,152,921,504,606,846,976 rows take .* bytes"):
        DenseCounts(1 << 60)


def test_counts_widen_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = DenseCounts(3)
    limit = np.iinfo(np.uint32).max
    counts.values[1] = limit - 2
    counts._headroom = 2
    counts.add(np.array([1, 1]))
    assert counts.values.dtype == np.uint32
    counts.add(np.array([0, 0]))
    assert counts.values.dtype == np.uint64
    counts.add(np.array([1, 2]))
    assert counts.values.tolist() == [2, limit + 1, 1]
    assert counts._headroom == np.iinfo(np.int64).max - limit - 4
    assert RowCounts.from_dense(counts.values).total == limit + 4


def test_counts_stay_narrow_while_there_is_room() -> None:
    counts = DenseCounts(3)
    counts._headroom = 1  # as if 2**32 - 2 lookups had been spread over the rows
    counts.add(np.array([0, 1, 2]))
    assert counts.values.dtype == np.uint32
    assert counts.values.tolist() == [1, 1, 1]


def test_a_refused_batch_leaves_no_trace() -> None:
    counter = AccessCounter({"t": 3}, {"a": "t", "b": "t"})
    good = Bags(np.array([0, 1]))
    for features, message in [
        ({"a": good}, "differ from those expected in b"),
        ({"a": good, "b": Bags(np.array([0]))}, "'b' has 1 bags for 2 samples"),
        ({"a": good, "b": Bags(np.array([0, 3]))}, "'b' has id 3, but its table has rows 0..2"),
        ({"a": good, "b": Bags(np.array([-1, 0]))}, "'b' has id -1"),
        ({"a": good, "b": Bags(np.array([0, 1], np.int32))}, "vector of int64"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(DataError, match=message):
            counter.add(2, features)
    assert counter.profile()["t"].lookups == 0
    with pytest.raises(DataError, match="'c' reads table 'u'; tables are t"):
        AccessCounter({"t": 3}, {"c": "u"})


def test_nothing_to_count(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the log is empty"):
        profile_log(ListLog([]))
    path = write_log(tmp_path / "log.parquet", [[1]])
    with pytest.raises(DataError, match="kept none of 1 samples"):
        profile_log(open_log(path), sample=1e-9)
    for sample in (0.0, 1.5):
        with pytest.raises(DataError, match="sample must be a share above 0"):
            profile_log(open_log(path), sample=sample)


def test_row_counts_are_narrow_and_add_up() -> None:
    counts = RowCounts.from_dense(np.array([0, 3, 0, 5], dtype=np.uint32))
    assert counts.ids.dtype == counts.counts.dtype == np.int32
    big = RowCounts.from_dense(np.array([1, 0, 0, 2**31 - 1], dtype=np.uint64))
    total = counts + big
    assert total.counts.tolist() == [1, 3, 2**31 + 4]
    assert total.counts.dtype == np.int64
    with pytest.raises(ProfileError, match="4 and 9 rows cannot be added"):
        counts + RowCounts.from_dense(np.zeros(9))


@pytest.mark.real
def test_the_real_criteo_sample(real_data: Path) -> None:
    text = profile_log(open_log(real_data / "criteo_sample.train.xz"))
    assert text.samples == 10_000
    assert len(text) == 26
    # The skew that the data's notes give of both halves of the sample together.
    both = profile_log(open_log(real_data / "criteo_20k.parquet"))
    for table, top_1, top_10 in [("C3", 0.33, 0.50), ("C12", 0.34, 0.52), ("C10", 0.41, 0.65)]:
        cdf = both[table].cdf
        observed = both[table].counts
        shares = cdf.share([observed.ids.size // 100, observed.ids.size // 10])
        np.testing.assert_allclose(shares, [top_1, top_10], atol=0.05)


@pytest.mark.real
def test_the_real_avazu_sample(real_data: Path) -> None:
    profile = profile_log(open_log(real_data / "avazu_10k.parquet", ignore=["id"]))
    assert profile.samples == 9999
    cdf = profile["device_ip"].cdf
    np.testing.assert_allclose(
        cdf.share([cdf.rows // 100, cdf.rows // 10]), [0.12, 0.30], atol=0.05
    )
