"""Locks between processes, which the system takes back when their holder is gone, however it went.

They are advisory (``flock``): placer's own writers respect them. A file system without locks, as
some network mounts are, has none of this protection; writes are atomic there all the same.

The library filelock can lock neither a folder nor a file that is open already, and leaves its lock
files behind.
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
"""How long a writer waits for another one of the same files, in seconds."""
_BUSY = {errno.EACCES, errno.EAGAIN}


def take_lock(descriptor: int) -> bool:
    """Lock an open file or folder, at once; whether nobody else holds it.

    The lock goes when the descriptor is closed, or its process ends.
    """
    if _fcntl is None:
        return True
    try:
        _fcntl.flock(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _BUSY  # Else the file system has no locks.
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one at a path."""
    try:
        there = path.lstat()
    except OSError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def is_locked(path: Path) -> bool:
    """Return whether somebody writes a folder now."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not take_lock(descriptor)
    finally:
        os.close(descriptor)


_held: set[tuple[int, int]] = set()


def hold(descriptor: int) -> None:
    """Say that this process has locked a folder, and writes into it as it likes."""
    _held.add(_identity(descriptor))


def release(descriptor: int) -> None:
    """Close a folder that was held."""
    _held.discard(_identity(descriptor))
    os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def locked_folder(folder: Path, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the lock of a folder; first wait for another holder to finish.

    A folder that this process holds already is its own.

    Raises PlacerError if another process holds it for longer, and OSError if there is none.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + wait_s
        while _identity(descriptor) not in _held and not take_lock(descriptor):
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
    """Hold a folder for one run, which writes its name into ``.lock`` there.

    Raises PlacerError if another run holds the folder: which process on which machine, since when.
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
        with contextlib.suppress(OSError):  # On a full disk the lock holds without a name.
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
        os.close(descriptor)  # The holder before removed it in between.
