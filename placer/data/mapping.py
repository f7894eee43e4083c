"""How keys become rows of a table, the way that trainers do it."""

import hashlib
from dataclasses import dataclass, field
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
        """Rows of `keys`, same shape.

        Raises
        ------
        OutOfRange
            At the first key that is not below `rows`; negative ids are among them.
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
        """Rows of `keys`, same shape."""
        if keys.size and int(keys.max()) < self.rows:
            return keys.view(np.int64)
        # The remainder; NumPy divides by a constant with multiplications, but not in its `%`.
        rows = np.uint64(self.rows)
        return (keys - keys // rows * rows).view(np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """A listed key has the row after its place in the list; every other key has row 0.

    Attributes
    ----------
    keys : uint64, shape (n,)
        Distinct; ``keys[i]`` is row i + 1.
    """

    kind: ClassVar[MappingKind] = "vocabulary"
    keys: Keys
    _sorted: Keys = field(init=False, repr=False)
    _rows: Rows = field(init=False, repr=False)
    _sha256: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        keys = np.ascontiguousarray(self.keys, dtype=np.uint64)
        order = np.argsort(keys, kind="stable")
        ascending = keys[order]
        if (ascending[1:] == ascending[:-1]).any():
            raise DataError("a vocabulary lists an id twice; each id has one row")
        object.__setattr__(self, "keys", keys)
        object.__setattr__(self, "_sorted", ascending)
        object.__setattr__(self, "_rows", order + 1)
        object.__setattr__(self, "_sha256", "")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and np.array_equal(self.keys, other.keys)

    def __hash__(self) -> int:
        return hash(self.keys.tobytes())

    @property
    def rows(self) -> int:
        """Rows of the table, the one for unlisted keys included."""
        return self.keys.size + 1

    @property
    def sha256(self) -> str:
        """Hash of the keys in their order."""
        if not self._sha256:
            digest = hashlib.sha256(self.keys.astype("<u8", copy=False).data)
            object.__setattr__(self, "_sha256", digest.hexdigest())
        return self._sha256

    def map(self, keys: Keys) -> Rows:
        """Rows of `keys`, same shape."""
        if not self.keys.size:
            return np.zeros(keys.size, dtype=np.int64)
        place = np.searchsorted(self._sorted, keys)
        place[place == self._sorted.size] = 0
        return np.where(self._sorted[place] == keys, self._rows[place], 0)


IdMapping = Identity | Hash | Vocabulary
