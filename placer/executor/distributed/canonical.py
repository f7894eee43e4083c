"""Tensors of whole tables, read from and written to the ranks that hold their parts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from placer.executor.distributed.collectives import Communicator
from placer.executor.distributed.local_shards import read_rows, write_rows
from placer.executor.distributed.placement.division import Target
from placer.executor.distributed.placement.table_routes import TableRoutes
from placer.executor.id_order import Span
from placer.executor.local.placed_embeddings import PlacedEmbeddings
from placer.executor.memory.initial_weights import CHUNK_ROWS, initial_weights
from placer.plan.plan import Plan
from placer.tables import OptimizerName, Table


@dataclass(frozen=True, slots=True, eq=False)
class Canonical:
    """Reads and writes tables in id order, whatever the plan.

    Attributes
    ----------
    maps : mapping of table name to TableRoutes
    held : mapping of target name to PlacedEmbeddings
        What this rank holds.
    comm : Communicator
    device : torch.device
        Of the maps.
    """

    maps: Mapping[str, TableRoutes]
    held: Mapping[str, PlacedEmbeddings]
    comm: Communicator
    device: torch.device

    def gather(self, table: str, tensor: str, into: Tensor) -> None:
        """Fill a tensor of a whole table, on the host, on every rank; all must be here.

        A chunk of rows at a time: each rank puts in what it holds and zeros elsewhere, and the
        bits are added as integers, so that they arrive as they are.
        """
        if not into.numel():
            return
        for start in range(0, into.shape[0], CHUNK_ROWS):
            part = into[start : start + CHUNK_ROWS]
            ids = torch.arange(start, start + part.shape[0])
            chunk = torch.zeros(part.shape, dtype=torch.float32)
            for target, module, places, rows in self._here(table, ids):
                if target.holders[0] != self.comm.rank:
                    continue
                values = read_rows(module, target.name, tensor, rows).float()
                if chunk.dim() == 2:
                    chunk[places, slice(*target.cols)] = values
                elif not target.cols[0]:  # Of copies that column slices of a row share, one.
                    chunk[places] = values
            bits = self.comm.total("state", chunk.view(torch.int32)).cpu()
            part.copy_(bits.view(torch.float32))

    def scatter(self, table: str, tensor: str, values: Tensor) -> None:
        """Overwrite what this rank holds of a table, from the whole tensor."""
        for start in range(0, values.shape[0], CHUNK_ROWS):
            part = values[start : start + CHUNK_ROWS]
            self.put(table, tensor, torch.arange(start, start + part.shape[0]), part)

    def draw(self, table: str, seed: int) -> None:
        """Set initial weights, as one process would draw them."""
        for ids, values in initial_weights(self.maps[table].table, seed):
            self.put(table, "weight", ids, values)

    def put(self, table: str, tensor: str, ids: Tensor, values: Tensor) -> None:
        """Overwrite what this rank holds of some rows, whose ids are distinct."""
        for target, module, places, rows in self._here(table, ids):
            own = values[places]
            if own.dim() == 2:
                own = own[:, slice(*target.cols)]
            write_rows(module, target.name, tensor, rows, own)

    def bring(self, asked: Sequence[Span | None]) -> Tensor | None:
        """One span for each rank, from those that hold its rows; see `IdOrder.bring`.

        Only the bytes that are asked for travel, as they are, by one all-to-all. Who sends what
        follows from the plan, so that nobody has to be told.
        """
        rank, world = self.comm.rank, self.comm.world
        own = asked[rank]
        # What is here anyway does not go through the exchange.
        sent = [
            self._packed(None if asker == rank else span, asker) for asker, span in enumerate(asked)
        ]
        parts = [] if own is None else list(self._sources(own, rank))
        sizes = [0] * world
        for target, places, _ in parts:
            source = target.holder_for(rank)
            if own is not None and source != rank:
                sizes[source] += places.numel() * _row_bytes(own, target)
        counts = [part.numel() for part in sent]
        received = self.comm.exchange("state", torch.cat(sent), counts, sizes).cpu()
        if own is None:
            return None
        by_source = list(torch.split(received, sizes))
        by_source[rank] = self._packed(own, rank)
        read = [0] * world
        block = torch.empty(own.shape, dtype=own.tensor.dtype)
        for target, places, _ in parts:
            source, size = target.holder_for(rank), places.numel() * _row_bytes(own, target)
            values = by_source[source][read[source] : read[source] + size].view(block.dtype)
            read[source] += size
            if block.dim() == 1:
                block[places] = values
            else:
                block[places, slice(*target.cols)] = values.view(-1, target.width)
        return block

    def has_some(self, span: Span) -> bool:
        """Whether this rank holds some of these rows."""
        return any(rows.numel() for *_, rows in self._here(span.tensor.table.name, span.ids))

    def shares(self, table: Table) -> list[float]:
        """Which part of a table each rank holds; copies are shared out evenly."""
        held = [0.0] * self.comm.world
        for columns in self.maps[table.name].column_slices:
            for target in columns.targets:
                for holder in target.holders:
                    held[holder] += target.rows * target.width / len(target.holders)
        return [cells / (table.rows * table.dim) for cells in held]

    def _packed(self, span: Span | None, asker: int) -> Tensor:
        """What this rank sends of a span, as bytes."""
        found = [torch.empty(0, dtype=torch.uint8)]
        if span is not None:
            for target, _, rows in self._sources(span, asker, self.comm.rank):
                module = self.held[target.name]
                values = read_rows(module, target.name, span.tensor.name, rows)
                flat = values.to(span.tensor.dtype).contiguous().view(-1)
                found.append(flat.view(torch.uint8))
        return torch.cat(found)

    def _sources(
        self, span: Span, asker: int, only: int | None = None
    ) -> Iterator[tuple[Target, Tensor, Tensor]]:
        """Targets that have some of a span, positions in the span, and rows of the target.

        With `only`, those that this rank serves the asker; each cell comes from one holder.
        """
        known = self.maps[span.tensor.table.name]
        # Column slices of a row have equal copies of a state that is one number a row.
        for columns in (
            known.column_slices if len(span.tensor.shape) > 1 else known.column_slices[:1]
        ):
            serves = [only in (None, target.holder_for(asker)) for target in columns.targets]
            if not any(serves):
                continue
            position, rows = (part.cpu() for part in known.route(span.ids.to(self.device), columns))
            for number, target in enumerate(columns.targets):
                if serves[number]:
                    places = torch.nonzero(position == number).squeeze(1)
                    yield target, places, rows[places]

    def _here(
        self, table: str, ids: Tensor
    ) -> Iterator[tuple[Target, PlacedEmbeddings, Tensor, Tensor]]:
        """What is here of some ids: target, module, positions among the ids, rows."""
        known = self.maps[table]
        for columns in known.column_slices:
            if not any(target.name in self.held for target in columns.targets):
                continue
            position, rows = (part.cpu() for part in known.route(ids.to(self.device), columns))
            for number, target in enumerate(columns.targets):
                module = self.held.get(target.name)
                if module is not None:
                    places = torch.nonzero(position == number).squeeze(1)
                    yield target, module, places, rows[places]


def _row_bytes(span: Span, target: Target) -> int:
    """Bytes of a target's part of a row."""
    return span.tensor.dtype.itemsize * (target.width if len(span.tensor.shape) > 1 else 1)


