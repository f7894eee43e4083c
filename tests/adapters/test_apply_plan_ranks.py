"""A plan over ranks of `torch.distributed`: the model trains as in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from apply_plan_cases import (
    EPS,
    LR,
    assert_equal_models,
    clicks,
    loss_of,
    optimizers,
    plan_for,
    trained_whole,
)
from ranks_launcher import join_group, leave_group, run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from placer import apply_plan, remove_plan
from placer.adapters.pytorch import applied_plan
from placer.errors import BackendError
from placer.storage.checkpoint import load_tables, save_tables

WORLD, STEPS = 2, 6


def work(rank: int, folder: str, placement: str, kind: str) -> None:
    """One rank; writes what came out."""
    _train(rank, folder, placement, kind)
    leave_group()


def _train(rank: int, folder: str, placement: str, kind: str) -> None:
    early = clicks()
    apply_plan(early, plan_for(placement, optimizer=kind))
    join_group(rank, WORLD, folder, 60)
    with pytest.raises(BackendError, match=r"each of 2 ranks would train a table of its own"):
        loss_of(early, 0)
    with torch.no_grad():
        loss_of(early, 0)  # Nothing is trained, so that the ranks' tables are equal.
    model = clicks()
    if rank:  # The first rank's weights are those of all, as under DDP.
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    apply_plan(model, plan_for(placement, optimizer=kind), lr=LR, eps=EPS)
    wrapped = DistributedDataParallel(model)
    trainer = torch.optim.SGD(wrapped.parameters(), lr=LR)
    for step in range(STEPS):
        trainer.zero_grad()
        loss_of(wrapped, step * WORLD + rank).backward()
        trainer.step()
    text, rates = repr(model), applied_plan(model).hit_rates()
    state = model.state_dict()
    save_tables(f"{folder}/tables", applied_plan(model))
    load_tables(f"{folder}/tables", applied_plan(model))
    applied = applied_plan(model)
    trained = remove_plan(model)
    with pytest.raises(BackendError, match="connections to other ranks are closed"):
        applied.state_dict()
    torch.save((state, model.state_dict(), trained, text, rates), f"{folder}/{rank}.pt")


@pytest.mark.parametrize(
    ("placement", "kind"),
    [
        pytest.param("staged", "adam", marks=pytest.mark.slow),
        pytest.param("replicas", "adagrad", marks=pytest.mark.slow),
        ("columns", "rowwise_adagrad"),
    ],
)
def test_ranks_train_as_one_process(placement: str, kind: str, tmp_path: Path) -> None:
    arguments = (str(tmp_path), placement, kind)
    mp.start_processes(work, arguments, WORLD, start_method="forkserver")
    alone = clicks()
    one = apply_plan(alone, plan_for("hbm", optimizer=kind), lr=LR, eps=EPS)
    load_tables(tmp_path / "tables", one)  # What two ranks wrote.
    whole = trained_whole(kind, STEPS, WORLD)
    for rank in range(WORLD):
        state, after, optimizer, text, rates = torch.load(tmp_path / f"{rank}.pt")
        model = clicks()
        model.load_state_dict(state)
        assert_equal_models(model, whole)
        model.load_state_dict(after)
        assert_equal_models(model, whole)
        for name, value in one.optimizer_state_dict().items():
            assert torch.equal(optimizer[name], value)
        assert torch.equal(after["pages.weight"], one.tables["pages"].weight())
        assert optimizer["pages.exp_avg" if kind == "adam" else "pages.sum"].shape[0] == 30
        assert "backend='auto'" in text
        assert rates == {}


def full(tensor: Any) -> Tensor:
    """A tensor of which FSDP may have given each rank a part."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def clips(rank: int, world: int, placement: str, norm_type: float) -> Any:
    """Norms before clipping, and what was learned from what is left."""
    model: Any = clicks()
    applied = apply_plan(model, plan_for(placement, optimizer="sgd"), lr=LR)
    wrapped = fully_shard(model) if placement == "staged" else DistributedDataParallel(model)
    trainer = torch.optim.SGD(wrapped.parameters(), lr=LR)
    applied.update_with(trainer)
    norms = []
    for step in range(STEPS):
        trainer.zero_grad()
        loss_of(wrapped, step * world + rank).backward()
        norms.append(full(applied.clip_grad_norm_(wrapped.parameters(), 0.05, norm_type)))
        trainer.step()
    state = {name: full(value) for name, value in model.state_dict().items()}
    remove_plan(model)
    return norms, state


@pytest.mark.parametrize(
    ("placement", "norm_type"),
    [
        ("columns", float("inf")),
        ("staged", 2.0),
        pytest.param("replicas", 1.0, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_clipped_as_in_one_process(placement: str, norm_type: float) -> None:
    whole = clicks()
    trainers = optimizers(whole, "sgd")
    norms = []
    for step in range(STEPS):
        for trainer in trainers:
            trainer.zero_grad()
        (sum(loss_of(whole, step * WORLD + rank) for rank in range(WORLD)) / WORLD).backward()
        norms.append(nn.utils.clip_grad_norm_(whole.parameters(), 0.05, norm_type))
        for trainer in trainers:
            trainer.step()
    for found, state in run(WORLD, [("clips", clips, (placement, norm_type))]).of("clips"):
        torch.testing.assert_close(found, norms)
        model = clicks()
        model.load_state_dict(state)
        assert_equal_models(model, whole)
