"""Send lookups to the ranks that hold their rows, in a thread while earlier batches train."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.errors import DataError, PlacerError
from placer.executor.distributed.channels import (
    Channels,
    NumberedBatch,
    ShardedBatch,
    Survey,
    Unit,
    UnitStep,
    concatenated,
    spans,
)
from placer.executor.distributed.collectives import Communicator
from placer.executor.distributed.division import ColumnSlice
from placer.executor.distributed.table_routes import ShardedKeys, TableRoutes
from placer.executor.growing_keys import KeyStep
from placer.executor.local.lookahead import on_every_rank
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import Bags, check_ids, keep_until_used, ready_to_read
from placer.executor.streams import recorded

Int = npt.NDArray[np.int64]

_Routes = tuple[tuple[Tensor | None, ...], ...]
"""See `ShardedBatch.routes`."""


@dataclass(frozen=True, slots=True, eq=False)
class InputExchange:
    """Sends this rank's lookups to other ranks and receives their lookups."""

    survey: Survey
    channels: Channels
    comm: Communicator
    device: torch.device
    keys: ShardedKeys

    def __call__(
        self,
        batch: BagBatch,
        training: bool,
        key_step: KeyStep | None,
        number: NumberedBatch | None = None,
    ) -> ShardedBatch:
        """Exchange a batch's lookups. Every rank must call this with its own batch.

        `key_step` is the result of the keys' `open_step`.
        """
        fault: PlacerError | None = None
        try:
            batch, bags = ready_to_read(batch, self.survey.features, self.device)
            for feature, (start, stop) in zip(self.survey.features, bags.spans, strict=True):
                if feature.table not in self.keys.maps:
                    check_ids(batch.ids[start:stop], feature)
        except PlacerError as error:
            fault = error
        size, weights = (batch.batch_size, batch.weights) if fault is None else (0, None)
        wanted = training and weights is not None and weights.requires_grad
        # Ranks may free batches at different times, but rows must keep their keys on all ranks.
        open_before = -1 if key_step is None else key_step.open_before
        header = [size, fault is not None, weights is not None, wanted, training]
        header.append(open_before)
        headers = self.comm.numbers(header)
        if fault is not None:
            raise fault
        _check_headers(headers, training)
        if self.keys.in_batches:
            most_open = max(int(header[5]) for header in headers)
            batch = self.keys.exchange(
                batch,
                self.survey.features,
                None if most_open < 0 else most_open,
                self.survey.routes,
                self.comm,
            )
        samples = [int(header[0]) for header in headers]
        weighted, wanted = (any(header[column] for header in headers) for column in (2, 3))
        routes, lookups = self._route(batch, bags.spans)
        own = [
            lookups[channel.feature, channel.columns, channel.position]
            for _, channel in self.channels.sent
        ]
        sent = self._send(batch, bags, samples, weighted, wanted, routes, own)
        self.keys.found(key_step)
        return replace(sent, key_step=key_step, number=number)

    def _route(
        self, batch: BagBatch, spread: Sequence[tuple[int, int]]
    ) -> tuple[_Routes, dict[tuple[int, int, int], "_ChannelLookups"]]:
        """Return the order of each feature's lookups by target, and the lookups of each channel."""
        size, lengths = batch.batch_size, batch.offsets.diff()
        lookups: dict[tuple[int, int, int], _ChannelLookups] = {}
        routes: list[tuple[Tensor | None, ...]] = []
        features = self.survey.features
        for index, (feature, (start, stop)) in enumerate(zip(features, spread, strict=True)):
            table = self.survey.routes.get(feature.table)
            if table is None:  # It has no rows.
                routes.append(())
                continue
            bag_lengths = lengths[index * size : (index + 1) * size]
            # Column slices with equal row slices share a router.
            seen: dict[int, tuple[Tensor | None, list[_ChannelLookups]]] = {}
            orders = []
            for number, columns in enumerate(table.column_slices):
                known = seen.get(id(columns.router))
                if known is None:
                    known = _spread(table, columns, batch.ids[start:stop], bag_lengths, start)
                    seen[id(columns.router)] = known
                orders.append(None if feature.pooling in ("sum", "mean") else known[0])
                lookups.update({(index, number, place): own for place, own in enumerate(known[1])})
            routes.append(tuple(orders))
        return tuple(routes), lookups

    def _send(
        self,
        batch: BagBatch,
        own_bags: Bags,
        samples: Sequence[int],
        weighted: bool,
        wanted: bool,
        routes: _Routes,
        lookups: Sequence["_ChannelLookups"],
    ) -> ShardedBatch:
        comm, channels, size = self.comm, self.channels, batch.batch_size
        bags = channels.serves * np.array(samples)[:, None]
        sent_channels = [0] * comm.world
        sent_lookups = [0] * comm.world
        for (rank, _), own in zip(channels.sent, lookups, strict=True):
            sent_channels[rank] += 1
            sent_lookups[rank] += own.rows.numel()
        lengths = comm.exchange(
            "lengths",
            concatenated([own.lengths for own in lookups], torch.int32, self.device),
            [count * size for count in sent_channels],
            bags.sum(1).tolist(),
        )
        # This waits for the device.
        sums = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))
        ends = torch.from_numpy(np.append(0, bags.cumsum())).to(self.device)
        counts = sums[ends].diff().cpu().numpy().reshape(bags.shape)
        served_lookups = counts.sum(1).tolist()
        rows = comm.exchange(
            "ids",
            concatenated([own.rows for own in lookups], torch.int64, self.device),
            sent_lookups,
            served_lookups,
        )
        weights = None
        if weighted:
            scales = batch.weights
            if scales is None:
                scales = torch.ones(batch.ids.numel(), dtype=torch.float32, device=self.device)
            own_scales = [own.select(scales.detach()) for own in lookups]
            scales = concatenated(own_scales, torch.float32, self.device)
            weights = comm.exchange("weights", scales, sent_lookups, served_lookups)
        positions = []
        if wanted:
            all_positions = torch.arange(batch.ids.numel(), device=self.device)
            positions = [own.select(all_positions) for own in lookups]
        unit_step = partial(self._unit_step, samples, lengths, rows, weights, bags, counts, wanted)
        sent_rows = tuple(
            size if channel.pooled else own.rows.numel()
            for (_, channel), own in zip(channels.sent, lookups, strict=True)
        )
        return ShardedBatch(
            own_bags,
            wanted,
            routes,
            sent_rows,
            np.where([channel.pooled for channel in channels.served], bags, counts),
            tuple(sent_lookups),
            tuple(served_lookups),
            concatenated(positions, torch.int64, self.device),
            tuple(map(unit_step, channels.units)),
        )

    def _unit_step(
        self,
        samples: Sequence[int],
        lengths: Tensor,
        rows: Tensor,
        weights: Tensor | None,
        bags: Int,
        counts: Int,
        wanted: bool,
        unit: Unit,
    ) -> UnitStep:
        """Reorder the received lookups of one unit from rank by rank to channel by channel.

        `bags` and `counts` are the numbers of bags and lookups from each rank in each served
        channel: int64, shape (world, served). Lengths of bags, rows and weights have this order.
        """
        own = np.ix_(unit.sources, unit.channels)
        bag_starts, own_bags, starts, sizes = (
            array[own].T.ravel() for array in (_starts(bags), bags, _starts(counts), counts)
        )
        bounds = [0, *counts[own].sum(0).cumsum().tolist()]
        size = sum(samples[source] for source in unit.sources)
        of_bags = spans(bag_starts, own_bags, self.device)
        bag_lengths = lengths.index_select(0, of_bags).long()
        whole = bounds[-1] == rows.numel() and np.array_equal(starts, _starts(sizes))
        index = None if whole else spans(starts, sizes, self.device)
        own_rows = rows if index is None else rows.index_select(0, index)
        own_weights = None
        if weights is not None:
            own_weights = weights if index is None else weights.index_select(0, index)
            own_weights = own_weights.clone().requires_grad_(wanted and not unit.replicated)
        offsets = torch.nn.functional.pad(bag_lengths.cumsum(0), (1, 0))
        batch = BagBatch(own_rows, offsets, size, own_weights, tuple(bounds) if size else None)
        return UnitStep(batch, own_weights, None, index if wanted else None, tuple(bounds))


