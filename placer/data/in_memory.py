"""Logs that a program holds (`placer.data.held`), as sources of samples like files."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa

from placer.data.files.identity import FileIdentity
from placer.data.formats.columns import (
    Columns,
    Place,
    check_columns,
    infer_columns,
    once,
    raw_batch,
)
from placer.data.formats.parquet import SAMPLE_ROWS, UNREADABLE
from placer.data.held import BATCH_ROWS, BatchSource
from placer.data.keys import Missing
from placer.data.layout import Layout
from placer.data.source import RawBatch
from placer.errors import DataError

_IDENTITY_ROWS = 4096


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
        batches = self.batches.read(once(schema.names))
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
        part = batch.slice(self._used, min(samples, BATCH_ROWS))
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
