"""List the matrix products of a dense part for given tables, and the memory it takes."""

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from itertools import accumulate, pairwise
from typing import Literal

from placer.dense.layers import DenseLayers
from placer.tables import Table

Part = Literal["bottom", "projection", "cross", "top"]

FLOAT_BYTES = 4
_MATH_BYTES = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}
_STATES = {"sgd": 0, "adagrad": 1, "adam": 2}


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer, or one of the two matrices of a cross layer."""

    # Numbers of columns.
    inputs: int
    outputs: int
    part: Part
    bias: bool = True  # Whether the layer has a bias.
    is_first: bool = False  # Whether its inputs are dense features, which need no gradient.

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
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
    vectors: int  # Number of vectors: each feature's, and the bottom MLP's output.
    vector_columns: int  # Columns of all vectors together.
    # Multiply-accumulates of one sample's interaction that `products` does not have.
    interaction_macs: int

    @classmethod
    def of(cls, layers: DenseLayers, tables: Iterable[Table]) -> "DenseNetwork":
        """Return the network for tables' features; each gives a vector of its table's width.

        For ``dot``, all vectors have the width of the bottom MLP's output, or of the widest table
        without a bottom MLP. Other vectors are projected to this width by matrices without biases,
        as in mixed dimension embeddings (Ginart et al. 2019, arXiv:1909.11810).
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
        """Multiply-accumulates of the forward pass of one sample, with the interaction."""
        return sum(product.macs_per_sample for product in self.products) + self.interaction_macs

    @property
    def parameters(self) -> int:
        """Number of trained parameters."""
        return sum(product.parameters for product in self.products)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters in float32. Gradients take equally many."""
        return self.parameters * FLOAT_BYTES

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        return self.parameter_bytes * _STATES[self.layers.optimizer]

    @property
    def value_bytes(self) -> int:
        """Bytes of one activation."""
        return _MATH_BYTES[self.layers.math]

    @property
    def input_bytes_per_sample(self) -> int:
        """Bytes of the dense features and the label of one sample, in float32."""
        return (self.layers.dense_features + 1) * FLOAT_BYTES

    @property
    def interaction_columns(self) -> int:
        """Number of values that the interaction writes for a sample: vectors and products."""
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


@dataclass(frozen=True, slots=True)
class DenseMemory:
    """Bytes of a dense part on each GPU."""

    # Bytes of the parameters, of their gradients and of their optimizer's state, in float32. Half
    # precision adds copies of the parameters to `parameter_bytes`.
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    bucket_bytes: int  # Copies of gradients to sum over GPUs; 0 with one GPU.
    # Peak of inputs, activations and their gradients. Pooled embeddings and their gradients are in
    # the embeddings' buffers instead.
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """Sum of all these bytes."""
        return sum(astuple(self))


def dense_memory(network: DenseNetwork, samples: int, gpus: int = 1) -> DenseMemory:
    """Return the memory of a dense part on each of `gpus` GPUs, for `samples` samples a GPU.

    >>> from placer.workloads import named_workload
    >>> layers = DenseLayers(top=(512, 256, 1), bottom=(512, 256, 64, 16), dense_features=13)
    >>> tables = [profile.table for profile in named_workload("criteo-kaggle")]
    >>> memory = dense_memory(DenseNetwork.of(layers, tables), samples=2048)
    >>> memory.gradient_bytes, memory.activation_bytes
    (1903940, 30842880)
    """
    weights, copies = network.parameter_bytes, 0
    if network.value_bytes < FLOAT_BYTES:
        copies = network.parameters * network.value_bytes
    forward, backward = _values(network)
    most = max(forward, *(values for values, _ in backward))
    inputs_bytes = network.input_bytes_per_sample + most * network.value_bytes
    return DenseMemory(
        weights + copies,
        weights,
        network.state_bytes,
        weights if gpus > 1 else 0,
        samples * inputs_bytes,
    )


def pass_bytes(network: DenseNetwork, samples: int) -> tuple[int, int]:
    """Return peak bytes of activations and parameters' gradients, in forward and in backward.

    In the backward pass, gradients of the last layers exist while activations of the first layers
    are still needed.
    """
    forward, backward = _values(network)
    top = [one for one in network.products if one.part == "top"]
    after = [FLOAT_BYTES * sum(one.parameters for one in top[place:]) for place in range(len(top))]
    each, given = network.value_bytes * samples, samples * network.input_bytes_per_sample
    gradients = [values * each + after[place] for values, place in backward]
    return given + forward * each, given + max(gradients)


def _values(network: DenseNetwork) -> tuple[int, list[tuple[int, int]]]:
    """Count the values of one sample, activations and gradients, that exist at the same time.

    For the backward pass, a layer keeps its input, and its activation function keeps its output,
    the next layer's input. The peak is at one of these points:

    * In forward of a top MLP layer: its output before and after the activation function, beside
      what the interaction still holds.
    * In backward of such a layer: its output and the gradient before and after the activation
      function, or the gradients of its output and its input.
    * In backward of the interaction.

    Count as PyTorch runs `placer.training.Dlrm`, ``cross`` as TorchRec's low-rank cross net, and
    ``concat`` with means as a pooling that keeps its input. Returns the peak of the forward pass,
    and for each point of the backward pass its number of values and the first layer of the top MLP
    whose parameters already have gradients.
    """
    top = [one for one in network.products if one.part == "top"]
    bottom = sum(one.outputs for one in network.products if one.part == "bottom")
    kept, passing, interaction = _interaction_values(network, top[0].inputs)
    base, forward = bottom + kept, 0
    backward = [(base + top[0].inputs + interaction, 0)]
    inputs = accumulate(one.inputs for one in top)
    for place, (kept_inputs, one) in enumerate(zip(inputs, top, strict=True)):
        hidden = base + kept_inputs + 2 * one.outputs
        forward = max(forward, hidden + passing)
        if one is not top[-1]:
            backward.append((hidden + one.outputs, place + 1))
        backward.append((base + kept_inputs + one.outputs + one.inputs, place))
    return forward, backward


def _interaction_values(network: DenseNetwork, top_inputs: int) -> tuple[int, int, int]:
    """Return the values that an interaction keeps, and what else it needs in each pass."""
    layers, columns = network.layers, network.vector_columns
    if layers.interaction == "dot":
        squares = network.vectors**2
        pairs = network.vectors * (network.vectors - 1) // 2
        # Backward: gradients of all products, and of vectors as left and as right factor.
        return columns, squares + pairs, squares + 2 * columns
    if layers.interaction == "cross":
        # Each layer keeps its input and its product with the weights. The last result is the top
        # MLP's input. Backward: gradients of the result, of the product and of the first input.
        return layers.cross_layers * (2 * columns + layers.cross_rank), 0, 2 * columns
    if layers.concat_stride == 1:
        return 0, 0, top_inputs
    embedded = columns - (layers.bottom[-1] if layers.bottom else layers.dense_features)
    return embedded, 0, embedded + top_inputs