@dataclass(frozen=True, slots=True, eq=False)
class _ChannelLookups:
    """A channel's lookups: their rows, the lengths of its bags, and positions in the batch."""

    rows: Tensor
    lengths: Tensor
    order: Tensor | None
    start: int
    stop: int

    def select(self, values: Tensor) -> Tensor:
        """Return the values of these lookups from values of all lookups of the batch."""
        own = values[self.start : self.stop]
        return own if self.order is None else own.index_select(0, self.order)


def _spread(
    table: TableRoutes, columns: ColumnSlice, ids: Tensor, lengths: Tensor, start: int
) -> tuple[Tensor | None, list[_ChannelLookups]]:
    """Group a feature's lookups by target, in the order of the batch; return order and groups."""
    total, size, count = ids.numel(), lengths.numel(), len(columns.targets)
    if columns.router is None:
        return None, [_ChannelLookups(ids.long(), lengths, None, start, start + total)]
    target, rows = table.route(ids, columns)
    kind = torch.uint8 if count < 256 else torch.int32
    order = torch.sort(target.to(kind), stable=True).indices.int()
    bags = torch.arange(size, device=rows.device).repeat_interleave(lengths, output_size=total)
    by_bag = torch.bincount(target * size + bags, minlength=count * size).view(count, size)
    counts = by_bag.sum(1).tolist()
    parts = torch.split(rows.index_select(0, order), counts), by_bag, torch.split(order, counts)
    return order, [_ChannelLookups(*own, start, start + total) for own in zip(*parts, strict=True)]


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


