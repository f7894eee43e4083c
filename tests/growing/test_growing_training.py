"""The bundled trainer and the simulator with tables that grow."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from checkpoint_cases import load
from cli_cases import json_of, succeed
from fast_and_full import combinations
from growing_cases import CONFIG, HOW, click_samples, growing_log, growing_plan
from plan_cases import machine
from safetensors.torch import load_file
from training_cases import assert_same_tensors, ctrl_c_after

from cost_models import Roofline, log_stream, simulate
from placer import Plan
from placer.errors import CheckpointError, PlanMismatchError
from placer.growing import KeyMap
from placer.storage.table_files import write_tables
from placer.training.config import CheckpointPolicy
from placer.training.loop import train
from placer.training.pilot import compare_training
from placer.training.reading import batches


@combinations("placement, stop_after, looks_ahead", ["hbm", "cached"], [5, 18, 25], [False, True])
def test_a_resumed_run_is_bit_equal(
    placement: str, stop_after: int, looks_ahead: bool, tmp_path: Path
) -> None:
    log = growing_log()
    plan = growing_plan(log, placement)
    policy = CheckpointPolicy(tmp_path / "whole", keep=1)
    whole = train(plan, log, replace(CONFIG, look_ahead=False), checkpoints=policy)
    assert whole.keys["item"].evicted
    assert whole.keys["item"].expired
    policy = CheckpointPolicy(tmp_path / "parts", keep=1)
    config = replace(CONFIG, look_ahead=looks_ahead)
    first = train(plan, log, config, checkpoints=policy, on_progress=ctrl_c_after(stop_after))
    assert first.steps == stop_after
    other = growing_plan(log, "dram")  # Under another plan, too.
    config = replace(CONFIG, look_ahead=not looks_ahead)
    rest = train(other, log, config, checkpoints=policy, resume=tmp_path / "parts")
    assert first.losses + rest.losses == whole.losses
    assert rest.keys == whole.keys
    assert (rest.auc, rest.log_loss) == (whole.auc, whole.log_loss)
    assert load(tmp_path / "parts").position == load(tmp_path / "whole").position
    assert_same_tensors(tmp_path / "parts", tmp_path / "whole")


def test_another_log_has_not_the_batch_that_was_ahead(tmp_path: Path) -> None:
    """Its first step gives rows to keys as any other does."""
    log, samples = growing_log(), click_samples()
    other = growing_log(samples.slice(320))
    config = replace(CONFIG, look_ahead=True, holdout_every=0)
    policy = CheckpointPolicy(tmp_path)
    plan, batch = growing_plan(log), 2 * CONFIG.batch_size  # Two features of one id.
    first = train(plan, log, config, checkpoints=policy, on_progress=ctrl_c_after(5))
    assert first.keys["item"].hits + first.keys["item"].misses == 6 * batch
    config = replace(config, max_steps=6)
    for each, more, batches_read in ((log, {}, 6), (other, {"other_data": True}, 7)):
        result = train(plan, each, replace(config, **more), resume=tmp_path)
        counts = result.keys["item"]
        assert counts.hits + counts.misses == batches_read * batch


def test_a_file_of_tables_has_the_keys_and_their_rows(tmp_path: Path) -> None:
    log = growing_log()
    plan = growing_plan(log)
    result = train(plan, log, CONFIG, checkpoints=CheckpointPolicy(tmp_path))
    saved = load(tmp_path)
    write_tables(plan, saved, tmp_path / "tables.safetensors")
    found = load_file(tmp_path / "tables.safetensors")
    assert set(found) == {f"{t}.weight" for t in ("item", "tag", "city")} | {
        f"{t}.{name}" for t in ("item", "tag") for name in ("keys", "rows")
    }
    keys = KeyMap(HOW)
    keys.load_state({n: saved.tensors["key_maps"][f"item.keys.{n}"].numpy() for n in keys.STATE})
    assert keys.find(found["item.keys"].numpy()).tolist() == found["item.rows"].tolist()
    assert found["item.keys"].numel() == result.keys["item"].live > 0
    without = replace(saved, tensors={**saved.tensors, "key_maps": {}})
    with pytest.raises(CheckpointError, match=r"lacks 'item.keys.rows' of a table that grows"):
        write_tables(plan, without, tmp_path / "tables.safetensors")


def test_checkpoints_of_other_tables_are_refused(tmp_path: Path) -> None:
    log = growing_log()
    policy = CheckpointPolicy(tmp_path)
    train(growing_plan(log), log, replace(CONFIG, max_steps=2), checkpoints=policy)
    for how in (replace(HOW, admission=1), None):
        plan = growing_plan(log)
        plan = replace(plan, growing={} if how is None else {"item": how, "tag": how})
        with pytest.raises(CheckpointError, match="growing"):
            train(plan, log, CONFIG, resume=tmp_path)


def test_keys_are_read_step_by_step_and_not_in_the_evaluation() -> None:
    log = growing_log()
    result = train(growing_plan(log), log, replace(CONFIG, epochs=1))
    maps = {"item": KeyMap(HOW), "tag": KeyMap(HOW)}
    features = {"item": ("item", "last"), "tag": ("tag",)}
    for number, chunk in enumerate(batches(log, CONFIG.batch_size)):
        if not CONFIG.is_held_out(number):
            for table, keys in maps.items():
                keys.read(np.concatenate([chunk.features[f].ids for f in features[table]]))
    assert result.eval_samples
    assert result.keys == {name: keys.counts for name, keys in maps.items()}
    assert result.keys["item"].live == maps["item"].live()[0].size


@pytest.mark.parametrize("placement", ["hbm", "staged", "cached"])
def test_the_simulator_counts_what_training_does(placement: str) -> None:
    log = growing_log()
    plan = growing_plan(log, placement, replace(HOW, ttl=0))
    # One process trains, and what is simulated has a process for each GPU.
    shards = tuple(replace(shard, devices=("gpu:0",)) for shard in plan.shards)
    plan = replace(plan, topology=machine(1), shards=shards)
    config = replace(CONFIG, epochs=1, holdout_every=0)
    trained = train(plan, log, config)
    found = simulate(plan, [log_stream(plan, log, config.batch_size)], Roofline())
    assert found.keys == trained.keys
    assert all(min(one.hits, one.misses, one.admitted, one.evicted) for one in found.keys.values())
    # With keys translated by hand, everything else is as of a fixed table.
    maps = {name: KeyMap(how) for name, how in plan.growing.items()}
    chunks = []
    for chunk in batches(log, config.batch_size):
        features = dict(chunk.features)
        for table, names in (("item", ("item", "last")), ("tag", ("tag",))):
            rows = maps[table].read(np.concatenate([features[name].ids for name in names])).rows
            for name in names:
                size = features[name].ids.size
                features[name], rows = replace(features[name], ids=rows[:size]), rows[size:]
        chunks.append(replace(chunk, features=features))
    fixed = simulate(replace(plan, growing={}), [("rows", lambda: chunks)], Roofline())
    assert fixed.served == found.served
    assert [one.step_s for one in fixed.records] == [one.step_s for one in found.records]


def test_the_unplaced_model_has_no_key_map() -> None:
    log = growing_log()
    with pytest.raises(
        PlanMismatchError, match=r"grows: .* which the unplaced model does not have"
    ):
        compare_training(growing_plan(log), log)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of two days as files, a profile of the first, and a plan of the command."""
    folder = tmp_path_factory.mktemp("growing")
    samples = click_samples(1280)
    pq.write_table(samples[:640], folder / "monday.parquet")
    pq.write_table(samples[640:], folder / "tuesday.parquet")
    for command in (
        ("profile", folder / "monday.parquet", "--window", "160", "--dim", "4",
         "--feature-table", "last=item", "-o", folder / "profile"),
        ("plan", "--profile", folder / "profile", "--topology", "1xh100", "--batch-size", "32",
         "--solver", "greedy-cost", "--growing", "item=60%,tag=60", "-o", folder / "plan.json"),
    ):  # fmt: skip
        succeed(*command)
    return folder


