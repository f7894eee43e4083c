"""Training on the real Criteo sample: 10,000 lines, of which 896 are held out."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from training_cases import losses_of, plan_for

from placer.data.reader import open_log
from placer.training.checkpoint import load
from placer.training.config import CheckpointPolicy, TrainConfig
from placer.training.loop import train
from placer.training.pilot import compare_training
from placer.training.reading import batches

pytestmark = pytest.mark.real

CONFIG = TrainConfig(batch_size=128, lr=0.01, embedding_lr=0.02)


@pytest.fixture(scope="module")
def log(real_data: Path):
    return open_log(real_data / "criteo_sample.train.xz", id_mapping="hash", rows=20_000)


def test_clicks_are_told_from_others(log) -> None:
    result = train(plan_for(log, "split", dim=8), log, CONFIG)
    assert result.steps == 72
    assert result.eval_samples == 7 * 128
    assert result.auc is not None
    assert result.auc > 0.65  # 0.70 to 0.72 over seeds and rates; by chance 0.5 ± 0.02
    held_out = [chunk.labels for n, chunk in enumerate(batches(log, 128)) if CONFIG.is_held_out(n)]
    share = float(np.mean(np.concatenate(held_out)))
    knowing_the_share = -share * np.log(share) - (1 - share) * np.log(1 - share)
    assert result.log_loss is not None
    assert result.log_loss < knowing_the_share - 0.01


def test_the_loss_falls_from_pass_to_pass(log) -> None:
    result = train(plan_for(log, "split", dim=8), log, replace(CONFIG, epochs=2, eval_samples=0))
    losses = losses_of(result)
    assert np.mean(losses[72:]) < np.mean(losses[:72]) - 0.05


def test_placed_and_unplaced_are_equal_step_for_step(log) -> None:
    plan = plan_for(log, "split", dim=8)
    result = compare_training(plan, log, replace(CONFIG, max_steps=40))
    assert result.steps == 40
    assert result.max_loss_difference < 1e-6
    assert result.equal


def test_a_resumed_run_is_equal(log, tmp_path: Path) -> None:
    plan, policy = plan_for(log, "split", dim=4), CheckpointPolicy(tmp_path, every_steps=6)
    config = replace(CONFIG, eval_samples=128)
    whole = train(plan, log, replace(config, max_steps=12), checkpoints=policy)
    rest = train(plan, log, replace(config, max_steps=12), resume=tmp_path / "step-000000000006")
    assert load(tmp_path).position.samples == 13 * 128
    assert rest.losses == whole.losses[6:]
    assert rest.auc == whole.auc


def test_parquet_and_text_give_the_same_batches(real_data: Path, log) -> None:
    parquet = open_log(
        real_data / "criteo_20k.parquet",
        encoding=log.encoding,
    )
    pairs = zip(batches(log, 1000), batches(parquet, 1000), strict=False)
    for one, two in itertools.islice(pairs, 10):
        np.testing.assert_array_equal(one.labels, two.labels)
        np.testing.assert_array_equal(one.dense, two.dense)
        for name, bags in one.features.items():
            np.testing.assert_array_equal(bags.ids, two.features[name].ids)
