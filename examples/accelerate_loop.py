"""Accelerate, saved and resumed: pip install accelerate."""

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from placer import Plan, Problem, Topology, apply_plan, profile_model
from solvers import solve

ROWS, DIM, BATCH, SAMPLES = (20_000, 5_000, 100), 16, 32, 3_200


class Model(nn.Module):
    """Three tables and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM) for rows in ROWS)
        self.layers = nn.Sequential(nn.Linear(DIM * len(ROWS), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return self.layers(torch.cat(rows, 1)).squeeze(1)


def clicks() -> "DataLoader[tuple[Tensor, ...]]":
    """Clicks of which few rows are read often."""
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(SAMPLES, len(ROWS), generator=generator) ** 4 * torch.tensor(ROWS)).long()
    return DataLoader(TensorDataset(ids, (ids[:, 2] % 2).float()), BATCH)


def train(plan: Plan, epochs: range, load: str | None = None, save: str | None = None) -> nn.Module:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = Model()
    applied = apply_plan(model, plan, lr=0.05, eps=1e-10)  # After Accelerator, before `prepare`.
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    applied.update_with(optimizer)  # The tables' gradients accumulate, too.
    accelerator.register_for_checkpointing(applied)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, clicks())
    if load is not None:
        accelerator.load_state(load)
    for epoch in epochs:
        for step, (ids, labels) in enumerate(loader):
            with accelerator.accumulate(prepared):
                loss = nn.functional.binary_cross_entropy_with_logits(prepared(ids), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if step in (0, len(loader) - 1):
                print(f"epoch {epoch}: loss {loss.item():.4f}")
    if save is not None:
        accelerator.save_state(save)
    return model


profile = profile_model(Model(), clicks(), optimizer="adagrad")
plan = solve(
    Problem(profile, Topology.parse("1xh100", hbm="2MiB"), BATCH), solver="greedy-cost"
).plan
assert plan is not None
for shard in plan.shards:
    print(f"table {shard.table}: {shard.row_count} rows in {shard.memory}")

train(plan, range(1), save="first")
resumed = train(plan, range(1, 2), load="first")
state = train(plan, range(2)).state_dict()
same = all(torch.equal(value, state[name]) for name, value in resumed.state_dict().items())
print("the resumed run is", "equal to the bit" if same else "different")
