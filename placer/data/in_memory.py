"""Logs in a program's memory: tables, streams, DataFrames, relations, data sets.

Objects that export the Arrow C stream (``__arrow_c_stream__``: pyarrow, polars, pandas, DuckDB and
others) are read through it. Data sets of pyarrow and Hugging Face and lazy frames of polars do not
export it, and are read by their own methods. Values are read in batches, never copied whole.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from placer.data.files.opening import FileIdentity
from placer.data.files.stores import reported
from placer.data.formats.base import (
    BATCH_ROWS,
    SAMPLE_ROWS,
    UNREADABLE,
    Batches,
    ColumnSource,
    merged,
    plain_schema,
)
from placer.data.formats.columns import check_columns, flat, once, outermost
from placer.data.layout import Columns, Layout, NamedColumns
from placer.errors import DataError

_Read = Iterator[pa.RecordBatch]
InMemory = Any
"""What `batches_of` takes. The types belong to libraries that are not imported here."""
_IDENTITY_ROWS = 4096
_COLUMNS = ("Series", "ChunkedArray")


@dataclass(frozen=True, slots=True, eq=False)
class BatchSource:
    """A source of record batches."""

    name: str  # For messages: ``DuckDB relation``.
    schema: pa.Schema
    read: Callable[[Sequence[str]], _Read]  # Reads some columns from the start.
    samples: int | None = None  # None if it is unknown before reading.
    once: bool = False  # Whether it can be read only once.


def is_in_memory(value: object) -> bool:
    """Return whether a log is given as an object in memory, instead of as paths.

    >>> is_in_memory(pa.table({"user": [1]})), is_in_memory("day_0.parquet")
    (True, False)
    """
    if isinstance(value, str | bytes | os.PathLike):
        return False
    return callable(value) or hasattr(value, "__arrow_c_stream__") or _library(value) in _READERS


def batches_of(value: InMemory) -> BatchSource:
    """Return the record batches of a log in memory.

    The log may be a table, record batch, record batch reader or data set of pyarrow; a DataFrame or
    LazyFrame of polars; a DataFrame of pandas; a relation of DuckDB; a Dataset or IterableDataset
    of Hugging Face; any other object with ``__arrow_c_stream__``; or a function without parameters
    that returns a new one of these at each call.
    """
    if isinstance(value, pa.RecordBatch):
        value = pa.table(value)
    library = _library(value)
    if library in _READERS and (found := _READERS[library](value)) is not None:
        return found
    # Streams of single columns are no tables.
    if hasattr(value, "__arrow_c_stream__") and type(value).__name__ not in _COLUMNS:
        once = isinstance(value, pa.RecordBatchReader)
        name = "Arrow stream" if once else f"{type(value).__name__} of {library}"
        schema = value.schema if once else _stream(value, name).schema
        samples = len(value) if hasattr(value, "__len__") else None

        def read(columns: Sequence[str]) -> _Read:
            return (batch.select(list(columns)) for batch in _stream(value, name))

        return BatchSource(name, schema, read, samples, once)
    if callable(value):
        first = batches_of(value())
        return replace(first, read=lambda names: batches_of(value()).read(names), once=False)
    raise DataError(
        f"a log cannot be read from {type(value).__name__}; give paths, or a table, stream or data "
        "set of pyarrow, polars, pandas, DuckDB or Hugging Face, such as pyarrow.table({'user': "
        "ids}) makes of arrays"
    )


def _library(value: object) -> str:
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__.split(".")[0].lstrip("_")


def _stream(value: Any, name: str) -> pa.RecordBatchReader:
    with reported(f"cannot read the {name}", UNREADABLE):
        return pa.RecordBatchReader.from_stream(value)


def _of_pyarrow(value: Any) -> BatchSource | None:
    import pyarrow.dataset as ds

    if not isinstance(value, ds.Dataset):
        return None

    def read(columns: Sequence[str]) -> _Read:
        # Reading whole files ahead would hold them in memory.
        ahead = {"batch_readahead": 4, "fragment_readahead": 1}
        return iter(value.to_batches(columns=list(columns), batch_size=BATCH_ROWS, **ahead))

    return BatchSource("Arrow data set", value.schema, read)


def _of_polars(value: Any) -> BatchSource | None:
    if not hasattr(value, "collect"):
        return None
    name = "polars LazyFrame"

    def read(columns: Sequence[str]) -> _Read:
        for frame in value.select(columns).collect_batches(chunk_size=BATCH_ROWS):
            yield from _stream(frame, name)

    return BatchSource(name, _stream(value.head(0).collect(), name).schema, read)


def _of_duckdb(value: Any) -> BatchSource | None:
    name = "DuckDB relation"
    if not hasattr(value, "project"):
        return None

    def read(columns: Sequence[str]) -> _Read:
        quoted = ", ".join('"' + column.replace('"', '""') + '"' for column in columns)
        return iter(_duckdb_reader(value.project(quoted)))

    return BatchSource(name, _duckdb_reader(value.limit(0)).schema, read)


def _duckdb_reader(relation: Any) -> pa.RecordBatchReader:
    """Return the result as a stream; the stream protocol would hold all of it in memory first."""
    for method in ("to_arrow_reader", "fetch_arrow_reader", "fetch_record_batch"):
        if hasattr(relation, method):
            return getattr(relation, method)(BATCH_ROWS)
    return _stream(relation, "DuckDB relation")


def _of_hugging_face(value: Any) -> BatchSource | None:
    if not hasattr(value, "with_format") or not hasattr(value, "iter"):
        return None
    tables = value.with_format("arrow")
    name = f"Hugging Face {type(value).__name__}"
    if value.features is not None:
        schema = value.features.arrow_schema
    else:
        with reported(f"cannot read the {name}", UNREADABLE):
            first = next(iter(tables.iter(BATCH_ROWS)), None)
        if first is None:
            raise DataError(f"the {name} is empty; a log needs at least one sample")
        schema = first.schema

    def read(columns: Sequence[str]) -> _Read:
        for table in tables.select_columns(list(columns)).iter(BATCH_ROWS):
            # Rows of a shuffled data set are chunks of their own.
            yield from table.select(list(columns)).combine_chunks().to_batches()

    samples = len(value) if hasattr(value, "__len__") else None
    return BatchSource(name, schema, read, samples)


_READERS: Mapping[str, Callable[[Any], BatchSource | None]] = {
    "pyarrow": _of_pyarrow,
    "polars": _of_polars,
    "duckdb": _of_duckdb,
    "datasets": _of_hugging_face,
}
"""By library: readers of types that export no stream or that have a way with less memory."""


class ArrowSource(ColumnSource):
    """A log of record batches of one schema; see `ColumnSource`. `columns` are inferred if None."""

    _may_be_empty = False

    def __init__(
        self,
        batches: BatchSource,
        layout: Layout | None = None,
        named: NamedColumns | None = None,
        columns: Columns | None = None,
    ) -> None:
        self._held, self.samples, self._was_read = batches, batches.samples, list[bool]()
        super().__init__((batches.name,), layout, named)
        schema = flat(plain_schema(batches.schema))
        if columns is None:
            self._infer(schema, None if self._named.recorded else self._sample(schema))
        else:
            check_columns(batches.name, schema, columns)
            self.columns = columns

    def _sample(self, schema: pa.Schema) -> pa.Table | None:
        """Return the first samples; None if the log can be read only once."""
        if self._held.once:
            return None
        names = outermost(once(schema.names), plain_schema(self._held.schema))
        with reported(f"cannot read the {self._held.name}", UNREADABLE):
            batches = merged(self._held.read(names))
            first = next((batch for batch in batches if batch.num_rows), None)
        return first and self._sampled(first.slice(0, SAMPLE_ROWS), self.files[0], schema)

    def _batches(self) -> Batches:
        """Yield all batches. Raises DataError at the second time if they can be read only once."""
        if self._held.once and self._was_read:
            raise DataError(
                f"the {self._held.name} can be read once, and was; give a function that returns "
                "a new one, or choose rows= and id_mapping= such that one pass is enough"
            )
        self._was_read.append(True)  # In a list, as copies of the source read the same stream.
        name, row = self._held.name, 0
        names = outermost(self.columns.names, plain_schema(self._held.schema))
        batches = merged(self._held.read(names))
        while True:
            with reported(f"cannot read the {name} from row {row} on", UNREADABLE):
                batch = next(batches, None)
            if batch is None:
                break
            yield name, row, batch
            row += batch.num_rows
        if not row and not self._may_be_empty:
            raise DataError(f"the {name} is empty; a log needs at least one sample")

    def identity(self) -> tuple[FileIdentity, ...]:
        """Return the log's identity: a hash of its columns and its first samples.

        Raises DataError if the log was read and can be read only once.
        """
        digest = hashlib.sha256(str(plain_schema(self._held.schema)).encode())
        with closing(self._batches()) as batches:
            first = next((batch for *_, batch in batches if batch.num_rows), None)
        if first is not None:
            rows = pa.Table.from_batches([first.slice(0, _IDENTITY_ROWS)]).combine_chunks()
            digest.update(repr(rows.to_pydict()).encode())
        return (FileIdentity(self._held.name, 0, digest.hexdigest()),)
