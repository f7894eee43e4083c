"""Interactions: a line for each user, or session, with any number of items behind it.

``user item item item …``, as recommenders of graphs and sessions (LightGCN, SR-GNN) have them.
"""

from collections.abc import Generator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from placer.data.files.stores import shown
from placer.data.formats.base import ColumnSource
from placer.data.formats.columns import check_columns, single
from placer.data.formats.lists import are_whole, split_lists
from placer.data.formats.text import Block, TextReader, head_lines, record_ends
from placer.data.layout import Columns, IdType
from placer.data.source import Place, RawBatch, Span
from placer.errors import DataError

_NAMES = ("user", "items")


class InteractionsSource(ColumnSource):
    """Files of interactions, in order; see `ColumnSource`.

    What is between a line's ids is a comma, or else blanks and tabs. A line of a user alone is an
    empty bag of items.
    """

    def _prepare(self) -> None:
        file = self.files[0]
        start = head_lines(file)
        names = self._known.names or _NAMES
        if len(names) != 2:
            raise DataError(
                f"{shown(file)}: interactions have two columns, users and items, "
                f"not {', '.join(names)} (--columns)"
            )
        separator = self._known.separator or ("," if b"," in start else " ")
        self._known = replace(self._known, format="interactions", separator=separator, names=names)
        ends = record_ends(start, quotes=False)[0]
        table = self._table(Block(Place(file, 1, "line"), None, memoryview(start), ends.size))
        named, ignore = self._named, self._named.ignore
        self.columns = Columns(
            tuple(name for name in (named.sparse or names) if name not in ignore),
            tuple(named.dense or ()),
            named.label,
            replace(self._known, types=self._types(table), lists={names[1]: separator}),
        )
        check_columns(file, table.schema, self.columns, ignore)

    def spans(self) -> Generator[Span]:
        """Yield all samples of the log."""
        return TextReader(self.files, self._parse).spans()

    def _types(self, table: pa.Table) -> dict[str, IdType]:
        """Return the types of the columns: integers, unless somebody says so or some id is none."""
        types = dict(self._known.types)
        nulls = pa.array(["", *(self._known.nulls or ())], pa.large_string())
        for name in table.column_names:
            texts = single(table.column(name)).cast(pa.large_string())
            ids = split_lists(texts, self._known.separator or " ").flatten()
            whole = are_whole(ids.filter(pc.invert(pc.is_in(ids, nulls))))
            types.setdefault(name, "integer" if whole else "text")
        return types

    def _parse(self, block: Block) -> RawBatch:
        return self.raw(self._table(block), block.place)

    def _table(self, block: Block) -> pa.Table:
        """Return the lines of a block, cut in two behind the user."""
        ends = record_ends(block.data, quotes=False)[0]
        offsets = pa.py_buffer(np.concatenate([[0], ends]))
        lines = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), ends.size, [None, offsets, pa.py_buffer(block.data)]
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
