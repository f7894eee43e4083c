# mypy: disable-error-code="no-untyped-call"
"""Who takes a step in `gpu.py`: the placed model, what others offer, and a whole model.

That is MLPerf's (reference implementation of DLRM-DCNv2), with its dense layers in bfloat16: bottom
layers 512, 256, 128; three cross layers of rank 512 over 27 vectors of 128 (Wang et al. 2021,
doi:10.1145/3442381.3450078); top layers 1024, 1024, 512, 256, 1.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any
from unittest.mock import patch

import torch
from _gpu_model import Batches, Model, bags_of
from torch import Tensor, nn

import placer.executor.memory.arena as arena_module
from placer.executor import BagBatch, PlacedEmbeddings, look_ahead
from placer.executor.id_order import IdOrder
from placer.executor.memory.host_memory import host_rows
from placer.plan.plan import Plan

LR, EPS = 0.01, 1e-8
_SPREAD = 0.05


class HostMemory:
    """One block of host memory that the models, who come one after the other, share.

    Locking a hundred gigabytes takes longer than all steps of a model. Rows are random
    numbers from the start; zeros would be kinder to the memory than real ones.
    """

    def __init__(self, floats: int, device: torch.device) -> None:
        self._block = host_rows((floats,), torch.float32, device)
        chunk = torch.empty(min(floats, 1 << 28), device=device).uniform_(0, _SPREAD)
        for part in self._block.split(1 << 28):
            part.copy_(chunk[: part.numel()])
        self._taken = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """What `host_rows` gives, but out of the block: zeros for vectors, which are state."""
        size = math.prod(shape)
        if dtype != torch.float32 or self._taken + size > self._block.numel():
            return host_rows(shape, dtype, device)
        rows = self._block[self._taken : self._taken + size].view(shape)
        self._taken += -(-size // 128) * 128
        return rows if len(shape) > 1 else rows.zero_()

    def give_back(self) -> None:
        """All that was taken may be taken again."""
        self._taken = 0


@contextlib.contextmanager
def _in_memory(memory: HostMemory) -> Iterator[None]:
    """Models made here have their cold rows in `memory` and draw no weights, which takes minutes.

    The weights are filled in by `placed`; what a step does is the same.
    """
    nothing = patch.object(IdOrder, "draw", lambda self, weight, seed: None)
    with nothing, patch.object(arena_module, "host_rows", memory.take):
        yield


def placed(plan: Plan, memory: HostMemory, device: torch.device) -> PlacedEmbeddings:
    """The placed model with random weights."""
    memory.give_back()
    with _in_memory(memory):
        model = PlacedEmbeddings(
            plan, lr=LR, eps=EPS, device=device, backend="triton", cache_policy="lfu"
        )
    for arena in model._runtime.arenas:
        arena.weights.hbm.uniform_(-_SPREAD, _SPREAD)
    return model


@dataclass(slots=True, eq=False)
class PlacedSteps:
    """Steps of a placed model over distinct batches.

    With `ahead` each batch is prepared while the one before it trains, as
    `placer.executor.look_ahead` does.
    """

    model: PlacedEmbeddings
    batches: tuple[BagBatch, ...]
    gradients: list[Tensor]
    ahead: bool = False
    taken: int = 0
    prepared: Any = None

    def __call__(self) -> None:
        batch: Any = self.prepared
        if batch is None:
            batch = self.model.prefetch(self._next()) if self.ahead else self._next()
        if self.ahead:
            self.prepared = self.model.prefetch(self._next())
        outputs = self.model(batch)
        torch.autograd.backward(list(outputs.values()), self.gradients)

    def _next(self) -> BagBatch:
        self.taken += 1
        return self.batches[(self.taken - 1) % len(self.batches)]


class EmbeddingBags:
    """One `nn.EmbeddingBag(sparse=True)` a table on the device, and `torch.optim.Adagrad`.

    Adagrad has no row-wise form in PyTorch.
    """

    def __init__(self, model: Model, batches: Batches, gradients: list[Tensor]) -> None:
        device = gradients[0].device
        self._gradients, self._taken = gradients, 0
        self._bags = [
            nn.EmbeddingBag.from_pretrained(
                torch.empty((table.rows, table.dim), device=device).uniform_(-_SPREAD, _SPREAD),
                freeze=False,
                mode="sum",
                sparse=True,
                include_last_offset=True,
            )
            for table in model.tables
        ]
        weights = [bag.weight for bag in self._bags]
        self._optimizer = torch.optim.Adagrad(weights, lr=LR, eps=EPS)
        # Cut once, outside of the clock.
        self._inputs = [
            [bags_of(batch, table) for table in range(len(self._bags))] for batch in batches.batches
        ]

    def __call__(self) -> None:
        inputs = self._inputs[self._taken % len(self._inputs)]
        self._taken += 1
        outputs = [
            bag(ids, offsets) for bag, (ids, offsets) in zip(self._bags, inputs, strict=True)
        ]
        self._optimizer.zero_grad()
        torch.autograd.backward(outputs, self._gradients)
        self._optimizer.step()


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
