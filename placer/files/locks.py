"""Locks between processes. The system releases a lock when its process ends for any reason.

Locks are advisory (``flock``): only placer's writers respect them. A file system without locks,
such as some network mounts, does not give this protection. Writes are still atomic there.

The library filelock cannot lock folders or open files, and leaves lock files behind.
"""

import contextlib
import errno
import importlib
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from placer.errors import PlacerError

_fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

LOCK_NAME = ".lock"
WAIT_S = 300.0
"""Seconds to wait for another process that writes the same files."""
_BUSY = {errno.EACCES, errno.EAGAIN}


def take_lock(descriptor: int) -> bool:
    """Try to lock an open file or folder without waiting; return whether nobody else holds it.

    The lock ends when the descriptor is closed or the process ends.
    """
    if _fcntl is None:
        return True
    try:
        _fcntl.flock(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _BUSY  # Otherwise the file system has no locks.
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the file at a path."""
    try:
        there = path.lstat()
    except OSError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not take_lock(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked_folder(folder: Path, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the lock of a folder within the block; first wait until no other process holds it.

    Raises PlacerError if another process holds it for over `wait_s` seconds, and OSError if there
    is no such folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + wait_s
        while not take_lock(descriptor):
            if time.monotonic() > deadline:
                raise PlacerError(
                    f"another process has been writing into {folder} for {wait_s:.0f} s; "
                    "wait for it or end it, or write elsewhere"
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def one_run(folder: Path) -> Iterator[None]:
    """Lock a folder for one run, with process, machine and time in its file ``.lock``.

    Raises PlacerError if another run holds the folder. The message names that process.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _open_lock(folder)
    except OSError as error:
        raise PlacerError(f"cannot write into {folder}: {error.strerror or error}") from error
    path = folder / LOCK_NAME
    try:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"process {os.getpid()} on {socket.gethostname()} since {now}"
        with contextlib.suppress(OSError):  # On a full disk, the lock works without the text.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, holder.encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            if is_at(descriptor, path):
                path.unlink()
            if made:
                folder.rmdir()
        os.close(descriptor)


def _open_lock(folder: Path) -> int:
    path = folder / LOCK_NAME
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise PlacerError(f"{path} is no regular file; remove it")
        if not take_lock(descriptor):
            holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip()
            os.close(descriptor)
            raise PlacerError(
                f"{folder} is in use by another run: {holder or 'a process without a name'}; "
                "wait for it or end it, or name another folder"
            )
        if is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # The last holder removed the file in between.
