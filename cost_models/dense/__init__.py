"""What the dense part of a model costs: its layers, its interaction and its gradients' sum."""

from cost_models.dense.rates import CPU_FLOPS, GPU_FLOPS, FlopRate
from cost_models.dense.step import DenseCost, dense_cost, dense_costs, dense_phase_s

__all__ = [
    "CPU_FLOPS",
    "GPU_FLOPS",
    "DenseCost",
    "FlopRate",
    "dense_cost",
    "dense_costs",
    "dense_phase_s",
]
