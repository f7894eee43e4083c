"""Find the tables of a TorchRec model, and replace collections by ones with split tables.

Importing this needs torchrec.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from placer.adapters.torchrec.sharding import Part
from placer.errors import PlanMismatchError
from placer.executor.distributed.table_routes import RankOrder
from placer.plan.plan import Ranks
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
"""Placer's names of optimizers, by their class names in torch.optim and torchrec.optim."""


@dataclass(frozen=True, slots=True)
class TableOfModel:
    """A table of a TorchRec module."""

    path: str  # The module's path in the model, empty if it is the model.
    config: Any
    weight: Any
    pooled: bool

    @property
    def optimizer(self) -> str | None:
        """Class name of the optimizer that updates the table in the backward pass, or None."""
        classes = getattr(self.weight, "_optimizer_classes", None)
        return classes[0].__name__ if classes else None

    def as_table(self, optimizer: OptimizerName, pooling_factors: dict[str, float]) -> Table:
        """Return the table as a `Table`; `optimizer` applies if the module has none of its own."""
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
        pooled, configs, weights = _contents(module)
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
    """Yield the path and the module of each embedding collection of a model."""
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            yield path, module


def _contents(collection: Any) -> tuple[bool, Sequence[Any], Any]:
    """Return whether a collection pools, its tables' configs, and the modules of their weights."""
    if isinstance(collection, EmbeddingBagCollection):
        return True, collection.embedding_bag_configs(), collection.embedding_bags
    return False, collection.embedding_configs(), collection.embeddings


class _Reading(NamedTuple):
    """How a feature reads a table: its parts, empty if it is whole, and names of their outputs."""

    feature: str
    config: Any
    parts: tuple[Part, ...]
    outputs: list[str]