@dataclass(frozen=True, slots=True, eq=False)
class SpreadTables:
    """Tables whose parts many ranks hold, in the order of ids: an `IdOrder`.

    Attributes
    ----------
    plan : Plan
    optimizers : mapping of table name to optimizer
    counts_updates : bool
    canonical : Canonical
    modules : tuple of PlacedEmbeddings
        What this rank holds.
    """

    plan: Plan
    optimizers: Mapping[str, OptimizerName]
    counts_updates: bool
    canonical: Canonical
    modules: tuple[PlacedEmbeddings, ...]

    @property
    def rank(self) -> int:
        """See `IdOrder`."""
        return self.canonical.comm.rank

    @property
    def world(self) -> int:
        """See `IdOrder`."""
        return self.canonical.comm.world

    @property
    def group(self) -> "dist.ProcessGroup | None":
        """See `IdOrder`."""
        return self.canonical.comm.group

    def settle(self) -> None:
        """See `IdOrder`."""
        for module in self.modules:
            module.rows.settle()

    def shares(self, table: Table) -> list[float]:
        """See `IdOrder`."""
        return self.canonical.shares(table)

    def bring(self, asked: Sequence[Span | None]) -> Tensor | None:
        """See `IdOrder`."""
        return self.canonical.bring(asked)

    def has_some(self, span: Span) -> bool:
        """See `IdOrder`."""
        return self.canonical.has_some(span)

    def put(self, span: Span, values: Tensor) -> None:
        """See `IdOrder`."""
        self.canonical.put(span.tensor.table.name, span.tensor.name, span.ids, values)

    def update_count(self) -> int:
        """See `IdOrder`."""
        own = max((module.update_count() for module in self.modules), default=0)
        return int(self.canonical.comm.gather("state", torch.tensor([own])).max())

    def set_update_count(self, updates: int) -> None:
        """See `IdOrder`."""
        for module in self.modules:
            module.set_update_count(updates)
