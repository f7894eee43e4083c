"""How keys become rows of a table, the way that trainers do it."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from placer.data.names import MappingKind
from placer.data.text_keys import Keys
from placer.errors import DataError

Rows = npt.NDArray[np.int64]


class OutOfRange(Exception):
    """An id that is no row; the reader, which knows the file and the place, reports it."""

    def __init__(self, position: int, raw_id: int) -> None:
        super().__init__(position, raw_id)
        self.position = position
        self.raw_id = raw_id


@dataclass(frozen=True, slots=True)
class Identity:
    """Ids are rows already; an id outside 0..rows-1 is an error."""

    kind: ClassVar[MappingKind] = "identity"
    rows: int

    def map(self, keys: Keys) -> Rows:
        """Return rows of `keys`, same shape.

        Raises OutOfRange at the first key that is not below `rows`; negative ids are among them.
        """
        if keys.size and int(keys.max()) >= self.rows:
            position = int(np.argmax(keys >= np.uint64(self.rows)))
            raise OutOfRange(position, int(keys.view(np.int64)[position]))
        return keys.view(np.int64)


@dataclass(frozen=True, slots=True)
class Hash:
    """Row = key modulo rows, as ``--max-ind-range`` of the DLRM reference does.

    Keys of texts are hashes already (see `placer.data.keys`); integers and Criteo's
    hexadecimal categories are taken as they are.
    """

    kind: ClassVar[MappingKind] = "hash"
    rows: int

    def map(self, keys: Keys) -> Rows:
        """Return rows of `keys`, same shape."""
        if keys.size and int(keys.max()) < self.rows:
            return keys.view(np.int64)
        # The remainder; NumPy divides by a constant with multiplications, but not in its `%`.
        rows = np.uint64(self.rows)
        return (keys - keys // rows * rows).view(np.int64)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A listed key has the row after its place in the list; every other key has row 0."""

    kind: ClassVar[MappingKind] = "vocabulary"
    keys: Keys  # Shape (n,): distinct; ``keys[i]`` is row i + 1.

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", np.ascontiguousarray(self.keys, dtype=np.uint64))
        ascending, _ = self._ascending
        if (ascending[1:] == ascending[:-1]).any():
            raise DataError("a vocabulary lists an id twice; each id has one row")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and np.array_equal(self.keys, other.keys)

    def __hash__(self) -> int:
        return hash(self.keys.tobytes())

    @cached_property
    def _ascending(self) -> tuple[Keys, Rows]:
        """The keys, ascending, and their rows."""
        order = np.argsort(self.keys, kind="stable")
        return self.keys[order], order + 1

    @property
    def rows(self) -> int:
        """Rows of the table, the one for unlisted keys included."""
        return self.keys.size + 1

    @cached_property
    def sha256(self) -> str:
        """Hash of the keys in their order."""
        return hashlib.sha256(self.keys.astype("<u8", copy=False).data).hexdigest()

    def map(self, keys: Keys) -> Rows:
        """Return rows of `keys`, same shape."""
        if not self.keys.size:
            return np.zeros(keys.size, dtype=np.int64)
        ascending, rows = self._ascending
        place = np.searchsorted(ascending, keys)
        place[place == ascending.size] = 0
        return np.where(ascending[place] == keys, rows[place], 0)


@dataclass(frozen=True, slots=True)
class RawKeys:
    """Keys as they are, of a table that gives its rows to keys as they are read."""

    kind: ClassVar[MappingKind] = "key"
    rows: int  # Of the table; keys may be any int64.

    def map(self, keys: Keys) -> Rows:
        """`keys` as int64."""
        return keys.view(np.int64)


IdMapping = Identity | Hash | Vocabulary | RawKeys
