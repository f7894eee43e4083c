"""The unplaced model that the demo compares with, and its row-wise Adagrad."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from executor_cases import (
    BETA1,
    BETA2,
    EPS,
    LR,
    DoubleModel,
    backward,
    placements,
    plan_of,
    random_batch,
    random_gradients,
    two_features,
)
from fast_and_full import combinations
from torch import nn

from placer.errors import DataError
from placer.executor import BagBatch, PlacedEmbeddings, RowWiseAdagrad, UnplacedEmbeddings
from placer.tables import OPTIMIZERS, Feature, Table


@combinations("weighted, dtype", [False, True], ["float32", "bfloat16"])
def test_it_is_the_placed_model_unplaced(weighted: bool, dtype: str) -> None:
    features = tuple(
        Feature(f"f.{pooling}", pooling=pooling) for pooling in ("sum", "mean", "max", "none")
    )
    table = Table("t", 30, 8, dtype, "rowwise_adagrad", features)
    padding = {"f.sum": 3, "f.none": -1}
    batch = random_batch([table], weighted=weighted)
    start, stop = int(batch.offsets[36]), int(batch.offsets[48])
    batch.ids[start:stop:2] = -1
    placed = PlacedEmbeddings(
        placements(table)["crossing cuts"], seed=4, backend="torch", padding_idx=padding
    )
    unplaced = UnplacedEmbeddings([table], seed=4, padding_idx=padding)
    assert unplaced.feature_names == placed.feature_names
    assert torch.equal(unplaced.table_weights()["t"], placed.state_dict()["t.weight"])
    own, expected = placed(batch), unplaced(batch)
    for name, output in expected.items():
        torch.testing.assert_close(own[name], output, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_trains_like_the_placed_model(optimizer: str) -> None:
    tables = [two_features(optimizer), Table("u", 9, 4, "float32", "sgd", (Feature("u"),))]
    placed = PlacedEmbeddings(plan_of(tables), lr=LR, eps=EPS, backend="torch")
    unplaced = UnplacedEmbeddings(tables)
    trainers = unplaced.optimizers(lr=LR, eps=EPS)
    for seed in range(3):
        batch = random_batch(tables, seed=seed)
        outputs = placed(batch)
        gradients = random_gradients(outputs, seed)
        backward(outputs, gradients)
        unplaced.zero_grad()
        backward(unplaced(batch), gradients)
        for trainer in trainers:
            trainer.step()
    for name, weight in unplaced.table_weights().items():
        torch.testing.assert_close(
            placed.state_dict()[f"{name}.weight"], weight, rtol=1e-5, atol=1e-6
        )


def test_it_takes_weights_and_empty_batches_and_refuses_bad_ids() -> None:
    table = replace(two_features(), features=(Feature("f"), Feature("g", pooling="none")))
    weight = torch.randn(61, 8)
    model = UnplacedEmbeddings([table], weights={"t": weight})
    assert torch.equal(model.table_weights()["t"], weight)
    outputs = model(BagBatch(torch.empty(0, dtype=torch.int64), torch.zeros(1).long(), 0))
    assert outputs["f"].shape == outputs["g"].shape == (0, 8)
    with pytest.raises(DataError, match="id 61 is not a row"):
        model(BagBatch(torch.tensor([61]), torch.tensor([0, 1, 1]), 1))


def rowwise_adagrad(bag: nn.EmbeddingBag) -> torch.optim.Optimizer:
    return RowWiseAdagrad(bag.parameters(), lr=LR, eps=EPS)


def sparse_adam(bag: nn.EmbeddingBag) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(bag.parameters(), lr=LR, betas=(BETA1, BETA2), eps=EPS)


@pytest.mark.parametrize(
    ("made", "optimizer", "sparse"),
    [
        (rowwise_adagrad, "rowwise_adagrad", False),
        (rowwise_adagrad, "rowwise_adagrad", True),
        (sparse_adam, "adam", True),
    ],
)
def test_optimizers_of_the_float64_model_are_those_of_bags(
    made: Callable[[nn.EmbeddingBag], torch.optim.Optimizer], optimizer: str, sparse: bool
) -> None:
    """What the placed model is held to: few rows are read, one step none."""
    table = replace(two_features(), features=(Feature("f"),))
    start = torch.randn(61, 8, dtype=torch.float64)
    bag = nn.EmbeddingBag.from_pretrained(
        start.clone(), freeze=False, mode="sum", sparse=sparse, include_last_offset=True
    )
    trainer, expected = made(bag), DoubleModel([table], {"t": start}, optimizer)
    nothing = BagBatch(torch.empty(0, dtype=torch.int64), torch.zeros(13).long(), 12)
    for seed in range(5):
        batch = nothing if seed == 2 else random_batch([table], seed=seed)
        output = bag(batch.ids, batch.offsets)
        gradient = random_gradients({"f": output}, seed)["f"]

        def closure(
            output: torch.Tensor = output, gradient: torch.Tensor = gradient
        ) -> torch.Tensor:
            trainer.zero_grad()
            output.backward(gradient.double())
            return output.sum()

        assert trainer.step(closure) is not None
        expected.step(batch, {"f": gradient})
    torch.testing.assert_close(bag.weight, expected.weights["t"])
    for name, state in expected.states("t").items():
        torch.testing.assert_close(trainer.state[bag.weight][name], state)


def test_optimizers_may_be_one_for_all() -> None:
    tables = [replace(two_features(name), name=name, features=()) for name in OPTIMIZERS]
    model = UnplacedEmbeddings(tables)
    kinds = [type(trainer) for trainer in model.optimizers()]
    assert kinds == [
        torch.optim.SGD,
        torch.optim.Adagrad,
        RowWiseAdagrad,
        torch.optim.SparseAdam,
    ]
    (single,) = model.optimizers(optimizer="adagrad")
    assert isinstance(single, torch.optim.Adagrad)
    assert len(single.param_groups[0]["params"]) == len(OPTIMIZERS)
