"""Open a log: find its files, format and columns, choose how ids become rows, and read it."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import replace
from importlib import import_module
from itertools import count

import numpy as np

from placer.data.encoding import Encoding, Identity, IdMapping, OutOfRange, Rows
from placer.data.files.opening import FileIdentity, check_unchanged, head, states, suffixes
from placer.data.files.stores import AnyPath, find, shown
from placer.data.formats.dialect import sniff
from placer.data.in_memory import ArrowSource, InMemory, batches_of, is_in_memory
from placer.data.layout import (
    FORMATS,
    LABEL,
    SOURCES,
    SUFFIXES,
    Columns,
    Format,
    IdMappingName,
    Layout,
    Missing,
    NamedColumns,
)
from placer.data.log import Bags, Chunk, joined
from placer.data.source import Cursor, Progress, RawBatch, Source
from placer.data.vocabulary import UnknownKeys, choose_mappings, feature_tables_of
from placer.errors import DataError
from placer.units import listed

_DELIMITED = ("criteo", "csv", "tsv", "interactions")
_FLAGS = {
    "separator": "--separator",
    "header": "--header or --no-header",
    "quotes": "--quotes or --no-quotes",
    "names": "--columns",
    "nulls": "--null",
}
"""Fields of a layout that a format may ignore, and the options that set them."""
_MOST_PACKED_EMPTY = 512
"""Compressed files from this size on, in bytes, hold something, whatever their names."""
_MOST_HINTS = 3


class EncodedLog:
    """A `Source` read through an `Encoding`; implements `placer.data.log.Log`.

    Attributes
    ----------
    notes : sequence of str
        Messages for the user, such as columns that were left out or files without samples.
    expected_samples : int or None
        Number of samples that the caller knows; used if the files do not state it.
    unknown : mapping of table name to UnknownKeys
        Estimates of how many distinct ids were read that a table's vocabulary does not list.
    """

    def __init__(self, source: Source, encoding: Encoding, notes: Sequence[str] = ()) -> None:
        first, columns = shown(source.files[0]), source.columns
        known = set(columns.sparse)
        missing = [name for name in encoding.feature_tables if name not in known]
        if missing:
            raise DataError(
                f"{first} has no feature {missing[0]!r}, which the encoding names; "
                f"it has {', '.join(columns.sparse)}"
            )
        if not encoding.dense and encoding.label is None:
            source = source.of_ids_alone  # Criteo's format has numeric columns nevertheless.
        elif columns.dense != encoding.dense:
            raise DataError(
                f"{first} has numeric columns {', '.join(columns.dense) or 'none'}, "
                f"but the encoding names {', '.join(encoding.dense) or 'none'}"
            )
        for feature, table in encoding.feature_tables.items():
            if columns.is_text(feature) and encoding.mappings[table].kind == "identity":
                raise DataError(
                    f"{first}: feature {feature!r} holds texts, which are no row numbers; map it "
                    "with id_mapping='hash' or 'vocabulary' (placer profile --id-mapping "
                    f"{table}=vocabulary)"
                )
        self.source = source
        self.notes = (*source.notes, *notes)
        self.encoding = encoding
        self.tables: Mapping[str, int] = encoding.tables
        self.feature_tables = encoding.feature_tables
        self.dense_names = encoding.dense
        self.expected_samples: int | None = None
        self.unknown = {name: UnknownKeys() for name in encoding.vocabularies}
        check_unchanged(source.before)

    @property
    def samples(self) -> int | None:
        """Number of samples of the log, None if it is unknown before reading."""
        return self.expected_samples if self.source.samples is None else self.source.samples

    @property
    def of_ids_alone(self) -> "EncodedLog":
        """The log without its label and numeric columns, for counting ids."""
        other = copy(self)
        other.source = self.source.of_ids_alone
        return other

    @property
    def description(self) -> str:
        """The log's files, as text for messages."""
        return listed([shown(file) for file in self.source.files], 1)

    def identity(self) -> tuple[FileIdentity, ...]:
        """Return the identities of the log's files, in order."""
        return self.source.identity()

    def chunks(self, samples: int = 65536, skip: int = 0) -> Iterator[Chunk]:
        """Yield chunks of exactly `samples` samples, except the last; skip the first `skip`.

        The samples do not depend on how the log is divided into files, row groups or chunks.

        Raises DataError if the log is empty, a column is missing, a line is ragged or an id is out
        of range; the message names the file and the place.
        """
        with self._reading(samples) as cursor:
            cursor.skip(skip)
            while (chunk := self._next_chunk(cursor, samples)) is not None:
                yield chunk

    def blocks(self, samples: int, keep: Callable[[int], bool]) -> Iterator[Chunk | int]:
        """Yield the log's blocks of `samples` samples, or only the size of a block not kept.

        Block i is read if ``keep(i)`` is true. Otherwise it is skipped, which costs less.
        """
        with self._reading(samples) as cursor:
            for block in count():
                part = self._next_chunk(cursor, samples) if keep(block) else cursor.skip(samples)
                if part is None or part == 0:
                    return
                yield part

    @contextmanager
    def _reading(self, samples: int) -> Iterator[Cursor]:
        """Open a cursor over the log, and check at its end that no file has changed."""
        if samples < 1:
            raise DataError(f"a chunk holds at least 1 sample, not {samples}")
        check_unchanged(self.source.before)
        with closing(Cursor(self.source.spans())) as cursor:
            yield cursor
            check_unchanged(self.source.before)

    def _next_chunk(self, cursor: Cursor, samples: int) -> Chunk | None:
        parts: list[Chunk] = []
        read = 0
        while read < samples and (batch := cursor.read(samples - read)) is not None:
            features = {}
            for feature, table in self.encoding.feature_tables.items():
                raw = batch.chunk.features[feature]
                ids = rows_of(batch, feature, table, self.encoding.mappings[table])
                if table in self.unknown:
                    self.unknown[table].add(raw.keys[ids == 0])
                features[feature] = Bags(ids, raw.offsets)
            parts.append(replace(batch.chunk, features=features))
            read += batch.chunk.samples
        return joined(parts) if parts else None


