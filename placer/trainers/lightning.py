"""Save and load placed tables with Lightning's checkpoints, by a callback."""

import secrets
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch.utils.hooks import RemovableHandle

from placer.adapters.pytorch import applied_plan
from placer.errors import CheckpointError
from placer.files.atomic import StrPath
from placer.storage.checkpoint import load_tables, save_tables

KEY = "placer"
"""Key of this callback's entry in a Lightning checkpoint."""


class PlacerCallback(Callback):
    """Saves the state of placed tables with each checkpoint, and loads it in `fit(ckpt_path=...)`.

    Without it, a resumed run starts with a new optimizer state of the tables, because Lightning
    only saves the optimizers of `configure_optimizers`.

    Parameters
    ----------
    folder : path, optional
        Save the tables of each checkpoint in a folder below this one, without gathering them. Use
        it for tables that are too large for Lightning's file, which then only has the dense layers
        and the folder's name. All ranks must see it. By default, Lightning's file has everything.
    keep : int, optional
        Number of newest folders to keep; by default all. A checkpoint file without its folder
        cannot be loaded.
    """

    def __init__(self, folder: StrPath | None = None, keep: int | None = None) -> None:
        self.folder, self.keep = None if folder is None else Path(folder), keep
        self._before_load: RemovableHandle | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """With a folder, leave tables' weights out of state dicts before a checkpoint is loaded.

        Lightning calls this before `configure_model`, which may apply the plan, and loads the
        checkpoint right after `configure_model`.
        """
        if self.folder is not None:

            def leave(module: torch.nn.Module, *_: Any) -> None:
                applied_plan(module).leave_state_dict()

            self._before_load = pl_module.register_load_state_dict_pre_hook(leave)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Undo `setup`."""
        if self._before_load is not None:
            self._before_load.remove()
            self._before_load = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave weights to the folder, if any, also in a new run; warn if clipping skips tables.

        Raises PlanMismatchError if no plan is applied to the module.
        """
        applied = applied_plan(pl_module)
        if self.folder is not None:
            applied.leave_state_dict()
        clips = LightningModule.configure_gradient_clipping
        if trainer.gradient_clip_val and type(pl_module).configure_gradient_clipping is clips:
            warnings.warn(
                "gradient_clip_val clips the gradients of the dense layers alone, for those of "
                "placed tables are no parameters'; override configure_gradient_clipping and call "
                "clip_grad_norm_ of what apply_plan returns (docs/pytorch.md)",
                stacklevel=2,
            )

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the tables' state to the checkpoint, or save it in a folder and add its path."""
        applied = applied_plan(pl_module)
        if self.folder is None:
            checkpoint[KEY] = {"tables": applied.state_dict()}
            return
        word = trainer.strategy.broadcast(secrets.token_hex(4))  # Rank 0's, on all ranks.
        name = f"step-{trainer.global_step:012d}-{word}"
        save_tables(self.folder / name, applied)
        if trainer.is_global_zero and self.keep is not None:
            # Names of one step only differ in random numbers, so sort by time.
            folders = sorted(self.folder.glob("step-*"), key=lambda path: path.stat().st_mtime_ns)
            for old in folders[: -self.keep]:
                shutil.rmtree(old)
        checkpoint[KEY] = {"folder": str(self.folder.absolute() / name)}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load the tables' state that `on_save_checkpoint` saved.

        Raises CheckpointError if the checkpoint was saved without this callback, or the tables'
        folder is missing.
        """
        saved = checkpoint.get(KEY)
        if saved is None:
            raise CheckpointError(
                "the checkpoint was saved without PlacerCallback and lacks the state of placed "
                "tables; train on from its weights alone with load_state_dict, without ckpt_path"
            )
        applied = applied_plan(pl_module)
        if "tables" in saved:
            applied.load_state_dict(saved["tables"])
        else:
            folder = Path(saved["folder"])
            if not folder.is_dir() and self.folder is not None:  # Folders may have moved.
                folder = self.folder / folder.name
            load_tables(folder, applied)
