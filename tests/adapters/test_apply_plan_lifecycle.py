"""Checkpoints, copies, devices, and taking a plan out again."""

import copy
import io
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from apply_plan_cases import (
    EPS,
    LR,
    TABLES,
    Batch,
    assert_equal_models,
    batch,
    clicks,
    optimizers,
    plan_for,
    train,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from placer import apply_plan, remove_plan
from placer.adapters.pytorch import applied_plan
from placer.errors import CheckpointError, PlacerError, PlanMismatchError
from placer.storage.checkpoint import load_tables, save_tables


def placed(placement: str = "staged", kind: str = "adagrad", **options: object) -> nn.Module:
    model = clicks()
    apply_plan(model, plan_for(placement, optimizer=kind), lr=LR, eps=EPS, **options)
    return model


def trained(model: nn.Module, steps: range = range(4)) -> nn.Module:
    train(model, [torch.optim.SGD(model.parameters(), lr=LR)], steps)
    return model


def test_checkpoints_are_those_of_the_original_model(tmp_path: Path) -> None:
    ours, theirs = placed(), clicks()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    trained(ours)
    torch.save(ours.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt")
    assert theirs.load_state_dict(state).missing_keys == []
    assert_equal_models(ours, theirs, atol=0)
    other = placed("columns")
    other.load_state_dict(theirs.state_dict())
    assert_equal_models(other, theirs, atol=0)
    torch.testing.assert_close(other(batch(9)), theirs(batch(9)))


def test_padding_is_read_as_it_was_loaded() -> None:
    ours, theirs = placed(), clicks()
    ours(batch(0))
    state = theirs.state_dict()
    for name in ("item.weight", "tower.item.weight"):
        state[name] = state[name] + 1
    for model in (ours, theirs):
        model.load_state_dict(state)
    torch.testing.assert_close(ours(batch(0)), theirs(batch(0)))


def test_checkpoints_that_do_not_fit() -> None:
    model = placed()
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for words\.weight"):
        model.load_state_dict({**state, "words.weight": torch.zeros(3, 4)})
    with pytest.raises(RuntimeError, match=r"Missing key.*pages.weight"):
        model.load_state_dict({k: v for k, v in state.items() if k != "pages.weight"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*pages.bias"):
        model.load_state_dict({**state, "pages.bias": torch.zeros(1)})
    lacking = {k: v for k, v in state.items() if k != "pages.weight"}
    found = model.load_state_dict(lacking, strict=False)
    assert found.missing_keys == ["pages.weight"]


@pytest.mark.parametrize("kind", ["adam", "rowwise_adagrad"])
def test_optimizer_state_goes_on_under_another_plan(kind: str) -> None:
    whole = trained(placed("hbm", kind), range(8))
    first = trained(placed("cached", kind))
    second = placed("columns" if kind == "adam" else "uva", kind)
    second.load_state_dict(first.state_dict())
    state = applied_plan(first).optimizer_state_dict()
    applied_plan(second).load_optimizer_state_dict(state)
    assert ("item.updates" in state) == (kind == "adam")
    trained(second, range(4, 8))
    assert_equal_models(second, whole, atol=1e-6)
    del state[next(iter(state))]
    with pytest.raises(CheckpointError, match=r"is missing"):
        applied_plan(second).load_optimizer_state_dict(state)


def test_state_of_another_optimizer_is_refused() -> None:
    state = applied_plan(placed(kind="adagrad")).state_dict()
    with pytest.raises(CheckpointError, match=r"item\.sum is of no table and optimizer"):
        applied_plan(placed(kind="sgd")).load_state_dict(state)


def test_removing_gives_the_model_back() -> None:
    model, whole = clicks(), clicks()
    modules, parameters = list(model.modules()), list(model.parameters())
    train(whole, optimizers(whole, "adagrad"), range(6))
    apply_plan(model, plan_for(optimizer="adagrad"), lr=LR, eps=EPS)
    trained(model)
    state = remove_plan(model)
    assert list(map(id, model.modules())) == list(map(id, modules))
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        f"{one.name}.sum": (one.rows, one.dim) for one in TABLES
    }
    trainers = optimizers(model, "adagrad")
    for one in TABLES:
        weight = getattr(model, one.name).weight
        trainers[1].state[weight]["sum"].copy_(state[f"{one.name}.sum"])
    train(model, trainers, range(4, 6))
    assert_equal_models(model, whole)
    # Nothing is left of the plan: penalties and new plans are welcome.
    (model.item.weight.square().sum()).backward()
    apply_plan(model, plan_for("uva"))


def test_a_module_that_was_swapped_says_so() -> None:
    model = clicks()
    kept, ids = model.pages, torch.tensor([[1, 2]])
    expected = kept(ids)
    apply_plan(model, plan_for())
    with pytest.raises(PlanMismatchError, match="a plan has taken the weight of table 'pages'"):
        kept(ids)
    remove_plan(model)
    assert torch.equal(kept(ids), expected)


def test_a_weight_is_not_replaced() -> None:
    model = placed()
    replaced = nn.Parameter(torch.zeros(40, 8))
    with pytest.raises(PlanMismatchError, match="weight of table 'item' cannot be replaced"):
        model.item.weight = replaced
    with pytest.raises(PlanMismatchError, match="by assignment or functional_call"):
        torch.func.functional_call(model, {"item.weight": replaced}, (batch(0),))


def test_transforms_of_functions_are_refused() -> None:
    model = placed()
    with pytest.raises(PlacerError, match="under vmap, grad and other transforms"):
        torch.vmap(model.query)(torch.zeros(3, 2, 1, dtype=torch.int64))
    with torch.no_grad(), pytest.raises(PlacerError, match="under vmap, grad and other transf"):
        torch.vmap(model.item)(torch.zeros(3, 2, dtype=torch.int64))


def test_copies_are_independent_and_train_on() -> None:
    model = trained(placed("staged", "adam"))
    twin = copy.deepcopy(model)
    assert_equal_models(twin, model, atol=0)
    assert twin.item is twin.tower["item"]
    assert twin.query.table is twin.answer.table
    before = model.state_dict()
    trained(twin, range(4, 8))
    assert torch.equal(model.state_dict()["item.weight"], before["item.weight"])
    trained(model, range(4, 8))
    assert_equal_models(twin, model, atol=0)
    remove_plan(twin)
    assert_equal_models(twin, model, atol=0)
    assert twin.query.weight is twin.answer.weight


def test_an_average_of_the_model_takes_the_trained_rows(tmp_path: Path) -> None:
    ours, theirs = placed(), clicks()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AveragedModel(theirs)
    with pytest.warns(UserWarning, match="its copy keeps their rows as they are now") as warned:
        average = AveragedModel(ours)
    assert warned[0].filename == __file__
    trained(ours)
    average.update_parameters(ours)  # The first update copies.
    assert not torch.equal(average(batch(0)), ours(batch(0)))
    save_tables(tmp_path / "tables", applied_plan(ours))
    load_tables(tmp_path / "tables", applied_plan(average.module))
    assert torch.equal(average(batch(0)), ours(batch(0)))


@pytest.mark.slow
def test_a_process_that_is_spawned_takes_a_model() -> None:
    """As workers of a DataLoader and processes of `torch.multiprocessing.spawn` do."""
    model, seeds = trained(placed()), [batch(seed) for seed in range(2)]
    with torch.no_grad():
        expected = [model(each) for each in seeds]
    rows = DataLoader(seeds, None, num_workers=1, multiprocessing_context="spawn",
                      collate_fn=partial(_outputs, model))  # fmt: skip
    for out, own in zip(rows, expected, strict=True):
        assert torch.equal(out, own)


def _outputs(model: nn.Module, inputs: Batch) -> Tensor:
    with torch.no_grad():
        return model(inputs)


@pytest.mark.parametrize("backend", ["numba", "tiered"])
def test_a_whole_model_is_saved(backend: str) -> None:
    model = trained(placed("cached", "adam", backend=backend))
    applied_plan(model).set_lr(LR / 2)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.item.table.embeddings.backend == backend
    assert_equal_models(trained(loaded, range(4, 6)), trained(model, range(4, 6)), atol=0)


def test_where_a_model_may_go() -> None:
    model = placed()
    assert model.to("cpu").item.table is not None
    assert model.float() is model
    for move in (nn.Module.half, nn.Module.double, lambda model: model.to("meta")):
        with pytest.raises(PlanMismatchError, match="cannot become"):
            move(placed())


def test_moving_lays_the_table_out_anew() -> None:
    model = trained(placed(kind="adam"))
    state, weights = applied_plan(model).optimizer_state_dict(), model.state_dict()
    table = model.item.table
    # Another name of the same device, for lack of another.
    table.move(torch.device("cpu", 0))
    assert torch.equal(table.weight(), weights["item.weight"])
    for name, value in table.optimizer_state().items():
        assert torch.equal(value, state[name])


def test_hooks_of_a_module_go_on() -> None:
    model, seen = clicks(), []
    handle = model.pages.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    model.pages.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(type(module).__name__), with_kwargs=True
    )
    apply_plan(model, plan_for())
    model(batch(0))
    assert seen == ["PlacedEmbeddingBag", (16, 8)]
    handle.remove()
    model(batch(0))
    assert len(seen) == 3


def test_hooks_of_gradients_and_of_state_go_on() -> None:
    model, seen = clicks(padding_idx=None), []
    model.pages.register_full_backward_hook(lambda *_: seen.append("gradients"))
    model.pages.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    model.pages.register_load_state_dict_pre_hook(lambda *_: seen.append("loading"))
    apply_plan(model, plan_for())
    model(batch(0)).sum().backward()
    model.load_state_dict(model.state_dict())
    assert seen == ["gradients", "saved", "loading"]


def test_a_copy_leaves_the_tables_out_of_its_state_as_well() -> None:
    model = placed()
    applied_plan(model).leave_state_dict()
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()


def test_a_stand_in_tells_what_it_is() -> None:
    model = placed(backend="tiered")
    trained(model, range(1))
    text = repr(model)
    assert "(pages): PlacedEmbeddingBag(30, 8, table='pages', shards=2, optimizer='adagrad'" in text
    rates = applied_plan(model).hit_rates()
    assert set(rates) == {one.name for one in TABLES}
    assert applied_plan(placed(backend="torch")).hit_rates() == {}
    assert isinstance(model.item.weight, Tensor)
    assert list(model.item.parameters()) == []
    assert model.item.weight.shape == (40, 8)
