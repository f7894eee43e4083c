"""Counts of a part of a log, as record batches that an engine can add up.

The columns are always the same (`SCHEMA`). Each value is a sum or a minimum by key, so parts may be
merged in any order and grouping: by `merge_counts`, or by any engine's
``GROUP BY kind, name, id`` with ``SUM(count)`` and ``MIN(first)``.

============  ================  ===========  ==============================  ==================
kind          name              id           count                           first
============  ================  ===========  ==============================  ==================
``row``       table             row          lookups of the row              0
``key``       table             key of an id lookups of the id               place of first read
``lookups``   feature           0            lookups of the feature          0
``bags``      feature           0            its bags that are not empty     0
``samples``   empty             0            samples                         0
``windows``   table             samples of   windows that were counted       0
                                a window
``read``      table             the same     lookups in these windows        0
``distinct``  table             the same     sum of their distinct rows      0
============  ================  ===========  ==============================  ==================

Tables that get a vocabulary are counted by key. The rows of their ids, and how many there are,
follow from the counts and first places of all parts together.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from placer.data.in_memory import ArrowSource, BatchSource, batches_of, is_in_memory
from placer.data.layout import Columns, Missing, NamedColumns
from placer.data.log import Keys
from placer.data.source import Cursor, Place, RawBatch
from placer.data.vocabulary import DistinctKeys, Run
from placer.errors import DataError
from placer.profile.from_counts import parquet_batches
from placer.profile.locality import Locality, WindowCounts

KEYS = ("kind", "name", "id")
SCHEMA = pa.schema(
    {name: pa.string() for name in KEYS[:2]}
    | {name: pa.int64() for name in ("id", "count", "first")}
)

WINDOW_KINDS = ("windows", "read", "distinct")
_KINDS = ("row", "key", "lookups", "bags", "samples", *WINDOW_KINDS)
_Int = npt.NDArray[np.int64]
_BATCH_ROWS = 1 << 16


def merge_counts(parts: Iterable[pa.Table | pa.RecordBatch]) -> pa.Table:
    """Add the counts of parts of a log. Partial sums may be added in any order and grouping.

    >>> one = pa.table([["row"], ["user"], [7], [2], [0]], schema=SCHEMA)
    >>> merge_counts([one, one]).to_pylist()
    [{'kind': 'row', 'name': 'user', 'id': 7, 'count': 4, 'first': 0}]
    """
    tables = [pa.table(part).cast(SCHEMA) for part in parts]
    merged = (
        pa.concat_tables([SCHEMA.empty_table(), *tables])
        .group_by(list(KEYS), use_threads=False)
        .aggregate([("count", "sum"), ("first", "min")])
    )
    return merged.rename_columns(["kind", "name", "id", "count", "first"]).select(SCHEMA.names)


class CountSums:
    """Counts by kind and name, of a part or of all parts of a log."""

    def __init__(self) -> None:
        self._runs: defaultdict[tuple[str, str], DistinctKeys] = defaultdict(DistinctKeys)

    def add(self, kind: str, name: str, ids: _Int, counts: _Int, first: _Int | None = None) -> None:
        """Add counts of ids, which may repeat, with the places of their first reads, if any."""
        places = np.zeros_like(counts) if first is None else first
        self._runs[kind, name].add_run(ids.view(np.uint64), counts, places)

    def add_number(self, kind: str, name: str, number: int, id_: int = 0) -> None:
        """Add a single count."""
        self.add(kind, name, np.array([id_]), np.array([number]))

    def add_keys(self, table: str, keys: Keys, places: _Int) -> None:
        """Count lookups of a table by key, with the place of each lookup."""
        if (places[1:] < places[:-1]).any():
            order = np.argsort(places, kind="stable")
            keys, places = keys[order], places[order]
        self._runs["key", table].add(keys, places)

    def names(self, *kinds: str) -> set[str]:
        """Return the tables or features that have counts of these kinds."""
        return {name for kind, name in self._runs if kind in kinds}

    def run(self, kind: str, name: str) -> Run:
        """Return the sums of a kind and name; empty if there are none."""
        return self._runs[kind, name].merge()

    def total(self, kind: str, name: str) -> int:
        """Return the sum over all ids."""
        return int(self.run(kind, name).counts.sum())

    def locality(self, table: str) -> Locality:
        """Return the window counts of a table; empty if no windows were counted."""
        runs = (self.run(kind, table) for kind in WINDOW_KINDS)
        windows, read, distinct = (
            dict(zip(run.keys.tolist(), run.counts.tolist(), strict=True)) for run in runs
        )
        return tuple(
            WindowCounts(size, windows[size], read.get(size, 0), distinct.get(size, 0))
            for size in windows
        )

    def overflow(self, memory_bytes: int) -> Iterator[pa.RecordBatch]:
        """Yield the counts and drop them if merging them needs more than `memory_bytes`."""
        if self._merge_bytes() > memory_bytes:
            for counts in self._runs.values():
                counts.merge()
            if self._merge_bytes() > memory_bytes // 2:
                yield from self.batches()
                self._runs.clear()

    def _merge_bytes(self) -> int:
        return _MERGE_BYTES * sum(counts.held for counts in self._runs.values())

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the counts as record batches of bounded size."""
        for (kind, name), counts in self._runs.items():
            run = counts.merge()
            for start in range(0, run.keys.size, _BATCH_ROWS):
                ids, *others = (
                    values[start : start + _BATCH_ROWS]
                    for values in (run.keys.view(np.int64), run.counts, run.first)
                )
                words = (pa.repeat(pa.scalar(word), ids.size) for word in (kind, name))
                yield pa.record_batch([*words, *map(pa.array, (ids, *others))], schema=SCHEMA)


