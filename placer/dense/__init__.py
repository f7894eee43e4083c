"""The dense part of a model: what each GPU trains beside the embeddings. See docs/dense.md."""

from placer.dense.layers import (
    DENSE_MATH,
    INTERACTIONS,
    Dense,
    DenseLayers,
    DenseMath,
    DenseOptimizer,
    Interaction,
    MeasuredDense,
)
from placer.dense.memory import DenseMemory, dense_memory
from placer.dense.network import DenseNetwork, Product

__all__ = [
    "DENSE_MATH",
    "INTERACTIONS",
    "Dense",
    "DenseLayers",
    "DenseMath",
    "DenseMemory",
    "DenseNetwork",
    "DenseOptimizer",
    "Interaction",
    "MeasuredDense",
    "Product",
    "dense_memory",
]
