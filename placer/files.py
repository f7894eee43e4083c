"""Files and folders that are either whole or not there: all results are written through here."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from placer.errors import PlacerError

StrPath = str | os.PathLike[str]


@contextlib.contextmanager
def replacing(path: StrPath) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it becomes `path`, else it is removed.

    The data is flushed to disk before the rename, so that a crash leaves the old
    file or the new one, never a part of one.

    Raises
    ------
    PlacerError
        If the folder cannot be written or the disk is full; `path` is then untouched.
    """
    target = Path(path)
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        sync(temporary)
        # mkstemp makes files that their owner alone may read; a result should follow the umask.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
    except OSError as error:
        raise PlacerError(
            f"cannot write {target}: {error.strerror or error}; nothing was changed there"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_text(path: StrPath, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_text(f"{folder}/plan.json", "{}")
    ...     os.listdir(folder)
    ['plan.json']
    """
    write_bytes(path, text.encode())


def write_bytes(path: StrPath, content: bytes) -> None:
    """Write `content` to `path`, atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def replacing_parts(parts: Callable[[], Iterable[Path]]) -> Iterator[set[str]]:
    """Replace a file and its parts: further files, which it names and whose names have their hash.

    Within the block, write the new parts first and the file that names them last, and add the
    parts' names to the set that this yields. Afterwards the parts that are not in it are removed;
    after an error, the new ones. So a crash leaves the old file or the new one, with its parts.

    Parameters
    ----------
    parts : callable
        Finds the parts that are there.
    """
    before = set(parts())
    names: set[str] = set()
    try:
        yield names
    except PlacerError:
        _remove(part for part in parts() if part not in before)
        raise
    _remove(part for part in before if part.name not in names)


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


class HiddenFolder:
    """A folder that is written under a hidden name, and appears complete by one rename.

    Parameters
    ----------
    target : Path
        Where it appears. Beside it, ``.<name>.partial`` is written, and what is replaced is
        ``.<name>.replaced`` for a moment.

    Attributes
    ----------
    partial : Path
        Where its files belong until then.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.partial = target.with_name(f".{target.name}.partial")
        self._begun = False

    def begin(self) -> None:
        """Make the empty folder; first remove what a killed process left under its name."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir()
        self._begun = True

    def publish(self) -> None:
        """Rename the folder to its final name, in place of an existing one."""
        sync(self.partial)
        if self.target.exists():
            self.target.rename(self.target.with_name(f".{self.target.name}.replaced"))
        self.partial.rename(self.target)
        sync(self.target.parent)

    def discard(self) -> None:
        """Remove the hidden folder if it was not published."""
        if self._begun:
            shutil.rmtree(self.partial, ignore_errors=True)


@contextlib.contextmanager
def new_folder(path: StrPath) -> Iterator[Path]:
    """Yield a hidden folder beside `path`; on success it is renamed to `path`, else removed.

    Raises
    ------
    PlacerError
        If there is something at `path` already, or it cannot be written, as on a full disk.
    """
    folder = HiddenFolder(Path(path))
    target = folder.target
    if target.exists() or target.is_symlink():
        raise PlacerError(f"{target} exists already; give another name, or remove it")
    try:
        folder.begin()
        yield folder.partial
        folder.publish()
    except OSError as error:
        raise PlacerError(
            f"cannot write {target}: {error.strerror or error}; nothing was left there"
        ) from error
    finally:
        folder.discard()


def sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The size and hash of a file, as a manifest records them.

    Attributes
    ----------
    size_bytes : int
    sha256 : str
    """

    size_bytes: int
    sha256: str


class HashedFile(io.IOBase):
    """A file that is hashed while it is written, and whose failures are raised by `finish` alone.

    What is written comes from many processes, which must all go on sending it: so a full disk
    does not stop the one that writes.
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
        """Always true: the file is open for writing."""
        return True

    def tell(self) -> int:
        """Bytes written so far."""
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

    def finish(self) -> FileRecord:
        """Close the file and return its size and SHA-256.

        Raises
        ------
        OSError
            If it could not be opened, or not all is on disk.
        """
        self.close()
        if self._failure is not None:
            raise self._failure
        return FileRecord(self._size_bytes, self._digest.hexdigest())


def sha256_file(path: StrPath) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hexadecimal SHA-256 of a JSON value, whatever the order of its keys.

    >>> sha256_json({"a": 1, "b": 2}) == sha256_json({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
