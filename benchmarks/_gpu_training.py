"""Whole training steps on a GPU: DLRM-DCNv2's dense layers in bfloat16 over placed tables.

MLPerf's model (reference implementation of DLRM-DCNv2): bottom layers 512, 256, 128; three cross
layers of rank 512 over 27 vectors of 128 (Wang et al. 2021, doi:10.1145/3442381.3450078); top
layers 1024, 1024, 512, 256, 1.
"""

from collections.abc import Sequence
from itertools import cycle, pairwise

import torch
from torch import Tensor, nn

from placer.executor import BagBatch, PlacedEmbeddings, look_ahead

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
        first = torch.cat([self.bottom(dense), *(rows.to(dense.dtype) for rows in pooled)], 1)
        x = first
        for down, up in zip(self.down, self.up, strict=True):
            x = torch.addcmul(x, first, up(down(x)))
        return self.top(x)  # type: ignore[no-any-return]


def on_host(batches: Sequence[BagBatch]) -> tuple[BagBatch, ...]:
    """Return batches as a loader leaves them: ids in 32 bits, in pinned memory."""
    found = []
    for batch in batches:
        ids, offsets = batch.ids.int().cpu(), batch.offsets.cpu()
        if batch.ids.is_cuda:
            ids, offsets = ids.pin_memory(), offsets.pin_memory()
        found.append(BagBatch(ids, offsets, batch.batch_size, bounds=batch.bounds))
    return tuple(found)


class TrainingSteps:
    """Steps of the whole model over distinct batches, each prepared ahead of its step."""

    def __init__(self, model: PlacedEmbeddings, batches: Sequence[BagBatch]) -> None:
        device, samples = model.device, batches[0].batch_size
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
        tables = model.plan.tables
        torch.manual_seed(0)
        self._model, self._batches = model, look_ahead(cycle(batches), model)
        self._layers = DenseLayers(len(tables), tables[0].dim).to(device, kind)
        self._optimizer = torch.optim.SGD(self._layers.parameters(), lr=1e-4)
        self._dense = torch.randn(samples, DENSE, device=device, dtype=kind)
        self._labels = torch.randint(0, 2, (samples, 1), device=device).to(kind)

    def __call__(self) -> None:
        pooled = self._model(next(self._batches))
        logits = self._layers(self._dense, list(pooled.values()))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, self._labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
