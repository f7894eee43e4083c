"""Opens the files of a log, wherever they are, unpacks them, and tells whether they are as before.

All streams of a compressed file are read, to its last byte. Arrow's reader of bz2 and zstd and
Python's of gzip refuse bytes that are no stream behind one that is; Python's reader of xz ends a
file there without a word, and so is not used.
"""

import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa

from placer.data.files.stores import (
    first_line,
    local_path,
    path_of,
    reported,
    scheme_of,
    shown,
    store_of,
)
from placer.errors import DataError

T = TypeVar("T")

_PACKED_BYTES, _PART_BYTES = 1 << 17, 1 << 21
_FAILURES = (OSError, EOFError, lzma.LZMAError, zlib.error, pa.ArrowException)
_MAGIC = {b"\x1f\x8b\x08": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz", b"(\xb5/\xfd": ".zst"}
"""How compressed files begin."""
_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16


def suffixes(file: str) -> tuple[str, str]:
    """Return the suffix of a file's format, and that of its compression, in lower case.

    >>> suffixes("s3://logs/day_0.CSV.gz?region=eu-west-1"), suffixes("day_0")
    (('.csv', '.gz'), ('', ''))
    """
    path = path_of(file)
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
    packed = suffixes(file)[1]
    if not packed:  # Hadoop's parts are called part-00000, compressed or not.
        start = guarded(lambda: bytes(stream.read(6)), file)
        stream.seek(0)
        packed = next((suffix for magic, suffix in _MAGIC.items() if start.startswith(magic)), "")
    return Unpacked(stream, packed) if packed else stream  # type: ignore[return-value]


def guarded(read: Callable[[], T], file: str) -> T:
    """Return what `read` gives; a DataError that names the file if it cannot be read."""
    fix = "; is it cut short, or not what its suffix says?"
    with reported(f"cannot read {shown(file)}", (OSError, pa.ArrowException), fix):
        return read()


def head(file: str, most_bytes: int) -> bytes:
    """The first bytes of a file's unpacked content; raises DataError if it cannot be read."""
    with open_unpacked(file) as stream:
        return read_up_to(stream, most_bytes, file)


def read_up_to(stream: IO[bytes], most_bytes: int, file: str) -> bytes:
    """Return so many of a file's next bytes, fewer at its end alone."""
    parts: list[bytes] = []
    while part := guarded(lambda: stream.read(most_bytes - sum(map(len, parts))), file):
        parts.append(part)
    return b"".join(parts)


class _XzStreams:
    """The streams of an xz file, with zeros in multiples of four between and behind them."""

    def __init__(self, packed: Any) -> None:
        self._parts, self._part = _xz_parts(packed), b""

    def readinto(self, free: Any) -> int:
        self._part = self._part or next(self._parts, b"")
        count = min(len(free), len(self._part))
        free[:count], self._part = self._part[:count], self._part[count:]
        return count

    def close(self) -> None:
        self._parts.close()


def _xz_parts(packed: Any) -> Generator[bytes]:
    """Yield what the streams of an xz file hold; no part is empty."""
    # The format before it, which has but one stream a file, has no mark that tells it.
    format, data = lzma.FORMAT_AUTO, packed.read(_PACKED_BYTES)
    while data:
        stream = lzma.LZMADecompressor(format)
        while not stream.eof:
            data = data or packed.read(_PACKED_BYTES) if stream.needs_input else b""
            if stream.needs_input and not data:
                raise EOFError("the file ends within a stream")
            if part := stream.decompress(data, _PART_BYTES):
                yield part
            data = b""
        format, data, zeros = lzma.FORMAT_XZ, stream.unused_data, 0
        while (data := data or packed.read(_PACKED_BYTES)) and not data[0]:
            zeros, data = zeros + len(data), data.lstrip(b"\0")
            zeros -= len(data)
        if zeros % 4:
            begin = packed.tell() - len(data) - zeros
            raise OSError(f"{zeros} zero bytes from byte {begin} on are no xz stream")


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


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A file of a log, by its size and some of its bytes."""

    name: str  # Without its folder, which may change.
    size_bytes: int
    # Of 16 blocks of 64 KiB, from its first byte to its last: logs are too large to read whole.
    sha256: str


def identify(files: Sequence[str]) -> tuple[FileIdentity, ...]:
    """Return what a log's files are known by; raises DataError if one cannot be read."""
    return tuple(map(_identity, files))


def _identity(name: str) -> FileIdentity:
    digest = hashlib.sha256()
    try:
        with open_file(name) as file:
            size_bytes = file.seek(0, 2)
            last = max(size_bytes - _SAMPLE_BYTES, 0)
            for place in sorted({last * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)}):
                file.seek(place)
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise DataError(f"cannot read {shown(name)}: {reason}") from error
    return FileIdentity(path_of(name).name, size_bytes, digest.hexdigest())


FileState = tuple[int, int, int]
"""Number, size and time of change of a file."""


def states(files: Sequence[str]) -> dict[str, FileState]:
    """Return what changes when a file is replaced or written; pipes have none."""
    found = {}
    remote: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for file in files:
        if scheme_of(file) != "file":
            system, path = store_of(file)
            store = urlsplit(file)._replace(path="").geturl()
            remote.setdefault(store, (system, []))[1].append((file, path))
            continue
        try:
            status = Path(local_path(file)).stat()
        except OSError:
            continue  # Whoever reads it says so.
        if S_ISREG(status.st_mode):
            found[file] = (status.st_ino, status.st_size, status.st_mtime_ns)
    for system, held in remote.values():
        found |= _remote_states(system, held)
    return found


def _remote_states(system: Any, held: Sequence[tuple[str, str]]) -> dict[str, FileState]:
    """Size and time of change, which a store may not know, of a store's files."""
    with reported(f"cannot reach {shown(held[0][0])}", (OSError,)):
        infos = system.get_file_info([path for _, path in held])
    return {
        file: (0, info.size or 0, info.mtime_ns or 0)
        for (file, _), info in zip(held, infos, strict=True)
        if info.is_file
    }


def check_unchanged(before: Mapping[str, FileState]) -> None:
    """Check that files are as they were: a log is read twice or more."""
    now = states(list(before))
    for file, state in before.items():
        if now.get(file) != state:
            raise DataError(
                f"{shown(file)} was changed while it was read; begin again when nothing writes "
                "to it"
            )
