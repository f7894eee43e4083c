"""Delimited text: CSV, TSV, Criteo's format and similar ones, with or without a header.

Interactions are ``user item item item …``: a line for each user or session, followed by any number
of items, as in data sets of graph and session recommenders (LightGCN, SR-GNN).
"""

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from placer.data.files.stores import shown
from placer.data.formats.base import ColumnSource
from placer.data.formats.columns import ARROW_TYPES, check_column, check_columns, once, single
from placer.data.formats.dialect import header_names, infer_dialect
from placer.data.formats.text import (
    Block,
    first_block,
    head_lines,
    lone_return,
    record_ends,
    text_spans,
)
from placer.data.formats.texts import split_lists, whole_type
from placer.data.formats.values import FALSE, TRUE
from placer.data.keys import is_text
from placer.data.layout import CATEGORIES, DENSE, LABEL, Columns, IdType, Layout
from placer.data.source import RawBatch, Span
from placer.errors import DataError

_UNIT = "\x1f"
"""ASCII's unit separator. It replaces separators of several characters before parsing."""
_INTERACTIONS = ("user", "items")
_SHOWN = {"\t": "tabs", ",": "commas", " ": "blanks", ";": "semicolons"}


class DelimitedSource(ColumnSource):
    """Files of delimited text, in order; see `ColumnSource`.

    The layout's format is ``csv`` (the default), ``tsv`` or ``criteo``.
    """

    def _prepare(self) -> None:
        format = self._known.format or "csv"
        self.notes: list[str] = []
        # Take the first file with more than one line: a single line may be a header.
        starts = ((file, head_lines(file)) for file in self.files)
        several = next((one for one in starts if one[1].count(b"\n") > 1), None)
        file, start = several or (self.files[0], head_lines(self.files[0]))
        # Ignore recorded names: these files may have or lack a label.
        known = replace(self._known, names=()) if format == "criteo" else self._known
        known = replace(infer_dialect(file, start, known, format), format=format)
        if known.decimal != self._known.decimal:
            self.notes.append(
                'numbers are read with decimal commas; a schema with decimal = "." says otherwise'
            )
        self.is_fixed = format == "criteo"
        if self.is_fixed:
            types: dict[str, IdType] = dict.fromkeys(CATEGORIES, "text")
            label = LABEL if LABEL in known.names else None
            known = replace(known, types=types, lists={}, decimal=None)
            self.columns = Columns(CATEGORIES, DENSE, label, known)
        else:
            table = _sample(file, start, known)
            if known.header and len(self.files) > 1:
                last = self.files[-1]
                head = head_lines(last)
                ends = record_ends(head, bool(known.quotes))[0]
                names = header_names(last, head[: int(ends[0])] if ends.size else head, known)
                self.notes += self._further_columns(last, names, table.column_names)
            schema = self._partitions.added_to(table.schema)
            self._known = known
            self._infer(schema, self._sampled(table, file, schema), as_text=True)
            self._read_words(table)
        self._as_texts = False  # Whether all values are read as texts, and then converted.

    def spans(self) -> Generator[Span]:
        layout = self.columns.layout
        check = self._check_header if layout.header else None
        return text_spans(self.files, self._parse, check, bool(layout.quotes))

    def _check_header(self, file: str, header: bytes) -> None:
        """Raise DataError if a file lacks a column, also if it holds nothing but a first line."""
        names = header_names(file, header, self.columns.layout)
        schema = pa.schema([(name, pa.null()) for name in names])
        for name in self._own(names):
            check_column(file, schema, name)

    def _read_words(self, table: pa.Table) -> None:
        """Make the type of a label of words, such as t and f, Boolean."""
        label = self.columns.label
        if label is None or not is_text(table.schema.field(label).type):
            return
        words = {str(word) for word in table.column(label).drop_null().unique().to_pylist()}
        if words and words <= {*TRUE, *FALSE}:
            layout = self.columns.layout
            layout = replace(layout, types={**layout.types, label: "boolean"})
            self.columns = replace(self.columns, layout=layout)

    def _parse(self, block: Block) -> RawBatch:
        layout, file = self.columns.layout, block.place.file
        names: Sequence[str] = layout.names
        if block.header is not None:
            names = header_names(file, block.header, layout)
            _check_header_is_once(block, len(names))
        try:
            table = _table(block, names, layout, self._types(names))
        except pa.ArrowInvalid as error:
            ragged = lone_return(block) or _ragged(error, block, layout)
            if ragged is not None:
                raise ragged from error
            # Some value is not as Arrow writes its type, such as an id 7.0 or a number 1,484.20.
            self._as_texts = True
            table = _table(block, names, layout, self._types(names))
        if table.num_rows != block.samples:
            raise lone_return(block) or DataError(
                f"{block.place.of_all}: quotes do not enclose fields; say that they are plain "
                "characters (--no-quotes)"
            )
        return self.raw(table, block.place)

    def _own(self, names: Sequence[str]) -> list[str]:
        """Return the columns to read from a file that has columns `names`."""
        return self._partitions.of_file(self.columns.names, names)

    def _types(self, names: Sequence[str]) -> dict[str, pa.DataType]:
        types: dict[str, pa.DataType] = {}
        layout = self.columns.layout
        for name in self._own(names):
            known = layout.types.get(name)
            types[name] = pa.float32() if known is None else ARROW_TYPES[known]
            if self._as_texts or name in (layout.lists or {}):
                types[name] = pa.large_binary()
        return types


