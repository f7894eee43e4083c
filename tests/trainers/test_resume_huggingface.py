"""Hugging Face's Trainer: `save_steps` and `resume_from_checkpoint`, schedule and clipping."""

from pathlib import Path

import pytest
import torch
import transformers
from resume_cases import (
    BATCH,
    STEPS,
    Model,
    assert_keys_came_and_went,
    assert_same,
    everything,
    placed,
    samples,
)
from torch import Tensor, nn

from placer.errors import CheckpointError
from placer.trainers.huggingface import FOLDER, PlacerTrainer

pytestmark = pytest.mark.slow
HALF = STEPS // 2


class WithLoss(nn.Module):
    """Returns what `Trainer` wants."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, item: Tensor, pages: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(item, pages)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return {"loss": loss, "logits": logits}


def settings(folder: Path, **options: object) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        str(folder), use_cpu=True, max_steps=STEPS, save_steps=HALF, disable_tqdm=True,
        per_device_train_batch_size=BATCH // 2, gradient_accumulation_steps=2, learning_rate=0.05,
        max_grad_norm=0.5, remove_unused_columns=False, report_to=[], dataloader_pin_memory=False,
        logging_steps=1, **options,
    )  # fmt: skip


def trainer(model: nn.Module, folder: Path, kind: type = PlacerTrainer) -> transformers.Trainer:
    columns = zip(*samples(), strict=True)
    data = [dict(zip(("item", "pages", "labels"), row, strict=True)) for row in columns]
    return kind(WithLoss(model), settings(folder), train_dataset=data)


def test_a_resumed_run_is_equal(grows: bool, tmp_path: Path) -> None:
    """Gradients of two batches come before each step of the optimizer, and are clipped."""
    model, applied = placed("adagrad")
    whole = trainer(model, tmp_path)
    whole.train()
    checkpoint = tmp_path / f"checkpoint-{HALF}"
    assert {"model.safetensors", FOLDER} <= {path.name for path in checkpoint.iterdir()}
    other, again = placed("adagrad", "uva", seed=1)
    resumed = trainer(other, tmp_path / "other")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_same(everything(other, again), everything(model, applied))
    assert_keys_came_and_went(applied)


def test_it_trains_as_the_unplaced_model(tmp_path: Path) -> None:
    ours, applied = placed("sgd")
    torch.manual_seed(0)
    theirs = Model()
    losses = []
    for model, kind in ((ours, PlacerTrainer), (theirs, transformers.Trainer)):
        run = trainer(model, tmp_path, kind)
        rate = 0.05  # Of `apply_plan`, too.
        run.optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        run.train()
        losses.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    for name, weight in (("item", theirs.item.weight), ("pages", theirs.pages.weight)):
        torch.testing.assert_close(applied.tables[name].weight(), weight.detach())


def test_a_checkpoint_of_the_plain_trainer_is_refused(tmp_path: Path) -> None:
    trainer(Model(), tmp_path, transformers.Trainer).train()
    with pytest.raises(CheckpointError, match="was not saved by a PlacerTrainer"):
        trainer(placed()[0], tmp_path).train(resume_from_checkpoint=True)
