"""`ColumnSource`: the base of all formats that Arrow reads as record batches of columns."""

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import cached_property, partial

import pyarrow as pa
import pyarrow.compute as pc

from placer.data.files.stores import partitions, reported, shown
from placer.data.formats.columns import (
    check_columns,
    check_schema,
    flat,
    once,
    unfolded,
    with_fields,
    written_as_text,
)
from placer.data.formats.values import raw_batch
from placer.data.inference import PARTITION, infer_columns
from placer.data.keys import is_list, list_offsets
from placer.data.layout import IdType, Layout, NamedColumns
from placer.data.source import Place, RawBatch, Source, Span
from placer.errors import DataError

BATCH_ROWS = 16384
SAMPLE_ROWS = 10_000
UNREADABLE = (OSError, ValueError, KeyError, OverflowError, pa.ArrowException)
"""Errors that Arrow raises for files of another format or with names that are not UTF-8."""

_WHOLE = re.compile("-?(?:0|[1-9][0-9]{0,17})")

Batches = Generator[tuple[str, int, pa.RecordBatch]]
"""Record batches, each with its file and the number of its first row in the file."""


class _Partitions:
    """Hive partitions: columns with values in the names of the files' folders.

    A column holds integers if all its values are integers without leading zeros; otherwise texts.
    """

    def __init__(self, files: Sequence[str], types: Mapping[str, IdType]) -> None:
        self._values = {file: partitions(file) for file in files}
        self._types: dict[str, pa.DataType] = {}
        for name in dict.fromkeys(name for own in self._values.values() for name in own):
            found = (own.get(name) for own in self._values.values())
            whole = all(_WHOLE.fullmatch(value) for value in found if value is not None)
            guess = "integer" if whole else "text"
            text = types.get(name, guess) == "text"
            self._types[name] = pa.string() if text else pa.int64()

    def added_to(self, schema: pa.Schema) -> pa.Schema:
        """Return a file's schema with the partition columns that the file lacks."""
        own = set(schema.names)
        for name, kind in self._types.items():
            if name not in own:
                schema = schema.append(pa.field(name, kind, metadata={PARTITION: b"1"}))
        return schema

    def filled(
        self, batch: pa.RecordBatch | pa.Table, file: str, names: Sequence[str]
    ) -> pa.RecordBatch | pa.Table:
        """Return a batch with the named partition columns that it lacks."""
        own = set(batch.schema.names) if self._types else set()
        for name in names:
            if name in self._types and name not in own:
                batch = batch.append_column(name, self._column(file, name, batch.num_rows))
        return batch

    def of_file(self, names: Sequence[str], columns: Sequence[str]) -> list[str]:
        """Return the names to read from a file that has `columns`: without partition columns."""
        held = set(self._types).difference(columns)
        return [name for name in names if name not in held]

    def _column(self, file: str, name: str, samples: int) -> pa.Array:
        value, kind = self._values[file].get(name), self._types[name]
        if value is None or kind == pa.string():
            return pa.repeat(pa.scalar(value, kind), samples)
        if not _WHOLE.fullmatch(value):
            raise DataError(f"{shown(file)}: its folder says {name}={value}, which is no integer")
        return pa.repeat(pa.scalar(int(value), kind), samples)


