"""Torch-RecHub's own trainer, unchanged: pip install torch-rechub.

Its default optimizer decays all weights in every step, those of rows too that no sample reads;
placed tables do not, so weight_decay is left out here (docs/pytorch.md).
"""

import tempfile

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_rechub.basic.features import DenseFeature, SparseFeature
from torch_rechub.models.ranking import WideDeep
from torch_rechub.trainers import CTRTrainer
from torch_rechub.utils.data import TorchDataset

from placer import Problem, Topology, apply_plan, profile_model
from solvers import solve

ROWS, BATCH, SAMPLES = {"user": 20_000, "item": 5_000, "city": 100}, 64, 6_400
MLP = {"dims": [64, 32], "activation": "relu", "dropout": 0.0}


class Recorded(nn.BCELoss):
    """The trainer's loss; it returns no losses of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def forward(self, prediction: Tensor, label: Tensor) -> Tensor:
        loss = super().forward(prediction, label)
        self.losses.append(loss.item())
        return loss


generator = torch.Generator().manual_seed(0)  # Clicks of which few rows are read often.
ids = (torch.rand(SAMPLES, 3, generator=generator) ** 4 * torch.tensor([*ROWS.values()])).long()
price = torch.rand(SAMPLES, generator=generator)
inputs = {name: ids[:, i] for i, name in enumerate(ROWS)} | {"price": price}
loader = DataLoader(TorchDataset(inputs, (ids[:, 2] % 2).float()), BATCH)

torch.manual_seed(0)
sparse = [SparseFeature(name, rows, embed_dim=8) for name, rows in ROWS.items()]
model = WideDeep([DenseFeature("price")], sparse, mlp_params=MLP)

# What is new, between the model and its trainer.
profile = profile_model(model, loader, steps=20, optimizer="adagrad")
plan = solve(
    Problem(profile, Topology.parse("1xh100", hbm="1MiB"), BATCH), solver="greedy-cost"
).plan
assert plan is not None
for shard in plan.shards:
    print(f"table {shard.table}: {shard.row_count} rows in {shard.memory}")
apply_plan(model, plan, lr=0.01, eps=1e-10)

with tempfile.TemporaryDirectory() as folder:
    trainer = CTRTrainer(model, torch.optim.Adagrad, {"lr": 0.01}, n_epoch=1, model_path=folder)
    trainer.criterion = Recorded()
    trainer.fit(loader)
for step in (0, 50, 99):
    print(f"step {step}: loss {trainer.criterion.losses[step]:.4f}")
