"""Sends lookups to the ranks that hold their rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from placer.errors import DataError, PlacerError
from placer.executor.distributed.collectives import Communicator
from placer.executor.distributed.placement.channels import Channels, Unit
from placer.executor.distributed.sharded_batch import ShardedBatch, UnitStep, spans
from placer.executor.distributed.survey import Survey
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import Bags, check_ids, ready_to_read

_Routes = tuple[tuple[Tensor | None, ...], ...]
"""See `ShardedBatch.routes`."""


@dataclass(frozen=True, slots=True, eq=False)
class InputExchange:
    """Sends this rank's lookups to the others and receives theirs.

    Attributes
    ----------
    survey : Survey
    channels : Channels
    comm : Communicator
    device : torch.device
    """

    survey: Survey
    channels: Channels
    comm: Communicator
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
            batch, bags = ready_to_read(batch, self.survey.features, self.device)
            for feature, (start, stop) in zip(self.survey.features, bags.spans, strict=True):
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
        routes, lookups = self._route(batch, bags.spans)
        own = [
            lookups[channel.feature, channel.columns, channel.position]
            for _, channel in self.channels.sent
        ]
        return self._send(batch, bags, samples, weighted, wanted, routes, own)

    def _route(
        self, batch: BagBatch, spread: Sequence[tuple[int, int]]
    ) -> tuple[_Routes, dict[tuple[int, int, int], "_ChannelLookups"]]:
        """How features' lookups are spread over targets, and each channel's."""
        size, lengths = batch.batch_size, batch.offsets.diff()
        lookups: dict[tuple[int, int, int], _ChannelLookups] = {}
        routes = []
        features = self.survey.features
        for index, (feature, (start, stop)) in enumerate(zip(features, spread, strict=True)):
            table = self.survey.routes.get(feature.table)
            bag_lengths = lengths[index * size : (index + 1) * size]
            ids = batch.ids[start:stop]
            # Column slices with the same row slices share their router.
            seen: dict[int, tuple[Tensor | None, list[_ChannelLookups]]] = {}
            orders = []
            for number, columns in enumerate(() if table is None else table.column_slices):
                known = seen.get(id(columns.router))
                if known is None:
                    assert table is not None, "it has column slices"
                    if columns.router is None:
                        whole = _ChannelLookups(ids.long(), bag_lengths, None, start, stop)
                        known = None, [whole]
                    else:
                        known = _spread(
                            *table.route(ids, columns), len(columns.targets), bag_lengths, start
                        )
                    seen[id(columns.router)] = known
                orders.append(None if feature.pooling in ("sum", "mean") else known[0])
                lookups.update({(index, number, place): own for place, own in enumerate(known[1])})
            routes.append(tuple(orders))
        return tuple(routes), lookups

    def _send(
        self,
        batch: BagBatch,
        own_bags: Bags,
        samples: tuple[int, ...],
        weighted: bool,
        wanted: bool,
        routes: _Routes,
        lookups: Sequence["_ChannelLookups"],
    ) -> ShardedBatch:
        comm, channels, size = self.comm, self.channels, batch.batch_size
        bags = [len(here) * theirs for here, theirs in zip(channels.active, samples, strict=True)]
        sent_channels = [0] * comm.world
        sent_lookups = [0] * comm.world
        for (rank, _), own in zip(channels.sent, lookups, strict=True):
            sent_channels[rank] += 1
            sent_lookups[rank] += own.rows.numel()
        lengths = comm.exchange(
            "lengths",
            _cat([own.lengths for own in lookups], torch.int32, self.device),
            [count * size for count in sent_channels],
            bags,
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
        came = _Came(samples, lengths, rows, weights, counts, _starts(bags), _nested_starts(counts))
        sent_rows = tuple(
            size if channel.pooled else own.rows.numel()
            for (_, channel), own in zip(channels.sent, lookups, strict=True)
        )
        return ShardedBatch(
            own_bags,
            samples,
            wanted,
            routes,
            sent_rows,
            self._served_rows(samples, counts),
            tuple(sent_lookups),
            tuple(served_lookups),
            _cat(positions, torch.int64, self.device),
            tuple(self._unit_step(unit, came, wanted) for unit in channels.units),
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

    def _unit_step(self, unit: Unit, came: "_Came", wanted: bool) -> UnitStep:
        """What came for one unit, channel by channel instead of rank by rank."""
        samples, rows, weights = came.samples, came.rows, came.weights
        # From whom, and where among what came from there.
        places = [
            (source, self.channels.places[source][at])
            for at in unit.channels
            for source in unit.sources
        ]
        of_bags = spans(
            [came.bag_starts[source] + place * samples[source] for source, place in places],
            [samples[source] for source, _ in places],
            self.device,
        )
        starts = [came.starts[source][place] for source, place in places]
        sizes = [came.counts[source][place] for source, place in places]
        bounds = [0, *accumulate(sizes)][:: len(unit.sources)]
        size = sum(samples[source] for source in unit.sources)
        bag_lengths = came.lengths.index_select(0, of_bags).long()
        entries = [place for _, place in unit.entries]
        if unit.replicated:  # Features by which replicas are updated have empty bags here.
            own = bag_lengths.view(len(unit.channels), size)
            and_empty = torch.nn.functional.pad(own, (0, 0, 0, 1))  # The last, which −1 means.
            bag_lengths = and_empty[torch.tensor(entries, device=self.device)].flatten()
        whole = starts == _starts(sizes) and bounds[-1] == rows.numel()
        index = None if whole else spans(starts, sizes, self.device)
        own_rows = rows if index is None else rows.index_select(0, index)
        own_weights = None
        if weights is not None:
            own_weights = weights if index is None else weights.index_select(0, index)
            own_weights = own_weights.clone().requires_grad_(wanted and not unit.replicated)
        offsets = torch.nn.functional.pad(bag_lengths.cumsum(0), (1, 0))
        ends = [0]
        for place in entries:
            ends.append(ends[-1] if place < 0 else bounds[place + 1])
        batch = BagBatch(own_rows, offsets, size, own_weights, tuple(ends) if size else None)
        return UnitStep(batch, own_weights, None, index if wanted else None, tuple(bounds))


@dataclass(frozen=True, slots=True, eq=False)
class _Came:
    """What came here, rank by rank and, of a rank, channel by channel.

    Attributes
    ----------
    samples : sequence of int
        Of each rank.
    lengths : int32
        Of bags.
    rows : int64
    weights : float32 or None
    counts, starts : list of list of int
        Lookups of each active channel of each rank, and where they begin among all.
    bag_starts : list of int
        Where each rank's bags begin.
    """

    samples: Sequence[int]
    lengths: Tensor
    rows: Tensor
    weights: Tensor | None
    counts: list[list[int]]
    bag_starts: list[int]
    starts: list[list[int]]


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


def _spread(
    target: Tensor, rows: Tensor, count: int, lengths: Tensor, start: int
) -> tuple[Tensor, list[_ChannelLookups]]:
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
    return order, lookups


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
