"""Logs that a program holds (`placer.data.held`), as sources of samples like files."""

import hashlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from placer.data.files.identity import FileIdentity
from placer.data.files.stores import first_line
from placer.data.formats.base import (
    SAMPLE_ROWS,
    UNREADABLE,
    BatchCursor,
    Batches,
    ColumnSource,
    plain_schema,
)
from placer.data.formats.columns import Columns, check_columns, once
from placer.data.formats.nested import flat, outermost
from placer.data.held import BatchSource
from placer.data.layout import Layout
from placer.errors import DataError

_IDENTITY_ROWS = 4096


class ArrowSource(ColumnSource):
    """A log of record batches, of one schema; see `ColumnSource`.

    Parameters
    ----------
    batches : BatchSource
    columns : Columns, optional
        Instead of `sparse`, `dense`, `label` and `ignore`.
    """

    def __init__(
        self,
        batches: BatchSource,
        layout: Layout | None = None,
        *,
        columns: Columns | None = None,
        **options: Any,
    ) -> None:
        self._held, self.samples, self._was_read = batches, batches.samples, False
        super().__init__((batches.name,), layout, **options)
        schema = flat(plain_schema(batches.schema))
        if columns is None:
            self._infer(schema, self._sample(schema) if self._is_inferred else None)
        else:
            check_columns(batches.name, schema, columns)
            self._choose(columns)

    def _sample(self, schema: pa.Schema) -> pa.Table | None:
        """The first samples; None where reading them would be the only pass that there is."""
        if self._held.once:
            return None
        names = outermost(once(schema.names), self._held.schema)
        first = next((batch for batch in self._held.read(names) if batch.num_rows), None)
        return first and self._sampled(
            first.cast(plain_schema(first.schema)).slice(0, SAMPLE_ROWS), self.files[0], schema
        )

    def open(self, *, may_be_empty: bool = False) -> BatchCursor:
        """A cursor at the log's start; a part of a log may be empty.

        Raises
        ------
        DataError
            If it was read already and can be read once only.
        """
        if self._held.once and self._was_read:
            raise DataError(
                f"the {self._held.name} can be read once, and was; give a function that returns "
                "a new one, or choose rows= and id_mapping= such that one pass is enough"
            )
        self._was_read = True
        names = outermost(self.columns.names, self._held.schema)
        return BatchCursor(self, self._placed(self._held.read(names), may_be_empty))

    def _placed(self, batches: Iterator[pa.RecordBatch], may_be_empty: bool) -> Batches:
        name, row = self._held.name, 0
        while True:
            try:
                batch = next(batches, None)
            except UNREADABLE as error:
                raise DataError(
                    f"cannot read the {name} from row {row} on: {first_line(error)}"
                ) from error
            if batch is None:
                break
            yield name, row, batch.cast(plain_schema(batch.schema))
            row += batch.num_rows
        if not row and not may_be_empty:
            raise DataError(f"the {name} is empty; a log needs at least one sample")

    def identity(self) -> tuple[FileIdentity, ...]:
        """What the log is known by: its columns and its first samples.

        Raises
        ------
        DataError
            If it can be read once only.
        """
        cursor = self.open(may_be_empty=True)
        try:
            first = cursor.next_batch()
        finally:
            cursor.close()
        digest = hashlib.sha256(str(plain_schema(self._held.schema)).encode())
        if first is not None:
            rows = pa.Table.from_batches([first.slice(0, _IDENTITY_ROWS)]).combine_chunks()
            digest.update(repr(rows.to_pydict()).encode())
        return (FileIdentity(self._held.name, 0, digest.hexdigest()),)
