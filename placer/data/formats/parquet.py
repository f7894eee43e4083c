"""Parquet logs: one column a feature; a list column is a bag of several ids."""

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

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
from placer.data.keys import Missing, is_list
from placer.data.layout import Layout
from placer.data.source import RawBatch
from placer.errors import DataError

_BATCH_ROWS = 16384
UNREADABLE = (OSError, ValueError, KeyError, pa.ArrowException)
"""What Arrow raises for a file that is no Parquet, or has names that are no UTF-8."""
SAMPLE_ROWS = 10_000


class ParquetSource:
    """Parquet files of one schema, in order.

    Parameters
    ----------
    files : sequence of str
    sparse, dense : sequence of str, optional
        Categorical and numeric columns; inferred where None, see `infer_columns`.
    label : str, optional
    ignore : sequence of str
        Columns that the inference leaves out.
    missing : {"zero", "empty"}

    Raises
    ------
    DataError
        If a file is missing, empty or no Parquet, or a column is missing or of a type that
        does not fit.
    """

    def __init__(
        self,
        files: Sequence[str],
        *,
        sparse: Sequence[str] | None = None,
        dense: Sequence[str] | None = None,
        label: str | None = None,
        ignore: Sequence[str] = (),
        missing: Missing = "zero",
        layout: Layout | None = None,
    ) -> None:
        self.missing: Missing = missing
        known = layout or Layout()
        kept, footers, self.notes = _footers(files)
        self.files = tuple(kept)
        schemas = [_schema(file, one) for file, one in zip(self.files, footers, strict=True)]
        self._partitions = Partitions(self.files, known.types)
        full = [self._partitions.added_to(schema) for schema in schemas]
        sample = None
        if sparse is None or dense is None:
            sample = self._sample(full[0])
        self.columns = infer_columns(
            full[0],
            sparse,
            dense,
            label,
            ignore,
            sample=sample,
            types=known.types,
            lists=known.lists if layout is not None else None,
        )
        check_columns(self.files[0], full[0], self.columns, ignore)
        for file, own in zip(self.files, full, strict=True):
            check_schema(file, own, self.columns)
        self.layout = self.columns.layout
        self.text_features: Mapping[str, bool] = {
            name: self.columns.is_text(name) for name in self.columns.sparse
        }
        self.dense_names = self.columns.dense
        self.label_name = self.columns.label
        self.samples: int | None = sum(footer.num_rows for footer in footers)
        self._footers, self._schemas = footers, schemas

    def _sample(self, schema: pa.Schema) -> pa.Table:
        """The first samples of the log."""
        file = self.files[0]
        try:
            with _parquet_file(file) as opened:
                batch = next(opened.iter_batches(batch_size=SAMPLE_ROWS))
        except UNREADABLE as error:
            raise _unreadable(file, error) from error
        table = pa.Table.from_batches([batch])
        return self._partitions.filled(table, file, schema.names).select(once(schema.names))

    def largest_ids(self) -> Mapping[str, int] | None:
        """Of the integer features, from the row groups' statistics; None if one is missing."""
        ranges = self._id_ranges()
        return None if ranges is None else {name: most for name, (_, most) in ranges.items()}

    def smallest_ids(self) -> Mapping[str, int]:
        """As `largest_ids`; at most 0, and nothing if a statistic is missing."""
        return {name: least for name, (least, _) in (self._id_ranges() or {}).items()}

    def _id_ranges(self) -> dict[str, tuple[int, int]] | None:
        """The smallest and the largest id of each integer feature, 0 included."""
        ranges: dict[str, tuple[int, int]] = {}
        integers = [name for name, is_text in self.text_features.items() if not is_text]
        names = set().union(*(schema.names for schema in self._schemas))
        if not names.issuperset(integers):
            return None  # Folders hold some.
        for footer, schema in zip(self._footers, self._schemas, strict=True):
            # By their order: the path of a leaf does not tell a.b, a column, from b of a struct a.
            counts = [_leaves(field.type) for field in schema]
            if sum(counts) != footer.num_columns:
                return None
            first = dict(zip(schema.names, _starts(counts), strict=True))
            if any(_holds_no_integers(schema.field(name).type) for name in integers):
                return None
            leaves = {name: first[name] for name in integers}
            for group in range(footer.num_row_groups):
                for name, leaf in leaves.items():
                    statistics = footer.row_group(group).column(leaf).statistics
                    if statistics is None or not statistics.has_min_max:
                        return None
                    least, most = ranges.get(name, (0, 0))
                    ranges[name] = min(least, int(statistics.min)), max(most, int(statistics.max))
        return ranges

    def open(self) -> "ParquetCursor":
        """A cursor at the log's start."""
        return ParquetCursor(
            self.files, self._footers, self._schemas, self.columns, self.missing, self._partitions
        )


