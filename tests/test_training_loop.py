"""Training runs: what they learn, hold out, report and refuse."""

import os
import signal
import threading
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from checkpoint_cases import load
from torch import nn
from training_cases import QUICK, ArrayLog, losses_of, plan_for, small_log

from placer.errors import DataError, PlacerError, PlanMismatchError, ProblemError
from placer.executor.streams import threads_for
from placer.interrupt import deferred_interrupt
from placer.plan.plan import Plan
from placer.tables import Feature
from placer.training.config import CheckpointPolicy, TrainConfig
from placer.training.loop import train
from placer.training.run import Progress
from placer.training.trainer import step_work_s

LOG = small_log(3200)
PLAN = plan_for(LOG, "split")


def test_a_run_learns_what_explains_the_clicks() -> None:
    result = train(PLAN, LOG, replace(QUICK, epochs=3))
    losses = losses_of(result)
    assert np.mean(losses[-20:]) < np.mean(losses[:20]) - 0.05
    assert result.auc > 0.65
    assert result.log_loss < np.log(2)


def test_every_tenth_batch_is_held_out() -> None:
    began = time.perf_counter()
    result = train(PLAN, LOG, QUICK)  # 100 batches
    assert result.steps == 90
    assert [step for step, _ in result.losses] == list(range(1, 91))
    assert result.samples == 90 * 32
    assert result.eval_samples == 10 * 32
    assert result.samples_per_s > 0
    assert result.read_s <= result.train_s <= time.perf_counter() - began


def test_held_out_samples_have_no_influence_on_the_training() -> None:
    held_out = np.arange(3200) // 32 % 10 == 9
    flipped = np.where(held_out, 1 - LOG.chunk.labels, LOG.chunk.labels)
    other = replace(LOG, chunk=replace(LOG.chunk, labels=flipped))
    one, two = train(PLAN, LOG, QUICK), train(PLAN, other, QUICK)
    assert one.losses == two.losses
    assert two.auc == pytest.approx(1 - one.auc)


@dataclass(frozen=True)
class _CountedLog(ArrayLog):
    @property
    def samples(self) -> int:
        return self.chunk.samples


def test_progress_knows_the_last_step() -> None:
    config = replace(QUICK, epochs=2, report_every=40)  # 90 steps a pass
    heard: list[Progress] = []
    train(PLAN, LOG, config, on_progress=heard.append)
    # A log that does not tell its length is known after a pass.
    assert [one.last_step for one in heard] == [None, None, 180, 180, 180]
    assert str(heard[-1]).startswith("pass 2 of 2, ")
    counted, heard = _CountedLog(**vars(LOG)), []
    train(PLAN, counted, config, on_progress=heard.append)
    assert {one.last_step for one in heard} == {180}
    train(PLAN, counted, replace(config, max_steps=45), on_progress=heard.append)
    assert heard[-1].last_step == 45


def test_threads_are_for_work_that_keeps_them_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    small, large = nn.Linear(64, 64), nn.Linear(1024, 4096)
    assert threads_for(step_work_s(small, PLAN, 1024)) == 1
    assert threads_for(step_work_s(large, PLAN, 8192)) == 16


def test_a_run_uses_the_threads_that_it_is_given() -> None:
    before, used = torch.get_num_threads(), []
    config = replace(QUICK, max_steps=1, threads=3)
    train(PLAN, LOG, config, on_progress=lambda _: used.append(torch.get_num_threads()))
    assert used == [3]
    assert torch.get_num_threads() == before


def test_another_log_can_be_the_held_out_one() -> None:
    other = small_log(320, seed=1)
    result = train(PLAN, LOG, QUICK, eval_log=other)
    assert result.steps == 100
    assert result.eval_samples == 320


@pytest.mark.parametrize("optimizer", ["adagrad", "sgd", "adam"])
def test_runs_of_one_seed_are_equal_and_of_others_are_not(optimizer: str) -> None:
    config = replace(QUICK, optimizer=optimizer, max_steps=12)
    one, two = train(PLAN, LOG, config), train(PLAN, LOG, config)
    assert (one.losses, one.auc) == (two.losses, two.auc)
    assert train(PLAN, LOG, replace(config, seed=1)).losses != one.losses


def test_the_callers_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    train(PLAN, LOG, replace(QUICK, max_steps=2))
    assert torch.equal(before, torch.get_rng_state())


def test_steps_and_evaluation_can_be_limited() -> None:
    result = train(PLAN, LOG, replace(QUICK, max_steps=7, eval_samples=40))
    assert result.steps == len(result.losses) == 7
    assert result.eval_samples == 64  # two batches, the second one being begun at 32
    nothing = train(PLAN, LOG, replace(QUICK, max_steps=0, holdout_every=0))
    assert (nothing.steps, nothing.auc, nothing.samples_per_s) == (0, None, 0.0)


