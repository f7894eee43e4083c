"""`placer export --to safetensors`, and the tables of checkpoints in embeddings of one's own."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_cases import checkpoint_of, scratch, successive_plans
from cli_cases import Workbench, fail, invoke, succeed
from fast_and_full import examples
from hypothesis import given
from plan_cases import in_hbm, plan_of
from safetensors.torch import load_file
from torch import Tensor

import placer
from placer import Plan, Table
from placer.errors import CheckpointError
from placer.executor import PlacedEmbeddings
from placer.storage.table_files import write_tables
from placer.training.checkpoint import Checkpoint, Position, load_embeddings, save

TABLE = Table("t", 100, 8, optimizer="adam")
PLAN = plan_of(TABLE, in_hbm("t", (0, 100, 1), (0, 8)))


def test_a_file_of_tables_is_canonical(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(PLAN)
    path = tmp_path / "tables.safetensors"
    write_tables(PLAN, checkpoint, path)
    found = load_file(path)
    assert list(found) == ["t.weight"]
    assert torch.equal(found["t.weight"], checkpoint.tensors["embeddings"]["t.weight"])
    write_tables(PLAN, checkpoint, path, with_optimizer=True)
    found = load_file(path)
    assert found.keys() == {"t.weight", "t.exp_avg", "t.exp_avg_sq"}
    state = checkpoint.tensors["embedding_optimizer"]["t.exp_avg"]
    assert torch.equal(found["t.exp_avg"], state)


def _without(checkpoint: Checkpoint, group: str, name: str) -> Checkpoint:
    tensors = {each: dict(held) for each, held in checkpoint.tensors.items()}
    del tensors[group][name]
    return replace(checkpoint, tensors=tensors)


def test_a_checkpoint_of_other_tables_is_refused(tmp_path: Path) -> None:
    good = checkpoint_of(PLAN)
    half = replace(PLAN, tables=(replace(TABLE, dtype="float16"),))
    cases: list[tuple[Plan, Checkpoint, str]] = [
        (PLAN, _without(good, "embeddings", "t.weight"), "t.weight is missing"),
        (PLAN, _without(good, "embedding_optimizer", "t.exp_avg"), "t.exp_avg is missing"),
        (half, good, r"table 't' is torch.float32 in the checkpoint and float16 in the plan"),
    ]
    for plan, checkpoint, message in cases:
        with pytest.raises(CheckpointError, match=message):
            write_tables(plan, checkpoint, tmp_path / "t.safetensors", with_optimizer=True)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def runs(workbench: Workbench, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    folder = tmp_path_factory.mktemp("tables") / "runs"
    succeed(*workbench.training(), "--steps", "3", "--checkpoints", folder)
    return folder


def test_the_command_writes_all_tables(workbench: Workbench, runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "tables.safetensors"
    command = ("export", workbench.plan, "--to", "safetensors", "--checkpoint", runs)
    result = succeed(*command, "-o", path)
    assert result.stdout == f"26 tables of step 3 written to {path}\n"
    tables = placer.Plan.load(workbench.plan).tables
    found = load_file(path)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        f"{table.name}.weight": (table.rows, table.dim) for table in tables
    }
    succeed(*command, "--with-optimizer", "-o", path)
    assert len(load_file(path)) == 2 * len(tables)


def test_wrong_use_is_told(workbench: Workbench, runs: Path, tmp_path: Path) -> None:
    plan, out = workbench.plan, tmp_path / "out"
    for command in (
        ("export", plan, "--to", "safetensors", "-o", out),
        ("export", plan, "--to", "hugectr", "--checkpoint", runs, "-o", out),
        ("export", plan, "--to", "hugectr", "--with-optimizer", "-o", out),
        ("grow", plan, plan, "-o", out),
        ("grow", plan, plan, "--checkpoint", runs),
    ):
        assert invoke(*command).exit_code == 2
    for command in (("export", plan, "--to", "safetensors"), ("grow", plan, plan)):
        line = fail(*command, "--checkpoint", tmp_path, "-o", out)
        assert "there is no checkpoint in" in line
    assert list(tmp_path.iterdir()) == []


# Embeddings of one's own


def _assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@examples(15)
@given(successive_plans())
def test_embeddings_under_any_plan_load_a_checkpoint(plans: tuple[Plan, Plan]) -> None:
    checkpoint = checkpoint_of(plans[0])
    with scratch() as folder:
        step = save(folder, checkpoint)
        for plan, place in zip(plans, (folder, step), strict=True):
            module = PlacedEmbeddings(plan, backend="torch")
            assert load_embeddings(place, module) == Position(7, 1, 64)
            _assert_same(module.state_dict(), checkpoint.tensors["embeddings"])
            _assert_same(module.optimizer_state_dict(), checkpoint.tensors["embedding_optimizer"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 90}, r"t.weight has shape \(100, 8\), not \(90, 8\)"),
        ({"optimizer": "sgd"}, "t.exp_avg is of no table and optimizer of the plan"),
        ({"name": "u"}, "u.weight is missing.*t.weight is of no table and optimizer of the plan"),
        ({"dtype": "float16"}, "t.weight is torch.float32, not torch.float16"),
    ],
)
def test_a_checkpoint_of_other_tables_is_not_loaded(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    save(tmp_path, checkpoint_of(PLAN))
    table = replace(TABLE, **change)
    other = plan_of(table, in_hbm(table.name, (0, table.rows, 1), (0, 8)))
    module = PlacedEmbeddings(other, seed=1, backend="torch")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        load_embeddings(tmp_path, module)
    _assert_same(module.state_dict(), before)


def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    file = save(tmp_path, checkpoint_of(PLAN)) / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp was altered: its SHA-256"):
        load_embeddings(tmp_path, PlacedEmbeddings(PLAN, backend="torch"))
