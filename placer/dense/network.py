"""Matrix products of a dense part beside given tables."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from placer.dense.layers import DenseLayers
from placer.tables import Table

Part = Literal["bottom", "projection", "cross", "top"]

FLOAT_BYTES = 4
_FLOPS_PER_MAC = 6
_MATH_BYTES = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer, or one of the two matrices of a cross layer."""

    # Columns.
    inputs: int
    outputs: int
    part: Part
    bias: bool = True  # Whether it adds a bias.
    is_first: bool = False  # Whether its inputs are dense features, which need no gradient.

    @property
    def parameters(self) -> int:
        """Weights, and biases where it has them."""
        return (self.inputs + self.bias) * self.outputs

    @property
    def macs_per_sample(self) -> int:
        """Multiply-accumulates of the forward pass of one sample."""
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True)
class DenseNetwork:
    """The products of a dense part, in the order of the forward pass.

    >>> from placer.workloads import named_workload
    >>> tables = [profile.table for profile in named_workload("criteo-kaggle")]
    >>> layers = DenseLayers(top=(512, 256, 1), bottom=(512, 256, 64, 16), dense_features=13)
    >>> network = DenseNetwork.of(layers, tables)
    >>> [product.inputs for product in network.products if product.part == "top"]
    [367, 512, 256]
    """

    layers: DenseLayers
    products: tuple[Product, ...]
    vectors: int  # Vectors that interact: one for each feature, and the bottom MLP's output.
    vector_columns: int  # Columns of all of them together.
    # Multiply-accumulates of the interaction of a sample that are not in `products`.
    interaction_macs: int

    @classmethod
    def of(cls, layers: DenseLayers, tables: Iterable[Table]) -> "DenseNetwork":
        """Return the network over tables' features, each a vector of its table's width.

        Vectors that are to be multiplied pair by pair have the width of the bottom MLP's output,
        or of the widest table where there is no bottom MLP. Features of other widths are projected
        to it by matrices without biases, as in mixed dimension embeddings (Ginart et al. 2019,
        arXiv:1909.11810).
        """
        widths = [table.dim for table in tables for _ in table.features]
        bottom = layers.bottom[-1] if layers.bottom else layers.dense_features
        products = _mlp((layers.dense_features, *layers.bottom), "bottom")
        columns, vectors, macs = sum(widths) + bottom, len(widths) + (bottom > 0), 0
        if layers.interaction == "dot":
            dim = layers.bottom[-1] if layers.bottom else max(widths, default=1)
            products += [
                Product(width, dim, "projection", False) for width in widths if width != dim
            ]
            if layers.dense_features and not layers.bottom:
                products.append(Product(bottom, dim, "projection", False))
            columns, macs = vectors * dim, vectors**2 * dim
            top = (dim if bottom else 0) + vectors * (vectors - 1) // 2
        elif layers.interaction == "cross":
            products += _crosses(layers, columns)
            macs, top = layers.cross_layers * columns, columns
        else:
            top = math.ceil(sum(widths) / layers.concat_stride) + bottom
        products += _mlp((max(1, top), *layers.top), "top")
        return cls(layers, tuple(products), vectors, columns, macs)

    @property
    def macs_per_sample(self) -> int:
        """Multiply-accumulates of the forward pass of one sample, interaction included."""
        return sum(product.macs_per_sample for product in self.products) + self.interaction_macs

    @property
    def flops_per_sample(self) -> int:
        """Floating-point operations of a training step of one sample.

        Two for each multiply-accumulate of the forward pass, and of the two products that give
        the gradients of the weights and of the inputs. Of the bottom MLP's first layer, whose
        inputs need no gradient, this counts a third too much.
        """
        return _FLOPS_PER_MAC * self.macs_per_sample

    @property
    def parameters(self) -> int:
        """Trained numbers."""
        return sum(product.parameters for product in self.products)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters, in float32; as many of gradients."""
        return self.parameters * FLOAT_BYTES

    @property
    def value_bytes(self) -> int:
        """Bytes of one activation."""
        return _MATH_BYTES[self.layers.math]

    @property
    def input_bytes_per_sample(self) -> int:
        """Dense features and label of one sample, in float32."""
        return (self.layers.dense_features + 1) * FLOAT_BYTES

    @property
    def interaction_columns(self) -> int:
        """Values of a sample that the interaction writes: vectors side by side, and products."""
        if self.layers.interaction == "dot":
            top = next(product.inputs for product in self.products if product.part == "top")
            return self.vector_columns + self.vectors**2 + top
        if self.layers.interaction == "cross":
            return (1 + 2 * self.layers.cross_layers) * self.vector_columns
        return self.vector_columns + math.ceil(self.vector_columns / self.layers.concat_stride)


def _mlp(widths: tuple[int, ...], part: Part) -> list[Product]:
    return [
        Product(inputs, outputs, part, is_first=part == "bottom" and number == 0)
        for number, (inputs, outputs) in enumerate(pairwise(widths))
    ]


def _crosses(layers: DenseLayers, columns: int) -> list[Product]:
    if not layers.cross_rank:
        return [Product(columns, columns, "cross")] * layers.cross_layers
    narrow = Product(columns, layers.cross_rank, "cross", False)
    return [narrow, Product(layers.cross_rank, columns, "cross")] * layers.cross_layers
