"""Sends lookups to the ranks that hold their rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from placer.errors import DataError, PlacerError
from placer.executor.distributed.collectives import Collectives
from placer.executor.distributed.placement.channels import Channel, Channels, Unit
from placer.executor.distributed.placement.table_routes import TableRoutes
from placer.executor.distributed.sharded_batch import Route, ShardedBatch, UnitStep, spans
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import (
    FeatureRead,
    bags_of,
    check_ids,
    feature_bounds,
    without_padding,
)


@dataclass(frozen=True, slots=True, eq=False)
class InputExchange:
    """Sends this rank's lookups to the others and receives theirs.

    Attributes
    ----------
    features : tuple of FeatureRead
    maps : mapping of table name to TableRoutes
    channels : Channels
    comm : Collectives
    device : torch.device
    """

    features: tuple[FeatureRead, ...]
    maps: Mapping[str, TableRoutes]
    channels: Channels
    comm: Collectives
    device: torch.device

    def __call__(self, batch: BagBatch, training: bool) -> ShardedBatch:
        """Exchange a batch's lookups; every rank must be here with one of its own.

        Raises
        ------
        DataError
            On every rank, if one of them has an id that is no row of its table, or a batch
            that was made for other features; or if only some of them are training.
        """
        fault: PlacerError | None = None
        try:
            batch, bounds, kept = without_padding(batch, self.features, self.device)
            spread = feature_bounds(batch, self.features)
            for feature, (start, stop) in zip(self.features, spread, strict=True):
                check_ids(batch.ids[start:stop], feature)
        except PlacerError as error:
            fault = error
        weights = batch.weights
        wanted = training and weights is not None and weights.requires_grad
        header = [batch.batch_size, fault is not None, weights is not None, wanted, training]
        headers = self.comm.gather("header", torch.tensor(header, dtype=torch.int64)).tolist()
        if fault is not None:
            raise fault
        _check_headers(headers, training)
        samples = tuple(int(header[0]) for header in headers)
        weighted, wanted = (any(header[column] for header in headers) for column in (2, 3))
        routed = self._route(batch, spread)
        return self._send(batch, bounds, kept, samples, weighted, wanted, routed)

    def _route(self, batch: BagBatch, spread: Sequence[tuple[int, int]]) -> "_Routed":
        """Rows, lengths and places in the batch of each channel's lookups."""
        size = batch.batch_size
        lengths = batch.offsets.diff()
        lookups: dict[tuple[int, int, int], _ChannelLookups] = {}
        routes = []
        for index, (feature, (start, stop)) in enumerate(zip(self.features, spread, strict=True)):
            table = self.maps.get(feature.table)
            bag_lengths = lengths[index * size : (index + 1) * size]
            ids = batch.ids[start:stop]
            seen: dict[int, tuple[Route, list[_ChannelLookups]]] = {}
            feature_routes = []
            for number, columns in enumerate(() if table is None else table.column_slices):
                known = seen.get(id(columns.router))
                if known is None:
                    assert table is not None, "it has column slices"
                    if columns.router is None:
                        route = Route(None, (stop - start,))
                        parts = [_ChannelLookups(ids.long(), bag_lengths, None, start, stop)]
                    else:
                        target, rows = table.route(ids, columns)
                        count = len(columns.targets)
                        route, parts = _spread(target, rows, count, bag_lengths, start)
                        if feature.pooling in ("sum", "mean"):
                            route = Route(None, route.counts)
                    known = seen[id(columns.router)] = route, parts
                feature_routes.append(known[0])
                lookups.update({(index, number, place): own for place, own in enumerate(known[1])})
            routes.append(tuple(feature_routes))
        return _Routed(tuple(routes), lookups)

    def _send(
        self,
        batch: BagBatch,
        bounds: tuple[tuple[int, int], ...],
        kept: Tensor | None,
        samples: tuple[int, ...],
        weighted: bool,
        wanted: bool,
        routed: "_Routed",
    ) -> ShardedBatch:
        comm, channels, size = self.comm, self.channels, batch.batch_size
        lookups = [routed.of(channel) for _, channel in channels.sent]
        sent_channels = [0] * comm.world
        sent_lookups = [0] * comm.world
        for (rank, _), own in zip(channels.sent, lookups, strict=True):
            sent_channels[rank] += 1
            sent_lookups[rank] += own.rows.numel()
        lengths = comm.exchange(
            "lengths",
            _cat([own.lengths for own in lookups], torch.int32, self.device),
            [count * size for count in sent_channels],
            [len(here) * theirs for here, theirs in zip(channels.active, samples, strict=True)],
        )
        counts = self._lookup_counts(lengths, samples)
        served_lookups = [sum(theirs) for theirs in counts]
        rows = comm.exchange(
            "ids",
            _cat([own.rows for own in lookups], torch.int64, self.device),
            sent_lookups,
            served_lookups,
        )
        weights = None
        if weighted:
            scales = batch.weights
            if scales is None:
                scales = torch.ones(batch.ids.numel(), device=self.device)
            scales = _cat([own.select(scales.detach()) for own in lookups], None, self.device)
            weights = comm.exchange("weights", scales.float(), sent_lookups, served_lookups)
        positions = [own.positions(self.device) for own in lookups] if wanted else []
        sizes = [len(here) * theirs for here, theirs in zip(channels.active, samples, strict=True)]
        starts = _Starts(_starts(sizes), _nested_starts(counts))
        sent_rows = tuple(
            size if channel.pooled else own.rows.numel()
            for (_, channel), own in zip(channels.sent, lookups, strict=True)
        )
        return ShardedBatch(
            bags_of(batch, self.features),
            bounds,
            kept,
            samples,
            wanted,
            routed.routes,
            sent_rows,
            self._served_rows(samples, counts),
            tuple(sent_lookups),
            tuple(served_lookups),
            _cat(positions, torch.int64, self.device),
            tuple(
                self._unit_step(unit, samples, lengths, counts, starts, rows, weights, wanted)
                for unit in channels.units
            ),
        )

    def _served_rows(
        self, samples: Sequence[int], counts: Sequence[Sequence[int]]
    ) -> tuple[tuple[int, ...], ...]:
        """Rows that each channel gives back to each rank."""
        return tuple(
            tuple(
                samples[rank] if self.channels.served[at].pooled else count
                for at, count in zip(self.channels.active[rank], theirs, strict=True)
            )
            for rank, theirs in enumerate(counts)
        )

    def _lookup_counts(self, lengths: Tensor, samples: Sequence[int]) -> list[list[int]]:
        """Lookups of each active channel of each rank; waits for the device."""
        ends = [0]
        for here, theirs in zip(self.channels.active, samples, strict=True):
            ends += [ends[-1] + theirs * (number + 1) for number in range(len(here))]
        sums = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))
        flat = iter(sums[torch.tensor(ends, device=self.device)].diff().tolist())
        return [[next(flat) for _ in here] for here in self.channels.active]

    def _unit_step(
        self,
        unit: Unit,
        samples: Sequence[int],
        lengths: Tensor,
        counts: Sequence[Sequence[int]],
        starts: "_Starts",
        rows: Tensor,
        weights: Tensor | None,
        wanted: bool,
    ) -> UnitStep:
        """What came for one unit, channel by channel instead of rank by rank."""
        bags, reads, bounds = self._unit_spans(unit, samples, counts, starts)
        size = sum(samples[source] for source in unit.sources)
        of_bags = spans(bags.starts, bags.sizes, self.device)
        bag_lengths = lengths.index_select(0, of_bags).long()
        places = [place for _, place in unit.entries]
        if unit.replicated:  # Features by which replicas are updated have empty bags here.
            own = bag_lengths.view(len(unit.channels), size)
            and_empty = torch.nn.functional.pad(own, (0, 0, 0, 1))  # The last, which −1 means.
            bag_lengths = and_empty[torch.tensor(places, device=self.device)].flatten()
        whole = reads.starts == _starts(reads.sizes) and bounds[-1] == rows.numel()
        index = None if whole else spans(reads.starts, reads.sizes, self.device)
        own_rows = rows if index is None else rows.index_select(0, index)
        own_weights = None
        if weights is not None:
            own_weights = weights if index is None else weights.index_select(0, index)
            own_weights = own_weights.clone().requires_grad_(wanted and not unit.replicated)
        offsets = torch.nn.functional.pad(bag_lengths.cumsum(0), (1, 0))
        ends = [0]
        for place in places:
            ends.append(ends[-1] if place < 0 else bounds[place + 1])
        batch = BagBatch(own_rows, offsets, size, own_weights, tuple(ends) if size else None)
        return UnitStep(batch, own_weights, None, index if wanted else None, tuple(bounds))

    def _unit_spans(
        self,
        unit: Unit,
        samples: Sequence[int],
        counts: Sequence[Sequence[int]],
        starts: "_Starts",
    ) -> tuple["_Spans", "_Spans", list[int]]:
        """Where a unit's bags and its lookups are among those received, and channels' bounds."""
        bags, reads = _Spans(), _Spans()
        bounds = [0]
        for at in unit.channels:
            total = 0
            for source in unit.sources:
                place = self.channels.places[source][at]
                bags.add(starts.lengths[source] + place * samples[source], samples[source])
                reads.add(starts.lookups[source][place], counts[source][place])
                total += counts[source][place]
            bounds.append(bounds[-1] + total)
        return bags, reads, bounds


