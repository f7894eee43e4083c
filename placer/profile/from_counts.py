"""Make profiles from counts of a database, for logs too large for one machine."""

import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from placer.data.formats.base import plain, reading
from placer.data.formats.columns import check_column
from placer.data.vocabulary import DistinctKeys, Run
from placer.errors import DataError
from placer.files.atomic import StrPath
from placer.profile.count import TableOptions
from placer.profile.profile import Profile
from placer.profile.table_profile import FeatureCounts, RowCounts
from placer.tables import DType, OptimizerName, Pooling

_COUNT_COLUMNS = ("table", "id", "count")
_FEATURE_COLUMNS = ("feature", "table", "lookups", "bags")


def profile_counts(
    paths: StrPath | Sequence[StrPath],
    *,
    samples: int,
    rows: Mapping[str, int] | None = None,
    features: StrPath | None = None,
    dim: int | Mapping[str, int] = 64,
    dtype: DType = "float32",
    optimizer: OptimizerName = "rowwise_adagrad",
    pooling: Pooling | Mapping[str, Pooling] = "sum",
    sampling: float = 1.0,
) -> Profile:
    """Make a profile from Parquet files with columns table, id and count.

    docs/profile.md shows the SQL for them. Memory grows with the rows read, not with the log.

    Raises DataError if a file or column is missing, an id is out of range, or the features' lookups
    do not add up to a table's counts.

    Parameters
    ----------
    paths : path or sequence of paths
        ``table`` is text, ``id`` the row (an integer, already mapped) and ``count`` its number of
        lookups. If a row is listed more than once, its counts are added.
    samples : int
        Number of samples of the log.
    rows : mapping of table name to int, optional
        Rows of each table, by default its largest id + 1; ``*`` stands for all other tables.
    features : path, optional
        Parquet with columns feature, table, lookups (ids read) and bags (not empty). By default
        each table is read by one feature of its name, with as many bags as lookups, but no more
        than samples.
    sampling : float
        Share of the log that was counted.
    """
    if samples < 1:
        raise DataError(f"samples must be at least 1, not {samples}; it sets the pooling factors")
    if not 0 < sampling <= 1:
        raise DataError(f"sampling must be a share above 0 and at most 1, not {sampling}")
    files = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    counted = _read_counts([str(file) for file in files], rows or {})
    if features:
        by_table = _read_features(str(features), counted)
    else:
        by_table = {
            name: {name: FeatureCounts(counts.total, min(samples, counts.total))}
            for name, counts in counted.items()
        }
    for feature, measured in (one for own in by_table.values() for one in own.items()):
        if measured.bags > samples:
            raise DataError(
                f"feature {feature!r} has {measured.bags} bags that are not empty, "
                f"more than there are samples: {samples}"
            )
    options = TableOptions(dim, dtype, optimizer, pooling)
    tables = tuple(options.profiles(counted, by_table, samples))
    return Profile(tables, samples, sampling, ", ".join(map(str, files)))


def _read_counts(files: Sequence[str], rows: Mapping[str, int]) -> dict[str, RowCounts]:
    counted: dict[str, DistinctKeys] = {}
    totals: dict[str, float] = {}
    for file in files:
        for batch in parquet_batches(file, _COUNT_COLUMNS):
            encoded = _texts(batch, "table", file).dictionary_encode()
            tables = encoded.indices.to_numpy(zero_copy_only=False)
            names = _names(encoded.dictionary, "table", file)
            ids, counts = _integers(batch, "id", file), _integers(batch, "count", file)
            if counts.size and counts.min() < 0:
                raise DataError(f"{file}: count {counts.min()} is negative")
            by_table = np.argsort(tables, kind="stable")
            ends = np.bincount(tables, minlength=len(names)).cumsum()
            for name, own_rows in zip(names, np.split(by_table, ends), strict=False):
                here = own_rows[counts[own_rows] > 0]
                read, own = counts[here], counted.setdefault(name, DistinctKeys())
                totals[name] = totals.get(name, 0.0) + float(read.sum(dtype=np.float64))
                if totals[name] >= 1 << 62:
                    raise DataError(
                        f"table {name!r}: its counts sum to 2^62 lookups or more, which no log has"
                    )
                own.add_run(ids[here].view(np.uint64), read, np.zeros_like(read))
    if not counted:
        raise DataError(f"{', '.join(files)}: there is no count in it")
    unknown = sorted(set(rows) - {"*", *counted})
    if unknown:
        raise DataError(
            f"rows are given for table {unknown[0]!r}, of which nothing was counted; "
            f"tables are {', '.join(counted)}"
        )
    return {
        name: _row_counts(name, counted.pop(name).merge(), rows.get(name, rows.get("*")))
        for name in list(counted)
    }


