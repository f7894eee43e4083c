"""Models, plans and batches for the tests of plans in plain PyTorch models."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from plan_cases import machine
from torch import Tensor, nn

from placer import Feature, Plan, Shard, Table
from placer.executor import RowWiseAdagrad
from placer.plan.fields import RowOrder
from placer.tables import Pooling

LR, EPS = 0.05, 1e-8
BATCH = 16
Batch = Mapping[str, Tensor]

PLACEMENTS = ("hbm", "staged", "cached", "uva", "host", "columns")


class Clicks(nn.Module):
    """Every way to call embedding modules.

    ``item`` is called three times in a forward pass, at one place of the model and at another,
    with one id a sample and with several; ``pages`` pools by mean and leaves its padding out;
    ``words`` takes weights; ``last`` pools by maximum; ``query`` and ``answer`` share a weight.
    """

    def __init__(self, sparse: bool = False, padding_idx: int | None = 1) -> None:
        super().__init__()
        self.item = nn.Embedding(40, 8, padding_idx=padding_idx, sparse=sparse)
        self.tower = nn.ModuleDict({"item": self.item})
        self.pages = nn.EmbeddingBag(30, 8, mode="mean", padding_idx=0, sparse=sparse)
        self.words = nn.EmbeddingBag(50, 4, mode="sum", include_last_offset=True, sparse=sparse)
        self.last = nn.EmbeddingBag(20, 6, mode="max")
        self.query = nn.EmbeddingBag(25, 4, mode="sum", sparse=sparse)
        self.answer = nn.EmbeddingBag(25, 4, mode="sum", sparse=sparse)
        self.answer.weight = self.query.weight
        self.scale = nn.Linear(1, 1)
        self.out = nn.Linear(8 + 8 + 8 + 4 + 6 + 4 + 4, 1)

    def forward(self, batch: Batch) -> Tensor:
        history = self.tower["item"](batch["history"])
        scores = self.scale(batch["scores"].unsqueeze(1)).squeeze(1)
        parts = [
            self.item(batch["item"]),
            history.mean(1) * self.item(batch["item"] % 7),
            self.pages(batch["pages"]),
            self.words(batch["words"], batch["word_offsets"], per_sample_weights=scores),
            self.last(batch["last"], batch["last_offsets"]),
            self.query(batch["query"]),
            self.answer(batch["answer"]),
        ]
        return self.out(torch.cat(parts, 1)).squeeze(1)


def batch(seed: int) -> Batch:
    """Ids with many repeats, some of them padding, and bags of which some are empty."""
    generator = torch.Generator().manual_seed(seed)

    def ids(rows: int, *shape: int) -> Tensor:
        # Squared, so that some rows are hot.
        return (torch.rand(shape, generator=generator) ** 2 * rows).long()

    def offsets() -> Tensor:
        lengths = torch.randint(0, 5, (BATCH,), generator=generator)
        return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))

    words, last = offsets(), offsets()
    return {
        "item": ids(40, BATCH),
        "history": ids(40, BATCH, 3).int(),
        "pages": ids(30, BATCH, 4),
        "words": ids(50, int(words[-1])),
        "word_offsets": words,
        "scores": torch.rand(int(words[-1]), generator=generator),
        "last": ids(20, int(last[-1])),
        "last_offsets": last[:-1],
        "query": ids(25, BATCH, 2),
        "answer": ids(25, BATCH, 1),
        "label": torch.randint(0, 2, (BATCH,), generator=generator).float(),
    }


def table(name: str, rows: int, dim: int, *poolings: Pooling) -> Table:
    """A table with a feature for each pooling."""
    features = tuple(
        Feature(f"{name}#{index}", 2.0, pooling=pooling) for index, pooling in enumerate(poolings)
    )
    return Table(name, rows, dim, features=features)


TABLES = (
    table("item", 40, 8, "none"),
    table("pages", 30, 8, "mean"),
    table("words", 50, 4, "sum"),
    table("last", 20, 6, "max"),
    table("query", 25, 4, "sum"),
)


def plan_for(
    placement: str = "staged", tables: Iterable[Table] = TABLES, optimizer: str = "rowwise_adagrad"
) -> Plan:
    """All tables cut alike: a third of the rows in HBM and the rest read in one way.

    With Adam, ``last`` is trained by SGD.
    """
    shards: list[Shard] = []
    hot = {}
    chosen = tuple(
        replace(one, optimizer="sgd" if (optimizer, one.name) == ("adam", "last") else optimizer)
        for one in tables
    )
    for one in chosen:
        rows, dim, third = one.rows, one.dim, one.rows // 3
        hbm = Shard(one.name, (0, third, 1), (0, dim), ("gpu:0",), "hbm", "device")
        if placement == "hbm":
            shards.append(replace(hbm, rows=(0, rows, 1)))
        elif placement == "replicas":
            shards.append(replace(hbm, rows=(0, rows, 1), devices=("gpu:0", "gpu:1")))
        elif placement == "columns":
            whole = replace(hbm, rows=(0, rows, 1))
            shards += [
                replace(whole, cols=(0, dim // 2)),
                replace(whole, cols=(dim // 2, dim), devices=("gpu:1",)),
            ]
        else:
            pooled = placement in ("staged", "cached")
            pool = {
                "staging_rows": min(14, rows - third) if pooled else 0,
                "cache_rows": 3 if placement == "cached" else 0,
            }
            cold = Shard(
                one.name, (third, rows, 1), (0, dim), ("gpu:0",), "dram", placement, **pool
            )
            shards += [hbm, cold]
            hot[one.name] = np.random.default_rng(rows).permutation(rows)[:third]
    order = {name: RowOrder("profile") for name in hot}
    return Plan(chosen, machine(), tuple(shards), order, hot, BATCH)


def optimizers(model: Clicks, kind: str) -> list[torch.optim.Optimizer]:
    """Torch's optimizers of tables and of dense layers; the latter are trained by SGD.

    So is ``last`` beside Adam, for torch has no sparse gradients of a maximum.
    """
    weights = {
        id(module.weight): module.weight
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    dense = [p for p in model.parameters() if id(p) not in weights]
    tables = list(weights.values())
    if kind == "adam":
        last = [weights.pop(id(model.last.weight))]
        return [
            torch.optim.SGD([*dense, *last], lr=LR),
            torch.optim.SparseAdam(list(weights.values()), lr=LR, eps=EPS),
        ]
    trainers: list[torch.optim.Optimizer] = [torch.optim.SGD(dense, lr=LR)]
    if kind == "sgd":
        trainers.append(torch.optim.SGD(tables, lr=LR))
    elif kind == "adagrad":
        trainers.append(torch.optim.Adagrad(tables, lr=LR, eps=EPS))
    elif kind == "rowwise_adagrad":
        trainers.append(RowWiseAdagrad(tables, lr=LR, eps=EPS))
    return trainers


def loss_of(model: nn.Module, seed: int) -> Tensor:
    """Of a batch."""
    data = batch(seed)
    return nn.functional.binary_cross_entropy_with_logits(model(data), data["label"])


def trained_whole(kind: str, steps: int, ranks: int) -> Clicks:
    """The unplaced model after steps on the batches of all ranks."""
    whole = clicks(sparse=kind == "adam")
    trainers = optimizers(whole, kind)
    for step in range(steps):
        for trainer in trainers:
            trainer.zero_grad()
        (sum(loss_of(whole, step * ranks + rank) for rank in range(ranks)) / ranks).backward()
        for trainer in trainers:
            trainer.step()
    return whole


def train(model: nn.Module, trainers: Iterable[torch.optim.Optimizer], steps: range) -> list[float]:
    """Losses of some steps."""
    losses = []
    trainers = list(trainers)
    for step in steps:
        loss = loss_of(model, step)
        for trainer in trainers:
            trainer.zero_grad()
        loss.backward()
        for trainer in trainers:
            trainer.step()
        losses.append(loss.item())
    return losses


def clicks(sparse: bool = False, padding_idx: int | None = 1) -> Clicks:
    """The model, always with the same weights; not even its padding is zero."""
    torch.manual_seed(0)
    model = Clicks(sparse, padding_idx)
    for one in TABLES:
        nn.init.normal_(getattr(model, one.name).weight, std=0.5)
    return model


def assert_equal_models(ours: nn.Module, theirs: nn.Module, atol: float = 1e-5) -> None:
    """All entries of the state dicts are the same."""
    ours_state, theirs_state = ours.state_dict(), theirs.state_dict()
    assert list(ours_state) == list(theirs_state)
    for name, value in theirs_state.items():
        torch.testing.assert_close(ours_state[name], value, rtol=1e-4, atol=atol, msg=name)