def test_progress_is_reported_with_mean_losses() -> None:
    seen: list[Progress] = []
    result = train(PLAN, LOG, replace(QUICK, max_steps=10), on_progress=seen.append)
    assert [progress.step for progress in seen] == [4, 8, 10]
    assert [progress.samples for progress in seen] == [128, 256, 320]
    losses = losses_of(result)
    assert [progress.loss for progress in seen] == pytest.approx(
        [np.mean(losses[:4]), np.mean(losses[4:8]), np.mean(losses[8:])]
    )


def test_a_log_without_numeric_columns_can_be_trained_on() -> None:
    log = small_log(640, dense_columns=0)
    assert train(plan_for(log), log, QUICK).steps == 18


def test_ctrl_c_finishes_the_step_saves_and_returns(tmp_path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.step == 8:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    policy = CheckpointPolicy(str(tmp_path))  # A text will do.
    result = train(PLAN, LOG, QUICK, checkpoints=policy, on_progress=interrupt)
    assert result.interrupted
    assert result.steps == 8
    assert result.auc is None
    assert result.checkpoint is not None
    assert load(result.checkpoint).position.step == 8
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_acts_as_ever() -> None:
    with deferred_interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_threads_other_than_the_main_one_can_train() -> None:
    results = []
    thread = threading.Thread(
        target=lambda: results.append(train(PLAN, LOG, replace(QUICK, max_steps=2)))
    )
    thread.start()
    thread.join()
    assert results[0].steps == 2


def with_labels(labels: np.ndarray | None) -> ArrayLog:
    return replace(LOG, chunk=replace(LOG.chunk, labels=labels))


def with_features_of_a(*features: Feature) -> Plan:
    return replace(PLAN, tables=(replace(PLAN.tables[0], features=features), PLAN.tables[1]))


FEATURELESS = tuple(replace(table, features=()) for table in PLAN.tables)


@pytest.mark.parametrize(
    ("plan", "log", "kind", "message"),
    [
        (
            PLAN,
            replace(LOG, feature_tables={"a": "a"}),
            PlanMismatchError,
            r"'b', which the log lacks; it has a$",
        ),
        (
            PLAN,
            replace(LOG, tables={"a": 51, "bc": 40}),
            PlanMismatchError,
            r"'a' reads 51 rows in the log and 50 in the plan",
        ),
        (
            replace(PLAN, tables=FEATURELESS),
            LOG,
            PlanMismatchError,
            "no table of the plan has a feature",
        ),
        (
            with_features_of_a(Feature("a", pooling="none")),
            LOG,
            ProblemError,
            "'a' has pooling 'none'",
        ),
        (replace(PLAN, shards=PLAN.shards[1:]), LOG, PlanMismatchError, "'a'"),
        (PLAN, with_labels(None), DataError, "no labels"),
        (PLAN, with_labels(np.full(3200, 7, np.float32)), DataError, "label is 7.0"),
        (
            PLAN,
            with_labels(np.full(3200, np.nan, np.float32)),
            DataError,
            "none of the 3200 samples",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(
    plan: Plan, log: ArrayLog, kind: type[PlacerError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        train(plan, log, QUICK)


def test_a_diverging_run_stops_with_the_step(tmp_path) -> None:
    config = replace(QUICK, lr=1e30, optimizer="sgd", max_steps=20)
    policy = CheckpointPolicy(tmp_path, every_steps=1)
    with pytest.raises(PlacerError, match=r"loss of step \d+ is (nan|inf): .* rate of 1e\+30"):
        train(PLAN, LOG, config, checkpoints=policy)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, not 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"max_steps": -1}, "max_steps must be at least 0, not -1"),
        ({"holdout_every": 1}, "holdout_every 1 leaves nothing"),
        ({"lr": 0.0}, "lr must be more than 0, not 0.0"),
        ({"embedding_lr": float("nan")}, "embedding_lr must be more than 0, not nan"),
        ({"lr": float("inf")}, "must be positive and eps not negative, and finite"),
        ({"eps": float("nan")}, "must be positive and eps not negative, and finite"),
        ({"seed": 1 << 64}, "seed must be a number of 64 bits"),
        ({"threads": 10**9}, "at most 1024"),
        ({"optimizer": "lamb"}, "'lamb' is none of adagrad, sgd, adam"),
        ({"activation": "step"}, "'step' is none of relu, gelu"),
    ],
)
def test_configurations_out_of_range_are_refused(values: dict, message: str) -> None:
    with pytest.raises(PlacerError, match=message):
        TrainConfig(**values)


def test_a_policy_that_keeps_nothing_is_refused(tmp_path) -> None:
    with pytest.raises(PlacerError, match="keep at least 1 checkpoint, not 0"):
        CheckpointPolicy(tmp_path, keep=0)
