"""`placer estimate-memory`: bytes of profiles, workloads and model classes."""

import json
from pathlib import Path

import pytest
from cli_cases import Workbench, fail, invoke, misuse, succeed

from placer.workloads import named_workload

MODEL = """
import torch
from torch import nn

class Tower(nn.Module):
    def __init__(self, rows, kind="bag"):
        super().__init__()
        assert torch.empty(0).is_meta, "no memory may be taken"
        make = nn.EmbeddingBag if kind == "bag" else nn.Embedding
        self.items, self.users = make(rows, 32), make(7, 4)
        self.top = nn.Linear(36, 1)
"""


def test_a_class_is_made_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "towers_of_mine.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    name = "towers_of_mine:Tower"
    for kind in ("bag", "row"):
        told = succeed("estimate-memory", name, "--set", "rows=1000000000000", "--set",
                       f"kind={kind}", "--format", "json").stdout  # fmt: skip
        found = json.loads(told)
        assert (found["tables"], found["dense_parameters"]) == (2, 37)
        adam = {row["dtype"]: row for row in found["memory"] if row["optimizer"] == "adam"}
        weights = 10**12 * 32 + 7 * 4
        assert adam["bfloat16"]["weight_bytes"] == 2 * weights
        assert adam["bfloat16"]["state_bytes"] == adam["float32"]["state_bytes"] == 8 * weights
    assert "--set NAME=VALUE" in fail("estimate-memory", name)
    assert "write package.module:Class" in fail("estimate-memory", "towers_of_mine:Tour")
    assert "makes no model with nn.Embedding" in fail("estimate-memory", "torch.nn:ReLU")


def test_profiles_and_workloads_are_as_large_as_their_tables(workbench: Workbench) -> None:
    found = json.loads(succeed("estimate-memory", "criteo-kaggle", "--format", "json").stdout)
    rowwise = next(
        row for row in found["memory"]
        if (row["dtype"], row["optimizer"]) == ("float32", "rowwise_adagrad")
    )  # fmt: skip
    assert rowwise["total_bytes"] == named_workload("criteo-kaggle").total_bytes
    assert "26 tables" in succeed("estimate-memory", workbench.profile).stdout
    assert "no workload is called 'nosuch'" in misuse("estimate-memory", "nosuch")
    refused = invoke("estimate-memory", "criteo-kaggle", "--set", "dim=3")
    assert refused.stderr.endswith("Error: --set is for a model class, given as MODULE:CLASS\n")
