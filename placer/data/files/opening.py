"""Open the files of a log on any store, unpack them, and detect changed files.

All streams of a compressed file are read, to its last byte. Arrow's readers of bz2 and zstd and
Python's reader of gzip refuse other bytes after a stream. Python's reader of xz silently ends
there, so it is not used.
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
_MAGIC = {
    b"\x1f\x8b\x08": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz", b"(\xb5/\xfd": ".zst",
    b'\x04"M\x18': ".lz4",
}  # fmt: skip
"""The first bytes of compressed files."""
_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16


def suffixes(file: str) -> tuple[str, str]:
    """Return the suffixes of a file's format and of its compression, in lower case.

    >>> suffixes("s3://logs/day_0.CSV.gz?region=eu-west-1"), suffixes("day_0")
    (('.csv', '.gz'), ('', ''))
    """
    path = path_of(file)
    packed = path.suffix.lower()
    if packed not in COMPRESSIONS:
        return packed, ""
    return path.with_suffix("").suffix.lower(), packed


def open_file(file: str) -> Any:
    """Open a seekable file without unpacking; raises DataError if it cannot be opened."""
    try:
        if scheme_of(file) == "file":
            return Path(local_path(file)).open("rb")
        system, path = store_of(file)
        return system.open_input_file(path)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise DataError(f"cannot open {shown(file)}: {reason}") from error


def open_unpacked(file: str) -> IO[bytes]:
    """Open a file, unpacked if its suffix or its first bytes say that it is compressed."""
    stream = open_file(file)
    packed = suffixes(file)[1]
    if not packed:  # Hadoop's parts are called part-00000, compressed or not.
        start = guarded(lambda: bytes(stream.read(6)), file)
        stream.seek(0)
        packed = next((suffix for magic, suffix in _MAGIC.items() if start.startswith(magic)), "")
    return Unpacked(stream, packed) if packed else stream  # type: ignore[return-value]


def guarded(read: Callable[[], T], file: str) -> T:
    """Return what `read` returns. Raises a DataError that names the file if reading fails."""
    fix = "; is it cut short, or not what its suffix says?"
    with reported(f"cannot read {shown(file)}", (OSError, pa.ArrowException), fix):
        return read()


def head(file: str, most_bytes: int) -> bytes:
    """Return the first bytes of a file, unpacked. Raises DataError if reading fails."""
    with open_unpacked(file) as stream:
        return read_up_to(stream, most_bytes, file)


def read_up_to(stream: IO[bytes], most_bytes: int, file: str) -> bytes:
    """Return a file's next `most_bytes` bytes, or fewer at its end."""
    parts: list[bytes] = []
    while part := guarded(lambda: stream.read(most_bytes - sum(map(len, parts))), file):
        parts.append(part)
    return b"".join(parts)


class _XzStreams:
    """The streams of an xz file. After each, there may be zeros: a multiple of four."""

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
    """Yield the unpacked content of an xz file, in parts that are not empty."""
    # The older LZMA format has one stream a file and no magic number: let the library decide.
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
    ".lz4": lambda packed: pa.CompressedInputStream(packed, "lz4"),
}
COMPRESSIONS = tuple(_STREAMS)


class Unpacked(io.RawIOBase):
    """The unpacked content of a compressed file with one or more streams.

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
        """Fill a buffer and return the number of bytes, 0 at the file's end.

        Raises OSError if a stream is cut short or damaged, or is followed by other bytes. The
        message names the number of bytes read so far.
        """
        if not len(free):
            return 0  # A decompressor takes an empty buffer for an error.
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
    """Identity of a log's file: its size and a hash of some of its bytes."""

    name: str  # Without the folder, which may change.
    size_bytes: int
    # Hash of 16 blocks of 64 KiB, spread over the file: logs are too large to read whole.
    sha256: str


def identify(name: str) -> FileIdentity:
    """Return the identity of a log's file. Raises DataError if it cannot be read."""
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
"""A file's inode number, size in bytes and time of change in nanoseconds."""


def states(files: Sequence[str]) -> dict[str, FileState]:
    """Return the state of each file, which changes when it is replaced or written; not of pipes."""
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
            continue  # Reading the file reports the error.
        if S_ISREG(status.st_mode):
            found[file] = (status.st_ino, status.st_size, status.st_mtime_ns)
    for system, held in remote.values():
        with reported(f"cannot reach {shown(held[0][0])}", (OSError,)):
            infos = system.get_file_info([path for _, path in held])
        for (file, _), info in zip(held, infos, strict=True):
            if info.is_file:  # A store may not know its size or its time of change.
                found[file] = 0, info.size or 0, info.mtime_ns or 0
    return found


def check_unchanged(before: Mapping[str, FileState]) -> None:
    """Raise DataError if a file has changed: a log is read more than once."""
    now = states(list(before))
    for file, state in before.items():
        if now.get(file) != state:
            raise DataError(
                f"{shown(file)} was changed while it was read; begin again when nothing writes "
                "to it"
            )
