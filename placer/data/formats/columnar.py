"""Parquet, and Arrow's files (IPC files and streams, Feather): a column for each feature.

A column of lists holds bags of ids.
"""

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cache, partial
from itertools import accumulate, islice, product
from struct import unpack_from
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from placer.data.files.opening import open_file
from placer.data.files.stores import beside, local_path, scheme_of, shown
from placer.data.formats.base import (
    BATCH_ROWS,
    SAMPLE_ROWS,
    Batches,
    ColumnSource,
    merged,
    plain,
    plain_schema,
    reading,
)
from placer.data.formats.columns import flat, outermost
from placer.data.formats.values import numbers_among
from placer.data.keys import is_list
from placer.data.source import Cursor, RawBatch, Source, Span
from placer.errors import DataError

_JOINED = b"PAR1PAR1"
"""The end of a file and the start of the next, in joined files."""
_LEAST_ROWS = 1024
"""Row groups with fewer rows are read together."""


class ParquetSource(ColumnSource):
    """Parquet files of one schema, in order; see `ColumnSource`."""

    def _prepare(self) -> None:
        every = [(file, _footer(file)) for file in self.files]
        kept = [(file, footer) for file, footer in every if footer.num_rows]
        if not kept:
            raise DataError(f"{shown(every[0][0])} is empty; a log needs at least one sample")
        self.notes = [
            f"{shown(file)} is empty and was passed over"
            for file, footer in every
            if not footer.num_rows
        ]
        self.files, self.footers = zip(*kept, strict=True)
        self._schemas = [_schema(file, footer) for file, footer in kept]
        full = self._infer_from(self._schemas)
        # Check only the last, newest file: columns that are added usually stay.
        self.notes += self._further_columns(self.files[-1], full[-1].names, full[0].names)
        self.samples = sum(footer.num_rows for footer in self.footers)

    def _sample(self, schema: pa.Schema) -> pa.Table:
        file = self.files[0]
        with reading(file, "Parquet"), ExitStack() as stack:
            opened = _parquet_file(file, self.footers[0], stack)
            batches, rows = list[pa.RecordBatch](), 0
            for group in range(opened.num_row_groups):  # Arrow needs it for lists of categories.
                first = [*islice(opened.iter_batches(SAMPLE_ROWS - rows, [group]), 1)]
                batches += first
                rows += sum(batch.num_rows for batch in first)
                if rows == SAMPLE_ROWS:
                    break
        if not rows:
            raise DataError(f"{shown(file)} has no samples, though it says so; is it damaged?")
        return self._sampled(pa.Table.from_batches(map(plain, batches)), file, schema)

    def id_ranges(self) -> dict[str, tuple[int, int]] | None:
        """Return ranges of integer features from row groups' statistics; None if any is missing."""
        ranges: dict[str, tuple[int, int]] = {}
        if numbers_among(self.columns.layout.nulls):
            return None  # Statistics include numbers that stand for missing values.
        integers = [name for name in self.columns.sparse if not self.columns.is_text(name)]
        if not all(set(schema.names).issuperset(integers) for schema in self._schemas):
            return None  # Some are partition columns.
        for footer, schema in zip(self.footers, self._schemas, strict=True):
            # Find leaves by order: a path a.b may be a column or field b of a struct a.
            counts = [_leaves(field.type) for field in schema]
            if sum(counts) != footer.num_columns:
                return None
            first = dict(zip(schema.names, accumulate(counts, initial=0), strict=False))
            for group, name in product(range(footer.num_row_groups), integers):
                statistics = footer.row_group(group).column(first[name]).statistics
                if statistics is None or not statistics.has_min_max:
                    return None
                if not isinstance(statistics.min, int):
                    return None  # The file has decimals, say.
                least, most = ranges.get(name, (0, 0))
                ranges[name] = min(least, int(statistics.min)), max(most, int(statistics.max))
        return ranges

    def spans(self) -> Generator[Span]:
        """Yield row groups, small ones together. One that is skipped whole is never read."""
        for file, footer, schema in zip(self.files, self.footers, self._schemas, strict=True):
            names = outermost(self._partitions.of_file(self.columns.names, schema.names), schema)
            first, row, groups = 0, 0, dict[int, int]()
            with ExitStack() as stack:
                # Do not open a file if all its row groups are skipped.
                opened = cache(partial(_parquet_file, file, footer, stack))
                for number in range(footer.num_row_groups):
                    groups[number] = footer.row_group(number).num_rows
                    row += groups[number]
                    if row - first >= _LEAST_ROWS or number + 1 == footer.num_row_groups:
                        yield self._row_groups(file, opened, groups, first, names)
                        first, groups = row, {}

    def _row_groups(
        self,
        file: str,
        opened: Callable[[], pq.ParquetFile],
        groups: Mapping[int, int],
        first: int,
        names: Sequence[str],
    ) -> Span:
        """Return row groups as a span: `groups` has their rows, `first` is the first row's number.

        Reading a span takes milliseconds, even of one row.
        """
        rows = sum(groups.values())

        def read_groups() -> Generator[pa.RecordBatch]:
            for number, expected in groups.items():
                held = 0
                for batch in opened().iter_batches(BATCH_ROWS, [number], names):
                    held += batch.num_rows
                    yield batch
                if held != expected:
                    raise ValueError(
                        f"row group {number} holds {held} rows and says that it has {expected}"
                    )

        def batches() -> Batches:
            row = first
            with reading(file, "Parquet"):
                for batch in merged(read_groups()):
                    yield file, row, batch
                    row += batch.num_rows

        cursor = Cursor(self._spans_of(batches()))
        behind = 0

        def read(start: int, stop: int) -> RawBatch:
            nonlocal behind
            cursor.skip(start - behind)
            batch = cursor.read(stop - start)
            assert batch is not None, "a group with fewer rows is refused"
            behind = start + batch.chunk.samples
            if behind == rows:
                cursor.skip(sys.maxsize)  # Refuses a group with more rows than it says.
            return batch

        return Span(rows, read)


