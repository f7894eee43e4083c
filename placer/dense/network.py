"""Matrix products of a dense part beside given tables, and the memory that they take."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from placer.dense.layers import DenseLayers
from placer.tables import Table

Part = Literal["bottom", "projection", "cross", "top"]

FLOAT_BYTES = 4
_FLOPS_PER_MAC = 6
_MATH_BYTES = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}
_STATES = {"sgd": 0, "adagrad": 1, "adam": 2}


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


@dataclass(frozen=True, slots=True)
class DenseMemory:
    """Bytes of a dense part on each GPU."""

    # Of the parameters, of their gradients and of their optimizer's state, in float32; half
    # precision has copies of the parameters beside them.
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    bucket_bytes: int  # Copies of the gradients that are summed over the GPUs; 0 on a single one.
    # Inputs, activations and their gradients when they take most. Pooled embeddings and their
    # gradients are not among them: buffers of the embeddings have these.
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them at once."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.state_bytes
            + self.bucket_bytes
            + self.activation_bytes
        )


def dense_memory(network: DenseNetwork, samples: int, gpus: int = 1) -> DenseMemory:
    """Return memory on each of `gpus` GPUs, for its `samples` samples of a step.

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
        weights * _STATES[network.layers.optimizer],
        weights if gpus > 1 else 0,
        samples * inputs_bytes,
    )


def pass_bytes(network: DenseNetwork, samples: int) -> tuple[int, int]:
    """Activations and gradients of parameters that exist at once at most, forward and backward.

    In the backward pass the last layers' gradients are there while activations of the first still
    are.
    """
    forward, backward = _values(network)
    top = [one for one in network.products if one.part == "top"]
    after = [FLOAT_BYTES * sum(one.parameters for one in top[place:]) for place in range(len(top))]
    each, given = network.value_bytes * samples, samples * network.input_bytes_per_sample
    gradients = [values * each + after[place] for values, place in backward]
    return given + forward * each, given + max(gradients)


def _values(network: DenseNetwork) -> tuple[int, list[tuple[int, int]]]:
    """Activations and gradients of one sample that exist at once.

    A layer keeps its input for the backward pass, and its activation the output, which is the next
    one's input. They exist at most

    * in the forward pass, where a layer of the top MLP has its output before and after the
      activation, beside what the interaction has not let go of yet;
    * in the backward pass of such a layer, where its output and the gradient before and after the
      activation exist, or the gradients of its output and of its input;
    * or in the backward pass of the interaction.

    As PyTorch runs `placer.training.Dlrm`; of ``cross``, as TorchRec's low-rank cross net; of
    ``concat`` with means, as a pooling that keeps its input. Returns the largest number in the
    forward pass, and for each point of the backward pass their number and the first layer of the
    top MLP whose parameters have gradients by then.
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
    """Return how many values an interaction keeps, and needs besides in each pass."""
    layers, columns = network.layers, network.vector_columns
    if layers.interaction == "dot":
        squares = network.vectors**2
        pairs = network.vectors * (network.vectors - 1) // 2
        # Backward: gradients of all products, and of the vectors as left and as right factor.
        return columns, squares + pairs, squares + 2 * columns
    if layers.interaction == "cross":
        # Of each layer its product with the weights and its input; the last result is the top's
        # input. Backward: gradients of the result, of the product and of the first input.
        return layers.cross_layers * (2 * columns + layers.cross_rank), 0, 2 * columns
    if layers.concat_stride == 1:
        return 0, 0, top_inputs
    embedded = columns - (layers.bottom[-1] if layers.bottom else layers.dense_features)
    return embedded, 0, embedded + top_inputs
