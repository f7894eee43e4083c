# mypy: disable-error-code="no-untyped-call"
"""Who takes a step in `gpu.py`: the placed model, and what others offer."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from _gpu_model import Batches, Model, bags_of
from torch import Tensor, nn

import placer.executor.memory.arena as arena_module
from placer.executor import BagBatch, PlacedEmbeddings, RowWiseAdagrad
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


@dataclass(slots=True, eq=False)
class EmbeddingBags:
    """One `nn.EmbeddingBag(sparse=True)` a table, and torch's optimizer.

    On the device: `torch.optim.Adagrad`, which has no row-wise form. On the host: row-wise
    Adagrad, so that the rows that the machine's memory holds are the same; pooled rows and
    their gradients are copied.
    """

    model: Model
    batches: Batches
    gradients: list[Tensor]
    device: torch.device
    memory: HostMemory | None = None
    bags: list[nn.EmbeddingBag] = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    inputs: list[list[tuple[Tensor, Tensor]]] = field(init=False)
    taken: int = 0

    def __post_init__(self) -> None:
        home = self.device if self.memory is None else torch.device("cpu")
        if self.memory is not None:
            self.memory.give_back()
        self.bags = [
            nn.EmbeddingBag.from_pretrained(
                self._rows((table.rows, table.dim)),
                freeze=False,
                mode="sum",
                sparse=True,
                include_last_offset=True,
            )
            for table in self.model.tables
        ]
        weights = [bag.weight for bag in self.bags]
        self.optimizer = (
            torch.optim.Adagrad(weights, lr=LR, eps=EPS)
            if self.memory is None
            else RowWiseAdagrad(weights, lr=LR, eps=EPS)
        )
        # Cut and copied once: their ids are where they are wanted. The CPU takes few steps.
        few = self.batches.batches[:4] if self.memory is not None else self.batches.batches
        self.inputs = [
            [
                (ids.to(home), offsets.to(home))
                for ids, offsets in (bags_of(batch, t) for t in range(len(self.bags)))
            ]
            for batch in few
        ]

    def __call__(self) -> None:
        inputs = self.inputs[self.taken % len(self.inputs)]
        self.taken += 1
        outputs = [
            bag(ids, offsets).to(self.device)
            for bag, (ids, offsets) in zip(self.bags, inputs, strict=True)
        ]
        self.optimizer.zero_grad()
        torch.autograd.backward(outputs, self.gradients)
        self.optimizer.step()

    def _rows(self, shape: tuple[int, int]) -> Tensor:
        if self.memory is not None:
            return self.memory.take(shape, torch.float32, torch.device("cpu"))
        return torch.empty(shape, device=self.device).uniform_(-_SPREAD, _SPREAD)
