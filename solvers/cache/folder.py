"""The folder of plans that are kept, of bounded size."""

import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from placer.errors import PlacerError
from placer.files import write_bytes
from placer.read_files import MOST_JSON_BYTES, LimitError, read_limited
from solvers.cache.entry import Entry, decoded, encoded

FOLDER_VARIABLE = "PLACER_CACHE"
"""The variable that names another folder than the user's own for caches."""

MOST_BYTES = 512 << 20
"""Of all plans together: some 2,000 plans of 400 tables that list no hot ids."""

_NAME = re.compile(r"[0-9a-f]{64}\.plan")


def default_folder() -> Path:
    """``plans`` in `FOLDER_VARIABLE`, or else in ``placer`` of the user's folder for caches.

    That is ``$XDG_CACHE_HOME``, or ``~/.cache``, as the XDG Base Directory Specification has it.

    Raises
    ------
    PlacerError
        If the user has no home.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named).absolute() / "plans"
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "")
    try:
        home = caches if caches.is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise PlacerError(
            f"there is no folder for caches ({error}); name one in {FOLDER_VARIABLE}"
        ) from error
    return home / "placer" / "plans"


class CacheSize(NamedTuple):
    """Plans in a cache, and the bytes of their files."""

    plans: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PlanCache:
    """Plans on disk, by the hash of what they answer.

    Processes may share one: files appear whole, and are removed whole.

    Attributes
    ----------
    folder : path
    most_bytes : int
        Of all files; beyond, those that were used longest ago are removed.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache = PlanCache(folder)
    ...     print(cache.load("0" * 64), cache.size())
    None CacheSize(plans=0, bytes=0)
    """

    folder: Path = field(default_factory=default_folder)
    most_bytes: int = MOST_BYTES

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))

    def load(self, key: str) -> Entry | None:
        """The entry with a key, or None without one.

        Raises
        ------
        PlacerError
            If there is a file, and it is not what was saved under this key.
        """
        path = self._path(key)
        try:
            content = read_limited(path, min(self.most_bytes, MOST_JSON_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, LimitError) as error:
            raise PlacerError(f"{path} cannot be read: {error}") from error
        try:
            entry = decoded(content, key)
        except PlacerError as error:
            raise PlacerError(f"{path}: {error}") from error
        with contextlib.suppress(OSError):  # A folder that others own is read all the same.
            os.utime(path)
        return entry

    def save(self, entry: Entry) -> None:
        """Write an entry, atomically, and remove others where all are too large together.

        Raises
        ------
        PlacerError
            If it cannot be written, or is too large by itself.
        """
        content = encoded(entry)
        if len(content) > min(self.most_bytes, MOST_JSON_BYTES):
            raise PlacerError(f"the plan takes {len(content)} bytes, too many for {self.folder}")
        write_bytes(self._path(entry.key), content)
        self._trim()

    def size(self) -> CacheSize:
        """How much there is."""
        files = self._files()
        return CacheSize(len(files), sum(size for _, size, _ in files))

    def clear(self) -> CacheSize:
        """Remove all plans; how much was there."""
        before = self.size()
        for _, _, path in self._files():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        return before

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.plan"

    def _files(self) -> list[tuple[int, int, Path]]:
        """When each plan was last used, its bytes and its path; the oldest first."""
        found = []
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if _NAME.fullmatch(entry.name):
                        with contextlib.suppress(OSError):  # Another process has removed it.
                            status = entry.stat(follow_symlinks=False)
                            found.append((status.st_mtime_ns, status.st_size, Path(entry.path)))
        except OSError:
            return []
        return sorted(found)

    def _trim(self) -> None:
        files = self._files()
        too_many = sum(size for _, size, _ in files) - self.most_bytes
        for _, size, path in files:
            if too_many <= 0:
                return
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            too_many -= size
