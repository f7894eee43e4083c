"""Opens the files of a log, wherever they are, and unpacks those that are compressed."""

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa

from placer.data.files.stores import first_line, is_uri, local_path, scheme_of, shown, store_of
from placer.data.files.unpacking import COMPRESSIONS, Unpacked
from placer.errors import DataError

T = TypeVar("T")

_MAGIC = {b"\x1f\x8b\x08": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz", b"(\xb5/\xfd": ".zst"}
"""How compressed files begin."""


def suffixes(file: str) -> tuple[str, str]:
    """The suffix of a file's format, and that of its compression, in lower case.

    >>> suffixes("s3://logs/day_0.CSV.gz?region=eu-west-1"), suffixes("day_0")
    (('.csv', '.gz'), ('', ''))
    """
    path = PurePosixPath(urlsplit(file).path if is_uri(file) else file)
    packed = path.suffix.lower()
    if packed not in COMPRESSIONS:
        return packed, ""
    return path.with_suffix("").suffix.lower(), packed


def open_file(file: str) -> Any:
    """A file as it is, open for reading at any place.

    Raises
    ------
    DataError
        If it cannot be opened.
    """
    try:
        if scheme_of(file) == "file":
            return Path(local_path(file)).open("rb")
        system, path = store_of(file)
        return system.open_input_file(path)
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise DataError(f"cannot open {shown(file)}: {reason}") from error


def open_unpacked(file: str) -> IO[bytes]:
    """A file's content from its start, unpacked where its suffix or its first bytes say so.

    Raises
    ------
    DataError
        If it cannot be opened.
    """
    stream = open_file(file)
    # Hadoop's parts are called part-00000, compressed or not.
    packed = suffixes(file)[1] or _packing(stream)
    return Unpacked(stream, packed) if packed else stream  # type: ignore[return-value]


def _packing(stream: Any) -> str:
    """The suffix of what a file at its start is compressed by; an empty one if by nothing."""
    start = guarded(lambda: bytes(stream.read(6)), "")
    stream.seek(0)
    return next((suffix for magic, suffix in _MAGIC.items() if start.startswith(magic)), "")


def guarded(read: Callable[[], T], file: str) -> T:
    """What `read` gives; a DataError that names the file if it cannot be read."""
    try:
        return read()
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"cannot read {shown(file)}: {first_line(error)}; "
            "is it cut short, or not what its suffix says?"
        ) from error


def head(file: str, most_bytes: int) -> bytes:
    """The first bytes of a file's unpacked content.

    Raises
    ------
    DataError
        If it cannot be read.
    """
    parts: list[bytes] = []
    with open_unpacked(file) as stream:
        while part := guarded(lambda: stream.read(most_bytes - sum(map(len, parts))), file):
            parts.append(part)
    return b"".join(parts)
