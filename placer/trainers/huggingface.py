"""Train placed tables with Hugging Face's `Trainer`: save, resume, accumulate and clip."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from placer.adapters.pytorch import AppliedPlan, applied_plan
from placer.errors import CheckpointError
from placer.storage.checkpoint import load_tables, save_tables

FOLDER = "placed_tables"
"""Name of the tables' folder in a checkpoint."""


class PlacerTrainer(Trainer):
    """A `transformers.Trainer` for models whose tables a plan has placed.

    First make the `TrainingArguments`, which initialize torch.distributed. Then apply the plan, and
    then make the trainer, with the arguments of a `transformers.Trainer`. Its tables are `applied`.
    Each checkpoint has a folder with the tables' weights and optimizer state, and the model's file
    with the dense layers. ``resume_from_checkpoint`` and ``load_best_model_at_end`` load both.
    Tables are updated in the optimizer's step. So ``gradient_accumulation_steps``, the schedule of
    learning rates and ``max_grad_norm`` also apply to them. To combine it with your own trainer,
    write ``class Mine(PlacerTrainer, Own)``.

    Raises PlanMismatchError if no plan is applied to the model.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.applied: AppliedPlan = applied_plan(self.model)
        # `Trainer` takes the state dict on one rank only, but all ranks must gather tables.
        self.applied.leave_state_dict()
        self._updates_tables: torch.optim.Optimizer | None = None

    def create_optimizer(self, *arguments: Any, **options: Any) -> torch.optim.Optimizer:
        """Make the optimizer, and let its steps update the tables."""
        super().create_optimizer(*arguments, **options)
        optimizer: torch.optim.Optimizer = self.optimizer
        if self._updates_tables is not optimizer:
            self.applied.update_with(optimizer)
            self._updates_tables = optimizer
        return optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and its tables in a folder beside it; all ranks must call this."""
        super().save_model(output_dir, _internal_call)
        folder = Path(output_dir or self.args.output_dir) / FOLDER
        save_tables(folder, self.applied, replace=True)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_tables(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_tables(self.state.best_model_checkpoint)

    def _load_tables(self, checkpoint: str) -> None:
        folder = Path(checkpoint) / FOLDER
        if not folder.is_dir():
            raise CheckpointError(
                f"{checkpoint} has no folder {FOLDER}: it was not saved by a PlacerTrainer, and "
                "lacks the state of placed tables; train on from its weights with load_state_dict"
            )
        load_tables(folder, self.applied)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self.applied.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)
