"""What a disk may hold after a loss of power, from the calls before it.

As in Pillai et al., "All File Systems Are Not Created Equal" (OSDI 2014): what was not flushed by
`fsync`, of a file its content and of a folder its list of names, may be on disk or not, in whatever
order. All subsets would be too many: here all or nothing of it, one change alone, and all but one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = 0


@dataclass(frozen=True)
class _Change:
    """Names that are set in folders (None: removed), bytes at a place of a file, or a flush."""

    files: frozenset[int]
    names: tuple[tuple[int, str, int | None], ...] = ()
    data: tuple[int, int, bytes] | None = None
    size: tuple[int, int] | None = None
    flushes: int | None = None


@dataclass
class _State:
    folders: dict[int, dict[str, int]]
    contents: dict[int, bytearray]

    def copy(self) -> "_State":
        return _State(
            {number: dict(names) for number, names in self.folders.items()},
            {number: bytearray(content) for number, content in self.contents.items()},
        )

    def apply(self, change: _Change) -> None:
        for folder, name, number in change.names:
            if number is None:
                self.folders[folder].pop(name, None)
            else:
                self.folders[folder][name] = number
        if change.data is not None:
            number, at, content = change.data
            held = self.contents[number]
            held.extend(bytes(max(at - len(held), 0)))
            held[at : at + len(content)] = content
        if change.size is not None:
            number, size = change.size
            held = self.contents[number]
            del held[size:]
            held.extend(bytes(size - len(held)))

    def write(self, place: Path, folder: int = _ROOT) -> None:
        """Make the files of a folder of this machine."""
        place.mkdir(parents=True, exist_ok=True)
        for name, number in self.folders[folder].items():
            if number in self.folders:
                self.write(place / name, number)
            else:
                (place / name).write_bytes(self.contents[number])

    def key(self, folder: int = _ROOT) -> tuple[object, ...]:
        """What is alike of states that look alike."""
        return tuple(
            (name, self.key(number) if number in self.folders else bytes(self.contents[number]))
            for name, number in sorted(self.folders[folder].items())
        )


@dataclass
class Disk:
    """The files of a folder, and what has changed in it since."""

    root: Path
    changes: list[_Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._next = _ROOT
        self._first = _State({}, {})
        self._read(self.root)
        self._now = self._first.copy()

    def _read(self, place: Path) -> int:
        number, self._next = self._next, self._next + 1
        if place.is_dir():
            self._first.folders[number] = {}
            for below in sorted(place.iterdir()):
                self._first.folders[number][below.name] = self._read(below)
        else:
            self._first.contents[number] = bytearray(place.read_bytes())
        return number

    # What was called ------------------------------------------------------------------------

    def create(self, path: str) -> None:
        """A new file."""
        self._add_names((path, self._made(is_folder=False)))

    def mkdir(self, path: str) -> None:
        """A new folder."""
        self._add_names((path, self._made(is_folder=True)))

    def rename(self, path: str, to: str) -> None:
        """A file or a folder that is called otherwise now."""
        self._add_names((path, None), (to, self._number(path)))

    def link(self, path: str, to: str) -> None:
        """A second name; of a file outside, whose content is on disk."""
        number = self._number(path)
        self._add_names((to, number))

    def exchange(self, path: str, other: str) -> None:
        """Two that have each other's name now."""
        one, two = self._number(path), self._number(other)
        self._add_names((path, two), (other, one))

    def unlink(self, path: str) -> None:
        """A name that is gone."""
        self._add_names((path, None))

    def write(self, path: str, at: int, content: bytes) -> None:
        """Bytes at a place of a file."""
        number = self._number(path)
        self._add(_Change(frozenset([number]), data=(number, at, content)))

    def truncate(self, path: str, size: int) -> None:
        """Another size of a file."""
        number = self._number(path)
        self._add(_Change(frozenset([number]), size=(number, size)))

    def fsync(self, path: str, content: bytes | None) -> None:
        """A flush; with the whole content of a file, in case that others than Python wrote it."""
        number = self._number(path)
        if content is not None and self._now.contents[number] != content:
            self.truncate(path, len(content))
            self.write(path, 0, content)
        self._add(_Change(frozenset([number]), flushes=number))

    def _made(self, is_folder: bool) -> int:
        number, self._next = self._next, self._next + 1
        for state in (self._first, self._now):
            if is_folder:
                state.folders[number] = {}
            else:
                state.contents[number] = bytearray()
        return number

    def _number(self, path: str) -> int:
        number = _ROOT
        for name in Path(path).parts:
            number = self._now.folders[number][name]
        return number

    def _add_names(self, *names: tuple[str, int | None]) -> None:
        found = []
        for path, number in names:
            place = Path(path)
            found.append((self._number(str(place.parent)), place.name, number))
        self._add(_Change(frozenset(folder for folder, _, _ in found), names=tuple(found)))

    def _add(self, change: _Change) -> None:
        self.changes.append(change)
        self._now.apply(change)

    # What may be there afterwards -------------------------------------------------------------

    def states(self) -> Iterator[_State]:
        """What a loss of power after each call may leave, each once."""
        seen = set()
        for stop in range(len(self.changes) + 1):
            flushed, open_ = self._divided(stop)
            chosen = [flushed, flushed | set(open_)]
            chosen += [flushed | {one} for one in open_]
            chosen += [(flushed | set(open_)) - {one} for one in open_]
            for numbers in chosen:
                state = self._after(numbers)
                key = state.key()
                if key not in seen:
                    seen.add(key)
                    yield state

    def flushed(self) -> _State:
        """What is there for certain after all calls."""
        return self._after(self._divided(len(self.changes))[0])

    def _divided(self, stop: int) -> tuple[set[int], list[int]]:
        """Of the first calls: those that are on disk, and those that may be."""
        flushed, open_ = set(), []
        for number, change in enumerate(self.changes[:stop]):
            later = self.changes[number + 1 : stop]
            if change.flushes is not None:
                continue
            if any(one.flushes in change.files for one in later if one.flushes is not None):
                flushed.add(number)
            else:
                open_.append(number)
        return flushed, open_

    def _after(self, numbers: set[int]) -> _State:
        state = self._first.copy()
        for number in sorted(numbers):
            state.apply(self.changes[number])
        return state
