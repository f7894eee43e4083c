"""Embedding collections whose tables are split, behind the interface that they had.

Importing this needs torchrec.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from placer.adapters.torchrec.parts import Part
from placer.errors import PlanMismatchError
from placer.plan.order import Ranks


class IdToRank(nn.Module):
    """A table's ids as ranks in a row order; only the ids that the order lists are kept.

    Parameters
    ----------
    ranks : Ranks
    """

    ascending: Tensor
    rank_of_ascending: Tensor

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        # Of the plan and not of the model: they are in no checkpoint.
        self.register_buffer("ascending", torch.from_numpy(ranks.ascending.copy()), False)
        self.register_buffer(
            "rank_of_ascending", torch.from_numpy(ranks.rank_of_ascending.copy()), False
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Ranks of `ids`, int64, of any shape."""
        count = self.ascending.numel()
        if not count:
            return ids.long()
        if self.ascending.device != ids.device:
            self.to(ids.device)
        below = torch.searchsorted(self.ascending, ids.long())
        at = below.clamp(max=count - 1)
        listed = self.ascending[at] == ids
        return torch.where(listed, self.rank_of_ascending[at], ids + (count - below))


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """How a feature reads a split table: its names in the parts, and where its result goes."""

    feature: str
    source: str
    names: tuple[str, ...]
    mean: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Chosen:
    """The lookups of a split feature: which part each reads."""

    lengths: Tensor
    masks: list[Tensor]