class ColumnSource(Source):
    """Files of one schema, in order, that Arrow reads. Formats inherit from it.

    Fields that `layout` leaves open are found from the first file. Roles of columns that `named`
    does not give are inferred (see `infer_columns`).
    """

    def __init__(
        self, files: Sequence[str], layout: Layout | None = None, named: NamedColumns | None = None
    ) -> None:
        self.files = tuple(files)
        self._known, self._named = layout or Layout(), named or NamedColumns()
        self._prepare()

    def _prepare(self) -> None:
        """Look at the files, and choose the columns."""

    @cached_property
    def _partitions(self) -> _Partitions:
        return _Partitions(self.files, self._known.types)

    def _batches(self) -> Batches:
        """Yield the log's record batches, if the format has them."""
        raise NotImplementedError

    def spans(self) -> Generator[Span]:
        return self._spans_of(self._batches())

    def _spans_of(self, batches: Batches) -> Generator[Span]:
        def read(file: str, row: int, batch: pa.RecordBatch, start: int, stop: int) -> RawBatch:
            part = batch.slice(start, min(stop - start, BATCH_ROWS))
            return self.raw(part, Place(file, range(row + start, row + stop)))

        with closing(batches):
            for file, row, batch in batches:
                yield Span(batch.num_rows, partial(read, file, row, batch))

    def raw(self, batch: pa.RecordBatch | pa.Table, place: Place) -> RawBatch:
        """Return the samples of a batch, with fields of objects and partition columns."""
        batch = unfolded(batch, self.columns.names)
        batch = self._partitions.filled(batch, place.file, self.columns.names)
        return raw_batch(batch, place, self.columns, self._named.missing)

    def _infer_from(self, schemas: Sequence[pa.Schema]) -> list[pa.Schema]:
        """Choose the columns by the first file, check all files, and return flat schemas."""
        whole = [flat(self._partitions.added_to(schema)) for schema in schemas]
        self._infer(whole[0], None if self._named.recorded else self._sample(whole[0]))
        for file, own in zip(self.files, whole, strict=True):
            check_schema(file, own, self.columns)
        return whole

    def _sample(self, schema: pa.Schema) -> pa.Table | None:
        """Return the first samples, if files have a schema."""
        raise NotImplementedError

    def _infer(self, schema: pa.Schema, sample: pa.Table | None, *, as_text: bool = False) -> None:
        """Choose the columns of a schema. `sample` has some samples of the log."""
        ignore = with_fields(self._named.ignore, schema.names)
        named = replace(self._named, ignore=ignore)
        self.columns = infer_columns(schema, named, sample=sample, layout=self._known)
        schema = written_as_text(schema) if as_text else schema
        check_columns(self.files[0], schema, self.columns, ignore)

    def _further_columns(self, file: str, names: Sequence[str], first: Sequence[str]) -> list[str]:
        """Return a note on columns that the first file lacks, unless columns were named."""
        known = set(first)
        further = [name for name in names if name not in known]
        if not further or None not in (self._named.sparse, self._named.dense):
            return []
        return [
            f"{shown(file)} has columns that {shown(self.files[0])} lacks, which are left out: "
            f"{', '.join(further)}"
        ]

    def _sampled(self, batch: pa.RecordBatch | pa.Table, file: str, schema: pa.Schema) -> pa.Table:
        """Return samples of a file with the columns of a flat schema, partitions included."""
        table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
        table = unfolded(table, once(schema.names))
        return self._partitions.filled(table, file, schema.names).select(once(schema.names))


def reading(file: str, format: str) -> AbstractContextManager[None]:
    """Return a context that turns Arrow's errors into a DataError that names the file."""
    return reported(f"cannot read {shown(file)} as {format}", UNREADABLE)


def merged(batches: Iterable[pa.RecordBatch]) -> Generator[pa.RecordBatch]:
    """Yield plain batches; join those of fewer than `SAMPLE_ROWS` rows.

    Readers take about as long for a batch of one row, of which some streams consist.
    """
    held, rows = list[pa.RecordBatch](), 0
    seen = schema = pa.schema([])
    for batch in batches:
        if not batch.schema.equals(seen):  # Finding plain types takes longer than a row.
            seen, schema = batch.schema, plain_schema(batch.schema)
        held.append(plain(batch, schema))
        rows += batch.num_rows
        if rows >= SAMPLE_ROWS:
            yield from _joined(held)
            held, rows = [], 0
    yield from _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    if len(batches) < 2:
        return batches
    whole: list[pa.RecordBatch] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return whole


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema with only types that the readers know."""
    return pa.schema([pa.field(field.name, _plain_type(field.type)) for field in schema])


def plain(batch: pa.RecordBatch, schema: pa.Schema | None = None) -> pa.RecordBatch:
    """Convert a batch to types that the readers know: those of `schema`, its `plain_schema`."""
    schema = plain_schema(batch.schema) if schema is None else schema
    if batch.schema.equals(schema, check_metadata=True):
        return batch
    return pa.RecordBatch.from_arrays([_plain(one) for one in batch.columns], schema=schema)


def _plain(array: pa.Array) -> pa.Array:
    """Convert an array to a plain type. Missing lists and objects become empty ones."""
    kind = array.type
    if kind == _plain_type(kind):
        return array
    if isinstance(array, pa.ExtensionArray):
        return _plain(array.storage)
    if pa.types.is_run_end_encoded(kind):
        return _plain(pc.run_end_decode(array))
    if isinstance(kind, pa.StructType):
        names = [field.name for field in kind]
        return pa.StructArray.from_arrays(list(map(_plain, array.flatten())), names)
    if hasattr(array, "flatten"):  # Arrow casts list views wrongly if they are out of order.
        return pa.LargeListArray.from_arrays(list_offsets(array), _plain(array.flatten()))
    return array.cast(_plain_type(kind))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the plain type of extension types (Hugging Face), views (polars) and others."""
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type)
    if pa.types.is_run_end_encoded(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_decimal32(kind) or pa.types.is_decimal64(kind):
        return pa.decimal128(kind.precision, kind.scale)  # Arrow computes little with these.
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _plain_type(field.type)) for field in kind])
    is_view = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    if is_view or is_list(kind):
        value = _plain_type(kind.value_type)
        return pa.large_list(value) if is_view or value != kind.value_type else kind
    return kind
