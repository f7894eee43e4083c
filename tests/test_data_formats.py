"""The same samples in every format, compression, order of columns and separator."""

import bz2
import csv
import gzip
import json
import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from data_cases import bags, bags_of_chunk, refused, with_lines
from fast_and_full import examples
from hypothesis import given
from hypothesis import strategies as st

from placer.data import open_log
from placer.data.formats.text import record_ends
from placer.data.layout import Layout
from placer.data.reader import EncodedLog
from placer.errors import DataError

NAMES = ("click", "user", "site", "history", "tags", "price")
TEXT = st.text(st.sampled_from('ab,;|\t" é\n0'), max_size=5).map(str.strip)
SAMPLES = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 10**12),
        TEXT,
        st.lists(st.integers(0, 50), max_size=4),
        st.lists(st.sampled_from(["x", "y7", "z"]), min_size=1, max_size=3),
        st.one_of(st.none(), st.floats(-1e6, 1e6, width=32)),
    ),
    min_size=1,
    max_size=30,
)
PACKERS: dict[str, Any] = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pa.compress(content, "zstd", asbytes=True),
    ".lz4": lambda content: pa.compress(content, "lz4", asbytes=True),
}
LAYOUT = Layout(
    types={"user": "integer", "site": "text", "history": "integer", "tags": "text"},
    lists={"history": ":", "tags": ":"},
)


def table_of(samples: list[Any], order: list[str]) -> pa.Table:
    kinds = {
        "click": pa.int64(),
        "user": pa.int64(),
        "site": pa.string(),
        "history": pa.list_(pa.int64()),
        "tags": pa.list_(pa.string()),
        "price": pa.float32(),
    }
    columns = dict(zip(NAMES, zip(*samples, strict=True), strict=True))
    return pa.table({name: pa.array(list(columns[name]), kinds[name]) for name in order})


def write(path: Path, table: pa.Table, separator: str = ",", header: bool = True) -> Path:
    """Samples in the format and compression that a name says."""
    kind = path.name.split(".")[1]
    packed = path.suffix if path.suffix in PACKERS else ""
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=7)
        return path
    if kind == "feather":
        feather.write_feather(table, path, chunksize=7)
        return path
    if kind == "arrows":
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=5)
        return path
    with (path.parent / "plain").open("w", newline="", encoding="utf-8") as file:
        if kind == "jsonl":
            for row in table.to_pylist():
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        else:
            writer = csv.writer(file, delimiter=separator)
            rows = [list(row.values()) for row in table.to_pylist()]
            writer.writerows([table.column_names] if header else [])
            writer.writerows(
                [":".join(map(str, v)) if isinstance(v, list) else v for v in row] for row in rows
            )
    path.write_bytes(PACKERS[packed]((path.parent / "plain").read_bytes()))
    return path


def collect(log: EncodedLog, samples: int = 65536, skip: int = 0) -> list[Any]:
    """The samples of a log one by one."""
    found: list[Any] = []
    for chunk in log.chunks(samples, skip):
        features = [bags_of_chunk(chunk, name) for name in sorted(chunk.features)]
        for sample in range(chunk.samples):
            label = -1.0 if chunk.labels is None else float(chunk.labels[sample])
            dense = np.nan_to_num(chunk.dense[sample], nan=-7).tolist()
            found.append(([lists[sample] for lists in features], dense, label))
    return found


HOW: dict[str, Any] = {"id_mapping": "hash", "rows": 9973, "dense": ["price"]}


