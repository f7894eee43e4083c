"""`open_log`: options, id mappings, and vocabularies."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import refused
from fast_and_full import examples
from hypothesis import example, given
from hypothesis import strategies as st

from placer.data import open_log, vocabulary
from placer.data.encoding import Encoding, Hash
from placer.data.formats.columnar import ParquetSource
from placer.data.layout import Layout, NamedColumns
from placer.data.options import TextOptions
from placer.data.vocabulary import build_vocabularies
from placer.errors import DataError

BAGS = st.lists(st.lists(st.integers(0, 12), max_size=4), min_size=1, max_size=60)


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    path = tmp_path / "log.parquet"
    table = pa.table(
        {"user": ["u", "v", "u", "w", "u", "w"], "item": [5, 5, 2, 5, 9, 2], "buy": [0.0] * 6}
    )
    pq.write_table(table, path)
    return path


def rows_of(log: Any, feature: str) -> list[int]:
    (chunk,) = log.chunks()
    return chunk.features[feature].ids.tolist()


@pytest.mark.parametrize(
    ("how", "user", "item"),
    [
        ({}, [1, 2, 1, 3, 1, 3], [1, 1, 2, 1, 3, 2]),  # By first appearance.
        ({"min_count": 2}, [1, 0, 1, 2, 1, 2], [1, 1, 2, 1, 0, 2]),  # Rare ids share row 0.
        ({"rows": {"user": 2, "item": 3}}, [1, 0, 1, 0, 1, 0], [1, 1, 2, 1, 0, 2]),  # Most read.
    ],
)
def test_rows_of_a_vocabulary(
    log_path: Path, how: dict[str, Any], user: list[int], item: list[int]
) -> None:
    log = open_log(log_path, id_mapping="vocabulary", **how)
    assert (rows_of(log, "user"), rows_of(log, "item")) == (user, item)
    assert log.tables == {"user": max(user) + 1, "item": max(item) + 1}


def test_the_encoding_maps_another_log_alike(log_path: Path, tmp_path: Path) -> None:
    log = open_log(log_path, id_mapping="vocabulary", feature_tables={"user": "people"})
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"item": [2, 77], "user": ["w", "x"], "buy": [1.0, 0.0]}), other)
    again = open_log(other, encoding=log.encoding)
    assert rows_of(again, "user") == [3, 0]
    assert rows_of(again, "item") == [2, 0]
    assert again.tables == log.tables == {"people": 4, "item": 4}


def test_an_encoding_of_another_log_is_refused(log_path: Path) -> None:
    encoding = Encoding({"C1": "C1"}, {"C1": Hash(9)})
    refused("has no column 'C1'", log_path, encoding=encoding)
    text = log_path.with_name("log.tsv")
    text.write_text("\t".join(["0"] * 40) + "\n")
    numbers = replace(encoding, dense=("price",))
    refused(r"has numeric columns I1, .* but the encoding names price", text, encoding=numbers)
    refused(
        r"log.tsv has no feature 'user', .* it has C1", text, encoding=open_log(log_path).encoding
    )


@examples(30)
@example(one=[[8, 8, 3], [5]], two=[[], []], min_count=1, merge_at=1, rows=3)
@given(
    one=BAGS,
    two=BAGS,
    min_count=st.integers(1, 3),
    merge_at=st.sampled_from([1, 10, 1000]),
    rows=st.integers(1, 14),
)
def test_a_vocabulary_does_not_depend_on_how_the_log_is_cut(
    tmp_path_factory: pytest.TempPathFactory,
    one: list[list[int]],
    two: list[list[int]],
    min_count: int,
    merge_at: int,
    rows: int,
) -> None:
    size = min(len(one), len(two))
    table = pa.table({"a": pa.array(one[:size], pa.list_(pa.int64())), "b": two[:size]})
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    pq.write_table(table.cast(pa.schema([(n, pa.list_(pa.int64())) for n in "ab"])), path)
    source = ParquetSource([str(path)], named=NamedColumns(sparse=["a", "b"]))
    expected: dict[int, int] = {}
    for bags in zip(one, two, strict=False):
        for bag in bags:
            for key in sorted(bag):
                expected[key] = expected.get(key, 0) + 1
    kept = [key for key, count in expected.items() if count >= min_count]
    kept = sorted(sorted(kept, key=lambda key: -expected[key])[: rows - 1], key=[*expected].index)
    for samples in (1, 7, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vocabulary, "_CHUNK_SAMPLES", samples)
            patch.setattr(vocabulary, "_MIN_MERGE", merge_at)
            found = build_vocabularies(
                source, {"a": "t", "b": "t"}, {"t": min_count}, {"t": rows}, None
            )
        assert found["t"].keys.tolist() == kept


def test_a_local_file_may_be_named_by_its_uri(log_path: Path) -> None:
    named = log_path.rename(log_path.with_name("a log of 100%.parquet"))
    assert rows_of(open_log(named.as_uri()), "item") == rows_of(open_log(named), "item")


def test_the_suffix_tells_the_format(tmp_path: Path) -> None:
    for name, message in [
        *((name, f"{name}: no such file") for name in ("x.pt", "x.pt.gz")),
        *((name, f"cannot open .*{name}: No such file") for name in ("x.parquet", "x.tsv.gz")),
    ]:
        refused(message, tmp_path / name)


def test_wrong_options(log_path: Path, tmp_path: Path) -> None:
    for options, message in [
        ({"format": "orc"}, "format 'orc' is none of criteo, csv, tsv"),
        ({"id_mapping": "md5"}, "id_mapping 'md5' is none of auto, identity"),
        ({"id_mapping": "hash"}, "needs the number of rows of table 'user'"),
        ({"id_mapping": "hash", "rows": {"user": 3}}, "number of rows of table 'item'"),
        ({"rows": {"users": 3}}, "rows are given for table 'users'; tables are user, item"),
        ({"rows": 0}, "needs at least 1 row, not 0"),
        ({"feature_tables": {"nobody": "t"}}, "has no feature 'nobody'"),
    ]:
        refused(message, log_path, **options)  # type: ignore[arg-type]
    refused("no file to read", [])
    refused("the path of a log is empty; name a file", "")
    (tmp_path / "folder").mkdir()
    refused(r"folder .* has no file", tmp_path / "folder")
    with pytest.raises(DataError, match="at least 1 sample, not 0"):
        next(open_log(log_path).chunks(0))


def test_a_hash_spreads_texts_over_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"url": [f"https://example.com/{i}" for i in range(20_000)]}), path)
    counts = np.bincount(rows_of(open_log(path, id_mapping="hash", rows=100), "url"), minlength=100)
    # Chi-squared of 99 degrees of freedom; 160 is beyond its 99.99% quantile.
    assert ((counts - 200) ** 2 / 200).sum() < 160


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("separator", ";", "--separator"),
        ("header", False, "--no-header"),
        ("quotes", True, "--quotes"),
        ("names", ("user", "item", "buy"), "--columns"),
    ],
)
def test_properties_of_text_are_refused_for_other_formats(
    log_path: Path, tmp_path: Path, field: str, value: Any, flag: str
) -> None:
    layout = Layout(**{field: value})
    message = f"log.parquet is read as parquet, and .*{flag} .*{field}.*; leave it out, or .*csv"
    refused(message, log_path, layout=layout)
    refused("is read as arrow, and ", pq.read_table(log_path), layout=layout)
    # What the profile of an earlier log has recorded is no option.
    text = tmp_path / "log.csv"
    text.write_text("u;5;0.5\nv;6;0.5\n")
    names = ("user", "item", "buy")
    known = Layout("csv", ";", False, True, names, {"user": "text", "item": "integer"}, {})
    log = open_log(text, layout=known, id_mapping="vocabulary")
    assert open_log(log_path, encoding=log.encoding).tables == {"user": 3, "item": 3}
    other = replace(known, **{field: {"names": ("user", "buy", "item")}.get(field, ",")})
    refused("log.parquet is read as parquet", log_path, layout=other, encoding=log.encoding)


def test_names_of_columns_are_given_once(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("user,item\n1,2\n3,4\n")
    refused(r"--header.* and so does --columns", path, layout=Layout(header=True, names=("a", "b")))
    log = open_log(path, rows=9)
    path.write_text("1,2\n3,4\n")
    layout = TextOptions(None, None, None, "item,user", ()).layout(log.encoding.layout)
    assert rows_of(open_log(path, encoding=log.encoding, layout=layout), "item") == [1, 3]


def test_formats_with_properties_of_their_own_refuse_others(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("1 2 3\n4 5\n6\n")
    for layout in (Layout(separator="|"), Layout(header=True), Layout(quotes=True)):
        refused("read as interactions, and --", path, "interactions", layout=layout)
    path.write_text("\t".join(["0"] * 40) + "\n")
    assert open_log(path, "criteo", layout=Layout(separator="\t", header=False)).tables
    refused("read as criteo, and --separator", path, "criteo", layout=Layout(separator=","))
