"""Split tables read and learn like whole ones, and their checkpoints are those of whole ones."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

import torch
from dmp_cases import Model, batch_of, model_of
from fast_and_full import examples
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import machine
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec_cases import plan_of_all, shard, table

from placer import Plan
from placer.adapters.torchrec import load_state_dict, merge_state_dict, split_tables
from placer.errors import CheckpointError, PlanMismatchError
from placer.plan.fields import RowOrder


def split_plan(name: str = "t", rows: int = 20, edge: int = 6, *, listed: Any = (3, 19, 0)) -> Plan:
    """One table of hot and cold rows on a GPU, in an order of its own."""
    own = table(name, rows)
    shards = (
        shard(name, (0, edge), (0, 8)),
        shard(name, (edge, rows), (0, 8), lookup="uva"),
    )
    ids = {name: np.array(listed, dtype=np.int64)}
    return Plan((own,), machine(1), shards, {name: RowOrder("profile")}, ids)


def test_a_split_model_learns_what_the_whole_one_learns() -> None:
    plan = plan_of_all()
    whole, split = model_of(plan.tables), split_tables(model_of(plan.tables), plan)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (whole, split)]
    for step in range(5):
        features, labels = batch_of(plan.tables, 0, step)
        found = []
        for model, optimizer in zip((whole, split), optimizers, strict=True):
            optimizer.zero_grad()
            found.append(model(features))
            nn.functional.mse_loss(found[-1], labels).backward()
            optimizer.step()
        torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=0)
    state = merge_state_dict(split.state_dict(), split)
    assert state.keys() == whole.state_dict().keys()
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(state[key], value, atol=1e-6, rtol=0)


def test_a_checkpoint_goes_in_and_comes_out_as_it_was() -> None:
    plan = plan_of_all()
    split = split_tables(model_of(plan.tables, seed=1), plan)
    state = model_of(plan.tables, seed=2).state_dict()
    load_state_dict(split, state)
    merged = merge_state_dict(split.state_dict(), split)
    assert merged.keys() == state.keys()
    assert all(merged[key].equal(value) for key, value in state.items())


@given(st.data())
@examples(40)
def test_rows_are_where_the_row_order_says(data: st.DataObject) -> None:
    rows = data.draw(st.integers(2, 30))
    edge = data.draw(st.integers(1, rows - 1))
    listed = data.draw(st.permutations(range(rows)))[: data.draw(st.integers(0, rows))]
    plan = split_plan(rows=rows, edge=edge, listed=listed)
    model = model_of(plan.tables)
    weight = model.ebc.embedding_bags["t"].weight.detach().clone()
    split = split_tables(model, plan)
    order = [*listed, *(i for i in range(rows) if i not in listed)]
    bags = split.ebc.placed_tables.embedding_bags
    assert bags["t__hot"].weight.equal(weight[order[:edge]])
    assert bags["t__cold"].weight.equal(weight[order[edge:]])
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    ids = torch.tensor(
        [data.draw(st.integers(0, rows - 1)) for _ in range(int(lengths.sum()))],
        dtype=data.draw(st.sampled_from([torch.int32, torch.int64])),
    )
    features = KeyedJaggedTensor(keys=["t_0"], values=ids, lengths=lengths)
    bag = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    expected = torch.zeros(len(lengths), 8).index_add(0, bag, weight[ids.long()])
    torch.testing.assert_close(split.ebc(features)["t_0"], expected)


def test_weighted_bags_and_features_that_two_tables_read() -> None:
    def collection() -> EmbeddingBagCollection:
        torch.manual_seed(0)
        return EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name, num_embeddings=rows, embedding_dim=8, feature_names=features
                )
                for name, rows, features in (("t", 20, ["a", "b"]), ("u", 20, ["b"]))
            ],
            is_weighted=True,
        )

    plan = split_plan()
    both = Plan(
        (*plan.tables, table("u", 20)),
        plan.topology,
        (*plan.shards, shard("u", (0, 20), (0, 8))),
        plan.row_order,
        plan.hot_ids,
    )
    features = KeyedJaggedTensor(
        keys=["b", "a"],
        values=torch.tensor([0, 3, 19, 5, 7, 8]),
        lengths=torch.tensor([2, 0, 1, 3]),
        weights=torch.tensor([0.5, 2.0, 1.0, 3.0, -1.0, 0.25]),
    )
    expected = collection()(features)
    found = split_tables(collection(), both)(features)
    assert found.keys() == expected.keys() == ["a", "b@t", "b@u"]
    torch.testing.assert_close(found.values(), expected.values())


def test_rows_that_are_not_pooled_come_back_in_their_order() -> None:
    def collection() -> EmbeddingCollection:
        torch.manual_seed(0)
        return EmbeddingCollection(
            [
                EmbeddingConfig(name=name, num_embeddings=20, embedding_dim=8, feature_names=[name])
                for name in ("t", "u")
            ]
        )

    plan = split_plan()
    plan = Plan(
        (table("t", 20, pooling="none"), table("u", 20, pooling="none")),
        plan.topology,
        (*plan.shards, shard("u", (0, 20), (0, 8))),
        plan.row_order,
        plan.hot_ids,
    )
    features = KeyedJaggedTensor(
        keys=["t", "u"],
        values=torch.tensor([0, 7, 3, 9, 19, 1, 2]),
        lengths=torch.tensor([3, 2, 0, 2]),
    )
    whole, split = collection(), split_tables(collection(), plan)
    expected, found = whole(features), split(features)
    assert found.keys() == expected.keys()
    for name, own in expected.items():
        assert found[name].values().equal(own.values())
        assert found[name].lengths().equal(own.lengths())


def test_tables_that_need_no_split_are_left_alone() -> None:
    own = table("t", 10)
    model: Any = Model([own])
    ebc = model.ebc
    plan = Plan((own,), machine(1), (shard("t", (0, 10), (0, 8)),))
    assert split_tables(model, plan) is model
    assert model.ebc is ebc


def test_parts_on_the_meta_device_are_initialized_like_the_table() -> None:
    plan = split_plan()
    model = split_tables(Model(plan.tables, torch.device("meta")), plan)
    for config in model.ebc.placed_tables.embedding_bag_configs():
        assert config.weight_init_max == pytest.approx((1 / 20) ** 0.5)
    assert all(parameter.is_meta for parameter in model.ebc.parameters())


class TestRefusals:
    def test_an_optimizer_that_is_there_already(self) -> None:
        plan = split_plan()
        model = model_of(plan.tables)
        ebc = model.ebc
        _apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
        with pytest.raises(PlanMismatchError, match="'t' has an optimizer in its backward pass"):
            split_tables(model, plan)
        assert model.ebc is ebc

    def test_weighted_means_another_shape_and_no_such_table(self) -> None:
        for model, message in (
            (Model([table("t", 20, pooling="mean")], weighted=True), "weighted and pooled by mean"),
            (Model([table("t", 21)]), "20 × 8 in the plan but 21 × 8"),
            (Model([table("u", 20)]), "'t' is in the plan but not in the model"),
        ):
            with pytest.raises(PlanMismatchError, match=message):
                split_tables(model, split_plan())

    def test_collections_that_return_their_indices(self) -> None:
        config = EmbeddingConfig(name="t", num_embeddings=20, embedding_dim=8, feature_names=["t"])
        with pytest.raises(PlanMismatchError, match="returns its indices"):
            split_tables(EmbeddingCollection([config], need_indices=True), split_plan())

    def test_batches_of_several_sizes(self) -> None:
        plan = split_plan()
        model = split_tables(model_of(plan.tables), plan)
        features = KeyedJaggedTensor(
            keys=["t_0"],
            values=torch.tensor([1, 2]),
            lengths=torch.tensor([1, 1]),
            stride_per_key_per_rank=[[2]],
        )
        with pytest.raises(PlanMismatchError, match="batches of one size"):
            model.ebc(features)

    def test_states_that_lack_something(self) -> None:
        plan = split_plan()
        model = split_tables(model_of(plan.tables), plan)
        state = dict(model.state_dict())
        del state["ebc.placed_tables.embedding_bags.t__cold.weight"]
        with pytest.raises(CheckpointError, match=r"t__cold.weight', a part of table 't'"):
            merge_state_dict(state, model)
        with pytest.raises(CheckpointError, match=r"lacks 'ebc.embedding_bags.t.weight'"):
            load_state_dict(model, {})
        whole = model_of([table("t", 30)]).state_dict()
        whole["over.weight"] = whole["over.weight"][:, :3]
        with pytest.raises(CheckpointError, match=r"'over.weight' is"):
            load_state_dict(model, whole)