def rows_of(batch: RawBatch, feature: str, table: str, mapping: IdMapping) -> Rows:
    """Return the rows that the ids of a feature read."""
    raw = batch.chunk.features[feature]
    try:
        return mapping.map(raw.keys)
    except OutOfRange as error:
        sample = (
            error.position
            if raw.offsets is None
            else int(np.searchsorted(raw.offsets, error.position, side="right")) - 1
        )
        more, flag = (
            ("give it more rows, or ", f"--rows {table}=N, ") if error.raw_id >= 0 else ("", "")
        )
        raise DataError(
            f"{batch.place.of(sample)}: feature {feature!r} has id {error.raw_id}, but "
            f"table {table!r} has rows 0..{mapping.rows - 1}; {more}map ids "
            "with id_mapping='hash' or 'vocabulary' "
            f"(placer profile {flag}--id-mapping {table}=hash)"
        ) from None


def open_log(
    paths: AnyPath | Sequence[AnyPath] | InMemory,
    format: Format | None = None,
    *,
    id_mapping: IdMappingName | Mapping[str, str] = "auto",
    rows: int | Mapping[str, int] | None = None,
    min_count: int | Mapping[str, int] = 1,
    sparse: Sequence[str] | None = None,
    dense: Sequence[str] | None = None,
    label: str | None = None,
    ignore: Sequence[str] = (),
    feature_tables: Mapping[str, str] | None = None,
    missing: Missing = "zero",
    null: Sequence[str] | None = None,
    headroom: float = 0.0,
    layout: Layout | None = None,
    encoding: Encoding | None = None,
    progress: Progress | None = None,
) -> EncodedLog:
    """Open a log whose ids are mapped to rows of tables.

    Raises DataError if a file is missing, empty or unreadable, or lacks a column, or an option is
    invalid.

    Parameters
    ----------
    paths : path or sequence of paths, or an object in memory
        Files, folders, patterns, URIs or ``-``, read in order; see
        `placer.data.files.stores.find`. Or an Arrow table, stream or data set, or another object
        that `placer.data.in_memory.batches_of` takes.
    format : optional
        One of `placer.data.FORMATS`; by default found from the files' suffixes or first bytes.
    id_mapping
        ``identity``: ids are rows. ``hash``: row = key modulo rows. ``vocabulary``: ids get
        rows from 1 on in the order of their first appearance, in one more pass over the log; all
        other ids share row 0. ``auto``: vocabulary for texts and for integers far larger than
        the number of samples, identity for other integers. One for all tables, or by table.
    rows : int or mapping of table name to int, optional
        Rows of the tables. A hash needs them; a vocabulary of `rows` rows keeps the most read ids;
        for identity the default is the largest id + 1, plus `headroom`.
    min_count : int or mapping of table name to int
        A vocabulary leaves out ids that are read fewer times than this.
    sparse, dense, label, ignore
        Columns; see `placer.data.inference.infer_columns`.
    feature_tables
        The table of each feature that reads a table of another name. Features may share a table.
    missing
        ``zero``: a missing value is id 0, as in the DLRM reference. ``empty``: it is no lookup.
    null : sequence of str, optional
        Texts that stand for a missing value, besides the empty text. By default the layout's, or
        else `placer.data.layout.NULLS`: NULL, null, NA, N/A, NaN, nan, None and \\N.
    headroom : float
        Share of rows to add for ids of later logs, in tables sized by the largest id.
    layout : Layout, optional
        Properties that the files do not state: separators, names and types of columns.
    encoding
        The encoding of a profile; it replaces all options above except `format` and `layout`.
    progress
        Called during the pass for a vocabulary with samples read, and all samples or None.
    """
    if encoding is not None:
        layout = layout or encoding.layout
        source = open_source(paths, format, layout, encoding.columns, encoding.layout)
        _check_largest_ids(source, encoding)
        return EncodedLog(source, encoding)
    layout = layout or Layout()
    if null is not None:
        layout = replace(layout, nulls=tuple(null))
    named = NamedColumns(sparse, dense, label, ignore, missing)
    source = open_source(paths, format, layout, named)
    features = feature_tables_of(source, sparse if source.is_fixed else None, feature_tables)
    mappings, chosen = choose_mappings(
        source, features, id_mapping, rows, min_count, headroom, progress
    )
    columns = source.columns
    encoding = Encoding(features, mappings, columns.dense, columns.label, missing, columns.layout)
    return EncodedLog(source, encoding, [*_decisions(columns), *chosen])


