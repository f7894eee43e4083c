"""Files and folders that are either whole or not there: all results are written through here."""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import secrets
import shlex
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from placer.errors import PlacerError
from placer.file_locks import is_at, locked_folder, take_lock
from placer.read_files import open_file

StrPath = str | os.PathLike[str]
T = TypeVar("T")


_MOST_NAME_BYTES = 255
_PARTIAL = re.compile(r"\..*\.[0-9a-z_]{8}\.placer-partial")
"""Names of files that are being written."""


@contextlib.contextmanager
def replacing(path: StrPath) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it becomes `path`, else it is removed.

    Data and folder are flushed to disk, so that a crash leaves the old file or the new one, never
    a part of one. The file keeps the mode of the one before it, and a symbolic link stays one. What
    killed processes left beside it is removed.

    Raises PlacerError if the folder cannot be written or the disk is full, or there is something at
    `path` that is no regular file, as a device or a folder; it is untouched then.
    """
    target = _place_of(Path(path))
    there = "nothing was changed there"
    try:
        make_folder(target.parent)
        remove_dead_files(target.parent)
        with temporary_beside(target) as temporary:
            yield temporary
            sync(temporary)
            if target.exists():
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            temporary.replace(target)
            there = "the new one is there, and may be gone after a loss of power"
        sync_folder(target.parent)
    except OSError as error:
        raise PlacerError(f"cannot write {target}: {error.strerror or error}; {there}") from error


def make_folder(path: Path) -> None:
    """Make a folder and those above it, as far as they are not there, such that they stay there.

    Raises OSError if one of them cannot be made.
    """
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def check_place(
    path: StrPath, what: Literal["file", "folder"] = "file", makes_folders: bool = False
) -> None:
    """Find out before long work whether its result can be written, and where.

    Folders above it have to be there, unless the work makes them.

    >>> check_place("/nowhere/plan.json")
    Traceback (most recent call last):
    placer.errors.PlacerError: cannot write /nowhere/plan.json: there is no folder /nowhere; make \
