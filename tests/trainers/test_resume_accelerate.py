"""Accelerate: `save_state` and `load_state`, whole or with a folder of tables."""

from pathlib import Path

import accelerate
import pytest
import torch
from resume_cases import STEPS, assert_same, everything, loss_of, placed
from torch import Tensor

from placer import remove_plan
from placer.trainers.accelerate import FOLDER, register_tables

HALF = STEPS // 2

pytestmark = pytest.mark.slow


def run(
    steps: range, in_folder: bool, load: Path | None = None, save: Path | None = None
) -> dict[str, Tensor]:
    accelerator = accelerate.Accelerator(cpu=True)  # Before the plan: it makes the process group.
    model, applied = placed(seed=0 if load is None else 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    prepared, trainer = accelerator.prepare(model, optimizer)
    if in_folder:
        register_tables(accelerator, applied)
    else:
        accelerator.register_for_checkpointing(applied)
    if load is not None:
        accelerator.load_state(str(load))
    for step in steps:
        trainer.zero_grad()
        own = step * accelerator.num_processes + accelerator.process_index
        accelerator.backward(loss_of(prepared, own))
        trainer.step()
    if save is not None:
        accelerator.save_state(str(save))
        accelerator.save_state(str(save))  # Over it, as to a folder called "latest".
    return everything(model, applied)


@pytest.mark.parametrize("in_folder", [False, True])
def test_a_resumed_run_is_equal(in_folder: bool, grows: bool, tmp_path: Path) -> None:
    run(range(HALF), in_folder, save=tmp_path / "first")
    assert (tmp_path / "first" / FOLDER).is_dir() == in_folder
    resumed = run(range(HALF, STEPS), in_folder, load=tmp_path / "first")
    assert_same(resumed, run(range(STEPS), in_folder))


def test_a_prepared_optimizer_updates_the_tables() -> None:
    weights = []
    for is_placed in (True, False):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, applied = placed("sgd")
        if not is_placed:
            remove_plan(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        prepared, trainer = accelerator.prepare(model, optimizer)
        if is_placed:
            applied.update_with(trainer)
        for step in range(4):
            with accelerator.accumulate(prepared):
                accelerator.backward(loss_of(prepared, step))
                trainer.step()
                trainer.zero_grad()
        weights.append(model.state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name])