@examples(40)
@given(
    samples=SAMPLES,
    order=st.permutations(NAMES),
    kind=st.sampled_from(["csv", "jsonl", "feather", "arrows"]),
    packed=st.sampled_from(list(PACKERS)),
    separator=st.sampled_from(",;\t|"),
    header=st.booleans(),
    block=st.sampled_from([64, 1 << 20]),
    skip=st.integers(0, 30),
)
def test_every_format_gives_equal_samples(
    tmp_path_factory: pytest.TempPathFactory,
    samples: list[Any],
    order: list[str],
    kind: str,
    packed: str,
    separator: str,
    header: bool,
    block: int,
    skip: int,
) -> None:
    folder = tmp_path_factory.mktemp("log")
    sparse = ["user", "site", "history", "tags"]
    table = table_of(samples, list(NAMES))
    # Else texts such as "1|2" would be lists here, and not where the layout names the lists.
    known = Layout(lists={})
    expected = open_log(write(folder / "log.parquet", table), layout=known, sparse=sparse, **HOW)
    packed = packed if kind in ("csv", "jsonl") else ""
    path = write(folder / f"x.{kind}{packed}", table.select(order), separator, header)
    layout, names = LAYOUT, () if header else tuple(order)
    if kind == "csv":
        layout = replace(layout, separator=separator, header=header, quotes=True, names=names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("placer.data.formats.text.BLOCK_BYTES", block)
        log = open_log(path, layout=layout, sparse=sparse, **HOW)
        assert collect(log, 7, skip) == collect(expected)[skip:]
        again = open_log(path, encoding=log.encoding)
        assert collect(again, 4) == collect(log)


def test_a_column_that_is_said_to_hold_lists_and_has_one_id_in_each(tmp_path: Path) -> None:
    """Its integers are ids, as they are where some lists have several."""
    path = with_lines(tmp_path / "log.csv", ["label,history", "1,9", "0,3"])
    layout = Layout(lists={"history": "|"})
    log = open_log(path, layout=layout, id_mapping="identity")
    assert bags(log, "history") == [[9], [3]]
    path.write_text("label,history\n1,9|3\n0,x\n")
    assert open_log(path, layout=layout).encoding.layout.types["history"] == "text"


@given(text=st.text(st.sampled_from('a,"\n'), max_size=30), quotes=st.booleans())
def test_records_end_where_the_csv_module_ends_them(text: str, quotes: bool) -> None:
    if text.count('"') % 2:
        return
    ends, _ = record_ends(text.encode(), quotes)
    starts = np.concatenate([[0], ends])[: ends.size]
    parts = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    assert "".join(parts) == text[: int(ends[-1]) if ends.size else 0]
    if not quotes:
        assert parts == [line for line in text.splitlines(True) if line.endswith("\n")]
    else:
        assert all(part.count('"') % 2 == 0 for part in parts)


def test_an_unknown_csv_is_understood(tmp_path: Path) -> None:
    rows = [
        f"{i % 2},{1_700_000_000 + i},u{i % 7},{i % 5},{i % 3}|{i % 4},{i / 8},00{i % 4},"
        for i in range(200)
    ]
    names = "clicked,at,user,item,history,price,zip,empty"
    log = open_log(with_lines(tmp_path / "log.csv", [names, *rows]))
    assert dict(log.feature_tables) == {n: n for n in ("user", "item", "history", "zip")}
    assert (log.dense_names, log.encoding.label) == (("price",), "clicked")
    assert log.encoding.layout.lists == {"history": "|"}
    assert log.encoding.layout.types["zip"] == "text"
    assert log.notes == (
        "left out: at (it looks like times in seconds, up to 2023-11-14), "
        "empty (it has no value in the first 200 samples)",
    )
    assert bags(log, "history")[:2] == [[0, 0], [1, 1]]


def test_times_that_are_floating_point_numbers_are_left_out() -> None:
    rows = np.arange(200)
    at = np.where(rows % 9 == 4, np.nan, 1.7e9 + rows / 3)
    columns = {"user": rows % 7, "price": rows / 8, "at": at, "date": 20240101.0 + rows % 9}
    log = open_log(pa.table(columns))
    assert log.dense_names == ("price",)
    times = "it looks like times in seconds, up to 2023-11-14"
    assert log.notes[0] == f"left out: at ({times}), date (it looks like dates)"
    assert open_log(pa.table(columns), dense=["price", "at"]).dense_names == ("price", "at")


LISTS = {
    "hive": ("\x01", "{c}\x01{i}\x02{j}"),
    "news": ("\t", "{c}\tN{i} N{j}"),
    "impressions": ("\t", "{c}\tN{i}-0 N{j}-1"),
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists_of_all_kinds_are_found(tmp_path: Path, kind: str) -> None:
    separator, line = LISTS[kind]
    lines = [line.format(c=i % 2, i=i % 50, j=i % 40) for i in range(200)]
    log = open_log(with_lines(tmp_path / "part_0", lines), label="c0")
    assert log.encoding.layout.separator == separator
    assert set(map(len, bags(log, "c1"))) == {2}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["red shoes 42", "blue shoes 7"], "sparse"),
        (["1.2.3", "10.0.17"], "sparse"),
        (["iPhone 12", "Galaxy S10"], "sparse"),
        (["11/14/2019 9:05:58 AM", "1/2/2020 11:05:08 PM"], "ignore"),
        (["14.11.2019", "2.1.2020"], "ignore"),
    ],
)
def test_texts_that_hold_no_lists(tmp_path: Path, values: list[str], expected: str) -> None:
    lines = [f"{i % 2}\t{values[i % 2]}\t{i % 9}" for i in range(200)]
    log = open_log(with_lines(tmp_path / "log.tsv", ["click\twhat\tuser", *lines]))
    assert ("what" in log.feature_tables) == (expected == "sparse")
    assert ("left out: what (it holds times)" in log.notes) == (expected == "ignore")
    assert not log.encoding.layout.lists


