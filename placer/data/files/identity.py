"""Which log it is: known again when a run goes on, and seen to change while it is read."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any
from urllib.parse import urlsplit

from placer.data.files.opening import open_file
from placer.data.files.stores import first_line, is_uri, local_path, scheme_of, shown, store_of
from placer.errors import DataError

_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16


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
    path = PurePosixPath(urlsplit(name).path if is_uri(name) else name)
    return FileIdentity(path.name, size_bytes, digest.hexdigest())


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
    try:
        infos = system.get_file_info([path for _, path in held])
    except OSError as error:
        raise DataError(f"cannot reach {shown(held[0][0])}: {first_line(error)}") from error
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
