"""Columns of rare types, and of types that differ from file to file: ids keep their keys."""

import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import bags, refused, with_lines

from placer.data import open_log
from placer.errors import DataError

UNSIGNED = 2**64 - 1


def bags_of(log: Any, feature: str, **how: Any) -> list[list[int]]:
    """Ids of a log of which each is a row, sample by sample."""
    return bags(open_log(log, **how), feature, samples=2)


def files(tmp_path: Path, *columns: Any) -> list[Path]:
    paths = [tmp_path / f"{number}.parquet" for number in range(len(columns))]
    for path, column in zip(paths, columns, strict=True):
        pq.write_table(pa.table({"id": column, "other": range(len(column))}), path)
    return paths


def test_texts_in_one_file_and_numbers_in_the_next(tmp_path: Path) -> None:
    """A number as text has another key: ids that are one would be counted as two."""
    texts = ["12", "13"]
    refused("1.parquet: column 'id' is int64, and its ids are read as texts",
            files(tmp_path, texts, [12, 13]))  # fmt: skip
    refused("'id' is .*int64.*, and its ids", files(tmp_path, [texts], [[12, 13]]))
    assert bags_of(files(tmp_path, [7, 13], texts), "id") == [[7], [13], [12], [13]]
    # A text file has texts alone, whatever they look like.
    known = with_lines(tmp_path / "0.csv", ["id,other", "a1,1", "a2,2"])
    later = with_lines(tmp_path / "1.csv", ["id,other", "1.5,1", "7,2"])
    assert bags_of(later, "id", encoding=open_log(known).encoding) == [[0], [0]]


def test_texts_and_numbers_that_read_one_table(tmp_path: Path) -> None:
    path = with_lines(tmp_path / "log.csv", ["id,seen,other", "7,x7,7", "8,8,8"])
    log = open_log(path, feature_tables={"seen": "id"})
    (note,) = (one for one in log.notes if one.startswith("table id"))
    assert "seen holds texts and id integers, so that one id has two keys" in note


def test_lists_of_texts_after_lists_in_a_text(tmp_path: Path) -> None:
    lists = files(tmp_path, ["1|2", "3"], [["1", None], ["12"]])
    assert bags_of(lists, "id") == [[1, 2], [3], [1, 0], [12]]
    lists = files(tmp_path, ["1|2", "3"], [["1"], ["x"]])
    log = open_log(lists, rows=20)
    with pytest.raises(DataError, match=r"1.parquet, row 1: id is 'x'"):
        list(log.chunks())


def test_files_whose_lists_are_all_empty_or_whose_column_has_no_value(tmp_path: Path) -> None:
    assert bags_of(files(tmp_path, [[1], [2, 3]], [[], None, [None]]), "id") == (
        [[1], [2, 3], [], [], [0]]
    )
    refused("1.parquet: column 'id' has no value, and so no type",
            files(tmp_path, [1, 2], pa.nulls(2)))  # fmt: skip
    only = open_log(pa.table({"id": [1, 2], "tags": pa.array([[], []])}))
    assert "tags (it has no value" in only.notes[0]


def test_views_of_lists_are_read_in_their_order() -> None:
    starts, lengths = (pa.array(one, pa.int32()) for one in ([2, 0, 0], [1, 2, 0]))
    views = pa.ListViewArray.from_arrays(starts, lengths, pa.array([1, 2, 3]))
    assert bags_of(pa.table({"id": views}), "id") == [[3], [1, 2], []]
    assert bags_of(pa.table({"id": views}).slice(1), "id") == [[1, 2], []]
    missing = pa.array([True, False, False])
    inner = pa.StructArray.from_arrays([views], ["id"], mask=missing)
    assert bags_of(pa.table({"user": inner}), "user.id") == [[], [1, 2], []]
    item = pa.struct([("id", pa.int64())])
    objects = pa.array([[{"id": 4}], None, [{"id": 5}, None]], pa.list_view(item))
    assert bags_of(pa.table({"user": objects}).slice(1), "user.id") == [[], [5, 0]]


def test_types_that_arrow_computes_little_with() -> None:
    """Decimals of 32 and 64 bits, runs of equal values, and texts of polars' arrays."""
    small = [decimal.Decimal(7), None, decimal.Decimal(3)]
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([1, 3], pa.int32()), pa.array([7, None]))
    texts = pa.array([["0000000a", "0000000b"], None], pa.list_(pa.string_view(), 2))
    for kind in (pa.decimal32(5, 0), pa.decimal64(12, 0)):
        assert bags_of(pa.table({"id": pa.array(small, kind)}), "id") == [[7], [0], [3]]
        lists = pa.array([small, []], pa.list_(kind))
        assert bags_of(pa.table({"id": lists}), "id") == [[7, 0, 3], []]
    assert bags_of(pa.table({"id": runs}).slice(0, 2), "id") == [[7], [0]]
    inside = pa.ListArray.from_arrays([0, 2, 3], runs)
    assert bags_of(pa.table({"id": inside}), "id") == [[7, 0], [0]]
    how = {"id_mapping": "hash", "rows": 12}
    assert bags_of(pa.table({"id": texts}), "id", **how) == [[10, 11], []]


