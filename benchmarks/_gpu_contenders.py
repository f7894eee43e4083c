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
from placer.errors import BackendError
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
class OneBatchSteps:
    """Steps over tensors that stay where they are, for a CUDA graph."""

    model: PlacedEmbeddings
    batches: tuple[BagBatch, ...]
    gradients: list[Tensor]
    held: BagBatch = field(init=False)
    taken: int = 0

    def __post_init__(self) -> None:
        first = self.batches[0]
        self.held = BagBatch(
            first.ids.clone(), first.offsets, first.batch_size, bounds=first.bounds
        )

    def __call__(self) -> None:
        torch.autograd.backward(list(self.model(self.held).values()), self.gradients)

    def next_batch(self) -> None:
        """Another batch's ids in the same tensor."""
        self.taken += 1
        self.held.ids.copy_(self.batches[self.taken % len(self.batches)].ids)


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


FBGEMM_LOCATIONS = ("DEVICE", "MANAGED", "MANAGED_CACHING")


@dataclass(slots=True, eq=False)
class Fbgemm:
    """FBGEMM's table-batched embedding with fused row-wise Adagrad.

    Parameters
    ----------
    location : str
        One of `FBGEMM_LOCATIONS`, or ``HOST`` for its CPU kernels.
    cache_share : float
        Share of the rows that fit its cache in HBM, for ``MANAGED_CACHING``.

    Raises
    ------
    BackendError
        If it is not installed, is built for CPUs alone, or its managed memory would be more
        than the card has free, which is known to hang a GPU.
    """

    model: Model
    batches: tuple[BagBatch, ...]
    gradients: list[Tensor]
    device: torch.device
    location: str
    cache_share: float = 0.0
    module: Any = field(init=False)
    joined: Tensor = field(init=False)
    taken: int = 0

    def __post_init__(self) -> None:
        try:
            import fbgemm_gpu  # noqa: F401
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
                EmbeddingLocation,
                PoolingMode,
            )
            from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                ComputeDevice,
                SplitTableBatchedEmbeddingBagsCodegen,
            )
        except (ImportError, OSError) as error:
            raise BackendError(f"fbgemm_gpu is not installed ({error})") from error
        on_cpu = self.location == "HOST"
        if not on_cpu and self.device.type != "cuda":
            raise BackendError("FBGEMM's GPU kernels need a GPU")
        if self.location.startswith("MANAGED"):
            free, _ = torch.cuda.mem_get_info(self.device)
            asked = self.model.rows * self.model.row_bytes
            if asked > free:
                raise BackendError(
                    f"{asked / 1e9:.0f} GB of managed memory for {free / 1e9:.0f} GB that the "
                    "card has free may hang the GPU; give a smaller --scale"
                )
        compute = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
        location = EmbeddingLocation[self.location]
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [(table.rows, table.dim, location, compute) for table in self.model.tables],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LR,
            eps=EPS,
            pooling_mode=PoolingMode.SUM,
            cache_load_factor=self.cache_share,
            device=self.device,
        )
        self.module.init_embedding_weights_uniform(-_SPREAD, _SPREAD)
        # Its output is one matrix; its gradient is joined once, outside of the clock.
        self.joined = torch.cat(self.gradients, 1)

    def __call__(self) -> None:
        batch = self.batches[self.taken % len(self.batches)]
        self.taken += 1
        self.module(batch.ids, batch.offsets).backward(self.joined)
