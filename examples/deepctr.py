"""DeepCTR-Torch's own `fit`, unchanged: pip install --no-deps deepctr-torch, and scikit-learn.

DeepCTR-Torch adds l2 · Σ w² over *all* rows of its tables in every step, which trains rows that no
sample reads; a placed table refuses that (docs/pytorch.md). So the penalty on embeddings is 0 here.
That of the linear part cannot be turned off in all its models: its tables, of one column, stay with
DeepCTR-Torch's optimizer.
"""

import torch
from click_log import BATCH_SIZE, Clicks, arguments, plan_for, read_clicks, report
from deepctr_torch.inputs import DenseFeat, SparseFeat
from deepctr_torch.models import DCN, WDL, DeepFM
from deepctr_torch.models.basemodel import BaseModel
from torch.utils.data import DataLoader

from placer import apply_plan, profile_model


def build(kind: type[BaseModel], clicks: Clicks) -> BaseModel:
    columns = [SparseFeat(name, rows, embedding_dim=8) for name, rows in clicks.rows.items()]
    columns += [DenseFeat(f"I{number + 1}", 1) for number in range(clicks.dense.shape[1])]
    return kind(columns, columns, l2_reg_embedding=0, seed=0)


def fit(model: BaseModel, clicks: Clicks) -> list[float]:
    """Train for one epoch; losses of its steps, which `fit` does not return."""
    losses = []

    def loss(prediction: torch.Tensor, label: torch.Tensor, reduction: str) -> torch.Tensor:
        total = torch.nn.functional.binary_cross_entropy(prediction, label, reduction=reduction)
        losses.append(total.item() / len(label))
        return total

    model.compile("adagrad", loss)
    inputs = {name: column.numpy() for name, column in clicks.ids.items()}
    inputs |= {f"I{i + 1}": column.numpy() for i, column in enumerate(clicks.dense.T)}
    torch.manual_seed(1)  # For the order of samples.
    model.fit(inputs, clicks.labels.numpy(), batch_size=BATCH_SIZE, verbose=0)
    return losses


def main() -> None:
    clicks = read_clicks(arguments(__doc__).data)
    samples = torch.cat([torch.stack([*clicks.ids.values()], 1), clicks.dense], 1)
    for kind in (DeepFM, DCN, WDL):
        unplaced = fit(build(kind, clicks), clicks)

        model = build(kind, clicks)
        # What is new, between the model and its `compile`.
        profile = profile_model(model, DataLoader(samples, BATCH_SIZE), optimizer="adagrad")
        names = [name for name in profile.table_names if name.startswith("embedding_dict.")]
        plan = plan_for(profile.with_tables(names=names))
        apply_plan(model, plan, lr=0.01, eps=1e-10, strict=False)
        report(f"deepctr-torch {kind.__name__}", fit(model, clicks), unplaced)


if __name__ == "__main__":
    main()
