"""Translate keys of growing tables into rows over many ranks; each rank maps part of the keys."""

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.executor.distributed.collectives import Communicator
from placer.executor.distributed.table_routes import TableRoutes
from placer.executor.growing_keys import GrowingKeys, KeyStep
from placer.executor.id_order import IdOrder
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import FeatureRead, feature_bounds
from placer.growing import Growing, KeyCounts
from placer.growing.hashes import digest_of, parts_of
from placer.growing.key_map import StepRows
from placer.growing.options import OPEN_OVER_RANKS, Int
from placer.tables import Table


class ShardedKeys(GrowingKeys):
    """The key maps of growing tables; a hash gives each key to one trainer.

    A rank sends a key to the key's trainer and gets the number of its row. The lookup then goes to
    the rank that holds this row. A trainer reads keys rank by rank, in the order of each batch.

    Keys are mapped during the exchange of a batch, possibly in another thread than the training.
    Only the main thread touches rows, so it resets reused rows later, in `begin_rows`. `comm` has
    the trainers, for the main thread's exchanges; `exchange` gets a communicator of its own.
    """

    def __init__(
        self,
        growing: Mapping[str, Growing],
        tables: Mapping[str, Table],
        seed: int | None,
        comm: Communicator,
    ) -> None:
        # A server maps no keys, so its part does not matter.
        super().__init__(growing, tables, seed, max(comm.rank, 0), comm.world)
        self._comm, self._is_server = comm, comm.rank < 0
        # Waits until the keys of all batches sent ahead are mapped.
        self.wait: Callable[[], None] = lambda: None
        self._new_rows: deque[tuple[str, Tensor, Int]] = deque()

    def of_tables(self, names: Sequence[str]) -> "ShardedKeys":
        """Return the key maps of some tables, with separate steps."""
        part = copy.copy(self)
        part.maps = {name: keys for name, keys in self.maps.items() if name in names}
        part._forget_steps()
        part._new_rows = deque()
        return part

    def open_step(self) -> KeyStep | None:
        return None if self._is_server else super().open_step()

    def drop_ahead(self) -> None:
        if self.maps:
            self.wait()
            super().drop_ahead()

    def exchange(
        self,
        batch: BagBatch,
        features: Sequence[FeatureRead],
        open_before: int | None,
        routes: Mapping[str, TableRoutes],
        comm: Communicator,
    ) -> BagBatch:
        """Return the batch with each key replaced by its row. All ranks must call this.

        `open_before` must be the same on all ranks; see `rows_of`.
        """
        if not self.maps:
            return batch
        ids = batch.ids.cpu().to(torch.int64, copy=True)
        tables, world = len(self.maps), comm.world
        numbers = {name: number for number, name in enumerate(self.maps)}
        table_of = np.full(ids.numel(), -1)
        for feature, span in zip(features, feature_bounds(batch, features), strict=True):
            table_of[slice(*span)] = numbers.get(feature.table, -1)
        (places,) = (table_of >= 0).nonzero()
        # Sort by rank, then by table, then by position in the batch.
        groups = parts_of(ids.numpy()[places], self._comm.world) * tables + table_of[places]
        here = torch.from_numpy(places[groups.argsort(kind="stable")])
        counts = np.bincount(groups, minlength=world * tables).reshape(world, tables)
        digests = [digest_of(ids.numpy()[table_of == number]) for number in range(tables)]
        # Ranks compare whole batches, so that they agree which steps are repeated.
        header = np.hstack((counts, np.tile(digests, (world, 1)))).reshape(-1)
        each = [2 * tables] * world
        said = comm.exchange("header", torch.from_numpy(header), each, each).cpu().numpy()
        came, theirs = np.split(said.reshape(world, 2 * tables), 2, axis=1)
        sizes, received = counts.sum(1).tolist(), came.sum(1).tolist()
        keys = comm.exchange("keys", ids[here], sizes, received).cpu().numpy()
        read = np.tile(np.arange(tables), world).repeat(came.reshape(-1))
        open_steps = None if open_before is None else max(OPEN_OVER_RANKS, open_before)
        rows, begun = self._mapped(keys, read, open_steps, theirs.sum(0).tolist())
        ids[here] = comm.exchange("keys", torch.from_numpy(rows), received, sizes).cpu().long()
        if open_before is not None:
            self._send_changes(begun, routes, batch.ids.device, comm)
        return replace(batch, ids=ids.to(batch.ids.device))

    def _mapped(
        self, keys: Int, table_of: Int, open_steps: int | None, digests: Sequence[int]
    ) -> tuple[npt.NDArray[np.int32], dict[str, StepRows]]:
        """Return the rows of keys, given the number of each key's table; and each table's step.

        `digests` are those of each table's keys on all ranks.
        """
        rows, steps = np.empty(keys.size, np.int32), {}
        for number, (name, own) in enumerate(self.maps.items()):
            here = table_of == number
            if open_steps is None:
                rows[here] = own.find(keys[here])
            else:
                steps[name] = own.read(keys[here], open_steps, digests[number])
                rows[here] = steps[name].rows
        return rows, steps

    def _send_changes(
        self,
        steps: Mapping[str, StepRows],
        routes: Mapping[str, TableRoutes],
        device: torch.device,
        comm: Communicator,
    ) -> None:
        """Send reused rows to all their holders, and note those received, for `begin_rows`."""
        parts: list[list[Int]] = [[np.empty((0, 3), np.int64)] for _ in range(comm.world)]
        for number, (name, step) in enumerate(steps.items()):
            if step.reused.size:
                numbers = np.full(step.reused.size, number)
                said = np.column_stack((numbers, step.reused, step.new_keys))
                held = routes[name].places_by_rank(torch.from_numpy(step.reused).to(device))
                for rank, places in held.items():
                    parts[rank].append(said[places.cpu().numpy()])
        sizes, each = [sum(part.size for part in own) for own in parts], [1] * comm.world
        received = comm.exchange("header", torch.tensor(sizes), each, each).tolist()
        values = torch.from_numpy(
            np.concatenate([part for own in parts for part in own]).reshape(-1)
        )
        came = comm.exchange("keys", values, sizes, received).cpu().view(-1, 3)
        for number, name in enumerate(steps):
            own = came[came[:, 0] == number]
            if len(own):
                self._new_rows.append((name, own[:, 1], own[:, 2].contiguous().numpy()))

    def begin_rows(self, order: IdOrder) -> None:
        """Reset this rank's rows that were reused since the last call."""
        while self._new_rows:
            name, rows, keys = self._new_rows.popleft()
            self._begin_again({name: (rows, keys)}, order)

    def counts(self) -> dict[str, KeyCounts]:
        self.wait()
        return {
            name: KeyCounts(*self._comm.total("state", torch.tensor(own)).tolist())
            for name, own in super().counts().items()
        }

    def live(self, table: str) -> tuple[Tensor, Tensor]:
        self.wait()
        keys, rows = (self._joined(values) for values in super().live(table))
        order = rows.argsort()
        return keys[order], rows[order]

    def state(self) -> dict[str, Tensor]:
        self.wait()
        return {name: self._joined(values) for name, values in super().state().items()}

    def _joined(self, values: Tensor) -> Tensor:
        """Return the tensors of all ranks, concatenated, on every rank."""
        comm, size = self._comm, values.numel()
        sizes = [theirs for (theirs,) in comm.numbers([size])]
        sent = values.reshape(-1).repeat(comm.world)
        found = comm.exchange("state", sent, [size] * comm.world, sizes)
        return found.cpu().view(-1, *values.shape[1:])
