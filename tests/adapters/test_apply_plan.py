"""A model with a plan trains as it did without."""

import copy
from dataclasses import replace

import pytest
import torch
from apply_plan_cases import (
    EPS,
    LR,
    PLACEMENTS,
    Clicks,
    assert_equal_models,
    batch,
    clicks,
    optimizers,
    plan_for,
    table,
    train,
)
from fast_and_full import combinations
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from placer import apply_plan, remove_plan
from placer.errors import DataError

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def both(kind: str, placement: str, backend: str, padding_idx: int | None = 1) -> None:
    theirs = clicks(sparse=kind == "adam", padding_idx=padding_idx)
    expected = train(theirs, optimizers(theirs, kind), range(12))
    ours = clicks(padding_idx=padding_idx)
    plan = plan_for(placement, optimizer=kind)
    apply_plan(ours, plan, lr=LR, eps=EPS, backend=backend)
    dense = torch.optim.SGD(ours.parameters(), lr=LR)
    losses = train(ours, [dense], range(12))
    assert losses == pytest.approx(expected, abs=1e-5)
    assert_equal_models(ours, theirs)
    remove_plan(ours)
    assert_equal_models(ours, theirs)


@combinations("kind, placement", OPTIMIZERS, PLACEMENTS)
def test_losses_and_weights_are_the_unplaced_models(kind: str, placement: str) -> None:
    both(kind, placement, "numba")


@combinations("backend, kind", ["torch", "tiered"], OPTIMIZERS)
def test_on_every_backend(kind: str, backend: str) -> None:
    both(kind, "staged", backend)


def test_without_padding() -> None:
    both("adam", "cached", "numba", padding_idx=None)


def test_one_optimizer_for_all_tables() -> None:
    theirs, ours = clicks(), clicks()
    train(theirs, optimizers(theirs, "adagrad"), range(3))
    applied = apply_plan(ours, plan_for(optimizer="sgd"), "adagrad", lr=LR, eps=EPS)
    train(ours, [torch.optim.SGD(ours.parameters(), lr=LR)], range(3))
    assert_equal_models(ours, theirs)
    assert {placed.table.optimizer for placed in applied.tables.values()} == {"adagrad"}


class Small(nn.Module):
    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags
        self.dense = nn.Linear(1, 1)


def placed_pair(module: nn.Module, **options: object) -> tuple[nn.Module, nn.Module]:
    """A module, and a copy of it under a plan."""
    pooling = module.mode if isinstance(module, nn.EmbeddingBag) else "none"
    plan = plan_for(tables=[table("bags", *module.weight.shape, pooling)])
    ours = Small(copy.deepcopy(module))
    apply_plan(ours, plan, "sgd", lr=1.0, **options)
    return ours.bags, module


def assert_same_step(ours: nn.Module, theirs: nn.Module, *inputs: Tensor | None) -> None:
    """Same outputs, and same weights after a step of SGD with rate 1."""
    placed, expected = ours(*inputs), theirs(*inputs)
    torch.testing.assert_close(placed, expected)
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    theirs.weight.grad = None
    expected.backward(gradient)
    if placed.requires_grad:
        placed.backward(gradient)
    with torch.no_grad():
        if theirs.weight.grad is not None:
            theirs.weight -= theirs.weight.grad
        torch.testing.assert_close(ours.weight, theirs.weight)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_calls_of_an_embedding_bag(mode: str, padding_idx: int | None) -> None:
    ids = torch.tensor([2, 0, 2, 2, 9, 3, 3, 9])
    options = {"mode": mode, "padding_idx": padding_idx}
    ours, theirs = placed_pair(nn.EmbeddingBag(10, 4, **options))
    assert_same_step(ours, theirs, ids.view(4, 2), None)
    assert_same_step(ours, theirs, ids.view(2, 4).int(), None)
    assert_same_step(ours, theirs, ids, torch.tensor([0, 2, 2, 4, 8]))
    assert_same_step(ours, theirs, ids.int(), torch.tensor([0, 1], dtype=torch.int32))
    assert_same_step(ours, theirs, ids[:0], torch.tensor([0, 0]))
    assert_same_step(ours, theirs, ids[:4], torch.tensor([0, 1, 2, 3]))
    ours, theirs = placed_pair(nn.EmbeddingBag(10, 4, include_last_offset=True, **options))
    assert_same_step(ours, theirs, ids, torch.tensor([0, 2, 2, 4, 8]))


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_calls_of_an_embedding(padding_idx: int | None) -> None:
    ours, theirs = placed_pair(nn.Embedding(10, 4, padding_idx=padding_idx))
    for ids in (torch.tensor(5), torch.arange(10), torch.full((2, 3, 2), 3), torch.tensor([[4]])):
        assert_same_step(ours, theirs, ids)
    assert ours(torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3, 4)


