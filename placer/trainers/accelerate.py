"""Accelerate: tables in a folder within each of its checkpoints.

Tables that are small enough for a pickle need none of this: what `placer.apply_plan` returns goes
to ``accelerator.register_for_checkpointing``.
"""

from pathlib import Path
from typing import Any

from accelerate import Accelerator

from placer.adapters.pytorch import AppliedPlan
from placer.storage.checkpoint import load_tables, save_tables

FOLDER = "placed_tables"
"""Name of the tables' folder in a checkpoint."""


def register_tables(accelerator: Accelerator, applied: AppliedPlan) -> None:
    """Save what `apply_plan` returned with `accelerator.save_state`; load it with `load_state`.

    The tables lie in a folder within the checkpoint, weights and optimizer state, written by all
    ranks a block of rows at a time; the model's own file has the dense layers alone.
    """
    applied.leave_state_dict()

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        save_tables(Path(output_dir) / FOLDER, applied, replace=True)

    def load(models: list[Any], input_dir: str) -> None:
        load_tables(Path(input_dir) / FOLDER, applied)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
