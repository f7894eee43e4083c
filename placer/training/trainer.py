"""Train the bundled model, DLRM (Naumov et al. 2019, arXiv:1906.00091), step by step."""

import contextlib
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from placer.data.log import Chunk
from placer.errors import PlacerError, ProblemError
from placer.executor import BagBatch, Embeddings, PreparedBatch, UnplacedEmbeddings
from placer.executor.backends import usable_device
from placer.executor.distributed import ShardedBatch
from placer.executor.distributed.collectives import rank_lost
from placer.plan.plan import Plan
from placer.training.config import Activation, TrainConfig
from placer.training.reading import dense_of

_ACTIVATIONS: Mapping[Activation, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU}

AnyBatch = BagBatch | PreparedBatch | ShardedBatch
"""Lookups of a batch, as read or already prepared by look-ahead."""


class Dlrm(nn.Module):
    """Bottom MLP over the dense columns, dot interaction with the embeddings, top MLP.

    With x the bottom MLP's output and e_f the pooled embedding of feature f, the logit is
    ``top([x, ⟨u, v⟩ for all pairs u ≠ v of x, e_1, …, e_F])``. The embeddings are not part of this
    module, so it trains in the same way on placed and on unplaced embeddings.

    `feature_dims` has the width of each feature's pooled embedding, in the model's order. `dim` is
    the width of all vectors, by default the widest feature's. Embeddings of other widths are
    projected to it by a linear map without bias (Ginart et al. 2019, arXiv:1909.11810). Without
    dense columns, x is a learned vector.

    `bottom` and `top` are the widths of hidden layers. Initial weights are normal with variance 2 /
    (inputs + outputs), as in the reference implementation. The caller's random state is not
    changed. docs/training.md says how this differs from the paper. Raises ProblemError if there is
    no feature, or a width is not positive.
    """

    def __init__(
        self,
        feature_dims: Mapping[str, int],
        dense_columns: int,
        *,
        dim: int | None = None,
        bottom: Sequence[int] = (64, 32),
        top: Sequence[int] = (64, 32),
        activation: Activation = "relu",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not feature_dims:
            raise ProblemError("a DLRM needs at least one categorical feature")
        widths = [*feature_dims.values(), *bottom, *top, *([] if dim is None else [dim])]
        if min(widths) < 1:
            raise ProblemError(f"widths of tables and layers must be positive, not {min(widths)}")
        self.feature_names = tuple(feature_dims)
        self.dense_columns = dense_columns
        self.dim = dim if dim is not None else max(feature_dims.values())
        vectors = len(feature_dims) + 1
        generator = torch.Generator().manual_seed(seed)
        active = _ACTIVATIONS[activation]
        if dense_columns:
            self.bottom = _mlp([dense_columns, *bottom, self.dim], generator, active)
            self.bottom.append(active())
        else:
            start = torch.randn(self.dim, generator=generator) / math.sqrt(self.dim)
            self.constant = nn.Parameter(start)
        # A list, because names of features may hold dots, which names of modules may not.
        other = [name for name, width in feature_dims.items() if width != self.dim]
        self.projections = nn.ModuleList(
            _linear(feature_dims[name], self.dim, generator, bias=False) for name in other
        )
        self._projection_of = {name: position for position, name in enumerate(other)}
        pairs = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("pairs", pairs[0] * vectors + pairs[1], persistent=False)
        self.top = _mlp([self.dim + pairs.shape[1], *top, 1], generator, active)

    def forward(self, dense: Tensor, pooled: Mapping[str, Tensor]) -> Tensor:
        """Return logits of a batch, float32, shape (samples,).

        `dense` has the log's values, with NaN for missing ones (see `scale_dense`), shape (samples,
        dense_columns). `pooled` has a tensor of shape (samples, width) for each feature.
        """
        if self.dense_columns:
            x = self.bottom(scale_dense(dense))
        else:
            x = self.constant.expand(dense.shape[0], -1)
        vectors = [x]
        for name in self.feature_names:
            vector = pooled[name].float()
            position = self._projection_of.get(name)
            vectors.append(vector if position is None else self.projections[position](vector))
        stacked = torch.stack(vectors, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        assert isinstance(self.pairs, Tensor)
        crossed = products.index_select(1, self.pairs)
        logits: Tensor = self.top(torch.cat([x, crossed], dim=1)).squeeze(1)
        return logits


def scale_dense(dense: Tensor) -> Tensor:
    """Return sign(x) · log(1 + |x|), and 0 for missing values.

    Counts span many magnitudes, so the DLRM paper's preprocessing takes the logarithm. The sign
    extends it to the few negative values of real logs.
    """
    return torch.nan_to_num(dense.sign() * dense.abs().log1p(), nan=0.0)


def _mlp(
    widths: Sequence[int], generator: torch.Generator, active: type[nn.Module]
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [_linear(inputs, outputs, generator), active()]
    return nn.Sequential(*layers[:-1])


def _linear(
    inputs: int, outputs: int, generator: torch.Generator, *, bias: bool = True
) -> nn.Linear:
    # On the meta device, torch does not draw initial weights from the global random state.
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.normal_(0, math.sqrt(2 / (inputs + outputs)), generator=generator)
        if bias:
            layer.bias.normal_(0, math.sqrt(1 / outputs), generator=generator)
    return layer


class Trainer:
    """Takes steps and makes predictions with one set of embeddings.

    `world` ranks train together. Each uses its own part of each batch, and all have the same MLPs.
    `embedding_optimizers` update embeddings that do not update themselves in the backward pass.

    Raises ProblemError if a feature is not pooled: the model needs one vector for each sample.
    Raises PlacerError if there is no such device, or no such backend of `torch.compile`.
    """

    def __init__(
        self,
        embeddings: Embeddings | UnplacedEmbeddings,
        plan: Plan,
        dense_columns: int,
        config: TrainConfig,
        embedding_optimizers: Sequence[torch.optim.Optimizer] = (),
        world: int = 1,
        process_group: "dist.ProcessGroup | None" = None,
    ) -> None:
        dims: dict[str, int] = {}
        for table in plan.tables:
            for feature in table.features:
                if feature.pooling == "none":
                    raise ProblemError(
                        f"feature {feature.name!r} has pooling 'none', and a DLRM needs one "
                        "vector for each sample; plan it with sum, mean or max"
                    )
                dims[feature.name] = table.dim
        self.embeddings = embeddings
        self.device = usable_device(config.device)
        self.model = Dlrm(
            {name: dims[name] for name in embeddings.feature_names},
            dense_columns,
            dim=config.dim,
            bottom=config.bottom_mlp,
            top=config.top_mlp,
            activation=config.activation,
            seed=config.seed,
        ).to(self.device)
        self._world = world
        # Shares its weights with `model`, which checkpoints hold.
        self._scores = _scores(self.model, config.compile, self.device, world, process_group)
        self._amp = None if config.amp is None else getattr(torch, config.amp)
        self.optimizer = _make_optimizer(config, self.model)
        self._optimizers = [self.optimizer, *embedding_optimizers]
        self._loss = nn.BCEWithLogitsLoss()

    def step(
        self, lookups: AnyBatch, dense: Tensor, labels: Tensor, samples: int | None = None
    ) -> Tensor:
        """Train on a batch, and return its mean log loss before the update, a scalar.

        Dense features have shape (samples, dense_columns), labels (samples,). Pinned tensors are
        copied to a GPU without waiting. Several ranks pass `samples`, the number of samples of all
        ranks. Then the result is this rank's share of the mean loss: shares of all ranks add up to
        the mean loss. Raises BackendError if a rank is lost.
        """
        labels = labels.to(self.device, non_blocking=True)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        logits = self._logits(lookups, dense)
        if self._world == 1 or samples is None:
            loss: Tensor = self._loss(logits, labels)
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum") / samples
            self._backward(loss)
        for optimizer in self._optimizers:
            optimizer.step()
        return loss.detach()

    def _backward(self, loss: Tensor) -> None:
        """Run backward through loss × ranks: DDP averages gradients, but shares need a sum."""
        try:
            (loss * self._world).backward()  # type: ignore[no-untyped-call]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            doing = "adding up the gradients of dense layers"
            raise rank_lost(dist.get_rank(), range(self._world), doing, error) from error

    @torch.no_grad()
    def predict(self, chunk: Chunk) -> npt.NDArray[np.float32]:
        """Return logits of a batch, shape (samples,), without training."""
        lookups = BagBatch.from_chunk(chunk, self.embeddings.feature_names)
        logits: npt.NDArray[np.float32] = self._logits(lookups, dense_of(chunk)).cpu().numpy()
        return logits

    def dense_state(self) -> dict[str, Tensor]:
        """Return the DLRM's weights and its optimizer's state in one flat dict."""
        state = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            for key, tensor in values.items():
                state[f"optimizer.{index}.{key}"] = tensor
        return state

    def load_dense_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `dense_state` returned."""
        weights: dict[str, Tensor] = {}
        slots: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in state.items():
            kind, rest = name.split(".", 1)
            if kind == "model":
                weights[rest] = tensor
            else:
                index, key = rest.split(".", 1)
                slots[int(index)][key] = tensor
        self.model.load_state_dict(weights)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": dict(slots), "param_groups": groups})

    def _logits(self, lookups: AnyBatch, dense: Tensor) -> Tensor:
        """Return logits of a batch: float32, shape (samples,)."""
        if isinstance(lookups, BagBatch):
            lookups = lookups.to(self.device, non_blocking=True)
        pooled = self.embeddings(lookups)
        dense = dense.to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, self._amp, enabled=self._amp is not None):
            logits: Tensor = self._scores(dense, pooled)
        return logits.float()


_OPTIMIZERS = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}

_IMPORT_COMPILER = ("add_param_group", "state_dict", "zero_grad", "load_state_dict", "step")
"""Optimizer methods whose torch wrappers import ``torch._dynamo``, which takes two seconds."""

_MULTIPLY_ADDS_PER_S = 2e10
"""Multiply-adds a second of a core in MLPs. Measured with 64 to 1,024 columns: 1.8e10 to 3.2e10."""

_LOOKUPS_PER_S = 4e6
"""Lookups a second of one core, with the update of the row, measured with 16 columns."""


def step_work_s(model: nn.Module, plan: Plan, samples: int) -> float:
    """Return seconds that one core takes for a step of `samples` samples, to choose threads."""
    weights = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    lookups = samples * sum(table.lookups_per_sample for table in plan.tables)
    # Factor 3: forward, gradients of inputs, gradients of weights.
    return 3 * samples * weights / _MULTIPLY_ADDS_PER_S + lookups / _LOOKUPS_PER_S


def _make_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    kind = _OPTIMIZERS[config.optimizer]
    # The wrappers turn the compiler off. Steps of this optimizer are never compiled.
    plain = {name: inspect.unwrap(getattr(kind, name)) for name in _IMPORT_COMPILER}
    plain["step"] = torch.no_grad()(plain["step"])  # As the wrapper does.
    optimizer: torch.optim.Optimizer = type(kind.__name__, (kind,), plain)(
        model.parameters(), lr=config.lr
    )
    return optimizer


def _scores(
    model: Dlrm,
    compiler: str | None,
    device: torch.device,
    world: int,
    process_group: "dist.ProcessGroup | None",
) -> Callable[[Tensor, Mapping[str, Tensor]], Tensor]:
    """Return the model to call: compiled if asked for, in DDP if there are several ranks."""
    called: nn.Module = model
    if compiler is not None:
        with _compiler_errors(compiler):
            called = cast(nn.Module, torch.compile(model, backend=compiler))
    if world > 1:
        gpus = [device] if device.type == "cuda" else None
        with warnings.catch_warnings():  # Newer PyTorch warns that a name changed.
            warnings.simplefilter("ignore", FutureWarning)
            # Buffers are constants, so do not send them in every step.
            called = DistributedDataParallel(
                called, gpus, broadcast_buffers=False, process_group=process_group
            )
    # Some errors only come with the first batch, such as a missing compiler.
    return called if compiler is None else _compiler_errors(compiler)(called.__call__)


@contextlib.contextmanager
def _compiler_errors(backend: str) -> Iterator[None]:
    """Turn errors of `torch.compile` into PlacerError."""
    from torch._dynamo.exc import TorchDynamoException  # Slow to import, and seldom wanted.

    try:
        yield
    except TorchDynamoException as error:
        reason = str(error).strip().splitlines()[0]
        raise PlacerError(
            f"torch.compile with {backend!r} failed: {reason}; train without it"
        ) from error