def open_source(
    paths: AnyPath | Sequence[AnyPath] | InMemory,
    format: Format | None,
    layout: Layout,
    named: NamedColumns,
    recorded: Layout | None = None,
) -> Source:
    """Return the files and columns of a log, with raw ids. Parameters as in `open_log`.

    Fields of `layout` that differ from the `recorded` layout of an earlier log must fit the format.
    """
    if is_in_memory(paths):
        source: Source = ArrowSource(batches_of(paths), _of_values(layout), named)
        _check_given(source, "arrow", layout, recorded or Layout())
        return source
    metadata: list[str] = []
    files = find(paths, metadata)
    before = states(files)
    full = [file for file in files if file not in before or _holds_bytes(file, before[file][1])]
    if not full:
        raise DataError(f"{shown(files[0])} is empty; a log needs at least one sample")
    kind = format or _format_of(full, layout)
    if kind in ("criteo", "dlrm") and (named.ignore or named.label not in (None, LABEL)):
        raise DataError(
            f"{shown(full[0])} is read as {kind}, whose columns have no names to choose by; "
            "leave out label= and ignore="
        )
    if kind not in FORMATS:
        raise DataError(f"format {kind!r} is none of {', '.join(FORMATS)}")
    module, name = SOURCES[kind].split(".")
    opened = getattr(import_module(f"placer.data.formats.{module}"), name)
    known = replace(layout, format=kind) if kind in _DELIMITED else _of_values(layout)
    source = opened(full, known, named)
    _check_given(source, kind, layout, recorded or Layout())
    if kind == "parquet":
        from placer.data.formats.columnar import check_parts

        check_parts(metadata, source)
    notes = [f"{shown(file)} is empty and was passed over" for file in files if file not in full]
    times = Counter(full)
    if twice := [shown(file) for file in times if times[file] > 1]:
        notes.append(
            f"read as often as they are named, which is more than once: {listed(twice, 3)}"
        )
    source.before, source.notes = before, (*notes, *source.notes)
    return source


