"""Machines, plans, batches and an independent float64 model for the executor's tests."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from placer.executor import BagBatch, Embeddings, PlacedEmbeddings
from placer.executor.lookups.steps import PreparedBatch
from placer.plan.fields import Lookup, Memory, RowOrder, Shard
from placer.plan.plan import Plan
from placer.tables import Feature, Table
from placer.topology.devices import Gpu, Host, Link
from placer.topology.topology import Topology

LR, EPS = 0.1, 1e-6
BETA1, BETA2 = 0.9, 0.999

DEVICE = "cuda" if os.environ.get("TRITON_INTERPRET") == "0" else "cpu"
"""Of backends that run on either: `make test-gpu` sets the variable."""


def placed(plan: Plan, **options: object) -> PlacedEmbeddings:
    """The placed model; one on a GPU gives its outputs on the CPU, where they are compared."""
    options = {"lr": LR, "eps": EPS, "seed": 3, **options}
    kind = PlacedEmbeddings if options.get("device", "cpu") == "cpu" else _OutputsOnCpu
    return kind(plan, **options)  # type: ignore[arg-type]


class _OutputsOnCpu(PlacedEmbeddings):
    def forward(self, batch: BagBatch | PreparedBatch) -> dict[str, Tensor]:
        return {name: output.cpu() for name, output in super().forward(batch).items()}


def machine(gpus: int = 4, hbm_bytes: int = 2**30, hosts: int = 1, servers: int = 0) -> Topology:
    """GPUs spread over hosts, and hosts without GPUs."""
    devices = tuple(Gpu(f"gpu:{i}", f"host:{i % hosts}", hbm_bytes, 1e12) for i in range(gpus))
    all_hosts = tuple(Host(f"host:{i}", 2**32, 1e11) for i in range(hosts + servers))
    links = [Link(gpu.id, gpu.host, "pcie", 1e10) for gpu in devices]
    if servers:
        links += [Link(host.id, "network", "network", 1e10) for host in all_hosts]
    return Topology("test", devices, all_hosts, tuple(links))


def shard(
    table: Table,
    rows: tuple[int, int, int] | None = None,
    cols: tuple[int, int] | None = None,
    *,
    on: str | tuple[str, ...] = "gpu:0",
    memory: Memory = "hbm",
    lookup: Lookup | None = None,
) -> Shard:
    """A shard of a table; all rows and columns by default.

    Staged and cached shards have a few entries of HBM, fewer than a step reads.
    """
    how: Lookup = lookup or ("device" if memory == "hbm" else "uva")
    rows = rows or (0, table.rows, 1)
    count = len(range(*rows))
    return Shard(
        table.name,
        rows,
        cols or (0, table.dim),
        (on,) if isinstance(on, str) else on,
        memory,
        how,
        cache_rows=min(5, max(1, count)) if how == "cached" else 0,
        staging_rows=min({"staged": 9, "cached": 2}.get(how, 0), count),
    )


def plan_of(
    tables: Sequence[Table],
    shards: Sequence[Shard] | None = None,
    hot_ids: Mapping[str, Sequence[int]] | None = None,
    topology: Topology | None = None,
) -> Plan:
    """A plan; every table whole in HBM by default."""
    hot = {name: np.array(ids, dtype=np.int64) for name, ids in (hot_ids or {}).items()}
    return Plan(
        tuple(tables),
        topology or machine(),
        tuple(shards if shards is not None else [shard(table) for table in tables]),
        {name: RowOrder("profile") for name in hot},
        hot,
    )


def placements(table: Table) -> dict[str, Plan]:
    """Every way to cut a table of at least 8 rows and 8 columns, by name."""
    rows, dim = table.rows, table.dim
    half, left = rows // 2, dim // 2
    hot = np.random.default_rng(1).permutation(rows)[: rows // 3].tolist()
    order = {table.name: hot}

    def split(k: int, lookup: Lookup = "uva") -> list[Shard]:
        return [
            shard(table, (0, k, 1)),
            shard(table, (k, rows, 1), on="gpu:1", memory="dram", lookup=lookup),
        ]

    def strided(start: int, cols: tuple[int, int] | None = None) -> list[Shard]:
        return [shard(table, (start + i, rows, 4), cols, on=f"gpu:{i}") for i in range(4)]

    plans = {
        "hbm": plan_of([table]),
        "dram": plan_of([table], [shard(table, memory="dram")]),
        "host": plan_of([table], [shard(table, memory="dram", lookup="host")]),
        "split 0%": plan_of([table], split(0)),
        "split 1%": plan_of([table], split(max(1, rows // 100)), order),
        "split 50%": plan_of([table], split(half), order),
        "split 100%": plan_of([table], split(rows), order),
        "split in id order": plan_of([table], split(half)),
        "whole, by rank": plan_of([table], [shard(table)], order),
        "row-wise": plan_of([table], strided(0)),
        "hot, then row-wise": plan_of([table], [shard(table, (0, 5, 1)), *strided(5)], order),
        "column-wise": plan_of(
            [table], [shard(table, None, (0, 3)), shard(table, None, (3, dim), on="gpu:1")]
        ),
        "grid": plan_of([table], [*strided(0, (0, left)), *strided(0, (left, dim))], order),
        "crossing cuts": plan_of(
            [table],
            [
                shard(table, (0, half, 1)),
                shard(table, (half, rows, 1), (0, left), on="gpu:1", memory="dram"),
                shard(table, (half, rows, 1), (left, dim), on="gpu:2"),
            ],
            order,
        ),
        "replicas": plan_of([table], [shard(table, on=("gpu:0", "gpu:1", "gpu:2"))]),
    }
    for lookup in ("uva", "staged", "cached", "host"):
        plans[f"cold rows {lookup}"] = plan_of([table], split(half, lookup), order)
    return plans


def random_batch(
    tables: Sequence[Table],
    batch_size: int = 12,
    *,
    seed: int = 0,
    longest: int = 5,
    weighted: bool = False,
    id_dtype: torch.dtype = torch.int64,
) -> BagBatch:
    """Bags of 0 to `longest` ids, duplicates likely; tables without rows get empty bags."""
    generator = torch.Generator().manual_seed(seed)
    features = {}
    for table in tables:
        for feature in table.features:
            top = longest + 1 if table.rows else 1
            lengths = torch.randint(0, top, (batch_size,), generator=generator)
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            count = int(offsets[-1])
            ids = torch.randint(0, max(table.rows, 1), (count,), generator=generator)
            weights = torch.rand(count, generator=generator) + 0.5 if weighted else None
            features[feature.name] = (ids.to(id_dtype), offsets, weights)
    return BagBatch.from_features(features, list(features))


class DoubleModel:
    """The unplaced model in float64: `nn.EmbeddingBag`, torch's optimizers, and formulas.

    Shares no code with the executor.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        weights: Mapping[str, Tensor],
        optimizer: str,
        padding_idx: Mapping[str, int] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.tables = {feature.name: table.name for table in tables for feature in table.features}
        self.padding_idx = padding_idx or {}
        self.updates = 0
        self.weights = {
            name: nn.Parameter(weight.double().clone()) for name, weight in weights.items()
        }
        self._states: dict[str, dict[str, Tensor]] = {
            name: {
                "rowwise_adagrad": {"sum": torch.zeros(weight.shape[0], dtype=torch.float64)},
                "adam": {
                    "exp_avg": torch.zeros_like(weight, dtype=torch.float64),
                    "exp_avg_sq": torch.zeros_like(weight, dtype=torch.float64),
                },
            }.get(optimizer, {})
            for name, weight in weights.items()
        }
        self.bags: dict[str, nn.Module] = {}
        for table in tables:
            for feature in table.features:
                padding = self.padding_idx.get(feature.name)
                module: nn.Embedding | nn.EmbeddingBag
                if feature.pooling == "none":
                    module = nn.Embedding(table.rows, table.dim, padding_idx=padding)
                else:
                    module = nn.EmbeddingBag(
                        table.rows,
                        table.dim,
                        mode=feature.pooling,
                        include_last_offset=True,
                        padding_idx=padding,
                    )
                module.weight = self.weights[table.name]
                self.bags[feature.name] = module
        parameters = list(self.weights.values())
        self.trainer: torch.optim.Optimizer | None = None
        if optimizer == "sgd":
            self.trainer = torch.optim.SGD(parameters, lr=LR)
        elif optimizer == "adagrad":
            self.trainer = torch.optim.Adagrad(parameters, lr=LR, eps=EPS)

    def forward(self, batch: BagBatch) -> dict[str, Tensor]:
        """Outputs by feature, float64."""
        size, outputs = batch.batch_size, {}
        for index, (name, module) in enumerate(self.bags.items()):
            offsets = batch.offsets[index * size : (index + 1) * size + 1]
            ids = batch.ids[int(offsets[0]) : int(offsets[-1])].long()
            if isinstance(module, nn.Embedding):
                outputs[name] = module(ids)
            else:
                scale = None
                if batch.weights is not None:
                    scale = batch.weights[int(offsets[0]) : int(offsets[-1])].double()
                outputs[name] = module(ids, offsets - offsets[0], scale)
        return outputs

    def step(self, batch: BagBatch, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train one step and return the outputs."""
        for weight in self.weights.values():
            weight.grad = None
        outputs = self.forward(batch)
        backward(outputs, {name: gradient.double() for name, gradient in gradients.items()})
        self.updates += 1
        if self.trainer is not None:
            self.trainer.step()
        elif self.optimizer == "adam":
            self._adam_step(self._rows_read(batch))
        else:
            self._row_wise_step()
        return outputs

    def _rows_read(self, batch: BagBatch) -> dict[str, Tensor]:
        """Distinct rows of each table that the batch reads, padding left out."""
        size = batch.batch_size
        read: dict[str, list[Tensor]] = {name: [] for name in self.weights}
        for index, (feature, table) in enumerate(self.tables.items()):
            start, stop = (int(batch.offsets[i * size]) for i in (index, index + 1))
            ids = batch.ids[start:stop].long()
            read[table].append(ids[ids != self.padding_idx.get(feature, -1)])
        return {name: torch.cat(parts).unique() for name, parts in read.items() if parts}

    @torch.no_grad()
    def _row_wise_step(self) -> None:
        for name, weight in self.weights.items():
            if weight.grad is not None:
                self._states[name]["sum"] += weight.grad.square().mean(1)
                scale = self._states[name]["sum"].sqrt() + EPS
                weight -= LR * weight.grad / scale.unsqueeze(1)

    @torch.no_grad()
    def _adam_step(self, rows_read: Mapping[str, Tensor]) -> None:
        """Kingma and Ba's algorithm 1 on the rows read, eps added before √v is corrected."""
        for name, rows in rows_read.items():
            weight, state = self.weights[name], self._states[name]
            if weight.grad is None:
                continue
            gradient = weight.grad[rows]
            first = BETA1 * state["exp_avg"][rows] + (1 - BETA1) * gradient
            second = BETA2 * state["exp_avg_sq"][rows] + (1 - BETA2) * gradient**2
            state["exp_avg"][rows], state["exp_avg_sq"][rows] = first, second
            unbiased = first / (1 - BETA1**self.updates)
            scale = (second.sqrt() + EPS) / (1 - BETA2**self.updates) ** 0.5
            weight[rows] -= LR * unbiased / scale

    def states(self, table: str) -> dict[str, Tensor]:
        """Optimizer state of a table by name: the tensors in use."""
        if self.optimizer == "adagrad":
            return {"sum": self.trainer.state[self.weights[table]]["sum"]}
        return self._states[table]


def backward(outputs: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Backpropagate given gradients of the outputs."""
    torch.autograd.backward(list(outputs.values()), [gradients[name] for name in outputs])


def random_gradients(outputs: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Normal gradients of the outputs' shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(output.shape, generator=generator) for name, output in outputs.items()
    }


def train_step(model: Embeddings, batch: BagBatch, seed: int = 0) -> dict[str, Tensor]:
    """Train on a batch with random gradients of its outputs, and return these."""
    outputs: dict[str, Tensor] = model(batch)
    backward(outputs, random_gradients(outputs, seed))
    return outputs


def train_steps(model: Embeddings, batches: Iterable[BagBatch], first: int = 0) -> None:
    """Train on batches, of which each has random gradients of its number."""
    for number, batch in enumerate(batches, first):
        train_step(model, batch, number)


def take_over(model: Embeddings, other: Embeddings) -> None:
    """Load weights and optimizer state of another model."""
    model.load_state_dict(other.state_dict())
    model.load_optimizer_state_dict(other.optimizer_state_dict())


def assert_equal_states(one: Mapping[Any, Tensor], other: Mapping[Any, Tensor]) -> None:
    """Check that both have the same names, and the same bits of each."""
    assert one.keys() == other.keys()
    assert_same_bits(one, other)


def assert_same_bits(one: Mapping[Any, Tensor], other: Mapping[Any, Tensor]) -> None:
    """Check that another model, too, has what the first one has of each name."""
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def assert_alike(one: Embeddings, other: Embeddings) -> None:
    """Check that weights of table t and optimizer state are equal to the bit."""
    assert torch.equal(one.state_dict()["t.weight"], other.state_dict()["t.weight"])
    assert_same_bits(one.optimizer_state_dict(), other.optimizer_state_dict())


def contents(model: Embeddings) -> dict[str, Tensor]:
    """Weights and optimizer state."""
    return {**model.state_dict(), **model.optimizer_state_dict()}


def load_contents(model: Embeddings, state: Mapping[str, Tensor]) -> None:
    """Load what the model has of a state, which may have more."""
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    names = model.optimizer_state_dict()
    model.load_optimizer_state_dict({name: state[name] for name in names})


def two_features(optimizer: str = "rowwise_adagrad", rows: int = 61, dim: int = 8) -> Table:
    """A table that two features read, one summed and one averaged."""
    return Table(
        "t", rows, dim, "float32", optimizer, (Feature("t.sum"), Feature("t.mean", pooling="mean"))
    )


class _HostReads(TorchDispatchMode):
    """Counts operations that a GPU's host would have to wait for."""

    WAITING = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero",
               "bincount", "equal")  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.name().split("::")[1]
        by_mask = name.startswith("index") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool
            for index in (args[1] if len(args) > 1 and isinstance(args[1], list) else [])
        )
        on_device = any(isinstance(each, Tensor) and each.device.type == DEVICE for each in args)
        if on_device and (by_mask or name.startswith(self.WAITING)):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_host_reads() -> Iterator[list[str]]:
    with _HostReads() as mode:
        yield mode.found
