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

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM) for rows in ROWS)
        self.layers = nn.Sequential(nn.Linear(DIM * len(ROWS), 32), nn.ReLU(), nn.Linear(32, 1))

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
        # Called by `fit`, when the tables are no parameters any more.
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def clicks() -> "DataLoader[tuple[Tensor, ...]]":
    """Clicks of which few rows are read often."""
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(SAMPLES, len(ROWS), generator=generator) ** 4 * torch.tensor(ROWS)).long()
    return DataLoader(TensorDataset(ids, (ids[:, 2] % 2).float()), BATCH)


def placed(plan: Plan) -> ClickModule:
    torch.manual_seed(0)
    module = ClickModule()
    apply_plan(module, plan, lr=0.05, eps=1e-10)
    return module


def fit(module: ClickModule, epochs: int, resume: str | None = None) -> lightning.Trainer:
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[PlacerCallback()],
    )  # fmt: skip
    trainer.fit(module, clicks(), ckpt_path=resume)
    return trainer


profile = profile_model(ClickModule(), clicks(), optimizer="adagrad")
plan = solve(
    Problem(profile, Topology.parse("1xh100", hbm="2MiB"), BATCH), solver="greedy-cost"
).plan
assert plan is not None
for shard in plan.shards:
    print(f"table {shard.table}: {shard.row_count} rows in {shard.memory}")

first = placed(plan)
fit(first, epochs=1).save_checkpoint("first.ckpt")
resumed, whole = placed(plan), placed(plan)
fit(resumed, epochs=2, resume="first.ckpt")
fit(whole, epochs=2)
state = whole.state_dict()
same = all(torch.equal(value, state[name]) for name, value in resumed.state_dict().items())
print("the resumed run is", "equal to the bit" if same else "different")
