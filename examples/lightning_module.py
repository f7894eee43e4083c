"""A LightningModule: pip install lightning."""

import copy
import logging

import lightning
import torch
from click_log import BATCH_SIZE, STEPS, Clicks, arguments, plan_for, read_clicks, report
from plain_pytorch import Model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from placer import apply_plan, profile_model

Batch = list[Tensor]  # ids (samples, features), numbers, labels


class ClickModule(lightning.LightningModule):
    def __init__(self, clicks: Clicks) -> None:
        super().__init__()
        self.model = Model(clicks)
        self.features = list(clicks.ids)
        self.losses: list[float] = []

    def forward(self, batch: Batch) -> Tensor:
        ids, dense = batch[:2]
        logits: Tensor = self.model((dict(zip(self.features, ids.T, strict=True)), dense))
        return logits

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = nn.functional.binary_cross_entropy_with_logits(self(batch), batch[2])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Called by `fit`, when the tables are no parameters any more.
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def fit(module: ClickModule, loader: "DataLoader[tuple[Tensor, ...]]") -> list[float]:
    trainer = lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    return module.losses


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    clicks = read_clicks(arguments(__doc__).data)
    ids = torch.stack([*clicks.ids.values()], 1)
    loader = DataLoader(TensorDataset(ids, clicks.dense, clicks.labels), BATCH_SIZE)
    torch.manual_seed(0)
    module = ClickModule(clicks)
    original = copy.deepcopy(module)

    profile = profile_model(module, loader, forward=module, optimizer="adagrad")
    apply_plan(module, plan_for(profile), lr=0.05, eps=1e-10)
    report("lightning", fit(module, loader), fit(original, loader))


if __name__ == "__main__":
    main()
