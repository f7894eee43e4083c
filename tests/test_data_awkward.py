"""Logs as public data sets and companies have them: read as they are meant, or refused by name."""

import decimal
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
from data_cases import bags, refused, with_lines

from placer.data import open_log
from placer.data.layout import Layout
from placer.data.reader import EncodedLog
from placer.errors import DataError
from placer.training.reading import labels_of

SAMPLES = 60


def written(tmp_path: Path, lines: list[str], name: str = "log.csv") -> Path:
    return with_lines(tmp_path / name, lines)


def left_out(log: EncodedLog) -> str:
    return next(note for note in log.notes if note.startswith("left out"))


def samples_of(log: EncodedLog) -> int:
    return sum(chunk.samples for chunk in log.chunks(7))


NO_IDS = {
    "milliseconds since a day": ("timestamp", [str(61 + 977 * i) for i in range(SAMPLES)], "never"),
    "dates": ("event_date", [f"202305{1 + i % 30:02d}" for i in range(SAMPLES)], "dates"),
    "dates with times": (
        "ts",
        [f"201306{6 + i % 7:02d}0001{i:02d}123" for i in range(60)],
        "dates",
    ),
    "thousands": ("views", [f'"{1 + i % 9},{100 + i}"' for i in range(SAMPLES)], "'1,100'"),
    "money": ("price", [f"${i}.50" for i in range(SAMPLES)], "amounts such as '$0.50'"),
    "shares": ("share", [f"{i}%" for i in range(SAMPLES)], "amounts such as '0%'"),
    "objects": ("value", [f'"{{""item"": {i}}}"' for i in range(SAMPLES)], "objects of JSON"),
    "prose": ("text", [f"it was {i} " + "very good " * 9 for i in range(SAMPLES)], "holds prose"),
}


@pytest.mark.parametrize("kind", NO_IDS)
def test_what_is_no_id_is_left_out(tmp_path: Path, kind: str) -> None:
    name, values, why = NO_IDS[kind]
    lines = [f"{i % 2},{i % 7},{value}" for i, value in enumerate(values)]
    log = open_log(written(tmp_path, [f"label,user,{name}", *lines]))
    assert list(log.tables) == ["user"]
    assert f"{name} (" in left_out(log)
    assert why in left_out(log)


def test_long_texts_of_few_words_are_ids(tmp_path: Path) -> None:
    lines = [f"{i % 2},https://shop.example/{i:060}" for i in range(SAMPLES)]
    assert [*open_log(written(tmp_path, ["label,page", *lines])).tables] == ["page"]


def test_lists_of_two_ids_are_no_amounts(tmp_path: Path) -> None:
    lines = [f'{i % 2},"{i},{100 + i}"' for i in range(SAMPLES)] + ['1,"7,8"']
    assert open_log(written(tmp_path, ["label,items", *lines])).tables == {"items": 160}
    lines = [f'{i % 2},"{100 + i},{200 + i}"' for i in range(SAMPLES)]
    assert open_log(written(tmp_path, ["label,items", *lines])).tables == {"items": 260}


