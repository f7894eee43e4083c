"""The folder of plans that are kept, of bounded size."""

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from placer.errors import PlacerError
from placer.files import write_bytes
from placer.read_files import MOST_JSON_BYTES, LimitError, read_limited

FOLDER_VARIABLE = "PLACER_CACHE"
"""The variable that names another folder than the user's own for caches."""

MOST_BYTES = 512 << 20
"""Of all plans together: some 2,000 plans of 400 tables that list no hot ids."""

_NAMES = "[0-9a-f]" * 64 + ".plan"


def default_folder() -> Path:
    """Return ``plans`` in `FOLDER_VARIABLE`, or else in ``placer`` of the user's folder for caches.

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

    def load(self, key: str) -> bytes | None:
        """Read what was saved under a key, or return None.

        Raises
        ------
        PlacerError
            If there is something that cannot be read.
        """
        path = self.path(key)
        try:
            content = read_limited(path, min(self.most_bytes, MOST_JSON_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, LimitError) as error:
            raise PlacerError(f"it cannot be read: {error}") from error
        with contextlib.suppress(OSError):  # A folder that others own is read all the same.
            os.utime(path)
        return content

    def save(self, key: str, content: bytes) -> None:
        """Write a plan's file, atomically, and remove others where all are too large together.

        Raises
        ------
        PlacerError
            If it cannot be written, or is too large by itself.
        """
        if len(content) > min(self.most_bytes, MOST_JSON_BYTES):
            raise PlacerError(f"the plan takes {len(content)} bytes, too many for {self.folder}")
        write_bytes(self.path(key), content)
        files = self._files()
        too_many = sum(size for _, size, _ in files) - self.most_bytes
        for _, size, path in files:
            if too_many <= 0:
                break
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            too_many -= size

    def path(self, key: str) -> Path:
        """Return where the plan with a key is kept."""
        return self.folder / f"{key}.plan"

    def size(self) -> CacheSize:
        """Count the plans and their bytes."""
        files = self._files()
        return CacheSize(len(files), sum(size for _, size, _ in files))

    def clear(self) -> CacheSize:
        """Remove all plans; return how much was there."""
        before = self.size()
        for _, _, path in self._files():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        return before

    def _files(self) -> list[tuple[int, int, Path]]:
        """List when each plan was last used, its bytes and its path; the oldest first."""
        found = []
        for path in self.folder.glob(_NAMES):
            with contextlib.suppress(OSError):  # Another process has removed it.
                status = path.lstat()
                found.append((status.st_mtime_ns, status.st_size, path))
        return sorted(found)
