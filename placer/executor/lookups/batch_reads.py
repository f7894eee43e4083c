"""Translate a batch to the reads of each arena, find bad ids, and make outputs of what was read."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from placer.errors import DataError, PlanMismatchError
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.memory.layout import ArenaSlice, Layout
from placer.executor.streams import recorded, start_copy
from placer.plan.plan import Plan
from placer.tables import Feature, OptimizerName, Pooling, Table

MOST_LOOKUPS = 1 << 30
"""Most lookups of a step in an arena. Kernels number lookups, and a few more, in 31 bits."""


@dataclass(frozen=True, slots=True)
class FeatureRead:
    """A feature, the table that it reads, and its pooling.

    Lookups of id `padding_idx` are dropped; None drops nothing.
    """

    name: str
    table: str
    rows: int
    pooling: Pooling
    padding_idx: int | None


def read_by_one(plan: Plan, optimizer: OptimizerName | None = None) -> Plan:
    """Return the plan with one sum-pooled feature for each table, named like the table.

    `optimizer` replaces the optimizer of every table; None keeps each table's own.
    """
    tables = (
        replace(each, features=(Feature(each.name),), optimizer=optimizer or each.optimizer)
        for each in plan.tables
    )
    return replace(plan, tables=tuple(tables))


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One feature's read of one column slice: a range of an arena step's lookups and bags."""

    feature: int
    columns: ArenaSlice
    # Start and stop of the feature's lookups in the batch, and in the arena's step.
    batch: tuple[int, int]
    lookups: tuple[int, int]
    bags: tuple[int, int]  # In the arena's step: one bag for each sample, or for each lookup.


@dataclass(frozen=True, slots=True, eq=False)
class ArenaReads:
    """A batch's reads from one arena, before ids are translated to slots."""

    offsets: Tensor  # Bag i has lookups ``offsets[i]..offsets[i + 1]``: int64, (bags + 1,).
    lookups: int
    segments: tuple[Segment, ...]  # Cover all lookups and bags, in order.

    @property
    def bags(self) -> int:
        """Number of bags."""
        return self.offsets.numel() - 1

    def spread(self, per_lookup: Tensor | None) -> Tensor | None:
        """Reorder values by lookup from the order of the batch to the order of this arena."""
        if per_lookup is None or (
            self.lookups == per_lookup.numel()
            and all(segment.batch == segment.lookups for segment in self.segments)
        ):
            return per_lookup  # The arena's order is the batch's order.
        if not self.segments:  # No feature reads these tables.
            return per_lookup[:0]
        return torch.cat([per_lookup[slice(*segment.batch)] for segment in self.segments])


@dataclass(frozen=True, slots=True, eq=False)
class Bags:
    """The bags of a batch without its ids and padded lookups, as outputs need them."""

    batch_size: int
    offsets: Tensor  # int64, shape (features · batch_size + 1,).
    weights: Tensor | None  # float32, shape (lookups,).
    # Start and stop of each feature's lookups, without padding and in the original batch.
    spans: tuple[tuple[int, int], ...]
    bounds: tuple[tuple[int, int], ...]
    # Original position of each lookup, int64, (lookups,); None if no feature has padding.
    kept: Tensor | None

    @property
    def lookups(self) -> int:
        """Number of lookups."""
        return self.spans[-1][1] if self.spans else 0

    def offsets_of(self, feature: int) -> Tensor:
        """Return the offsets of a feature's bags, shape (batch_size + 1,)."""
        return self.offsets[feature * self.batch_size : (feature + 1) * self.batch_size + 1]

    def output(self, index: int, feature: FeatureRead, rows: Tensor) -> Tensor:
        """Return a feature's output from the sums of its bags, or from the rows of its lookups."""
        if feature.pooling == "sum":
            return rows
        if feature.pooling == "mean":
            return mean_from_sum(rows, self.offsets_of(index))
        if feature.pooling == "max":
            offsets = self.offsets_of(index)
            return segment_max(rows, offsets - offsets[0])
        if self.kept is None or feature.padding_idx is None:
            return rows
        (start, stop), (first, last) = self.bounds[index], self.spans[index]
        result = rows.new_zeros((stop - start, rows.shape[1]))
        return result.index_put((self.kept[first:last] - start,), rows)


def feature_reads(
    tables: Sequence[Table], padding_idx: Mapping[str, int]
) -> tuple[FeatureRead, ...]:
    """Return the features of all tables, in order."""
    reads = tuple(
        FeatureRead(
            feature.name, table.name, table.rows, feature.pooling, padding_idx.get(feature.name)
        )
        for table in tables
        for feature in table.features
    )
    names = [read.name for read in reads]
    twice = sorted(name for name, times in Counter(names).items() if times > 1)
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


