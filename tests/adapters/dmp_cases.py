"""Small TorchRec models on processes that talk by gloo, and the same models unsharded."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks_launcher import leave_group
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim import RowWiseAdagrad

from placer import Plan, Table

BATCH = 8
LR = 0.1


def on_ranks(
    world: int, target: Callable[..., Any], folder: Path, *args: Any, local: int | None = None
) -> list[Any]:
    """What `target(rank, *args)` returns on each of `world` processes, `local` of them a host."""
    store = folder / "store"
    store.unlink(missing_ok=True)
    arguments = (world, local or world, target, folder, args)
    mp.start_processes(_fork, arguments, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _fork(_: int, world: int, *arguments: Any) -> None:
    """Fork the ranks from one process that has imported TorchRec, which takes seconds."""
    mp.start_processes(_entry, (world, *arguments), nprocs=world, start_method="fork")


def _entry(
    rank: int, world: int, local: int, target: Callable[..., Any], folder: Path, args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
    }
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    result = target(rank, *args)
    dist.barrier()
    torch.save(result, folder / f"{rank}.pt")
    del result
    leave_group()


class Model(nn.Module):
    """Pooled tables and a layer over them."""

    def __init__(
        self, tables: Sequence[Table], device: torch.device | None = None, *, weighted: bool = False
    ) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=table.name,
                    num_embeddings=table.rows,
                    embedding_dim=table.dim,
                    feature_names=[feature.name for feature in table.features],
                    pooling=PoolingType.MEAN
                    if table.features[0].pooling == "mean"
                    else PoolingType.SUM,
                )
                for table in tables
            ],
            weighted,
            device,
        )
        width = sum(table.dim * len(table.features) for table in tables)
        self.over = nn.Linear(width, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.ebc(features)
        return self.over(torch.cat([pooled[key] for key in sorted(pooled.keys())], dim=1))


def model_of(tables: Sequence[Table], seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(tables)


def batch_of(tables: Sequence[Table], rank: int, step: int) -> tuple[KeyedJaggedTensor, Tensor]:
    """Bags of 0 to 4 ids, hot ones more often, and labels."""
    draw = np.random.default_rng([rank, step])
    keys, values, lengths = [], [], []
    for table in tables:
        for feature in table.features:
            own = draw.integers(0, 5, BATCH)
            keys.append(feature.name)
            lengths.append(own)
            values.append((table.rows * draw.random(own.sum()) ** 2).astype(np.int64))
    return (
        KeyedJaggedTensor(
            keys=keys,
            values=torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(np.concatenate(lengths)),
        ),
        torch.from_numpy(draw.random((BATCH, 1)).astype(np.float32)),
    )


def joined(batches: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """The batches of all ranks as one."""
    keys = batches[0].keys()
    own = [batch.to_dict() for batch in batches]
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([batch[key].values() for key in keys for batch in own]),
        lengths=torch.cat([batch[key].lengths() for key in keys for batch in own]),
    )


def apply_optimizers(model: nn.Module, tables: Sequence[Table], replicated: Sequence[str]) -> None:
    """Each table's optimizer in its backward pass, but for replicated ones."""
    optimizers = {table.name: table.optimizer for table in tables}
    for name, parameter in model.named_parameters():
        if "embedding_bags" not in name:
            continue
        table = name.split(".")[-2]
        if table in replicated:
            continue
        rowwise = optimizers[table.split("__")[0]] == "rowwise_adagrad"
        kind = RowWiseAdagrad if rowwise else torch.optim.SGD
        kwargs = {"lr": LR, "eps": 1e-8} if rowwise else {"lr": LR}
        _apply_optimizer_in_backward(kind, [parameter], kwargs)


def sharded(model: nn.Module, plan: ShardingPlan) -> DistributedModelParallel:
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.GroupMember.WORLD),
        device=torch.device("cpu"),
        plan=plan,
    )


def train(
    model: nn.Module, tables: Sequence[Table], rank: int, steps: int, dense: Sequence[str] = ()
) -> list[Tensor]:
    """Logits of each step; parameters that no optimizer has in its backward pass get SGD."""
    optimizer = torch.optim.SGD(
        [
            parameter
            for name, parameter in model.named_parameters()
            if "embedding_bags" not in name or any(f".{table}." in name for table in dense)
        ],
        LR,
    )
    logits = []
    for step in range(steps):
        features, labels = batch_of(tables, rank, step)
        optimizer.zero_grad()
        out = model(features)
        nn.functional.mse_loss(out, labels).backward()
        optimizer.step()
        logits.append(out.detach())
    return logits


def reference(tables: Sequence[Table], ranks: int, steps: int) -> tuple[list[Tensor], Model]:
    """Logits of the unsharded model on the batches of all ranks together, and the model."""
    model = model_of(tables)
    sparse = dict(model.ebc.embedding_bags.items())
    optimizers: list[Any] = [torch.optim.SGD(model.over.parameters(), LR)]
    state: dict[str, Tensor] = {}
    for table in tables:
        if table.optimizer == "sgd":
            optimizers.append(torch.optim.SGD(sparse[table.name].parameters(), LR))
        else:
            state[table.name] = torch.zeros(table.rows)
    logits = []
    for step in range(steps):
        batches = [batch_of(tables, rank, step) for rank in range(ranks)]
        model.zero_grad()
        out = model(joined([features for features, _ in batches]))
        labels = torch.cat([labels for _, labels in batches])
        nn.functional.mse_loss(out, labels).backward()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for name, sums in state.items():  # Row-wise Adagrad, by its equation.
                weight = sparse[name].weight
                sums += weight.grad.square().mean(1)
                weight -= LR * weight.grad / (sums.sqrt() + 1e-8).unsqueeze(1)
        logits.append(out.detach())
    return logits, model


def replicated_tables(plan: Plan) -> list[str]:
    return sorted({shard.table for shard in plan.shards if len(shard.devices) > 1})
