"""Text formats: blocks of whole records, each a line or, between quotes, several."""

import codecs
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np
import numpy.typing as npt

from placer.data.files.opening import guarded, head, open_unpacked
from placer.data.files.stores import shown
from placer.data.source import Cursor, Place, RawBatch
from placer.errors import DataError

MOST_LINE_BYTES = 16 << 20
"""Longest line of a log."""
BLOCK_BYTES = 2 << 20
HEAD_BYTES = 1 << 20
"""How much of a log's first file is looked at to tell what its columns are."""
_PIECE_BYTES = 96 << 10
_NEWLINE, _RETURN, _QUOTE = ord("\n"), ord("\r"), ord('"')


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Whole records of a file."""

    place: Place
    header: bytes | None  # The file's first line, where it names the columns.
    data: memoryview
    samples: int


Parse = Callable[[Block], RawBatch]


class TextCursor(Cursor):
    """Reads blocks of whole records; a block that is skipped is never parsed.

    With a `header` the first record of each file is no sample; with `quotes` a newline between
    double quotes ends no record.
    """

    def __init__(
        self, files: Sequence[str], parse: Parse, *, header: bool = False, quotes: bool = False
    ) -> None:
        self._files = list(files)
        self._is_only = len(self._files) == 1
        self._parse, self._has_header, self._quotes = parse, header, quotes
        self._file: str = ""
        self._stream: IO[bytes] | None = None
        self._header: bytes | None = None
        # What was read: the block's records, then what follows them. The next block is read into
        # the same memory: pages that a process is given again cost as much as reading them.
        self._buffer = bytearray()
        self._end = self._size = 0
        self._may_be_blank = False
        # The block's records, their ends, newline included, where these are known already, and
        # how many records are behind us.
        self._records = 0
        self._known_ends: npt.NDArray[np.int64] | None = None
        self._record = 0
        # Newlines within the block, where a record has several lines.
        self._newlines: npt.NDArray[np.int64] | None = None
        # Lines of the file before this block.
        self._lines_before = 0
        self._parsed: RawBatch | None = None
        self._found_any = False

    def read(self, samples: int) -> RawBatch | None:
        """Return the next samples, at least one and at most `samples`; None at the end."""
        if not self._at_hand():
            return None
        if self._parsed is None:
            self._parsed = self._parse(self._unread())
        # The batch was parsed from the record that we stood at then, to the block's end.
        start = self._parsed.samples - (self._records - self._record)
        batch = self._parsed.slice(start, start + samples)
        self._record += batch.samples
        return batch

    def close(self) -> None:
        """Close the file that is open."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _unread(self) -> Block:
        """Return what of the block is not behind us."""
        lines, first = None, self._lines_before + self._record + 1
        block, count = self._block, self._records - self._record
        if not self._record and self._newlines is None and not self._may_be_blank:
            return Block(Place(self._file, first, "line"), self._header, block, count)
        start = int(self._ends[self._record - 1]) if self._record else 0
        ends = self._ends[self._record :]
        if self._newlines is not None:
            starts = np.concatenate([[start], ends[:-1]])
            lines = self._lines_before + 1 + np.searchsorted(self._newlines, starts)
            first = int(lines[0])
        # Arrow would take a blank line for a sample of which every field is missing, or for none.
        lengths = np.diff(ends, prepend=start)
        text = np.frombuffer(block, dtype=np.uint8)
        blank = (lengths == 1) | ((lengths == 2) & (text[ends - lengths] == _RETURN))
        if blank.any():
            record = int(np.argmax(blank))
            line = first + record if lines is None else int(lines[record])
            raise DataError(f"{shown(self._file)}, line {line} is blank; remove it")
        place = Place(self._file, first, "line", lines)
        return Block(place, self._header, block[start:], count)

    @property
    def _block(self) -> memoryview:
        """The block's records."""
        return memoryview(self._buffer)[: self._end]

    @property
    def _ends(self) -> npt.NDArray[np.int64]:
        """Where the block's records end."""
        if self._known_ends is None:
            self._known_ends = record_ends(self._block, quotes=False)[0]
        return self._known_ends

    def _at_hand(self) -> int:
        while self._record == self._records:
            if self._stream is None:
                if not self._files:
                    return 0
                self._file = self._files.pop(0)
                self._stream = open_unpacked(self._file)
                self._lines_before, self._header = 0, None
                self._end = self._size = self._records = self._record = 0
                self._known_ends = self._newlines = None
            self._read_block(self._stream)
        return self._records - self._record

    def _move(self, samples: int) -> None:
        self._record += samples

    def _read_block(self, stream: IO[bytes]) -> None:
        before = self._records if self._newlines is None else self._newlines.size
        self._lines_before += before
        rest = self._size - self._end
        self._buffer[:rest] = self._buffer[self._end : self._size]
        self._size, at_end = rest, False
        while True:
            read = self._read_more(stream)
            at_end = not read
            if at_end and not self._buffer[: self._size].strip(b"\r\n"):
                self._size = 0  # Blank lines that end a file are no samples.
            if at_end and self._size and self._buffer[self._size - 1] != _NEWLINE:
                # The last line of a file may lack its newline.
                self._buffer[self._size], read = _NEWLINE, 1
            self._size += read
            block, size = self._buffer, self._size
            if at_end or block.find(b"\n", size - read, size) >= 0:
                end, records = self._find_newlines()
                ends, newlines = None, None
                if self._quotes and block.find(b'"', 0, size) >= 0:
                    ends, newlines = record_ends(memoryview(block)[:size], quotes=True)
                    end, records = int(ends[-1]) if ends.size else 0, ends.size
                kept = _before_blank(block, end)
                if kept < end:
                    records -= block.count(b"\n", kept, end)
                    end, ends = kept, None if ends is None else ends[:records]
                if records or at_end:
                    break
            if size > MOST_LINE_BYTES:
                raise self._too_long(0)
        if at_end and end < size:
            raise self._too_long(end)
        self._end, self._record, self._parsed = end, 0, None
        self._records, self._known_ends = records, ends
        self._newlines = None if newlines is None else newlines[newlines < end]
        if self._has_header and self._header is None and records:
            self._header, self._record = bytes(self._block[: int(self._ends[0])]), 1
        if self._record < records:
            self._found_any = True
        if not records:
            self.close()
            if self._is_only and not self._found_any:
                raise DataError(f"{shown(self._file)} is empty; a log needs at least one sample")

    def _read_more(self, stream: IO[bytes]) -> int:
        """Read behind what there is; how many bytes, 0 at the file's end."""
        start = self._size
        if len(self._buffer) <= start + BLOCK_BYTES:  # More for a newline, and to whole words.
            room = bytearray((2 * start + BLOCK_BYTES) // 8 * 8 + 16)
            room[:start] = memoryview(self._buffer)[:start]
            self._buffer = room
        free = memoryview(self._buffer)[start : start + BLOCK_BYTES]
        return guarded(lambda: int(stream.readinto(free)), self._file)  # type: ignore[attr-defined]

    def _find_newlines(self) -> tuple[int, int]:
        """Return where the last line ends, how many lines there are, and if one may be blank."""
        text = np.frombuffer(self._buffer, dtype=np.uint8, count=self._size)
        has_returns = self._buffer.find(b"\r", 0, self._size) >= 0
        lines, last = 0, np.ones(2, dtype=np.bool_)  # As if newlines were before.
        self._may_be_blank = False
        for _, piece in pieces(text):
            found = np.concatenate((last, piece == _NEWLINE))
            lines += int(np.count_nonzero(found[2:]))
            self._may_be_blank |= bool((found[2:] & found[1:-1]).any())
            self._may_be_blank |= has_returns and bool((found[2:] & found[:-2]).any())
            last = found[-2:]
        return self._buffer.rfind(b"\n", 0, self._size) + 1, lines

    def _too_long(self, start: int) -> DataError:
        """Return what to say of a line that does not end, which begins at a place in the buffer."""
        line = self._lines_before + self._buffer.count(b"\n", 0, start) + 1
        if self._quotes and self._buffer.find(b'"', start, self._size) >= 0:
            return DataError(
                f"{shown(self._file)}, line {line} opens a quote that nothing closes; close it, "
                "or say that quotes are plain characters (--no-quotes)"
            )
        return DataError(
            f"{shown(self._file)}, line {line} has more than {MOST_LINE_BYTES} bytes, "
            "which no sample has; is it a log?"
        )


def _before_blank(buffer: bytearray, end: int) -> int:
    """Return where a block of lines ends without the blank lines at its end."""
    start = end
    while start and buffer[start - 1] in (_NEWLINE, _RETURN):
        start -= 1
    return buffer.find(b"\n", start, end) + 1 if start else 0


def pieces(text: npt.NDArray[np.uint8]) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Yield parts of a block that fit a processor's cache, what is found in them, and where."""
    for first in range(0, text.size, _PIECE_BYTES):
        yield first, text[first : first + _PIECE_BYTES]


def record_ends(
    block: bytes | memoryview, quotes: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
    """Return where records end, newline included, and the newlines where some record has several.

    >>> record_ends(b'1,"a\\nb"\\n2,c\\n', quotes=True)
    (array([ 8, 12]), array([ 4,  7, 11]))
    >>> record_ends(b"1,a\\n2", quotes=True)
    (array([4]), None)
    """
    text = np.frombuffer(block, dtype=np.uint8)
    newlines = np.flatnonzero(text == _NEWLINE)
    if not quotes or not (text == _QUOTE).any():
        return newlines + 1, None
    # A newline ends a record unless a quote is open: a quote within quotes is written twice.
    opened = np.searchsorted(np.flatnonzero(text == _QUOTE), newlines) % 2 == 1
    if not opened.any():
        return newlines + 1, None
    return newlines[~opened] + 1, newlines


def head_lines(file: str) -> bytes:
    """Whole lines at the beginning of a file, the last one complete or not at the file's end."""
    start = head(file, HEAD_BYTES)
    if not start:
        raise DataError(f"{shown(file)} is empty; a log needs at least one sample")
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(
            f"{shown(file)} is text in UTF-16; write it in UTF-8 (iconv -f UTF-16 -t UTF-8)"
        )
    if len(start) < HEAD_BYTES:
        return start if start.endswith(b"\n") else start + b"\n"
    if b"\n" not in start:
        start = head(file, MOST_LINE_BYTES)
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
    """Return a carriage return within a line, which Arrow would take for its end, if any."""
    text = np.frombuffer(block.data, dtype=np.uint8)
    returns = np.flatnonzero(text == _RETURN)
    # A block ends with a newline, so that something follows.
    lone = returns[text[np.minimum(returns + 1, text.size - 1)] != _NEWLINE]
    if not lone.size:
        return None
    line = block.place.first + int(np.count_nonzero(text[: lone[0]] == _NEWLINE))
    return DataError(
        f"{shown(block.place.file)}, line {line} has a carriage return that does not end it; "
        "remove it"
    )
