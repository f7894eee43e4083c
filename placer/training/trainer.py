"""One model in training: embeddings, a DLRM on top, and the optimizers of both."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from placer.data.log import Chunk
from placer.errors import DataError, PlacerError, ProblemError
from placer.executor import BagBatch
from placer.plan.plan import Plan
from placer.training.config import TrainConfig
from placer.training.dlrm import Dlrm


class Embeddings(Protocol):
    """What `PlacedEmbeddings` and `UnplacedEmbeddings` have in common."""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Features, in the order that batches must follow."""
        ...

    def __call__(self, batch: BagBatch) -> Mapping[str, Tensor]:
        """Pooled rows by feature, shape (samples, dim)."""
        ...


class Trainer:
    """Takes steps and makes predictions with one set of embeddings.

    Parameters
    ----------
    embeddings : Embeddings
    plan : Plan
        Says which features there are and how wide their tables are.
    dense_columns : int
        Numeric columns of the log.
    config : TrainConfig
    embedding_optimizers : sequence of torch.optim.Optimizer
        Of embeddings that do not update themselves in the backward pass.

    Raises
    ------
    ProblemError
        If a feature is not pooled: the model needs one vector for each sample.
    """

    def __init__(
        self,
        embeddings: Embeddings,
        plan: Plan,
        dense_columns: int,
        config: TrainConfig,
        embedding_optimizers: Sequence[torch.optim.Optimizer] = (),
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
        self.optimizer = _make_optimizer(config, self.model)
        self._optimizers = [self.optimizer, *embedding_optimizers]
        self._loss = nn.BCEWithLogitsLoss()

    def step(self, chunk: Chunk) -> Tensor:
        """Train on a batch; its mean log loss before the update, a scalar.

        Raises
        ------
        DataError
            If the batch has no labels, or one that is not within 0 to 1.
        """
        labels = torch.tensor(labels_of(chunk), device=self.device)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self._loss(self._logits(chunk), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in self._optimizers:
            optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def predict(self, chunk: Chunk) -> npt.NDArray[np.float32]:
        """Logits of a batch, shape (samples,); nothing is trained."""
        logits: npt.NDArray[np.float32] = self._logits(chunk).cpu().numpy()
        return logits

    def dense_state(self) -> dict[str, Tensor]:
        """Weights of the DLRM and the state of its optimizer, flat."""
        state = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            for key, tensor in values.items():
                state[f"optimizer.{index}.{key}"] = tensor
        return state

    def load_dense_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `dense_state` gave."""
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

    def _logits(self, chunk: Chunk) -> Tensor:
        batch = BagBatch.from_chunk(chunk, self.embeddings.feature_names)
        if self.device.type != "cpu":
            batch = replace(
                batch,
                ids=batch.ids.to(self.device),
                offsets=batch.offsets.to(self.device),
                weights=None if batch.weights is None else batch.weights.to(self.device),
            )
        dense = torch.from_numpy(np.ascontiguousarray(chunk.dense)).to(self.device)
        logits: Tensor = self.model(dense, self.embeddings(batch))
        return logits


def usable_device(name: str) -> torch.device:
    """The device of that name, of which this machine and this PyTorch are capable.

    Raises
    ------
    PlacerError
        If there is no such device here.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # What PyTorch raises depends on how it was built: an AssertionError where CUDA is left out.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise PlacerError(f"device {name!r} cannot be used here: {reason}; use cpu") from error
    return device


def labels_of(chunk: Chunk) -> npt.NDArray[np.float32]:
    """Labels of a batch, shape (samples,).

    Raises
    ------
    DataError
        If there are none, or one is not within 0 to 1.
    """
    if chunk.labels is None:
        raise DataError("the log has no labels to train on; name its label column")
    labels = np.ascontiguousarray(chunk.labels, dtype=np.float32)
    wrong = ~((labels >= 0) & (labels <= 1))
    if wrong.any():
        raise DataError(
            f"a label is {labels[wrong][0]}, which is neither 0 nor 1; name the label column"
        )
    return labels


def _make_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    parameters = model.parameters()
    match config.optimizer:
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr=config.lr)
        case "adam":
            return torch.optim.Adam(parameters, lr=config.lr)
        case "sgd":
            return torch.optim.SGD(parameters, lr=config.lr)