@dataclass(frozen=True, slots=True)
class _Starts:
    """Where what each rank sent begins: its lengths of bags, and the lookups of each channel."""

    lengths: list[int]
    lookups: list[list[int]]


@dataclass(slots=True, eq=False)
class _Spans:
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, start: int, size: int) -> None:
        self.starts.append(start)
        self.sizes.append(size)


@dataclass(frozen=True, slots=True, eq=False)
class _ChannelLookups:
    """A channel's lookups: their rows, the lengths of its bags, and where they are in the batch."""

    rows: Tensor
    lengths: Tensor
    order: Tensor | None
    start: int
    stop: int

    def select(self, values: Tensor) -> Tensor:
        """Values of these lookups out of the batch's."""
        own = values[self.start : self.stop]
        return own if self.order is None else own.index_select(0, self.order)

    def positions(self, device: torch.device) -> Tensor:
        """Their positions in the batch."""
        if self.order is None:
            return torch.arange(self.start, self.stop, device=device)
        return self.order + self.start


@dataclass(frozen=True, slots=True, eq=False)
class _Routed:
    routes: tuple[tuple[Route, ...], ...]
    lookups: Mapping[tuple[int, int, int], _ChannelLookups]

    def of(self, channel: Channel) -> _ChannelLookups:
        return self.lookups[channel.feature, channel.columns, channel.position]