def _starts(sizes: Int) -> Int:
    """Return the start of each part, if the parts are concatenated."""
    return (sizes.cumsum() - sizes.ravel()).reshape(sizes.shape)


SentBatch = Future[tuple[ShardedBatch, torch.cuda.Event | None]]
"""An exchanged batch or the error of its exchange; and, on a GPU, an event that completes when the
batch is there. `ShardedEmbeddings.send_ahead` makes it for one call of `prefetch`."""


class InputsAhead:
    """Exchanges batches in a thread, in the order of calls.

    From the first batch sent ahead on, exchanges run in a thread and a separate process group. So
    their collectives may interleave with those of the training in any way, if all ranks send
    batches in the same order. `group` makes the process group, at the same point of all ranks'
    loops.
    """

    def __init__(self, inputs: InputExchange, group: Callable[[], Communicator]) -> None:
        self._inputs, self.group = inputs, group
        self.comm: Communicator | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._lost: Exception | None = None

    def send(
        self, batch: BagBatch, number: NumberedBatch | None, training: bool = True
    ) -> SentBatch:
        """Begin a batch's exchange; `arrived` waits for it."""
        if self._thread is None:
            self.comm = self.group()
            self._inputs = replace(self._inputs, comm=self.comm)
            # Not a daemon: at exit Python waits for an exchange, at most its timeout.
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="placer exchange")
            if self._inputs.device.type == "cuda":
                self._stream = torch.cuda.Stream(self._inputs.device)  # type: ignore[no-untyped-call]
        made = None
        if self._stream is not None:
            with torch.cuda.device(self._inputs.device):
                made = recorded()
        key_step = self._inputs.keys.open_step() if training else None
        return self._thread.submit(self._exchange, batch, number, training, key_step, made)

    def arrived(self, sent: SentBatch) -> ShardedBatch:
        """Wait for the exchange of a batch and return it."""
        step, ready = sent.result()
        if ready is not None:
            stream = torch.cuda.current_stream(self._inputs.device)
            stream.wait_event(ready)
            keep_until_used(step, stream)
        return step

    def now(self, batch: BagBatch, number: NumberedBatch | None, training: bool) -> ShardedBatch:
        """Exchange a batch that was not sent ahead, after all batches that were."""
        if self._thread is None:
            key_step = self._inputs.keys.open_step() if training else None
            return self._inputs(batch, training, key_step, number)
        return self.arrived(self.send(batch, number, training))

    def wait(self) -> None:
        """Wait until all batches sent ahead have arrived."""
        if self._thread is not None:
            self._thread.submit(int).result()

    def close(self) -> None:
        """Wait for all exchanges that have begun, even if no step will use them."""
        if self._thread is not None and self.comm is not None:
            self._thread.shutdown()
            self.comm.close()

    def _exchange(
        self,
        batch: BagBatch,
        number: NumberedBatch | None,
        training: bool,
        key_step: KeyStep | None,
        made: "torch.cuda.Event | None",
    ) -> "tuple[ShardedBatch, torch.cuda.Event | None]":
        if self._lost is not None:
            raise self._lost  # No rank would answer: skip the timeout.
        try:
            if self._stream is None:
                return self._inputs(batch, training, key_step, number), None
            with torch.cuda.device(self._inputs.device), torch.cuda.stream(self._stream):
                if made is not None:
                    self._stream.wait_event(made)
                return self._inputs(batch, training, key_step, number), recorded()
        except Exception as error:
            if not on_every_rank(error):
                self._lost = error
            raise
