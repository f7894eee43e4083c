"""Count the bytes that processes send each other in a step, exactly, by kind.

Counts the data that `placer.executor.distributed` sends between ranks, without the headers of
batches, a few numbers per rank. For column-sliced rows under row-wise Adagrad, it counts the
exchange of the CPU backends: one number for each distinct row.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from placer.data.log import Bags
from placer.executor.distributed.channels import channel_pooling
from placer.executor.distributed.division import ColumnSlice, Target
from placer.executor.distributed.table_routes import TableRoutes
from placer.simulator.counts import ExchangeKind, Int, Served
from placer.simulator.parts import Arrangement
from placer.simulator.table_reads import AnyInt, Distinct, Slices, TableRead, distinct_counts
from placer.tables import DTYPE_BYTES

_ID, _LENGTH, _NUMBER, _COUNT = 8, 4, 4, 8
"""Bytes of an id, of a bag's length, of an element of a row, and of a count."""


class TableExchange:
    """Counts the bytes that processes send each other for the lookups of one table."""

    def __init__(self, arrangement: Arrangement, number: int) -> None:
        self._world, self._ends = arrangement.processes, arrangement.ends
        table = arrangement.plan.tables[number]
        self._number, self._features = number, table.features
        self._exchanged = DTYPE_BYTES[arrangement.plan.exchange_dtype]
        none = TableRoutes(table, (), None)  # For tables without rows.
        self._routes = arrangement.routes.get(table.name, none)
        self._column_slices = self._routes.column_slices
        # Shape (targets, processes): the holder that serves each process's samples.
        self._served_by = [
            np.array([[one.holder_for(s) for s in range(self._world)] for one in columns.targets])
            for columns in self._column_slices
        ]
        # Under row-wise Adagrad: rows with columns on several ranks, and these ranks.
        by_peers: dict[str, list[Target]] = defaultdict(list)
        for columns in self._column_slices:
            for target in columns.targets:
                if target.peers and not target.replicated:
                    by_peers[target.peers].append(target)
        self._row_groups = [
            (_slices(members[0]), sorted({rank for one in members for rank in one.holders}))
            for members in by_peers.values()
        ]

    def add(
        self,
        sent: Mapping[ExchangeKind, Int],
        served: Served,
        bags: Sequence[Bags],
        samples: int,
        read: TableRead,
    ) -> None:
        """Add a batch's bytes of all kinds except replicas to `sent` and `served`."""
        own, sources = np.diff(self._ends(samples)), np.arange(self._world)
        known: dict[int, Int] = {}
        for columns, holders in zip(self._column_slices, self._served_by, strict=True):
            targets = columns.targets
            alone = len(targets) == 1 and not targets[0].replicated
            poolings = [channel_pooling(one.pooling, alone) for one in self._features]
            # Arrays have the shape (features, targets, processes with the samples).
            key = id(columns.router)  # Column slices may share one.
            if key not in known:
                known[key] = self._lookups(columns, bags, read)
            lookups = known[key]
            is_single = np.array([pooling == "none" for pooling in poolings])[:, None, None]
            vectors = np.where(is_single, lookups, own)
            lengths, ids = np.broadcast_to(_LENGTH * own, vectors.shape), _ID * lookups
            cells = vectors * np.array([target.width for target in targets])[:, None]
            pooled, crossing = self._exchanged * cells, holders != sources
            to_holders = sources, holders
            np.add.at(sent["lengths"], to_holders, lengths.sum(0))
            np.add.at(sent["ids"], to_holders, ids.sum(0))
            np.add.at(sent["gradients"], to_holders, pooled.sum(0))
            np.add.at(sent["outputs"], (holders, sources), pooled.sum(0))
            for of_table, amount in (
                (served.output_vectors, vectors),
                (served.output_bytes, _NUMBER * cells),
                (served.request_bytes, (lengths + ids) * crossing),
                (served.returned_bytes, 2 * pooled * crossing),
                (served.pooled_bytes, pooled * crossing),
            ):
                np.add.at(of_table[self._number], holders, amount.sum(0))
        if read.all is not None:
            for slices, ranks in self._row_groups:
                found = slices.select(read.all.ranks)
                rows = sum(read.all.ranks[here].size for here in found)
                for rank in ranks:
                    others = [other for other in ranks if other != rank]
                    sent["rows"][rank, others] += _NUMBER * rows
                    served.returned_bytes[self._number, rank] += _NUMBER * rows * len(others)

    def _lookups(self, columns: ColumnSlice, bags: Sequence[Bags], read: TableRead) -> Int:
        """Return lookups by feature, target and source process: int64, in this shape."""
        router, order = columns.router, self._routes.order
        if router is None:
            return read.by_source[:, None]
        shape = len(columns.targets), self._world
        found = []
        for one, by_source in zip(bags, read.by_source, strict=True):
            ids = torch.tensor(one.ids)
            slices = router.slices_of(ids if order is None else order.ranks_of(ids))
            number = router.targets[slices].numpy() * self._world + np.repeat(
                np.arange(self._world), by_source
            )
            found.append(np.bincount(number, minlength=shape[0] * shape[1]).reshape(shape))
        return np.array(found)


