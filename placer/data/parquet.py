"""Parquet logs: one column a feature; a list column is a bag of several ids."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from placer.data import criteo
from placer.data.keys import Missing, bags_from_arrow, can_be_ids, is_list, is_text
from placer.data.source import RawBags, RawBatch
from placer.errors import DataError

_BATCH_ROWS = 16384
UNREADABLE = (OSError, ValueError, KeyError, pa.ArrowException)
"""What Arrow raises for a file that is no Parquet, or has names that are no UTF-8."""
_LABEL_NAMES = ("label", "click", "clicked", "target")


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns of a Parquet log are what."""

    sparse: tuple[str, ...]
    dense: tuple[str, ...]
    label: str | None

    @property
    def names(self) -> list[str]:
        """All of them."""
        label = [] if self.label is None else [self.label]
        return [*label, *self.dense, *self.sparse]


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
    ) -> None:
        self.files = tuple(files)
        self.missing: Missing = missing
        footers = [_footer(file) for file in self.files]
        schemas = [_schema(file, one) for file, one in zip(self.files, footers, strict=True)]
        schema = schemas[0]
        self.columns = infer_columns(schema, sparse, dense, label, ignore)
        check_columns(self.files[0], schema, self.columns, ignore)
        for file, own in zip(self.files, schemas, strict=True):
            _check_schema(file, own, self.columns)
        self.text_features: Mapping[str, bool] = {
            name: is_text(schema.field(name).type) for name in self.columns.sparse
        }
        self.dense_names = self.columns.dense
        self.label_name = self.columns.label
        self.samples: int | None = sum(footer.num_rows for footer in footers)
        self._footers, self._schemas = footers, schemas

    def largest_ids(self) -> Mapping[str, int] | None:
        """Of the integer features, from the row groups' statistics; None if one is missing."""
        largest: dict[str, int] = {}
        integers = [name for name, is_text in self.text_features.items() if not is_text]
        for footer, schema in zip(self._footers, self._schemas, strict=True):
            # By their order: the path of a leaf does not tell a.b, a column, from b of a struct a.
            counts = [_leaves(field.type) for field in schema]
            if sum(counts) != footer.num_columns:
                return None
            first = dict(zip(schema.names, _starts(counts), strict=True))
            leaves = {name: first[name] for name in integers}
            for group in range(footer.num_row_groups):
                for name, leaf in leaves.items():
                    statistics = footer.row_group(group).column(leaf).statistics
                    if statistics is None or not statistics.has_min_max:
                        return None
                    largest[name] = max(largest.get(name, 0), int(statistics.max))
        return largest

    def open(self) -> "ParquetCursor":
        """A cursor at the log's start."""
        return ParquetCursor(self.files, self._footers, self.columns, self.missing)


class ParquetCursor:
    """Reads record batches; row groups that are skipped altogether are never read."""

    def __init__(
        self,
        files: Sequence[str],
        footers: Sequence[pq.FileMetaData],
        columns: Columns,
        missing: Missing,
    ) -> None:
        self._columns = columns
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
        raw = raw_batch(part, self._open_file, self._row, self._columns, self._missing)
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
                # A buffered stream holds pages, not whole column chunks, of a row group.
                self._parquet = pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
                self._open_file = file
            assert self._parquet is not None, "opened just above or at an earlier row group"
            self._batches = self._parquet.iter_batches(
                batch_size=_BATCH_ROWS, row_groups=[group], columns=self._columns.names
            )
        except UNREADABLE as error:
            raise _unreadable(file, error) from error
        self._batch, self._used = None, 0
        self._row, self._group_end = before, before + rows


