"""JSON lines: one object per line. A list of values or objects is a bag of ids."""

import json
import re
from collections.abc import Generator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as arrow_json

from placer.data.files.stores import first_line, shown
from placer.data.formats.base import ColumnSource
from placer.data.formats.columns import ARROW_TYPES, flat, pruned, single
from placer.data.formats.text import Block, first_block, head_lines, text_spans
from placer.data.formats.values import wrong_value
from placer.data.keys import is_list, is_text
from placer.data.layout import IdType
from placer.data.source import RawBatch, Span
from placer.errors import DataError

MOST_DEPTH = 1000
"""Most levels of nested objects and lists that are read."""
_LONG_LINE = 4096


class JsonLinesSource(ColumnSource):
    """Files of JSON lines, in order; see `ColumnSource`."""

    def _prepare(self) -> None:
        file, start = self.files[0], head_lines(self.files[0])
        if re.match(rb"\s*(?:\[|\{\s*\n)", start):
            raise DataError(
                f"{shown(file)} has no object of JSON in each line; jq -c . FILE, or of an array "
                "jq -c '.[]' FILE, writes one a line"
            )
        first = first_block(file, start)
        _check_depth(first)
        try:
            table = _with_whole_numbers(start)
            # Reading the names raises an error if one is not UTF-8.
            names = flat(table.schema).names if table.num_columns else []
        except pa.ArrowInvalid as error:
            numbers = [*(self._named.dense or ()), *filter(None, [self._named.label])]
            types: dict[str, IdType | None] = {**dict.fromkeys(numbers), **self._known.types}
            raise _unreadable(first, types, error) from error
        except UnicodeDecodeError as error:
            raise DataError(f"{shown(file)}: the name of a field is not UTF-8") from error
        if not names:
            raise DataError(f"{shown(file)}: its objects have no fields")
        schema = flat(self._partitions.added_to(table.schema))
        self._infer(schema, self._sampled(table, file, schema), as_text=True)
        self._first_schema = table.schema

    def spans(self) -> Generator[Span]:
        whole = self._first_schema
        names, schema = self._partitions.of_file(self.columns.names, whole.names), flat(whole)
        types = {name: self._type(name, schema.field(name).type) for name in names}
        self._schema = pruned(whole, types)
        return text_spans(self.files, self._parse)

    def _type(self, name: str, kind: pa.DataType) -> pa.DataType:
        layout = self.columns.layout
        id_type = layout.types.get(name)
        if name not in self.columns.sparse:
            other = pa.string() if is_text(kind) else pa.float64()
            return pa.bool_() if id_type == "boolean" else other
        assert id_type is not None, "sparse columns have types"
        if pa.types.is_floating(kind):
            return kind
        element = pa.string() if id_type == "text" else ARROW_TYPES[id_type]
        if is_list(kind):
            return pa.list_(element)
        return pa.string() if name in (layout.lists or {}) or is_text(kind) else element

    def _parse(self, block: Block) -> RawBatch:
        _check_depth(block)
        try:
            table = arrow_json.read_json(
                pa.BufferReader(block.data),
                read_options=_options(len(block.data)),
                parse_options=arrow_json.ParseOptions(
                    explicit_schema=self._schema, unexpected_field_behavior="ignore"
                ),
            )
        except pa.ArrowInvalid as error:
            types = {name: self.columns.layout.types.get(name) for name in self.columns.names}
            raise _unreadable(block, types, error) from error
        if table.num_rows != block.samples:
            count = f"{table.num_rows} objects in {block.samples} lines"
            raise _unreadable(block, {}, ValueError(count))
        return self.raw(table, block.place)


