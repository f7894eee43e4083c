"""Which log it is: known again when a run goes on, and seen to change while it is read."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from placer.errors import DataError

_SAMPLES = 16
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """A file of a log, by its size and some of its bytes.

    Attributes
    ----------
    name : str
        Without its folder, which may change.
    size_bytes : int
    sha256 : str
        Of 16 blocks of 64 KiB, from its first byte to its last: logs are too large to read whole.
    """

    name: str
    size_bytes: int
    sha256: str


def identify(files: Sequence[str]) -> tuple[FileIdentity, ...]:
    """What a log's files are known by.

    Raises
    ------
    DataError
        If one cannot be read.
    """
    return tuple(_identity(Path(file)) for file in files)


def _identity(path: Path) -> FileIdentity:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            size_bytes = file.seek(0, 2)
            last = max(size_bytes - _SAMPLE_BYTES, 0)
            for place in sorted({last * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)}):
                file.seek(place)
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    return FileIdentity(path.name, size_bytes, digest.hexdigest())


FileState = tuple[int, int, int]
"""Number, size and time of change of a file."""


def states(files: Sequence[str]) -> dict[str, FileState]:
    """What changes when a file is replaced or written; pipes have none."""
    found = {}
    for file in files:
        try:
            status = Path(file).stat()
        except OSError:
            continue  # Whoever reads it says so.
        if S_ISREG(status.st_mode):
            found[file] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


def check_unchanged(before: dict[str, FileState]) -> None:
    """Check that files are as they were: a log is read twice or more.

    Raises
    ------
    DataError
        Names the first that changed.
    """
    now = states(list(before))
    for file, state in before.items():
        if now.get(file) != state:
            raise DataError(
                f"{file} was changed while it was read; begin again when nothing writes to it"
            )