def test_gradients_of_weights_of_lookups() -> None:
    ours, theirs = placed_pair(nn.EmbeddingBag(10, 4, mode="sum", padding_idx=2))
    ids, offsets = torch.tensor([1, 2, 1, 9, 9]), torch.tensor([0, 3, 3])
    gradients = []
    for module in (ours, theirs):
        weights = torch.tensor([0.5, 2.0, -1.0, 3.0, 0.0], requires_grad=True)
        # Called twice, so that one update is made of both.
        out = module(ids, offsets, weights) + module(ids, offsets)
        (out.sin()).sum().backward()
        gradients.append(weights.grad)
    torch.testing.assert_close(*gradients)
    with torch.no_grad():
        torch.testing.assert_close(ours.weight, theirs.weight - theirs.weight.grad)


def test_a_weight_that_is_frozen_stays() -> None:
    module = nn.EmbeddingBag.from_pretrained(torch.randn(10, 4), mode="sum", freeze=True)
    ours, theirs = placed_pair(module)
    scales = torch.ones(4, requires_grad=True)
    ids, offsets = torch.tensor([1, 2, 2, 3]), torch.tensor([0, 2])
    assert not ours(ids, offsets).requires_grad
    out = ours(ids, offsets, scales)
    torch.testing.assert_close(out, theirs(ids, offsets))
    out.sum().backward()
    torch.testing.assert_close(scales.grad, theirs.weight[ids].sum(1))
    assert torch.equal(ours.weight, theirs.weight)
    assert not ours.original.weight.requires_grad


