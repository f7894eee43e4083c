"""Reads a part of a log, with the positions of its samples."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from placer.data.formats.columns import Columns
from placer.data.held import BatchSource
from placer.data.in_memory import ArrowSource
from placer.data.names import Missing
from placer.data.source import RawBatch
from placer.errors import DataError

_Int = npt.NDArray[np.int64]
_PARTITION_SAMPLES = 1 << 33
"""Most samples of a partition, as of Spark's ``monotonically_increasing_id``."""
_READ_SAMPLES = 16384


class PartReader:
    """The samples of a partition with their positions in the log."""

    def __init__(
        self, source: BatchSource, columns: Columns, missing: Missing, position: str | None
    ) -> None:
        self._position = position
        self._most = (1 << 62) // max(1, len(columns.sparse))
        self._numbers: list[_Int] = []
        extra = () if self._position is None else (self._position,)
        read = source.read

        def with_positions(names: Sequence[str]) -> Iterator[pa.RecordBatch]:
            for batch in read([*names, *extra]):
                if self._position is not None:
                    self._numbers.append(self._checked(batch.column(self._position), source.name))
                yield batch

        self._source = ArrowSource(
            replace(source, read=with_positions),
            columns=replace(columns, dense=(), label=None),
            missing=missing,
        )

    def batches(self, partition: int) -> Iterator[tuple[RawBatch, _Int]]:
        """Samples in order; positions have one number each."""
        cursor = self._source.open(may_be_empty=True)
        first = partition * _PARTITION_SAMPLES
        used = 0
        try:
            while (batch := cursor.read(_READ_SAMPLES)) is not None:
                if self._position is None:
                    yield batch, np.arange(first, first + batch.samples)
                    first += batch.samples
                else:
                    while used == self._numbers[0].size:
                        self._numbers.pop(0)
                        used = 0
                    yield batch, self._numbers[0][used : used + batch.samples]
                    used += batch.samples
        finally:
            cursor.close()

    def _checked(self, column: pa.Array, name: str) -> _Int:
        if column.null_count or not pa.types.is_integer(column.type):
            raise DataError(f"{name}: column {self._position!r} has to hold integers, all present")
        numbers: _Int = column.to_numpy().astype(np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self._most:
            raise DataError(
                f"{name}: positions in column {self._position!r} have to be from 0 to {self._most}"
            )
        return numbers


def joined(first: pa.RecordBatch, others: Iterator[pa.RecordBatch], name: str) -> BatchSource:
    """The batches of an iterator of which one was taken."""

    def read(columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        yield first.select(list(columns))
        for batch in others:
            yield batch.select(list(columns))

    return BatchSource(name, first.schema, read, once=True)
