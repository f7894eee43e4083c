"""Logs that a program holds: Arrow tables and streams, DataFrames, relations, data sets.

Whatever exports the Arrow C stream (``__arrow_c_stream__``: pyarrow, polars, pandas, DuckDB and
others) is read through it; data sets of pyarrow and of Hugging Face and lazy frames of polars,
which do not, by their own methods. Values are read in batches, and never copied whole.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from placer.data.files.identity import FileIdentity
from placer.data.formats.columns import Columns, Place, check_columns, infer_columns, raw_batch
from placer.data.formats.parquet import SAMPLE_ROWS, UNREADABLE
from placer.data.keys import Missing
from placer.data.layout import Layout
from placer.data.source import RawBatch
from placer.errors import DataError

_BATCH_ROWS = 16384
_IDENTITY_ROWS = 4096

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
        table = pa.table(value) if isinstance(value, pa.RecordBatch) else value
        return BatchSource(
            f"Arrow {'table' if value is table else 'record batch'}",
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


class ArrowSource:
    """A log of record batches, of one schema; a `placer.data.source.Source`.

    Parameters
    ----------
    batches : BatchSource
    sparse, dense, label, ignore, missing
        As of `placer.data.open_log`.
    columns : Columns, optional
        Instead of `sparse`, `dense`, `label` and `ignore`.
    layout : Layout, optional
        Types of columns, and which texts are lists.

    Raises
    ------
    DataError
        If a column is missing or of a type that does not fit.
    """

    def __init__(
        self,
        batches: BatchSource,
        *,
        sparse: Sequence[str] | None = None,
        dense: Sequence[str] | None = None,
        label: str | None = None,
        ignore: Sequence[str] = (),
        missing: Missing = "zero",
        columns: Columns | None = None,
        layout: Layout | None = None,
    ) -> None:
        self.batches = batches
        self.files: Sequence[str] = (batches.name,)
        self.missing: Missing = missing
        schema = _plain_schema(batches.schema)
        known = layout or Layout()
        self.columns = columns or infer_columns(
            schema,
            sparse,
            dense,
            label,
            ignore,
            sample=None if sparse is not None and dense is not None else self._sample(schema),
            types=known.types,
            lists=known.lists if layout is not None else None,
        )
        self.layout = self.columns.layout
        check_columns(batches.name, schema, self.columns, ignore)
        self.text_features: Mapping[str, bool] = {
            name: self.columns.is_text(name) for name in self.columns.sparse
        }
        self.dense_names = self.columns.dense
        self.label_name = self.columns.label
        self.samples = batches.samples
        self._was_read = False

    def _sample(self, schema: pa.Schema) -> pa.Table | None:
        """The first samples; None where reading them would be the only pass that there is."""
        if self.batches.once:
            return None
        batches = self.batches.read(schema.names)
        first = next((batch for batch in batches if batch.num_rows), None)
        return first and pa.Table.from_batches([_plain(first).slice(0, SAMPLE_ROWS)])

    def largest_ids(self) -> Mapping[str, int] | None:
        """None: there are no statistics."""
        return None

    def open(self) -> "ArrowCursor":
        """A cursor at the log's start.

        Raises
        ------
        DataError
            If it was read already and can be read once only.
        """
        if self.batches.once and self._was_read:
            raise DataError(
                f"the {self.batches.name} can be read once, and was; give a function that returns "
                "a new one, or choose rows= and id_mapping= such that one pass is enough"
            )
        self._was_read = True
        names = list(dict.fromkeys(self.columns.names))
        return ArrowCursor(self.batches.read(names), self)

    def identity(self) -> tuple[FileIdentity, ...]:
        """What the log is known by: its columns and its first samples.

        Raises
        ------
        DataError
            If it can be read once only.
        """
        cursor = self.open()
        try:
            first = cursor.next_batch()
        finally:
            cursor.close()
        digest = hashlib.sha256(str(_plain_schema(self.batches.schema)).encode())
        if first is not None:
            rows = pa.Table.from_batches([first.slice(0, _IDENTITY_ROWS)]).combine_chunks()
            digest.update(repr(rows.to_pydict()).encode())
        return (FileIdentity(self.batches.name, 0, digest.hexdigest()),)


class ArrowCursor:
    """Reads record batches in order."""

    def __init__(self, batches: Iterable[pa.RecordBatch], source: ArrowSource) -> None:
        self._batches = iter(batches)
        self._source = source
        self._batch: pa.RecordBatch | None = None
        # Rows of the current batch, and rows of the log, that are behind us.
        self._used = 0
        self._row = 0

    def read(self, samples: int) -> RawBatch | None:
        """The next samples, at least one and at most `samples`; None at the end."""
        batch = self.read_some(samples)
        if batch is None and self._row == 0:
            raise DataError(
                f"the {self._source.batches.name} is empty; a log needs at least one sample"
            )
        return batch

    def read_some(self, samples: int) -> RawBatch | None:
        """As `read`, of a part of a log, which may be empty."""
        batch = self.next_batch()
        if batch is None:
            return None
        part = batch.slice(self._used, min(samples, _BATCH_ROWS))
        name, columns = self._source.batches.name, self._source.columns
        raw = raw_batch(part, Place(name, self._row), columns, self._source.missing)
        self._used += part.num_rows
        self._row += part.num_rows
        return raw

    def skip(self, samples: int) -> int:
        """Move on; how many samples were there to skip."""
        left = samples
        while left and (batch := self.next_batch()) is not None:
            step = min(left, batch.num_rows - self._used)
            self._used += step
            self._row += step
            left -= step
        return samples - left

    def close(self) -> None:
        """Let go of the batches."""
        self._batches, self._batch = iter(()), None

    def next_batch(self) -> pa.RecordBatch | None:
        """The batch that holds the next row; None at the log's end."""
        while self._batch is None or self._used == self._batch.num_rows:
            try:
                batch = next(self._batches, None)
            except UNREADABLE as error:
                reason = (str(error) or type(error).__name__).splitlines()[0]
                name = self._source.batches.name
                raise DataError(
                    f"cannot read the {name} from row {self._row} on: {reason}"
                ) from error
            self._used = 0
            self._batch = batch if batch is None else _plain(batch)
            if batch is None:
                return None
        return self._batch


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
                batch_size=_BATCH_ROWS,
                batch_readahead=4,
                fragment_readahead=1,
            )
        )

    return BatchSource("Arrow data set", value.schema, read)