it: mkdir -p /nowhere
    """
    target = Path(path)
    try:
        if what == "folder" and target.exists():
            if not target.is_dir():
                raise PlacerError(f"cannot write {path}: it is a file; name a folder")
            above = target
        else:
            above = _place_of(target).absolute().parent
        while makes_folders and not above.exists():
            above = above.parent
        if not above.exists():
            make = shlex.join(["mkdir", "-p", str(above)])
            raise PlacerError(f"cannot write {path}: there is no folder {above}; make it: {make}")
        # Rights alone do not tell: a disk may be mounted to be read, or no disk at all.
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise PlacerError(f"cannot write {path}: {error.strerror or error}") from error


def _place_of(path: Path) -> Path:
    """Return where a file goes: at the end of a symbolic link, if there is one."""
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        kind = stat.S_IFREG
    except OSError as error:
        raise PlacerError(f"cannot write {path}: {error.strerror or error}") from error
    if not stat.S_ISREG(kind):
        what = "a folder" if stat.S_ISDIR(kind) else "a device, a pipe or a socket, and no file"
        raise PlacerError(f"cannot write {path}: it is {what}; name a file")
    return Path(os.path.realpath(path)) if path.is_symlink() else path


@contextlib.contextmanager
def temporary_beside(target: Path) -> Iterator[Path]:
    """Make a new file, locked while it is written; remove what is there afterwards."""
    while True:
        # A long name would be too long with more added.
        name = f".{target.name[:40]}.{secrets.token_hex(4)}.placer-partial"
        temporary = target.with_name(name)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        # Between its making and its lock, another process may have taken it for a dead one.
        if take_lock(descriptor) and is_at(descriptor, temporary):
            break
        os.close(descriptor)
    try:
        if target.exists():  # Which may be private.
            temporary.chmod(0o600)
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        os.close(descriptor)


def remove_dead_files(folder: Path) -> None:
    """Remove files that processes were writing into a folder when they were killed.

    A living writer holds the lock of its file.
    """
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if _PARTIAL.fullmatch(entry.name)]
    for name in names:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
                if is_file and take_lock(descriptor) and is_at(descriptor, folder / name):
                    (folder / name).unlink()
            finally:
                os.close(descriptor)


def is_name(text: str) -> bool:
    """Return whether a text that others wrote names a file in a folder, and nothing elsewhere.

    >>> is_name("counts.parquet"), is_name("../counts.parquet"), is_name("..")
    (True, False, False)
    """
    if text in ("", ".", "..") or "\0" in text or Path(text).name != text:
        return False
    try:
        return len(os.fsencode(text)) <= _MOST_NAME_BYTES
    except UnicodeEncodeError:  # Half of a pair of surrogates, which JSON can hold.
        return False


def write_text(path: StrPath, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_text(f"{folder}/plan.json", "{}")
    ...     os.listdir(folder)
    ['plan.json']
    """
    # Names of files may hold bytes that are no UTF-8; JSON has an escape for these.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: StrPath, content: bytes) -> None:
    """Write `content` to `path`, atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def replacing_parts(file: Path, parts: Callable[[], Iterable[Path]]) -> Iterator[set[str]]:
    """Replace a file and its parts: further files, which it names and whose names have their hash.

    `parts` finds those that are there, beside the file. Within the block, write the new parts first
    and the file that names them last, and add the parts' names to the set that this yields.
    Afterwards the parts that are not in it are removed; after an error before the file was
    replaced, the new ones. So a crash leaves the old file or the new one, with its parts, and the
    rename of the file publishes all of them. Writers wait for one another; see `read_parts` for
    readers.
    """
    try:
        make_folder(file.parent)
        with locked_folder(file.parent):
            before, version = set(parts()), _version(file)
            names: set[str] = set()
            try:
                yield names
            except BaseException:
                # A file that was replaced before the error needs its parts.
                if _version(file) == version:
                    _remove(part for part in parts() if part not in before)
                raise
            _remove(part for part in before if part.name not in names)
    except OSError as error:
        raise PlacerError(
            f"cannot write {file}: {error.strerror or error}; nothing was changed there"
        ) from error


def read_parts(file: StrPath, read: Callable[[], T]) -> T:
    """Read a file with its parts, again if it was replaced meanwhile.

    `read` reads all, and raises PlacerError if a part is missing.
    """
    while True:
        before = _version(file)
        try:
            return read()
        except PlacerError:
            if _version(file) == before:
                raise


def _version(file: StrPath) -> tuple[int, int] | None:
    """Return what is another one as soon as a file is replaced; None without one."""
    try:
        status = Path(file).stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Wait until the list of a folder's files is on disk, where the file system can say so."""
    try:
        sync(path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The size and hash of a file, as a manifest records them."""

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
        """Return true: the file is open for writing."""
        return True

    def tell(self) -> int:
        """Return bytes written so far."""
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

        Raises OSError if it could not be opened, or not all is on disk.
        """
        self.close()
        if self._failure is not None:
            raise self._failure
        return FileRecord(self._size_bytes, self._digest.hexdigest())


def sha256_file(path: StrPath) -> str:
    """Hash a regular file's content: hexadecimal SHA-256; OSError for what is none."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Return the hexadecimal SHA-256 of a JSON value, whatever the order of its keys.

    >>> sha256_json({"a": 1, "b": 2}) == sha256_json({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


SEAL = "sha256"
"""Plans, profiles, manifests and calibrations carry a hash of all other keys, so that changes show.

A plan or calibration without one was written by hand or by an earlier version, and is read as it
is."""


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Add the hash of its content to a document, as its last key.

    >>> sealed({"schema_version": 1})["sha256"][:8]
    '04212149'
    """
    content = {name: value for name, value in document.items() if name != SEAL}
    return content | {SEAL: sha256_json(content)}
