"""Find the target and the row of each id, for lookups, checkpoints and initial weights.

Each rank keeps a few numbers per slice for this, and the ids that a row order lists. Of growing
tables, each rank maps part of the keys.
"""

import copy
import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from placer.errors import PlanMismatchError
from placer.executor.distributed.collectives import Communicator
from placer.executor.distributed.division import ColumnSlice
from placer.executor.growing_keys import GrowingKeys, KeyStep
from placer.executor.id_order import IdOrder
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import FeatureRead, feature_bounds, tensors_of
from placer.growing import Growing, KeyCounts
from placer.growing.hashes import digest_of, parts_of
from placer.growing.key_map import StepRows
from placer.growing.options import OPEN_OVER_RANKS, Int
from placer.plan.plan import Plan, listed_ids
from placer.tables import Table

_LONGEST_PERIOD = 1 << 22
"""Longest period of a mix of strides, as each rank keeps a table of one period."""


@dataclass(frozen=True, slots=True, eq=False)
class RankOrder:
    """A row order on the computing device; see `placer.plan.plan.Ranks`."""

    # The listed ids, sorted, and their row ranks: int32 or int64.
    ascending: Tensor
    ranks: Tensor

    @classmethod
    def of(cls, listed: npt.NDArray[np.int64], rows: int, device: torch.device) -> "RankOrder":
        """Return the row order of a table that lists these ids, hottest first."""
        ascending, ranks = torch.sort(torch.from_numpy(listed))
        kind = _kind(rows)
        return cls(ascending.to(device, kind), ranks.to(device, kind))

    def ranks_of(self, ids: Tensor) -> Tensor:
        """Return the row ranks of ids, int64. Unlisted ids follow all listed ids, in id order."""
        listed = self.ascending.numel()
        below = torch.searchsorted(self.ascending, ids.to(self.ascending.dtype))
        at = below.clamp(max=listed - 1)
        known = self.ascending[at] == ids
        return torch.where(known, self.ranks[at].long(), ids.long() + listed - below)


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """Maps each row of a column slice to one of several row slices, and to the row in its target.

    The starts and ends of slices divide rows into segments. Within a segment, owners repeat with a
    period: the least common multiple of the strides.
    """

    # For each segment: its first row, the period of its owners, and their start in `owners`.
    segment_starts: Tensor
    periods: Tensor
    offsets: Tensor
    owners: Tensor  # Slice of each row of a period, int32; −1 for none.
    # For each slice: row r is row ``bases + (r − starts) / steps`` of its target.
    starts: Tensor
    steps: Tensor
    bases: Tensor
    targets: Tensor

    @classmethod
    def of(
        cls, rows: int, slices: Sequence[tuple[range, int, int]], device: torch.device
    ) -> "Router":
        """Make a router from slices, each with its target and its first row in the target."""
        # Slices of one stride make one segment, with their first and last few rows included.
        by_step: dict[int, list[range]] = defaultdict(list)
        for part, _, _ in slices:
            by_step[part.step].append(part)
        spans: dict[range, tuple[int, int]] = {}
        for step, parts in by_step.items():
            firsts = sorted({0, *(part.start for part in parts)})
            ends = sorted({rows, *(part.stop for part in parts)})
            for part in parts:
                first = firsts[bisect_right(firsts, part.start - step)]
                spans[part] = first, ends[bisect_right(ends, part[-1] + step) - 1]
        edges = {0, rows, *chain.from_iterable(spans.values())}
        segment_starts = [*sorted(end for end in edges if 0 <= end <= rows)]
        periods, offsets, owners = [], [0], []
        for low, high in pairwise(segment_starts):
            active = [
                (index, part)
                for index, (part, _, _) in enumerate(slices)
                if spans[part][0] <= low and high <= spans[part][1]
            ]
            span = min(math.lcm(*(part.step for _, part in active)), high - low)
            if span > _LONGEST_PERIOD:
                strides = sorted({part.step for _, part in active})
                raise PlanMismatchError(
                    f"shards with strides {strides} repeat every {span} rows only; "
                    "use the same stride for all shards of a table"
                )
            owner = np.full(span, -1, dtype=np.int32)
            for index, part in active:
                owner[(part.start - low) % part.step :: part.step] = index
            owners.append(owner)
            periods.append(span)
            offsets.append(offsets[-1] + span)
        kind = _kind(rows)

        def numbers(values: Sequence[int], dtype: torch.dtype = kind) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        joined = np.concatenate(owners) if owners else np.zeros(0, np.int32)
        return cls(
            numbers(segment_starts[:-1]),
            numbers(periods),
            numbers(offsets[:-1]),
            torch.from_numpy(joined).to(device),
            numbers([part.start for part, _, _ in slices]),
            numbers([part.step for part, _, _ in slices]),
            numbers([base for _, _, base in slices]),
            numbers([target for _, target, _ in slices], torch.int32),
        )

    def slices_of(self, ranks: Tensor) -> Tensor:
        """Return the index of the slice of each row rank, int64; −1 for none."""
        if self.periods.numel() == 1:
            return self.owners[(ranks % self.periods).long()].long()
        segment = (
            torch.searchsorted(self.segment_starts, ranks.to(self.segment_starts.dtype), right=True)
            - 1
        )
        within = (ranks - self.segment_starts[segment]) % self.periods[segment]
        return self.owners[(self.offsets[segment] + within).long()].long()

    def route(self, ranks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target of each row rank, and its row there; both int64, shape (n,)."""
        owner = self.slices_of(ranks)
        local = self.bases[owner] + (ranks - self.starts[owner]) // self.steps[owner]
        return self.targets[owner].long(), local.long()


def _kind(rows: int) -> torch.dtype:
    return torch.int32 if rows < 2**31 else torch.int64


@dataclass(frozen=True, slots=True, eq=False)
class TableRoutes:
    """A table's column slices, from left to right, and its row order if routes depend on it."""

    table: Table
    column_slices: tuple[ColumnSlice, ...]  # Equal row slices share a router.
    order: RankOrder | None  # None if rows are in id order, or undivided.

    def route(self, ids: Tensor, columns: ColumnSlice) -> tuple[Tensor, Tensor]:
        """Return the index of each id's target, and its row there; both int64, shape (n,)."""
        if columns.router is None:
            return torch.zeros_like(ids, dtype=torch.int64), ids.long()
        return columns.router.route(ids if self.order is None else self.order.ranks_of(ids))

    def places_by_rank(self, ids: Tensor) -> dict[int, Tensor]:
        """Return for each rank the ascending positions of ids with rows or columns on this rank."""
        found: dict[int, list[Tensor]] = defaultdict(list)
        for columns in self.column_slices:
            position, _ = self.route(ids, columns)
            for number, target in enumerate(columns.targets):
                places = torch.nonzero(position == number).squeeze(1)
                for rank in target.holders:
                    found[rank].append(places)
        return {rank: torch.unique(torch.cat(parts)) for rank, parts in found.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the table's routing maps on each rank."""
        # Column slices may share a router.
        parts = [self.order, *(columns.router for columns in self.column_slices)]
        return sum({id(t): t.nbytes for part in parts for t in tensors_of(part)}.values())


def table_routes(
    plan: Plan, division: Mapping[str, tuple[ColumnSlice, ...]], device: torch.device
) -> dict[str, TableRoutes]:
    """Return the routes of each table with rows."""
    routes = {}
    for name, column_slices in division.items():
        table, listed = plan.tables_by_name[name], listed_ids(plan, name)
        routers: dict[tuple[object, ...], Router] = {}
        mapped = []
        for columns in column_slices:
            key = tuple(target.parts for target in columns.targets)
            if len(key) > 1 and key not in routers:
                slices = [
                    (part, index, base)
                    for index, target in enumerate(columns.targets)
                    for part, base in zip(target.parts, target.bases, strict=True)
                ]
                routers[key] = Router.of(table.rows, slices, device)
            mapped.append(replace(columns, router=routers.get(key)))
        order = None
        if routers and listed.size:
            order = RankOrder.of(listed, table.rows, device)
        routes[name] = TableRoutes(table, tuple(mapped), order)
    return routes


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
        rows, begun = np.empty(keys.size, np.int32), dict[str, StepRows]()
        for number, (name, own) in enumerate(self.maps.items()):
            of_table = read == number
            if open_steps is None:
                rows[of_table] = own.find(keys[of_table])
            else:
                begun[name] = own.read(keys[of_table], open_steps, int(theirs[:, number].sum()))
                rows[of_table] = begun[name].rows
        ids[here] = comm.exchange("keys", torch.from_numpy(rows), received, sizes).cpu().long()
        if open_before is not None:
            self._send_changes(begun, routes, batch.ids.device, comm)
        return replace(batch, ids=ids.to(batch.ids.device))

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
        keys, rows = map(self._joined, super().live(table))
        return keys, rows

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
