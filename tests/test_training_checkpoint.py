"""Checkpoints: exact resumption, and what becomes of them when things go wrong."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_cases import load
from fast_and_full import combinations, mostly_slow
from training_cases import (
    QUICK,
    Placement,
    assert_same_tensors,
    ctrl_c_after,
    losses_of,
    plan_for,
    small_log,
)

from placer import Plan
from placer.errors import CheckpointError, PlacerError
from placer.files.atomic import sha256_json
from placer.files.locks import take_lock
from placer.storage.manifest import latest
from placer.training.checkpoint import Checkpoint, Position, check_settings, save, tidy
from placer.training.config import CheckpointPolicy, TrainConfig
from placer.training.loop import train
from placer.training.run import Progress

LOG = small_log(320)  # 10 batches, one of them held out
CONFIG = replace(QUICK, epochs=3, report_every=1)


def small(step: int, size: int = 10) -> Checkpoint:
    tensors = {"dense": {"w": torch.full((size,), float(step))}, "empty": {}}
    return Checkpoint(Position(step, 1, 64), {"lr": 0.1}, tensors)


def run_interrupted(plan, config: TrainConfig, folder: Path, stop_after: int) -> None:
    """Train and press Ctrl-C after a step."""
    policy = CheckpointPolicy(folder)
    result = train(plan, LOG, config, checkpoints=policy, on_progress=ctrl_c_after(stop_after))
    assert result.interrupted
    assert result.steps == stop_after


# Within a pass, at the last step before a held-out batch, at the end of a pass, in a later one.
@pytest.mark.parametrize(
    ("optimizer", "stop_after"), [("adagrad", 4), ("adam", 9), ("sgd", 18), ("adagrad", 20)]
)
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(
    tmp_path: Path, optimizer: str, stop_after: int
) -> None:
    config = replace(CONFIG, optimizer=optimizer)
    plan = plan_for(LOG, "split")
    whole = train(plan, LOG, config, checkpoints=CheckpointPolicy(tmp_path / "whole"))
    run_interrupted(plan, config, tmp_path / "parts", stop_after)
    policy = CheckpointPolicy(tmp_path / "parts")
    rest = train(plan, LOG, config, checkpoints=policy, resume=tmp_path / "parts")
    assert rest.losses == whole.losses[stop_after:]
    assert (rest.auc, rest.log_loss, rest.steps) == (whole.auc, whole.log_loss, whole.steps)
    assert_same_tensors(tmp_path / "whole", tmp_path / "parts")


@combinations(
    "other, table_optimizer",
    ["hbm", "dram", "strided"],
    ["rowwise_adagrad", "adagrad", "adam", "sgd"],
)
def test_a_run_goes_on_under_another_plan(
    tmp_path: Path, other: Placement, table_optimizer
) -> None:
    first = plan_for(LOG, "split", optimizer=table_optimizer)
    whole = train(first, LOG, CONFIG)
    run_interrupted(first, CONFIG, tmp_path, 13)
    second = plan_for(LOG, other, optimizer=table_optimizer)
    rest = train(second, LOG, CONFIG, resume=tmp_path)
    assert losses_of(rest) == pytest.approx(losses_of(whole)[13:], abs=1e-5)


def half_plan(dtype: str) -> Plan:
    plan = plan_for(LOG, "split")
    return replace(plan, tables=tuple(replace(one, dtype=dtype) for one in plan.tables))


@pytest.mark.parametrize("dtype", mostly_slow(["bfloat16", "float16"], "bfloat16"))
def test_tables_of_half_precision_are_rounded_stochastically(tmp_path: Path, dtype: str) -> None:
    plan = half_plan(dtype)
    uninterrupted = train(plan, LOG, CONFIG, checkpoints=CheckpointPolicy(tmp_path / "a"))
    again = train(plan, LOG, CONFIG)
    nearest = train(plan, LOG, replace(CONFIG, rounding="nearest"))
    assert again.losses == uninterrupted.losses != nearest.losses
    run_interrupted(plan, CONFIG, tmp_path / "b", 5)
    policy = CheckpointPolicy(tmp_path / "b")
    resumed = train(plan, LOG, CONFIG, checkpoints=policy, resume=tmp_path / "b")
    assert resumed.losses == uninterrupted.losses[5:]
    assert_same_tensors(tmp_path / "a", tmp_path / "b")
    with pytest.raises(CheckpointError, match='rounding was "stochastic" and is "nearest"'):
        train(plan, LOG, replace(CONFIG, rounding="nearest"), resume=tmp_path / "b")


def test_a_checkpoint_from_before_there_was_a_choice_was_rounded_to_the_nearest(
    tmp_path: Path,
) -> None:
    plan, config = half_plan("bfloat16"), replace(CONFIG, rounding="nearest")
    run_interrupted(plan, config, tmp_path, 5)
    assert "rounding" not in load(tmp_path).settings  # As it was then.
    train(plan, LOG, config, resume=tmp_path)
    with pytest.raises(CheckpointError, match='rounding was "nearest" and is "stochastic"'):
        train(plan, LOG, CONFIG, resume=tmp_path)


def test_checkpoints_are_written_as_asked_and_the_newest_kept(tmp_path: Path) -> None:
    policy = CheckpointPolicy(tmp_path, every_steps=4, keep=3)
    result = train(plan_for(LOG), LOG, replace(CONFIG, max_steps=14), checkpoints=policy)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000000000008", "step-000000000012", "step-000000000014"]
    assert result.checkpoint == tmp_path / names[-1]
    assert load(tmp_path / names[0]).position == Position(8, 0, 256)


def test_resuming_a_finished_run_evaluates_it_again(tmp_path: Path) -> None:
    policy = CheckpointPolicy(tmp_path)
    whole = train(plan_for(LOG), LOG, CONFIG, checkpoints=policy)
    again = train(plan_for(LOG), LOG, CONFIG, checkpoints=policy, resume=tmp_path)
    assert again.losses == ()
    assert (again.auc, again.steps) == (whole.auc, whole.steps)


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path: Path) -> None:
    save(tmp_path, small(1))
    with pytest.raises(CheckpointError, match=r"holds checkpoints of an earlier run; resume"):
        train(plan_for(LOG), LOG, CONFIG, checkpoints=CheckpointPolicy(tmp_path))


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    messages = []

    def start_another(progress: Progress) -> None:
        with pytest.raises(PlacerError, match=r"in use by another run: process \d+ on ") as error:
            train(plan_for(LOG), LOG, CONFIG, checkpoints=policy, resume=tmp_path)
        messages.append(error)

    policy = CheckpointPolicy(tmp_path, every_steps=1)
    config = replace(CONFIG, max_steps=2)
    result = train(plan_for(LOG), LOG, config, checkpoints=policy, on_progress=start_another)
    assert len(messages) == result.steps == 2
    assert not (tmp_path / ".lock").exists()


def test_resuming_from_nothing_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="there is no checkpoint in"):
            train(plan_for(LOG), LOG, CONFIG, resume=path)


def test_a_checkpoint_of_another_model_or_other_settings_is_refused(tmp_path: Path) -> None:
    train(plan_for(LOG), LOG, CONFIG, checkpoints=CheckpointPolicy(tmp_path))
    for plan, settings, message in (
        ({"dim": 8}, {}, r"tables a dim was 4 and is 8; tables bc dim was 4 and is 8"),
        ({"optimizer": "sgd"}, {}, r'optimizer was "rowwise_adagrad" and is "sgd"'),
        (
            {},
            {"batch_size": 16, "lr": 0.2, "seed": 1, "holdout_every": 5},
            r"batch_size was 32 and is 16; lr was 0.05 and is 0.2; .* 2 more",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            train(plan_for(LOG, **plan), LOG, replace(CONFIG, **settings), resume=tmp_path)


def test_epochs_may_be_added(tmp_path: Path) -> None:
    plan, policy = plan_for(LOG), CheckpointPolicy(tmp_path)
    train(plan, LOG, replace(CONFIG, epochs=1), checkpoints=policy)
    rest = train(plan, LOG, CONFIG, checkpoints=policy, resume=tmp_path)
    assert rest.losses == train(plan, LOG, CONFIG).losses[9:]


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("__0_0.distcp", cut_short, r"__0_0.distcp is cut short or altered: it has "),
        ("__0_0.distcp", flip_a_byte, r"__0_0.distcp was altered: its SHA-256"),
        ("__0_0.distcp", Path.unlink, r"__0_0.distcp is missing"),
        (".metadata", flip_a_byte, r"\.metadata was altered: its SHA-256"),
        ("checkpoint.json", cut_short, r"checkpoint.json is cut short or altered: it is not JSON"),
        ("checkpoint.json", flip_a_byte, r"checkpoint.json .* altered"),
        ("checkpoint.json", Path.unlink, r"cannot read .*checkpoint.json: No such file"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, damage, message: str) -> None:
    path = save(tmp_path, small(1))
    damage(path / name)
    for named in (path, tmp_path):
        with pytest.raises(CheckpointError, match=message):
            load(named)


def test_other_rows_are_told_how_to_go_on_beside_other_settings() -> None:
    saved = {"tables": {"a": {"rows": 4}}, "lr": 0.1}
    with pytest.raises(CheckpointError, match=r"tables a rows was 4 and is 5; lr .* `placer grow "):
        check_settings(saved, {"tables": {"a": {"rows": 5}}, "lr": 0.2})
    with pytest.raises(CheckpointError, match=r"with the settings that it was made with$"):
        check_settings(saved, saved | {"lr": 0.2})
    with pytest.raises(
        CheckpointError, match=r"holdout_every was 0 and is 10; .* by --eval-data\)"
    ):
        check_settings(saved | {"holdout_every": 0}, saved | {"holdout_every": 10})


def edited(path: Path, **changes) -> None:
    manifest = path / "checkpoint.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 3}, "format version 3 and this placer reads 2; update placer"),
        ({"format_version": 1}, "format version 1 and this placer reads 2; train again"),
        ({"step": 9}, "was altered: its content is not what its SHA-256 says"),
        ({"step": "x"}, "was altered: step: "),
        ({"surprise": 1}, "was altered: surprise: "),
    ],
)
def test_edited_manifests_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    path = save(tmp_path, small(1))
    edited(path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    path = save(tmp_path, small(1))
    content = json.loads((path / "checkpoint.json").read_text())
    content.pop("sha256")
    content["files"] = {"../other.safetensors": content["files"]["__0_0.distcp"]}
    edited(path, files=content["files"], sha256=sha256_json(content))
    with pytest.raises(CheckpointError, match="names a file outside its folder"):
        load(path)


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path, caplog) -> None:
    older, newest = save(tmp_path, small(9)), save(tmp_path, small(10))
    assert latest(tmp_path) == newest
    cut_short(newest / "__0_0.distcp")
    assert latest(tmp_path) == older
    assert "passing over a checkpoint" in caplog.text
    assert load(tmp_path).position.step == 9
    (older / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is complete: .*cut short"):
        latest(tmp_path)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, small(1))
    path = save(tmp_path, replace(small(1), position=Position(1, 2, 3)))
    assert load(path).position == Position(1, 2, 3)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_kill_between_the_renames_of_a_replacement_loses_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, small(1))
    path.rename(tmp_path / f".{path.name}.replaced")
    save(tmp_path, small(2))
    assert load(path).position.step == 1


def test_checkpoints_that_were_renamed_into_each_others_steps_are_noticed(tmp_path: Path) -> None:
    first, second = save(tmp_path, small(1)), save(tmp_path, small(2))
    first.rename(tmp_path / "kept")
    assert load(tmp_path / "kept").position.step == 1  # A name of one's own says no step.
    second.rename(first)
    (tmp_path / "kept").rename(second)
    wrong = r"step-0+1 holds step 2, and is named for step 1: .* name it step-0{11}2 again"
    with pytest.raises(CheckpointError, match=wrong):
        load(first)
    with pytest.raises(CheckpointError, match=r"step-0+2 holds step 1, and is named for step 2"):
        load(tmp_path)


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*: (Not a dir|File ex)"):
        save(tmp_path / "file", small(1))


def test_a_checkpoint_that_another_run_is_writing_stays(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f".step-{step}.partial").mkdir()
    writing = os.open(tmp_path / ".step-1.partial", os.O_RDONLY)
    try:
        assert take_lock(writing)
        tidy(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [".step-1.partial"]
    finally:
        os.close(writing)
    tidy(tmp_path)
    assert not [*tmp_path.iterdir()]