class SplitCollection(nn.Module):
    """An `EmbeddingBagCollection` or `EmbeddingCollection` with tables in parts.

    It takes and returns what the original collection did. Ids of split tables become row ranks,
    and each lookup goes to the part that has its row. Then the parts' results are joined: sums are
    added, means are divided by the length of the whole bag, and unpooled rows return to the order
    of their lookups. Selecting the lookups of a part waits for the device.

    `collection` is the original. `parts` and `ranks` have the parts and the row order of each table
    that is split, by name. TorchRec shards `placed_tables`, a collection of the same kind.

    Raises PlanMismatchError if a table cannot be split: it is weighted and pooled by mean, or an
    optimizer is already applied to it.
    """

    def __init__(
        self,
        collection: Any,
        parts: Mapping[str, Sequence[Part]],
        ranks: Mapping[str, Ranks],
    ) -> None:
        super().__init__()
        self.pooled, configs, weights = _contents(collection)
        more = (collection.is_weighted(),) if self.pooled else ()
        if not self.pooled and collection.need_indices():
            raise PlanMismatchError(
                "an EmbeddingCollection that returns its indices would return ranks; its tables "
                "cannot be split"
            )
        self.parts = {name: tuple(own) for name, own in parts.items()}
        self.ranks = dict(ranks)
        self._orders: dict[tuple[str, torch.device], RankOrder] = {}
        self._names = [n for own in get_embedding_names_by_table(configs) for n in own]
        self._widths = [c.embedding_dim for c in configs for _ in c.feature_names]
        placed: list[Any] = []
        for config in configs:
            own = self.parts.get(config.name, ())
            if own and any(more) and config.pooling == PoolingType.MEAN:
                raise PlanMismatchError(
                    f"table {config.name!r} is weighted and pooled by mean; it cannot be split"
                )
            if own and getattr(weights[config.name].weight, "_optimizer_classes", None):
                raise PlanMismatchError(
                    f"table {config.name!r} has an optimizer in its backward pass already; split "
                    "tables before apply_optimizer_in_backward"
                )
            placed += [_part_config(config, part, self.pooled) for part in own] or [config]
        make = EmbeddingBagCollection if self.pooled else EmbeddingCollection
        self.placed_tables = make(placed, *more, device=next(collection.parameters()).device)
        names = zip(placed, get_embedding_names_by_table(placed), strict=True)
        names_of = {config.name: own for config, own in names}
        self._readings = [
            _Reading(feature, config, own, outputs)
            for config in configs
            for own in [self.parts.get(config.name, ())]
            for feature, *outputs in zip(
                config.feature_names,
                *(names_of[part.name] for part in own or [config]),
                strict=True,
            )
        ]

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Return what the original collection returns for these features."""
        if features.variable_stride_per_key():
            raise PlanMismatchError("split tables take batches of one size for all features")
        inputs = features.to_dict()
        taken: dict[str, JaggedTensor] = {}
        masks: list[list[Tensor]] = []  # For each reading and part, which lookups it has.
        for feature, config, parts, _ in self._readings:
            masks.append([])
            if not parts:
                taken[feature] = inputs[feature]
                continue
            ids, lengths = inputs[feature].values(), inputs[feature].lengths()
            weights = inputs[feature].weights_or_none()
            ranks = self._ranks_of(config.name, ids)
            bags = torch.arange(lengths.numel(), device=lengths.device)
            bag = torch.repeat_interleave(bags, lengths)
            for part in parts:
                mask = (ranks >= part.start) & (ranks < part.stop)
                taken[_feature_of(feature, part)] = JaggedTensor(
                    (ranks[mask] - part.start).to(ids.dtype),
                    None if weights is None else weights[mask],
                    torch.zeros_like(lengths).index_add_(0, bag, mask.to(lengths.dtype)),
                )
                masks[-1].append(mask)
        outputs = self.placed_tables(KeyedJaggedTensor.from_jt_dict(taken))
        if self.pooled:
            return self._pooled(outputs.to_dict(), inputs)
        rows = {}
        for name, reading, own in zip(self._names, self._readings, masks, strict=True):
            results = [outputs[output] for output in reading.outputs]
            if not own:
                (rows[name],) = results
                continue
            order = torch.cat([mask.nonzero().squeeze(1) for mask in own]).argsort()
            values = torch.cat([part.values() for part in results])[order]
            rows[name] = JaggedTensor(values, lengths=inputs[reading.feature].lengths())
        return rows

    def _ranks_of(self, table: str, ids: Tensor) -> Tensor:
        listed, key = self.ranks[table].listed, (table, ids.device)
        if not listed.size:
            return ids.long()
        if key not in self._orders:
            rows = max(part.stop for part in self.parts[table])
            self._orders[key] = RankOrder.of(listed, rows, ids.device)
        return self._orders[key].ranks_of(ids)

    def _pooled(
        self, outputs: Mapping[str, Tensor], inputs: Mapping[str, JaggedTensor]
    ) -> KeyedTensor:
        columns = []
        for feature, config, parts, names in self._readings:
            total = torch.stack([outputs[name] for name in names]).sum(0)
            if parts and config.pooling == PoolingType.MEAN:
                lengths = inputs[feature].lengths().clamp(min=1)
                total = total / lengths.unsqueeze(1).to(total.dtype)
            columns.append(total)
        return KeyedTensor(self._names, self._widths, torch.cat(columns, dim=1))


def _part_config(config: Any, part: Part, pooled: bool) -> Any:
    """Return the table's config for a part: the same initialization, but always pooled by sum."""
    return replace(
        config,
        name=part.name,
        num_embeddings=part.stop - part.start,
        feature_names=[_feature_of(feature, part) for feature in config.feature_names],
        weight_init_min=config.get_weight_init_min(),
        weight_init_max=config.get_weight_init_max(),
        **({"pooling": PoolingType.SUM} if pooled else {}),
    )


def _feature_of(feature: str, part: Part) -> str:
    return f"{feature}__{part.name}"