def check_parts(metadata: Sequence[str], source: Source) -> None:
    """Raise DataError unless a log has all files and rows that ``_metadata`` files list."""
    assert isinstance(source, ParquetSource), "what this format is opened as"
    have = dict(zip(source.files, (footer.num_rows for footer in source.footers), strict=True))
    for file in metadata:
        footer, listed = _footer(file), dict[str, int]()
        for number in range(footer.num_row_groups):
            group = footer.row_group(number)
            part = beside(file, group.column(0).file_path)
            listed[part] = listed.get(part, 0) + group.num_rows
        for part, rows in listed.items():
            if have.get(part, 0) < rows:
                found = f"has {have[part]} rows" if part in have else "is missing or empty"
                raise DataError(
                    f"{shown(part)} {found}, and {shown(file)} lists it with {rows}; restore it, "
                    f"or remove {shown(file)} if that is out of date"
                )


def _schema(file: str, footer: pq.FileMetaData) -> pa.Schema:
    with reading(file, "Parquet"):
        schema = plain_schema(footer.schema.to_arrow_schema())
        assert flat(schema).names is not None, "read here, where a name may turn out to be no text"
        return schema


def _leaves(kind: pa.DataType) -> int:
    """Return the number of Parquet columns of an Arrow column."""
    if pa.types.is_struct(kind) or pa.types.is_map(kind):
        return sum(_leaves(kind.field(index).type) for index in range(kind.num_fields))
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(kind.storage_type)
    return _leaves(kind.value_type) if is_list(kind) else 1


def _parquet_file(file: str, footer: pq.FileMetaData, stack: ExitStack) -> pq.ParquetFile:
    # With a buffer, pages instead of whole column chunks are held in memory.
    source = local_path(file) if scheme_of(file) == "file" else open_file(file)
    how: dict[str, Any] = {"pre_buffer": False, "page_checksum_verification": True}
    return stack.enter_context(pq.ParquetFile(source, metadata=footer, buffer_size=1 << 20, **how))


def _footer(file: str) -> pq.FileMetaData:
    with reading(file, "Parquet"), open_file(file) as opened:
        footer = pq.read_metadata(opened)
        _check_chunks(opened, footer)
        return footer


def _check_chunks(opened: Any, footer: pq.FileMetaData) -> None:
    """Raise ValueError if another file ends between the last row group and the footer.

    Joined files end with the footer of the last file, which would be applied to the first.
    """
    if not footer.num_row_groups or not footer.num_columns:
        return
    group = footer.row_group(footer.num_row_groups - 1)
    end = 0
    for number in range(footer.num_columns):
        chunk = group.column(number)
        first = chunk.dictionary_page_offset or chunk.data_page_offset
        end = max(end, first + chunk.total_compressed_size)
    footer_at = opened.seek(0, 2) - 8 - footer.serialized_size
    opened.seek(min(end, footer_at))
    between = opened.read(max(footer_at - end, 0))
    if _JOINED in between:
        raise ValueError(
            f"another file ends at byte {end + between.index(_JOINED) + 4} of it; it is several "
            "files in one"
        )


_FILE = b"ARROW1"
_FEATHER_1 = b"FEA1"
_MARK_BYTES = 64
"""Most bytes between the last record batch and the footer: an 8-byte mark and padding."""


