"""Write files atomically: a result is complete or not there. All results are written here."""

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
from placer.files.locks import is_at, locked_folder, take_lock
from placer.files.reading import open_file

StrPath = str | os.PathLike[str]
T = TypeVar("T")


_MOST_NAME_BYTES = 255
_PARTIAL = re.compile(r"\..*\.[0-9a-z_]{8}\.placer-partial")
"""Matches names of temporary files that are being written."""


@contextlib.contextmanager
def replacing(path: StrPath) -> Iterator[Path]:
    """Yield a temporary path beside `path`. On success it is renamed to `path`, else removed.

    Data and folder are flushed to disk, so a crash leaves the complete old or new file. The new
    file gets the mode of the old one, and a symbolic link stays a link. Temporary files that killed
    processes left there are removed.

    Raises PlacerError if the folder cannot be written, the disk is full, or `path` is not a regular
    file but, for example, a device or a folder. Then `path` is unchanged.
    """
    target = _place_of(Path(path))
    there = "nothing was changed there"
    try:
        with _made_folder(target.parent):
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


@contextlib.contextmanager
def _made_folder(path: Path) -> Iterator[None]:
    """Make a folder and its missing parents for a block; see `make_folder`.

    If the block fails, remove those that are empty.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    try:
        make_folder(path)
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # The first one that is not empty, and those above it.
            for folder in missing:
                folder.rmdir()
        raise


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, and flush them to disk.

    Raises OSError if a folder cannot be made.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def check_place(
    path: StrPath, what: Literal["file", "folder"] = "file", makes_folders: bool = False
) -> None:
    """Raise PlacerError unless a result can be written to `path`. Call it before long work.

    Parent folders must exist, unless the work makes them (`makes_folders`).

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
        # Try it: permissions do not show read-only mounts and the like.
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        raise PlacerError(f"cannot write {path}: {error.strerror or error}") from error


def _place_of(path: Path) -> Path:
    """Return the path to write a file to: the target if `path` is a symbolic link."""
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
    """Make a temporary file, locked within the block; remove it afterwards if it is still there."""
    while True:
        # Shorten the name, as a long name would become too long.
        name = f".{target.name[:40]}.{secrets.token_hex(4)}.placer-partial"
        temporary = target.with_name(name)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        # Before it is locked, another process may take it for a dead file and remove it.
        if take_lock(descriptor) and is_at(descriptor, temporary):
            break
        os.close(descriptor)
    try:
        if target.exists():  # It may be private.
            temporary.chmod(0o600)
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        os.close(descriptor)


def remove_dead_files(folder: Path) -> None:
    """Remove temporary files in a folder that killed processes left.

    Living writers hold the locks of their files, so these stay.
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
    """Return whether an untrusted text is a plain file name, which cannot leave its folder.

    >>> is_name("counts.parquet"), is_name("../counts.parquet"), is_name("..")
    (True, False, False)
    """
    if text in ("", ".", "..") or "\0" in text or Path(text).name != text:
        return False
    try:
        return len(os.fsencode(text)) <= _MOST_NAME_BYTES
    except UnicodeEncodeError:  # Half of a surrogate pair, which JSON can hold.
        return False


def write_text(path: StrPath, text: str) -> None:
    """Write `text` to `path` as UTF-8, atomically.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_text(f"{folder}/plan.json", "{}")
    ...     os.listdir(folder)
    ['plan.json']
    """
    # Names of files may have bytes that are not UTF-8; JSON has escapes for them.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: StrPath, content: bytes) -> None:
    """Write `content` to `path`, atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def replacing_parts(file: Path, parts: Callable[[], Iterable[Path]]) -> Iterator[set[str]]:
    """Replace a file and its parts. Parts are files beside it, named by their hash and by the file.

    `parts` finds all existing parts. Within the block, write the new parts, then the file that
    names them, and add names of parts to the set that this yields. Afterwards, parts that are not
    in the set are removed. If an error occurs before the file is replaced, new parts are removed
    instead. So a crash leaves the old or the new file with its parts: renaming the file publishes
    them. Writers wait for each other. Readers use `read_parts`.
    """
    try:
        with _made_folder(file.parent), locked_folder(file.parent):
            before, version = set(parts()), _version(file)
            names: set[str] = set()
            try:
                yield names
            except BaseException:
                # Keep new parts if the file was replaced before the error.
                if _version(file) == version:
                    _remove(part for part in parts() if part not in before)
                raise
            _remove(part for part in before if part.name not in names)
    except OSError as error:
        raise PlacerError(
            f"cannot write {file}: {error.strerror or error}; nothing was changed there"
        ) from error


def read_parts(file: StrPath, read: Callable[[], T]) -> T:
    """Return the result of `read`, which reads a file and its parts.

    If `read` raises PlacerError because a part is missing, and the file was replaced meanwhile,
    read again.
    """
    while True:
        before = _version(file)
        try:
            return read()
        except PlacerError:
            if _version(file) == before:
                raise


def _version(file: StrPath) -> tuple[int, int] | None:
    """Return a value that changes when a file is replaced; None without a file."""
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
    """Wait until a folder's list of files is on disk, if the file system supports it."""
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
    """A file that is hashed while it is written. Only `finish` raises errors of writing.

    Many processes send data to the process that writes, and must not be interrupted. So it
    continues without writing if, for example, the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self._size_bytes = 0
        self._digest = hashlib.sha256()
        self._failure: OSError | None = None
        self._file: BinaryIO | None = None
        with self._noted():
            self._file = path.open("wb")

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failure = self._failure or error

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._size_bytes

    def write(self, content: Any) -> int:
        """Append bytes, and return their number, even if writing fails."""
        size = memoryview(content).nbytes
        self._size_bytes += size
        if self._file is not None and self._failure is None:
            with self._noted():
                self._file.write(content)
            self._digest.update(content)
        return size

    def close(self) -> None:
        """Close the file after flushing it to disk."""
        file, self._file = self._file, None
        if file is not None:
            with self._noted(), file:
                file.flush()
                os.fsync(file.fileno())

    def finish(self) -> FileRecord:
        """Close the file and return its size and SHA-256.

        Raises OSError if the file could not be opened or completely written.
        """
        self.close()
        if self._failure is not None:
            raise self._failure
        return FileRecord(self._size_bytes, self._digest.hexdigest())


def sha256_file(path: StrPath) -> str:
    """Return the hexadecimal SHA-256 of a regular file. Raises OSError for other files."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Return the hexadecimal SHA-256 of a JSON value, independent of the order of keys.

    >>> sha256_json({"a": 1, "b": 2}) == sha256_json({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


SEAL = "sha256"
"""Key in plans, profiles, manifests and calibrations that holds a hash of all other keys.

A plan or calibration without this key was written by hand or by an earlier version, and is read
without the check."""


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document with the hash of its content added as the last key.

    >>> sealed({"schema_version": 1})["sha256"][:8]
    '04212149'
    """
    content = {name: value for name, value in document.items() if name != SEAL}
    return content | {SEAL: sha256_json(content)}
