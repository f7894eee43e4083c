"""Folders of shards: what is in them, who loads them, and what becomes of damaged ones."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_cases import files_of
from fast_and_full import examples
from hypothesis import given
from plan_cases import in_dram, in_hbm, machine, plan_of, plans
from safetensors.torch import load_file
from shard_cases import check_file, checkpoint_of, expected_tensors, scratch, successive_plans

from placer import Plan, Table
from placer.errors import CheckpointError, PlacerError, PlanError
from placer.executor import PlacedEmbeddings
from placer.executor.id_order import tensors_of
from placer.plan.fields import RowOrder
from placer.storage import tensor_rows
from placer.storage.shards import (
    load_shards,
    open_shards,
    write_shards,
    write_tables,
)
from placer.storage.shards.shard_folder import ShardFolder, gather, placement_sha256
from placer.storage.tensor_rows import TensorRows
from placer.training.checkpoint import Checkpoint

TABLE = Table("t", 100, 8, optimizer="adam")
PLAN = replace(
    plan_of(
        TABLE,
        in_hbm("t", (0, 10, 1), (0, 8), "gpu:0", "gpu:1"),
        in_dram("t", (10, 100, 2), (0, 8), "gpu:0"),
        in_dram("t", (11, 100, 2), (0, 8), "gpu:1"),
    ),
    row_order={"t": RowOrder("profile")},
    hot_ids={"t": np.array([7, 3, 50, 99, 0], np.int64)},
)


@examples(30)
@given(plans())
def test_each_device_has_the_rows_of_its_shards(plan: Plan) -> None:
    checkpoint = checkpoint_of(plan)
    with scratch() as name:
        folder = name / "shards"
        opened = write_shards(plan, checkpoint, folder)
        listed = json.loads((folder / "shards.json").read_text())["files"]
        seen = set()
        for path, entry in listed.items():
            (shard,) = [
                shard
                for shard in plan.shards
                if [shard.table, list(shard.rows), list(shard.cols)]
                == [entry["table"], entry["rows"], entry["cols"]]
            ]
            assert entry["device"] in shard.devices
            assert entry["memory"] == shard.memory
            check_file(folder / path, expected_tensors(plan, checkpoint, shard))
            seen.add((shard, entry["device"]))
        assert seen == {(shard, device) for shard in plan.shards for device in shard.devices}
        assert opened.plan == replace(plan, row_order=opened.plan.row_order)
        assert opened.step == 7
        found = {str(path.relative_to(folder)) for path in folder.glob("*/*")}
        assert found == set(listed)


def test_replicas_are_one_file_with_two_names(tmp_path: Path) -> None:
    write_shards(PLAN, checkpoint_of(PLAN), tmp_path / "shards")
    one, two = (tmp_path / "shards" / f"gpu%3A{i}.hbm" / "00000-t.safetensors" for i in range(2))
    assert one.samefile(two)
    opened = open_shards(tmp_path / "shards", verify=False)
    one.unlink()  # A device reads its own.
    weight, *_ = tensors_of(TABLE, "adam")
    held = checkpoint_of(PLAN).tensors["embeddings"]["t.weight"]
    assert torch.equal(gather(opened, weight, np.array([3, 7]), (0, 8), {"gpu:1"}), held[[3, 7]])


def test_names_of_tables_and_devices_stay_within_the_folder(tmp_path: Path) -> None:
    table = Table("../a/b" + "ä" * 200, 3, 2)
    plan = plan_of(table, in_hbm(table.name, (0, 3, 1), (0, 2)))
    write_shards(plan, checkpoint_of(plan), tmp_path / "x" / "shards")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.is_relative_to(tmp_path / "x" / "shards") for path in files)
    assert len(files) == 3


@pytest.mark.parametrize(("most_open", "times"), [(256, 1), (2, 2)])
def test_a_table_is_read_once_and_in_order_a_chunk_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_open: int, times: int
) -> None:
    """Or once for so many of its shards as may be open."""
    monkeypatch.setattr("placer.storage.shards.writing._MOST_OPEN", most_open)
    monkeypatch.setattr(tensor_rows, "CHUNK_BYTES", 8 * 4 * 16)
    asked: dict[str, list[tuple[int, int]]] = {}

    def recorded(name: str, tensor: torch.Tensor) -> TensorRows:
        def read(start: int, stop: int) -> torch.Tensor:
            asked.setdefault(name, []).append((start, stop))
            return tensor[start:stop]

        return TensorRows(tuple(tensor.shape), tensor.dtype, read)

    given = checkpoint_of(PLAN)
    tensors = {
        file: {
            name: recorded(name, tensor) if tensor.dim() else tensor
            for name, tensor in held.items()
        }
        for file, held in given.tensors.items()
    }
    opened = write_shards(PLAN, replace(given, tensors=tensors), tmp_path / "shards")
    steps = [(start, min(start + 16, 100)) for start in range(0, 100, 16)]
    assert {name: spans[: len(steps)] for name, spans in asked.items()} == dict.fromkeys(
        ["t.weight", "t.exp_avg", "t.exp_avg_sq"], steps
    )
    assert {len(spans) for spans in asked.values()} == {times * len(steps)}
    for files in opened.files["t"]:
        expected = expected_tensors(PLAN, given, files[0].shard)
        check_file(tmp_path / "shards" / files[0].name, expected)


def without(checkpoint: Checkpoint, file: str, name: str) -> Checkpoint:
    tensors = {each: dict(held) for each, held in checkpoint.tensors.items()}
    del tensors[file][name]
    return replace(checkpoint, tensors=tensors)


def test_a_checkpoint_of_other_tables_is_refused(tmp_path: Path) -> None:
    good = checkpoint_of(PLAN)
    half = replace(PLAN, tables=(replace(TABLE, dtype="float16"),))
    cases: list[tuple[Plan, Checkpoint, str]] = [
        (PLAN, without(good, "embeddings", "t.weight"), "t.weight is missing"),
        (PLAN, without(good, "embedding_optimizer", "t.exp_avg"), "t.exp_avg is missing"),
        (half, good, r"table 't' is torch.float32 in the checkpoint and float16 in the plan"),
    ]
    for plan, checkpoint, message in cases:
        with pytest.raises(CheckpointError, match=message):
            write_shards(plan, checkpoint, tmp_path / "shards")
    with pytest.raises(PlanError, match="rank 11 is covered 0 times"):
        write_shards(replace(PLAN, shards=PLAN.shards[:2]), good, tmp_path / "shards")
    assert list(tmp_path.iterdir()) == []


def test_what_a_write_leaves_is_written_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = checkpoint_of(PLAN)
    write_shards(PLAN, expected, tmp_path / "whole")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, at: real(file, content[:100], at))
    write_shards(PLAN, expected, tmp_path / "parts")
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(PlacerError, match="exists already"):
        write_shards(PLAN, checkpoint_of(PLAN), tmp_path)
    assert list(tmp_path.iterdir()) == []


def edited(change: Callable[[dict[str, object]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / "shards.json").read_text())
        change(content)
        (folder / "shards.json").write_text(json.dumps(content))

    return edit


def other_plan(folder: Path) -> None:
    replace(PLAN, row_order={}, hot_ids={}).save(folder / "plan.json")


def cut(folder: Path) -> None:
    os.truncate(folder / FILE, 100)


FILE = "gpu%3A1.dram/00002-t.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / FILE).unlink(), f"{FILE} is missing"),
        (cut, f"{FILE} is cut short or altered: it has 100 bytes"),
        (lambda folder: (folder / "shards.json").unlink(), "cannot read .*shards.json"),
        (lambda folder: (folder / "shards.json").write_text("{"), "is not JSON"),
        (edited(lambda content: content.update(updates=8)), "not what its SHA-256 says"),
        (edited(lambda content: content.update(step=8)), "shards.json was altered: step"),
        (edited(lambda content: content.update(format_version=2)), "reads 1; update placer"),
        (other_plan, "plan.json is not the plan that the shards in .* were written with"),
    ],
)
def test_a_damaged_folder_is_refused(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    write_shards(PLAN, checkpoint_of(PLAN), tmp_path / "shards")
    damage(tmp_path / "shards")
    with pytest.raises(CheckpointError, match=message):
        open_shards(tmp_path / "shards")


def test_bytes_of_another_shard_are_not_taken_for_a_files(tmp_path: Path) -> None:
    """Even unverified: a file says itself what it holds."""
    write_shards(PLAN, checkpoint_of(PLAN), tmp_path / "shards")
    path = tmp_path / "shards" / FILE
    path.write_bytes(path.read_bytes().replace(b"exp_avg_sq", b"exp_avg_sp"))
    opened = open_shards(tmp_path / "shards", verify=False)
    with pytest.raises(CheckpointError, match="does not begin as its shard's does"):
        opened.check(opened.files["t"][2][0])


def test_a_placement_is_known_by_what_decides_its_files() -> None:
    known = placement_sha256(PLAN)
    lookups = tuple(replace(shard, buffer_bytes=9) for shard in PLAN.shards)
    assert placement_sha256(replace(PLAN, shards=lookups, batch_size=3)) == known
    moved = (*PLAN.shards[:2], replace(PLAN.shards[2], devices=("gpu:0",)))
    assert placement_sha256(replace(PLAN, shards=moved)) != known
    order = {"t": np.array([3, 7, 50, 99, 0], np.int64)}
    assert placement_sha256(replace(PLAN, hot_ids=order)) != known


# Loading


@examples(15)
@given(successive_plans())
def test_shards_load_under_any_plan(plans: tuple[Plan, Plan]) -> None:
    checkpoint = checkpoint_of(plans[0])
    with scratch() as folder:
        write_shards(plans[0], checkpoint, folder / "shards")
        for plan in plans:
            module = PlacedEmbeddings(plan, backend="torch")
            load_shards(module, folder / "shards")
            weights = module.state_dict()
            assert all(
                torch.equal(weights[key], tensor)
                for key, tensor in checkpoint.tensors["embeddings"].items()
            )
            states = module.optimizer_state_dict()
            assert states.keys() == checkpoint.tensors["embedding_optimizer"].keys()
            assert all(
                torch.equal(states[key], tensor)
                for key, tensor in checkpoint.tensors["embedding_optimizer"].items()
            )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 90}, r"t.weight has shape \(100, 8\), not \(90, 8\)"),
        ({"optimizer": "sgd"}, "t.exp_avg is of no table of the plan"),
        ({"name": "u"}, "u.weight is missing.*t.weight is of no table of the plan"),
        ({"dtype": "float16"}, "t.weight is torch.float32, not torch.float16"),
    ],
)
def test_shards_of_other_tables_are_not_loaded(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    write_shards(PLAN, checkpoint_of(PLAN), tmp_path / "shards")
    table = replace(TABLE, **change)
    other = plan_of(table, in_hbm(table.name, (0, table.rows, 1), (0, 8)))
    with pytest.raises(CheckpointError, match=message):
        load_shards(PlacedEmbeddings(other, backend="torch"), tmp_path / "shards")


# One file of tables


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


def test_shards_on_a_host_and_tables_without_rows(tmp_path: Path) -> None:
    plan = Plan(
        (Table("t", 4, 2), Table("none", 0, 2)),
        machine(servers=1),
        (
            replace(in_dram("t", (0, 4, 1), (0, 2), "host:1"), lookup="host"),
            in_hbm("none", (0, 0, 1), (0, 2)),
        ),
    )
    opened: ShardFolder = write_shards(plan, checkpoint_of(plan), tmp_path / "shards")
    assert {file.parent.name for file in (tmp_path / "shards").glob("*/*")} == {
        "host%3A1.dram",
        "gpu%3A0.hbm",
    }
    assert opened.updates is None
    assert files_of(tmp_path / "shards")