def _table(
    block: Block,
    names: Sequence[str],
    layout: Layout,
    types: Mapping[str, pa.DataType] | None,
) -> pa.Table:
    """Return lines as columns: those in `types`, or if None all, with types that Arrow infers."""
    separator, data = layout.separator or ",", pa.py_buffer(block.data)
    if len(separator.encode()) > 1:
        data = pa.py_buffer(bytes(data).replace(separator.encode(), _UNIT.encode()))
    return csv.read_csv(
        data,
        # Messages need row numbers, which Arrow only counts with one thread.
        read_options=csv.ReadOptions(
            column_names=list(names), use_threads=False, block_size=data.size + 1
        ),
        parse_options=csv.ParseOptions(
            delimiter=_UNIT if len(separator.encode()) > 1 else separator,
            quote_char='"' if layout.quotes else False,
            # True makes Arrow parse twice.
            newlines_in_values=block.is_multiline,
            ignore_empty_lines=False,
        ),
        convert_options=csv.ConvertOptions(
            true_values=None if types is None else TRUE,
            false_values=None if types is None else FALSE,
            column_types=None if types is None else dict(types),
            include_columns=None if types is None else list(types),
            null_values=["", *layout.nulls],
            decimal_point=layout.decimal or ".",
        ),
    )


def _sample(file: str, start: bytes, layout: Layout) -> pa.Table:
    """Return the first samples of a file, with inferred types and null for missing values."""
    ends = record_ends(start, bool(layout.quotes))[0]
    if layout.header and ends.size == 1:
        if start[int(ends[0]) :].strip():
            raise DataError(
                f"{shown(file)}, from line 2 on: a quote is opened that nothing closes; close it, "
                "or say that quotes are plain characters (--no-quotes)"
            )
        raise DataError(f"{shown(file)} names columns and has no sample; a log needs one")
    if not ends.size:
        raise DataError(f"{shown(file)}: its first line does not end; is a quote not closed?")
    names: Sequence[str] = layout.names
    if layout.header:
        names = header_names(file, start[: int(ends[0])], layout)
    twice = sorted(set(names).difference(once(names)))
    if twice:
        raise DataError(
            f"{shown(file)} has more than one column {twice[0]!r}; rename one in its first line"
        )
    block = first_block(file, start, quotes=bool(layout.quotes), header=bool(layout.header))
    try:
        guessed = _table(block, names, layout, None)
        numbers = [
            field.name
            for field in guessed.schema
            if pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        ]
        texts = guessed
        if numbers:
            texts = _table(block, names, layout, dict.fromkeys(numbers, pa.binary()))
    except pa.ArrowInvalid as error:
        ragged = lone_return(block) or _ragged(error, block, layout)
        reason = str(error).splitlines()[0]
        raise ragged or DataError(f"{shown(file)}, from line 1 on: {reason}") from error
    columns = dict(zip(names, guessed.columns, strict=True))
    for name in numbers:
        columns[name] = _without_padding(texts.column(name), columns[name])
    return pa.table(columns)


