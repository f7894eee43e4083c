"""The profile of a running model, and a plan from it."""

import pytest
import torch
from apply_plan_cases import BATCH, LR, batch, clicks, plan_for, train
from torch import nn

import placer
from placer import Problem, apply_plan, profile_model
from placer.errors import DataError, PlanMismatchError
from placer.topology.topology import Topology
from solvers import solve

BATCHES = [batch(seed) for seed in range(5)]


def test_rows_are_counted_as_they_are_read() -> None:
    profile = profile_model(clicks(), BATCHES, source="here")
    assert (profile.samples, profile.source) == (5 * BATCH, "here")
    assert profile.table_names == ["item", "pages", "words", "last", "query"]
    expected = torch.zeros(40, dtype=torch.int64)
    for data in BATCHES:
        ids = torch.cat([data["history"].flatten().long(), data["item"], data["item"] % 7])
        expected += torch.bincount(ids, minlength=40)
    expected[1] = 0  # The padding, which needs no place.
    counts = profile["item"].counts
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {
        row: count for row, count in enumerate(expected.tolist()) if count
    }
    item, pages = profile["item"].table, profile["pages"].table
    assert [feature.name for feature in item.features] == ["item", "item#2", "item#3"]
    assert {feature.pooling for feature in item.features} == {"none"}
    lookups = sum(feature.lookups_per_sample for feature in item.features) * profile.samples
    assert lookups == pytest.approx(int(expected.sum()))
    assert (item.rows, item.dim, item.dtype) == (40, 8, "float32")
    assert item.optimizer == "rowwise_adagrad"
    assert [feature.pooling for feature in pages.features] == ["mean"]
    filled = sum(int((data["pages"] != 0).any(1).sum()) for data in BATCHES)
    assert pages.features[0].coverage == filled / profile.samples
    assert profile["query"].lookups == 5 * BATCH * 3


def test_the_model_stays_as_it_was() -> None:
    model = clicks()
    model.norm = nn.BatchNorm1d(3)
    model.out.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    profile_model(model, BATCHES)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not model.item._forward_pre_hooks


def test_batches_and_steps() -> None:
    model = clicks()
    pairs = [(data, data["label"]) for data in BATCHES]
    assert profile_model(model, pairs, steps=2).samples == 2 * BATCH
    wrapped = [{"inputs": data} for data in BATCHES]
    profile = profile_model(model, wrapped, forward=lambda data: model(data["inputs"]))
    assert profile.samples == 5 * BATCH
    # Negatives that are drawn for a batch belong to its samples.
    tables = nn.ModuleDict({"user": nn.Embedding(9, 2), "tag": nn.Embedding(9, 2)})
    tables["item"], tables["one"] = nn.Embedding(9, 2), nn.Embedding(9, 2)
    ids = torch.arange(9).repeat(4)

    def forward(users: torch.Tensor) -> None:
        tables["user"](users)
        tables["tag"](users)
        tables["item"](ids)
        tables["one"](torch.tensor(7))

    drawn = profile_model(tables, [torch.arange(4)], forward=forward)
    assert drawn.samples == 4
    assert drawn["item"].table.lookups_per_sample == 9
    assert drawn["one"].counts.hottest().tolist() == [7]
    assert drawn["one"].table.lookups_per_sample == 1 / 4


def test_names_and_what_cannot_be_profiled() -> None:
    model = clicks()
    profile = profile_model(model, BATCHES, names={"goods": "tower.item"}, optimizer="adam")
    assert profile.table_names[0] == "goods"
    assert profile["goods"].table.optimizer == "adam"
    with pytest.raises(PlanMismatchError, match=r"names has \['towel'\]"):
        profile_model(model, BATCHES, names={"goods": "towel"})
    with pytest.raises(PlanMismatchError, match=r"no nn.EmbeddingBag and no nn.Embedding"):
        profile_model(nn.Linear(1, 1), BATCHES)
    with pytest.raises(DataError, match="no batch"):
        profile_model(model, [])
    with pytest.raises(DataError, match="steps -1 must be at least 1"):
        profile_model(model, BATCHES, steps=-1)
    placed = clicks()
    apply_plan(placed, plan_for())
    with pytest.raises(PlanMismatchError, match="call remove_plan first"):
        profile_model(placed, BATCHES)
    with pytest.raises(DataError, match=r"first element of a batch, .*forward=lambda batch"):
        profile_model(model, [(1, 2)])
    with pytest.raises(PlanMismatchError, match=r"'item' is of torch.float64; placed are float32"):
        profile_model(clicks().double(), BATCHES, forward=lambda batch: None)


@pytest.mark.slow
def test_a_compiled_model_has_the_paths_of_the_model() -> None:
    compiled = torch.compile(clicks(), backend="eager")
    profile = profile_model(compiled, BATCHES)
    assert profile.table_names == profile_model(clicks(), BATCHES).table_names


def test_from_model_to_plan_and_back_into_it() -> None:
    ours, theirs = clicks(), clicks()
    profile = profile_model(ours, BATCHES)
    topology = Topology.parse("1xh100", hbm=5000)
    plan = solve(Problem(profile, topology, 1), solver="greedy-cost").plan
    assert {shard.memory for shard in plan.shards} == {"hbm", "dram"}
    apply_plan(ours, plan, "sgd", lr=LR)
    losses = train(ours, [torch.optim.SGD(ours.parameters(), lr=LR)], range(10))
    expected = train(theirs, [torch.optim.SGD(theirs.parameters(), lr=LR)], range(10))
    assert losses == pytest.approx(expected, abs=1e-5)


def test_the_package_has_them_without_importing_torch_first() -> None:
    assert placer.apply_plan is apply_plan
    with pytest.raises(AttributeError, match="no attribute 'apply_plans'"):
        placer.apply_plans  # noqa: B018
