"""Train plain PyTorch models with plans: swap embedding modules for placed ones, and back."""

from placer.adapters.pytorch.applied import AppliedPlan
from placer.adapters.pytorch.apply import applied_plan, apply_plan, remove_plan
from placer.adapters.pytorch.profiling import profile_model

__all__ = ["AppliedPlan", "applied_plan", "apply_plan", "profile_model", "remove_plan"]
