"""A plan of placer's in TorchRec: two processes, DistributedModelParallel, a checkpoint.

    python examples/torchrec_dmp.py [--steps 20] [--checkpoint model.pt]

It plans four tables for two GPUs with too little memory and trains them on the CPU, where
TorchRec keeps all rows in host memory. On GPUs it is the same under torchrun, with NCCL.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.optim import RowWiseAdagrad

from placer import AccessCdf, Feature, Plan, Problem, Profile, Table, TableProfile, Topology
from placer.adapters.torchrec import merge_state_dict, split_tables, to_sharding_plan
from solvers import solve

ROWS = {"user": 40_000, "item": 20_000, "city": 300, "hour": 24}
BATCH, DIM, RANKS = 64, 16, 2


def plan() -> Plan:
    """A plan under TorchRec's own cost model, so that TorchRec can hold it."""
    profile = Profile(
        tuple(
            TableProfile(
                Table(name, rows, DIM, features=(Feature(name, pooling_factor=3.0),)),
                AccessCdf.zipf(rows, 1.05),
            )
            for name, rows in ROWS.items()
        )
    )
    problem = Problem(profile, Topology.parse("2xt4", hbm="2MiB"), batch_size=BATCH)
    result = solve(problem, cost_model="torchrec", time_limit_s=5)
    if result.plan is None:
        raise SystemExit(result.termination.detail)
    return result.plan


class Model(nn.Module):
    """Four tables and a layer over them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name]
                )
                for name, rows in ROWS.items()
            ]
        )
        self.over = nn.Linear(DIM * len(ROWS), 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Logits, shape (batch, 1)."""
        pooled = self.tables(features)
        return self.over(torch.cat([pooled[name] for name in ROWS], dim=1))


def batch() -> tuple[KeyedJaggedTensor, Tensor]:
    """Three ids of each feature for each sample, and labels."""
    ids = [(rows * torch.rand(3 * BATCH) ** 3).long() for rows in ROWS.values()]
    lengths = torch.full((len(ROWS) * BATCH,), 3)
    features = KeyedJaggedTensor(keys=list(ROWS), values=torch.cat(ids), lengths=lengths)
    return features, (torch.rand(BATCH, 1) < 0.3).float()


def train(rank: int, folder: str, steps: int, checkpoint: str | None) -> None:
    """What each process does."""
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "WORLD_SIZE": str(RANKS), "RANK": str(rank)}
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    loaded = Plan.load(f"{folder}/plan.json")

    model = split_tables(Model(), loaded)  # Hot and cold rows of one table become two.
    replicated = {shard.table for shard in loaded.shards if len(shard.devices) > 1}
    tables = {name: p for name, p in model.named_parameters() if "embedding_bags" in name}
    for name, parameter in tables.items():
        if name.split(".")[-2] not in replicated:
            apply_optimizer_in_backward(RowWiseAdagrad, [parameter], {"lr": 0.05})
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharding = to_sharding_plan(loaded, model, env)
    model = DistributedModelParallel(model, env=env, plan=sharding, device=torch.device("cpu"))

    dense = [
        parameter
        for name, parameter in model.named_parameters()
        if name not in tables or name.split(".")[-2] in replicated
    ]
    optimizer = torch.optim.Adagrad(dense, lr=0.05)
    for step in range(steps):
        features, labels = batch()
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(features), labels)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    state = merge_state_dict(model.state_dict(), model)  # Whole tables, on rank 0.
    if rank == 0 and checkpoint is not None:
        torch.save(state, checkpoint)
        Model().load_state_dict(state)
        print(f"saved {len(state)} tensors to {checkpoint}; the model without a plan loads them")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Plan, and train on two processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint", help="where to save the trained weights")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = plan()
        made.save(Path(folder) / "plan.json")
        for shard in made.shards:
            print(shard.table, shard.rows, shard.cols, *shard.devices, shard.lookup)
        mp.spawn(train, (folder, options.steps, options.checkpoint), nprocs=RANKS)


if __name__ == "__main__":
    main()
