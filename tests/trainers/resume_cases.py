"""A model with placed tables, its data, and what is left of a run: the same for each trainer."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "adapters"))
sys.path.append(str(Path(__file__).resolve().parents[1]))
from apply_plan_cases import plan_for, table

from placer import Plan, apply_plan
from placer.adapters.pytorch import AppliedPlan
from placer.growing import Growing

SAMPLES, BATCH = 64, 8
STEPS = SAMPLES // BATCH
TABLES = (table("item", 40, 8, "none"), table("pages", 30, 8, "mean"))
HOW = {"item": Growing(39, eviction="lru"), "pages": Growing(29, admission=2)}
GROWS = "TABLES_GROW"
"""In the environment: whether tables grow, so that all processes know."""


class Model(nn.Module):
    """Two tables and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(40, 8, padding_idx=1)
        self.pages = nn.EmbeddingBag(30, 8, mode="mean")
        self.out = nn.Linear(16, 1)

    def forward(self, item: Tensor, pages: Tensor) -> Tensor:
        """Logits, shape (batch,)."""
        return self.out(torch.cat([self.item(item), self.pages(pages)], 1)).squeeze(1)


def samples() -> tuple[Tensor, Tensor, Tensor]:
    """Item, pages and label of all samples; hot ids are frequent."""
    generator = torch.Generator().manual_seed(5)
    distinct = (200, 100) if GROWS in os.environ else (40, 30)
    item = (torch.rand(SAMPLES, generator=generator) ** 2 * distinct[0]).long()
    pages = (torch.rand(SAMPLES, 3, generator=generator) ** 2 * distinct[1]).long()
    if GROWS in os.environ:  # Any int64, but for the padding.
        keys = torch.from_numpy(np.random.default_rng(3).integers(-(2**63), 2**63 - 1, 200))
        keys[1] = 1
        item, pages = keys[item], keys[pages]
    return item, pages, torch.randint(0, 2, (SAMPLES,), generator=generator).float()


def plan_of(placement: str, kind: str) -> Plan:
    """A third of each table in HBM, the rest behind a row cache or read as `placement` says.

    ``mixed``: the rest of one table is cached, and that of the other staged.
    """
    if placement != "mixed":
        return plan_for(placement, TABLES, optimizer=kind)
    plans = [
        plan_for(each, [one], optimizer=kind)
        for each, one in zip(("cached", "staged"), TABLES, strict=True)
    ]
    first, second = plans
    return replace(
        first,
        tables=first.tables + second.tables,
        shards=first.shards + second.shards,
        row_order={**first.row_order, **second.row_order},
        hot_ids={**first.hot_ids, **second.hot_ids},
    )


def batch_of(step: int) -> tuple[Tensor, ...]:
    """What a step trains on."""
    part = slice(step * BATCH % SAMPLES, step * BATCH % SAMPLES + BATCH)
    return tuple(column[part] for column in samples())


def placed(
    kind: str = "adam", placement: str = "mixed", seed: int = 0, backend: str = "tiered"
) -> tuple[Model, AppliedPlan]:
    """The model with its plan applied."""
    torch.manual_seed(seed)
    model = Model()
    growing = HOW if GROWS in os.environ else None
    plan = plan_of(placement, kind)
    return model, apply_plan(model, plan, lr=0.05, backend=backend, growing=growing)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Of one batch."""
    item, pages, label = batch_of(step)
    return nn.functional.binary_cross_entropy_with_logits(model(item, pages), label)


def everything(model: nn.Module, applied: AppliedPlan) -> dict[str, Tensor]:
    """All that a run leaves: weights of layers and tables, and the state of the tables."""
    weights = {f"{name}.weight": one.weight() for name, one in applied.tables.items()}
    return {
        name: value.detach().clone()
        for name, value in {**model.state_dict(), **weights, **applied.state_dict()}.items()
    }


def assert_keys_came_and_went(applied: AppliedPlan) -> None:
    """Where tables grow."""
    for name, counts in applied.key_counts().items():
        assert counts.evicted > 5, name
        assert 0 < counts.live <= HOW[name].capacity


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Equal to the bit."""
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert different == []
