"""The tables of a TorchRec model, by name. Importing this needs torchrec."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_configs import DataType, PoolingType

from placer.errors import PlanMismatchError
from placer.tables import DType, Feature, OptimizerName, Pooling, Table

DTYPES: dict[Any, DType] = {
    DataType.FP32: "float32",
    DataType.FP16: "float16",
    DataType.BF16: "bfloat16",
}

OPTIMIZERS: dict[str, OptimizerName] = {
    "SGD": "sgd",
    "Adagrad": "adagrad",
    "RowWiseAdagrad": "rowwise_adagrad",
    "Adam": "adam",
    "SparseAdam": "adam",
}
"""Ours for the class names of torch.optim and torchrec.optim."""


@dataclass(frozen=True, slots=True)
class TableOfModel:
    """A table of a TorchRec module."""

    path: str  # The module's path in the model, empty if it is the model.
    config: Any
    weight: Any
    pooled: bool

    @property
    def optimizer(self) -> str | None:
        """Class name of the optimizer that updates the table in its backward pass, if any."""
        classes = getattr(self.weight, "_optimizer_classes", None)
        return classes[0].__name__ if classes else None

    def as_table(self, optimizer: OptimizerName, pooling_factors: dict[str, float]) -> Table:
        """Return the table in our words; `optimizer` is that of tables whose module tells none."""
        config = self.config
        if config.data_type not in DTYPES:
            raise PlanMismatchError(
                f"table {config.name!r} is of {config.data_type}; plans know "
                f"{', '.join(DTYPES.values())}"
            )
        name = self.optimizer
        if name is not None and name not in OPTIMIZERS:
            raise PlanMismatchError(
                f"table {config.name!r} is updated by {name}; plans know {', '.join(OPTIMIZERS)}"
            )
        pooling: Pooling = "none"
        if self.pooled:
            pooling = "mean" if config.pooling == PoolingType.MEAN else "sum"
        return Table(
            config.name,
            config.num_embeddings,
            config.embedding_dim,
            DTYPES[config.data_type],
            optimizer if name is None else OPTIMIZERS[name],
            tuple(
                Feature(feature, pooling_factors.get(feature, 1.0), pooling=pooling)
                for feature in config.feature_names
            ),
        )


def tables_of(model: nn.Module) -> dict[str, TableOfModel]:
    """Return the tables of a model's embedding modules, by name, in the model's order."""
    tables: dict[str, TableOfModel] = {}
    for path, module in collections_of(model):
        pooled = isinstance(module, EmbeddingBagCollection)
        configs = module.embedding_bag_configs() if pooled else module.embedding_configs()
        weights = module.embedding_bags if pooled else module.embeddings
        for config in configs:
            if config.name in tables:
                raise PlanMismatchError(
                    f"two tables of the model are called {config.name!r}, in "
                    f"{tables[config.name].path!r} and {path!r}; plans know tables by their names"
                )
            weight = weights[config.name].weight
            tables[config.name] = TableOfModel(path, config, weight, pooled)
    return tables


def collections_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Path and module of each embedding collection of a model."""
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            yield path, module
