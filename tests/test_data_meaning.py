"""What values of logs mean: lists of ids, numbers, missing values, lines of interactions."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import bags, refused, with_lines
from fast_and_full import combinations, mostly_slow

from placer import Profile
from placer.data import Schema, open_log
from placer.data.layout import Layout
from placer.data.reader import EncodedLog
from placer.errors import DataError, ProfileError
from placer.profile.count import profile_log
from placer.profile.parts.counter import PartitionCounter, profile_in_parts
from placer.report import profile_report

SAMPLES = 60


def schema_of(folder: Path, *lines: str) -> Schema:
    return Schema.load(with_lines(folder / "schema.toml", lines))


def written(path: Path, columns: dict[str, Sequence[Any]], separator: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def with_labels(**columns: Sequence[Any]) -> dict[str, Sequence[Any]]:
    count = range(len(next(iter(columns.values()))))
    return {"label": [i % 2 for i in count], "user": [i % 7 for i in count], **columns}


# Lists ------------------------------------------------------------------------------------------

IDS = [[(7 * i + j * j) % 900 for j in range(10 + i % 9)] for i in range(SAMPLES)]
AS_NUMBERS: dict[str, Callable[[list[int]], str]] = {
    "blanks": lambda ids: " ".join(map(str, ids)),
    "commas": lambda ids: ",".join(map(str, ids)),
    "bars and one more": lambda ids: "".join(f"{one}|" for one in ids),
    "list": str,
    "tuple": lambda ids: str(tuple(ids)),
    "set": lambda ids: "{" + ", ".join(map(str, ids)) + "}",
    "NumPy": lambda ids: "[" + " ".join(f"{one:3d}" for one in ids) + "]",
    "repr": lambda ids: f"array({ids}, dtype=int64)",
    "NumPy's numbers": lambda ids: str([np.int64(one) for one in ids]),
    "NumPy on lines": lambda ids: str(np.array(ids * 3)[: len(ids)]).replace(" 1", "\n 1"),
}
AS_TEXTS: dict[str, Callable[[list[int]], str]] = {
    "codes": lambda ids: " ".join(f"N{one}" for one in ids),
    "products": lambda ids: " ".join(f"B00{one}XQ" for one in ids),
    "Python": lambda ids: str([f"i{one}" for one in ids]),
    "JSON": lambda ids: json.dumps([f"i{one}" for one in ids]),
    "commas within": lambda ids: str([f"Smith, {one}" for one in ids]),
    "NumPy": lambda ids: "[" + " ".join(f"'i{one}'" for one in ids) + "]",
    "tags": lambda ids: ", ".join(f"t{one}" for one in ids),
}


@pytest.mark.parametrize("named", [{}, {"sparse": ["items"]}, {"sparse": ["items"], "dense": []}])
@pytest.mark.parametrize("how", mostly_slow(AS_NUMBERS, *[*AS_NUMBERS][:2]))
def test_long_lists_of_numbers_are_lists(tmp_path: Path, how: str, named: dict[str, Any]) -> None:
    columns = with_labels(items=[AS_NUMBERS[how](ids) for ids in IDS])
    path = written(tmp_path / "log.csv", columns)
    assert bags(open_log(path, **named), "items") == IDS
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    assert bags(open_log(tmp_path / "log.parquet", **named), "items") == IDS


@pytest.mark.parametrize("how", AS_TEXTS)
def test_long_lists_of_texts_are_lists(tmp_path: Path, how: str) -> None:
    path = written(tmp_path / "log.csv", with_labels(items=[AS_TEXTS[how](ids) for ids in IDS]))
    for named in ({}, {"sparse": ["items"]}):
        log = open_log(path, **named)
        assert list(map(len, bags(log, "items"))) == list(map(len, IDS))
        assert log.tables["items"] == len({one for ids in IDS for one in ids}) + 1


def test_lists_of_one_and_of_none(tmp_path: Path) -> None:
    texts = ["[]", "[7]", "[1, 2]", "(3,)", "{}", "", "['4']", "[NULL]"] * 9
    path = written(tmp_path / "log.csv", with_labels(items=texts))
    expected = [[], [7], [1, 2], [3], [], [], [4], [0]] * 9
    assert bags(open_log(path), "items") == expected


def test_one_list_among_a_thousand_ids(tmp_path: Path) -> None:
    items = [str(i % 9) for i in range(1000)]
    items[900] = "4,5"
    log = open_log(written(tmp_path / "log.csv", with_labels(items=items)))
    assert bags(log, "items")[899:902] == [[8], [4, 5], [1]]


def test_a_few_lists_of_texts_whose_ids_stand_alone_elsewhere(tmp_path: Path) -> None:
    items = [f"tag {i % 9}" for i in range(1000)]
    items[900] = "tag 4, tag 5"
    log = open_log(written(tmp_path / "log.csv", with_labels(items=items)))
    assert bags(log, "items")[899:902] == [[9], [5, 6], [2]]
    # Words of a name are no list, though each of them is a name as well.
    names = with_labels(items=["New", "York", "New York"] * 20)
    log = open_log(written(tmp_path / "names.csv", names))
    assert bags(log, "items") == [[1], [2], [3]] * 20


def test_a_note_says_so_if_few_texts_are_lists(tmp_path: Path) -> None:
    """A separator in a few texts may be part of a name: users see that it divides them."""
    items = [f"shop {i % 9}" for i in range(100)]
    few = [*items, *["x|y"] * 10]
    log = open_log(written(tmp_path / "few.csv", with_labels(items=few)))
    assert any("if 'x|y' is one id, write a schema" in note for note in log.notes)
    for sure in ([*items, *["x|y"] * 100], ["{a}"] * 99 + ["{a,b}"]):
        assert not open_log(written(tmp_path / "sure.csv", with_labels(items=sure))).notes
    open_log(written(tmp_path / "single.csv", with_labels(items=["{a}", "[]"] * 50)))


@pytest.mark.parametrize("text", ["[[{i}, 2], [3]]", "[({i}, 2), (3, 4)]", "[]"])
def test_lists_of_lists_are_left_out(tmp_path: Path, text: str) -> None:
    items = ["[[1, 2]]", *(text.format(i=i) for i in range(SAMPLES))]
    log = open_log(written(tmp_path / "log.csv", with_labels(items=items)))
    assert "items (it holds objects of JSON, or lists of lists" in log.notes[0]


def test_a_list_later_than_the_sample_names_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("placer.data.formats.text.HEAD_BYTES", 64)
    path = written(tmp_path / "log.csv", with_labels(items=[*["4"] * SAMPLES, "5|6"]))
    refused(r"line 62: items is '5\|6'.* separator = '\|'", path)
    items = 'items = {as = "sparse", type = "integer", separator = "|"}'
    schema = schema_of(tmp_path, "[columns]", 'label = "label"', items)
    assert bags(schema.open(path), "items")[-1] == [5, 6]


def test_lists_that_were_cut_short_are_refused(tmp_path: Path) -> None:
    columns = with_labels(items=[f"[{i} 1 ... 998 999]" for i in range(SAMPLES)])
    path = written(tmp_path / "log.csv", columns)
    refused(r"line 2: items holds a list that was cut short \(\.\.\.\)", path)
    assert list(open_log(path, ignore=["items"]).tables) == ["user"]


def test_lists_of_numbers_that_are_no_ids(tmp_path: Path) -> None:
    path = written(tmp_path / "log.csv", with_labels(items=["0.5 0.25 1e-3"] * SAMPLES))
    assert "items (it holds lists of numbers" in open_log(path).notes[0]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_schema_that_reads_lists_as_one_id_is_told_how_to_split(
    tmp_path: Path, kind: str
) -> None:
    log = with_labels(items=[f"{i}|{i + 1}" for i in range(SAMPLES)])
    path = written(tmp_path / "log.csv", log)
    if kind == "parquet":
        path = tmp_path / "log.parquet"
        pq.write_table(pa.table(log), path)
    columns = "[columns]", 'items = {as = "sparse", type = "text"}', 'label = "label"'
    opened = schema_of(tmp_path, *columns).open(path)
    assert opened.tables == {"items": SAMPLES + 1}
    assert any('separator = "|"} in the schema' in note for note in opened.notes)


def test_a_named_column_that_may_hold_lists_says_so(tmp_path: Path) -> None:
    names = [f"Smith{'ab'[i % 2] * i}, John" for i in range(SAMPLES)]
    log = open_log(written(tmp_path / "log.csv", with_labels(name=names)), sparse=["name"])
    assert any("are read as one id each" in note for note in log.notes)


@pytest.mark.parametrize("between", [":", "/"])
def test_texts_that_may_be_lists_say_so(tmp_path: Path, between: str) -> None:
    lists = [between.join("abcdef"[i % 4 : i % 4 + i % 3 + 1]) for i in range(SAMPLES)]
    pairs = [f"AT{between}{i % 7}" for i in range(SAMPLES)]
    urls = [f"https://a.at/{'x/' * (i % 3)}{i % 5}" for i in range(SAMPLES)]
    log = open_log(written(tmp_path / "log.csv", with_labels(a=lists, pair=pairs, url=urls)))
    [note] = log.notes
    assert note.startswith("a is sparse: its texts, such as 'b")
    assert note.endswith(f"what is between them: separator = {between!r}")


# Numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [5, 399])
def test_one_price_with_a_separator_between_thousands(tmp_path: Path, place: int) -> None:
    price = [f"{i % 90}.5" for i in range(500)]
    price[place] = "1,484.20"
    columns = with_labels(price=price)
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    for path in (written(tmp_path / "log.csv", columns), tmp_path / "log.parquet"):
        log = open_log(path)
        assert log.dense_names == ("price",)
        dense = next(log.chunks(500)).dense[:, 0]
        assert dense[place] == np.float32(1484.2)
        assert dense[7] == 7.5
        assert not np.isnan(dense).any()


def test_a_separator_later_than_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placer.data.formats.text.HEAD_BYTES", 128)
    columns = with_labels(price=[*["12.5"] * SAMPLES, "-1,484.20", "3"])
    log = open_log(written(tmp_path / "log.csv", columns))
    assert next(log.chunks(500)).dense[-3:, 0].tolist() == [12.5, np.float32(-1484.2), 3]


@combinations("separator, large", [",", ";"], ["1.484,20", "1 484,20", "1\u202f484,20"])
def test_european_numbers(tmp_path: Path, separator: str, large: str) -> None:
    price = [f"{i % 90},5" for i in range(300)]
    price[250] = large
    path = written(tmp_path / "log.csv", with_labels(price=price), separator)
    log = open_log(path)
    dense = next(log.chunks(500)).dense[:, 0]
    assert dense[[7, 250]].tolist() == [7.5, np.float32(1484.2)]
    again = next(open_log(path, encoding=log.encoding).chunks(500)).dense[:, 0]
    assert again.tolist() == dense.tolist()


def test_decimal_commas_later_than_the_sample_name_their_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("placer.data.formats.text.HEAD_BYTES", 64)
    path = written(tmp_path / "log.csv", with_labels(price=[*["12.5"] * SAMPLES, "12,5"]))
    with pytest.raises(DataError, match=r"price is '12,5'.* decimal = \",\""):
        list(open_log(path).chunks(9))


def test_whole_numbers_with_separators_need_a_word(tmp_path: Path) -> None:
    columns = with_labels(views=[*map(str, range(500)), "1,484"])
    path = written(tmp_path / "log.csv", columns)
    assert "amounts such as '1,484'; if they are numbers, make it dense" in open_log(path).notes[0]
    assert next(open_log(path, dense=["views"]).chunks(501)).dense[-1, 0] == 1484


# Missing values ---------------------------------------------------------------------------------

MARKS = ["", "NULL", "null", "NA", "N/A", "None", "nan", "NaN", "\\N"]
ROWS: dict[str, list[Any]] = {
    "label": [i % 2 for i in range(SAMPLES)],
    "user": [i % 7 if i % 5 else None for i in range(SAMPLES)],
    "city": [f"c{i % 11}" if i % 3 else None for i in range(SAMPLES)],
    "price": [i / 8 if i % 4 else None for i in range(SAMPLES)],
}


def counted(log: EncodedLog) -> list[Any]:
    tables: list[Any] = [
        (one.name, one.table.rows, one.counts and one.counts.counts.tolist(), one.features)
        for one in profile_log(log)
    ]
    dense = np.concatenate([chunk.dense for chunk in log.chunks(7)])
    return [*tables, np.nan_to_num(dense, nan=-1).tolist()]


def log_with(mark: str, kind: str, folder: Path) -> Any:
    """A log in which a mark stands for missing values, of texts alone where a kind has types."""
    rows = {
        name: [mark if one is None and (kind == "csv" or name == "city") else one for one in column]
        for name, column in ROWS.items()
    }
    match kind:
        case "csv":
            return written(folder / "log.csv", rows)
        case "jsonl":
            lines = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
            (folder / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
            return folder / "log.jsonl"
        case "parquet":
            pq.write_table(pa.table(rows), folder / "log.parquet")
            return folder / "log.parquet"
        case "categories":
            table = pa.table(rows)
            cities = table["city"].dictionary_encode()
            return table.set_column(table.schema.get_field_index("city"), "city", cities)
    return pa.table(rows)


@combinations("missing, mark", ["zero", "empty"], MARKS)
def test_missing_values_are_one_notion(tmp_path: Path, mark: str, missing: Any) -> None:
    expected = counted(open_log(pa.table(ROWS), missing=missing))
    for kind in ("csv", "jsonl", "parquet", "categories", "memory"):
        log = open_log(log_with(mark, kind, tmp_path), missing=missing)
        assert counted(log) == expected, kind
        again = open_log(log_with(mark, kind, tmp_path), encoding=log.encoding)
        assert counted(again) == expected, kind


def test_missing_values_of_parts(tmp_path: Path) -> None:
    def counts(table: pa.Table, **options: Any) -> list[Any]:
        def count(counter: PartitionCounter) -> pa.Table:
            return pa.Table.from_batches(list(counter.count(table)))

        return [
            (one.name, one.table.rows, one.counts and one.counts.counts.tolist())
            for one in profile_in_parts(table, count, {"missing": "empty", **options})
        ]

    expected = counts(pa.table(ROWS))
    assert counts(log_with("NA", "memory", tmp_path)) == expected
    assert counts(log_with("NA", "memory", tmp_path), null=[]) != expected
    assert counts(log_with("?", "memory", tmp_path), null=["?"]) == expected


def test_namibia(tmp_path: Path) -> None:
    countries = [("NA", "DE", "", "NULL")[i % 4] for i in range(SAMPLES)]
    path = written(tmp_path / "log.csv", with_labels(country=countries))
    for nulls, lengths in (("", [0, 1, 0, 0]), ("null = []", [1, 1, 0, 1])):
        log = schema_of(tmp_path, nulls, 'missing = "empty"').open(path)
        assert [len(bag) for bag in bags(log, "country")[:4]] == lengths
        profile_log(log).save(tmp_path / "profile")
        loaded = Profile.load(tmp_path / "profile").encoding
        assert loaded == log.encoding
        assert loaded is not None
        again = open_log(path, encoding=loaded)
        assert bags(again, "country") == bags(log, "country")


def test_an_inferred_schema_says_what_is_missing(tmp_path: Path) -> None:
    path = log_with("?", "csv", tmp_path)
    Schema(layout=Layout(nulls=("?",)), headroom=0.1).infer(path, tmp_path / "schema.toml")
    Schema(missing="empty").infer(path, tmp_path / "empty.toml")
    assert Schema.load(tmp_path / "empty.toml").missing == "empty"
    assert 'null = ["?"]' in (tmp_path / "schema.toml").read_text()
    expected = counted(open_log(pa.table(ROWS), headroom=0.1))[:2]
    assert counted(Schema.load(tmp_path / "schema.toml").open(path))[:2] == expected


def test_numbers_that_stand_for_missing_values(tmp_path: Path) -> None:
    columns = with_labels(
        item=[-1 if i % 3 == 0 else i % 9 for i in range(SAMPLES)],
        price=[-999.0 if i % 4 == 0 else 0.5 for i in range(SAMPLES)],
    )
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    text, expected = written(tmp_path / "log.csv", columns), None
    for source in (text, tmp_path / "log.parquet", pd.DataFrame(columns)):
        log = open_log(source, null=["-1", "-999.0"], missing="empty")
        found = (log.tables, bags(log, "item"), next(log.chunks(99)).dense.tolist()[1:4])
        assert (expected or found) == found
        assert np.isnan(next(log.chunks(99)).dense[::4]).all()
        assert log.tables["item"] == 9
        expected = found


def test_what_is_missing_is_part_of_what_identifies_rows(tmp_path: Path) -> None:
    path = log_with("NA", "csv", tmp_path)
    how: Any = {"id_mapping": "hash", "rows": 99}
    hashes = [open_log(path, null=null, **how).encoding.ids_sha256 for null in (None, [], ["NA"])]
    assert len({one["city"] for one in hashes}) == 3
    assert len({one["user"] for one in hashes[:1]}) == 1


# Interactions -----------------------------------------------------------------------------------

LINES = [[user, *((7 * user + item) % 90 for item in range(user % 6))] for user in range(200)]


@combinations("between, end", [" ", "\t", ","], ["\n", " \n", "\r\n"])
def test_lines_of_interactions(tmp_path: Path, between: str, end: str) -> None:
    path = tmp_path / "train.txt"
    path.write_text("".join(between.join(map(str, line)) + end for line in LINES), newline="")
    log = open_log(path)
    assert log.encoding.layout.format == "interactions"
    assert bags(log, "user") == [line[:1] for line in LINES]
    assert bags(log, "items") == [line[1:] for line in LINES]
    # As many a line: known by the first.
    later = with_lines(tmp_path / "test.txt", [f"5{between}6", f"7{between}8"])
    assert bags(open_log(later, encoding=log.encoding), "items") == [[6], [8]]


def test_interactions_of_texts_have_to_be_named(tmp_path: Path) -> None:
    lines = [" ".join(f"u{one}" for one in line) for line in LINES]
    path = with_lines(tmp_path / "sessions.csv", lines)
    refused(r"--log-format \(interactions", path)
    log = open_log(path, "interactions", ignore=["user"])
    assert [len(bag) for bag in bags(log, "items")] == [len(line) - 1 for line in LINES]
    assert list(log.tables) == ["items"]


# Poolings, rows and wide logs -------------------------------------------------------------------


def test_poolings_are_of_features(tmp_path: Path) -> None:
    path = written(tmp_path / "log.csv", with_labels(items=["1|2", "3"] * 30))
    items = 'items = {as = "sparse", type = "integer", separator = "|", pooling = "mean"}'
    known = schema_of(tmp_path, "[columns]", 'user = "sparse"', items)
    profile = profile_log(known.open(path), pooling=known.poolings)
    poolings = {one.name: one.table.features[0].pooling for one in profile}
    assert poolings == {"user": "sum", "items": "mean"}
    changed = profile.with_tables(pooling={"*": "max", "user": "mean"})
    poolings = {one.name: one.table.features[0].pooling for one in changed}
    assert poolings == {"user": "mean", "items": "max"}
    with pytest.raises(DataError, match="pooling is given for feature 'item'; there are user"):
        profile_log(known.open(path), pooling={"item": "mean"})
    with pytest.raises(DataError, match="dim is given for table 'item'; there are user"):
        profile_log(known.open(path), dim={"item": 8})
    with pytest.raises(ProfileError, match="pooling is given for feature 'item'"):
        profile.with_tables(pooling={"item": "mean"})


def test_rows_that_nothing_reads_are_mentioned(tmp_path: Path) -> None:
    path = written(tmp_path / "log.csv", with_labels(item=[97 * i for i in range(SAMPLES)]))
    headline = " ".join(profile_report(profile_log(open_log(path))).headline)
    assert "item has 5,724 rows for 60 ids; --id-mapping item=vocabulary" in headline
    mapped = profile_log(open_log(path, id_mapping="vocabulary"))
    assert "nothing reads" not in " ".join(profile_report(mapped).headline)


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 2])
def test_a_line_of_very_many_tabs_ends(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "log.tsv"
    path.write_text(("\t" * 30_000 + "\n") * lines)
    assert len(refused("no categorical column", path)) < 1000
