"""Memory of a dense part: parameters and what goes with them, and activations at their most."""

from dataclasses import dataclass
from itertools import accumulate

from placer.dense.network import FLOAT_BYTES, DenseNetwork

_STATES = {"sgd": 0, "adagrad": 1, "adam": 2}


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

    >>> from placer.dense import DenseLayers
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

    As PyTorch runs `placer.training.dlrm.Dlrm`; of ``cross``, as TorchRec's low-rank cross net; of
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
