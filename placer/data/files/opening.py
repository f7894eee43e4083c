"""Opens the files of a log, wherever they are, and unpacks those that are compressed.

All streams of a compressed file are read, to its last byte. Arrow's reader of bz2 and zstd and
Python's of gzip refuse bytes that are no stream behind one that is; Python's reader of xz ends a
file there without a word, and so is not used.
"""

import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa

from placer.data.files.stores import first_line, is_uri, local_path, scheme_of, shown, store_of
from placer.errors import DataError

T = TypeVar("T")

_PACKED_BYTES = 1 << 17
_FAILURES = (OSError, EOFError, lzma.LZMAError, zlib.error, pa.ArrowException)
_MAGIC = {b"\x1f\x8b\x08": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz", b"(\xb5/\xfd": ".zst"}
"""How compressed files begin."""


def suffixes(file: str) -> tuple[str, str]:
    """Return the suffix of a file's format, and that of its compression, in lower case.

    >>> suffixes("s3://logs/day_0.CSV.gz?region=eu-west-1"), suffixes("day_0")
    (('.csv', '.gz'), ('', ''))
    """
    path = PurePosixPath(urlsplit(file).path if is_uri(file) else file)
    packed = path.suffix.lower()
    if packed not in COMPRESSIONS:
        return packed, ""
    return path.with_suffix("").suffix.lower(), packed


def open_file(file: str) -> Any:
    """A file as it is, open for reading at any place; raises DataError if it cannot be opened."""
    try:
        if scheme_of(file) == "file":
            return Path(local_path(file)).open("rb")
        system, path = store_of(file)
        return system.open_input_file(path)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise DataError(f"cannot open {shown(file)}: {reason}") from error


def open_unpacked(file: str) -> IO[bytes]:
    """A file's content from its start, unpacked where its suffix or its first bytes say so."""
    stream = open_file(file)
    # Hadoop's parts are called part-00000, compressed or not.
    packed = suffixes(file)[1] or _packing(stream)
    return Unpacked(stream, packed) if packed else stream  # type: ignore[return-value]


def _packing(stream: Any) -> str:
    """Return the suffix of the compression that a file's first bytes show, or an empty text."""
    start = guarded(lambda: bytes(stream.read(6)), "")
    stream.seek(0)
    return next((suffix for magic, suffix in _MAGIC.items() if start.startswith(magic)), "")


def guarded(read: Callable[[], T], file: str) -> T:
    """Return what `read` gives; a DataError that names the file if it cannot be read."""
    try:
        return read()
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"cannot read {shown(file)}: {first_line(error)}; "
            "is it cut short, or not what its suffix says?"
        ) from error


def head(file: str, most_bytes: int) -> bytes:
    """The first bytes of a file's unpacked content; raises DataError if it cannot be read."""
    parts: list[bytes] = []
    with open_unpacked(file) as stream:
        while part := guarded(lambda: stream.read(most_bytes - sum(map(len, parts))), file):
            parts.append(part)
    return b"".join(parts)


class _XzStreams:
    """The streams of an xz file, with zeros in multiples of four between and behind them."""

    def __init__(self, packed: Any) -> None:
        self._packed, self._data = packed, b""
        # The format before it, which has but one stream a file, has no mark that tells it.
        self._format = lzma.FORMAT_AUTO
        self._stream: lzma.LZMADecompressor | None = None

    def readinto(self, free: Any) -> int:
        while self._stream is not None or self._begins():
            stream = self._stream
            assert stream is not None, "it has begun"
            if stream.needs_input and not self._more():
                raise EOFError("the file ends within a stream")
            part = stream.decompress(self._data, len(free))
            self._data = b""
            if stream.eof:
                self._data, self._stream = stream.unused_data, None
            if part:
                free[: len(part)] = part
                return len(part)
        return 0

    def close(self) -> None:
        self._stream = None

    def _more(self) -> bool:
        """Make sure that packed bytes are at hand; False at the file's end."""
        self._data = self._data or self._packed.read(_PACKED_BYTES)
        return bool(self._data)

    def _begins(self) -> bool:
        """Go to the next stream; False at the file's end."""
        zeros = 0
        while self._more() and self._format == lzma.FORMAT_XZ and not self._data[0]:
            found, self._data = self._data, self._data.lstrip(b"\0")
            zeros += len(found) - len(self._data)
        if zeros % 4:
            begin = self._packed.tell() - len(self._data) - zeros
            raise OSError(f"{zeros} zero bytes from byte {begin} on are no xz stream")
        if self._data:
            self._stream = lzma.LZMADecompressor(self._format)
            self._format = lzma.FORMAT_XZ
        return bool(self._data)


_STREAMS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda packed: gzip.GzipFile(fileobj=packed, mode="rb"),
    ".bz2": lambda packed: pa.CompressedInputStream(packed, "bz2"),
    ".xz": _XzStreams,
    ".zst": lambda packed: pa.CompressedInputStream(packed, "zstd"),
}
COMPRESSIONS = tuple(_STREAMS)


class Unpacked(io.RawIOBase):
    """The content of a compressed file of one or several streams, which stands at its start.

    >>> import bz2
    >>> both = bz2.compress(b"1,2\\n") + bz2.compress(b"3,4\\n")
    >>> Unpacked(io.BytesIO(both), ".bz2").readall()
    b'1,2\\n3,4\\n'
    >>> Unpacked(io.BytesIO(both + b"x"), ".bz2").readall()
    Traceback (most recent call last):
    OSError: bz2 decompress failed: data is not bz2-compressed (no magic header), by byte 89
    """

    def __init__(self, packed: Any, suffix: str) -> None:
        self._packed, self._stream = packed, _STREAMS[suffix](packed)

    def readable(self) -> bool:
        """Always true."""
        return True

    def readinto(self, free: Any) -> int:
        """Fill a buffer; how many bytes there were, 0 at the file's end.

        Raises OSError if a stream is cut short or damaged, or something else is behind one; the
        message names a byte that was read by then.
        """
        if not len(free):
            return 0  # A decompressor that may give nothing calls that an error.
        try:
            return int(self._stream.readinto(free))
        except _FAILURES as error:
            raise OSError(f"{error}, by byte {self._packed.tell()}") from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self.closed:
            self._stream.close()
            self._packed.close()
        super().close()
