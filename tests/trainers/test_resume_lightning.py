"""Lightning: a run that its trainer saved and resumed is equal to the uninterrupted one."""

import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from resume_cases import (
    BATCH,
    Model,
    assert_keys_came_and_went,
    assert_same,
    everything,
    placed,
    samples,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from placer.errors import CheckpointError
from placer.trainers.lightning import PlacerCallback

pytestmark = pytest.mark.slow


class Module(lightning.LightningModule):
    """The plan is applied when it is made, or by Lightning, when there are ranks."""

    def __init__(self, seed: int = 0, late: bool = False) -> None:
        super().__init__()
        self.seed, self.model = seed, nn.Identity()
        if not late:
            self.configure_model()

    def configure_model(self) -> None:
        if not isinstance(self.model, Model):
            self.model, self.applied = placed(seed=self.seed)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        item, pages, label = batch
        return nn.functional.binary_cross_entropy_with_logits(self.model(item, pages), label)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(
    module: Module,
    epochs: int,
    callback: PlacerCallback | None,
    ckpt_path: Path | None = None,
    **options: object,
) -> "lightning.Trainer":
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback] if callback else [],
        **options,
    )
    loader = DataLoader(TensorDataset(*samples()), BATCH)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(does not have many workers|torch.jit).*")
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("in_folder", [False, True])
def test_a_resumed_run_is_equal(in_folder: bool, late: bool, grows: bool, tmp_path: Path) -> None:
    def callback(number: int = 0) -> PlacerCallback:
        return PlacerCallback(tmp_path / f"tables{number}" if in_folder else None, keep=2)

    whole = Module(late=late)
    fit(whole, 2, callback())
    first = Module(late=late)
    path = tmp_path / "first.ckpt"
    trainer = fit(first, 1, callback())
    for _ in range(3):
        trainer.save_checkpoint(path)
    if in_folder:
        assert len(list((tmp_path / "tables0").iterdir())) == 2
        assert "model.item.weight" not in torch.load(path, weights_only=True)["state_dict"]
        (tmp_path / "tables0").rename(tmp_path / "tables1")
    second = Module(seed=1, late=late)
    fit(second, 2, callback(int(in_folder)), path)
    assert_same(everything(second, second.applied), everything(whole, whole.applied))
    assert not second._load_state_dict_pre_hooks
    assert_keys_came_and_went(whole.applied)


def test_fabric_saves_and_resumes(tmp_path: Path) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)

    def started(seed: int) -> dict[str, Any]:
        model, applied = placed(seed=seed)
        made = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
        applied.update_with(made[1])
        return {"model": made[0], "optimizer": made[1], "tables": applied}

    def trained(run: dict[str, Any]) -> dict[str, Any]:
        for item, pages, label in DataLoader(TensorDataset(*samples()), BATCH):
            run["optimizer"].zero_grad()
            logits = run["model"](item, pages)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
            fabric.backward(loss)
            run["optimizer"].step()
        return run

    first = trained(started(0))
    fabric.save(tmp_path / "first.ckpt", first)
    second = started(1)
    fabric.load(tmp_path / "first.ckpt", second)
    both = [everything(run["model"], run["tables"]) for run in map(trained, (second, first))]
    assert_same(*both)


def test_a_checkpoint_without_the_state_is_refused(tmp_path: Path) -> None:
    trainer = fit(Module(), 1, None)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    with pytest.raises(CheckpointError, match="saved without PlacerCallback"):
        fit(Module(), 2, PlacerCallback(), tmp_path / "first.ckpt")


def test_clipping_that_misses_tables_is_said() -> None:
    with pytest.warns(UserWarning, match="gradient_clip_val clips the gradients of the dense"):
        fit(Module(), 1, PlacerCallback(), gradient_clip_val=1.0)
