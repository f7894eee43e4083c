"""Read text files as blocks of whole records: lines, or several lines joined by quotes."""

import codecs
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np
import numpy.typing as npt

from placer.data.files.opening import guarded, head, open_unpacked, read_up_to
from placer.data.files.stores import shown
from placer.data.source import Place, RawBatch, Span
from placer.errors import DataError

MOST_LINE_BYTES = 16 << 20
"""Longest line of a log."""
BLOCK_BYTES = 2 << 20
HEAD_BYTES = 1 << 20
"""Bytes of a log's first file that are looked at to infer its columns."""
_PIECE_BYTES = 96 << 10
_NEWLINE, _RETURN, _QUOTE = ord("\n"), ord("\r"), ord('"')


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Whole records of a file."""

    place: Place
    header: bytes | None  # The file's first line if it names the columns.
    data: memoryview
    samples: int


Parse = Callable[[Block], RawBatch]


class TextReader:
    """Reads text files in blocks of whole records.

    With `check_header`, the first record of each file is not a sample: it is called with the file
    and that record. If `quotes` is true, a newline between double quotes does not end a record.
    """

    def __init__(
        self,
        files: Sequence[str],
        parse: Parse,
        *,
        check_header: Callable[[str, bytes], None] | None = None,
        quotes: bool = False,
    ) -> None:
        self._files, self._parse = files, parse
        self._check_header, self._quotes = check_header, quotes
        # Bytes read: the block's records, then the beginning of the next. All blocks share this
        # memory, as getting new pages from the system costs as much as reading into them.
        self._buffer = bytearray()
        self._size = 0

    def spans(self) -> Generator[Span]:
        """Yield the blocks of all files. A block that is skipped is never parsed."""
        found_any = False
        for file in self._files:
            header, end, line = None, 0, 1
            with open_unpacked(file) as stream:
                start = read_up_to(stream, len(codecs.BOM_UTF8), file)
                start = start.removeprefix(codecs.BOM_UTF8)
                self._buffer[: len(start)], self._size = start, len(start)
                while True:
                    records = self._next_records(stream, file, line, end)
                    if not records.ends.size:
                        break
                    first = 0
                    if self._check_header and header is None:
                        header, first = bytes(records.data[: int(records.ends[0])]), 1
                        self._check_header(file, header)
                    found_any = found_any or first < records.ends.size
                    yield records.span(first, header, self._parse)
                    end, line = int(records.ends[-1]), records.line + records.lines
            if len(self._files) == 1 and not found_any:
                raise DataError(f"{shown(file)} is empty; a log needs at least one sample")

    def _next_records(self, stream: IO[bytes], file: str, line: int, behind: int) -> "_Records":
        """Drop the first `behind` bytes and read the next records; none at the file's end."""
        self._size -= behind
        self._buffer[: self._size] = self._buffer[behind : behind + self._size]
        while True:
            read = self._read_more(stream, file)
            at_end = not read
            if at_end and not self._buffer[: self._size].strip(b"\r\n"):
                self._size = 0  # Blank lines that end a file are no samples.
            if at_end and self._size and self._buffer[self._size - 1] != _NEWLINE:
                # The last line of a file may lack its newline.
                self._buffer[self._size], read = _NEWLINE, 1
            self._size += read
            ends, newlines = np.zeros(0, np.int64), None
            if at_end or self._buffer.find(b"\n", self._size - read, self._size) >= 0:
                text = memoryview(self._buffer)[: self._size]
                ends, newlines = record_ends(text, self._quotes)
                kept = _before_blank(self._buffer, int(ends[-1]) if ends.size else 0)
                ends = ends[: np.searchsorted(ends, kept, side="right")]
            if ends.size or at_end:
                break
            if self._size > MOST_LINE_BYTES:
                raise self._too_long(file, line, 0)
        end = int(ends[-1]) if ends.size else 0
        if at_end and end < self._size:
            raise self._too_long(file, line, end)
        lines = ends if newlines is None else newlines[newlines < end]
        return _Records(file, line, lines.size, memoryview(self._buffer)[:end], ends, newlines)

    def _read_more(self, stream: IO[bytes], file: str) -> int:
        """Append a block to the buffer; return the number of bytes, 0 at the file's end."""
        start = self._size
        if len(self._buffer) <= start + BLOCK_BYTES:  # One more for a newline.
            room = bytearray(2 * start + BLOCK_BYTES + 1)
            room[:start] = memoryview(self._buffer)[:start]
            self._buffer = room
        free = memoryview(self._buffer)[start : start + BLOCK_BYTES]
        return guarded(lambda: int(stream.readinto(free)), file)  # type: ignore[attr-defined]

    def _too_long(self, file: str, line: int, start: int) -> DataError:
        """Return an error for a line without an end that begins at `start` in the buffer."""
        line += self._buffer.count(b"\n", 0, start)
        if self._quotes and self._buffer.find(b'"', start, self._size) >= 0:
            return DataError(
                f"{shown(file)}, line {line} opens a quote that nothing closes; close it, "
                "or say that quotes are plain characters (--no-quotes)"
            )
        return DataError(
            f"{shown(file)}, line {line} has more than {MOST_LINE_BYTES} bytes, "
            "which no sample has; is it a log?"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Records:
    """Consecutive records of a file, in memory."""

    file: str
    line: int  # Number of the first line.
    lines: int  # Number of lines.
    data: memoryview
    ends: npt.NDArray[np.int64]  # End of each record, newline included.
    newlines: npt.NDArray[np.int64] | None  # None if each record is one line.

    def span(self, first: int, header: bytes | None, parse: Parse) -> Span:
        """Return the records from `first` on as a span, parsed when it is first read."""
        parsed: RawBatch | None = None

        def read(start: int, stop: int) -> RawBatch:
            nonlocal parsed
            if parsed is None:
                parsed = parse(self._block(first + start, header))
            # Parsing began at the record that was read first.
            before = self.ends.size - first - parsed.samples
            return parsed.slice(start - before, stop - before)

        return Span(self.ends.size - first, read)

    def _block(self, first: int, header: bytes | None) -> Block:
        start = int(self.ends[first - 1]) if first else 0
        ends, line, lines = self.ends[first:], self.line + first, None
        if self.newlines is not None:
            starts = np.concatenate([[start], ends[:-1]])
            lines = self.line + np.searchsorted(self.newlines, starts)
            line = int(lines[0])
        # Arrow would take a blank line for a sample with all fields missing, or skip it.
        lengths = np.diff(ends, prepend=start)
        text = np.frombuffer(self.data, dtype=np.uint8)
        blank = (lengths == 1) | ((lengths == 2) & (text[ends - lengths] == _RETURN))
        if blank.any():
            record = int(np.argmax(blank))
            line = line + record if lines is None else int(lines[record])
            raise DataError(f"{shown(self.file)}, line {line} is blank; remove it")
        return Block(Place(self.file, line, "line", lines), header, self.data[start:], ends.size)


def _before_blank(buffer: bytearray, end: int) -> int:
    """Return the end of a block of lines without the blank lines at its end."""
    start = end
    while start and buffer[start - 1] in (_NEWLINE, _RETURN):
        start -= 1
    return buffer.find(b"\n", start, end) + 1 if start else 0


def pieces(text: npt.NDArray[np.uint8]) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Yield places and parts of a block. A part and its temporary arrays fit a CPU cache."""
    for first in range(0, text.size, _PIECE_BYTES):
        yield first, text[first : first + _PIECE_BYTES]


def record_ends(
    block: bytes | memoryview, quotes: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
    """Return ends of records, and places of newlines if some record has several, else None.

    >>> record_ends(b'1,"a\\nb"\\n2,c\\n', quotes=True)
    (array([ 8, 12]), array([ 4,  7, 11]))
    >>> record_ends(b"1,a\\n2", quotes=True)
    (array([4]), None)
    """
    text = np.frombuffer(block, dtype=np.uint8)
    found = [np.flatnonzero(piece == _NEWLINE) + first for first, piece in pieces(text)]
    newlines = np.concatenate([np.zeros(0, np.int64), *found])
    if not quotes or not (text == _QUOTE).any():
        return newlines + 1, None
    # A newline ends a record unless a quote is open. Quotes within quotes are doubled.
    opened = np.searchsorted(np.flatnonzero(text == _QUOTE), newlines) % 2 == 1
    if not opened.any():
        return newlines + 1, None
    return newlines[~opened] + 1, newlines


def head_lines(file: str) -> bytes:
    """Return whole lines at the beginning of a file; a last line without newline gets one."""
    start = head(file, HEAD_BYTES)
    is_whole = len(start) < HEAD_BYTES
    start = start.removeprefix(codecs.BOM_UTF8)
    if not start:
        raise DataError(f"{shown(file)} is empty; a log needs at least one sample")
    if start.startswith((b"PAR1", b"ARROW1")):
        raise DataError(
            f"{shown(file)} is Parquet or Arrow, and no text; name its format (--log-format, or "
            "format in a schema)"
        )
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(
            f"{shown(file)} is text in UTF-16; write it in UTF-8 (iconv -f UTF-16 -t UTF-8)"
        )
    if is_whole:
        return start if start.endswith(b"\n") else start + b"\n"
    if b"\n" not in start:
        start = head(file, MOST_LINE_BYTES).removeprefix(codecs.BOM_UTF8)
    end = start.rfind(b"\n") + 1
    if not end and len(start) < MOST_LINE_BYTES:
        return start + b"\n"
    if not end:
        raise DataError(
            f"{shown(file)}, line 1 has more than {MOST_LINE_BYTES} bytes, "
            "which no sample has; is it a log?"
        )
    return start[:end]


def lone_return(block: Block) -> DataError | None:
    """Return an error if a carriage return is within a line: Arrow would end the line there."""
    text = np.frombuffer(block.data, dtype=np.uint8)
    returns = np.flatnonzero(text == _RETURN)
    # A block ends with a newline, so each carriage return is followed by a byte.
    lone = returns[text[np.minimum(returns + 1, text.size - 1)] != _NEWLINE]
    if not lone.size:
        return None
    line = block.place.first + int(np.count_nonzero(text[: lone[0]] == _NEWLINE))
    return DataError(
        f"{shown(block.place.file)}, line {line} has a carriage return that does not end it; "
        "remove it, or if it ends a line, write newlines (tr '\\r' '\\n')"
    )