def test_a_placed_table_is_frozen_and_trains_again() -> None:
    ours, theirs = placed_pair(nn.Embedding(10, 4))
    ids = torch.tensor([1, 2, 2, 3])
    for trains in (True, False, True, False):
        ours.requires_grad_(trains)
        theirs.requires_grad_(trains)
        assert ours(ids).requires_grad is trains
        if trains:
            assert_same_step(ours, theirs, ids)
    assert torch.equal(ours.weight, theirs.weight)
    assert not copy.deepcopy(ours)(ids).requires_grad
    assert not ours.original.weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_comes_out_as_it_went_in(dtype: torch.dtype) -> None:
    module = nn.Embedding(10, 4, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    plan = plan_for(tables=[table("bags", 10, 4, "none")])
    plan = replace(plan, tables=tuple(replace(one, dtype=name) for one in plan.tables))
    ours = Small(copy.deepcopy(module))
    apply_plan(ours, plan, "sgd", lr=1.0)
    out = ours.bags(torch.tensor([1, 2]))
    assert out.dtype == dtype
    assert torch.equal(out, module(torch.tensor([1, 2])))
    out.sum().backward()
    assert torch.equal(ours.bags.weight[1], module.weight[1] - 1)


def test_without_gradients_nothing_is_updated() -> None:
    ours, theirs = placed_pair(nn.Embedding(10, 4))
    with torch.no_grad():
        ours(torch.tensor([1, 2]))
    ours(torch.tensor([1, 2]))  # A forward pass that has no backward.
    assert torch.equal(ours.weight, theirs.weight)


def test_calls_of_separate_backward_passes_are_separate_updates() -> None:
    ours, theirs = placed_pair(nn.Embedding(10, 4))
    first, second = ours(torch.tensor([1])), ours(torch.tensor([1, 2]))
    first.sum().backward()
    second.sum().backward()
    expected = theirs.weight.detach().clone()
    expected[1] -= 2
    expected[2] -= 1
    torch.testing.assert_close(ours.weight, expected)
    with pytest.raises(DataError, match="second backward pass through one forward"):
        second.sum().backward()


def test_a_backward_pass_that_fails_leaves_nothing_behind() -> None:
    ours, theirs = placed_pair(nn.Embedding(10, 4))

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("on purpose")

    leaf = torch.zeros(4, requires_grad=True)
    leaf.register_hook(fail)
    last = leaf * 1  # Made before the rows, so its gradient comes after theirs.
    rows, others = ours(torch.tensor([1])), ours(torch.tensor([3]))
    with pytest.raises(RuntimeError, match="on purpose"):
        (rows + last).sum().backward()
    others.sum().backward()  # Its forward pass came before the failure.
    ours(torch.tensor([5])).sum().backward()
    expected = theirs.weight.detach().clone()
    expected[[3, 5]] -= 1
    torch.testing.assert_close(ours.weight, expected)


def test_calls_under_checkpointing_are_one_update() -> None:
    ours, theirs = placed_pair(nn.Embedding(10, 4))
    ids = torch.tensor([1, 1, 3])
    for module in (ours, theirs):
        out = checkpoint(lambda ids, m=module: m(ids).sin(), ids, use_reentrant=False)
        out = out + checkpoint(lambda ids, m=module: m(ids).cos(), ids, use_reentrant=False)
        out.sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(ours.weight, theirs.weight - theirs.weight.grad)


@pytest.mark.parametrize("kind", ["adagrad", "adam"])
def test_gradients_accumulate_until_an_optimizer_steps(kind: str) -> None:
    """Inputs are overwritten meanwhile, as by a loader that has one buffer."""
    theirs, ours = clicks(sparse=kind == "adam"), clicks()
    trainers = optimizers(theirs, kind)
    applied = apply_plan(ours, plan_for("cached", optimizer=kind), lr=LR, eps=EPS)
    dense = torch.optim.SGD(ours.parameters(), lr=LR)
    handle = applied.update_with(dense)
    for model, optimizers_of in ((theirs, trainers), (ours, [dense])):
        schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.1) for one in optimizers_of]
        for step in range(4):
            for one in optimizers_of:
                one.zero_grad()
            for part in range(3):
                data = batch(3 * step + part)
                model(data).square().mean().backward()
                with torch.no_grad():
                    model(data)
                for values in data.values() if model is ours else ():
                    values.zero_()
            for one in optimizers_of:
                one.step()
            for schedule in schedules:
                schedule.step()
    assert_equal_models(ours, theirs)
    ours(batch(0)).sum().backward()
    before = applied.tables["item"].weight()
    assert torch.equal(before, ours.item.weight)
    handle.remove()
    after = applied.tables["item"].weight()
    assert not torch.equal(before, after)
    ours(batch(0)).sum().backward()
    assert not torch.equal(after, applied.tables["item"].weight())


@pytest.mark.parametrize("removed", [0, 1])
def test_an_optimizer_of_two_models_drops_gradients_after_one_is_left(removed: int) -> None:
    models = clicks(), clicks()
    plans = [apply_plan(one, plan_for("hbm"), lr=LR) for one in models]
    dense = torch.optim.SGD([weight for one in models for weight in one.parameters()], lr=LR)
    handles = [applied.update_with(dense) for applied in plans]
    handles[removed].remove()
    kept, item = models[1 - removed], plans[1 - removed].tables["item"]
    before = item.weight()
    kept(batch(0)).sum().backward()
    dense.zero_grad()
    dense.step()
    assert torch.equal(before, item.weight())
    handles[1 - removed].remove()
    kept(batch(0)).sum().backward()
    assert not torch.equal(before, item.weight())


def test_a_later_optimizer_replaces_an_earlier_one() -> None:
    model = clicks()
    applied = apply_plan(model, plan_for("hbm"), lr=LR)
    early, late = (torch.optim.SGD(model.parameters(), lr=LR) for _ in range(2))
    handles = [applied.update_with(one) for one in (early, late)]
    item = applied.tables["item"]
    before = item.weight()
    model(batch(0)).sum().backward()
    early.step()
    early.zero_grad()
    handles[0].remove()
    model(batch(1)).sum().backward()
    assert torch.equal(before, item.weight())
    late.step()
    assert not torch.equal(before, (after := item.weight()))
    handles[1].remove()
    model(batch(0)).sum().backward()
    assert not torch.equal(after, item.weight())


