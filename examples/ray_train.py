"""Ray Train on two workers, which go on from the last checkpoint: pip install 'ray[train]'."""

import tempfile

import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_model
from torch import Tensor, nn

from placer import Plan, Problem, Topology, apply_plan, profile_model
from solvers import solve

ROWS, DIM, BATCH, STEPS = (20_000, 5_000, 100), 16, 32, 60


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM) for rows in ROWS)
        self.out = nn.Linear(DIM * len(ROWS), 1)

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return self.out(torch.cat(rows, 1)).squeeze(1)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    few = torch.rand(BATCH, 3, generator=torch.Generator().manual_seed(seed)) ** 4
    ids = (few * torch.tensor(ROWS)).long()
    return ids, (ids[:, 2] % 2).float()


def work(config: dict[str, str]) -> None:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = Model()
    applied = apply_plan(model, Plan.load(f"{config['folder']}/plan.json"), lr=0.05, eps=1e-10)
    ddp = prepare_model(model)
    optimizer = torch.optim.Adagrad(ddp.parameters(), lr=0.05)
    parts, first = {"model": model, "tables": applied, "optimizer": optimizer}, 0
    if (checkpoint := train.get_checkpoint()) is not None:  # After a worker is lost.
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/run.pt", weights_only=True)
        first = saved.pop("step")
        for name, state in saved.items():
            parts[name].load_state_dict(state)
    for step in range(first, STEPS):
        ids, labels = batch(step * world + rank)
        loss = nn.functional.binary_cross_entropy_with_logits(ddp(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step + 1 not in (STEPS // 2, STEPS):
            continue
        # All workers ask for the states, for each has a part of each table.
        states = {"step": step + 1} | {name: part.state_dict() for name, part in parts.items()}
        if first == 0 and step + 1 == STEPS:
            torch.save(states, f"{config['folder']}/lost-{rank}.pt")
            raise RuntimeError("this worker is lost")
        with tempfile.TemporaryDirectory() as folder:
            torch.save(states, f"{folder}/run.pt")
            own = train.Checkpoint.from_directory(folder) if rank == 0 else None
            train.report({"loss": loss.item()}, checkpoint=own)


profile = profile_model(Model(), (batch(step)[0] for step in range(60)), optimizer="adagrad")
problem = Problem(profile, Topology.parse("2xh100", hbm="1MiB"), BATCH)
with tempfile.TemporaryDirectory() as folder:
    solve(problem, solver="greedy-cost").plan.save(f"{folder}/plan.json")
    failures = train.FailureConfig(max_failures=1)
    result = TorchTrainer(
        work,
        train_loop_config={"folder": folder},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(storage_path=folder, failure_config=failures),
    ).fit()
    with result.checkpoint.as_directory() as last:
        files = f"{last}/run.pt", f"{folder}/lost-0.pt"
        torch.testing.assert_close(*map(torch.load, files), rtol=0, atol=0)
print(f"loss {result.metrics['loss']:.4f}; the resumed run is equal to the bit")
