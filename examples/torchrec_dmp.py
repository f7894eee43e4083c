"""A plan of placer's in TorchRec: two processes, DistributedModelParallel, a checkpoint."""

import gc
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.optim import RowWiseAdagrad

from placer import AccessCdf, Feature, Plan, Problem, Profile, Table, TableProfile, Topology
from placer.adapters.torchrec import merge_state_dict, split_tables, to_sharding_plan
from solvers import solve

ROWS, BATCH, DIM, RANKS = {"user": 40_000, "item": 20_000, "city": 300}, 64, 16, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            [EmbeddingBagConfig(rows, DIM, name=n, feature_names=[n]) for n, rows in ROWS.items()]
        )
        self.over = nn.Linear(DIM * len(ROWS), 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.tables(features)
        return self.over(torch.cat([pooled[name] for name in ROWS], dim=1)).squeeze(1)


def batch() -> tuple[KeyedJaggedTensor, Tensor]:
    ids = [(rows * torch.rand(3 * BATCH) ** 3).long() for rows in ROWS.values()]
    features = KeyedJaggedTensor(list(ROWS), torch.cat(ids), lengths=torch.full((3 * BATCH,), 3))
    return features, (ids[2].view(BATCH, 3)[:, 0] % 2).float()


def train(rank: int, folder: str) -> None:
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "WORLD_SIZE": str(RANKS), "RANK": str(rank)}
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    plan = Plan.load(f"{folder}/plan.json")
    model = split_tables(Model(), plan)  # Hot and cold rows of one table become two.
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": 0.05})
    env, device = ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu")
    model = DistributedModelParallel(model, env, device, to_sharding_plan(plan, model, env))
    optimizer = torch.optim.Adagrad(model.module.over.parameters(), lr=0.05)
    for step in range(50):
        features, labels = batch()
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(features), labels)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 49 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    state = merge_state_dict(model.state_dict(), model)  # Whole tables, on rank 0.
    if rank == 0:
        print(f"the model without a plan loads {Model().load_state_dict(state)}")
    del model, env, optimizer, loss  # They hold the process group, and with it gloo's threads.
    gc.collect()
    dist.destroy_process_group()


def main() -> None:
    tables = [Table(n, rows, DIM, features=(Feature(n, 3.0),)) for n, rows in ROWS.items()]
    profile = Profile(tuple(TableProfile(t, AccessCdf.zipf(t.rows, 1.05)) for t in tables))
    problem = Problem(profile, Topology.parse("2xt4", hbm="2MiB"), batch_size=BATCH)
    plan = solve(problem, cost_model="torchrec", time_limit_s=5).plan  # TorchRec can hold it.
    with tempfile.TemporaryDirectory() as folder:
        plan.save(f"{folder}/plan.json")
        print(*(f"{s.table}: {s.row_count} rows in {s.memory}" for s in plan.shards), sep="\n")
        mp.spawn(train, (folder,), nprocs=RANKS)


if __name__ == "__main__":
    main()