def _check_depth(block: Block) -> None:
    """Refuse a line of deeply nested objects: Arrow parses them by recursion, and crashes.

    Only long lines are checked. Short lines cannot nest that deeply.
    """
    text = np.frombuffer(block.data, dtype=np.uint8)
    whole = text[: text.size // _LONG_LINE * _LONG_LINE].reshape(-1, _LONG_LINE)
    if (whole == ord("\n")).any(axis=1).all():
        return
    opened = np.isin(text, np.frombuffer(b"{[", dtype=np.uint8)).astype(np.int32)
    opened -= np.isin(text, np.frombuffer(b"}]", dtype=np.uint8))
    depth = np.cumsum(opened)
    starts = np.concatenate([[0], block.ends[:-1]])
    deepest = np.maximum.reduceat(depth, starts) - np.where(starts, depth[starts - 1], 0)
    if deepest.max() > MOST_DEPTH:
        line = int(deepest.argmax())
        raise DataError(
            f"{block.place.of(line)} holds objects or lists within one another {deepest[line]} "
            f"times; at most {MOST_DEPTH} are read"
        )


def _with_whole_numbers(data: bytes) -> pa.Table:
    """Return the samples of JSON lines, with exact uint64 values, which Arrow would round."""

    def read(schema: pa.Schema | None = None) -> pa.Table:
        parse = arrow_json.ParseOptions(explicit_schema=schema)
        options = _options(len(data))
        return arrow_json.read_json(pa.BufferReader(data), options, parse)

    table = read()
    for place, found in enumerate(table.schema):
        exact = found.with_type(_exact_type(single(table.column(place))))
        if exact != found:
            with suppress(pa.ArrowInvalid):  # Raised if some are fractions or negative.
                table = read(table.schema.set(place, exact))
    return table


def _exact_type(values: pa.Array) -> pa.DataType:
    """Return the type of values, with uint64 for numbers of 2^63 and more, in objects and lists."""
    kind = values.type
    if is_list(kind):
        return pa.list_(_exact_type(values.flatten()))
    if pa.types.is_struct(kind):
        types = map(_exact_type, values.flatten())
        return pa.struct([f.with_type(one) for f, one in zip(kind, types, strict=True)])
    large = pa.types.is_floating(kind) and (pc.max(values).as_py() or 0) >= 1 << 63
    return pa.uint64() if large else kind


def _options(size: int) -> arrow_json.ReadOptions:
    return arrow_json.ReadOptions(use_threads=False, block_size=max(size + 1, 64))


_CHANGED = re.compile(r"Column\(/(.*)\) changed from (\w+) to (\w+) in row (\d+)")


def _unreadable(block: Block, types: Mapping[str, IdType | None], error: Exception) -> DataError:
    """Return an error for the first line that is no object or has a value of a wrong type.

    If there is none, return what Arrow says.
    """
    for number, line in enumerate(bytes(block.data).split(b"\n")[:-1]):
        place = block.place.of(number)
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as wrong:
            return DataError(f"{place} is no JSON: {first_line(wrong)}; repair or remove it")
        if not isinstance(values, dict):
            return DataError(f"{place} holds {type(values).__name__} and no object of JSON")
        for name, kind in types.items():
            value = values.get(name)
            for one in value if isinstance(value, list) and kind is not None else [value]:
                if one is not None and not _fits(one, kind):
                    return wrong_value(place, name, one, kind)
    changed = _CHANGED.search(str(error))
    if changed is not None:
        name, before, now, row = changed.groups()
        return DataError(
            f"{block.place.of(int(row))}: {name} is of type {now}, and was of type "
            f"{before} before; write its values alike"
        )
    return DataError(f"{block.place.of_all}: no JSON lines: {first_line(error)}")


def _fits(value: Any, kind: IdType | None) -> bool:
    if kind == "text":
        return isinstance(value, str)
    if kind == "boolean" or isinstance(value, bool):
        return kind == "boolean" and isinstance(value, bool)
    if kind is None:
        return isinstance(value, int | float)
    least, most = (0, 1 << 64) if kind == "unsigned" else (-1 << 63, 1 << 63)
    return isinstance(value, int) and least <= value < most
