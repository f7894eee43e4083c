"""Arrow's files (IPC files and streams, Feather): a column for each feature, as in Parquet."""

from collections.abc import Generator, Sequence
from contextlib import closing
from struct import unpack_from
from typing import Any

import pyarrow as pa

from placer.data.files.opening import open_file
from placer.data.files.stores import local_path, scheme_of, shown
from placer.data.formats.base import (
    SAMPLE_ROWS,
    Batches,
    ColumnSource,
    plain,
    plain_schema,
    reading,
)
from placer.data.formats.columns import flat, outermost
from placer.errors import DataError

_FILE = b"ARROW1"
_FEATHER_1 = b"FEA1"
_MARK_BYTES = 64
"""Most bytes between the last record batch and the footer: an 8-byte mark and padding."""


class IpcSource(ColumnSource):
    """Arrow files of one schema, in order; see `ColumnSource`.

    It holds one record batch of a file in memory.
    """

    def _prepare(self) -> None:
        self._infer_from([_schema(file) for file in self.files])

    def _batches(self) -> Batches:
        for file in self.files:
            row = 0
            schema = _schema(file)
            names = self._partitions.of_file(self.columns.names, schema.names)
            for batch in _batches(file, outermost(names, schema)):
                yield file, row, batch
                row += batch.num_rows

    def _sample(self, schema: pa.Schema) -> pa.Table:
        """Return the first samples of the log."""
        for file in self.files:
            with closing(_batches(file, None)) as batches:
                for batch in batches:
                    if batch.num_rows:
                        return self._sampled(batch.slice(0, SAMPLE_ROWS), file, schema)
        raise DataError(f"{shown(self.files[0])} is empty; a log needs at least one sample")


def _schema(file: str) -> pa.Schema:
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
            yield plain(batch)
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
