"""Whole training steps on a GPU: DLRM-DCNv2's dense layers in bfloat16 over placed tables.

MLPerf's model (reference implementation of DLRM-DCNv2): bottom layers 512, 256, 128; three cross
layers of rank 512 over 27 vectors of 128 (Wang et al. 2021, doi:10.1145/3442381.3450078); top
layers 1024, 1024, 512, 256, 1. Batches are on the device, as a loader with its own stream leaves
them there.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from placer.executor import BagBatch, PlacedEmbeddings

DENSE, RANK = 13, 512


def _layers(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class DenseLayers(nn.Module):
    """Everything of DLRM-DCNv2 but its tables."""

    def __init__(self, tables: int, width: int) -> None:
        super().__init__()
        crossed = (tables + 1) * width
        self.bottom = _layers(DENSE, 512, 256, width)
        self.down = nn.ModuleList(nn.Linear(crossed, RANK, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(RANK, crossed) for _ in range(3))
        self.top = nn.Sequential(_layers(crossed, 1024, 1024, 512, 256), nn.Linear(256, 1))

    def forward(self, dense: Tensor, pooled: list[Tensor]) -> Tensor:
        """Logits, shape (samples, 1)."""
        first = torch.cat([self.bottom(dense), *(rows.bfloat16() for rows in pooled)], 1)
        x = first
        for down, up in zip(self.down, self.up, strict=True):
            x = torch.addcmul(x, first, up(down(x)))
        return self.top(x)  # type: ignore[no-any-return]


@dataclass(slots=True, eq=False)
class TrainingSteps:
    """Steps of the whole model over distinct batches, prepared ahead where `ahead` says so."""

    model: PlacedEmbeddings
    batches: tuple[BagBatch, ...]
    ahead: bool
    layers: DenseLayers = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    dense: Tensor = field(init=False)
    labels: Tensor = field(init=False)
    taken: int = 0
    prepared: Any = None

    def __post_init__(self) -> None:
        device, samples = self.model.device, self.batches[0].batch_size
        tables = self.model.plan.tables
        torch.manual_seed(0)
        layers = DenseLayers(len(tables), tables[0].dim)
        self.layers = layers.to(device, torch.bfloat16)
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=1e-4)
        self.dense = torch.randn(samples, DENSE, device=device, dtype=torch.bfloat16)
        self.labels = torch.randint(0, 2, (samples, 1), device=device).bfloat16()

    def __call__(self) -> None:
        batch = self.prepared if self.prepared is not None else self._next()
        if self.ahead:
            batch = batch if self.prepared is not None else self.model.prefetch(batch)
            self.prepared = self.model.prefetch(self._next())
        logits = self.layers(self.dense, list(self.model(batch).values()))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, self.labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def _next(self) -> BagBatch:
        self.taken += 1
        return self.batches[(self.taken - 1) % len(self.batches)]
