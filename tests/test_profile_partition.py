"""Counts of a log's parts add up to the profile of the whole log, however it is divided."""

import pickle
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fast_and_full import examples
from hypothesis import given
from hypothesis import strategies as st
from profile_cases import assert_same_profile

from placer import Profile
from placer.data import open_log
from placer.errors import DataError
from placer.profile.count import profile_log
from placer.profile.parts.counter import PartitionCounter
from placer.profile.parts.counts import SCHEMA, merge_counts

OPTIONS: list[dict[str, Any]] = [
    {},
    {"id_mapping": "vocabulary", "min_count": 2, "rows": {"user": 4}},
    {"id_mapping": "hash", "rows": 6, "missing": "empty"},
    {"feature_tables": {"user": "one", "history": "one"}, "ignore": ["city"]},
    {"id_mapping": "identity", "sparse": ["user"], "rows": 30},
]


@st.composite
def logs(draw: st.DrawFn) -> pa.Table:
    """A few samples; ids repeat, and some are missing."""
    samples = draw(st.integers(1, 12))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=samples, max_size=samples))

    return pa.table(
        {
            "user": pa.array(column(st.none() | st.integers(0, 9)), pa.int64()),
            "city": pa.array(column(st.none() | st.sampled_from(["", "Graz", "x"])), pa.string()),
            "history": pa.array(
                column(st.none() | st.lists(st.integers(0, 7), max_size=3)), pa.list_(pa.int32())
            ),
            "label": pa.array(column(st.integers(0, 1)), pa.int8()),
        }
    )


def counted(
    counter: PartitionCounter, log: pa.Table, bounds: list[int], numbers: list[int] | None = None
) -> list[pa.Table]:
    """Counts of the parts of a log between bounds."""
    edges = [0, *sorted(bounds), log.num_rows]
    parts = []
    for number, (start, stop) in enumerate(pairwise(edges)):
        part = log.slice(start, stop - start)
        place = number if numbers is None else numbers[number]
        found = counter.count(iter(part.to_batches()), place)
        parts.append(pa.Table.from_batches(found, SCHEMA))
    return parts


def tree(parts: list[pa.Table], draw: st.DrawFn) -> pa.Table:
    """Merge in some grouping and order."""
    while len(parts) > 1:
        one = parts.pop(draw(st.integers(0, len(parts) - 1)))
        other = parts.pop(draw(st.integers(0, len(parts) - 1)))
        parts.append(merge_counts([one, other]))
    return merge_counts(parts)


@examples(100)
@given(st.data(), logs(), st.sampled_from(OPTIONS))
def test_any_division_and_any_tree_give_the_profile_of_the_log(
    data: st.DataObject, log: pa.Table, options: dict[str, Any]
) -> None:
    expected = profile_log(open_log(log, **options), dim=8)
    counter = PartitionCounter.for_log(log, **options)
    counter = pickle.loads(pickle.dumps(counter))
    bounds = data.draw(st.lists(st.integers(0, log.num_rows), max_size=3))
    parts = counted(counter, log, bounds)
    found = counter.profile(parts, dim=8)
    assert_same_profile(found, expected, same_source=False)
    assert [table.unknown for table in found] == [table.unknown for table in expected]
    merged = tree(parts, data.draw)
    assert_same_profile(counter.profile(merged, dim=8), expected, same_source=False)