def ready_to_read(
    batch: BagBatch, features: Sequence[FeatureRead], device: torch.device
) -> tuple[BagBatch, Bags]:
    """Check a batch, drop padded lookups and copy it to the device; return it and its bags.

    If features have padding, this waits for the device of the batch. Pass batches on the host to
    avoid that.
    """
    if not isinstance(batch, BagBatch):
        raise DataError(
            f"a batch is a BagBatch, not a {type(batch).__name__}: make one with "
            "BagBatch.from_features(features, embeddings.feature_names)"
        )
    if batch.batch_size:
        held = (batch.offsets.numel() - 1) // batch.batch_size
        if held != len(features):
            raise DataError(
                f"the batch holds {held} features, the plan {len(features)}; build it with "
                "order=embeddings.feature_names"
            )
    bounds, kept = feature_bounds(batch, features), None
    if any(feature.padding_idx is not None for feature in features):
        batch, kept = _without_padding(batch, features, bounds)
        kept = kept.to(device)
    batch = batch.to(device, non_blocking=True)
    spans = feature_bounds(batch, features)
    return batch, Bags(batch.batch_size, batch.offsets, batch.weights, spans, bounds, kept)


def _without_padding(
    batch: BagBatch, features: Sequence[FeatureRead], bounds: Sequence[tuple[int, int]]
) -> tuple[BagBatch, Tensor]:
    """Return the batch without padded lookups, and the positions of the other lookups."""
    keep = torch.ones(batch.ids.numel(), dtype=torch.bool, device=batch.ids.device)
    for feature, (start, stop) in zip(features, bounds, strict=True):
        if feature.padding_idx is not None:
            keep[start:stop] = batch.ids[start:stop] != feature.padding_idx
    kept_before = torch.nn.functional.pad(keep.cumsum(0), (1, 0))
    weights = None if batch.weights is None else batch.weights[keep]
    offsets = kept_before[batch.offsets]
    kept = BagBatch(batch.ids[keep], offsets, batch.batch_size, weights)
    return kept, torch.nonzero(keep).squeeze(1)


def feature_bounds(batch: BagBatch, features: Sequence[FeatureRead]) -> tuple[tuple[int, int], ...]:
    """Return start and stop of each feature's lookups."""
    if not batch.batch_size:
        return ((0, 0),) * len(features)
    starts = batch.bounds
    if starts is None:  # The batch was made on a device: wait for it.
        starts = tuple(batch.offsets[:: batch.batch_size].tolist())
    return tuple(pairwise(starts))


def keep_until_used(prepared: object, stream: torch.cuda.Stream) -> None:
    """Keep the memory of a prepared batch from reuse until the work queued on `stream` is done."""
    for tensor in tensors_of(prepared):
        if tensor.is_cuda:
            tensor.record_stream(stream)


def tensors_of(prepared: object) -> Iterator[Tensor]:
    """Yield all tensors that a prepared batch, or another tree of dataclasses, holds.

    Tensors of segments are left out: they belong to the model and outlive all batches.
    """
    waiting: list[object] = [prepared]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            if value and not isinstance(value[0], int | Segment):
                waiting.extend(value)
        elif is_dataclass(value):
            waiting.extend(getattr(value, name) for name in value.__dataclass_fields__)


def check_ids(ids: Tensor, feature: FeatureRead) -> None:
    """Raise DataError if an id is no row of its table."""
    if ids.numel():
        low, high = (int(end) for end in torch.aminmax(ids))
        if low < 0 or high >= feature.rows:
            bad = low if low < 0 else high
            raise DataError(
                f"feature {feature.name!r}: id {bad} is not a row of table {feature.table!r}, "
                f"which has {feature.rows} rows (ids 0..{feature.rows - 1}); hash or map ids "
                "to rows first, or name it as padding_idx"
            )


def arena_reads(
    bags: Bags, features: Sequence[FeatureRead], layout: Layout
) -> tuple[ArenaReads, ...]:
    """Return the reads of a checked batch, arena by arena."""
    size = bags.batch_size
    segments: list[list[Segment]] = [[] for _ in layout.arenas]
    for index, (feature, (start, stop)) in enumerate(zip(features, bags.spans, strict=True)):
        for columns in layout.column_slices[feature.table]:
            before = segments[columns.arena]
            first, first_bag = (before[-1].lookups[1], before[-1].bags[1]) if before else (0, 0)
            vectors = size if feature.pooling in ("sum", "mean") else stop - start
            before.append(
                Segment(
                    index,
                    columns,
                    (start, stop),
                    (first, first + stop - start),
                    (first_bag, first_bag + vectors),
                )
            )
            most = max(before[-1].lookups[1], before[-1].bags[1])
            if most > MOST_LOOKUPS:
                raise DataError(
                    f"a step of {most:,} lookups or bags; kernels number them in 32 bits, up to "
                    f"{MOST_LOOKUPS:,}: take smaller batches"
                )
    return tuple(
        ArenaReads(
            _offsets(bags, features, parts),
            parts[-1].lookups[1] if parts else 0,
            tuple(parts),
        )
        for parts in segments
    )