def infer_columns(
    schema: pa.Schema,
    sparse: Sequence[str] | None = None,
    dense: Sequence[str] | None = None,
    label: str | None = None,
    ignore: Sequence[str] = (),
) -> Columns:
    """Which columns are what, where the caller does not say.

    The label is the column called label, click, clicked or target. A schema with Criteo's
    columns I1..I13 and C1..C26 has these alone. Otherwise texts, integers, booleans and
    lists of them are categorical, floating-point numbers are numeric, and other types are
    left out.
    """
    known = set(schema.names)
    is_criteo = known.issuperset(criteo.DENSE) and known.issuperset(criteo.CATEGORIES)
    if label is None:
        label = next(
            (name for name in schema.names if name.lower() in _LABEL_NAMES and name not in ignore),
            None,
        )
    if sparse is None:
        taken = {label, *ignore, *(dense or ())}
        sparse = [
            name
            for name in (criteo.CATEGORIES if is_criteo else schema.names)
            if name not in taken and can_be_ids(schema.field(name).type)
        ]
    if dense is None:
        taken = {label, *ignore, *sparse}
        dense = [
            name
            for name in (criteo.DENSE if is_criteo else schema.names)
            if name not in taken and (is_criteo or pa.types.is_floating(schema.field(name).type))
        ]
    return Columns(tuple(sparse), tuple(dense), label)


def check_columns(
    file: str, schema: pa.Schema, columns: Columns, ignore: Sequence[str] = ()
) -> None:
    """Check that a log has the columns, of types that fit, and one to count.

    Raises
    ------
    DataError
        Names the column that is missing or does not fit.
    """
    for column in ignore:
        _check_column(file, schema, column)
    _check_schema(file, schema, columns)
    if not columns.sparse:
        raise DataError(
            f"{file} has no categorical column; name them with sparse=, "
            f"there are {', '.join(schema.names)}"
        )


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


def _footer(file: str) -> pq.FileMetaData:
    try:
        footer = pq.read_metadata(file)
    except FileNotFoundError as error:
        raise DataError(f"cannot open {file}: no such file") from error
    except UNREADABLE as error:
        raise _unreadable(file, error) from error
    if footer.num_rows == 0:
        raise DataError(f"{file} is empty; a log needs at least one sample")
    return footer


def _unreadable(file: str, error: Exception) -> DataError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return DataError(f"cannot read {file} as Parquet: {reason}")


def _check_column(file: str, schema: pa.Schema, name: str) -> pa.DataType:
    if schema.names.count(name) != 1:
        count = "no" if name not in schema.names else "more than one"
        raise DataError(f"{file} has {count} column {name!r}; it has {', '.join(schema.names)}")
    return schema.field(name).type


def _check_schema(file: str, schema: pa.Schema, columns: Columns) -> None:
    for name in columns.names:
        kind = _check_column(file, schema, name)
        if name in columns.sparse and not can_be_ids(kind):
            raise DataError(
                f"{file}: column {name!r} is {kind}, which cannot hold ids; "
                "ids are integers, texts or lists of them"
            )
        if name not in columns.sparse and is_list(kind):
            raise DataError(f"{file}: column {name!r} is {kind}, but should hold one number")


def raw_batch(
    batch: pa.RecordBatch, file: str, row: int, columns: Columns, missing: Missing
) -> RawBatch:
    """The samples of a record batch, whose first one is row `row` of `file`."""
    features = {}
    for name in columns.sparse:
        keys, offsets = bags_from_arrow(batch.column(name), missing)
        features[name] = RawBags(keys, offsets)
    dense = np.empty((batch.num_rows, len(columns.dense)), dtype=np.float32)
    for position, name in enumerate(columns.dense):
        dense[:, position] = _numbers(batch.column(name), name, file, row)
    labels = None
    if columns.label is not None:
        labels = _numbers(batch.column(columns.label), columns.label, file, row)
    return RawBatch(file, row, "row", batch.num_rows, features, dense, labels)


def _numbers(column: pa.Array, name: str, file: str, row: int) -> npt.NDArray[np.float32]:
    """A numeric column, which may be written as text; NaN where a value is missing."""
    try:
        if is_text(column.type):
            column = pc.replace_with_mask(
                column, pc.equal(pc.binary_length(column), 0), pa.scalar(None, column.type)
            )
        values = column.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{file}, from row {row} on: column {name!r} is not numeric: {reason}"
        ) from error
    return np.asarray(values, dtype=np.float32)
