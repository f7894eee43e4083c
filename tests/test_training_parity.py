"""The placed model trains like the unplaced one."""

from dataclasses import replace

import pytest
import torch
from fast_and_full import combinations
from training_cases import QUICK, plan_for, small_log

import placer.training.pilot as parity
from placer.errors import PlanMismatchError
from placer.executor import UnplacedEmbeddings
from placer.tables import OptimizerName
from placer.training.pilot import ParityResult, compare_training

LOG = small_log(960)


@combinations(
    "placement, optimizer", ["split", "strided"], ["rowwise_adagrad", "adagrad", "adam", "sgd"]
)
def test_losses_are_equal_step_for_step(placement, optimizer: OptimizerName) -> None:
    plan = plan_for(LOG, placement, optimizer=optimizer)
    result = compare_training(plan, LOG, QUICK)
    assert result.steps == 27
    assert result.equal
    assert result.max_loss_difference < 1e-6
    assert result.max_weight_difference < 1e-4
    assert result.placed_auc == pytest.approx(result.unplaced_auc, abs=1e-3)
    assert result.placed_losses[0] != result.placed_losses[-1]


def test_epochs_steps_and_progress() -> None:
    seen: list[int] = []
    config = replace(QUICK, epochs=2, max_steps=30)
    result = compare_training(plan_for(LOG), LOG, config, on_step=seen.append)
    assert result.steps == 30
    assert seen == list(range(1, 31))


def test_a_wrong_update_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    class OtherStart(UnplacedEmbeddings):
        """Differs in one weight of one row that is read."""

        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            with torch.no_grad():
                self.weights[0][int(LOG.chunk.features["a"].ids[0]), 0] += 0.5

    monkeypatch.setattr(parity, "UnplacedEmbeddings", OtherStart)
    result = compare_training(plan_for(LOG), LOG, QUICK)
    assert not result.equal
    assert result.max_weight_difference > 1e-2


def test_losses_that_are_not_numbers_are_not_equal() -> None:
    result = ParityResult((float("nan"),), (float("nan"),), None, None, 0.0, 1.0, 1.0)
    assert not result.equal


def test_a_log_that_does_not_fit_is_refused() -> None:
    other = replace(LOG, tables={"a": 50, "bc": 41})
    with pytest.raises(PlanMismatchError, match="41 rows in the log and 40"):
        compare_training(plan_for(LOG), other, QUICK)
