"""What the dense part of a model costs: its layers, its interaction and its gradients' sum."""

from cost_models.dense.rates import CPU_FLOPS as CPU_FLOPS
from cost_models.dense.rates import GPU_FLOPS as GPU_FLOPS
from cost_models.dense.rates import FlopRate as FlopRate
from cost_models.dense.step import DenseCost as DenseCost
from cost_models.dense.step import dense_cost as dense_cost
from cost_models.dense.step import dense_costs as dense_costs
from cost_models.dense.step import dense_phase_s as dense_phase_s