@examples(50)
@given(st.data(), logs(), st.sampled_from(OPTIONS))
def test_positions_order_ids_wherever_the_samples_are(
    data: st.DataObject, log: pa.Table, options: dict[str, Any]
) -> None:
    expected = profile_log(open_log(log, **options))
    positions = np.cumsum(data.draw(st.lists(st.integers(1, 99), min_size=12, max_size=12)))
    log = log.append_column("at", pa.array(positions[: log.num_rows]))
    counter = PartitionCounter.for_log(log, position="at", **options)
    shuffled = log.take(data.draw(st.permutations(range(log.num_rows))))
    parts = counted(counter, shuffled, [log.num_rows // 2], [0, 0])
    assert_same_profile(counter.profile(parts), expected, same_source=False)


def test_features_of_one_table_give_it_ids_in_the_order_of_samples() -> None:
    """Ids that occur equally often have the order of their first sample, then of the features."""
    log = pa.table({"user": [5, 7, 9], "history": pa.array([[8], [6], [4]]), "label": [0, 1, 0]})
    options: dict[str, Any] = {
        "feature_tables": {"user": "one", "history": "one"},
        "id_mapping": "vocabulary",
    }
    expected = profile_log(open_log(log, **options), dim=8)
    assert expected.encoding.vocabularies["one"].tolist() == [5, 8, 7, 6, 9, 4]
    counter = PartitionCounter.for_log(log, **options)
    found = counter.profile(counted(counter, log, [2]), dim=8)
    assert_same_profile(found, expected, same_source=False)


def test_parts_behind_an_empty_one_count() -> None:
    log = pa.table({"user": [3, 1, 1, 2], "label": [0, 1, 0, 1]})
    counter = PartitionCounter.for_log(log, rows=4)
    first, second = counted(counter, log, [2])
    empty = pa.RecordBatch.from_pylist([], SCHEMA)
    expected = profile_log(open_log(log, rows=4))
    for parts in ([first, empty, second], [empty, first, first.slice(0, 0), second, empty]):
        assert_same_profile(counter.profile(parts), expected, same_source=False)
    together = pa.Table.from_batches([empty, *first.to_batches(), empty, *second.to_batches()])
    assert_same_profile(counter.profile(together), expected, same_source=False)


def test_what_is_passed_on_early_is_added_up(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    log = pa.table({"a": rng.integers(0, 9_000, 20_000), "b": rng.integers(0, 4_000, 20_000)})
    options: dict[str, Any] = {"id_mapping": "vocabulary", "feature_tables": {"a": "t"}}
    for own in (options, {"rows": {"a": 9_000, "b": 4_000}}):
        expected = profile_log(open_log(log, **own), dim=8)
        counter = PartitionCounter.for_log(log, memory_bytes=1 << 15, **own)
        parts = list(counter.count(log))
        assert sum(part.num_rows for part in parts) > sum(
            profile.counts.ids.size for profile in expected if profile.counts is not None
        )
        pq.write_table(pa.Table.from_batches(parts), tmp_path / "parts.parquet")
        found = counter.profile(tmp_path / "parts.parquet", dim=8)
        assert_same_profile(found, expected, same_source=False)


def test_distinct_rows_of_windows_are_added_up() -> None:
    rng = np.random.default_rng(5)
    log = pa.table({"a": rng.zipf(1.4, 5000) % 700, "b": rng.integers(0, 90, 5000).astype(str)})
    encoding = profile_log(open_log(log)).encoding
    parts = [log.slice(0, 3000), log.slice(3000)]
    expected = Profile.merge(profile_log(open_log(part, encoding=encoding)) for part in parts)
    assert {one.samples for one in expected["a"].locality} == {256, 1024}
    for options in ({}, {"encoding": encoding}):
        counter = PartitionCounter.for_log(log, **options)
        found = counter.profile(merge_counts(counted(counter, log, [3000])))
        assert [table.locality for table in found] == [table.locality for table in expected]
    counter = PartitionCounter.for_log(log, min_count=3, id_mapping="vocabulary")
    few = counter.profile(list(counter.count(log)))
    # Of `a`, ids that are rare share a row, which was not known while windows were counted.
    assert (few["a"].locality, bool(few["b"].locality)) == ((), True)


def test_the_encoding_of_another_log() -> None:
    old = pa.table({"user": [3, 1, 1], "city": ["x", "y", "x"], "label": [0, 1, 0]})
    new = pa.table({"city": ["z", "y", None], "user": [1, 1, 2], "label": [0, 1, 0]})
    encoding = profile_log(open_log(old)).encoding
    expected = profile_log(open_log(new, encoding=encoding))
    counter = PartitionCounter.for_log(new, encoding=encoding)
    assert_same_profile(counter.profile(counter.count(new)), expected, same_source=False)


def test_a_task_holds_no_more_than_it_may() -> None:
    def part() -> Iterator[pa.RecordBatch]:
        rng = np.random.default_rng(0)
        for _ in range(15):
            ids = rng.integers(0, 1 << 40, 16384)
            yield pa.record_batch({"key": ids, "row": ids % 1_000_000, "hot": ids % 1000})

    most = 2 << 20
    counter = PartitionCounter.for_log(
        pa.table({name: pa.array([], pa.int64()) for name in ("key", "row", "hot")}),
        rows={"row": 1_000_000, "hot": 1000, "key": 1 << 40},
        memory_bytes=most,
    )
    counter = PartitionCounter(
        columns=counter.columns,
        feature_tables=counter.feature_tables,
        kinds={**counter.kinds, "key": "vocabulary"},
        mappings={name: counter.mappings[name] for name in ("row", "hot")},
        memory_bytes=most,
    )
    tracemalloc.start()
    rows = sum(batch.num_rows for batch in counter.count(part()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows > 15 * 16384
    assert peak < most + (2 << 20), "two megabytes are the batch's that is read"


def test_what_cannot_be_counted() -> None:
    log = pa.table({"user": [1, 2], "at": [0, -1], "label": [0, 1]})
    with pytest.raises(DataError, match="Table of pyarrow has no column 'time'"):
        PartitionCounter.for_log(log, position="time")
    counter = PartitionCounter.for_log(log, ignore=["at"], rows=2)
    with pytest.raises(DataError, match="partition 3, row 1: feature 'user' has id 2"):
        list(counter.count(iter(log.to_batches()), 3))
    for outside in (-1, 1 << 24):
        with pytest.raises(DataError, match=f"partition {outside} is not from 0"):
            list(counter.count(log, outside))
    placed = PartitionCounter.for_log(log, position="at")
    with pytest.raises(DataError, match="positions in column 'at' have to be from 0"):
        list(placed.count(log))
    with pytest.raises(DataError, match="the log is empty"):
        counter.profile([])
    assert list(counter.count(iter(()))) == []


def test_counts_that_do_not_fit(tmp_path: Path) -> None:
    log = pa.table({"user": [1, 0], "label": [0, 1]})
    counter = PartitionCounter.for_log(log, rows=2)
    part = pa.Table.from_batches(counter.count(log))
    kinds = part.column("kind").to_pylist()
    at = kinds.index("row")
    cases: list[tuple[Any, str]] = [
        (pa.concat_tables([part, part.slice(at, 1)]), "is a part missing, or there twice"),
        (part.drop_columns(["first"]), "has no column 'first'"),
        (part.set_column(3, "count", pa.array([-1] * len(part))), "count -1 is negative"),
        (part.set_column(3, "count", pa.array([None] * len(part), pa.int64())), "missing values"),
        (part.set_column(0, "kind", pa.array(["r"] * len(part))), "of the kind 'r' are not known"),
        (part.set_column(2, "id", pa.array(["x"] * len(part))), "Failed to parse"),
        (tmp_path / "none.parquet", "No such file"),
        (__file__, "as Parquet"),
    ]
    for one, message in cases:
        with pytest.raises(DataError, match=message):
            counter.profile(one)
    other = PartitionCounter.for_log(pa.table({"item": [1]}), rows=2)
    with pytest.raises(DataError, match="they differ in item, user"):
        other.profile(part)


def test_the_pages_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").mkdir()
    log = pa.table({"user": [3, 3, 9000, 1], "city": ["x", "y", "x", "z"]})
    pq.write_table(log.slice(0, 3), "log/0.parquet")
    pq.write_table(log.slice(3), "log/1.parquet")
    page = (Path(__file__).parent.parent / "docs" / "profile.md").read_text(encoding="utf-8")
    (code,) = (
        block.split("```")[0]
        for block in page.split("```python\n")
        if "PartitionCounter.for_log" in block.split("```")[0]
    )
    known: dict[str, Any] = {}
    exec(compile(code, "docs/profile.md", "exec"), known)
    expected = profile_log(open_log("log", rows={"user": 10_000}))
    assert_same_profile(known["profile"], expected, same_source=False)
