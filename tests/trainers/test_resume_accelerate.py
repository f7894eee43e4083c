"""Accelerate: `save_state` and `load_state`, whole or with a folder of tables."""

from pathlib import Path

import accelerate
import pytest
import torch
from resume_cases import STEPS, assert_same, everything, loss_of, placed
from torch import Tensor

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