def _holds_bytes(file: str, size_bytes: int) -> bool:
    """Return whether a file holds anything: one that is compressed may unpack to nothing."""
    return size_bytes >= _MOST_PACKED_EMPTY or (size_bytes > 0 and bool(head(file, 1)))


def _decisions(columns: Columns) -> list[str]:
    """Return messages for the user on the inferred roles of columns."""
    told = [one for one in columns.decisions if one.warns]
    left_out = [f"{one.column or 'no name'} ({one.why})" for one in told if one.role == "ignore"]
    notes = [f"left out: {listed(left_out)}"] if left_out else []
    notes += [f"{one.column} is {one.role}: {one.why}" for one in told if one.role != "ignore"]
    if columns.label is None and columns.decisions:
        note = "no column is the label, which training needs; name it with --label"
        two = [one.column for one in columns.decisions if one.has_two_values][:_MOST_HINTS]
        notes.append(f"{note} (two values: {', '.join(two)})" if two else note)
    return notes


def _format_of(files: Sequence[str], layout: Layout) -> Format:
    """Return the format of files, by their suffixes, the layout, or the first bytes."""
    found = {SUFFIXES.get(suffixes(file)[0]): file for file in reversed(files)}
    found.pop(None, None)
    if len(found) > 1:
        are = ", ".join(f"{shown(file)} is {one}" for one, file in sorted(found.items()))
        raise DataError(f"a log's files are of one format: {are}; name those of one alone")
    known = next(iter(found), None) or sniff(files[0], head(files[0], 1 << 16))
    if known in _DELIMITED and layout.format in _DELIMITED:
        return layout.format
    return known


def _of_values(layout: Layout) -> Layout:
    """Return the fields that concern values. Files that are not text state the rest themselves."""
    return Layout(
        types=layout.types, lists=layout.lists, decimal=layout.decimal, nulls=layout.nulls
    )


def _check_given(source: Source, format: Format, layout: Layout, recorded: Layout) -> None:
    """Refuse fields of a layout that are not recorded, and that the log's format ignores."""
    used, start = source.columns.layout, f"{shown(source.files[0])} is read as {format}, and"
    for name, flag in _FLAGS.items():
        given = getattr(layout, name)
        if given not in (None, ()) and given not in (getattr(recorded, name), getattr(used, name)):
            raise DataError(
                f"{start} {flag} (in a layout or schema: {name}) does not apply to this format; "
                "leave it out, or if the log is text, name its format: --log-format csv"
            )
    if layout.header and layout.names and layout.names != recorded.names:
        raise DataError(
            f"{start} its first line names the columns (--header), and so does --columns "
            "(in a layout or schema: names); leave one of them out"
        )


def _check_largest_ids(source: Source, encoding: Encoding) -> None:
    """Refuse a log if its files' statistics show an id that is no row."""
    ranges = source.id_ranges() or {}
    for feature, table in encoding.feature_tables.items():
        mapping, most = encoding.mappings[table], ranges.get(feature, (0, 0))[1]
        if isinstance(mapping, Identity) and most >= mapping.rows:
            raise DataError(
                f"{shown(source.files[0])}: feature {feature!r} has ids up to {most}, but table "
                f"{table!r} has rows 0..{mapping.rows - 1}; profile the log again with more rows "
                f"(--rows {table}=N), or map ids with --id-mapping {table}=hash"
            )