def test_a_spreadsheet_with_decimal_commas(tmp_path: Path) -> None:
    path = tmp_path / "export.csv"
    rows = [f'"{i % 4};""X""";"{i % 9},{i % 10}5";{i % 2}' for i in range(200)]
    path.write_text("\r\n".join(["\ufeffitem;price;done", *rows, ""]), "utf-8", newline="")
    log = open_log(path)
    assert log.encoding.layout.decimal == ","
    assert log.notes[0].startswith("numbers are read with decimal commas")
    assert log.notes[1].endswith("name it with --label (two values: done)")
    (chunk,) = open_log(path, label="done").chunks()
    assert chunk.dense[:3, 0].tolist() == pytest.approx([0.05, 1.15, 2.25])
    assert len(set(chunk.features["item"].ids.tolist())) == 4
    read_as = open_log(path, label="done", layout=Layout("csv", decimal="."))
    assert "price" in read_as.feature_tables


def test_hive_writes_missing_values_in_its_own_way(tmp_path: Path) -> None:
    lines = ["click,user,site,tags", "0,7,a,x|y", "1,\\N,\\N,\\N", "0,9,NA,y|z"]
    path = with_lines(tmp_path / "log.csv", lines)
    log = open_log(path, missing="empty", id_mapping="hash", rows=997, null=["\\N"])
    lengths = [[len(bag) for bag in sample[0]] for sample in collect(log)]
    assert lengths == [[1, 2, 1], [0, 0, 0], [1, 2, 1]]


EVENTS = [
    {
        "click": i % 2,
        "user": None if i % 5 == 0 else {"id": i % 7, "geo": {"country": "AT" if i % 3 else None}},
        "items": None if i % 4 == 3 else [{"sku": f"S{j}", "price": 0.5} for j in range(i % 4)],
    }
    for i in range(40)
]
FLAT = [
    {
        "click": event["click"],
        "user.id": (event["user"] or {}).get("id"),
        "user.geo.country": (event["user"] or {}).get("geo", {}).get("country"),
        "items.sku": event["items"] and [item["sku"] for item in event["items"]],
    }
    for event in EVENTS
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "feather", "arrows", "memory"])
@pytest.mark.parametrize("missing", ["zero", "empty"])
def test_fields_of_objects_and_of_lists_of_them(tmp_path: Path, kind: str, missing: Any) -> None:
    nested, plain = pa.Table.from_pylist(EVENTS), pa.Table.from_pylist(FLAT)
    how: Any = {"id_mapping": "hash", "rows": 997, "missing": missing}
    expected = open_log(plain, **how)
    log = open_log(nested if kind == "memory" else write(tmp_path / f"log.{kind}", nested), **how)
    assert set(log.feature_tables) == {"user.id", "user.geo.country", "items.sku"}
    assert log.notes[0].startswith("left out: items.price (large_list<item: double> is neither")
    assert collect(log) == collect(expected)
    assert collect(log, 5, skip=13) == collect(expected)[13:]
    again = open_log(log.source.files if kind != "memory" else nested, encoding=log.encoding)
    assert collect(again) == collect(expected)


