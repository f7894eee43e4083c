"""A plain PyTorch loop: plan, train, save, resume, and take the plan out again."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from placer import Plan, Problem, Topology, apply_plan, profile_model, remove_plan
from solvers import solve

ROWS, DIM, BATCH = (20_000, 5_000, 100), 16, 64


class Model(nn.Module):
    """Three tables and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum") for rows in ROWS)
        self.layers = nn.Sequential(nn.Linear(DIM * len(ROWS), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(ids[:, [i]]) for i, table in enumerate(self.tables)]
        return self.layers(torch.cat(rows, 1)).squeeze(1)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Clicks of which few rows are read often."""
    generator = torch.Generator().manual_seed(step)
    ids = (torch.rand(BATCH, len(ROWS), generator=generator) ** 4 * torch.tensor(ROWS)).long()
    return ids, (ids[:, 2] % 2).float()


def plan_for(model: nn.Module) -> Plan:
    """Profile the model's lookups, and solve for one GPU that is too small for the tables."""
    batches = (batch(step)[0] for step in range(100))
    profile = profile_model(model, batches, forward=model, optimizer="adagrad")
    problem = Problem(profile, Topology.parse("1xh100", hbm="2MiB"), BATCH)
    plan = solve(problem, solver="greedy-cost").plan
    assert plan is not None, "2 MiB are too little"
    return plan


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        ids, labels = batch(step)
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 33 == 0:
            print(f"step {step}: loss {loss.item():.4f}")


torch.manual_seed(0)
model = Model()
plan = plan_for(model)
for shard in plan.shards:
    print(f"table {shard.table}: {shard.row_count} rows in {shard.memory}")
applied = apply_plan(model, plan, lr=0.05, eps=1e-10)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)  # Of the layers alone.
train(model, optimizer, range(50))

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "run.pt"
    parts = {"model": model, "tables": applied, "optimizer": optimizer}
    torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    train(model, optimizer, range(50, 100))
    after = {name: value.clone() for name, value in model.state_dict().items()}
    for name, state in torch.load(path).items():  # As a new process would do.
        parts[name].load_state_dict(state)
train(model, optimizer, range(50, 100))
same = all(torch.equal(value, after[name]) for name, value in model.state_dict().items())
print("the resumed run is", "equal to the bit" if same else "different")

remove_plan(model)  # The model's own nn.EmbeddingBag modules again, trained.
print(model.tables[0])