Counts = Any
"""A table or record batch of counts, or the path of a Parquet file of them."""


def sums_of(parts: Counts | Iterable[Counts]) -> CountSums:
    """Add the counts of parts, in memory or in Parquet files. They may be partial sums."""
    sums = CountSums()
    for part, place in _parts(parts):
        names = part.column("name").dictionary_encode()
        kinds = part.column("kind").dictionary_encode()
        ids, counts, first = (part.column(name).to_numpy() for name in SCHEMA.names[2:])
        if counts.size and counts.min() < 0:
            raise DataError(f"{place}: count {counts.min()} is negative")
        groups = np.asarray(kinds.indices) * len(names.dictionary) + np.asarray(names.indices)
        for group in np.unique(groups):
            of_kind, of_name = divmod(int(group), len(names.dictionary))
            kind, name = kinds.dictionary[of_kind].as_py(), names.dictionary[of_name].as_py()
            if kind not in _KINDS:
                raise DataError(f"{place}: counts of the kind {kind!r} are not known")
            here = groups == group
            sums.add(kind, name, ids[here], counts[here], first[here])
    return sums


def _parts(parts: Counts | Iterable[Counts]) -> Iterator[tuple[pa.RecordBatch, str]]:
    """Yield record batches of `SCHEMA` without missing values, each with its source."""
    if isinstance(parts, str | os.PathLike) or is_in_memory(parts):
        parts = [parts]
    for part in parts:
        if isinstance(part, str | os.PathLike):
            read, place = parquet_batches(str(part), SCHEMA.names), str(part)
        else:
            source = batches_of(part)
            read, place = source.read(_present(source.schema, source.name)), source.name
        for batch in read:
            for column in batch.columns:
                if column.null_count:
                    raise DataError(f"{place}: counts of a log have no missing values")
            try:
                yield pa.table(batch).cast(SCHEMA).combine_chunks().to_batches()[0], place
            except IndexError:
                continue  # The part is empty.
            except pa.ArrowException as error:
                raise DataError(f"{place}: {str(error).splitlines()[0]}") from error


def _present(schema: pa.Schema, place: str) -> list[str]:
    missing: Sequence[str] = [name for name in SCHEMA.names if schema.names.count(name) != 1]
    if missing:
        raise DataError(
            f"{place} has no column {missing[0]!r}; parts of counts have {', '.join(SCHEMA.names)}"
        )
    return list(SCHEMA.names)


_PARTITION_SAMPLES = 1 << 33
"""Most samples of a partition, as in Spark's ``monotonically_increasing_id``."""
_READ_SAMPLES = 16384
_MERGE_BYTES = 4 * 24
"""Bytes of a row or key while lists are merged: 4 times itself, its count and its first place."""


class PartReader(ArrowSource):
    """Reads the samples of a partition, with their positions in the log."""

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
        """Yield batches of samples in order, with the position of each sample."""
        first = partition * _PARTITION_SAMPLES
        with closing(Cursor(self.spans())) as cursor:
            while (batch := cursor.read(_READ_SAMPLES)) is not None:
                if self._position is None:
                    self._positions = np.arange(first, first + batch.chunk.samples)
                    first += batch.chunk.samples
                yield batch, self._positions

    def raw(self, batch: pa.RecordBatch | pa.Table, place: Place) -> RawBatch:
        """Return the samples of a batch. Keep their positions until the next batch."""
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