def test_objects_without_end(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    deep = '{"user": 1, "x": ' + '{"a": ' * 300 + "1" + "}" * 300 + "}\n"
    path.write_text(deep * 3)
    log = open_log(path)
    assert set(log.feature_tables) == {"user"}
    assert len(log.notes[0]) < 300
    for field in ('{"a": ', "["):
        path.write_text('{"user": 1}\n' + '{"user": 1, "x": ' + field * 100_000 + "\n")
        refused("line 2 holds objects or lists within one another 100", path)


def test_an_object_beside_a_column_of_its_fields_name(tmp_path: Path) -> None:
    table = pa.table({"user.id": [1, 2, 3], "user": [{"id": n} for n in (4, 5, 6)]})
    log = open_log(write(tmp_path / "log.parquet", table))
    assert set(log.feature_tables) == {"user.id"}
    assert any(note.startswith("left out: user (struct<id: int64>") for note in log.notes)
    assert bags(log, "user.id") == [[1], [2], [3]]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_that_later_files_have_is_mentioned(tmp_path: Path, kind: str) -> None:
    first = pa.table({"click": [0, 1] * 20, "user": [*range(40)]})
    second = first.append_column("age", pa.array([7] * 40)).select(["age", "user", "click"])
    for day, table in enumerate((first, second)):
        write(tmp_path / f"{day}.{kind}", table)
    note = "1.{0} has columns that {1}0.{0} lacks, which are left out: age"
    log = open_log([tmp_path / f"0.{kind}", tmp_path / f"1.{kind}"])
    assert log.notes[0] == f"{tmp_path}/{note.format(kind, f'{tmp_path}/')}"
    assert open_log(tmp_path / f"1.{kind}").feature_tables.keys() == {"age", "user"}
    paths = [tmp_path / f"{day}.{kind}" for day in (0, 1)]
    assert not open_log(paths, encoding=log.encoding).notes


def test_a_file_of_one_line_names_the_columns_or_is_refused(tmp_path: Path) -> None:
    lines = ["user,item", "1,2"], ["3,4"], ["user,item", "1,2"]
    paths = [with_lines(tmp_path / f"{day}.csv", one) for day, one in enumerate(lines)]
    with pytest.raises(DataError, match=r"1\.csv has no column 'user'; it has 3, 4"):
        list(open_log(paths).chunks())
    paths[1].write_text("item,user\n")
    assert sum(chunk.samples for chunk in open_log(paths).chunks()) == 2


def test_a_column_whose_first_values_are_missing_needs_a_type(tmp_path: Path) -> None:
    values = {"0.jsonl": "null", "1.jsonl": "5"}
    paths = [with_lines(tmp_path / n, [f'{{"user": {one}}}']) for n, one in values.items()]
    with pytest.raises(DataError, match=r"user is 5, .* say in a schema what they are \(type\)"):
        open_log(paths, sparse=["user"])
    log = open_log(paths, sparse=["user"], layout=Layout(types={"user": "integer"}))
    assert bags(log, "user") == [[0], [5]]


def test_utf_16_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes("click,user\n1,2\n".encode("utf-16"))
    refused("is text in UTF-16; write it in UTF-8", path)


BAD = {
    "ragged": ("3,4\n", r"line 4: 2 fields, expected 3 separated by commas"),
    "blank": ("\n0,1,2\n", r"line 4 is blank"),
    "text id": ("0,x,1\n", r"line 4: user is 'x', and its column was taken for integers"),
    "text number": ("0,1,x\n", r"line 4: price is 'x', which is not a number"),
    "text label": (
        "maybe,1,2\n",
        r"line 4: click is 'maybe', which is not a number; write 1 and 0, or",
    ),
    "return": ("0,1,2\r0,1,2\n", r"line 4 has a carriage return that does not end it"),
    "open quote": ('0,"1,2\n', r"line 4 opens a quote that nothing closes"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("block", [16, 1 << 20])
def test_a_bad_line_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, block: int
) -> None:
    path = tmp_path / "log.csv"
    path.write_text("click,user,price\n0,7,1.5\n1,8,2.5\n0,9,3.5\n")
    encoding = open_log(path, rows=100).encoding
    line, message = BAD[kind]
    path.write_text("click,user,price\n0,7,1.5\n1,8,2.5\n" + line + "0,9,3.5\n")
    monkeypatch.setattr("placer.data.formats.text.BLOCK_BYTES", block)
    monkeypatch.setattr("placer.data.formats.text.HEAD_BYTES", 40)
    with pytest.raises(DataError, match=rf"log\.csv, {message}"):
        list(open_log(path, encoding=encoding).chunks())


def test_a_quoted_newline_keeps_the_lines_right(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text('click,user,site\n0,7,"a\nb"\n1,8,"say ""x"""\n0,9,c\n')
    log = open_log(path, rows={"user": 100})
    assert bags(log, "site") == [[1], [2], [3]]
    path.write_text('click,user,site\n0,7,"a\nb"\n1,800,c\n')
    with pytest.raises(DataError, match=r"log\.csv, line 4: feature 'user' has id 800"):
        list(open_log(path, encoding=log.encoding).chunks())


BAD_JSON = {
    "no json": ("{", r"line 2 is no JSON"),
    "no object": ("3", r"line 2 holds int and no object"),
    "text id": ('{"user": "x"}', r"line 2: user is 'x', and its column was taken for integers"),
    "text number": ('{"user": 1, "price": "x"}', r"line 2: price is 'x', which is not a number"),
}


@pytest.mark.parametrize("kind", BAD_JSON)
def test_a_bad_line_of_json_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"user": 1, "price": 1.5}\n{"user": 2}\n')
    encoding = open_log(path, rows=100).encoding
    line, message = BAD_JSON[kind]
    path.write_text('{"user": 1, "price": 1.5}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"log\.jsonl, {message}"):
        list(open_log(path, encoding=encoding).chunks())
    path.write_text('[{"user": 1}]\n')
    refused("has no object of JSON in each line; jq", path)


def test_ids_that_pandas_wrote_as_floats(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("click,item,user_id\n0,a,7.0\n1,b,\n0,c,9.0\n")
    log = open_log(path)
    assert log.dense_names == ("user_id",)
    assert any("user_id is dense: numbers, but whole ones up to 9" in note for note in log.notes)
    log = open_log(path, sparse=["user_id"])
    assert bags(log, "user_id") == [[7], [0], [9]]
    path.write_text("click,item,user_id\n0,a,7.5\n")
    with pytest.raises(DataError, match=r"line 2: user_id is '7.5', and its column"):
        list(open_log(path, encoding=log.encoding).chunks())


@pytest.mark.parametrize("block", [1 << 21, 16])
def test_files_that_were_joined_with_their_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("placer.data.formats.text.BLOCK_BYTES", block)
    part = gzip.compress(b"user,item,label\nu1,a,1\nu2,b,0\n")
    path = tmp_path / "log.csv.gz"
    path.write_bytes(part + part)
    with pytest.raises(DataError, match="line 4 names the columns again"):
        list(open_log(path).chunks())
    path.write_bytes(part + gzip.compress(b"u3,a,1\n"))
    assert sum(chunk.samples for chunk in open_log(path).chunks()) == 3


def test_a_known_word_beside_codes_is_no_header(tmp_path: Path) -> None:
    """Names of columns begin with letters, so that the first line is a sample."""
    (tmp_path / "log.csv").write_text("item,7f3a\nshop,9c2e\nbook,8d\n")
    assert open_log(tmp_path / "log.csv").tables == {"c0": 4, "c1": 4}


HEADERS = {"user,,item": {"user", "item"}, '"a\nuser",,item': {"a\nuser", "item"}, "u,,": None}


@pytest.mark.parametrize(("line", "names"), HEADERS.items())
def test_a_column_without_a_name(tmp_path: Path, line: str, names: set[str] | None) -> None:
    """Numbers below names show a header, as of a spreadsheet's two lines of text in a field.

    Below no name they may be in a sample.
    """
    rows = "1,2,7\n2,3,8\n" if names else "v,x,7\nw,y,8\n"
    for part in ("log.csv", "next.csv"):
        (tmp_path / part).write_text(f"{line}\n{rows}")
    log = open_log(tmp_path / "log.csv")
    assert set(log.tables) == (names or {"c0", "c1", "c2"})
    assert not names or "left out: no name" in log.notes[0]
    assert open_log(tmp_path).notes == log.notes
