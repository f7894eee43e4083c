"""What processes send each other in a step, kind by kind, to the byte.

Counts what `placer.executor.distributed` sends between ranks, headers of batches aside: a few
numbers a rank. Of column-sliced rows under row-wise Adagrad, the CPU backends' exchange is
counted: one number for each distinct row.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from placer.data.log import Bags
from placer.executor.distributed.placement.channels import channel_pooling
from placer.executor.distributed.placement.division import ColumnSlice, Target
from placer.simulator.counts import ExchangeKind, Int, Served
from placer.simulator.parts import Arrangement
from placer.simulator.table_reads import (
    AnyInt,
    Distinct,
    Slices,
    TableRead,
    TableReader,
    distinct_counts,
)
from placer.tables import DTYPE_BYTES

_ID, _LENGTH, _NUMBER, _COUNT = 8, 4, 4, 8
"""Bytes of an id, of a bag's length, of an element of a row, and of a count."""


@dataclass(frozen=True, slots=True, eq=False)
class _ServedColumns:
    """The targets of a column slice, and which process serves which.

    `served_by` has shape (targets, processes): the holder that serves each process's samples.
    `slices` tells targets apart and `target_of` whose slice each is; None where there is one.
    """

    parts: ColumnSlice
    served_by: Int
    slices: Slices | None
    target_of: Int


class TableExchange:
    """Counts what processes send each other for the lookups of one table."""

    def __init__(self, arrangement: Arrangement, reader: TableReader) -> None:
        self._world, self._ends = arrangement.processes, arrangement.ends
        self._reader = reader
        self._number = arrangement.plan.tables.index(reader.table)
        table = reader.table
        self._features = table.features
        self._exchanged = DTYPE_BYTES[arrangement.plan.exchange_dtype]
        column_slices = arrangement.column_slices.get(table.name, ())
        known: dict[tuple[object, ...], Slices] = {}
        self._column_slices = []
        for columns in column_slices:
            served_by = np.array(
                [[t.holder_for(s) for s in range(self._world)] for t in columns.targets]
            )
            slices, target_of = None, np.zeros(1, dtype=np.int64)
            if len(columns.targets) > 1:
                rows = tuple(
                    (part.start, part.stop, part.step) for t in columns.targets for part in t.parts
                )
                slices = known.setdefault(rows, Slices(rows, table.rows))
                target_of = np.repeat(
                    np.arange(len(columns.targets)), [len(t.parts) for t in columns.targets]
                )
            self._column_slices.append(_ServedColumns(columns, served_by, slices, target_of))
        self._row_groups = _row_groups(column_slices, table.rows)

    def add(
        self,
        sent: Mapping[ExchangeKind, Int],
        served: Served,
        bags: Sequence[Bags],
        samples: int,
        read: TableRead,
    ) -> None:
        """Add a batch's bytes, all kinds but replicas, to those sent and served."""
        world = self._world
        ends = np.array(self._ends(samples))
        own = np.diff(ends)
        lookups_by_slices: dict[tuple[int, bytes], list[Int]] = {}
        sources = np.arange(world)
        for columns in self._column_slices:
            alone = len(columns.parts.targets) == 1 and not columns.parts.targets[0].replicated
            by_target = self._lookups(columns, lookups_by_slices, bags, ends, read)
            for at, target in enumerate(columns.parts.targets):
                holders = columns.served_by[at]
                for number, feature in enumerate(self._features):
                    lookups = by_target[number][at]
                    pooling = channel_pooling(feature.pooling, alone)
                    vectors = lookups if pooling == "none" else own
                    sent["lengths"][sources, holders] += _LENGTH * own
                    sent["ids"][sources, holders] += _ID * lookups
                    size = self._exchanged * target.width * vectors
                    sent["outputs"][holders, sources] += size
                    sent["gradients"][sources, holders] += size
                    self._serve(served, holders, vectors, target.width, _LENGTH * own, lookups)
        if read.all is not None:
            for slices, ranks in self._row_groups:
                rows = sum(
                    here.stop - here.start if isinstance(here, slice) else here.size
                    for here in slices.select(read.all.ranks)
                )
                for rank in ranks:
                    others = [other for other in ranks if other != rank]
                    sent["rows"][rank, others] += _NUMBER * rows
                    served.returned_bytes[self._number, rank] += _NUMBER * rows * len(others)

    def _serve(
        self,
        served: Served,
        holders: Int,
        vectors: Int,
        width: int,
        length_bytes: Int,
        lookups: Int,
    ) -> None:
        """Add what the holders of a target do for each process's samples of one feature."""
        number, crossing = self._number, holders != np.arange(self._world)
        output = _NUMBER * width * vectors
        np.add.at(served.output_vectors[number], holders, vectors)
        np.add.at(served.output_bytes[number], holders, output)
        request_bytes = (length_bytes + _ID * lookups) * crossing
        np.add.at(served.request_bytes[number], holders, request_bytes)
        pooled = self._exchanged * width * vectors * crossing
        np.add.at(served.returned_bytes[number], holders, 2 * pooled)
        np.add.at(served.pooled_bytes[number], holders, pooled)

    def _lookups(
        self,
        columns: _ServedColumns,
        known: dict[tuple[int, bytes], list[Int]],
        bags: Sequence[Bags],
        ends: Int,
        read: TableRead,
    ) -> list[Int]:
        """Return lookups of each feature by target and source: int64, (targets, processes)."""
        if columns.slices is None:
            return [lookups[None] for lookups in read.by_source]
        # Targets may divide the same slices among them in different ways.
        key = id(columns.slices), columns.target_of.tobytes()
        if key not in known:
            targets = len(columns.parts.targets)
            known[key] = [
                self._by_target(columns, one, starts, targets)
                for one, starts in zip(bags, read.by_source, strict=True)
            ]
        return known[key]

    def _by_target(self, columns: _ServedColumns, bags: Bags, by_source: Int, targets: int) -> Int:
        assert columns.slices is not None, "only for column slices with several targets"
        owners = columns.target_of[columns.slices.owners(self._reader.ranks(bags.ids))]
        source = np.repeat(np.arange(self._world), by_source)
        number = owners * self._world + source
        return np.bincount(number, minlength=targets * self._world).reshape(targets, self._world)


