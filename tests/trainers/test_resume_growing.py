"""Tables that grow in other people's trainers: runs resume to the bit, and rows change hands."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from resume_cases import GROWS, HOW, STEPS, assert_same, everything, placed

from placer.adapters.pytorch import AppliedPlan

pytestmark = pytest.mark.slow
HALF = STEPS // 2


@pytest.fixture(autouse=True)
def _tables_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GROWS, "1")


def needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def assert_keys_came_and_went(applied: AppliedPlan) -> None:
    for name, counts in applied.key_counts().items():
        assert counts.evicted > 5, name
        assert 0 < counts.live <= HOW[name].capacity


@pytest.mark.parametrize("placement", ["uva", "mixed"])
def test_a_plain_loop(placement: str, tmp_path: Path) -> None:
    from test_resume_plain import start, train

    whole = start()
    train(whole, range(STEPS))
    first = start()
    train(first, range(HALF))
    names = "model", "tables", "optimizer"
    states = {name: each.state_dict() for name, each in zip(names, first, strict=True)}
    torch.save(states, tmp_path / "run.pt")
    second = start(placement=placement, seed=1)
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    for name, each in zip(names, second, strict=True):
        each.load_state_dict(saved[name])
    train(second, range(HALF, STEPS))
    assert_same(everything(*second[:2]), everything(*whole[:2]))
    assert_keys_came_and_went(whole[1])


@pytest.mark.parametrize("in_folder", [False, True])
def test_lightning(in_folder: bool, tmp_path: Path) -> None:
    needs("lightning")
    from test_resume_lightning import Module, PlacerCallback, fit

    callback = PlacerCallback(tmp_path / "tables" if in_folder else None)
    whole, first, second = (Module(seed) for seed in (0, 0, 1))
    fit(whole, 2, callback)
    fit(first, 1, callback).save_checkpoint(tmp_path / "first.ckpt")
    fit(second, 2, callback, tmp_path / "first.ckpt")
    assert_same(everything(second, second.applied), everything(whole, whole.applied))
    assert_keys_came_and_went(whole.applied)


@pytest.mark.parametrize("in_folder", [False, True])
def test_accelerate(in_folder: bool, tmp_path: Path) -> None:
    needs("accelerate")
    from test_resume_accelerate import run

    run(range(HALF), in_folder, save=tmp_path / "first")
    resumed = run(range(HALF, STEPS), in_folder, load=tmp_path / "first")
    assert_same(resumed, run(range(STEPS), in_folder))


def test_huggingface(tmp_path: Path) -> None:
    """Gradients of two batches come before each step of the optimizer, and are clipped."""
    needs("transformers")
    from test_resume_huggingface import trainer

    model, applied = placed("adagrad")
    trainer(model, tmp_path).train()
    other, again = placed("adagrad", "uva", seed=1)
    trainer(other, tmp_path / "other").train(
        resume_from_checkpoint=str(tmp_path / f"checkpoint-{HALF}")
    )
    assert_same(everything(other, again), everything(model, applied))
    assert_keys_came_and_went(applied)