class IpcSource(ColumnSource):
    """Arrow files of one schema, in order; see `ColumnSource`.

    It holds one record batch of a file in memory.
    """

    def _prepare(self) -> None:
        self._infer_from([_ipc_schema(file) for file in self.files])

    def _batches(self) -> Batches:
        for file in self.files:
            row = 0
            schema = _ipc_schema(file)
            names = self._partitions.of_file(self.columns.names, schema.names)
            for batch in merged(_batches(file, outermost(names, schema))):
                yield file, row, batch
                row += batch.num_rows

    def _sample(self, schema: pa.Schema) -> pa.Table:
        for file in self.files:
            with closing(merged(_batches(file, None))) as batches:
                for batch in batches:
                    if batch.num_rows:
                        return self._sampled(batch.slice(0, SAMPLE_ROWS), file, schema)
        raise DataError(f"{shown(self.files[0])} is empty; a log needs at least one sample")


def _ipc_schema(file: str) -> pa.Schema:
    with reading(file, "Arrow"), _opened(file) as source:
        reader = _reader(source, None)
        if isinstance(reader, pa.RecordBatchFileReader):
            _check_blocks(source)
        schema = plain_schema(reader.schema)
        assert flat(schema).names is not None, "read here, where a name may turn out to be no text"
        return schema


def _batches(file: str, names: Sequence[str] | None) -> Generator[pa.RecordBatch]:
    """Return the record batches of a file, with the named columns or all."""
    with reading(file, "Arrow"), _opened(file) as source:
        reader = _reader(source, names)
        is_file = isinstance(reader, pa.RecordBatchFileReader)
        if is_file:
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = iter(reader)
        end = source.tell()
        for batch in batches:
            # Arrow trusts lengths and offsets, and crashes if they are wrong.
            batch.validate(full=True)
            yield batch
            end = source.tell()
        # Arrow does not notice a stream that was cut between two batches.
        if not is_file and source.tell() == end:
            raise ValueError(
                f"it ends at byte {end} without the mark that ends a stream; is it cut?"
            )
        if not is_file and source.tell() < source.size():
            raise ValueError(
                f"its stream ends before byte {source.tell()}, and {source.size()} are there; "
                "write one stream a file"
            )


def _check_blocks(source: Any) -> None:
    """Raise ValueError unless a file's footer directly follows its last record batch.

    Joined files end with the footer of the last file. Arrow would apply it to the first file.
    """
    footer_end = source.size() - len(_FILE) - 4
    source.seek(footer_end)
    footer_at = footer_end - int.from_bytes(source.read(4), "little")
    source.seek(footer_at)
    ends = _block_ends(source.read(footer_end - footer_at))
    source.seek(12)
    schema_end = 16 + int.from_bytes(source.read(4), "little")
    end = max(ends, default=schema_end)
    if footer_at - end > _MARK_BYTES:
        raise ValueError(
            f"its footer, at byte {footer_at}, lists record batches up to byte {end} alone; is it "
            "several files in one?"
        )


def _block_ends(footer: bytes) -> list[int]:
    """Return ends of the dictionaries and record batches that a footer lists.

    The footer is a FlatBuffers table. Its fields 2 and 3 list them, with 24 bytes each.
    """
    ends = []
    (table,) = unpack_from("<I", footer)
    places = table - unpack_from("<i", footer, table)[0]
    for number in (2, 3):
        known = 4 + 2 * number < unpack_from("<H", footer, places)[0]
        place = table + unpack_from("<H", footer, places + 4 + 2 * number)[0] if known else table
        if place > table:
            blocks = place + unpack_from("<I", footer, place)[0]
            for block in range(unpack_from("<I", footer, blocks)[0]):
                ends.append(sum(unpack_from("<qi4xq", footer, blocks + 4 + 24 * block)))
    return ends


def _opened(file: str) -> Any:
    if scheme_of(file) != "file":
        return open_file(file)
    try:
        return pa.memory_map(local_path(file))
    except OSError:
        return open_file(file)  # It reports the error.


def _reader(source: Any, names: Sequence[str] | None) -> Any:
    """Return a reader of a file or a stream, by its first bytes."""
    start = source.read(len(_FILE))
    source.seek(0)
    if start[:4] == _FEATHER_1:
        raise ValueError("it is Feather of version 1; write it again, or as Parquet")
    opened = pa.ipc.open_file if start == _FILE else pa.ipc.open_stream
    if names is None:
        return opened(source)
    schema = opened(source).schema
    source.seek(0)
    fields = [schema.names.index(name) for name in names if name in schema.names]
    return opened(source, options=pa.ipc.IpcReadOptions(included_fields=fields))