class SplitCollection(nn.Module):
    """An `EmbeddingBagCollection` or `EmbeddingCollection` with tables in parts.

    It takes and returns what the original did. Ids of split tables become ranks, each lookup
    goes to the part that has its row, and the parts' results are joined: sums are added,
    means divided by the length of the whole bag, rows sorted back into order. Selecting the
    lookups of a part waits for the device.

    Parameters
    ----------
    collection : EmbeddingBagCollection or EmbeddingCollection
        The original; its weights are copied unless they are on the meta device.
    parts : mapping of table name to Parts
        Of the tables that are not read as they are.
    ranks : mapping of table name to Ranks
        Of the same tables.

    Attributes
    ----------
    placed_tables : EmbeddingBagCollection or EmbeddingCollection
        What TorchRec shards.

    Raises
    ------
    PlanMismatchError
        If a table cannot be split: it is weighted and pooled by mean, or its optimizer has been
        applied already.
    """

    def __init__(
        self,
        collection: Any,
        parts: Mapping[str, Sequence[Part]],
        ranks: Mapping[str, Ranks],
    ) -> None:
        super().__init__()
        self.pooled = isinstance(collection, EmbeddingBagCollection)
        configs = (
            collection.embedding_bag_configs() if self.pooled else collection.embedding_configs()
        )
        weighted = self.pooled and collection.is_weighted()
        if not self.pooled and collection.need_indices():
            raise PlanMismatchError(
                "an EmbeddingCollection that returns its indices would return ranks; its tables "
                "cannot be split"
            )
        self.parts = {name: tuple(own) for name, own in parts.items()}
        self.ranks = dict(ranks)
        self.to_rank = nn.ModuleDict({name: IdToRank(own) for name, own in ranks.items()})
        self._names = [n for own in get_embedding_names_by_table(configs) for n in own]
        self._widths = [c.embedding_dim for c in configs for _ in c.feature_names]
        self._readings: list[_Reading | str] = []
        split: list[Any] = []
        for config in configs:
            split += self._split_config(collection, config, weighted)
        device = next(collection.parameters()).device
        if self.pooled:
            self.placed_tables = EmbeddingBagCollection(split, weighted, device)
        else:
            self.placed_tables = EmbeddingCollection(split, device)
        plain = list(get_embedding_names_by_table(split))
        self._name_of = {
            (config.name, feature): name
            for config, names in zip(split, plain, strict=True)
            for feature, name in zip(config.feature_names, names, strict=True)
        }
        self._sources = [config.name for config in configs for _ in config.feature_names]

    def _split_config(self, collection: Any, config: Any, weighted: bool) -> list[Any]:
        """The configurations of a table's parts; notes how its features are read."""
        own = self.parts.get(config.name)
        if own is None:
            self._readings += config.feature_names
            return [replace(config)]
        mean = self.pooled and config.pooling == PoolingType.MEAN
        _require_splittable(collection, config.name, mean and weighted)
        self._readings += [
            _Reading(feature, config.name, tuple(_feature_of(feature, part) for part in own), mean)
            for feature in config.feature_names
        ]
        return [_part_config(config, part, self.pooled) for part in own]

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """What the original collection returns of these features."""
        if features.variable_stride_per_key():
            raise PlanMismatchError("split tables take batches of one size for all features")
        taken, chosen = self._remap(features)
        outputs = self.placed_tables(taken)
        if self.pooled:
            return self._pooled(outputs.to_dict(), chosen)
        return self._unpooled(outputs, chosen)

    def _remap(
        self, features: KeyedJaggedTensor
    ) -> tuple[KeyedJaggedTensor, dict[tuple[str, str], _Chosen]]:
        """The features that `placed_tables` reads, and which part each split lookup went to."""
        inputs = features.to_dict()
        columns: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}
        chosen: dict[tuple[str, str], _Chosen] = {}
        for reading in self._readings:
            if isinstance(reading, str):
                own = inputs[reading]
                columns[reading] = own.values(), own.lengths(), own.weights_or_none()
                continue
            own = inputs[reading.feature]
            ids, lengths, weights = own.values(), own.lengths(), own.weights_or_none()
            ranks = self.to_rank[reading.source](ids)
            bag = torch.repeat_interleave(
                torch.arange(lengths.numel(), device=lengths.device), lengths
            )
            masks = []
            for part, name in zip(self.parts[reading.source], reading.names, strict=True):
                mask = (ranks >= part.start) & (ranks < part.stop)
                own_lengths = torch.zeros_like(lengths)
                own_lengths.index_add_(0, bag, mask.to(lengths.dtype))
                columns[name] = (
                    (ranks[mask] - part.start).to(ids.dtype),
                    own_lengths,
                    None if weights is None else weights[mask],
                )
                masks.append(mask)
            chosen[reading.source, reading.feature] = _Chosen(lengths, masks)
        weights_of = [weights for _, _, weights in columns.values() if weights is not None]
        return (
            KeyedJaggedTensor(
                keys=list(columns),
                values=torch.cat([values for values, _, _ in columns.values()]),
                lengths=torch.cat([lengths for _, lengths, _ in columns.values()]),
                weights=torch.cat(weights_of) if weights_of else None,
            ),
            chosen,
        )

    def _pooled(
        self, outputs: Mapping[str, Tensor], chosen: Mapping[tuple[str, str], _Chosen]
    ) -> KeyedTensor:
        columns = []
        for reading, source in zip(self._readings, self._sources, strict=True):
            if isinstance(reading, str):
                columns.append(outputs[self._name_of[source, reading]])
                continue
            results = self._results(reading, outputs)
            total = torch.stack(results).sum(0) if len(results) > 1 else results[0]
            if reading.mean:
                lengths = chosen[source, reading.feature].lengths.clamp(min=1)
                total = total / lengths.unsqueeze(1).to(total.dtype)
            columns.append(total)
        return KeyedTensor(
            keys=self._names, length_per_key=self._widths, values=torch.cat(columns, dim=1)
        )

    def _unpooled(
        self, outputs: Mapping[str, JaggedTensor], chosen: Mapping[tuple[str, str], _Chosen]
    ) -> dict[str, JaggedTensor]:
        rows = {}
        for name, reading, source in zip(self._names, self._readings, self._sources, strict=True):
            if isinstance(reading, str):
                rows[name] = outputs[self._name_of[source, reading]]
                continue
            own = chosen[source, reading.feature]
            order = torch.cat([mask.nonzero().squeeze(1) for mask in own.masks])
            values = torch.cat([part.values() for part in self._results(reading, outputs)])
            rows[name] = JaggedTensor(values=values[order.argsort()], lengths=own.lengths)
        return rows

    def _results(self, reading: _Reading, outputs: Mapping[str, Any]) -> list[Any]:
        return [
            outputs[self._name_of[part.name, name]]
            for part, name in zip(self.parts[reading.source], reading.names, strict=True)
        ]


def _require_splittable(collection: Any, name: str, weighted_mean: bool) -> None:
    tables = (
        collection.embedding_bags
        if isinstance(collection, EmbeddingBagCollection)
        else collection.embeddings
    )
    if weighted_mean:
        raise PlanMismatchError(
            f"table {name!r} is weighted and pooled by mean; it cannot be split"
        )
    if getattr(tables[name].weight, "_optimizer_classes", None):
        raise PlanMismatchError(
            f"table {name!r} has an optimizer in its backward pass already; split tables before "
            "apply_optimizer_in_backward"
        )


def _part_config(config: Any, part: Part, pooled: bool) -> Any:
    """The table's config for a part: initialized alike, and summed, whatever the pooling."""
    return replace(
        config,
        name=part.name,
        num_embeddings=max(1, part.stop - part.start),
        feature_names=[_feature_of(feature, part) for feature in config.feature_names],
        weight_init_min=config.get_weight_init_min(),
        weight_init_max=config.get_weight_init_max(),
        **({"pooling": PoolingType.SUM} if pooled else {}),
    )


def _feature_of(feature: str, part: Part) -> str:
    return f"{feature}__{part.name}"
