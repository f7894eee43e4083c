"""The autograd node between ranks: it exchanges pooled rows in forward, and gradients in backward.

This one node does all exchanges of a backward pass, always in this order: gradients of pooled rows;
Σ g² of column-sliced rows, in the update of rows with one holder; gradients of lookups' weights;
gradients of replicated rows. So ranks exchange in the same order, even if autograd runs other nodes
in different orders.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from placer.executor.distributed.channels import (
    ShardedBatch,
    Survey,
    UnitStep,
    channels_of,
    concatenated,
)
from placer.executor.distributed.collectives import Communicator, exchange_as
from placer.executor.distributed.row_sums import ReplicaUpdates, RowTotals, all_reduce_rows
from placer.executor.distributed.table_ranks import Command, TableRanks
from placer.executor.distributed.table_routes import ShardedKeys
from placer.executor.local.fused_lookup import check_pass, refuse_scaled
from placer.executor.local.placed_embeddings import PlacedEmbeddings
from placer.executor.lookups.batch_reads import FeatureRead, segment_max
from placer.plan.plan import Plan


class Served:
    """Holds a rank's part of the plan, and serves it to all ranks.

    `build` makes the module for a part of the plan, given the part and its `RowTotals`. Gradients
    are multiplied by `gradient_scale`, 1/world if ranks average their losses. An update closes its
    step of the `keys`. `ranks` tell servers about backward passes.
    """

    def __init__(
        self,
        survey: Survey,
        comm: Communicator,
        device: torch.device,
        gradient_scale: float,
        build: Callable[[Plan, RowTotals | None], PlacedEmbeddings],
        keys: ShardedKeys,
        ranks: TableRanks | None = None,
    ) -> None:
        targets, rank = survey.targets, comm.rank
        self.survey, self.comm, self.device = survey, comm, device
        self.exchange = partial(exchange_as, survey.plan.exchange_dtype, comm)
        self.gradient_scale, self.keys, self.ranks = gradient_scale, keys, ranks
        self.channels = channels_of(rank, comm.world, targets, survey.channels)
        self._totals = RowTotals.of(targets, rank, device, comm)
        self._any_replicated = any(target.replicated for target in targets)
        self.passes = 0  # Backward passes so far.
        self.modules: list[PlacedEmbeddings] = []  # In the order of `channels.units`.
        self._replicas: list[ReplicaUpdates] = []  # In an order that all ranks share.
        for position, unit in enumerate(self.channels.units):
            totals = RowTotals.of(unit.targets, rank, device) if unit.replicated else self._totals
            module = build(survey.plan_of(unit, self.channels, rank), totals)
            self.modules.append(module)
            if unit.replicated:
                channels = [self.channels.served[at] for at in unit.channels]
                self._replicas.append(ReplicaUpdates(position, unit, channels, module))

    @property
    def held(self) -> dict[str, PlacedEmbeddings]:
        """The module of each target, by its name; a unit's targets share one module."""
        return {
            target.name: module
            for unit, module in zip(self.channels.units, self.modules, strict=True)
            for target in unit.targets
        }

    def sizes(self, step: ShardedBatch) -> tuple[list[int], list[int]]:
        """Return the number of elements that this rank returns to each rank, and gets from it."""
        gets = [0] * self.comm.world
        for (rank, channel), rows in zip(self.channels.sent, step.sent_rows, strict=True):
            gets[rank] += rows * channel.target.width
        return (step.served_rows * self.channels.widths).sum(1).tolist(), gets

    def look_up(self, step: ShardedBatch, training: bool) -> list[Tensor]:
        """Return the outputs of `channels.served`. Rows with one holder keep their graph."""
        outputs: dict[int, Tensor] = {}
        held = zip(self.channels.units, self.modules, step.units, strict=True)
        for unit, module, unit_step in held:
            with torch.set_grad_enabled(training and not unit.replicated):
                vectors = module(unit_step.prepared or unit_step.batch)
            outputs |= {at: vectors[self.channels.served[at].name] for at in unit.channels}
        return [outputs[at] for at in range(len(self.channels.served))]

    def to_sources(self, outputs: Sequence[Tensor], step: ShardedBatch) -> Tensor:
        """Join all outputs to one vector, ordered by the rank that gets them."""
        pieces = [
            torch.split(output, rows.tolist())
            for output, rows in zip(outputs, step.served_rows.T, strict=True)
        ]
        parts = [part.reshape(-1) for by_rank in zip(*pieces, strict=True) for part in by_rank]
        return concatenated(parts, torch.float32, self.device)

    def from_sources(self, flat: Tensor, step: ShardedBatch) -> list[Tensor]:
        """Split a vector of gradients, ordered by rank, into those of `channels.served`."""
        widths = self.channels.widths
        sizes = (step.served_rows * widths).ravel().tolist()
        pieces = torch.split(flat, sizes) if sizes else ()
        return [
            torch.cat(pieces[at :: widths.size]).view(-1, int(width))
            for at, width in enumerate(widths)
        ]

    def update(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], step: ShardedBatch
    ) -> Tensor | None:
        """Update all rows; return the gradients of the weights of this rank's lookups."""
        wanted = sum(step.served_lookups) if step.weight_gradients else 0
        weight_gradients = torch.zeros(wanted, dtype=torch.float32, device=self.device)
        by_unit = [[gradients[at] for at in unit.channels] for unit in self.channels.units]
        entered = False
        for unit, own, unit_step in zip(self.channels.units, by_unit, step.units, strict=True):
            weights = unit_step.weights
            if unit.replicated or not own:
                continue
            entered = True
            torch.autograd.backward([outputs[at] for at in unit.channels], own)
            if step.weight_gradients and weights is not None and weights.grad is not None:
                _scatter(weight_gradients, unit_step, weights.grad)
        if self._totals is not None and not entered:
            self._totals.total({})  # Other ranks wait for this rank there.
        result = None
        replicas = [
            (one, by_unit[one.position], step.units[one.position]) for one in self._replicas
        ]
        if step.weight_gradients:
            for one, own, unit_step in replicas:
                _scatter(weight_gradients, unit_step, one.weight_gradients(unit_step, own))
            result = self._return_weight_gradients(weight_gradients, step)
        if self._any_replicated:
            sums = [one.sums(unit_step, own) for one, own, unit_step in replicas]
            holders = [one.holders for one in self._replicas]
            totals = all_reduce_rows(self.comm, holders, sums)
            for one, own_totals in zip(self._replicas, totals, strict=True):
                one.apply(own_totals)
        self.keys.end_step(step.key_step)
        return result

    def combine(self, flat: Tensor, step: ShardedBatch) -> dict[str, Tensor]:
        """Return outputs by feature: float32, (samples, dim), or (lookups, dim) without pooling.

        Partial sums are added in the order of a column slice's targets, for any holders. Autograd
        differentiates these operations.
        """
        came: dict[tuple[int, int, int], Tensor] = {}
        pooled: dict[tuple[int, int], bool] = {}
        shapes = [
            (rows, channel.target.width)
            for (_, channel), rows in zip(self.channels.sent, step.sent_rows, strict=True)
        ]
        parts = torch.split(flat, [rows * width for rows, width in shapes]) if shapes else ()
        for (_, channel), shape, part in zip(self.channels.sent, shapes, parts, strict=True):
            came[channel.feature, channel.columns, channel.position] = part.view(shape)
            pooled[channel.feature, channel.columns] = channel.pooled
        results = {}
        for index, feature in enumerate(self.survey.features):
            table = self.survey.routes.get(feature.table)
            if table is None:  # The table has no rows, so all bags are empty.
                rows = 0 if feature.pooling == "none" else step.bags.batch_size
                dim = self.survey.plan.tables_by_name[feature.table].dim
                column_slices = [flat.new_zeros((rows, dim)) + flat[:0].sum()]
            else:
                column_slices = [
                    _column_slice(
                        feature,
                        pooled[index, number],
                        [came[index, number, place] for place in range(len(columns.targets))],
                        step.routes[index][number],
                        step.bags.offsets_of(index),
                    )
                    for number, columns in enumerate(table.column_slices)
                ]
            whole = column_slices[0] if len(column_slices) == 1 else torch.cat(column_slices, 1)
            if feature.pooling != "max":  # Column slices have maxima already.
                whole = step.bags.output(index, feature, whole)
            results[feature.name] = whole
        return results

    def _return_weight_gradients(self, served: Tensor, step: ShardedBatch) -> Tensor:
        sent, received = step.served_lookups, step.sent_lookups
        own = self.comm.exchange("weights", served / self.gradient_scale, sent, received)
        result = torch.zeros(step.bags.lookups, dtype=torch.float32, device=self.device)
        # Each lookup returns once per column slice. Add them in the order of the batch, so that
        # sums are reproducible.
        order = torch.sort(step.lookups, stable=True).indices
        return result.index_add_(0, step.lookups[order], own[order])


