"""Write folders atomically: under a hidden name, then renamed when complete."""

import ctypes
import os
import shutil
from pathlib import Path

from placer.errors import PlacerError
from placer.files.atomic import make_folder, sync_folder
from placer.files.locks import is_at, take_lock


class HiddenFolder:
    """A folder that is written under a hidden name, and renamed when complete.

    It is written as ``.<name>.partial`` beside the `target`, and locked until then.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.partial = target.with_name(f".{target.name}.partial")
        self._descriptor: int | None = None

    def begin(self) -> None:
        """Make the empty hidden folder, and remove what a killed process left in it."""
        make_folder(self.target.parent)
        while True:
            self.partial.mkdir(exist_ok=True)
            descriptor = os.open(self.partial, os.O_RDONLY | os.O_NOFOLLOW)
            if not take_lock(descriptor):
                os.close(descriptor)
                raise PlacerError(
                    f"another process is writing {self.target}; wait for it, or name another folder"
                )
            if is_at(descriptor, self.partial):
                break
            os.close(descriptor)
        self._descriptor = descriptor
        for left in self.partial.iterdir():
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()

    def publish(self) -> None:
        """Rename the folder to its final name, replacing an existing folder."""
        sync_folder(self.partial)
        if not self.target.exists():
            self.partial.rename(self.target)
        elif not exchange(self.partial, self.target):
            replaced = self.target.with_name(f".{self.target.name}.replaced")
            self.target.rename(replaced)
            self.partial.rename(self.target)
        sync_folder(self.target.parent)
        if self.partial.exists():  # After the exchange, it is the old folder.
            shutil.rmtree(self.partial, ignore_errors=True)
        self._release()

    def discard(self) -> None:
        """Remove the hidden folder if it was not published."""
        if self._descriptor is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
            self._release()

    def _release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def exchange(one: Path, other: Path) -> bool:
    """Swap two files or folders atomically; return false if the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    at_working_folder, swap = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of <fcntl.h>, <linux/fs.h>.
    arguments = (at_working_folder, os.fsencode(one), at_working_folder, os.fsencode(other), swap)
    return bool(rename(*arguments) == 0)
