"""Plans for trainers in plain PyTorch: swap a model's embedding modules, and swap them back."""

from placer.adapters.pytorch.applied import AppliedPlan
from placer.adapters.pytorch.apply import applied_plan, apply_plan, remove_plan
from placer.adapters.pytorch.profiling import profile_model

__all__ = ["AppliedPlan", "applied_plan", "apply_plan", "profile_model", "remove_plan"]
