"""Exact access counts of one table's rows, and the row order that they give."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from placer.errors import ProfileError

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RowCounts:
    """Access counts by row id; rows that were never read are not listed.

    Attributes
    ----------
    rows : int
        Rows of the table.
    ids : int64, shape (n,)
        Rows that were read, ascending.
    counts : int64, shape (n,)
        How often, at least 1.
    """

    rows: int
    ids: Int
    counts: Int

    def __post_init__(self) -> None:
        ids = np.ascontiguousarray(self.ids, dtype=np.int64)
        counts = np.ascontiguousarray(self.counts, dtype=np.int64)
        if ids.shape != counts.shape or ids.ndim != 1:
            raise ProfileError(f"{ids.shape} ids with {counts.shape} counts")
        if ids.size and (ids[0] < 0 or ids[-1] >= self.rows or (np.diff(ids) <= 0).any()):
            raise ProfileError(f"ids must ascend strictly within 0..{self.rows - 1}")
        if (counts < 1).any():
            raise ProfileError("counts must be at least 1; leave rows that were never read out")
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "counts", counts)

    @classmethod
    def from_dense(cls, counts: npt.ArrayLike) -> "RowCounts":
        """From an array that has one count per row."""
        dense = np.asarray(counts)
        ids = np.flatnonzero(dense)
        return cls(dense.size, ids, dense[ids].astype(np.int64))

    @property
    def total(self) -> int:
        """All lookups."""
        return int(self.counts.sum())

    def hottest(self, rows: int | None = None) -> Int:
        """Ids of the `rows` hottest rows (all rows ever read by default), hottest first.

        Ties go to the smaller id. Rows never read come last, in id order; they are listed
        only when `rows` exceeds the number of rows that were read.
        """
        # A stable sort of descending counts keeps ids ascending within a tie.
        order = self.ids[np.argsort(-self.counts, kind="stable")]
        if rows is None or rows <= order.size:
            return order[:rows]
        unread = np.ones(self.rows, dtype=bool)
        unread[self.ids] = False
        return np.concatenate((order, np.flatnonzero(unread)[: rows - order.size]))

    def __add__(self, other: "RowCounts") -> "RowCounts":
        if self.rows != other.rows:
            raise ProfileError(f"counts of {self.rows} and {other.rows} rows cannot be added")
        ids = np.union1d(self.ids, other.ids)
        counts = np.zeros(ids.size, dtype=np.int64)
        counts[np.searchsorted(ids, self.ids)] += self.counts
        counts[np.searchsorted(ids, other.ids)] += other.counts
        return RowCounts(self.rows, ids, counts)
