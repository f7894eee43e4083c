"""Read text files as blocks of whole records: lines, or several lines joined by quotes."""

import codecs
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import numpy.typing as npt

from placer.data.files.opening import guarded, head, open_unpacked, read_up_to
from placer.data.files.stores import shown
from placer.data.source import Place, RawBatch, Span
from placer.errors import DataError

MOST_LINE_BYTES = 16 << 20
"""Longest line of a log."""
BLOCK_BYTES = 4 << 20
HEAD_BYTES = 1 << 20
"""Bytes of a log's first file that are looked at to infer its columns."""
_NEWLINE, _RETURN, _QUOTE = b'\n\r"'

_Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Whole records of a file."""

    place: Place
    header: bytes | None  # The file's first line if it names the columns.
    data: memoryview
    ends: _Bytes  # End of each record in the data, newline included.
    is_multiline: bool  # Whether some record has several lines.

    @property
    def samples(self) -> int:
        """Number of records."""
        return self.ends.size


def first_block(file: str, data: bytes, *, quotes: bool = False, header: bool = False) -> Block:
    """Return the block of the first records of a file, whose bytes are `data`."""
    ends, newlines = record_ends(data, quotes)
    start, ends = (int(ends[0]), ends[1:]) if header else (0, ends)
    return _block(file, 1, None, data, start, ends, newlines)


def _block(
    file: str,
    line: int,
    header: bytes | None,
    data: bytes,
    start: int,
    ends: _Bytes,
    newlines: _Bytes,
) -> Block:
    """Return the block of the records of `data` from `start` on; `line` is that of its first byte.

    Raises DataError if a line is blank.
    """
    starts = np.concatenate([[start], ends])[:-1]
    lines = line + np.searchsorted(newlines, starts)
    # Arrow would take a blank line for a sample with all fields missing, or skip it.
    text, lengths = np.frombuffer(data, dtype=np.uint8), ends - starts
    blank = (lengths == 1) | ((lengths == 2) & (text[starts] == _RETURN))
    if blank.any():
        raise DataError(f"{shown(file)}, line {lines[blank.argmax()]} is blank; remove it")
    is_multiline = newlines.size > ends.size + (start > 0)
    part = memoryview(data)[start : int(ends[-1])]
    return Block(Place(file, lines, "line"), header, part, ends - start, is_multiline)


def text_spans(
    files: Sequence[str],
    parse: Callable[[Block], RawBatch],
    check_header: Callable[[str, bytes], None] | None = None,
    quotes: bool = False,
) -> Generator[Span]:
    """Yield the blocks of text files. A block that is skipped is never parsed.

    With `check_header`, the first record of each file is not a sample: it is called with the file
    and that record. If `quotes` is true, a newline between double quotes does not end a record.
    """
    samples = 0
    for file in files:
        for span in _spans_of(file, parse, check_header, quotes):
            samples += span.samples
            yield span
    if not samples and len(files) == 1:
        raise DataError(f"{shown(files[0])} is empty; a log needs at least one sample")


def _spans_of(
    file: str,
    parse: Callable[[Block], RawBatch],
    check_header: Callable[[str, bytes], None] | None,
    quotes: bool,
) -> Generator[Span]:
    header, line, part = None, 1, b"."
    with open_unpacked(file) as stream:
        data = read_up_to(stream, len(codecs.BOM_UTF8), file).removeprefix(codecs.BOM_UTF8)
        while part:
            part = guarded(lambda: stream.read(BLOCK_BYTES), file)
            # A last line may lack its newline. Blank lines behind it are no samples.
            data = data + part if part else _without_blank_end(data)
            ends, newlines = record_ends(data, quotes)
            if ends.size and np.diff(ends[-2:], prepend=0)[-1] <= len(b"\r\n"):
                # Blank lines at the end of a block may end the file, too.
                kept = len(_without_blank_end(data[: int(ends[-1])]))
                ends = ends[: np.searchsorted(ends, kept) + 1] if kept else ends[:0]
            end = int(ends[-1]) if ends.size else 0
            newlines = newlines[newlines < end]
            start = 0
            if ends.size and check_header and header is None:
                start, ends = int(ends[0]), ends[1:]
                header = data[:start]
                check_header(file, header)
            if ends.size:
                block = partial(_block, file, line, header, data, start, ends, newlines)
                yield _span(ends.size, parse, block)
            data, line = data[end:], line + newlines.size
            if len(data) > MOST_LINE_BYTES or (data and not part):
                if quotes and _QUOTE in data:
                    raise DataError(
                        f"{shown(file)}, line {line} opens a quote that nothing closes; close it, "
                        "or say that quotes are plain characters (--no-quotes)"
                    )
                raise _too_long(file, line)


def _span(samples: int, parse: Callable[[Block], RawBatch], block: Callable[[], Block]) -> Span:
    parsed = cache(lambda: parse(block()))  # When it is first read.
    return Span(samples, lambda start, stop: parsed().slice(start, stop))


def _too_long(file: str, line: int) -> DataError:
    return DataError(
        f"{shown(file)}, line {line} has more than {MOST_LINE_BYTES} bytes, which no sample has; "
        "is it a log?"
    )


def _without_blank_end(text: bytes) -> bytes:
    """Return text that ends with the newline of its last line that is not blank, if any."""
    text = text.rstrip(b"\r\n")
    return text + b"\n" if text else b""


def record_ends(text: bytes, quotes: bool) -> tuple[_Bytes, _Bytes]:
    """Return the ends of records, and the places of newlines.

    >>> record_ends(b'1,"a\\nb"\\n2,c\\n3', quotes=True)
    (array([ 8, 12]), array([ 4,  7, 11]))
    """
    found = np.frombuffer(text, dtype=np.uint8)
    newlines = np.flatnonzero(found == _NEWLINE)
    if not quotes or _QUOTE not in text:
        return newlines + 1, newlines
    # A newline ends a record unless a quote is open. Quotes within quotes are doubled.
    opened = np.searchsorted(np.flatnonzero(found == _QUOTE), newlines) % 2 == 1
    return newlines[~opened] + 1, newlines


def head_lines(file: str) -> bytes:
    """Return whole lines at the beginning of a file; a last line without newline gets one."""
    for most_bytes in (HEAD_BYTES, MOST_LINE_BYTES):
        start = head(file, most_bytes)
        whole = len(start) < most_bytes
        start = start.removeprefix(codecs.BOM_UTF8)
        text = start.strip(b"\r\n")
        if not text:
            raise DataError(f"{shown(file)} is empty; a log needs at least one sample")
        if b"\r" in text and b"\n" not in text:
            raise DataError(
                f"{shown(file)}: its lines end with carriage returns alone; write newlines "
                "(tr '\\r' '\\n')"
            )
        if start.startswith((b"PAR1", b"ARROW1")):
            raise DataError(
                f"{shown(file)} is Parquet or Arrow, and no text; name its format (--log-format, "
                "or format in a schema)"
            )
        if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise DataError(
                f"{shown(file)} is text in UTF-16; write it in UTF-8 (iconv -f UTF-16 -t UTF-8)"
            )
        if whole or b"\n" in start:
            return _without_blank_end(start if whole else start[: start.rfind(b"\n")])
    raise _too_long(file, 1)


def lone_return(block: Block) -> DataError | None:
    """Return an error if a carriage return is within a line: Arrow would end the line there."""
    text = np.frombuffer(block.data, dtype=np.uint8)
    returns = np.flatnonzero(text == _RETURN)
    # A block ends with a newline, so each carriage return is followed by a byte.
    lone = returns[text[np.minimum(returns + 1, text.size - 1)] != _NEWLINE]
    if not lone.size:
        return None
    line = block.place.numbers[0] + int(np.count_nonzero(text[: lone[0]] == _NEWLINE))
    return DataError(
        f"{shown(block.place.file)}, line {line} has a carriage return that does not end it; "
        "remove it, or if it ends a line, write newlines (tr '\\r' '\\n')"
    )