def _row_counts(name: str, run: Run, rows: int | None) -> RowCounts:
    ids = run.keys.view(np.int64)
    rows = max(1, int(ids.max(initial=0)) + 1) if rows is None else rows
    wrong = ids[(ids < 0) | (ids >= rows)]
    if wrong.size:
        raise DataError(
            f"table {name!r} has id {wrong[0]}, but rows 0..{rows - 1}; give it more rows or "
            "map the ids before counting"
        )
    return RowCounts(rows, ids, run.counts)


def _read_features(
    file: str, counted: Mapping[str, RowCounts]
) -> dict[str, dict[str, FeatureCounts]]:
    features: dict[str, dict[str, FeatureCounts]] = {name: {} for name in counted}
    for batch in parquet_batches(file, _FEATURE_COLUMNS):
        columns = [_names(_texts(batch, name, file), name, file) for name in _FEATURE_COLUMNS[:2]]
        numbers = (_integers(batch, name, file).tolist() for name in ("lookups", "bags"))
        for feature, table, lookups, bags in zip(*columns, *numbers, strict=True):
            if table not in features:
                raise DataError(
                    f"{file}: feature {feature!r} reads table {table!r}, "
                    f"of which nothing was counted; tables are {', '.join(features)}"
                )
            if not 0 <= bags <= lookups:
                raise DataError(
                    f"{file}: feature {feature!r} has {lookups} lookups in "
                    f"{bags} bags that are not empty"
                )
            known = features[table].get(feature, FeatureCounts())
            features[table][feature] = known + FeatureCounts(lookups, bags)
    for name, counts in counted.items():
        total = sum(feature.lookups for feature in features[name].values())
        if total != counts.total:
            raise DataError(
                f"{file}: the features of table {name!r} have {total} lookups, "
                f"but its counts sum to {counts.total}; count both over the same samples"
            )
    return features


def parquet_batches(file: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a Parquet file; refuse missing columns and values."""
    with reading(file, "Parquet"), pq.ParquetFile(file) as parquet:
        for column in columns:
            check_column(file, parquet.schema_arrow, column)
        for batch in map(plain, parquet.iter_batches(columns=list(columns))):
            for column in columns:
                if batch.column(column).null_count:
                    raise DataError(f"{file}: column {column!r} has missing values")
            yield batch


def _texts(batch: pa.RecordBatch, name: str, file: str) -> pa.Array:
    column = batch.column(name)
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"{file}: column {name!r} is {column.type}; it must hold texts")
    return column


def _names(column: pa.Array, name: str, file: str) -> list[str]:
    try:
        names: list[str] = column.to_pylist()
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: column {name!r} holds texts that are no UTF-8") from error
    return names


def _integers(batch: pa.RecordBatch, name: str, file: str) -> npt.NDArray[np.int64]:
    column = batch.column(name)
    # Databases sum counts into decimals (Spark, BigQuery), or doubles in Parquet (DuckDB).
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_floating(kind)):
        raise DataError(f"{file}: column {name!r} is {kind}; it holds integers")
    try:
        values = pc.cast(column, pa.int64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        raise DataError(f"{file}: column {name!r} holds integers: {error}") from error
    return np.asarray(values, dtype=np.int64)
