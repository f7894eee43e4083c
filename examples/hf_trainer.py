"""Hugging Face's Trainer, saved and resumed: pip install transformers accelerate."""

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from placer import Plan, Problem, Topology, apply_plan, profile_model
from placer.trainers.huggingface import PlacerTrainer
from solvers import solve

ROWS, DIM, BATCH, SAMPLES = (20_000, 5_000, 100), 16, 64, 3_200


class Model(nn.Module):
    """Three tables and two layers; returns the loss, as `Trainer` wants."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM) for rows in ROWS)
        self.layers = nn.Sequential(nn.Linear(DIM * len(ROWS), 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        logits = self.layers(torch.cat(rows, 1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return {"loss": loss, "logits": logits}


def clicks() -> list[dict[str, Tensor]]:
    """Clicks of which few rows are read often."""
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(SAMPLES, len(ROWS), generator=generator) ** 4 * torch.tensor(ROWS)).long()
    return [{"ids": row, "labels": (row[2] % 2).float()} for row in ids]


def train(plan: Plan, folder: str, resume: str | None = None) -> PlacerTrainer:
    arguments = TrainingArguments(  # Before the plan: under torchrun, ranks meet here.
        folder, max_steps=80, save_steps=40, per_device_train_batch_size=BATCH,
        learning_rate=0.01, logging_steps=20, use_cpu=True, remove_unused_columns=False,
        report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Model()
    apply_plan(model, plan, lr=0.05)
    trainer = PlacerTrainer(model, arguments, train_dataset=clicks())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def lookups(model: nn.Module, batch: dict[str, Tensor]) -> None:
    model(batch["ids"][None], batch["labels"][None])


model = Model()
profile = profile_model(
    model, clicks()[:1000], forward=lambda batch: lookups(model, batch), optimizer="adagrad"
)
plan = solve(
    Problem(profile, Topology.parse("1xh100", hbm="2MiB"), BATCH), solver="greedy-cost"
).plan
assert plan is not None
for shard in plan.shards:
    print(f"table {shard.table}: {shard.row_count} rows in {shard.memory}")

whole = train(plan, "runs")
resumed = train(plan, "resumed", resume="runs/checkpoint-40")
same = all(
    torch.equal(table.weight(), whole.applied.tables[name].weight())
    for name, table in resumed.applied.tables.items()
)
print("the resumed run is", "equal to the bit" if same else "different")
