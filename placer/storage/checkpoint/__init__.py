"""Checkpoints of placed tables in `torch.distributed.checkpoint`'s format."""

from placer.storage.checkpoint.applied_tables import load_tables, save_tables
from placer.storage.checkpoint.whole_model import load_model, save_model

__all__ = ["load_model", "load_tables", "save_model", "save_tables"]
