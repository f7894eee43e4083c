"""A training loop in plain PyTorch: profile the model, plan, apply the plan, train, take it out."""

import copy

import torch
from click_log import STEPS, Clicks, arguments, plan_for, read_clicks, report
from torch import Tensor, nn

from placer import apply_plan, profile_model, remove_plan


class Model(nn.Module):
    """Bags of one id, and a few layers over them."""

    def __init__(self, clicks: Clicks, dim: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {name: nn.EmbeddingBag(rows, dim, mode="sum") for name, rows in clicks.rows.items()}
        )
        width = dim * len(clicks.rows) + clicks.dense.shape[1]
        self.layers = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        ids, dense = batch
        rows = [table(ids[name].unsqueeze(1)) for name, table in self.tables.items()]
        logits: Tensor = self.layers(torch.cat([*rows, dense], 1)).squeeze(1)
        return logits


def train(model: Model, clicks: Clicks, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(STEPS):
        ids, dense, labels = clicks.batch(step)
        loss = nn.functional.binary_cross_entropy_with_logits(model((ids, dense)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    clicks = read_clicks(arguments(__doc__).data)
    torch.manual_seed(0)
    model = Model(clicks)
    original = copy.deepcopy(model)

    # What is new: three lines before the optimizer is made.
    batches = (clicks.batch(step)[:2] for step in range(STEPS))
    profile = profile_model(model, batches, forward=model, optimizer="adagrad")
    plan = plan_for(profile)
    apply_plan(model, plan, lr=0.05, eps=1e-10)

    placed = train(model, clicks, torch.optim.Adagrad(model.parameters(), lr=0.05))
    unplaced = train(original, clicks, torch.optim.Adagrad(original.parameters(), lr=0.05))
    report("plain PyTorch", placed, unplaced)

    # Checkpoints are those of the original model, and so is the model once the plan is out.
    original.load_state_dict(model.state_dict())
    remove_plan(model)
    for ours, theirs in zip(model.parameters(), original.parameters(), strict=True):
        if not torch.equal(ours, theirs):
            raise SystemExit("the model without its plan differs from its checkpoint")


if __name__ == "__main__":
    main()
