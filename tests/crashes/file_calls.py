"""Every call that changes files in a folder: seen, counted, and made to fail or to be the last."""

import builtins
import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from disk import Disk

from placer.files import folders

Fate = Literal["error", "full", "short", "killed", "torn"]
"""What becomes of a call: an error of the device, a full disk, fewer bytes written than given, the
end of the process before the call, or in its midst with half of the bytes written."""


class Killed(BaseException):
    """The process is gone: nothing of it touches a file any more."""


@dataclass(frozen=True)
class Fault:
    """What becomes of the call with a number."""

    number: int
    fate: Fate


class FileCalls:
    """Calls that change files below a folder, as Python makes them.

    Parameters
    ----------
    root : Path
    fault : Fault, optional
    disk : Disk, optional
        Learns of each call that was made.

    Attributes
    ----------
    names : list of str
        The calls by kind, in their order.
    """

    def __init__(self, root: Path, fault: Fault | None = None, disk: Disk | None = None) -> None:
        self.root, self.fault, self.disk = root.resolve(), fault, disk
        self.names: list[str] = []
        self._gone = False
        self._paths: dict[int, str] = {}
        self._descriptors: set[int] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator["FileCalls"]:
        """Watch what is called within the block."""
        with contextlib.ExitStack() as stack:
            for name in ("rename", "replace", "unlink", "remove", "mkdir", "rmdir", "link"):
                self._patch(stack, os, name, self._entry(name, getattr(os, name)))
            self._patch(stack, os, "fsync", self._fsync(os.fsync))
            self._patch(stack, os, "open", self._os_open(os.open))
            self._patch(stack, os, "close", self._close(os.close))
            self._patch(stack, os, "pwrite", self._pwrite(os.pwrite))
            self._patch(stack, os, "ftruncate", self._ftruncate(os.ftruncate))
            self._patch(stack, os, "chmod", self._other("chmod", os.chmod))
            self._patch(stack, folders, "exchange", self._exchange(folders.exchange))
            opened = self._opened(io.open)
            self._patch(stack, io, "open", opened)
            self._patch(stack, builtins, "open", opened)
            try:
                yield self
            finally:
                if self._gone:
                    self._let_go()

    def _let_go(self) -> None:
        """Close what a process had open, as the system does at its end; with it go its locks."""
        for descriptor in list(self._descriptors):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _patch(self, stack: contextlib.ExitStack, where: Any, name: str, call: Any) -> None:
        stack.enter_context(mock.patch.object(where, name, call))

    def path_of(self, path: Any, dir_fd: int | None = None) -> str | None:
        """A path below the folder, relative to it; None elsewhere."""
        if isinstance(path, int):
            return self._paths.get(path)
        text = os.fsdecode(path)
        if dir_fd is not None:
            above = self._paths.get(dir_fd)
            return None if above is None else os.path.normpath(f"{above}/{text}")
        relative = os.path.relpath(text, self.root)
        return None if relative.startswith("..") else relative

    def forget(self, descriptor: int) -> None:
        """A file is closed."""
        self._paths.pop(descriptor, None)
        self._descriptors.discard(descriptor)

    def begin(self, name: str, path: str) -> Fate | None:
        """Count a call, and let it fail if it is its turn; "short" and "torn" are the caller's."""
        if self._gone:
            raise Killed
        number = len(self.names)
        self.names.append(name)
        if self.fault is None or self.fault.number != number:
            return None
        fate = self.fault.fate
        if fate == "killed" or (fate == "torn" and name != "write"):
            self.die()
        if fate in ("error", "full") or name != "write":
            code = errno.EIO if fate == "error" else errno.ENOSPC
            raise OSError(code, os.strerror(code), path)
        return fate

    def die(self) -> None:
        """End: what cleans up afterwards can touch nothing."""
        self._gone = True
        raise Killed

    def tell(self, change: str, *about: Any) -> None:
        """Let the disk know."""
        if self.disk is not None:
            getattr(self.disk, change)(*about)

    def _entry(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *more: Any, **known: Any) -> Any:
            fd = known.get("dir_fd")
            own = self.path_of(path, fd)
            if own is None:
                return call(path, *more, **known)
            self.begin(name, own)
            result = call(path, *more, **known)
            to = (self.path_of(more[0]),) if name in ("rename", "replace", "link") else ()
            change = {"replace": "rename", "remove": "unlink", "rmdir": "unlink"}.get(name, name)
            self.tell(change, own, *to)
            return result

        return called

    def _other(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(path: Any, *more: Any, **known: Any) -> Any:
            own = self.path_of(path)
            if own is not None:
                self.begin(name, own)
            return call(path, *more, **known)

        return called

    def _exchange(self, call: Callable[[Path, Path], bool]) -> Callable[[Path, Path], bool]:
        def called(one: Path, other: Path) -> bool:
            own, its = self.path_of(one), self.path_of(other)
            assert own is not None
            self.begin("exchange", own)
            done = call(one, other)
            if done:
                self.tell("exchange", own, its)
            return done

        return called

    def _os_open(self, call: Callable[..., int]) -> Callable[..., int]:
        def called(path: Any, flags: int, *more: Any, **known: Any) -> int:
            own = self.path_of(path, known.get("dir_fd"))
            makes = own is not None and bool(flags & os.O_CREAT)
            new = makes and not (self.root / str(own)).exists()
            if makes:
                self.begin("open", str(own))
            descriptor = call(path, flags, *more, **known)
            if own is not None:
                self._paths[descriptor] = own
                self._descriptors.add(descriptor)
                if new:
                    self.tell("create", own)
            return descriptor

        return called

    def _close(self, call: Callable[[int], None]) -> Callable[[int], None]:
        def called(descriptor: int) -> None:
            self.forget(descriptor)
            call(descriptor)

        return called

    def _fsync(self, call: Callable[[Any], None]) -> Callable[[Any], None]:
        def called(file: Any) -> None:
            descriptor = file if isinstance(file, int) else file.fileno()
            own = self._paths.get(descriptor)
            if own is not None:
                self.begin("fsync", own)
            call(descriptor)
            if own is not None:
                # Libraries that are no Python write as they like: what is there is what counts.
                place = self.root / own
                content = place.read_bytes() if place.is_file() else None
                self.tell("fsync", own, content)

        return called

    def _pwrite(self, call: Callable[..., int]) -> Callable[..., int]:
        def called(descriptor: int, content: Any, at: int) -> int:
            own = self._paths.get(descriptor)
            if own is None:
                return call(descriptor, content, at)
            view = memoryview(content).cast("B")
            return self.written(own, view, at, lambda part: call(descriptor, part, at))

        return called

    def written(
        self, own: str, view: memoryview, at: int, call: Callable[[memoryview], int]
    ) -> int:
        """Write, all or half of it."""
        fate = self.begin("write", own)
        if fate in ("short", "torn"):
            view = view[: max(len(view) // 2, 1)]
        done = call(view)
        self.tell("write", own, at, bytes(view[:done]))
        if fate == "torn":
            self.die()
        return done

    def _ftruncate(self, call: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def called(descriptor: int, size: int) -> None:
            own = self._paths.get(descriptor)
            if own is not None:
                self.begin("truncate", own)
            call(descriptor, size)
            if own is not None:
                self.tell("truncate", own, size)

        return called

    def _opened(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(
            file: Any, mode: str = "r", buffering: int = -1, *more: Any, **known: Any
        ) -> Any:
            own = self.path_of(file)
            if own is None or not set(mode) & set("wax+"):
                return call(file, mode, buffering, *more, **known)
            place = self.root / own
            is_new = not isinstance(file, int) and not place.exists()
            self.begin("open", own)
            raw = _Watched(file, mode.replace("b", "").replace("t", ""), self, own)
            if is_new:
                self.tell("create", own)
            elif "w" in mode:
                self.tell("truncate", own, 0)
            if buffering == 0:
                return raw
            kind = io.BufferedRandom if "+" in mode else io.BufferedWriter
            buffered: Any = kind(raw)
            if "b" in mode:
                return buffered
            return io.TextIOWrapper(buffered, *more, **known)

        return called


class _Watched(io.FileIO):
    """An open file whose writes are seen."""

    def __init__(self, file: Any, mode: str, calls: FileCalls, own: str) -> None:
        super().__init__(file, mode)
        self._calls, self._own = calls, own
        calls._paths[self.fileno()] = own

    def write(self, content: Any) -> int:
        at = os.fstat(self.fileno()).st_size if "a" in self.mode else self.tell()
        view = memoryview(content).cast("B")
        write = super().write
        return self._calls.written(self._own, view, at, lambda part: write(part) or 0)

    def truncate(self, size: int | None = None) -> int:
        size = self.tell() if size is None else size
        self._calls.begin("truncate", self._own)
        super().truncate(size)
        self._calls.tell("truncate", self._own, size)
        return size

    def close(self) -> None:
        if not self.closed:
            self._calls.forget(self.fileno())
        super().close()
