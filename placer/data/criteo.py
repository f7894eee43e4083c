"""Criteo's text format: a label, 13 integers and 26 categories, separated by tabs.

The test part of the published logs has no label. Files may be plain, ``.gz``, ``.bz2`` or
``.xz``; a missing field is empty.
"""

import bz2
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv

from placer.data.keys import Missing, bags_from_arrow
from placer.data.source import RawBags, RawBatch
from placer.errors import DataError

LABEL = "label"
DENSE = tuple(f"I{number}" for number in range(1, 14))
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))

MOST_LINE_BYTES = 16 << 20
"""Longest line of a log."""
_BLOCK_BYTES = 2 << 20
_NEWLINE, _RETURN = ord("\n"), ord("\r")
_OPENERS: dict[str, Callable[..., Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}


class CriteoSource:
    """Criteo TSV files, in order.

    Raises
    ------
    DataError
        If a file is missing or empty, or its first line has neither 39 nor 40 fields.
    """

    def __init__(self, files: Sequence[str], missing: Missing = "zero") -> None:
        self.files = tuple(files)
        self.missing: Missing = missing
        self.label_name = LABEL if _has_label(self.files[0]) else None
        self.dense_names = DENSE
        self.text_features: Mapping[str, bool] = dict.fromkeys(CATEGORIES, True)
        self.samples: int | None = None

    def largest_ids(self) -> Mapping[str, int] | None:
        """None: a text file keeps no statistics."""
        return None

    def open(self) -> "CriteoCursor":
        """A cursor at the log's start."""
        return CriteoCursor(self.files, self.label_name is not None, self.missing)


class CriteoCursor:
    """Reads blocks of whole lines; a block that is skipped is never parsed."""

    def __init__(self, files: Sequence[str], labelled: bool, missing: Missing) -> None:
        self._files = list(files)
        self._labelled = labelled
        self._missing: Missing = missing
        self._file: str = ""
        self._stream: IO[bytes] | None = None
        self._rest = b""
        self._block = b""
        # Ends of the block's lines, newline included, and how many of them are behind us.
        self._ends = np.zeros(0, dtype=np.int64)
        self._line = 0
        # Lines of the file before this block.
        self._lines_before = 0
        self._parsed: RawBatch | None = None

    def read(self, samples: int) -> RawBatch | None:
        """The next samples, at least one and at most `samples`; None at the end."""
        if not self._next_block():
            return None
        if self._parsed is None:
            start = int(self._ends[self._line - 1]) if self._line else 0
            self._refuse_blank_line()
            self._parsed = _parse(
                memoryview(self._block)[start:],
                self._file,
                self._lines_before + self._line + 1,
                self._labelled,
                self._missing,
            )
        # The batch was parsed from the line that we stood at then, to the block's end.
        start = self._parsed.samples - (self._ends.size - self._line)
        batch = self._parsed.slice(start, start + samples)
        self._line += batch.samples
        return batch

    def skip(self, samples: int) -> int:
        """Move on without parsing; how many lines were there to skip."""
        left = samples
        while left and self._next_block():
            step = min(left, self._ends.size - self._line)
            self._line += step
            left -= step
        return samples - left

    def close(self) -> None:
        """Close the file that is open."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _refuse_blank_line(self) -> None:
        """Arrow would take a blank line for a sample of which every field is missing."""
        blank = np.diff(self._ends, prepend=0)[self._line :] == 1
        if blank.any():
            line = self._lines_before + self._line + int(np.argmax(blank)) + 1
            raise DataError(f"{self._file}, line {line} is blank; remove it")

    def _next_block(self) -> bool:
        """Make sure that an unread line is at hand; False at the log's end."""
        while self._line == self._ends.size:
            if self._stream is None:
                if not self._files:
                    return False
                self._file = self._files.pop(0)
                self._stream = _open(self._file)
                self._rest, self._lines_before = b"", 0
                self._ends, self._line = self._ends[:0], 0
            self._read_block(self._stream)
        return True

    def _read_block(self, stream: IO[bytes]) -> None:
        blocks = [self._rest]
        while True:
            data = _guarded(lambda: stream.read(_BLOCK_BYTES), self._file)
            end = data.rfind(b"\n") + 1
            if end or not data:
                break
            blocks.append(data)
            if sum(map(len, blocks)) > MOST_LINE_BYTES:
                line = self._lines_before + self._ends.size + 1
                raise DataError(
                    f"{self._file}, line {line} has more than {MOST_LINE_BYTES} bytes, "
                    "which no sample has; is it a log?"
                )
        if data:
            block, self._rest = b"".join([*blocks, data[:end]]), data[end:]
        else:
            # The last line of a file may lack its newline.
            block, self._rest = b"".join(blocks), b""
            if block and not block.endswith(b"\n"):
                block += b"\n"
        self._lines_before += self._ends.size
        self._block, self._line, self._parsed = block, 0, None
        self._ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == _NEWLINE) + 1
        if not block:
            self.close()
            if not self._lines_before:
                raise DataError(f"{self._file} is empty; a log needs at least one sample")


