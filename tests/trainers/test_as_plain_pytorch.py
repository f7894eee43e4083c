"""Accumulation, clipping, dropped gradients and bfloat16 do what they do to plain parameters."""

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from resume_cases import TABLES, Model, loss_of, placed
from torch import Tensor, nn

from placer.adapters.pytorch import AppliedPlan
from placer.errors import PlacerError

LR = 0.05


def models(kind: str = "sgd") -> tuple[Model, AppliedPlan, torch.optim.Optimizer]:
    """The placed model, whose tables are updated in the step of its dense layers' optimizer."""
    model, applied = placed(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    applied.update_with(optimizer)
    return model, applied, optimizer


def plain() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=LR)


def assert_close(ours: nn.Module, theirs: nn.Module) -> None:
    state = ours.state_dict()
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(state[name], weight, rtol=1e-5, atol=1e-6, msg=name)


def backward(model: nn.Module, steps: Iterator[int] | range) -> None:
    for step in steps:
        loss_of(model, step).backward()


def test_gradients_that_are_dropped_update_nothing() -> None:
    model, applied, optimizer = models()
    before = copy.deepcopy(model.state_dict())
    backward(model, range(2))
    optimizer.zero_grad()
    optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    theirs, other = plain()
    for one, trainer in ((model, optimizer), (theirs, other)):
        backward(one, range(2, 4))
        trainer.step()
    assert_close(model, theirs)
    assert set(applied.tables) == {table.name for table in TABLES}


def test_two_losses_may_share_a_forward_pass() -> None:
    model, _, optimizer = models()
    theirs, other = plain()
    for step in range(3):
        for one, trainer in ((model, optimizer), (theirs, other)):
            trainer.zero_grad()
            loss = loss_of(one, step)
            loss.backward(retain_graph=True)
            loss.square().backward()
            trainer.step()
    assert_close(model, theirs)


def test_the_end_of_joint_updates() -> None:
    model, applied = placed("sgd")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    own = optimizer.zero_grad.__func__
    handle = applied.update_with(optimizer)
    backward(model, range(1))
    handle.remove()
    assert optimizer.zero_grad.__func__ is own
    theirs, other = plain()
    backward(theirs, range(1))
    other.step()
    torch.testing.assert_close(model.state_dict()["item.weight"], theirs.item.weight.detach())


def test_several_backward_passes_before_a_step_are_said() -> None:
    model, _ = placed()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    backward(model, range(2))
    with pytest.warns(UserWarning, match="were updated in each pass"):
        optimizer.step()
    backward(model, range(1))
    with warnings.catch_warnings(action="error"):
        optimizer.step()  # One pass before a step is what it should be.


@pytest.mark.parametrize("made_first", ["scheduler", "update_with"])
def test_one_cycle_takes_the_tables_to_their_own_rate(made_first: str) -> None:
    model, applied = placed("sgd")
    theirs, other = plain()
    for one, trainer in ((theirs, other), (model, torch.optim.SGD(model.parameters(), lr=LR))):
        if one is model and made_first == "update_with":
            applied.update_with(trainer)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            trainer, LR, total_steps=5, cycle_momentum=False
        )
        if one is model and made_first == "scheduler":
            applied.update_with(trainer)
        for step in range(4):
            trainer.zero_grad()
            backward(one, range(step, step + 1))
            trainer.step()
            schedule.step()
    assert_close(model, theirs)


def test_a_warm_up_by_hand_from_zero_is_refused() -> None:
    model, applied = placed("sgd")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    applied.update_with(optimizer)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = LR
    with pytest.raises(PlacerError, match="cannot follow a learning rate that was 0 when update_w"):
        optimizer.step()


@pytest.mark.parametrize("max_norm", [0.01, 100.0])
@pytest.mark.parametrize("norm_type", [2, 1.0, float("inf"), "inf"])
def test_clipping_is_that_of_parameters(max_norm: float, norm_type: float) -> None:
    model, applied, optimizer = models()
    theirs, other = plain()
    for steps in (range(2), range(2, 4)):
        for one, trainer in ((model, optimizer), (theirs, other)):
            trainer.zero_grad()
            backward(one, steps)
        ours = applied.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        norm: Tensor = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm, norm_type)
        torch.testing.assert_close(ours, norm)
        optimizer.step()
        other.step()
    assert_close(model, theirs)


def test_a_single_parameter_is_clipped() -> None:
    model, applied, _ = models()
    backward(model, range(2))
    applied.clip_grad_norm_(model.out.weight, 1e-3)
    assert float(model.out.weight.grad.norm()) < 1e-3


def test_clipping_needs_gradients_that_wait() -> None:
    model, applied = placed()
    with pytest.raises(PlacerError, match="call update_with"):
        applied.clip_grad_norm_(model.parameters(), 1.0)
    model, applied, _ = models()
    model.out.weight.grad = torch.full_like(model.out.weight, torch.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        applied.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.slow
def test_the_update_is_not_traced_where_the_step_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, applied, optimizer = models()
    table, traced = applied.tables["item"], []
    own = table.update

    def update() -> None:
        traced.append(torch.compiler.is_compiling())
        own()

    monkeypatch.setattr(table, "update", update)
    backward(model, range(1))
    torch.compile(optimizer.step, backend="eager")()
    assert traced == [False]
    theirs, other = plain()
    backward(theirs, range(1))
    other.step()
    assert_close(model, theirs)


def test_autocast_trains_tables_as_parameters() -> None:
    model, _, optimizer = models()
    theirs, other = plain()
    for one, trainer in ((model, optimizer), (theirs, other)):
        for step in range(4):
            trainer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(one, step)
            loss.backward()
            trainer.step()
    assert_close(model, theirs)
