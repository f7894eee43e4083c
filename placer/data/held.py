"""What a program holds as record batches: tables, streams, DataFrames, relations, data sets.

Whatever exports the Arrow C stream (``__arrow_c_stream__``: pyarrow, polars, pandas, DuckDB and
others) is read through it; data sets of pyarrow and of Hugging Face and lazy frames of polars,
which do not, by their own methods. Values are read in batches, and never copied whole.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from placer.data.formats.base import BATCH_ROWS, UNREADABLE
from placer.errors import DataError

Batches = Iterator[pa.RecordBatch]
InMemory = Any
"""What `batches_of` takes: libraries' own types, which are not imported here."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchSource:
    """Where record batches come from.

    Attributes
    ----------
    name : str
        What it is, for messages: ``DuckDB relation``.
    schema : pyarrow.Schema
    read : callable
        Reads some columns from the start.
    samples : int or None
        Where that is known without reading.
    once : bool
        Whether it can be read once only.
    """

    name: str
    schema: pa.Schema
    read: Callable[[Sequence[str]], Batches]
    samples: int | None = None
    once: bool = False


def is_in_memory(value: object) -> bool:
    """Whether a log is not named by paths, but there itself.

    >>> is_in_memory(pa.table({"user": [1]})), is_in_memory("day_0.parquet")
    (True, False)
    """
    if isinstance(value, str | bytes | os.PathLike):
        return False
    return callable(value) or hasattr(value, "__arrow_c_stream__") or _library(value) in _READERS


def batches_of(value: InMemory) -> BatchSource:
    """The record batches of a log that a program holds.

    Parameters
    ----------
    value
        A table, record batch, record batch reader or data set of pyarrow; a DataFrame or
        LazyFrame of polars; a DataFrame of pandas; a relation of DuckDB; a Dataset or
        IterableDataset of Hugging Face; any other object with ``__arrow_c_stream__``; or a
        function without parameters that returns one of these, anew at each call.

    Raises
    ------
    DataError
        If it is none of these.
    """
    if isinstance(value, pa.Table | pa.RecordBatch):
        table = pa.table(value)
        name = "Arrow table" if isinstance(value, pa.Table) else "Arrow record batch"
        return BatchSource(
            name,
            table.schema,
            lambda columns: iter(table.select(columns).to_batches()),
            table.num_rows,
        )
    library = _library(value)
    if library in _READERS and (found := _READERS[library](value)) is not None:
        return found
    if hasattr(value, "__arrow_c_stream__"):
        once = isinstance(value, pa.RecordBatchReader)
        name = "Arrow stream" if once else f"{type(value).__name__} of {library}"
        schema = value.schema if once else _stream(value, name).schema
        return BatchSource(
            name, schema, lambda columns: _projected(value, name, columns), once=once
        )
    if callable(value):
        first = batches_of(value())
        return BatchSource(
            first.name,
            first.schema,
            lambda columns: batches_of(value()).read(columns),
            first.samples,
        )
    raise DataError(
        f"a log cannot be read from {type(value).__name__}; give paths, or a table, stream or data "
        "set of pyarrow, polars, pandas, DuckDB or Hugging Face"
    )


def _library(value: object) -> str:
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__.split(".")[0].lstrip("_")


def _stream(value: Any, name: str) -> pa.RecordBatchReader:
    try:
        return pa.RecordBatchReader.from_stream(value)
    except UNREADABLE as error:
        raise DataError(f"cannot read the {name}: {str(error).splitlines()[0]}") from error


def _projected(value: Any, name: str, columns: Sequence[str]) -> Batches:
    for batch in _stream(value, name):
        yield batch.select(list(columns))


def _of_pyarrow(value: Any) -> BatchSource | None:
    import pyarrow.dataset as ds

    if not isinstance(value, ds.Dataset):
        return None

    def read(columns: Sequence[str]) -> Batches:
        # Without the read-ahead of whole files, which would be held in memory.
        return iter(
            value.to_batches(
                columns=list(columns),
                batch_size=BATCH_ROWS,
                batch_readahead=4,
                fragment_readahead=1,
            )
        )

    return BatchSource("Arrow data set", value.schema, read)


def _of_polars(value: Any) -> BatchSource | None:
    if not hasattr(value, "collect_schema"):
        return None
    if not hasattr(value, "collect"):
        name = "polars DataFrame"
        schema = _stream(value.head(0), name).schema
        return BatchSource(
            name, schema, lambda columns: iter(_stream(value.select(columns), name)), len(value)
        )
    name = "polars LazyFrame"

    def read(columns: Sequence[str]) -> Batches:
        for frame in value.select(columns).collect_batches(chunk_size=BATCH_ROWS):
            yield from _stream(frame, name)

    return BatchSource(name, _stream(value.head(0).collect(), name).schema, read)


def _of_duckdb(value: Any) -> BatchSource | None:
    name = "DuckDB relation"
    if not hasattr(value, "project"):
        return None

    def read(columns: Sequence[str]) -> Batches:
        quoted = ", ".join('"' + column.replace('"', '""') + '"' for column in columns)
        return iter(_duckdb_reader(value.project(quoted)))

    return BatchSource(name, _duckdb_reader(value.limit(0)).schema, read)


def _duckdb_reader(relation: Any) -> pa.RecordBatchReader:
    """The result as a stream; the stream protocol would have it made in memory first."""
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
        first = next(iter(tables.iter(BATCH_ROWS)), None)
        if first is None:
            raise DataError(f"the {name} is empty; a log needs at least one sample")
        schema = first.schema

    def read(columns: Sequence[str]) -> Batches:
        for table in tables.select_columns(list(columns)).iter(BATCH_ROWS):
            yield from table.select(list(columns)).to_batches()

    samples = len(value) if hasattr(value, "__len__") else None
    return BatchSource(name, schema, read, samples)


_READERS: Mapping[str, Callable[[Any], BatchSource | None]] = {
    "pyarrow": _of_pyarrow,
    "polars": _of_polars,
    "duckdb": _of_duckdb,
    "datasets": _of_hugging_face,
}
"""By library, for what does not export a stream or has a way that takes less memory."""