def _of_polars(value: Any) -> BatchSource | None:
    if not hasattr(value, "collect_schema"):
        return None

    def read(columns: Sequence[str]) -> Batches:
        frames = value.lazy().select(columns).collect_batches(chunk_size=_BATCH_ROWS)
        for frame in frames:
            yield from _stream(frame, name)

    lazy = hasattr(value, "collect")
    name = "polars LazyFrame" if lazy else "polars DataFrame"
    empty = value.head(0).collect() if lazy else value.head(0)
    if lazy:
        return BatchSource(name, _stream(empty, name).schema, read)
    return BatchSource(
        name,
        _stream(empty, name).schema,
        lambda columns: iter(_stream(value.select(columns), name)),
        len(value),
    )


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
            return getattr(relation, method)(_BATCH_ROWS)
    return _stream(relation, "DuckDB relation")


def _of_hugging_face(value: Any) -> BatchSource | None:
    if not hasattr(value, "with_format") or not hasattr(value, "iter"):
        return None
    tables = value.with_format("arrow")
    name = f"Hugging Face {type(value).__name__}"
    if value.features is not None:
        schema = value.features.arrow_schema
    else:
        first = next(iter(tables.iter(_BATCH_ROWS)), None)
        if first is None:
            raise DataError(f"the {name} is empty; a log needs at least one sample")
        schema = first.schema

    def read(columns: Sequence[str]) -> Batches:
        for table in tables.select_columns(list(columns)).iter(_BATCH_ROWS):
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


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch of the types that the readers know."""
    schema = _plain_schema(batch.schema)
    if schema.equals(batch.schema):
        return batch
    columns = []
    for column, field in zip(batch.columns, schema, strict=True):
        if isinstance(column.type, pa.BaseExtensionType):
            column = column.storage
        columns.append(column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(field.name, _plain_type(field.type)) for field in schema])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """What extension types, such as Hugging Face's, and views, such as polars', hold."""
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return pa.large_list(_plain_type(kind.value_type))
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and kind.value_type != _plain_type(
        kind.value_type
    ):
        return pa.large_list(_plain_type(kind.value_type))
    return kind
