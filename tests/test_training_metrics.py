"""AUC and log loss against their definitions."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placer.errors import DataError
from placer.training.metrics import HeldOut, JsonLines, auc, log_loss

# Few distinct scores, so that ties are common.
samples = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=40)


def pairwise_auc(scores: list[int], labels: list[bool]) -> float | None:
    """P(a click scores above a non-click), straight from the definition."""
    wins = [
        1.0 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0.0
        for i in range(len(scores))
        for j in range(len(scores))
        if labels[i] and not labels[j]
    ]
    return sum(wins) / len(wins) if wins else None


@given(samples)
def test_auc_is_the_share_of_ordered_pairs(drawn: list[tuple[int, bool]]) -> None:
    scores, labels = [s for s, _ in drawn], [y for _, y in drawn]
    expected = pairwise_auc(scores, labels)
    assert auc(scores, labels) == (None if expected is None else pytest.approx(expected))


@given(samples, st.integers(1, 7))
def test_batches_make_no_difference(drawn: list[tuple[int, bool]], size: int) -> None:
    scores = np.array([s for s, _ in drawn], np.float32)
    labels = np.array([y for _, y in drawn], np.float32)
    held_out = HeldOut()
    for start in range(0, len(drawn), size):
        held_out.add(scores[start : start + size], labels[start : start + size])
    assert held_out.samples == len(drawn)
    assert held_out.auc() == auc(scores, labels)
    assert held_out.log_loss() == log_loss(scores, labels)


def test_auc_without_both_classes_has_no_value() -> None:
    assert auc([0.1, 0.2], [1, 1]) is None
    assert auc([], []) is None


def test_a_score_that_is_no_number_is_refused() -> None:
    with pytest.raises(DataError, match=r"1 of 2 scores are not numbers.*learning rate"):
        auc([0.1, math.nan], [1, 0])


def test_log_loss_is_the_mean_cross_entropy() -> None:
    logits, labels = np.array([0.3, -2.0, 1.5]), np.array([1, 0, 0])
    p = 1 / (1 + np.exp(-logits))
    expected = -np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p))
    assert log_loss(logits, labels) == pytest.approx(expected)
    assert log_loss([], []) is None


def test_log_loss_of_extreme_logits_is_finite() -> None:
    assert log_loss([1000.0, -1000.0], [1, 0]) == 0
    assert log_loss([1000.0], [0]) == 1000


def test_a_run_that_goes_on_drops_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    log = JsonLines(file)
    log.begin(0)
    for step in (1, 2, 3, 4):
        log.add(step, {"loss": step / 10})
    log.add(4, {"auc": 0.7}, is_last=True)
    with file.open("a") as cut:
        cut.write('{"step": 5, "lo')
    again = JsonLines(file)
    again.begin(2)
    again.add(3, {"loss": 0.9})
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["step"], one["loss"]) for one in lines] == [(1, 0.1), (2, 0.2), (3, 0.9)]
