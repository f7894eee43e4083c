"""A batch translated to what each arena has to read: slots, bags and where results go."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from placer.errors import DataError, PlanMismatchError
from placer.executor.bags import BagBatch
from placer.executor.layout import ArenaSpec, Layout, Strip
from placer.tables import Pooling, Table


@dataclass(frozen=True, slots=True)
class FeatureRead:
    """A feature, the table that it reads, and how.

    Lookups of id `padding_idx` are dropped; None drops nothing.
    """

    name: str
    table: str
    rows: int
    pooling: Pooling
    padding_idx: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One strip read by one feature: lookups and bags that lie side by side in an arena's step.

    Attributes
    ----------
    feature : int
    strip : Strip
    batch : (start, stop)
        The feature's lookups within the batch.
    lookups : (start, stop)
        The same lookups within the arena's step.
    bags : (start, stop)
        Bags within the arena's step: the samples', or one for each lookup.
    """

    feature: int
    strip: Strip
    batch: tuple[int, int]
    lookups: tuple[int, int]
    bags: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class ArenaStep:
    """What one step reads from one arena.

    Attributes
    ----------
    slots : int64, shape (lookups,)
    offsets : int64, shape (bags + 1,)
        Bag i sums the rows ``slots[offsets[i]:offsets[i + 1]]``.
    segments : tuple of Segment
        Cover all lookups and bags, in order.
    """

    slots: Tensor
    offsets: Tensor
    segments: tuple[Segment, ...]

    @property
    def bags(self) -> int:
        """Number of bags."""
        return self.offsets.numel() - 1

    def spread(self, per_lookup: Tensor | None) -> Tensor | None:
        """Values of the batch's lookups in the order of this arena's lookups."""
        if per_lookup is None or self._is_whole(per_lookup.numel()):
            return per_lookup
        return torch.cat([per_lookup[slice(*segment.batch)] for segment in self.segments])

    def _is_whole(self, lookups: int) -> bool:
        """Whether the arena reads the batch's lookups as they stand."""
        return self.slots.numel() == lookups and all(
            segment.batch == segment.lookups for segment in self.segments
        )


Translate = Callable[[Tensor, Sequence[FeatureRead], ArenaSpec, Sequence[Segment]], Tensor]


def feature_reads(
    tables: Sequence[Table], padding_idx: Mapping[str, int]
) -> tuple[FeatureRead, ...]:
    """The features of tables, in order.

    Raises
    ------
    PlanMismatchError
        If a feature is read from two tables, or padding is told of an unknown feature.
    """
    reads = tuple(
        FeatureRead(
            feature.name, table.name, table.rows, feature.pooling, padding_idx.get(feature.name)
        )
        for table in tables
        for feature in table.features
    )
    names = [read.name for read in reads]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise PlanMismatchError(
            f"features {twice} are read from more than one table; give each a name of its own"
        )
    unknown = sorted(set(padding_idx) - set(names))
    if unknown:
        raise PlanMismatchError(
            f"padding_idx names features {unknown}, which no table has; there are {names}"
        )
    return reads


def check_batch(batch: BagBatch, features: Sequence[FeatureRead]) -> None:
    """Raise `DataError` if a batch was not made for these features."""
    if batch.batch_size:
        held = (batch.offsets.numel() - 1) // batch.batch_size
        if held != len(features):
            raise DataError(
                f"the batch holds {held} features, the plan {len(features)}; build it with "
                "order=embeddings.feature_names"
            )


def drop_padding(batch: BagBatch, features: Sequence[FeatureRead]) -> tuple[BagBatch, Tensor]:
    """The batch without padded lookups, and which lookups were kept."""
    keep = torch.ones(batch.ids.numel(), dtype=torch.bool, device=batch.ids.device)
    for feature, (start, stop) in zip(features, feature_bounds(batch, features), strict=True):
        if feature.padding_idx is not None:
            keep[start:stop] = batch.ids[start:stop] != feature.padding_idx
    kept_before = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
    weights = None if batch.weights is None else batch.weights[keep]
    kept = replace(batch, ids=batch.ids[keep], offsets=kept_before[batch.offsets], weights=weights)
    return kept, keep


def feature_bounds(batch: BagBatch, features: Sequence[FeatureRead]) -> list[tuple[int, int]]:
    """Start and stop of each feature's lookups."""
    if not batch.batch_size:
        return [(0, 0)] * len(features)
    ends = batch.offsets[:: batch.batch_size].tolist()
    return list(pairwise(ends))


def check_ids(ids: Tensor, feature: FeatureRead) -> None:
    """Raise if an id is no row of its table.

    Raises
    ------
    DataError
        Names the feature, the table, the id and the table's rows.
    """
    if ids.numel():
        low, high = (int(end) for end in torch.aminmax(ids))
        if low < 0 or high >= feature.rows:
            bad = low if low < 0 else high
            raise DataError(
                f"feature {feature.name!r}: id {bad} is not a row of table {feature.table!r}, "
                f"which has {feature.rows} rows (ids 0..{feature.rows - 1}); hash or map ids "
                "to rows first, or name it as padding_idx"
            )


def arena_steps(
    batch: BagBatch, features: Sequence[FeatureRead], layout: Layout, translate: Translate
) -> tuple[ArenaStep, ...]:
    """What a checked batch reads, one step per arena of the layout.

    `translate` checks ids and gives their slots.
    """
    size = batch.batch_size
    segments: list[list[Segment]] = [[] for _ in layout.arenas]
    for index, (feature, (start, stop)) in enumerate(
        zip(features, feature_bounds(batch, features), strict=True)
    ):
        for strip in layout.strips[feature.table]:
            before = segments[strip.arena]
            first, first_bag = (before[-1].lookups[1], before[-1].bags[1]) if before else (0, 0)
            bags = size if feature.pooling in ("sum", "mean") else stop - start
            before.append(
                Segment(
                    index,
                    strip,
                    (start, stop),
                    (first, first + stop - start),
                    (first_bag, first_bag + bags),
                )
            )
    return tuple(
        ArenaStep(
            translate(batch.ids, features, arena, parts),
            _offsets(batch, features, parts),
            tuple(parts),
        )
        for arena, parts in zip(layout.arenas, segments, strict=True)
    )


def _offsets(
    batch: BagBatch, features: Sequence[FeatureRead], segments: Sequence[Segment]
) -> Tensor:
    """Offsets of an arena's bags."""
    size = batch.batch_size
    pooled = [features[segment.feature].pooling in ("sum", "mean") for segment in segments]
    if all(pooled) and [segment.feature for segment in segments] == list(range(len(features))):
        return batch.offsets
    device = batch.ids.device
    parts = []
    for segment, is_pooled in zip(segments, pooled, strict=True):
        first, last = segment.lookups
        if is_pooled:
            start = segment.feature * size
            parts.append(batch.offsets[start : start + size] + (first - segment.batch[0]))
        else:
            parts.append(torch.arange(first, last, device=device))
    total = segments[-1].lookups[1] if segments else 0
    return torch.cat([*parts, torch.tensor([total], device=device)])
