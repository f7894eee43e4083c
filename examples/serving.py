"""Answers requests with a trained model: tables by a plan, the dense part by AOTInductor.

The cache in HBM has the size that the log's profile asks for, so that 90% of lookups are hits.
"""

import tempfile

import torch
from torch import Tensor, nn
from torch.export import Dim, export

from placer import Plan, Problem, Topology, apply_plan, profile_model
from placer.executor import BagBatch
from placer.plan.serving import serving_plan
from placer.storage.checkpoint import save_tables
from placer.storage.serving import load_read_only
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


def clicks(seed: int, samples: int = BATCH) -> Tensor:
    """Ids of which few are read often."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(samples, len(ROWS), generator=generator) ** 8 * torch.tensor(ROWS)).long()


def train(folder: str) -> Model:
    """A trained model, whose tables are in a folder and whose dense part is a program."""
    torch.manual_seed(0)
    model = Model()
    log = (clicks(step, 10_000) for step in range(20))  # Of a short log few rows would be known.
    profile = profile_model(model, log, forward=model, optimizer="adagrad")
    problem = Problem(profile, Topology.parse("1xh100", hbm="2MiB"), BATCH)
    applied = apply_plan(model, solve(problem, solver="greedy-cost").plan, lr=0.05)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for step in range(50):
        ids = clicks(step)
        optimizer.zero_grad()
        labels = (ids[:, 2] % 2).float()
        nn.functional.binary_cross_entropy_with_logits(model(ids), labels).backward()
        optimizer.step()
    save_tables(f"{folder}/tables", applied)
    serving_plan(profile, Topology.parse("1xh100"), hit_rate=0.9).save(f"{folder}/plan.json")
    pooled = torch.zeros(BATCH, DIM * len(ROWS))
    program = export(model.layers, (pooled,), dynamic_shapes=({0: Dim("batch", min=2)},))
    torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/dense.pt2")
    return model


with tempfile.TemporaryDirectory() as folder:
    model = train(folder)
    # From here on it is the server: it has the folder, and none of the model's code.
    plan = Plan.load(f"{folder}/plan.json")
    for shard in plan.shards:
        print(f"table {shard.table}: {shard.cache_rows or shard.row_count} rows in HBM")
    tables = load_read_only(plan, f"{folder}/tables", backend="tiered")
    dense = torch._inductor.aoti_load_package(f"{folder}/dense.pt2")
    one_each = torch.arange(BATCH + 1)
    for request in range(1000, 1050):
        ids = clicks(request)
        bags = {name: (ids[:, i], one_each, None) for i, name in enumerate(tables.feature_names)}
        pooled = tables(BagBatch.from_features(bags, tables.feature_names))
        answers = dense(torch.cat([pooled[name] for name in tables.feature_names], 1)).squeeze(1)
        torch.testing.assert_close(answers, model(ids).detach())
print(f"{tables.hit_rates().hbm_hit_rate:.1%} of lookups were served from HBM")
