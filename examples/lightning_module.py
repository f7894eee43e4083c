"""A LightningModule, saved and resumed: pip install lightning."""

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from placer import Plan, Problem, Topology, apply_plan, profile_model
from placer.trainers.lightning import PlacerCallback
from solvers import solve

ROWS, DIM, BATCH, SAMPLES = (20_000, 5_000, 100), 16, 64, 3_200


class ClickModule(lightning.LightningModule):
    """Three tables and two layers."""

    def __init__(self, plan: Plan | None = None) -> None:
        super().__init__()
        self.plan = plan
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM) for rows in ROWS)
        self.layers = nn.Sequential(nn.Linear(DIM * len(ROWS), 32), nn.ReLU(), nn.Linear(32, 1))

    def configure_model(self) -> None:
        # Called by `fit`, when ranks know of each other; and again for each `fit`.
        if self.plan is not None:
            apply_plan(self, self.plan, lr=0.05, eps=1e-10)
            self.plan = None

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return self.layers(torch.cat(rows, 1)).squeeze(1)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        ids, labels = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self(ids), labels)
        if index in (0, SAMPLES // BATCH - 1):
            print(f"epoch {self.current_epoch}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Called after it, when the tables are no parameters any more.
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def clicks() -> "DataLoader[tuple[Tensor, ...]]":
    """Clicks of which few rows are read often."""
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(SAMPLES, len(ROWS), generator=generator) ** 4 * torch.tensor(ROWS)).long()
    return DataLoader(TensorDataset(ids, (ids[:, 2] % 2).float()), BATCH)


def fit(plan: Plan, epochs: int, resume: str | None = None) -> lightning.Trainer:
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[PlacerCallback()],
    )  # fmt: skip
    trainer.fit(ClickModule(plan), clicks(), ckpt_path=resume)
    return trainer


profile = profile_model(ClickModule(), clicks(), optimizer="adagrad")
plan = solve(
    Problem(profile, Topology.parse("1xh100", hbm="2MiB"), BATCH), solver="greedy-cost"
).plan
assert plan is not None
for shard in plan.shards:
    print(f"table {shard.table}: {shard.row_count} rows in {shard.memory}")

fit(plan, epochs=1).save_checkpoint("first.ckpt")
resumed = fit(plan, epochs=2, resume="first.ckpt").model.state_dict()
whole = fit(plan, epochs=2).model.state_dict()
same = all(torch.equal(value, whole[name]) for name, value in resumed.items())
print("the resumed run is", "equal to the bit" if same else "different")
