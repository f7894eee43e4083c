"""Describe the dense part of a model, which each GPU trains beside embeddings: docs/dense.md."""

from placer.dense.layers import DENSE_MATH as DENSE_MATH
from placer.dense.layers import Dense as Dense
from placer.dense.layers import DenseLayers as DenseLayers
from placer.dense.layers import DenseMath as DenseMath
from placer.dense.layers import MeasuredDense as MeasuredDense
from placer.dense.network import DenseMemory as DenseMemory
from placer.dense.network import DenseNetwork as DenseNetwork
from placer.dense.network import Product as Product
from placer.dense.network import dense_memory as dense_memory
