"""Reads a part of a log, with the positions of its samples, and counts it in bounded memory."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from placer.data.in_memory import ArrowSource, BatchSource
from placer.data.layout import Columns, Missing, NamedColumns
from placer.data.log import Keys
from placer.data.source import Place, RawBatch
from placer.data.vocabulary import DistinctKeys
from placer.errors import DataError
from placer.profile.parts.counts import batches

_Int = npt.NDArray[np.int64]
_PARTITION_SAMPLES = 1 << 33
"""Most samples of a partition, as of Spark's ``monotonically_increasing_id``."""
_READ_SAMPLES = 16384
_KEY_BYTES = 24
"""Of a listed row or key: itself, its count and where it came first."""
_SORTING = 4
"""Memory while a list is sorted and added up, as a multiple of its own."""


class PartReader(ArrowSource):
    """The samples of a partition with their positions in the log."""

    _may_be_empty = True

    def __init__(
        self, source: BatchSource, columns: Columns, missing: Missing, position: str | None
    ) -> None:
        self._position, self._positions = position, np.zeros(0, dtype=np.int64)
        self._most = (1 << 62) // max(1, len(columns.sparse))
        if position is not None:
            read = source.read
            source = replace(source, read=lambda names: read([*names, position]))
        counted = replace(columns, dense=(), label=None)
        super().__init__(source, named=NamedColumns(missing=missing), columns=counted)

    def positioned(self, partition: int) -> Iterator[tuple[RawBatch, _Int]]:
        """Yield samples in order, and the position of each."""
        first = partition * _PARTITION_SAMPLES
        with closing(self.open()) as cursor:
            while (batch := cursor.read(_READ_SAMPLES)) is not None:
                if self._position is None:
                    self._positions = np.arange(first, first + batch.samples)
                    first += batch.samples
                yield batch, self._positions

    def raw(self, batch: pa.RecordBatch | pa.Table, place: Place) -> RawBatch:
        """Return the samples of a batch, whose positions are kept until the next one is read."""
        if self._position is not None:
            name, column = self._held.name, batch.column(self._position)
            if column.null_count or not pa.types.is_integer(column.type):
                raise DataError(
                    f"{name}: column {self._position!r} has to hold integers, all present"
                )
            numbers: _Int = column.to_numpy().astype(np.int64)
            if numbers.size and not 0 <= numbers.min() <= numbers.max() < self._most:
                raise DataError(
                    f"{name}: positions in column {self._position!r} have to be from 0 to "
                    f"{self._most}"
                )
            self._positions = numbers
        return super().raw(batch, place)


class PartitionTables:
    """Counts of all tables over one partition; of those that are `keyed` by key, of others by row.

    When the lists are full, they are passed on, and begin again: whoever adds parts up adds these
    too.
    """

    def __init__(self, tables: Iterable[str], keyed: Collection[str], memory_bytes: int) -> None:
        self._counts = {name: DistinctKeys() for name in tables}
        self._kinds = {name: "key" if name in keyed else "row" for name in self._counts}
        self._most_bytes = memory_bytes // _SORTING

    def add_rows(self, table: str, rows: _Int) -> None:
        """Count rows of a table."""
        distinct, counts = np.unique(rows.view(np.uint64), return_counts=True)
        self._counts[table].add_run(distinct, counts, np.zeros_like(counts))

    def add_keys(self, table: str, keys: Keys, places: _Int) -> None:
        """Count keys of a table, read at `places`."""
        if (places[1:] < places[:-1]).any():
            order = np.argsort(places, kind="stable")
            keys, places = keys[order], places[order]
        self._counts[table].add(keys, places)

    def overflow(self) -> Iterator[pa.RecordBatch]:
        """Yield what has to be passed on for the lists to have room again."""
        if self._held_bytes() > self._most_bytes:
            for counts in self._counts.values():
                counts.merge()
            if self._held_bytes() > self._most_bytes // 2:
                yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield all that was not passed on."""
        for name, counts in self._counts.items():
            run = counts.merge()
            yield from batches(
                self._kinds[name], name, run.keys.view(np.int64), run.counts, run.first
            )
            self._counts[name] = DistinctKeys()

    def _held_bytes(self) -> int:
        return _KEY_BYTES * sum(counts.held for counts in self._counts.values())
