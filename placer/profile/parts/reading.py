"""Reads a part of a log, with the positions of its samples."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from placer.data.formats.columns import Columns
from placer.data.in_memory import ArrowSource, BatchSource
from placer.data.names import Missing
from placer.data.source import Place, RawBatch
from placer.errors import DataError

_Int = npt.NDArray[np.int64]
_PARTITION_SAMPLES = 1 << 33
"""Most samples of a partition, as of Spark's ``monotonically_increasing_id``."""
_READ_SAMPLES = 16384


class PartReader(ArrowSource):
    """The samples of a partition with their positions in the log."""

    def __init__(
        self, source: BatchSource, columns: Columns, missing: Missing, position: str | None
    ) -> None:
        self._position, self._positions = position, np.zeros(0, dtype=np.int64)
        self._most = (1 << 62) // max(1, len(columns.sparse))
        if position is not None:
            read = source.read
            source = replace(source, read=lambda names: read([*names, position]))
        super().__init__(source, columns=replace(columns, dense=(), label=None), missing=missing)

    def positioned(self, partition: int) -> Iterator[tuple[RawBatch, _Int]]:
        """Samples in order, and the position of each."""
        first = partition * _PARTITION_SAMPLES
        with closing(self.open(may_be_empty=True)) as cursor:
            while (batch := cursor.read(_READ_SAMPLES)) is not None:
                if self._position is None:
                    self._positions = np.arange(first, first + batch.samples)
                    first += batch.samples
                yield batch, self._positions

    def raw(self, batch: pa.RecordBatch | pa.Table, place: Place) -> RawBatch:
        """The samples of a batch, whose positions are kept until the next one is read."""
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
