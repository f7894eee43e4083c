"""`RowCounts`: exact access counts of a table's rows, which give its row order."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from placer.errors import ProfileError

Int = npt.NDArray[np.int64]
# int32 if it suffices: a table of 40 million rows then takes 320 MB, not 640.
AnyInt = npt.NDArray[np.signedinteger[Any]]

_BLOCK_ROWS = 1 << 20
_MOST_LOOKUPS = 1 << 62
"""Limit of the sum of counts, so that adding counts stays within 64 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class RowCounts:
    """Access counts by row id, without rows that were never read."""

    rows: int  # Rows of the table.
    ids: AnyInt  # Shape (n,): ids of rows that were read, ascending.
    counts: AnyInt  # Shape (n,): access counts, at least 1.
    _sha256: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        ids, counts = _signed(self.ids), _signed(self.counts)
        if ids.shape != counts.shape or ids.ndim != 1:
            raise ProfileError(f"{ids.shape} ids with {counts.shape} counts")
        if ids.size and (ids[0] < 0 or ids[-1] >= self.rows or (ids[1:] <= ids[:-1]).any()):
            raise ProfileError(f"ids must ascend strictly within 0..{self.rows - 1}")
        if (counts < 1).any():
            raise ProfileError("counts must be at least 1; leave rows that were never read out")
        if counts.sum(dtype=np.float64) >= _MOST_LOOKUPS:
            raise ProfileError(f"all counts together must be less than {_MOST_LOOKUPS:.3g}")
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "counts", counts)

    @classmethod
    def from_dense(cls, counts: npt.ArrayLike) -> "RowCounts":
        """Return counts from an array with one count per row."""
        dense = np.asarray(counts)
        read = int(np.count_nonzero(dense))
        largest = int(dense.max()) if read else 0
        ids = np.empty(read, dtype=_narrowest(dense.size))
        kept = np.empty(read, dtype=_narrowest(largest))
        filled = 0
        # Go block by block: indices of a whole table would take 8 bytes per row.
        for start in range(0, dense.size, _BLOCK_ROWS):
            block = dense[start : start + _BLOCK_ROWS]
            read_ids = np.flatnonzero(block != 0)  # Much faster on booleans than on counts.
            stop = filled + read_ids.size
            ids[filled:stop] = read_ids + start
            kept[filled:stop] = block[read_ids]
            filled = stop
        return cls(dense.size, ids, kept)

    @property
    def sha256(self) -> str:
        """Hash that identifies these counts: of the arrays, or of the file that they come from.

        >>> len({RowCounts.from_dense(counts).sha256 for counts in ([0, 5], [5, 0], [0, 6])})
        3
        """
        if not self._sha256:
            digest = hashlib.sha256(f"{self.rows} {self.ids.dtype} {self.counts.dtype}".encode())
            digest.update(self.ids.data)
            digest.update(self.counts.data)
            self.known_as(digest.hexdigest())
        return self._sha256

    def known_as(self, sha256: str) -> None:
        """Set `sha256` from a known file's hash, as hashing gigabytes takes seconds."""
        object.__setattr__(self, "_sha256", sha256)

    @property
    def total(self) -> int:
        """Number of all lookups."""
        return int(self.counts.sum(dtype=np.int64))

    def hottest(self, rows: int | None = None) -> Int:
        """Return ids of the `rows` hottest rows, hottest first; by default all that were read.

        In a tie, the smaller id comes first. If `rows` exceeds the number of rows that were read,
        unread rows follow in id order.
        """
        # A stable sort of descending counts keeps ids ascending within a tie.
        order = self.ids[np.argsort(-self.counts, kind="stable")].astype(np.int64)
        if rows is None or rows <= order.size:
            return order[:rows]
        unread = np.ones(self.rows, dtype=bool)
        unread[self.ids] = False
        return np.concatenate((order, np.flatnonzero(unread)[: rows - order.size]))

    def __add__(self, other: "RowCounts") -> "RowCounts":
        if self.rows != other.rows:
            raise ProfileError(f"counts of {self.rows} and {other.rows} rows cannot be added")
        ids = np.union1d(self.ids, other.ids)
        largest = int(self.counts.max(initial=0)) + int(other.counts.max(initial=0))
        counts = np.zeros(ids.size, dtype=_narrowest(largest))
        counts[np.searchsorted(ids, self.ids)] = self.counts
        counts[np.searchsorted(ids, other.ids)] += other.counts
        return RowCounts(self.rows, ids, counts)


def _narrowest(largest: int) -> np.dtype[np.signedinteger[Any]]:
    return np.dtype(np.int32 if largest <= np.iinfo(np.int32).max else np.int64)


def _signed(values: npt.ArrayLike) -> AnyInt:
    array = np.ascontiguousarray(values)
    return array if array.dtype in (np.int32, np.int64) else array.astype(np.int64)
