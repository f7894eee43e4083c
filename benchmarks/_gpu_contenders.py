# mypy: disable-error-code="no-untyped-call"
"""Who takes a step in `gpu.py`: the placed model, and what others offer."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from _gpu_model import Batches, Model, bags_of
from torch import Tensor, nn

import placer.executor.memory.arena as arena_module
from placer.executor import BagBatch, PlacedEmbeddings
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
