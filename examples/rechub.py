"""Torch-RecHub's own trainer, unchanged: pip install --no-deps torch-rechub, and scikit-learn.

Its default optimizer decays all weights in every step, those of rows too that no sample reads;
placed tables do not, so weight_decay is left out here (docs/pytorch.md).
"""

import tempfile

import torch
from click_log import BATCH_SIZE, Clicks, arguments, plan_for, read_clicks, report
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_rechub.basic.features import DenseFeature, SparseFeature
from torch_rechub.models.ranking import DCN, DeepFM, WideDeep
from torch_rechub.trainers import CTRTrainer
from torch_rechub.utils.data import TorchDataset

from placer import apply_plan, profile_model

MLP = {"dims": [64, 32], "activation": "relu", "dropout": 0.0}


def build(kind: type[nn.Module], clicks: Clicks) -> nn.Module:
    torch.manual_seed(0)
    sparse = [SparseFeature(name, rows, embed_dim=8) for name, rows in clicks.rows.items()]
    dense = [DenseFeature(f"I{number + 1}") for number in range(clicks.dense.shape[1])]
    if kind is DCN:
        return DCN(sparse + dense, n_cross_layers=2, mlp_params=MLP)
    if kind is DeepFM:
        return DeepFM(sparse + dense, sparse, mlp_params=MLP)
    return WideDeep(dense, sparse, mlp_params=MLP)


class Recorded(nn.BCELoss):
    """The trainer's loss; it returns no losses of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def forward(self, prediction: Tensor, label: Tensor) -> Tensor:
        loss = super().forward(prediction, label)
        self.losses.append(loss.item())
        return loss


def fit(model: nn.Module, loader: "DataLoader[dict[str, Tensor]]") -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        trainer = CTRTrainer(model, torch.optim.Adagrad, {"lr": 0.01}, n_epoch=1, model_path=folder)
        trainer.criterion = Recorded()
        trainer.fit(loader)
        return trainer.criterion.losses


def main() -> None:
    clicks = read_clicks(arguments(__doc__).data)
    inputs = clicks.ids | {f"I{i + 1}": column for i, column in enumerate(clicks.dense.T)}
    loader = DataLoader(TorchDataset(inputs, clicks.labels), BATCH_SIZE)
    for kind in (WideDeep, DeepFM, DCN):
        unplaced = fit(build(kind, clicks), loader)

        model = build(kind, clicks)
        # What is new: three lines between the model and its trainer.
        profile = profile_model(model, loader, steps=20, optimizer="adagrad")
        plan = plan_for(profile)
        apply_plan(model, plan, lr=0.01, eps=1e-10)
        report(f"torch-rechub {kind.__name__}", fit(model, loader), unplaced)


if __name__ == "__main__":
    main()
