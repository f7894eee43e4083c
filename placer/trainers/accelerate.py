"""Save tables in a folder inside each of Accelerate's checkpoints.

Small tables do not need this: pass the result of `placer.apply_plan` to
``accelerator.register_for_checkpointing``, which pickles it.
"""

from pathlib import Path
from typing import Any

from accelerate import Accelerator

from placer.adapters.pytorch import AppliedPlan
from placer.storage.checkpoint import load_tables, save_tables

FOLDER = "placed_tables"
"""Name of the tables' folder in a checkpoint."""


def register_tables(accelerator: Accelerator, applied: AppliedPlan) -> None:
    """Save placed tables with `accelerator.save_state`, and load them with `load_state`.

    `applied` comes from `apply_plan`. A folder inside the checkpoint holds weights and optimizer
    state. All ranks write it, a block of rows at a time. The model's own file then only has the
    dense layers.
    """
    applied.leave_state_dict()

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        save_tables(Path(output_dir) / FOLDER, applied, replace=True)

    def load(models: list[Any], input_dir: str) -> None:
        load_tables(Path(input_dir) / FOLDER, applied)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
