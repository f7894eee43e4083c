"""Files that are written, hashed and flushed to disk, and remember what went wrong."""

import contextlib
import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO


@dataclass(frozen=True, slots=True)
class Written:
    """What a file has become."""

    size_bytes: int
    sha256: str


class Sink(io.IOBase):
    """A file whose failures are raised by `finish` alone.

    What is written comes from many processes, which all have to go on bringing it: so a full disk
    must not stop the one who writes.
    """

    def __init__(self, path: Path) -> None:
        self._size_bytes = 0
        self._digest = hashlib.sha256()
        self._failure: OSError | None = None
        self._file: BinaryIO | None = None
        try:
            self._file = path.open("wb")
        except OSError as error:
            self._failure = error

    def writable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Bytes so far."""
        return self._size_bytes

    def write(self, content: Any) -> int:
        """Append bytes; all of them count as written."""
        size = memoryview(content).nbytes
        self._size_bytes += size
        if self._file is not None and self._failure is None:
            try:
                self._file.write(content)
            except OSError as error:
                self._failure = error
            self._digest.update(content)
        return size

    def close(self) -> None:
        """Wait until all is on disk."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if self._failure is None:
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._failure = error
        with contextlib.suppress(OSError):
            file.close()

    def finish(self) -> Written:
        """Close it; its size and SHA-256.

        Raises
        ------
        OSError
            If it could not be opened, or not all is on disk.
        """
        self.close()
        if self._failure is not None:
            raise self._failure
        return Written(self._size_bytes, self._digest.hexdigest())


def flush(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
