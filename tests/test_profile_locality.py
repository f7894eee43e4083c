"""Distinct rows of consecutive samples: what is measured, and that everything uses it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from cost_models.step_equation.loads import slice_load
from placer import AccessCdf, Profile
from placer.data.log import Bags
from placer.plan.memory import slice_unique
from placer.profile.count import AccessCounter
from placer.profile.locality import DistinctRows, LocalityCounter, WindowCounts, added
from placer.profile.table_profile import TableProfile, UnknownIds
from placer.workloads.batches import _even_share, drawn_batches

Ids = npt.NDArray[np.int64]
ROWS = 2000
REAL = Path(__file__).parents[2] / "shared" / "data"


def measured(ids: Ids, rows: int = ROWS, chunk: int = 5000) -> TableProfile:
    """The profile of a log of one lookup a sample."""
    tables, features = {"t": rows}, {"t": "t"}
    counter, locality = AccessCounter(tables, features), LocalityCounter(tables, features)
    for start in range(0, ids.size, chunk):
        part = ids[start : start + chunk]
        counter.add(part.size, {"t": Bags(part)})
        locality.add(part.size, {"t": Bags(part)})
    [table] = counter.profile()
    return replace(table, locality=locality.localities()["t"])


def distinct(ids: Ids, samples: int) -> float:
    """Mean distinct rows of windows of the log."""
    starts = np.linspace(0, ids.size - samples, 64).astype(int).tolist()
    return float(np.mean([np.unique(ids[start : start + samples]).size for start in starts]))


def drawn(size: int = 100_000) -> Ids:
    rng = np.random.default_rng(1)
    return np.minimum(rng.zipf(1.3, size) - 1, ROWS - 1).astype(np.int64)


def sessions() -> Ids:
    """Users who come for twenty clicks, forty of them at a time."""
    visits = drawn(4000).reshape(-1, 40)
    rng = np.random.default_rng(2)
    return np.concatenate([rng.permutation(np.repeat(users, 20)) for users in visits])


def test_a_log_of_independent_draws_has_no_locality() -> None:
    table = measured(drawn())
    for lookups in (1, 256, 1000, 16384):
        assert table.draws_of(lookups) == pytest.approx(lookups, rel=0.15)


def test_how_many_draws_are_spread_evenly() -> None:
    """Of 2000 rows, 1000 independent draws read 787; if all are spread, each reads another row."""
    even = replace(measured(np.arange(ROWS)), locality=())
    assert _even_share(even, 1000) == pytest.approx(0.0, abs=2e-3)
    whole = (WindowCounts(1000, 2, 2000, 2000),)
    assert _even_share(replace(even, locality=whole), 1000) == pytest.approx(1.0, abs=1e-4)
    # With half of them spread, the others read 3/4 · (1 − (1 − 1/2000)^500) of the rows besides.
    read = ROWS * (1 - 0.75 * (1 - 1 / ROWS) ** 500)
    half = (WindowCounts(1000, 100, 100_000, round(100 * read)),)
    assert _even_share(replace(even, locality=half), 1000) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("samples", [600, 2500, 6000, 30_000])
def test_a_log_of_sessions_reads_fewer_rows(samples: int) -> None:
    ids = sessions()
    table, real = measured(ids), distinct(ids, samples)
    assert table.cdf.unique(samples) > 1.5 * real
    assert table.expected_unique(samples) == pytest.approx(real, rel=0.1)


def test_all_that_counts_distinct_rows_counts_these() -> None:
    table = measured(sessions())
    for lookups in (500.0, 8192.0, 100_000.0):
        every = table.unique(lookups)
        slices = [(0, 50, 1), (50, 1001, 3), (51, 1001, 3), (52, 1001, 3), (1001, ROWS, 1)]
        loads = [slice_load(table, rows, lookups) for rows in slices]
        assert sum(unique for _, unique in loads) == pytest.approx(every)
        assert sum(slice_unique(table, rows, lookups) for rows in slices) == pytest.approx(every)
        assert all(unique <= read * (1 + 1e-9) for read, unique in loads)
        steps = np.diff(table.unique_at_ranks(lookups)) / np.diff(table.cdf.ranks)
        assert (np.diff(steps) <= 1e-12).all()  # Hotter rows are touched more often.
        assert steps.max() <= 1


def test_beyond_the_largest_window_its_line_goes_on() -> None:
    """A hundred times the lookups read ten times the rows, of so many that none comes again."""
    windows = (WindowCounts(100, 1, 100, 10), WindowCounts(10_000, 2, 20_000, 200))
    found = DistinctRows.of(windows).draws(1e6, AccessCdf.zipf(10**9, 0.0))
    assert found == pytest.approx(1000, rel=1e-3)


def test_windows_of_short_logs_by_hand() -> None:
    one_row, all_rows = np.zeros(256, np.int64), np.arange(256)
    assert measured(all_rows[:255], chunk=100).locality == ()
    assert measured(all_rows, chunk=100).locality == (WindowCounts(256, 1, 256, 256),)
    both = measured(np.concatenate([one_row, all_rows]), chunk=100)
    assert both.locality == (WindowCounts(256, 2, 512, 1 + 256),)


def test_a_window_that_is_much_of_a_log() -> None:
    """What is read once does not come again: a log of different ids reads no id twice."""
    table = measured(np.arange(20_000), rows=20_000)
    assert table.cdf.unique(8192) < 7000
    assert table.unique(8192) == pytest.approx(8192, rel=0.02)
    assert table.unique(50_000) <= 20_000


def test_no_row_is_touched_more_often_than_it_is_read() -> None:
    """Hot rows come again every 200 lookups; all others come once."""
    hot, cold = np.tile(np.arange(100), (200, 1)), np.arange(100, 20_100).reshape(200, 100)
    table = measured(np.hstack([hot, cold]).ravel(), rows=20_100)
    assert 100 < table.unique(200) <= 200


def test_measurements_are_spread_over_a_long_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log whose second half has twice the rows, in stretches of 500 samples."""
    monkeypatch.setattr("placer.profile.locality.STRETCH_SAMPLES", 500)
    rng = np.random.default_rng(0)
    ids = np.concatenate([rng.integers(0, 100, 100_000), rng.integers(0, 200, 100_000)])
    table = measured(ids, rows=200, chunk=500)
    [window] = table.locality
    assert 8 <= window.windows <= 16
    halves = [100 * -np.expm1(-2.56), 200 * -np.expm1(-1.28)]
    assert window.distinct / window.windows == pytest.approx(np.mean(halves), rel=0.05)


