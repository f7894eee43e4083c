"""Opens a log: which files, which format, which columns, and how ids become rows."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from placer.data.criteo import CriteoSource
from placer.data.dlrm import DlrmSource
from placer.data.encoded import EncodedLog
from placer.data.encoding import Encoding
from placer.data.identity import states
from placer.data.in_memory import ArrowSource, BatchSource, InMemory, batches_of, is_in_memory
from placer.data.keys import Missing
from placer.data.mapping import Hash, Identity, IdMapping
from placer.data.names import FORMATS, ID_MAPPINGS, Format, MappingKind
from placer.data.parquet import ParquetSource
from placer.data.source import Progress, Source
from placer.data.vocabulary import build_vocabularies
from placer.errors import DataError

_Path = str | os.PathLike[str]
_SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".pt": "dlrm",
    ".pt.gz": "dlrm",
}
_NAMED_COLUMNS = ("parquet", "memory")
# A table that the largest id seen would give more rows than this is surely not meant.
MAX_INFERRED_ROWS = 1 << 31


def open_log(
    paths: _Path | Sequence[_Path] | InMemory,
    format: Format | None = None,
    *,
    id_mapping: Literal["auto", "identity", "hash", "vocabulary"] = "auto",
    rows: int | Mapping[str, int] | None = None,
    min_count: int = 1,
    sparse: Sequence[str] | None = None,
    dense: Sequence[str] | None = None,
    label: str | None = None,
    ignore: Sequence[str] = (),
    feature_tables: Mapping[str, str] | None = None,
    missing: Missing = "zero",
    encoding: Encoding | None = None,
    progress: Progress | None = None,
) -> EncodedLog:
    """Open a log whose ids are mapped to rows of tables.

    Parameters
    ----------
    paths : path or sequence of paths, or what a program holds
        Files, read in order. A folder stands for its files in order of their names. Or an Arrow
        table, stream or data set, or what `placer.data.in_memory.batches_of` takes.
    format : optional
        By default by the first file's suffix: ``.parquet``, ``.pt`` or ``.pt.gz``, else criteo.
    id_mapping
        ``identity``: ids are rows. ``hash``: row = key modulo rows. ``vocabulary``: ids get
        rows from 1 on as they first appear, in one more pass over the log; ids that are left
        out share row 0. ``auto``: vocabulary for texts, identity for integers.
    rows : int or mapping of table name to int, optional
        Rows of the tables. A hash needs them; a vocabulary keeps so many of the most read ids;
        for identity the default is the largest id + 1.
    min_count
        A vocabulary leaves out ids that are read less often.
    sparse, dense, label, ignore
        Columns of a Parquet log; see `placer.data.parquet.infer_columns`.
    feature_tables
        Tables of features that are not named like their table; several features may share one.
    missing
        Whether a missing value is read as id 0, as the DLRM reference does, or not at all.
    encoding
        That of a profile, instead of all the options above but `format`.
    progress
        Called with the samples that the pass for a vocabulary has read, and all (None: unknown).

    Raises
    ------
    DataError
        If a file is missing, empty or unreadable, or lacks a column, or an option does not fit.
    """
    held = batches_of(paths) if is_in_memory(paths) else None
    files = [held.name] if held else _files(paths)
    before = {} if held else states(files)
    kind = "memory" if held else format or _format_of(files[0])
    if encoding is not None:
        columns = (list(encoding.feature_tables), encoding.dense, encoding.label, ())
        source = _source(held or files, kind, *columns, encoding.missing)
        return EncodedLog(source, encoding, before)
    _check_options(files[0], kind, label, ignore, id_mapping)
    source = _source(held or files, kind, sparse, dense, label, ignore, missing)
    named = kind in _NAMED_COLUMNS
    features = feature_tables_of(source, None if named else sparse, feature_tables)
    mappings = _mappings(source, features, id_mapping, rows, min_count, progress)
    encoding = Encoding(features, mappings, source.dense_names, source.label_name, missing)
    return EncodedLog(source, encoding, before)


def _check_options(
    file: str, format: str, label: str | None, ignore: Sequence[str], id_mapping: str
) -> None:
    if format not in _NAMED_COLUMNS and (label is not None or ignore):
        raise DataError(
            f"{file} is read as {format}, whose columns have no names to choose by; "
            "leave out label= and ignore="
        )
    if id_mapping not in ID_MAPPINGS:
        raise DataError(f"id_mapping {id_mapping!r} is none of {', '.join(ID_MAPPINGS)}")


def _files(paths: _Path | Sequence[_Path]) -> list[str]:
    named = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not named:
        raise DataError("no file to read; name at least one")
    files: list[str] = []
    for path in map(Path, named):
        inside = sorted(
            str(file)
            for file in (path.iterdir() if path.is_dir() else ())
            if file.is_file() and not file.name.startswith((".", "_"))
        )
        if path.is_dir() and not inside:
            raise DataError(f"folder {path} has no file to read")
        files += inside or [str(path)]
    return files


def _format_of(file: str) -> Format:
    suffixes = Path(file).suffixes
    for suffix in ("".join(suffixes[-2:]), "".join(suffixes[-1:])):
        if suffix in _SUFFIXES:
            return _SUFFIXES[suffix]
    return "criteo"


def _source(
    files: Sequence[str] | BatchSource,
    format: str,
    sparse: Sequence[str] | None,
    dense: Sequence[str] | None,
    label: str | None,
    ignore: Sequence[str],
    missing: Missing,
) -> Source:
    if isinstance(files, BatchSource):
        return ArrowSource(
            files, sparse=sparse, dense=dense, label=label, ignore=ignore, missing=missing
        )
    match format:
        case "parquet":
            return ParquetSource(
                files, sparse=sparse, dense=dense, label=label, ignore=ignore, missing=missing
            )
        case "criteo":
            return CriteoSource(files, missing)
        case "dlrm":
            return DlrmSource(files)
        case _:
            raise DataError(f"format {format!r} is none of {', '.join(FORMATS)}")


def feature_tables_of(
    source: Source, sparse: Sequence[str] | None, renamed: Mapping[str, str] | None
) -> dict[str, str]:
    """The table that each feature reads, in the log's order."""
    tables = dict(renamed or {})
    kept = list(source.text_features) if sparse is None else list(sparse)
    unknown = [name for name in [*kept, *tables] if name not in source.text_features]
    if unknown:
        raise DataError(
            f"{source.files[0]} has no feature {unknown[0]!r}; "
            f"it has {', '.join(source.text_features)}"
        )
    return {feature: tables.get(feature, feature) for feature in kept}


