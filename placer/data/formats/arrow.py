"""Arrow's own files (IPC files and streams, Feather): one column a feature, as in Parquet."""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from placer.data.files.opening import open_file
from placer.data.files.stores import first_line, local_path, scheme_of, shown
from placer.data.formats.columns import (
    Columns,
    Place,
    check_columns,
    check_schema,
    infer_columns,
    once,
    raw_batch,
)
from placer.data.formats.partitions import Partitions
from placer.data.keys import Missing
from placer.data.layout import Layout
from placer.data.source import RawBatch
from placer.errors import DataError

_FILE = b"ARROW1"
_FEATHER_1 = b"FEA1"
_BATCH_ROWS = 16384
_SAMPLE_ROWS = 10_000
_UNREADABLE = (OSError, ValueError, KeyError, pa.ArrowException)


class IpcSource:
    """Arrow files of one schema, in order; see `placer.data.formats.parquet.ParquetSource`.

    Memory is bounded by a record batch of the file.

    Raises
    ------
    DataError
        If a file is missing or not Arrow's, or a column is missing or does not fit.
    """

    def __init__(
        self,
        files: Sequence[str],
        layout: Layout | None = None,
        *,
        sparse: Sequence[str] | None = None,
        dense: Sequence[str] | None = None,
        label: str | None = None,
        ignore: Sequence[str] = (),
        missing: Missing = "zero",
    ) -> None:
        self.files = tuple(files)
        self.missing: Missing = missing
        known = layout or Layout()
        self._partitions = Partitions(self.files, known.types)
        schemas = [self._partitions.added_to(_schema(file)) for file in self.files]
        schema = schemas[0]
        self.columns = infer_columns(
            schema,
            sparse,
            dense,
            label,
            ignore,
            sample=self._sample(schema) if sparse is None or dense is None else None,
            types=known.types,
            lists=known.lists if layout is not None else None,
        )
        check_columns(self.files[0], schema, self.columns, ignore)
        for file, own in zip(self.files, schemas, strict=True):
            check_schema(file, own, self.columns)
        self.layout = self.columns.layout
        self.text_features: Mapping[str, bool] = {
            name: self.columns.is_text(name) for name in self.columns.sparse
        }
        self.dense_names = self.columns.dense
        self.label_name = self.columns.label
        self.samples: int | None = None

    def largest_ids(self) -> Mapping[str, int] | None:
        """None: the files keep no statistics."""
        return None

    def open(self) -> "IpcCursor":
        """A cursor at the log's start."""
        return IpcCursor(self.files, self.columns, self.missing, self._partitions)

    def _sample(self, schema: pa.Schema) -> pa.Table | None:
        """The first samples of the log."""
        for file in self.files:
            with contextlib.closing(_batches(file, None)) as batches:
                for batch in batches:
                    if batch.num_rows:
                        table = pa.Table.from_batches([batch.slice(0, _SAMPLE_ROWS)])
                        filled = self._partitions.filled(table, file, schema.names)
                        return filled.select(once(schema.names))
        raise DataError(f"{shown(self.files[0])} is empty; a log needs at least one sample")


class IpcCursor:
    """Reads record batches, one after another."""

    def __init__(
        self,
        files: Sequence[str],
        columns: Columns,
        missing: Missing,
        partitions: Partitions,
    ) -> None:
        self._files = list(files)
        self._columns, self._missing, self._partitions = columns, missing, partitions
        self._file = ""
        self._batches: Any = iter(())
        self._batch: pa.RecordBatch | None = None
        self._used = 0
        self._row = 0

    def read(self, samples: int) -> RawBatch | None:
        """The next samples, at least one and at most `samples`; None at the end."""
        batch = self._current()
        if batch is None:
            return None
        part = batch.slice(self._used, min(samples, _BATCH_ROWS))
        part = self._partitions.filled(part, self._file, self._columns.names)
        raw = raw_batch(part, Place(self._file, self._row), self._columns, self._missing)
        self._used += part.num_rows
        self._row += part.num_rows
        return raw

    def skip(self, samples: int) -> int:
        """Move on; how many samples were there to skip."""
        left = samples
        while left and (batch := self._current()) is not None:
            step = min(left, batch.num_rows - self._used)
            self._used += step
            self._row += step
            left -= step
        return samples - left

    def close(self) -> None:
        """Let go of the file that is open."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()
        self._files, self._batch, self._batches = [], None, iter(())

    def _current(self) -> pa.RecordBatch | None:
        while self._batch is None or self._used == self._batch.num_rows:
            self._batch, self._used = next(self._batches, None), 0
            if self._batch is None:
                if not self._files:
                    return None
                self._file, self._row = self._files.pop(0), 0
                names = self._partitions.of_file(self._columns.names, _schema(self._file))
                self._batches = _batches(self._file, names)
        return self._batch


def _schema(file: str) -> pa.Schema:
    try:
        with _opened(file) as source:
            schema = _reader(source, None).schema
            assert schema.names is not None, "read here, where a name may turn out to be no text"
            return schema
    except _UNREADABLE as error:
        raise _unreadable(file, error) from error


def _batches(file: str, names: Sequence[str] | None) -> Generator[pa.RecordBatch]:
    """The record batches of a file, with the named columns or all."""
    try:
        with _opened(file) as source:
            reader = _reader(source, names)
            if isinstance(reader, pa.RecordBatchFileReader):
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                batches = iter(reader)
            for batch in batches:
                # Arrow trusts lengths and offsets, and ends the process where they lie.
                batch.validate(full=True)
                yield batch
    except _UNREADABLE as error:
        raise _unreadable(file, error) from error


def _opened(file: str) -> Any:
    if scheme_of(file) != "file":
        return open_file(file)
    try:
        return pa.memory_map(local_path(file))
    except OSError:
        return open_file(file)  # Which says what is wrong.


def _reader(source: Any, names: Sequence[str] | None) -> Any:
    """A reader of a file or a stream, by how it begins."""
    start = source.read(len(_FILE))
    source.seek(0)
    if start[:4] == _FEATHER_1:
        raise ValueError("it is Feather of version 1; write it anew, or as Parquet")
    opened = pa.ipc.open_file if start == _FILE else pa.ipc.open_stream
    if names is None:
        return opened(source)
    schema = opened(source).schema
    source.seek(0)
    fields = [schema.names.index(name) for name in names if name in schema.names]
    return opened(source, options=pa.ipc.IpcReadOptions(included_fields=fields))


def _unreadable(file: str, error: Exception) -> DataError:
    return DataError(f"cannot read {shown(file)} as Arrow: {first_line(error)}")
