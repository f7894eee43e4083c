"""Save and load checkpoints of placed tables in `torch.distributed.checkpoint`'s format."""

from placer.storage.checkpoint.models import load_model, load_tables, save_model, save_tables

__all__ = ["load_model", "load_tables", "save_model", "save_tables"]