def test_merging_adds_windows_and_files_keep_them(tmp_path: Path) -> None:
    one, two = measured(sessions()), measured(drawn())
    one, two = replace(one, unknown=UnknownIds(5, 3)), replace(two, unknown=UnknownIds(7, 2))
    merged = Profile.merge([Profile((one,), 80_000), Profile((two,), 100_000)])
    assert merged["t"].locality == added([two.locality, one.locality])
    assert merged["t"].unknown == UnknownIds(12, None)
    assert merged["t"].unknown_share == pytest.approx(12 / merged["t"].lookups)
    # Row 0 has all ids that are unknown, and is none of those that are listed.
    listed = one.counts.ids.size - (0 in one.counts.ids)
    assert one.unknown_id_share == pytest.approx(3 / (listed + 3))
    assert merged["t"].unknown_id_share is None
    merged.save(tmp_path)
    loaded = Profile.load(tmp_path)["t"]
    assert loaded.locality == merged["t"].locality
    assert loaded.unknown == merged["t"].unknown
    assert loaded.unique(5000) == merged["t"].unique(5000)
    assert isinstance(loaded.locality[0], WindowCounts)


def test_longer_steps_never_read_fewer_rows() -> None:
    """Not even if the windows of a size were of a part of the log with fewer rows."""
    one, most, fewer = (WindowCounts(n, 2, 2 * n, d) for n, d in ((10, 12), (20, 30), (40, 20)))
    of = DistinctRows.of((one, most, fewer))
    assert np.exp(of.log_lookups) == pytest.approx([1, 10, 20, 40])
    assert np.exp(of.log_distinct) == pytest.approx([1, 6, 15, 15])


@pytest.mark.parametrize("samples", [512, 4000])
def test_drawn_batches_read_as_many_rows(samples: int) -> None:
    for ids in (sessions(), drawn()[:12_000]):
        profile = Profile((measured(ids),), ids.size)
        batches = [one.features["t"].ids for one in drawn_batches(profile, samples, 40)]
        read = np.mean([np.unique(batch).size for batch in batches])
        assert read == pytest.approx(profile["t"].expected_unique(samples), rel=0.08)
        # How often a row is read is kept.
        hottest = profile["t"].counts.hottest(20)  # type: ignore[union-attr]
        assert np.isin(np.concatenate(batches), hottest).mean() == pytest.approx(
            float(profile["t"].cdf.share(20)), abs=0.04
        )


@pytest.mark.real
@pytest.mark.skipif(not REAL.is_dir(), reason="there are no real logs here")
@pytest.mark.parametrize("name", ["orm-busy", "scarab-recs", "avazu"])
def test_real_logs_in_their_order(name: str) -> None:
    if name == "avazu":
        import pyarrow.parquet as pq

        column = pq.read_table(REAL / "avazu_10k.parquet", columns=["device_ip"])["device_ip"]
        raw = np.asarray(column.to_pylist())
    else:
        raw = np.load(REAL / f"{name}.npz")["id"]
    keys, ids = np.unique(raw, return_inverse=True)
    table = measured(ids.astype(np.int64), rows=keys.size, chunk=16384)
    for samples in (512, 1000, 2048, 3000, 8192, 20_000, 65_536):
        if samples <= ids.size // 2:
            real = distinct(ids, samples)
            assert table.expected_unique(samples) == pytest.approx(real, rel=0.1), samples