class ReplicaExchange:
    """Counts what the holders of replicated rows send to add up their gradients.

    Each row has a holder that adds it up: the others send it the sums of the rows read there,
    and it sends all of them the totals.
    """

    def __init__(self, arrangement: Arrangement) -> None:
        self._numbers = {t.name: number for number, t in enumerate(arrangement.plan.tables)}
        self._groups: dict[tuple[int, ...], list[Target]] = defaultdict(list)
        for column_slices in arrangement.column_slices.values():
            for columns in column_slices:
                for target in columns.targets:
                    if target.replicated:
                        self._groups[target.holders].append(target)
        self._modules = {
            (module.process, module.holders): number
            for number, module in enumerate(arrangement.modules)
        }

    def add(
        self, sent: Mapping[ExchangeKind, Int], served: Served, reads: Mapping[str, TableRead]
    ) -> None:
        """Add a batch's bytes to those sent and served.

        The few numbers that say how many rows follow are no part of what is served.
        """
        for holders in sorted(self._groups):
            targets, members = self._groups[holders], np.array(holders)
            here = np.ix_(members, members)
            sent["replica counts"][here] += 2 * _COUNT * len(targets)
            for target in targets:
                row_bytes = _ID + _NUMBER * target.width
                read = reads.get(target.table.name)
                if read is None:  # No feature reads the table.
                    continue
                rows = [
                    _rows_of(target, read.by_module[self._modules[holder, holders]])
                    for holder in holders
                ]
                union = distinct_counts(np.concatenate(rows), target.rows)[0]
                # Rows are dealt out in turn; each holder has all totals of its own rows.
                dealt = np.array([_dealt(own, len(holders)) for own in rows])
                out = row_bytes * (dealt + _dealt(union, len(holders))[:, None])
                sent["replicas"][here] += out
                number = self._numbers[target.table.name]
                served.returned_bytes[number, members] += out.sum(1) - out.diagonal()


def _dealt(rows: AnyInt, holders: int) -> Int:
    """Return how many of some rows each of their holders adds up, int64 of shape (holders,)."""
    return np.bincount(rows % holders, minlength=holders)


def _row_groups(
    column_slices: Sequence[ColumnSlice], rows: int
) -> list[tuple[Slices, tuple[int, ...]]]:
    """Return rows whose columns are on several ranks under row-wise Adagrad, and the ranks."""
    by_peers: dict[str, list[Target]] = defaultdict(list)
    for columns in column_slices:
        for target in columns.targets:
            if target.peers and not target.replicated:
                by_peers[target.peers].append(target)
    groups = []
    for members in by_peers.values():
        parts = tuple((part.start, part.stop, part.step) for part in members[0].parts)
        ranks = sorted({holder for target in members for holder in target.holders})
        if len(ranks) > 1:
            groups.append((Slices(parts, rows), tuple(ranks)))
    return groups


def _rows_of(target: Target, distinct: Distinct) -> AnyInt:
    """Return those of some distinct rows that a target has, as rows of the target."""
    if target.by_id:
        return distinct.ids
    slices = Slices(
        [(part.start, part.stop, part.step) for part in target.parts], target.table.rows
    )
    rows = [
        (distinct.ranks[here].astype(np.int64) - part.start) // part.step + base
        for here, part, base in zip(
            slices.select(distinct.ranks), target.parts, target.bases, strict=True
        )
    ]
    return np.concatenate(rows)