def mapping_kinds(
    source: Source,
    feature_tables: Mapping[str, str],
    id_mapping: str,
    rows: int | Mapping[str, int] | None,
) -> tuple[dict[str, MappingKind], dict[str, int]]:
    """How the ids of each table become rows, and the rows of those whose number is set.

    Raises
    ------
    DataError
        If rows are set for a table that is not there, are too few, or are missing for a hash.
    """
    names = list(dict.fromkeys(feature_tables.values()))
    row_counts = dict.fromkeys(names, rows) if isinstance(rows, int) else dict(rows or {})
    for name, count in row_counts.items():
        if name not in names:
            raise DataError(f"rows are given for table {name!r}; tables are {', '.join(names)}")
        if count < 1:
            raise DataError(f"table {name!r} needs at least 1 row, not {count}")
    kinds = {name: _kind(id_mapping, any(_texts(source, feature_tables, name))) for name in names}
    unsized = [name for name in names if kinds[name] == "hash" and name not in row_counts]
    if unsized:
        raise DataError(
            f"a hash needs the number of rows of table {unsized[0]!r}; give rows=, "
            "one number for all tables or one for each"
        )
    return kinds, row_counts


def _mappings(
    source: Source,
    feature_tables: Mapping[str, str],
    id_mapping: str,
    rows: int | Mapping[str, int] | None,
    min_count: int,
    progress: Progress | None,
) -> dict[str, IdMapping]:
    kinds, row_counts = mapping_kinds(source, feature_tables, id_mapping, rows)

    def read_by(kind: MappingKind) -> dict[str, str]:
        return {
            feature: table
            for feature, table in feature_tables.items()
            if kinds[table] == kind and (kind == "vocabulary" or table not in row_counts)
        }

    vocabularies = {}
    if read_by("vocabulary"):
        vocabularies = build_vocabularies(
            source, read_by("vocabulary"), min_count=min_count, rows=row_counts, progress=progress
        )
    inferred = _rows_from_largest_id(source, read_by("identity"))
    mappings: dict[str, IdMapping] = {}
    for name, kind in kinds.items():
        if name in vocabularies:
            mappings[name] = vocabularies[name]
        elif kind == "hash":
            mappings[name] = Hash(row_counts[name])
        else:
            mappings[name] = Identity(row_counts.get(name) or inferred[name])
    return mappings


def _texts(source: Source, feature_tables: Mapping[str, str], table: str) -> Iterable[bool]:
    return (source.text_features[name] for name, own in feature_tables.items() if own == table)


def _kind(id_mapping: str, texts: bool) -> MappingKind:
    match id_mapping:
        case "identity" | "hash" | "vocabulary":
            return id_mapping
        case _:
            return "vocabulary" if texts else "identity"


def _rows_from_largest_id(source: Source, features: Mapping[str, str]) -> dict[str, int]:
    """Rows by table: one more than the largest id, and at least one."""
    if not features or any(source.text_features[name] for name in features):
        # Texts are refused by `EncodedLog`, whatever their table's rows.
        return dict.fromkeys(features.values(), 1)
    largest = source.largest_ids()
    if largest is None or not set(features).issubset(largest):
        largest = _scan_largest_ids(source, features)
    rows: dict[str, int] = {}
    for feature, table in features.items():
        rows[table] = max(rows.get(table, 1), largest[feature] + 1)
        if rows[table] > MAX_INFERRED_ROWS:
            raise DataError(
                f"feature {feature!r} has id {largest[feature]}, too large for a row number; "
                "map it with id_mapping='hash' or 'vocabulary', or give rows="
            )
    return rows


def _scan_largest_ids(source: Source, features: Iterable[str]) -> dict[str, int]:
    largest = dict.fromkeys(features, 0)
    cursor = source.open()
    try:
        while (batch := cursor.read(65536)) is not None:
            for name in largest:
                keys = batch.features[name].keys
                if keys.size:
                    # Negative ids wrap to large keys; as signed they stay below and are
                    # reported, with their place, when the log is read.
                    largest[name] = max(largest[name], int(keys.view("i8").max()))
    finally:
        cursor.close()
    return largest