class ParquetCursor:
    """Reads record batches; row groups that are skipped altogether are never read."""

    def __init__(
        self,
        files: Sequence[str],
        footers: Sequence[pq.FileMetaData],
        schemas: Sequence[pa.Schema],
        columns: Columns,
        missing: Missing,
        partitions: Partitions,
    ) -> None:
        self._columns, self._partitions = columns, partitions
        self._schemas = dict(zip(files, schemas, strict=True))
        self._missing: Missing = missing
        # Each row group with its file and the rows of the file before it.
        self._groups: list[tuple[str, int, int, int]] = []
        for file, footer in zip(files, footers, strict=True):
            before = 0
            for group in range(footer.num_row_groups):
                rows = footer.row_group(group).num_rows
                self._groups.append((file, group, before, rows))
                before += rows
        self._next_group = 0
        self._open_file = ""
        self._parquet: pq.ParquetFile | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._batch: pa.RecordBatch | None = None
        # Rows of the current batch, and rows of its file, that are behind us; the latter
        # run to the end of the row group that was opened last.
        self._used = 0
        self._row = 0
        self._group_end = 0

    def read(self, samples: int) -> RawBatch | None:
        """The next samples, at least one and at most `samples`; None at the end."""
        batch = self._current_batch()
        if batch is None:
            return None
        part = batch.slice(self._used, samples)
        part = self._partitions.filled(part, self._open_file, self._columns.names)
        place = Place(self._open_file, self._row)
        raw = raw_batch(part, place, self._columns, self._missing)
        self._used += part.num_rows
        self._row += part.num_rows
        return raw

    def skip(self, samples: int) -> int:
        """Move on; row groups that end before the place to go to are not read."""
        left = samples
        while left:
            in_group = self._group_end - self._row
            if not in_group:
                if self._next_group == len(self._groups):
                    break
                rows = self._groups[self._next_group][3]
                if rows <= left:
                    self._next_group += 1
                    left -= rows
                else:
                    self._open_group()
            elif in_group <= left:
                self._batches, self._batch, self._used = iter(()), None, 0
                self._row = self._group_end
                left -= in_group
            elif (batch := self._current_batch()) is not None:
                step = min(left, batch.num_rows - self._used)
                self._used += step
                self._row += step
                left -= step
        return samples - left

    def close(self) -> None:
        """Close the file that is open."""
        self._batches = iter(())
        if self._parquet is not None:
            self._parquet.close()
            self._parquet = None
        self._open_file = ""

    def _current_batch(self) -> pa.RecordBatch | None:
        """The batch that holds the next row; None at the log's end."""
        while self._batch is None or self._used == self._batch.num_rows:
            try:
                self._batch = next(self._batches, None)
            except UNREADABLE as error:
                raise _unreadable(self._open_file, error) from error
            self._used = 0
            if self._batch is None:
                if self._next_group == len(self._groups):
                    return None
                self._open_group()
        return self._batch

    def _open_group(self) -> None:
        file, group, before, rows = self._groups[self._next_group]
        self._next_group += 1
        try:
            if file != self._open_file:
                self.close()
                self._parquet = _parquet_file(file)
                self._open_file = file
            assert self._parquet is not None, "opened just above or at an earlier row group"
            self._batches = self._parquet.iter_batches(
                batch_size=_BATCH_ROWS,
                row_groups=[group],
                columns=self._partitions.of_file(self._columns.names, self._schemas[file]),
            )
        except UNREADABLE as error:
            raise _unreadable(file, error) from error
        self._batch, self._used = None, 0
        self._row, self._group_end = before, before + rows


def _schema(file: str, footer: pq.FileMetaData) -> pa.Schema:
    try:
        return footer.schema.to_arrow_schema()
    except UNREADABLE as error:
        raise _unreadable(file, error) from error


def _leaves(kind: pa.DataType) -> int:
    """Columns of a Parquet file that one of Arrow's takes."""
    if pa.types.is_struct(kind) or pa.types.is_map(kind):
        return sum(_leaves(kind.field(index).type) for index in range(kind.num_fields))
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(kind.storage_type)
    return _leaves(kind.value_type) if is_list(kind) else 1


def _starts(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:place]) for place in range(len(counts))]


def _holds_no_integers(kind: pa.DataType) -> bool:
    """Whether statistics of a column of this type are of texts or floating-point numbers."""
    value = kind.value_type if is_list(kind) or pa.types.is_dictionary(kind) else kind
    return not (pa.types.is_integer(value) or pa.types.is_boolean(value))


def _parquet_file(file: str) -> pq.ParquetFile:
    # A buffered stream holds pages, not whole column chunks, of a row group.
    if scheme_of(file) == "file":
        return pq.ParquetFile(local_path(file), buffer_size=1 << 20, pre_buffer=False)
    return pq.ParquetFile(open_file(file), buffer_size=1 << 20, pre_buffer=False)


def _footers(
    files: Sequence[str],
) -> tuple[list[str], list[pq.FileMetaData], tuple[str, ...]]:
    """The files that have samples, their footers, and a note of the others."""
    kept, footers, empty = [], [], []
    for file in files:
        footer = _footer(file)
        if footer.num_rows:
            kept.append(file)
            footers.append(footer)
        else:
            empty.append(file)
    if not kept:
        raise DataError(f"{shown(files[0])} is empty; a log needs at least one sample")
    return kept, footers, tuple(f"{shown(file)} is empty and was passed over" for file in empty)


def _footer(file: str) -> pq.FileMetaData:
    try:
        if scheme_of(file) == "file":
            return pq.read_metadata(local_path(file))
        with open_file(file) as opened:
            return pq.read_metadata(opened)
    except FileNotFoundError as error:
        raise DataError(f"cannot open {shown(file)}: no such file") from error
    except UNREADABLE as error:
        raise _unreadable(file, error) from error


def _unreadable(file: str, error: Exception) -> DataError:
    return DataError(f"cannot read {shown(file)} as Parquet: {first_line(error)}")
