"""DeepCTR-Torch's own `fit`, unchanged: pip install deepctr-torch requests.

DeepCTR-Torch adds l2 · Σ w² over *all* rows of its tables in every step, which trains rows that no
sample reads; a placed table refuses that (docs/pytorch.md). So the penalty on embeddings is 0 here.
That of the linear part cannot be turned off in all its models: its tables, of one column, stay with
DeepCTR-Torch's optimizer.
"""

import torch
from deepctr_torch.inputs import DenseFeat, SparseFeat
from deepctr_torch.models import DeepFM
from torch import Tensor, nn
from torch.utils.data import DataLoader

from placer import Problem, Topology, apply_plan, profile_model
from solvers import solve

ROWS, BATCH, SAMPLES = {"user": 20_000, "item": 5_000, "city": 100}, 64, 6_400
losses: list[float] = []


def loss(prediction: Tensor, label: Tensor, reduction: str) -> Tensor:
    """The usual one; `fit` does not return losses of steps."""
    total = nn.functional.binary_cross_entropy(prediction, label, reduction=reduction)
    losses.append(total.item() / len(label))
    return total


generator = torch.Generator().manual_seed(0)  # Clicks of which few rows are read often.
ids = (torch.rand(SAMPLES, 3, generator=generator) ** 4 * torch.tensor([*ROWS.values()])).long()
price = torch.rand(SAMPLES, 1, generator=generator)
labels = (ids[:, 2] % 2).float()

columns = [SparseFeat(name, rows, embedding_dim=8) for name, rows in ROWS.items()]
columns.append(DenseFeat("price", 1))
model = DeepFM(columns, columns, l2_reg_embedding=0, seed=0)

# What is new, between the model and its `compile`.
loader = DataLoader(torch.cat([ids.float(), price], 1), BATCH)
profile = profile_model(model, loader, optimizer="adagrad")
names = [name for name in profile.table_names if name.startswith("embedding_dict.")]
problem = Problem(profile.with_tables(names=names), Topology.parse("1xh100", hbm="1MiB"), BATCH)
plan = solve(problem, solver="greedy-cost").plan
assert plan is not None
for shard in plan.shards:
    print(f"table {shard.table}: {shard.row_count} rows in {shard.memory}")
apply_plan(model, plan, lr=0.01, eps=1e-10, strict=False)

model.compile("adagrad", loss)
inputs = {name: ids[:, i].numpy() for i, name in enumerate(ROWS)} | {"price": price.numpy()}
torch.manual_seed(1)  # For the order of samples.
model.fit(inputs, labels.numpy(), batch_size=BATCH, verbose=0)
for step in (0, 50, 99):
    print(f"step {step}: loss {losses[step]:.4f}")
