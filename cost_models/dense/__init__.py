"""What the dense part of a model costs: its layers, its interaction and its gradients' sum."""

from cost_models.dense.rates import CPU_FLOPS, GPU_FLOPS, FlopRate, cpu_rate, gpu_rate
from cost_models.dense.step import DenseCost, dense_cost, dense_costs, dense_phase_s

__all__ = [
    "CPU_FLOPS",
    "GPU_FLOPS",
    "DenseCost",
    "FlopRate",
    "cpu_rate",
    "dense_cost",
    "dense_costs",
    "dense_phase_s",
    "gpu_rate",
]
