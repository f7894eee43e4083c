"""Logs that a program holds give the profiles of the same log in a file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from data_cases import bags, refused
from profile_cases import assert_same_profile

from placer import Profile
from placer.data import open_log
from placer.data.formats import base
from placer.data.formats.base import SAMPLE_ROWS, merged
from placer.errors import DataError
from placer.profile.count import profile_log

SAMPLES = 17_000
"""More than one batch of the reader's."""


def _log() -> pa.Table:
    """A log with missing values, texts, lists and numbers."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 3, SAMPLES)
    return pa.table(
        {
            "label": rng.integers(0, 2, SAMPLES),
            "user": pa.array(rng.integers(0, 50, SAMPLES), mask=rng.random(SAMPLES) < 0.01),
            "city": pa.array(["Graz", "Köln", "", None, "68fd1e64"] * (SAMPLES // 5)),
            "history": pa.ListArray.from_arrays(
                np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
                rng.integers(0, 90, lengths.sum()),
            ),
            "price": rng.random(SAMPLES).astype(np.float32),
        }
    )


LOG = _log()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """The profile of the log in a file."""
    file = tmp_path_factory.mktemp("log") / "log.parquet"
    pq.write_table(LOG, file)
    return profile_log(open_log(file))


def _polars(change: Callable[[Any], Any]) -> Any:
    import polars as pl

    return change(pl.from_arrow(LOG))


def _category(frame: Any) -> Any:
    import polars as pl

    return frame.with_columns(pl.col("city").cast(pl.Categorical))


def _in_chunks() -> pa.Table:
    parts = [LOG.slice(start, 777) for start in range(0, SAMPLES, 777)]
    return pa.concat_tables([LOG.slice(0, 0), *parts])


HELD: dict[str, Callable[[], Any]] = {
    "Table of pyarrow": lambda: LOG,
    "Table of pyarrow in chunks": _in_chunks,
    "Table of pyarrow of a record batch": lambda: LOG.combine_chunks().to_batches()[0],
    "Arrow data set": lambda: ds.dataset(LOG),
    "Arrow stream": lambda: LOG.to_reader,
    "DataFrame of polars": lambda: _polars(lambda frame: frame),
    "DataFrame of polars of categories": lambda: _polars(_category),
    "polars LazyFrame": lambda: _polars(lambda frame: frame.lazy()),
    "DataFrame of pandas": lambda: LOG.to_pandas(types_mapper=_pandas_type()),
}


def _pandas_type() -> Any:
    import pandas as pd

    return pd.ArrowDtype


@pytest.mark.parametrize("name", HELD)
def test_what_a_program_holds_is_a_log(name: str, expected: Profile) -> None:
    log = open_log(HELD[name]())
    profile = profile_log(log)
    assert_same_profile(profile, expected, same_source=False)
    assert name.startswith(profile.source)
    chunks = list(log.chunks(3_000, skip=10_000))
    assert [chunk.samples for chunk in chunks] == [3_000, 3_000, 1_000]
    prices = np.concatenate([chunk.dense[:, 0] for chunk in chunks])
    np.testing.assert_array_equal(prices, LOG["price"].to_numpy()[10_000:])
    (identity,) = log.identity()
    (again,) = open_log(HELD[name]()).identity()
    assert identity == again
    assert identity != open_log(LOG.slice(1)).identity()[0]


@pytest.mark.slow
def test_duckdb_relations(expected: Profile, tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    pq.write_table(LOG, tmp_path / "log.parquet")
    with duckdb.connect() as connection:
        relation = connection.sql(f"SELECT * FROM '{tmp_path / 'log.parquet'}'")
        log = open_log(relation)
        assert_same_profile(profile_log(log), expected, same_source=False)
        few = connection.sql("SELECT range AS user FROM range(20000)")
        with pytest.raises(DataError, match=r"DuckDB relation, row 17: feature 'user' has id 17"):
            profile_log(open_log(few, rows={"user": 17}))


@pytest.mark.slow
def test_hugging_face_data_sets(expected: Profile) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    held = datasets.Dataset(LOG)
    for one in (held, held.to_iterable_dataset()):
        profile = profile_log(open_log(one, encoding=expected.encoding))
        assert_same_profile(profile, expected, same_source=False)
    few = LOG.slice(0, 200)
    sorted_ = datasets.Dataset(few).shuffle(seed=1).sort(["price"])
    one, other = (profile_log(open_log(log, encoding=expected.encoding)) for log in (few, sorted_))
    assert_same_profile(one, other, same_source=False)
    assert_same_profile(profile_log(open_log(held)), expected, same_source=False)
    label = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features({"user": datasets.Value("int32"), "click": label})
    columns = {"user": [0, 1, 2], "click": [0, 1, 0]}
    log = open_log(datasets.Dataset.from_dict(columns, features=features))
    assert (log.tables, log.encoding.label) == ({"user": 3}, "click")

    def generated() -> Any:
        yield from ({"user": user % 5} for user in range(30))

    unknown = datasets.IterableDataset.from_generator(generated)
    assert profile_log(open_log(unknown))["user"].lookups == 30

    def changing() -> Any:
        yield from ({"user": [user] * (user % 2)} for user in range(3))

    refused("cannot read the Hugging Face Iter", datasets.IterableDataset.from_generator(changing))


def test_small_batches_are_joined(
    expected: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers take as long for a row as for a large batch, so such logs took seconds."""
    rows = [batch for at in range(0, SAMPLES, 40) for batch in LOG.slice(at, 40).to_batches()]
    rows[:1] = [rows[0].slice(at, 1) for at in range(40)]
    found: list[pa.Schema] = []
    find = base.plain_schema
    monkeypatch.setattr(base, "plain_schema", lambda schema: found.append(schema) or find(schema))
    assert [batch.num_rows for batch in merged(rows)] == [SAMPLE_ROWS, SAMPLES - SAMPLE_ROWS]
    assert len(found) == 1, "types are found once for all batches of a schema"
    in_small_batches = pa.Table.from_batches(rows)
    with pa.ipc.new_stream(tmp_path / "log.arrows", LOG.schema) as stream:
        for batch in rows:
            stream.write_batch(batch)
    for log in (in_small_batches, tmp_path / "log.arrows"):
        opened = open_log(log, encoding=expected.encoding)
        assert len(list(opened.source._batches())) == 2
        assert_same_profile(profile_log(opened), expected, same_source=False)
    # The first samples of both say what columns hold.
    assert open_log(in_small_batches).encoding == open_log(LOG).encoding