class ReplicaExchange:
    """Counts the bytes that holders of replicated rows send to add up gradients.

    Each row has one holder that adds up its gradients. The others send it their sums, and it sends
    the totals to all of them.
    """

    def __init__(self, arrangement: Arrangement) -> None:
        self._numbers = {t.name: number for number, t in enumerate(arrangement.plan.tables)}
        self._groups: dict[tuple[int, ...], list[Target]] = defaultdict(list)
        for routes in arrangement.routes.values():
            for columns in routes.column_slices:
                for target in columns.targets:
                    if target.replicated:
                        self._groups[target.holders].append(target)
        self._modules = {
            (module.process, module.holders): number
            for number, module in enumerate(arrangement.modules)
        }

    def add(
        self, sent: Mapping[ExchangeKind, Int], served: Served, reads: Mapping[int, TableRead]
    ) -> None:
        """Add a batch's bytes to `sent` and `served`.

        `served` does not include the few numbers that say how many rows follow.
        """
        for holders in sorted(self._groups):
            targets, members = self._groups[holders], np.array(holders)
            here = np.ix_(members, members)
            sent["replica counts"][here] += 2 * _COUNT * len(targets)
            for target in targets:
                number = self._numbers[target.table.name]
                row_bytes = _ID + _NUMBER * target.width
                if number not in reads:  # No feature reads the table.
                    continue
                rows = [
                    _rows_of(target, reads[number].by_module[self._modules[holder, holders]])
                    for holder in holders
                ]
                union = distinct_counts(np.concatenate(rows), target.rows)[0]
                # Rows are dealt to holders in turn. Each holder sends totals of its rows to all.
                dealt = np.array([_dealt(own, len(holders)) for own in rows])
                out = row_bytes * (dealt + _dealt(union, len(holders))[:, None])
                sent["replicas"][here] += out
                served.returned_bytes[number, members] += out.sum(1) - out.diagonal()


def _slices(target: Target) -> Slices:
    return Slices([(one.start, one.stop, one.step) for one in target.parts], target.table.rows)


def _rows_of(target: Target, distinct: Distinct) -> AnyInt:
    """Return the distinct rows that a target has, numbered as rows of the target."""
    if target.by_id:
        return distinct.ids
    found = _slices(target).select(distinct.ranks)
    of_parts = zip(found, target.parts, target.bases, strict=True)
    rows = (
        (distinct.ranks[here].astype(np.int64) - part.start) // part.step + base
        for here, part, base in of_parts
    )
    return np.concatenate([*rows])


def _dealt(rows: AnyInt, holders: int) -> Int:
    """Return how many of the rows each holder adds up: int64, shape (holders,)."""
    return np.bincount(rows % holders, minlength=holders)