def _open(file: str) -> IO[bytes]:
    try:
        stream: IO[bytes] = _OPENERS.get(Path(file).suffix, open)(file, "rb")
    except OSError as error:
        raise DataError(f"cannot open {file}: {error.strerror or error}") from error
    return stream


def _guarded(read: Callable[[], bytes], file: str) -> bytes:
    try:
        return read()
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(
            f"cannot read {file}: {error}; is it cut short, or not what its suffix says?"
        ) from error


def _has_label(file: str) -> bool:
    """Whether a file's lines begin with a label, judged by its first line."""
    with _open(file) as stream:
        line = _guarded(lambda: stream.readline(MOST_LINE_BYTES), file)
    if not line:
        raise DataError(f"{file} is empty; a log needs at least one sample")
    fields = line.count(b"\t") + 1
    unlabelled = len(DENSE) + len(CATEGORIES)
    if fields not in (unlabelled, unlabelled + 1):
        raise DataError(
            f"{file}, line 1: {fields} fields, expected {unlabelled + 1} separated by tabs "
            f"(label, 13 integers, 26 categories), or {unlabelled} without the label"
        )
    return fields == unlabelled + 1


def _parse(
    block: memoryview, file: str, first_line: int, labelled: bool, missing: Missing
) -> RawBatch:
    _refuse_lone_returns(block, file, first_line)
    columns = ((LABEL,) if labelled else ()) + DENSE + CATEGORIES
    types = {name: pa.float32() for name in (LABEL, *DENSE)} | dict.fromkeys(
        CATEGORIES, pa.binary()
    )
    try:
        table = csv.read_csv(
            pa.py_buffer(block),
            # Only one thread counts rows, which the messages need.
            read_options=csv.ReadOptions(
                column_names=columns, use_threads=False, block_size=len(block) + 1
            ),
            parse_options=csv.ParseOptions(
                delimiter="\t",
                quote_char=False,
                ignore_empty_lines=False,
            ),
            convert_options=csv.ConvertOptions(
                column_types={name: types[name] for name in columns},
                null_values=[""],
                strings_can_be_null=False,
            ),
        ).combine_chunks()
    except pa.ArrowInvalid as error:
        raise (
            _ragged_error(block, file, first_line, len(columns))
            or _conversion_error(error, file, first_line, columns)
        ) from error
    samples = table.num_rows
    features = {}
    for name in CATEGORIES:
        keys, offsets = bags_from_arrow(_single(table.column(name)), missing)
        features[name] = RawBags(keys, offsets)
    dense = np.empty((samples, len(DENSE)), dtype=np.float32)
    for position, name in enumerate(DENSE):
        dense[:, position] = table.column(name).to_numpy()
    labels = None
    if labelled:
        labels = table.column(LABEL).to_numpy().astype(np.float32)
    return RawBatch(file, first_line, "line", samples, features, dense, labels)


def _refuse_lone_returns(block: memoryview, file: str, first_line: int) -> None:
    """Arrow would take a carriage return for the end of a line; to others it is a part of one."""
    text = np.frombuffer(block, dtype=np.uint8)
    returns = np.flatnonzero(text == _RETURN)
    if not returns.size:
        return
    # A block ends with a newline, so that something follows.
    lone = returns[text[np.minimum(returns + 1, text.size - 1)] != _NEWLINE]
    if lone.size:
        line = first_line + int(np.count_nonzero(text[: lone[0]] == _NEWLINE))
        raise DataError(
            f"{file}, line {line} has a carriage return that does not end it; remove it"
        )


def _ragged_error(block: memoryview, file: str, first_line: int, expected: int) -> DataError | None:
    """The first line of another number of fields, if there is one."""
    for number, line in enumerate(bytes(block).split(b"\n"), first_line):
        fields = line.count(b"\t") + 1
        if line and fields != expected:
            return DataError(
                f"{file}, line {number}: {fields} fields, expected {expected} separated by "
                "tabs; repair or remove the line"
            )
    return None


def _single(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined


def _conversion_error(
    error: pa.ArrowInvalid, file: str, first_line: int, columns: Sequence[str]
) -> DataError:
    """A number that is none; Arrow's message holds its column, row and text."""
    match = re.search(r"column #(\d+): (?:Row #(\d+): )?.*?'(.*)'", str(error))
    if match is None or match[2] is None:
        return DataError(f"{file}, from line {first_line} on: {error}")
    line, name = first_line + int(match[2]) - 1, columns[int(match[1])]
    return DataError(f"{file}, line {line}: {name} is {match[3]!r}, which is not a number")