def _spread(
    target: Tensor, rows: Tensor, count: int, lengths: Tensor, start: int
) -> tuple[Route, list[_ChannelLookups]]:
    """A feature's lookups by target, each target's in the order of the batch."""
    total, size = rows.numel(), lengths.numel()
    kind = torch.uint8 if count < 256 else torch.int32
    order = torch.sort(target.to(kind), stable=True).indices.int()
    rows = rows.index_select(0, order)
    bags = torch.arange(size, device=rows.device).repeat_interleave(lengths, output_size=total)
    by_bag = torch.bincount(target * size + bags, minlength=count * size).view(count, size)
    counts = by_bag.sum(1).tolist()
    lookups, first = [], 0
    for place, number in enumerate(counts):
        last = first + number
        own = _ChannelLookups(
            rows[first:last], by_bag[place], order[first:last], start, start + total
        )
        lookups.append(own)
        first = last
    return Route(order, tuple(counts)), lookups


def _check_headers(headers: Sequence[Sequence[int]], training: bool) -> None:
    bad = [rank for rank, header in enumerate(headers) if header[1]]
    if bad:
        raise DataError(f"ranks {bad} refused their batches; see their errors")
    other = [rank for rank, header in enumerate(headers) if bool(header[4]) != training]
    if other:
        raise DataError(
            f"ranks {other} are {'not ' if training else ''}training and this one is "
            f"{'' if training else 'not'}; all ranks must run with gradients, or none"
        )


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def _nested_starts(sizes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Where each begins, those of one sequence after those of another."""
    flat = iter(_starts([size for each in sizes for size in each]))
    return [[next(flat) for _ in each] for each in sizes]


def _cat(parts: Sequence[Tensor], dtype: torch.dtype | None, device: torch.device) -> Tensor:
    if not parts:
        return torch.empty(0, dtype=dtype or torch.float32, device=device)
    joined = torch.cat([*parts])
    return joined if dtype is None else joined.to(dtype)
