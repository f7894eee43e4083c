"""The dense part that a command names: published layers, files and measured times."""

from dataclasses import replace
from pathlib import Path

import pytest
from dense_cases import DLRM

from placer.dense import (
    DenseNetwork,
    MeasuredDense,
)
from placer.errors import ProblemError
from placer.workloads import named_workload, published
from placer.workloads.dense import dense_part, published_dense


def test_texts_name_a_dense_part() -> None:
    assert dense_part("none") is None
    assert dense_part("measured:1.5ms") == MeasuredDense(0.0015)
    assert dense_part("workload", "mlperf-dcnv2") == published_dense("mlperf-dcnv2")
    half = dense_part("workload:bfloat16", "mlperf-dcnv2")
    assert half == replace(published_dense("mlperf-dcnv2"), math="bfloat16")


@pytest.mark.parametrize(
    ("text", "workload", "message"),
    [
        ("workload", None, "give --workload, or a file"),
        ("workload", "avazu", "no dense layers were published for 'avazu'; .*mlperf-dcnv2"),
        ("workload:int4", "criteo-kaggle", "math 'int4' is none of float32"),
        ("measured:soon", None, "--dense measured:soon: not a duration: 'soon'"),
        ("512-256-1", None, "is none of none, workload"),
        ("missing.yaml", None, "cannot read the dense missing.yaml: No such file"),
    ],
)
def test_texts_that_name_none_are_refused(text: str, workload: str | None, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        dense_part(text, workload)


FILES = {
    "dense.yaml": "top: [3, 1]\nbottom: [3, 2]\ndense_features: 2\nmath: tf32\n",
    "dense.toml": 'top = [3, 1]\nbottom = [3, 2]\ndense_features = 2\nmath = "tf32"\n',
    "dense.json": '{"top": [3, 1], "bottom": [3, 2], "dense_features": 2, "math": "tf32"}',
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_layers_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name])
    assert dense_part(str(tmp_path / name)) == replace(DLRM, math="tf32")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bottom: [4]", "dense.yaml: top: Field required"),
        ("top: [4, 0]", r"top\[1\]: 0: .*greater than or equal to 1"),
        ("top: [1]\nwidth: 4", "width: no such field; docs/dense.md lists them"),
        ("top: [1]\nmath: int8", "math: 'int8'"),
        ("top: [1]\ncross_rank: 4", "dense.yaml: dense layers: cross_rank 4 goes with cross"),
        ("top: [1", "dense.yaml is not a dense file"),
    ],
)
def test_a_file_without_layers_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "dense.yaml").write_text(text)
    with pytest.raises(ProblemError, match=message):
        dense_part(str(tmp_path / "dense.yaml"))


def test_published_layers_fit_their_tables() -> None:
    for name, entry in published().items():
        if "dense" not in entry:
            continue
        tables = [one.table for one in named_workload(name)]
        network = DenseNetwork.of(published_dense(name), tables)
        assert network.parameters > 0
        assert not [one for one in network.products if one.part == "projection"]
    # As published: Medium takes means of 7 columns, and 25 numeric features.
    medium = [one.table for one in named_workload("nvidia-medium")]
    columns = sum(one.dim * len(one.features) for one in medium)
    network = DenseNetwork.of(published_dense("nvidia-medium"), medium)
    assert network.products[0].inputs == -(-columns // 7) + 25


def test_vectors_have_the_width_of_tables_that_another_one_was_asked_for() -> None:
    assert published_dense("criteo-terabyte", 128).bottom == (512, 256, 128)
    assert published_dense("nvidia-tiny", 128) == published_dense("nvidia-tiny")