def test_a_stream_is_read_once() -> None:
    log = open_log(LOG.select(["city"]).to_reader(), id_mapping="hash", rows=10)
    assert profile_log(log).samples == SAMPLES
    with pytest.raises(DataError, match="can be read once, and was"):
        profile_log(log)
    with pytest.raises(DataError, match="can be read once, and was"):
        profile_log(open_log(LOG.to_reader()))


def test_errors_name_the_place() -> None:
    import polars as pl

    frame = pl.DataFrame({"user": range(20_000), "price": ["1.5"] * 19_000 + ["much"] * 1000})
    words = r"DataFrame of polars, row 19999: feature 'user' has id 19999"
    with pytest.raises(DataError, match=words):
        profile_log(open_log(frame, rows={"user": 19_999}, ignore=["price"]))
    with pytest.raises(DataError, match=r"DataFrame of polars, row 19000: price is 'much'"):
        list(open_log(frame, dense=["price"]).chunks())
    refused("DataFrame of polars has no column 'item'", frame, sparse=["item"])
    refused("DataFrame of polars has no categorical column", frame, ignore=["user", "price"])
    refused("the Table of pyarrow is empty", LOG.slice(0, 0))
    refused("cannot be read from int", lambda: 3)
    for column in (pl.Series("user", [1]), pa.chunked_array([[1]])):
        refused(r"from \w+; give paths, or a table, .*table\({'user': ids}\)", column)


def test_files_that_polars_writes(tmp_path: Path) -> None:
    """Its first message is no stream's, so that Arrow has to read the file by its footer."""
    pl = pytest.importorskip("polars")
    frame = pl.DataFrame({"user": [3, 0, 3], "city": ["x", None, "y"], "label": [0, 1, 0]})
    frame.write_ipc(tmp_path / "log.arrow")
    frame.write_ipc_stream(tmp_path / "log.arrows")
    for name in ("log.arrow", "log.arrows"):
        log = open_log(tmp_path / name)
        assert bags(log, "user") == [[3], [0], [3]]
        assert bags(log, "city") == [[1], [2], [3]]
