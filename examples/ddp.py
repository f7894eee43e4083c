"""DistributedDataParallel over two processes: torchrun --nproc-per-node 2 examples/ddp.py

Started without torchrun it starts that by itself.
"""

import copy
import os

import torch
import torch.distributed as dist
from click_log import BATCH_SIZE, STEPS, Clicks, arguments, plan_for, read_clicks, report
from plain_pytorch import Model, train
from torch import nn
from torch.distributed.run import main as torchrun
from torch.nn.parallel import DistributedDataParallel

from placer import Plan, apply_plan, profile_model


def plan_on_rank_0(model: Model, clicks: Clicks) -> Plan:
    """One rank profiles and plans; all need the same plan."""
    plans: list[Plan | None] = [None]
    if dist.get_rank() == 0:
        batches = (clicks.batch(step)[:2] for step in range(STEPS))
        profile = profile_model(model, batches, forward=model, optimizer="adagrad")
        plans = [plan_for(profile, gpus=dist.get_world_size())]
    dist.broadcast_object_list(plans)
    (plan,) = plans
    assert plan is not None, "rank 0 has sent one"
    return plan


def main() -> None:
    data = arguments(__doc__).data
    if "RANK" not in os.environ:
        here = [__file__, *(["--data", data] if data else [])]
        torchrun(["--standalone", "--nproc-per-node", "2", *here])
        return
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    clicks = read_clicks(data)
    torch.manual_seed(0)
    model = Model(clicks)
    original = copy.deepcopy(model)

    # The rows of each table are then spread over the ranks, as the plan says.
    apply_plan(model, plan_on_rank_0(model, clicks), lr=0.05, eps=1e-10)

    # From here on it is DDP as ever.
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    losses = []
    share = slice(rank * BATCH_SIZE // world, (rank + 1) * BATCH_SIZE // world)
    for step in range(STEPS):
        ids, dense, labels = clicks.batch(step)
        inputs = {name: column[share] for name, column in ids.items()}, dense[share]
        loss = nn.functional.binary_cross_entropy_with_logits(model(inputs), labels[share])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    means = torch.stack(losses) / world
    dist.all_reduce(means)
    placed = means.tolist()

    state = model.module.state_dict()  # All ranks ask: each has a part of each table.
    if rank == 0:
        optimizer = torch.optim.Adagrad(original.parameters(), lr=0.05)
        report(f"DDP, {world} ranks", placed, train(original, clicks, optimizer))
        for name, weight in original.state_dict().items():
            # Adagrad's first step of a row has a length of lr, however small the gradient.
            torch.testing.assert_close(state[name], weight, rtol=0, atol=2e-3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
