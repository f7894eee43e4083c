"""Parquet logs: columns, bags, row groups, and one clear line for what cannot be read."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import refused, with_lines
from fast_and_full import examples
from hypothesis import given
from hypothesis import strategies as st

from placer.data import open_log
from placer.data.inference import infer_columns
from placer.data.layout import NamedColumns
from placer.data.source import Cursor
from placer.errors import DataError

SAMPLES = 100


def sample_table(samples: int = SAMPLES, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, samples)
    bags = [rng.integers(0, 50, length).tolist() for length in lengths]
    return pa.table(
        {
            "click": rng.integers(0, 2, samples),
            "item": rng.integers(0, 1000, samples),
            "history": pa.array(bags, pa.list_(pa.int32())),
            "site": [f"site-{number}" for number in rng.integers(0, 20, samples)],
            "price": rng.random(samples).astype(np.float32),
            "at": pa.array(range(samples), pa.timestamp("s")),
        }
    )


def test_columns_are_inferred(tmp_path: Path) -> None:
    pq.write_table(sample_table(), tmp_path / "log.parquet")
    log = open_log(tmp_path / "log.parquet")
    assert list(log.feature_tables) == ["item", "history", "site"]
    assert log.dense_names == ("price",)
    assert log.encoding.label == "click"
    assert log.samples == SAMPLES
    kinds = {name: mapping.kind for name, mapping in log.encoding.mappings.items()}
    assert kinds == {"item": "identity", "history": "identity", "site": "vocabulary"}
    assert log.tables["site"] == 21


def test_inference_knows_criteo_and_heeds_choices() -> None:
    criteo = pa.schema(
        [("label", pa.string())]
        + [(f"I{i}", pa.string()) for i in range(1, 14)]
        + [(f"C{i}", pa.string()) for i in range(1, 27)]
        + [("split", pa.int8())]
    )
    columns = infer_columns(criteo)
    assert (len(columns.sparse), len(columns.dense), columns.label) == (26, 13, "label")
    schema = sample_table(1).schema
    columns = infer_columns(schema, NamedColumns(ignore=["item", "price"]))
    assert (columns.sparse, columns.dense) == (("history", "site"), ())
    assert infer_columns(schema, NamedColumns(dense=["price", "item"])).dense == ("price", "item")
    assert infer_columns(schema, NamedColumns(["site", "item"])).sparse == ("site", "item")
    assert infer_columns(schema, NamedColumns(dense=["item"])).sparse == ("history", "site")
    columns = infer_columns(schema, NamedColumns(sparse=["site"], label="item"))
    assert columns.names == ["item", "price", "site"]


@examples(40)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 900)), max_size=12),
    group=st.integers(50, 1500),
)
def test_a_cursor_reads_what_it_did_not_skip(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, int]], group: int
) -> None:
    samples = 3000
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    pq.write_table(pa.table({"item": np.arange(samples)}), path, row_group_size=group)
    cursor = Cursor(open_log(path).source.spans())
    place = 0
    for read, count in steps:
        if read:
            batch = cursor.read(count)
            ids = [] if batch is None else batch.chunk.features["item"].keys.tolist()
            assert ids == list(range(place, place + len(ids)))
            assert bool(ids) == (place < samples)
            assert batch is None or batch.place.of(0) == f"{path}, row {place}"
            place += len(ids)
        else:
            skipped = cursor.skip(count)
            assert skipped == min(count, samples - place)
            place += skipped
    cursor.close()


def test_small_row_groups_are_read_together(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    pq.write_table(sample_table(), path, row_group_size=1)
    batches = list(open_log(path).source.batches(10_000))
    assert [batch.samples for batch in batches] == [SAMPLES]


def test_blocks_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"item": np.arange(SAMPLES)}), path, row_group_size=7)
    parts = open_log(path).blocks(30, lambda block: block % 2 == 1)
    found = [part if isinstance(part, int) else part.features["item"].ids[0] for part in parts]
    assert found == [30, 30, 30, 90]


def test_texts_that_are_numbers(tmp_path: Path) -> None:
    table = pa.table({"label": ["1", "0", None], "I1": ["3", "", None], "C1": ["a", "b", "a"]})
    pq.write_table(table, tmp_path / "log.parquet")
    log = open_log(tmp_path / "log.parquet", dense=["I1"])
    (chunk,) = log.chunks()
    np.testing.assert_array_equal(chunk.dense[:, 0], np.float32([3, np.nan, np.nan]))
    np.testing.assert_array_equal(chunk.labels, np.float32([1, 0, np.nan]))
    log = open_log(tmp_path / "log.parquet", dense=["C1"], sparse=["I1"])
    with pytest.raises(DataError, match="row 0: C1 is 'a', which is not a number"):
        next(log.chunks())


def test_statistics_or_a_scan_give_the_rows(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 500, 3], "b": pa.array([[7], [], [99, 2]])})
    for statistics in (True, False):
        path = tmp_path / f"{statistics}.parquet"
        # The largest id of `a` is in the first row group, that of `b` in the last.
        pq.write_table(table, path, row_group_size=2, write_statistics=statistics)
        assert open_log(path).tables == {"a": 501, "b": 100}
    shared = open_log(path, feature_tables={"a": "t", "b": "t"})
    assert shared.tables == {"t": 501}


def test_ids_out_of_range_are_named(tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"a": [1, 2, 3, 9], "b": pa.array([[0], [], [1, 50], [2]])}), path)
    with pytest.raises(DataError, match=r"log\.parquet, row 3: feature 'a' has id 9, .* 0\.\.4"):
        list(open_log(path, rows=5).chunks(2))
    with pytest.raises(DataError, match=r"log\.parquet, row 2: feature 'b' has id 50"):
        list(open_log(path, rows={"a": 10, "b": 50}).chunks())
    text = with_lines(tmp_path / "ids.csv", ["a,b", "1,1", "2,2", "3,3", "9,4"])
    for samples in (1, 3, 100):  # The place does not depend on how many samples are read at once.
        with pytest.raises(DataError, match=r"ids\.csv, line 5: feature 'a' has id 9, .* 0\.\.4"):
            list(open_log(text, rows=5).chunks(samples))
    pq.write_table(pa.table({"a": [1, -5]}), path)
    # More rows would not help.
    with pytest.raises(DataError, match=r"row 1: feature 'a' has id -5, .* 0\.\.1; map ids with"):
        list(open_log(path, id_mapping="identity").chunks())
    log = open_log(path)
    assert log.tables == {"a": 3}
    note = "table a: each id that occurs gets a row, as a has ids below 0 or from 2^63 on"
    assert log.notes[1] == note
    text = with_lines(tmp_path / "log.csv", ["a,b", f"{2**63},1", f"{2**63 + 1},2"])
    assert note in " ".join(open_log(text).notes)
    pq.write_table(pa.table({"a": [1, 2**40]}), path)
    refused("too large for a row number", path, id_mapping="identity")
    log = open_log(path)
    assert log.tables == {"a": 3}
    assert log.notes[0] == "no column is the label, which training needs; name it with --label"
    says = "table a: each id that occurs gets a row, as 2 samples have ids up to 1,099,511,627,776"
    assert log.notes[1].startswith(says)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    good = tmp_path / "good.parquet"
    pq.write_table(sample_table(), good)
    refused(r"cannot open .*none\.parquet: No such file", tmp_path / "none.parquet")
    refused(r"good\.parquet has no column 'C3'; it has click, item", good, sparse=["C3"])
    refused("has no column 'gone'", good, ignore=["gone"])
    refused(r"row 0: price is 0\.\d+, which is no id", good, sparse=["price"])
    refused("a is 9007199254740992", pa.table({"click": [0, 1], "a": [2.0**53, 1]}), sparse=["a"])
    refused(r"'history' is list.* should hold one number", good, dense=["history"])
    refused("feature 'site' holds texts", good, id_mapping="identity")
    refused("no categorical column", good, ignore=["item", "history", "site"])
    other = tmp_path / "other.parquet"
    pq.write_table(sample_table().drop_columns(["item"]), other)
    refused(r"other\.parquet has no column 'item'", [good, other])
    empty = tmp_path / "empty.parquet"
    pq.write_table(sample_table().slice(0, 0), empty)
    refused(r"empty\.parquet is empty; a log needs at least one sample", empty)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(good.read_bytes()[:-30])
    refused(r"cannot read .*cut\.parquet as Parquet", cut)
    content = bytearray(good.read_bytes())
    content[4:400] = bytes(396)
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot read .*broken\.parquet as Parquet"):
        list(open_log(broken, rows=1000, id_mapping="hash").chunks())


@pytest.mark.real
def test_the_real_avazu_log(real_data: Path) -> None:
    log = open_log(real_data / "avazu_10k.parquet", ignore=["id"])
    assert log.samples == 9999
    assert len(log.feature_tables) == 22
    assert log.encoding.label == "click"
    assert log.tables["device_ip"] == 7303
    (chunk,) = log.chunks(10_000)
    assert set(chunk.labels.tolist()) == {0.0, 1.0}