@pytest.mark.parametrize("place", ["ids", "offsets", "weights"])
def test_inputs_that_change_before_the_backward_pass_train_nothing_else(place: str) -> None:
    mode = "mean" if place == "offsets" else "sum"
    ours, theirs = placed_pair(nn.EmbeddingBag(10, 4, mode=mode, include_last_offset=True))
    inputs = {"ids": torch.tensor([1, 2, 2, 3]), "offsets": torch.tensor([0, 1, 4])}
    if place == "weights":
        inputs["weights"] = torch.ones(4)
    losses = []
    for module in (ours, theirs):
        mine = {name: values.clone() for name, values in inputs.items()}
        first, second = module(*mine.values()), module(*inputs.values())
        mine[place].copy_(mine[place].flip(0) if place != "offsets" else torch.tensor([0, 3, 4]))
        losses.append((first + second).sum())
    if place != "offsets":  # Torch refuses offsets, too.
        for loss in losses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        return
    losses[0].backward()
    theirs(*inputs.values()).sum().mul(2).backward()
    with torch.no_grad():
        torch.testing.assert_close(ours.weight, theirs.weight - theirs.weight.grad)


def test_penalties_on_the_whole_weight_train_it() -> None:
    ours, theirs = placed_pair(nn.Embedding(10, 4, padding_idx=3))
    for module in (ours, theirs):
        penalty = 0.25 * (module.weight - 1).square().sum()  # Padding begins as zeros.
        (module(torch.tensor([1, 3])).sum() + penalty).backward()
    with torch.no_grad():
        expected = theirs.weight - theirs.weight.grad
        torch.testing.assert_close(ours.weight, expected)
        # The padding's row has changed too, and is read as it is now.
        torch.testing.assert_close(ours(torch.tensor([3])), expected[3:4])


def test_outputs_may_be_changed_in_place() -> None:
    ours, theirs = placed_pair(nn.Embedding(10, 4))
    ours(torch.tensor([1, 2])).mul_(2).sum().backward()
    expected = theirs.weight.detach().clone()
    expected[1:3] -= 2
    torch.testing.assert_close(ours.weight, expected)


@pytest.mark.slow
def test_a_compiled_model_calls_the_stand_ins_as_they_are() -> None:
    ours, theirs = clicks(), clicks()
    apply_plan(ours, plan_for(optimizer="sgd"), lr=LR)
    compiled = torch.compile(ours, backend="eager")
    torch.testing.assert_close(compiled(batch(0)), theirs(batch(0)))


def test_the_model_is_in_eval_mode_as_before() -> None:
    model = clicks().eval()
    apply_plan(model, plan_for())
    assert not any(module.training for module in model.modules())
    remove_plan(model.train())
    assert all(module.training for module in model.modules())
    assert isinstance(model, Clicks)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.tensor([10]), torch.tensor([0])), "id 10 is not a row"),
        ((torch.tensor([0.5]), torch.tensor([0])), "int64 or int32, not torch.float32"),
        ((torch.tensor([1, 2]),), "without offsets"),
        ((torch.tensor([[1, 2]]), torch.tensor([0])), "leave offsets out"),
        ((torch.tensor([1, 2]), torch.tensor([1])), "offsets must rise from 0"),
        ((torch.tensor([1, 2]), torch.tensor([0]), torch.ones(3)), "must be the same"),
        ((torch.tensor([[1]]), None, torch.ones(1, 1)), "go with mode 'sum', not with 'mean'"),
    ],
)
def test_calls_that_cannot_be(inputs: tuple[Tensor, ...], message: str) -> None:
    mode = "mean" if "mean" in message else "sum"
    ours, _ = placed_pair(nn.EmbeddingBag(10, 4, mode=mode))
    with pytest.raises(DataError, match=message):
        ours(*inputs)