def _training(folder: Path, *more: str) -> list[str]:
    command = ["train", str(folder / "plan.json"), "--data", str(folder / "monday.parquet")]
    return [*command, "--data", str(folder / "tuesday.parquet"), "--epochs", "2", *more]


def test_the_command_trains_on_ids_that_its_profile_has_not_seen(planned: Path) -> None:
    keys = json_of(*_training(planned))["keys"]["keys"]
    capacity = Plan.load(planned / "plan.json").growing["item"].capacity
    assert [row["table"] for row in keys] == ["item", "tag"]
    for row, most in zip(keys, (capacity, 60), strict=True):
        assert 0 < row["live"] <= most
        assert row["evicted"] > 0
        assert row["hit_rate"] == pytest.approx(row["hits"] / (row["hits"] + row["misses"]))
    assert "Keys of tables that grow" in succeed(*_training(planned)).stdout
    data = ("--data", planned / "monday.parquet")
    assert json_of("simulate", planned / "plan.json", *data)["keys"][1]["live"] == 60


def test_the_next_day_goes_on_with_the_keys(planned: Path, tmp_path: Path) -> None:
    def training(day: str, *more: str) -> dict[str, list[dict[str, object]]]:
        command = ("train", planned / "plan.json", "--data", planned / f"{day}.parquet")
        return json_of(*command, "--checkpoints", tmp_path, *more)["keys"]

    training("monday")
    maps = load(tmp_path).tensors["key_maps"]
    (item, _) = training("tuesday", "--resume", "--other-data")["keys"]
    assert maps.keys() == load(tmp_path).tensors["key_maps"].keys()
    lookups = 2 * (640 + 640 - 2 * 64)  # Two features; two of twenty batches are held out.
    assert int(str(item["hits"])) + int(str(item["misses"])) == lookups


@pytest.mark.slow
def test_kills_at_random_times_lose_nothing() -> None:
    script = Path(__file__).with_name("kills_run.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), "6"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^6 kills in \d+ runs, 0 lost$", done.stdout, re.MULTILINE)
