"""Criteo's text format: what is read, and one clear line for what cannot be."""

from pathlib import Path

import numpy as np
import pytest
from data_cases import refused

from placer.data import open_log
from placer.data.layout import DENSE
from placer.data.log import Log
from placer.errors import DataError


def line(sample: int, labelled: bool = True) -> str:
    dense = ["" if (sample + i) % 5 == 0 else str(sample + i) for i in range(13)]
    sparse = ["" if (sample + i) % 7 == 0 else f"{sample % 11 * 26 + i:08x}" for i in range(26)]
    return "\t".join(([str(sample % 2)] if labelled else []) + dense + sparse)


def write(path: Path, samples: int, labelled: bool = True) -> Path:
    text = "".join(line(sample, labelled) + "\n" for sample in range(samples))
    path.write_text(text)
    return path


def collect(log: Log, samples: int, skip: int = 0) -> dict[str, np.ndarray]:
    """All samples of a log, joined."""
    chunks = list(log.chunks(samples, skip))
    joined = {
        name: np.concatenate([chunk.features[name].ids for chunk in chunks])
        for name in log.feature_tables
    }
    joined["dense"] = np.concatenate([chunk.dense for chunk in chunks])
    joined["labels"] = np.concatenate([c.labels for c in chunks if c.labels is not None])
    return joined


def assert_equal(one: dict[str, np.ndarray], two: dict[str, np.ndarray], skip: int = 0) -> None:
    for name, values in one.items():
        np.testing.assert_array_equal(values[skip:], two[name], err_msg=name)


def test_values_of_a_line(tmp_path: Path) -> None:
    log = open_log(write(tmp_path / "log", 20), id_mapping="hash", rows=1000)
    (chunk,) = log.chunks(100)
    assert chunk.samples == 20
    assert chunk.labels.tolist() == [0.0, 1.0] * 10
    assert np.isnan(chunk.dense[0, 0])
    assert chunk.dense[3, 4] == 7
    assert chunk.features["C3"].ids[6] == (6 * 26 + 2) % 1000
    assert chunk.features["C1"].ids[0] == 0, "a missing category is id 0"
    assert chunk.features["C1"].offsets is None
    assert log.dense_names == DENSE
    assert isinstance(log, Log)


def test_missing_categories_can_be_empty_bags(tmp_path: Path) -> None:
    log = open_log(write(tmp_path / "log", 14), id_mapping="hash", rows=1000, missing="empty")
    (chunk,) = log.chunks(100)
    bags = chunk.features["C1"]
    assert np.diff(bags.offsets).tolist() == [0, 1, 1, 1, 1, 1, 1] * 2
    assert bags.samples == 14


def test_a_log_without_labels(tmp_path: Path) -> None:
    log = open_log(write(tmp_path / "log", 5, labelled=False), id_mapping="hash", rows=97)
    (chunk,) = log.chunks()
    assert chunk.labels is None
    assert chunk.dense.shape == (5, 13)
    assert log.encoding.label is None


BAD_LINES = {
    "short": (lambda text: text.rsplit("\t", 2)[0], r"line 38: 38 fields, expected 40"),
    "long": (lambda text: text + "\tmore", r"line 38: 41 fields, expected 40"),
    "blank": (lambda text: "", r"line 38 is blank"),
    "letters": (
        lambda text: text.replace("\t", "\tx", 4),
        r"line 38: I\d is 'x\d+', which is not a number",
    ),
}


@pytest.mark.parametrize("kind", BAD_LINES)
@pytest.mark.parametrize("block_bytes", [1000, 1 << 20])
def test_a_bad_line_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, block_bytes: int
) -> None:
    monkeypatch.setattr("placer.data.formats.text.BLOCK_BYTES", block_bytes)
    change, message = BAD_LINES[kind]
    lines = write(tmp_path / "log", 60).read_text().splitlines()
    lines[37] = change(lines[37])
    path = tmp_path / "bad.tsv"
    path.write_text("\n".join(lines) + "\n")
    log = open_log(path, id_mapping="hash", rows=97)
    for skip in (0, 20):
        with pytest.raises(DataError, match=rf"bad\.tsv, {message}"):
            list(log.chunks(8, skip))


def test_a_file_that_is_no_log(tmp_path: Path) -> None:
    options = {"id_mapping": "hash", "rows": 97}
    (tmp_path / "empty").touch()
    refused("empty is empty", tmp_path / "empty", **options)
    full = write(tmp_path / "full", 3)
    log = open_log([full, tmp_path / "empty"], **options)
    assert sum(chunk.samples for chunk in log.chunks()) == 3
    assert any(note.endswith("empty is empty and was passed over") for note in log.notes)
    (tmp_path / "text").write_text("hello\n")
    refused("text, line 1: 1 fields, expected 40", tmp_path / "text", "criteo", **options)
    refused("no separator divides its lines", tmp_path / "text", **options)
    refused(r"cannot open .*nowhere: No such file", tmp_path / "nowhere", **options)


def test_a_file_without_labels_after_one_with(tmp_path: Path) -> None:
    files = [write(tmp_path / "1", 3), write(tmp_path / "2", 3, labelled=False)]
    with pytest.raises(DataError, match="2, line 1: 39 fields, expected 40"):
        list(open_log(files, id_mapping="hash", rows=97).chunks())


@pytest.mark.real
def test_text_and_parquet_of_the_real_sample_agree(real_data: Path) -> None:
    text = open_log(real_data / "criteo_sample.train.xz")
    columns = open_log(real_data / "criteo_20k.parquet", encoding=text.encoding)
    from_text = collect(text, 4096)
    from_columns = collect(columns, 3000)
    assert from_text["C1"].size == 10_000
    assert_equal(from_text, {name: values[:10_000] for name, values in from_columns.items()})
    assert text.tables["C3"] == 5522