def _offsets(bags: Bags, features: Sequence[FeatureRead], segments: Sequence[Segment]) -> Tensor:
    size = bags.batch_size
    pooled = [features[segment.feature].pooling in ("sum", "mean") for segment in segments]
    if all(pooled) and [segment.feature for segment in segments] == list(range(len(features))):
        return bags.offsets
    device = bags.offsets.device
    parts = []
    for segment, is_pooled in zip(segments, pooled, strict=True):
        first, last = segment.lookups
        if is_pooled:
            start = segment.feature * size
            parts.append(bags.offsets[start : start + size] + (first - segment.batch[0]))
        else:
            parts.append(torch.arange(first, last, device=device))
    total = segments[-1].lookups[1] if segments else 0
    return torch.cat([*parts, torch.full((1,), total, device=device)])


def mean_from_sum(sums: Tensor, offsets: Tensor) -> Tensor:
    """Divide each bag's sum by its number of lookups; empty bags stay zero.

    With weights the result is Σ w·x / lookups.
    """
    counts = offsets.diff().clamp_(min=1).to(sums.dtype)
    return sums / counts.unsqueeze(1)


def rows_added(rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct rows, and the sum of the values of each, shape (rows, dim)."""
    distinct, places = torch.unique(rows, return_inverse=True)
    sums = values.new_zeros((distinct.numel(), values.shape[1]))
    return distinct, sums.index_add_(0, places, values)


def gradient_norm(rows: Tensor, gradients: Tensor, norm_type: float) -> Tensor:
    """Return the norm of gradients that are added up by row: shape ()."""
    _, sums = rows_added(rows, gradients)
    # Append a zero: torch has no maximum of an empty tensor.
    padded = torch.nn.functional.pad(sums.flatten(), (0, 1))
    norm: Tensor = torch.linalg.vector_norm(padded, norm_type)
    return norm


def segment_max(rows: Tensor, offsets: Tensor) -> Tensor:
    """Return the largest value of each column over each bag; empty bags are zero.

    If lookups tie, the gradient goes to the first, as in `nn.EmbeddingBag`.
    """
    if not len(rows):  # The sum keeps the graph.
        return rows.new_zeros((offsets.numel() - 1, rows.shape[1])) + rows.sum()
    lookups = torch.arange(len(rows), device=rows.device)
    return torch.nn.functional.embedding_bag(
        lookups, rows, offsets, mode="max", include_last_offset=True
    )


NO_FAULT = torch.iinfo(torch.int64).max


_Watched = tuple[Tensor, torch.cuda.Event, BagBatch, Sequence[FeatureRead]]
"""A position, the event after its copy, and its batch and features."""


class Faults:
    """Raises DataError for a batch's bad ids: at once on a CPU, at a later batch on a GPU.

    Until then, lookups of bad ids read and update nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watched: deque[_Watched] = deque()

    def new(self) -> Tensor:
        """Return an int64 tensor, shape (1,), for kernels to note the first bad id's position."""
        return torch.full((1,), NO_FAULT, device=self._device)

    def watch(self, fault: Tensor, batch: BagBatch, features: Sequence[FeatureRead]) -> None:
        """Check the position that kernels wrote: now on a CPU, or later when it comes from a GPU.

        This also raises for bad ids of earlier batches whose positions have arrived.
        """
        if self._device.type != "cuda":
            if int(fault) != NO_FAULT:
                _raise(int(fault), batch, features)
            return
        if torch.cuda.is_current_stream_capturing():
            return  # A captured graph runs no host code, but skips bad lookups.
        while self._watched and self._watched[0][1].query():  # type: ignore[no-untyped-call]
            position, _, earlier, read = self._watched.popleft()
            if int(position) != NO_FAULT:
                _raise(int(position), earlier, read)
        self._watched.append((start_copy(fault), recorded(), batch, features))


def _raise(position: int, batch: BagBatch, features: Sequence[FeatureRead]) -> None:
    for feature, (start, stop) in zip(features, feature_bounds(batch, features), strict=True):
        if start <= position < stop:
            check_ids(batch.ids[start:stop], feature)