def test_times_within_lists_of_objects(tmp_path: Path) -> None:
    events = [{"aid": i, "ts": 1_659_304_800_025 + i} for i in range(3)]
    lines = [json.dumps({"session": i % 5, "events": events[: i % 4]}) for i in range(SAMPLES)]
    log = open_log(written(tmp_path, lines, "train.jsonl"))
    assert list(log.tables) == ["session", "events.aid"]
    assert "events.ts (it looks like times in milliseconds" in left_out(log)
    for unit, scale in (("seconds", 1), ("microseconds", 10**6), ("nanoseconds", 10**9)):
        times = [(1_659_304_800 + i) * scale for i in range(SAMPLES)]
        columns = {"label": [0, 1] * (SAMPLES // 2), "a": [5] * SAMPLES, "ts": times}
        log = open_log(pa.table(columns))
        assert f"ts (it looks like times in {unit}, up to 2022-07-31" in left_out(log)


@pytest.mark.parametrize("words", ["f t", "No Yes", "n y", "FALSE TRUE", "false true"])
def test_labels_of_words(tmp_path: Path, words: str) -> None:
    both = words.split()
    lines = ["clicked,user", *(f"{both[i % 2]},{i}" for i in range(SAMPLES))]
    chunk = next(open_log(written(tmp_path, lines)).chunks(SAMPLES))
    assert chunk.labels.tolist() == [i % 2 for i in range(SAMPLES)]


def test_labels_of_minus_one_and_one(tmp_path: Path) -> None:
    lines = ["label,user", *(f"{2 * (i % 2) - 1},{i}" for i in range(SAMPLES))]
    chunk = next(open_log(written(tmp_path, lines)).chunks(SAMPLES))
    assert labels_of(chunk).tolist() == [i % 2 for i in range(SAMPLES)]


@pytest.mark.parametrize("label", ["0.25", "2", "-2"])
def test_labels_that_are_no_clicks_are_not_trained_on(tmp_path: Path, label: str) -> None:
    lines = ["label,user", *(f"{label if i == 3 else 1},{i}" for i in range(SAMPLES))]
    chunk = next(open_log(written(tmp_path, lines)).chunks(SAMPLES))
    with pytest.raises(DataError, match=rf"a label is {float(label)}, which is neither 0 nor 1"):
        labels_of(chunk)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("block", [8, 1 << 20])
def test_blank_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, block: int) -> None:
    monkeypatch.setattr("placer.data.formats.text.BLOCK_BYTES", block)
    path = tmp_path / "log.csv"
    path.write_text(end.join(["label,user", "0,1", "1,2", "", "", ""]), newline="")
    assert samples_of(open_log(path, rows=9)) == 2
    path.write_text(end.join(["label,user", "0,1", "", "1,2", ""]), newline="")
    with pytest.raises(DataError, match="line 3 is blank; remove it"):
        samples_of(open_log(path, rows=9))


def test_files_that_only_name_columns(tmp_path: Path) -> None:
    first = written(tmp_path, ["label,user"], "part-0.csv")
    second = written(tmp_path, ["label,user", "0,1", "1,2"], "part-1.csv")
    assert samples_of(open_log([first, second, first])) == 2
    bare = written(tmp_path, ["label,user", "1,3"], "part-2")  # Of the format of the others.
    assert samples_of(open_log([bare, second])) == 3
    refused(r"part-0\.csv names columns and has no sample", first)


def test_parts_without_a_suffix_are_unpacked(tmp_path: Path) -> None:
    folder = tmp_path / "dt=2024-01-01"
    folder.mkdir()
    (folder / "_SUCCESS").touch()
    (folder / ".part-00000.crc").write_bytes(b"crc\0")
    text = "".join(f"{i % 2}\t{i % 5}\tit{i % 3}\n" for i in range(SAMPLES))
    for number in range(2):
        (folder / f"part-0000{number}").write_bytes(gzip.compress(text.encode()))
    assert samples_of(open_log(tmp_path)) == 2 * SAMPLES


def test_compressed_files_of_nothing_are_passed_over(tmp_path: Path) -> None:
    """An hour without a click, in a folder of hours."""
    hours = [written(tmp_path, ["label,user", "0,1"], f"{hour}.csv") for hour in range(3)]
    for hour, text in zip(hours, (b"", hours[1].read_bytes(), b""), strict=True):
        hour.with_suffix(".csv.gz").write_bytes(gzip.compress(text))
        hour.unlink()
    log = open_log(tmp_path, sparse=["user"])
    assert samples_of(log) == 1
    assert [note[-27:] for note in log.notes] == ["is empty and was passed over"[-27:]] * 2
    refused("0.csv.gz is empty", tmp_path / "0.csv.gz")


def test_lists_with_missing_values_and_in_braces(tmp_path: Path) -> None:
    lines = ['1,"{1,2}"', "0,null", '1,"{3,NULL}"', "0,{}", '1,"{4,5}"']
    log = open_log(written(tmp_path, ["label,items", *lines]))
    assert log.tables == {"items": 6}
    assert bags(log, "items") == [[1, 2], [], [3, 0], [], [4, 5]]


def test_decimals_of_a_warehouse_are_ids(tmp_path: Path) -> None:
    def decimals(values: list[Any], scale: int = 0) -> pa.Array:
        numbers = [None if one is None else decimal.Decimal(one) for one in values]
        return pa.array(numbers, pa.decimal128(38, scale))

    table = {"USER_ID": decimals([7, None, 3]), "PRICE": decimals([1, 2, 3], 2)}
    pq.write_table(pa.table({**table, "LABEL": decimals([0, 1, 0])}), tmp_path / "log.parquet")
    log = open_log(tmp_path / "log.parquet")
    chunk = next(log.chunks(9))
    assert log.tables == {"USER_ID": 8}
    assert chunk.features["USER_ID"].ids.tolist() == [7, 0, 3]
    assert chunk.dense.tolist() == [[1], [2], [3]]
    assert chunk.labels is not None and chunk.labels.tolist() == [0, 1, 0]  # noqa: PT018
    pq.write_table(pa.table({"USER_ID": decimals([10**30])}), tmp_path / "log.parquet")
    refused(r"row 0 and on: USER_ID: an id is beyond 64 bits", tmp_path / "log.parquet")


def test_a_header_behind_a_hash(tmp_path: Path) -> None:
    log = open_log(written(tmp_path, ["#user\tclick", "u1\t0", "u2\t1"], "log.tsv"))
    assert log.tables == {"user": 3}


NO_TEXT = "is no text and of no known format; write it as Parquet or CSV, or name its"
UNDIVIDED = "no separator divides its lines into equally many fields; name it"
FOREIGN = {
    "orc": (b"ORC\x00\x01", NO_TEXT),
    "avro": (b"Obj\x01\x04\x00", NO_TEXT),
    "zip": (b"PK\x03\x04\0\0", NO_TEXT),
    "sql": (b"INSERT INTO clicks VALUES (1,2),(3,4);\n" * 9, "looks like SQL"),
    "netflix": (b"1:\n3,5\n4,4\n2:\n1,1\n", UNDIVIDED),
    "vowpal": (b"1 |u 7 |i 3 4\n-1 |u 8 |i 5\n", "looks like SQL, or Vowpal Wabbit's format"),
    "libsvm": (b"+1 3:0.5 7:1\n-1 2:1\n", UNDIVIDED),
    "blanks": (b"1   77   3\n0    8  12\n" * 9, UNDIVIDED),
    "comments": (b"# exported\n# by us\nlabel,user\n1,2\n", f"{UNDIVIDED}.* remove comments"),
    "names": (b"label,item,item\n1,2,3\n", "more than one column 'item'; rename one"),
    "python": (b"{u'user': u'x'}\n", "line 1 is no JSON"),
    "array": (b'[\n{"user": 1}]\n', "has no object of JSON in each line; jq"),
    "pretty": (b'{\n "user": 1\n}\n', "has no object of JSON in each line; jq"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_formats_are_refused(tmp_path: Path, kind: str) -> None:
    content, message = FOREIGN[kind]
    path = tmp_path / ("part-00000.json" if kind == "array" else "part-00000")
    path.write_bytes(content)
    refused(rf"part-00000.* {message}", path)


def test_orc_is_read_through_arrow(tmp_path: Path) -> None:
    orc.write_table(pa.table({"user": [1, 2], "label": [0, 1]}), tmp_path / "log.orc")
    log = open_log(ds.dataset(str(tmp_path / "log.orc"), format="orc"))
    assert log.tables == {"user": 3}


def test_a_text_too_long_for_an_id_is_named(tmp_path: Path) -> None:
    lines = ["label,user,blob", "0,1,a", f"1,2,{'x' * 9000}", "0,1,a"]
    refused(r"line 3: blob: an id is a text of 9000 bytes.*--ignore", written(tmp_path, lines))


NAMES = {
    "punctuation": (['user,"CTR (%), smoothed",price ($)', "5,0.2,1.5", "6,0.3,2.5"], 2, ["user"]),
    "nulls below": (["f0,q?", "text/1,NULL", "text/2,7"], 2, ["f0", "q?"]),
    "a missing value first": (["NA,item1", "5,item2", "7,item3"], 3, ["c0", "c1"]),
    "missing values first": (["NULL,NULL", "5,3", "7,4"], 3, ["c0", "c1"]),
    "a separator behind them": (["user,item,", "5,3,", "7,4,"], 2, ["user", "item"]),
    "the same of texts": (["user,shop,", "a,x,", "b,y,"], 2, ["user", "shop"]),
    "digits in front": (["user,7d_views", "a,3", "b,4"], 2, ["user", "7d_views"]),
    "signs in front": (["$user,@shop", "5,3", "7,4"], 2, ["$user", "@shop"]),
    "Spark's": (["_1,_2", "5,3", "7,4"], 2, ["_1", "_2"]),
    "a sample with an empty field": (["a,,b", "c,5,d"], 2, ["c0", "c1", "c2"]),
    "a value that is called like a label": (["ann,click", "bob,view", "cy,click"], 3, ["c0", "c1"]),
}


@pytest.mark.parametrize("kind", NAMES)
def test_names_are_told_from_a_first_sample(tmp_path: Path, kind: str) -> None:
    lines, samples, tables = NAMES[kind]
    log = open_log(written(tmp_path, lines))
    assert (samples_of(log), list(log.tables)) == (samples, tables)


def test_a_quote_that_nothing_closes_is_no_empty_log(tmp_path: Path) -> None:
    path = written(tmp_path, ["user,size", '5" pipe,2', "a,4"])
    refused("from line 2 on: a quote is opened", path)


@pytest.mark.parametrize("quotes", [None, True])
@pytest.mark.parametrize("header", [False, True])
def test_quotes_hold_newlines_beside_any_separator(
    tmp_path: Path, header: bool, quotes: bool | None
) -> None:
    lines = ["user~text~n"] * header + ['1~"new\nline"~2', "3~plain~4"]
    layout = Layout(separator="~", header=header, quotes=quotes)
    log = open_log(written(tmp_path, lines), layout=layout, id_mapping="vocabulary")
    assert [chunk.samples for chunk in log.chunks(7)] == [2]
    assert len(log.tables) == 3


@pytest.mark.parametrize("separator", [", ", " | "])
def test_blanks_beside_separators_are_no_part_of_ids(tmp_path: Path, separator: str) -> None:
    """A missing value that a blank precedes is missing; ids are those of other files."""
    rows = [["work", "state", "class"], ["Private", "?", "a"], ["", "12ab34ef", "NA"]]
    spaced = [separator.join(row) for row in rows]
    plain = [",".join(row) for row in rows]
    mapped: dict[str, Any] = {"id_mapping": "hash", "rows": 1009, "null": ["?", "NA"]}
    one = open_log(written(tmp_path, spaced, "spaced.csv"), **mapped)
    other = open_log(written(tmp_path, plain, "plain.csv"), **mapped)
    assert list(one.feature_tables) == list(other.feature_tables) == rows[0]
    for name in rows[0]:
        assert bags(one, name) == bags(other, name)
    assert bags(one, "state") == [[0], [0x12AB34EF % 1009]]


@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize("every", [1, 3])
def test_quotes_that_nothing_closes_join_no_lines(
    tmp_path: Path, separator: str, every: int
) -> None:
    """As inches are written, two of them would enclose a newline, and two samples be one."""
    titles = [f'"t{i % 7}' if i % every == 0 else "none" for i in range(SAMPLES)]
    lines = [separator.join((str(i % 2), str(i % 9), one)) for i, one in enumerate(titles)]
    path = written(tmp_path, [separator.join(("label", "user", "title")), *lines])
    assert samples_of(open_log(path)) == SAMPLES
    whole = [separator.join((str(i % 2), '"a\n""b"""', "7")) for i in range(SAMPLES)]
    path = written(tmp_path, [separator.join(("label", "title", "user")), *whole])
    assert samples_of(open_log(path)) == SAMPLES


def test_parquet_is_not_read_as_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user": [1, 2]}), tmp_path / "log.csv")
    refused("log.csv is Parquet or Arrow, and no text; name its format", tmp_path / "log.csv")
    refused("is Parquet or Arrow", tmp_path / "log.csv", "tsv")
    (tmp_path / "latin.csv").write_bytes("stra\u00dfe,user\n1,2\n".encode("latin-1"))
    refused("line 1 is no UTF-8: .*; if it is text, write it in UTF-8", tmp_path / "latin.csv")


def test_a_text_file_of_one_column_says_what_to_give(tmp_path: Path) -> None:
    path = written(tmp_path, ["5", "8", "5"])
    refused(r"name it with --separator \(any, if a line is one id\)", path)
    assert open_log(path, layout=Layout(separator=",")).tables == {"c0": 9}


def test_integers_beyond_int64_of_json(tmp_path: Path) -> None:
    ids = [2**63 + 1025 * i + 1 for i in range(40)]
    lines = []
    for i, one in enumerate(ids):
        user = {"id": one, "price": i / 2, "seen": [{"item": one, "at": {"day": i}}]}
        sample = {"key": one, "keys": [one, i], "number": float(one), "user": user}
        lines.append(json.dumps(sample))
    log = open_log(written(tmp_path, lines, "log.jsonl"), id_mapping="hash", rows=1009)
    nested = ["user.id", "user.seen.item"]
    assert sorted(log.feature_tables) == ["key", "keys", "user.id", "user.seen.at.day", nested[1]]
    for name in ("key", *nested):
        assert bags(log, name) == [[one % 1009] for one in ids]
    assert bags(log, "keys") == [[one % 1009, i] for i, one in enumerate(ids)]


def test_lists_of_categories_in_several_row_groups(tmp_path: Path) -> None:
    kind = pa.list_(pa.dictionary(pa.int16(), pa.string()))
    lists = [[f"a{i % 7}"] * (i % 4) for i in range(50)]
    pq.write_table(pa.table({"tags": pa.array(lists, kind)}), tmp_path / "x.parquet", 20)
    log = open_log(tmp_path / "x.parquet")
    assert log.tables == {"tags": 8}
    assert sum(chunk.features["tags"].ids.size for chunk in log.chunks()) == sum(map(len, lists))
