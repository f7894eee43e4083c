"""DistributedDataParallel in bfloat16 that adds up two batches; it starts torchrun itself."""

import gc
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel

from placer import Plan, Problem, Topology, apply_plan, profile_model
from solvers import solve

ROWS, DIM, BATCH, ACCUMULATE = (20_000, 5_000, 100), 16, 32, 2


class Model(nn.Module):
    """Three tables and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM) for rows in ROWS)
        self.layers = nn.Sequential(nn.Linear(DIM * len(ROWS), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)
        return self.layers(rows).squeeze(1)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Clicks of which few rows are read often."""
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(BATCH, len(ROWS), generator=generator) ** 4 * torch.tensor(ROWS)).long()
    return ids, (ids[:, 2] % 2).float()


def plan_on_first(model: nn.Module, rank: int, world: int) -> Plan:
    """One rank profiles and plans; all need the same plan."""
    plans: list[Plan | None] = [None]
    if rank == 0:
        batches = (batch(step)[0] for step in range(100))
        profile = profile_model(model, batches, forward=model, optimizer="adagrad")
        problem = Problem(profile, Topology.parse(f"{world}xh100", hbm="1MiB"), BATCH)
        plans = [solve(problem, solver="greedy-cost").plan]
    dist.broadcast_object_list(plans)
    assert plans[0] is not None
    return plans[0]


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    # The rows of each table are spread over the ranks, as the plan says.
    applied = apply_plan(model, plan_on_first(model, rank, world), lr=0.05, eps=1e-10)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adagrad(ddp.parameters(), lr=0.05)
    applied.update_with(optimizer)  # In `step`, not in each backward pass.
    for step in range(50):
        optimizer.zero_grad()
        for part in range(ACCUMULATE):
            ids, labels = batch((step * ACCUMULATE + part) * world + rank)
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.binary_cross_entropy_with_logits(ddp(ids), labels)
            (loss / ACCUMULATE).backward()
        optimizer.step()
        if rank == 0 and step % 49 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
        gc.collect()  # A model holds the process group, and with it gloo's threads.
        dist.destroy_process_group()
    else:
        torchrun(["--standalone", "--nproc-per-node", "2", __file__])