def _without_padding(text: pa.ChunkedArray, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return numbers; as texts if some have leading zeros, as uint64 if they are that large."""
    padded = pc.match_substring_regex(text, r"^[-+]?0[0-9]|^\+")
    if pc.any(padded).as_py():
        return text.cast(pa.string())
    if pa.types.is_floating(column.type):
        digits = pc.match_substring_regex(text, r"^[0-9]+$")
        if pc.all(pc.or_(digits, column.is_null())).as_py():
            try:
                missing = pc.if_else(digits, text.cast(pa.string()), None)
                return missing.cast(pa.uint64())
            except pa.ArrowInvalid:
                return text.cast(pa.string())
    return column


def _check_header_is_once(block: Block, fields: int) -> None:
    """Refuse a line that repeats the header, as after joining files with headers.

    If there is a single column, its name may be a value.
    """
    header, text = block.header or b"", bytes(block.data)  # Bytes are searched the fastest.
    start = 0 if text.startswith(header) else text.find(b"\n" + header) + 1
    if fields > 1 and (start or text.startswith(header)):
        line = block.place.numbers[0] + text.count(b"\n", 0, start)
        raise DataError(
            f"{shown(block.place.file)}, line {line} names the columns again; "
            "were files joined that each have a header? Remove it, or give the files one by one"
        )


def _ragged(error: pa.ArrowInvalid, block: Block, layout: Layout) -> DataError | None:
    """Return an error for a record with too many or too few fields, if `error` is about one."""
    match = re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", str(error))
    if match is None:
        return None
    record, expected, count = map(int, match.groups())
    between = _SHOWN.get(layout.separator or ",", repr(layout.separator))
    return DataError(
        f"{block.place.of(record - 1)}: {count} fields, expected {expected} separated by "
        f"{between}; repair or remove the line"
    )


class InteractionsSource(ColumnSource):
    """Files of interactions, in order; see `ColumnSource`.

    Ids of a line are separated by commas, or else by blanks and tabs. A line with only a user has
    an empty bag of items.
    """

    def _prepare(self) -> None:
        file = self.files[0]
        start = head_lines(file)
        names = self._known.names or _INTERACTIONS
        if len(names) != 2:
            raise DataError(
                f"{shown(file)}: interactions have two columns, users and items, "
                f"not {', '.join(names)} (--columns)"
            )
        separator = self._known.separator or ("," if b"," in start else " ")
        separator = separator if separator in (",", "\t") else " "
        self._known = replace(
            self._known,
            format="interactions",
            separator=separator,
            header=False,
            quotes=False,
            names=names,
        )
        table = self._table(first_block(file, start))
        named, ignore = self._named, self._named.ignore
        self.columns = Columns(
            tuple(name for name in (named.sparse or names) if name not in ignore),
            tuple(named.dense or ()),
            named.label,
            replace(self._known, types=self._types(table), lists={names[1]: separator}),
        )
        check_columns(file, table.schema, self.columns, ignore)

    def spans(self) -> Generator[Span]:
        return text_spans(self.files, self._parse)

    def _types(self, table: pa.Table) -> dict[str, IdType]:
        """Return the layout's types of columns; others are integer if all ids are, else text."""
        types = dict(self._known.types)
        nulls = pa.array(["", *(self._known.nulls or ())], pa.large_string())
        for name in table.column_names:
            texts = single(table.column(name)).cast(pa.large_string())
            ids = split_lists(texts, self._known.separator or " ").flatten()
            whole = whole_type(ids.filter(pc.invert(pc.is_in(ids, nulls))))
            types.setdefault(name, whole or "text")
        return types

    def _parse(self, block: Block) -> RawBatch:
        return self.raw(self._table(block), block.place)

    def _table(self, block: Block) -> pa.Table:
        """Return the lines of a block as two columns, users and items."""
        offsets = pa.py_buffer(np.concatenate([[0], block.ends]))
        lines = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), block.samples, [None, offsets, pa.py_buffer(block.data)]
        )
        try:
            texts = pc.ascii_trim_whitespace(lines.cast(pa.large_string()))
        except pa.ArrowInvalid as error:
            raise DataError(f"{block.place.of(0)} and on: no UTF-8 text") from error
        between = "," if self._known.separator == "," else r"\s"
        user = pc.replace_substring_regex(texts, rf"(?s)\s*{between}.*$", "")
        items = pc.replace_substring_regex(texts, rf"(?s)^[^{between}]*(?:{between}\s*)?", "")
        names = self._known.names
        columns = (one.cast(pa.large_binary()) for one in (user, items))
        return pa.table(dict(zip(names, columns, strict=True)))