class Serve(torch.autograd.Function):
    """Return the rows of this rank's lookups, as one vector in the order of sending.

    Inputs are an anchor and the weights of the batch's lookups. The anchor requires a gradient, so
    that autograd runs the node.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: Tensor | None,
        step: ShardedBatch,
        served: Served,
        training: bool,
    ) -> Tensor:
        outputs = served.look_up(step, training)
        ctx.sizes = sent, received = served.sizes(step)
        with torch.no_grad():
            flat = served.to_sources(outputs, step)
        ctx.step, ctx.served, ctx.passes = step, served, served.passes
        ctx.outputs = outputs if training else None
        return served.exchange("outputs", flat, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        refuse_scaled()
        step: ShardedBatch = ctx.step
        served: Served = ctx.served
        # All ranks agree on this, so no rank waits for another one.
        check_pass(ctx.outputs is None, step.weight_gradients and ctx.passes < served.passes)
        served.passes += 1
        if served.ranks is not None and step.number is not None:
            served.ranks.tell(Command.BACKWARD, step.number.number)
        received, sent = ctx.sizes
        flat = served.exchange("gradients", gradient, sent, received)
        if served.gradient_scale != 1:
            flat *= served.gradient_scale  # Autograd owns the gradient that is sent.
        by_channel = served.from_sources(flat, step)
        del flat
        weight_gradients = served.update(ctx.outputs, by_channel, step)
        ctx.outputs = None
        if not ctx.needs_input_grad[1]:
            weight_gradients = None
        return None, weight_gradients, None, None, None


def _scatter(all_lookups: Tensor, unit_step: UnitStep, values: Tensor) -> None:
    if unit_step.source is None:
        all_lookups.copy_(values)
    else:
        all_lookups[unit_step.source] = values


def _column_slice(
    feature: FeatureRead, pooled: bool, parts: list[Tensor], order: Tensor | None, offsets: Tensor
) -> Tensor:
    """Return one column slice of a feature: sums, maxima, or rows in the order of the batch.

    Holders have already pooled sums, and maxima of tables that one holder has.
    """
    if pooled:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    if order is not None:
        order = order.long()
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=back.device)
        rows = rows[back]
    return rows if feature.pooling == "none" else segment_max(rows, offsets - offsets[0])
