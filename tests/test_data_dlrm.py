"""Files of dlrm_datasets: table-major bags, and nothing that could run code."""

import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_cases import refused

from placer.data import open_log
from placer.errors import DataError

TABLES, SAMPLES = 3, 20


def tensors(seed: int = 0, samples: int = SAMPLES) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (TABLES, samples), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    indices = torch.randint(0, 30, (int(offsets[-1]),), generator=generator)
    return indices, offsets, lengths


def save(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def bag(content: tuple[torch.Tensor, ...], table: int, sample: int) -> list[int]:
    indices, offsets, lengths = content
    place = table * lengths.shape[1] + sample
    return indices[offsets[place] : offsets[place + 1]].tolist()


@pytest.mark.parametrize("packed", [False, True])
def test_bags_of_several_files(tmp_path: Path, packed: bool) -> None:
    contents = [tensors(0), tensors(1, 7)]
    files = []
    for number, content in enumerate(contents):
        path = save(tmp_path / f"{number}.pt", content)
        if packed:
            path = tmp_path / f"{number}.pt.gz"
            path.write_bytes(gzip.compress((tmp_path / f"{number}.pt").read_bytes()))
        files.append(path)
    log = open_log(files)
    assert list(log.feature_tables) == ["t0", "t1", "t2"]
    assert log.dense_names == ()
    expected = [(content, s) for content in contents for s in range(content[2].shape[1])]
    for samples, skip in [(100, 0), (6, 0), (5, 18), (3, 26), (3, 27)]:
        place = skip
        for chunk in log.chunks(samples, skip):
            assert chunk.labels is None
            for sample in range(chunk.samples):
                content, position = expected[place]
                for table in range(TABLES):
                    bags = chunk.features[f"t{table}"]
                    ids = bags.ids[bags.offsets[sample] : bags.offsets[sample + 1]]
                    assert ids.tolist() == bag(content, table, position)
                place += 1
        assert place == len(expected)


def test_rows_are_one_more_than_the_largest_index(tmp_path: Path) -> None:
    lengths = torch.tensor([[1, 1], [0, 0]])
    content = (torch.tensor([4, 17]), torch.tensor([0, 1, 2, 2, 2]), lengths)
    log = open_log(save(tmp_path / "log.pt", content))
    assert log.tables == {"t0": 18, "t1": 1}, "a table without lookups still has a row"
    int32 = (content[0].int(), content[1].int(), lengths.int())
    (chunk,) = open_log(save(tmp_path / "int32.pt", int32)).chunks()
    assert chunk.features["t0"].ids.dtype == np.int64
    assert open_log(tmp_path / "log.pt", sparse=["t0"]).tables == {"t0": 18}


class Payload:
    """Would run code if it were unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("ran-code").touch, ())


def test_code_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(Payload(), tmp_path / "torch.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Payload(), protocol=2))
    refused(r"torch\.pt holds more than tensors", tmp_path / "torch.pt")
    refused(r"plain\.pt as what torch.save writes.*not a zip file", tmp_path / "plain.pt")
    assert not (tmp_path / "ran-code").exists()


def test_wrong_content(tmp_path: Path) -> None:
    indices, offsets, lengths = tensors()
    cases: list[tuple[Any, str]] = [
        ({"indices": indices}, "holds more than tensors"),
        ((indices, offsets), "does not hold the three tensors"),
        ((indices, offsets, [1, 2]), "only tensors are read"),
        ((indices, offsets, [lengths]), "does not hold the three tensors"),
        ((indices, offsets, torch.empty(3, 20, device="meta")), "holds more than tensors"),
        ((indices.bfloat16(), offsets, lengths), "does not hold the three tensors"),
        ((indices.double(), offsets, lengths), "does not hold the three tensors"),
        ((indices, offsets, lengths.flatten()), "lengths of shape \\(tables, samples\\)"),
        ((indices, offsets[:-1], lengths), "offsets that run over the bags"),
        ((indices[:-1], offsets, lengths), "the number of indices"),
        ((indices[:0], offsets[:1], lengths[:, :0]), "is empty"),
    ]
    for number, (content, message) in enumerate(cases):
        refused(message, save(tmp_path / f"{number}.pt", content))
    good = save(tmp_path / "good.pt", (indices, offsets, lengths))
    (tmp_path / "cut.pt").write_bytes(good.read_bytes()[:-200])
    refused(r"cut\.pt", tmp_path / "cut.pt")
    (tmp_path / "cut.pt.gz").write_bytes(gzip.compress(good.read_bytes())[:-20])
    refused("cut short", tmp_path / "cut.pt.gz")
    refused("no such file", tmp_path / "none.pt")
    other = save(tmp_path / "other.pt", (indices, offsets, lengths.reshape(SAMPLES, TABLES)))
    with pytest.raises(DataError, match=r"other.pt has 20 tables, but the log's first file has 3"):
        list(open_log([good, other], rows=30).chunks())
