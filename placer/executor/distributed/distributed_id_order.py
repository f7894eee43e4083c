"""Read and write tables by id if many processes hold their parts."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from placer.executor.distributed.channels import Survey
from placer.executor.distributed.division import Target
from placer.executor.distributed.table_ranks import Command, TableRanks
from placer.executor.id_order import IdOrder, IdRange, LocalIdOrder, TableTensor, blocks_of
from placer.tables import Table

_Held = Mapping[str, LocalIdOrder]

_Part = tuple[Target, Tensor, Tensor]
"""A target, the positions of its rows in a block, and its own numbers of these rows."""


class DistributedIdOrder(IdOrder):
    """Access by id to tables that the processes of a group share; see `IdOrder`.

    `held` has this process's rows, by target. Trainers read and write the rows of the servers that
    follow them, so `world` counts trainers, and `group` has trainers only.
    """

    def __init__(
        self,
        survey: Survey,
        counts_updates: bool,
        held: _Held,
        ranks: TableRanks,
        device: torch.device,
    ) -> None:
        super().__init__(survey.plan, survey.optimizers, counts_updates)
        self._ranks, trainers = ranks, ranks.trainers
        self.rank, self.world, self.group = ranks.comm.rank, trainers.world, trainers.group
        self._orders = tuple(dict.fromkeys(held.values()))
        self._routes, self._held, self._device = survey.routes, held, device
        self._comm, self._targets = ranks.comm, survey.targets
        # Messages to servers name a tensor and a target by number.
        self.numbered = tuple(self.tensors())
        self._numbers = {(t.table.name, t.name): n for n, t in enumerate(self.numbered)}
        self._target_numbers = {target.name: n for n, target in enumerate(survey.targets)}
        self.counted: Callable[[int], None] | None = None  # Called with each count that is set.

    def overwrite_from_first(self, weight: TableTensor, values: Tensor | None) -> None:
        """Set initial weights to those of the first process. All processes must call this.

        So all have the same rows, even if each drew weights from a generator of its own. Values
        of other processes are ignored.
        """
        for block in blocks_of(weight):
            if values is None:
                part = torch.empty(block.shape, dtype=weight.dtype)
            else:
                part = values[block.start : block.stop].detach().to(weight.dtype)
            self.write(block, self._ranks.acting.from_first("state", part))

    def synchronize(self) -> None:
        for order in self._orders:
            order.synchronize()

    def shares(self, table: Table) -> list[float]:
        # A server's rows are written by the trainer that it follows.
        held = [0.0] * self.world
        for columns in self._routes[table.name].column_slices:
            for target in columns.targets:
                for holder in target.holders:
                    writer = self._ranks.leader_of(holder)
                    held[writer] += target.rows * target.width / len(target.holders)
        return [cells / (table.rows * table.dim) for cells in held]

    def fetch(self, requests: Sequence[IdRange | None]) -> Tensor | None:
        # One all-to-all sends the requested bytes only. The senders follow from the plan, so no
        # process sends requests. Rows of this process stay out of the all-to-all.
        said = [
            (self._numbers[one.tensor.table.name, one.tensor.name], one.start, one.stop)
            if one
            else (-1, 0, 0)
            for one in requests
        ]
        self._ranks.tell(Command.FETCH, then=[torch.tensor(said)])
        requests = [*requests, *[None] * (self._comm.world - self.world)]  # Servers write nothing.
        own = requests[self.rank]
        sent = [
            self._packed(None if asker == self.rank else block, asker)
            for asker, block in enumerate(requests)
        ]
        parts = [] if own is None else list(self._sources(own, self.rank))
        sizes = [0] * self._comm.world
        for target, places, _ in parts:
            source = target.holder_for(self.rank)
            if own is not None and source != self.rank:
                sizes[source] += places.numel() * own.tensor.width_bytes(target.width)
        counts = [part.numel() for part in sent]
        received = self._comm.exchange("state", torch.cat(sent), counts, sizes).cpu()
        if own is None:
            return None
        by_source = list(torch.split(received, sizes))
        by_source[self.rank] = self._packed(own, self.rank)
        read = [0] * self._comm.world
        result = torch.empty(own.shape, dtype=own.tensor.dtype)
        for target, places, _ in parts:
            source = target.holder_for(self.rank)
            size = places.numel() * own.tensor.width_bytes(target.width)
            values = by_source[source][read[source] : read[source] + size].view(result.dtype)
            read[source] += size
            if own.tensor.is_per_row:
                result[places] = values
            else:
                result[places, slice(*target.cols)] = values.view(-1, target.width)
        return result

    def holds(self, block: IdRange) -> bool:
        parts = self._parts(block.tensor.table, block.ids, self._is_written)
        return any(places.numel() for _, places, _ in parts)

    def write(self, block: IdRange, values: Tensor) -> None:
        for target, places, rows in self._parts(block.tensor.table, block.ids, self._is_written):
            own = values[places]
            if values.dim() > 1:
                own = own[:, slice(*target.cols)]
            self._write_target(target, block.tensor.name, rows, own)

    def start_rows(self, weights: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        for name, (ids, values) in weights.items():
            table = self.plan.tables_by_name[name]
            for target, places, rows in self._parts(table, ids, self._is_held):
                if rows.numel():
                    own = rows, values[places, slice(*target.cols)]
                    self._held[target.name].start_rows({target.name: own})

    def receive(self, target_number: int, tensor_number: int, count: int) -> None:
        """Overwrite rows of a target on this server with rows from the trainer that it follows."""
        target, tensor = self._targets[target_number], self.numbered[tensor_number]
        rows = self._ranks.receive(torch.empty(count, dtype=torch.int64))
        shape = (count,) if tensor.is_per_row else (count, target.width)
        values = self._ranks.receive(torch.empty(shape, dtype=tensor.dtype))
        self._write_target(target, tensor.name, rows, values)

    def update_count(self) -> int:
        self._ranks.tell(Command.COUNT_UPDATES)
        own = max((order.update_count() for order in self._orders), default=0)
        return int(self._comm.gather("state", torch.tensor([own])).max())

    def set_update_count(self, updates: int) -> None:
        self._ranks.tell(Command.SET_UPDATES, updates)
        if self.counted is not None:
            self.counted(updates)
        for order in self._orders:
            order.set_update_count(updates)

    def _packed(self, block: IdRange | None, asker: int) -> Tensor:
        """Return this process's part of a block to send, as bytes."""
        parts = [torch.empty(0, dtype=torch.uint8)]
        if block is not None:
            for target, _, rows in self._sources(block, asker, self.rank):
                values = read_rows(self._held, target, block.tensor.name, rows)
                flat = values.to(block.tensor.dtype).contiguous().view(-1)
                parts.append(flat.view(torch.uint8))
        return torch.cat(parts)

    def _sources(self, block: IdRange, asker: int, only: int | None = None) -> Iterator[_Part]:
        """Yield the parts of a block for an asker, or only the parts that the rank `only` sends.

        Each cell comes from one holder.
        """

        def is_source(target: Target) -> bool:
            # Column slices have equal copies of a state with one number per row.
            is_first = not block.tensor.is_per_row or not target.cols[0]
            return is_first and only in (None, target.holder_for(asker))

        return self._parts(block.tensor.table, block.ids, is_source)

    def _is_held(self, target: Target) -> bool:
        return target.name in self._held

    def _is_written(self, target: Target) -> bool:
        """Return whether this process writes the target, here or on its servers."""
        return self._is_held(target) or not set(target.holders).isdisjoint(self._ranks.followers)

    def _write_target(self, target: Target, name: str, rows: Tensor, values: Tensor) -> None:
        """Overwrite rows on this process, and on the servers that follow it."""
        if not rows.numel():
            return
        if self._is_held(target):
            order = self._held[target.name]
            order.write_rows(order.plan.tables_by_name[target.name], name, rows, values)
        numbers = self._target_numbers[target.name], self._numbers[target.table.name, name]
        then = rows, values.to(self.numbered[numbers[1]].dtype)
        to = [server for server in self._ranks.followers if server in target.holders]
        if to:
            self._ranks.tell(Command.WRITE, *numbers, rows.numel(), then=then, to=to)

    def _parts(
        self, table: Table, ids: Tensor, is_wanted: Callable[[Target], bool]
    ) -> Iterator[_Part]:
        routes = self._routes[table.name]
        for columns in routes.column_slices:
            wanted = [is_wanted(target) for target in columns.targets]
            if not any(wanted):
                continue
            position, rows = routes.route(ids.to(self._device), columns)
            position, rows = position.cpu(), rows.cpu()
            for number, target in enumerate(columns.targets):
                if wanted[number]:
                    places = torch.nonzero(position == number).squeeze(1)
                    yield target, places, rows[places]


def read_rows(held: _Held, target: Target, tensor: str, rows: Tensor) -> Tensor:
    """Return some rows of a target's weights or state, on the host."""
    order = held[target.name]
    return order.read_rows(order.plan.tables_by_name[target.name], tensor, rows)