def test_unsigned_ids(tmp_path: Path) -> None:
    whole = pa.array([decimal.Decimal(UNSIGNED), None], pa.decimal128(20, 0))
    how = {"id_mapping": "hash", "rows": 1009}
    assert bags_of(pa.table({"id": whole}), "id", **how) == [[UNSIGNED % 1009], [0]]
    path = with_lines(tmp_path / "log.csv", ["id,other", f'"[{UNSIGNED}, 2]",1', "[3],2"])
    assert bags_of(path, "id", **how) == [[UNSIGNED % 1009, 2], [3]]
    for suffix, line, number in (("csv", "id,other\n{},2", 2), ("jsonl", '{{"id": {}}}', 1)):
        both = [
            with_lines(tmp_path / f"{file}.{suffix}", [line.format(one)])
            for file, one in enumerate((1, UNSIGNED))
        ]
        refused(f'1.{suffix}, line {number}: .*: type = "unsigned"', both)
    with_lines(path, ["id,other", "-1,1", f"{UNSIGNED},2"])
    assert "which no integer of 64 bits holds" in open_log(path).notes[0]
    assert bags_of(path, "id", null=["-1"], **how) == [[0], [UNSIGNED % 1009]]


def test_an_index_is_no_feature(tmp_path: Path) -> None:
    frame = pd.DataFrame({"id": [5, 6, 7, 6, 8], "clicks": [1, 2, 3, 4, 5]})
    some = frame.loc[[0, 1, 4]]
    some.to_parquet(tmp_path / "frame.parquet")
    some.to_csv(tmp_path / "frame.csv")
    for log in (some, tmp_path / "frame.parquet", tmp_path / "frame.csv"):
        opened = open_log(log)
        assert list(opened.tables) == ["id", "clicks"]
        assert "(it is an index, as pandas writes it)" in opened.notes[0]
    named = open_log(some, sparse=["id", "__index_level_0__"])
    assert list(named.tables) == ["id", "__index_level_0__"]


@pytest.mark.parametrize("log", [np.arange(3), {"id": [1, 2]}, [{"id": 1}], 7])
def test_what_is_no_log_is_told_what_is(log: Any) -> None:
    refused("a log cannot be read from .*; give paths, or a table", log)
    refused("too large to convert", pd.DataFrame({"id": np.array([1, UNSIGNED], object)}))


@pytest.mark.parametrize(
    ("name", "lines", "ids"),
    [
        ("log.csv", "u7,1\nu8,1\nu7,1\n", [1, 2, 1]),
        ("log.txt", "1 5 6\n2\n1 7\n", [1, 2, 1]),
        ("log", '{"id": 7}\n{"id": 8}\n{"id": 7}\n', [7, 8, 7]),
    ],
)
def test_a_byte_order_mark_is_no_part_of_the_first_id(
    tmp_path: Path, name: str, lines: str, ids: list[int]
) -> None:
    path, marked, empty = (tmp_path / f"{folder}" / name for folder in "012")
    for file, content in ((path, lines), (marked, "\ufeff" + lines), (empty, "\ufeff")):
        file.parent.mkdir()
        file.write_text(content)
    feature = next(iter(open_log(path).tables))
    assert bags_of(path, feature) == [[one] for one in ids]
    assert bags_of([marked, empty], feature) == bags_of(path, feature)
    refused("is empty", empty)


def test_bytes_of_one_length_are_ids(tmp_path: Path) -> None:
    """DuckDB, Iceberg and Postgres write UUIDs so. Their bytes look like lists now and then."""
    random = np.random.default_rng(0)
    uuids = [random.bytes(15) + b"," for _ in range(300)]
    for kind in (pa.uuid(), pa.binary(16), pa.binary()):
        column = pa.array([*uuids, *uuids[:2], None], kind if kind != pa.uuid() else pa.binary(16))
        if kind == pa.uuid():
            column = pa.ExtensionArray.from_storage(kind, column)
        for log in (files(tmp_path, column), pa.table({"id": column})):
            found = bags_of(log, "id", id_mapping="vocabulary")
            assert found == [[row + 1] for row in range(300)] + [[1], [2], [301]]
        lists = pa.LargeListArray.from_arrays([0, 2, 4], column[:4])
        assert list(map(sorted, bags_of(files(tmp_path, lists), "id"))) == [[1, 2], [3, 4]]
    coded = pa.array(uuids, pa.binary(16)).dictionary_encode()
    assert bags_of(pa.table({"id": coded}), "id") == [[row + 1] for row in range(300)]


def test_bytes_of_few_samples_are_ids(tmp_path: Path) -> None:
    """Without a zero among them, only that they are no text shows that they are no lists."""
    values = [bytes([200 + row, *b"| ,"]) for row in range(9)]
    for log in (files(tmp_path, pa.array(values)), pa.table({"id": pa.array(values)})):
        found = bags_of(log, "id", sparse=["id"], id_mapping="vocabulary")
        assert found == [[row + 1] for row in range(9)]


def test_why_no_column_is_categorical() -> None:
    refused(r"there are at \(it holds times\), label \(it is called label\)",
            pa.table({"at": pa.array([1, 2], pa.timestamp("s")), "label": [0, 1]}))  # fmt: skip
