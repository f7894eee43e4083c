"""`TableProfile`: what a log says of one table, with the counts of its rows if they are known."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from placer.errors import ProfileError
from placer.growing.working_set import HitRate
from placer.profile.cdf import AccessCdf, Float, Int, zipf_cdf
from placer.profile.locality import DistinctRows, Locality
from placer.tables import Feature, Table

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
        ids = np.empty(read, dtype=narrowest(dense.size))
        kept = np.empty(read, dtype=narrowest(largest))
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
    def total(self) -> int:
        """Number of all lookups."""
        return int(self.counts.sum(dtype=np.int64))

    @property
    def of_row_0(self) -> int:
        """Number of lookups of row 0, which ids outside a vocabulary share."""
        return int(self.counts[:1][self.ids[:1] == 0].sum())  # Ids ascend.

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
        counts = np.zeros(ids.size, dtype=narrowest(largest))
        counts[np.searchsorted(ids, self.ids)] = self.counts
        counts[np.searchsorted(ids, other.ids)] += other.counts
        return RowCounts(self.rows, ids, counts)


def narrowest(largest: int) -> np.dtype[np.signedinteger[Any]]:
    return np.dtype(np.int32 if largest <= np.iinfo(np.int32).max else np.int64)


def _signed(values: npt.ArrayLike) -> AnyInt:
    array = np.ascontiguousarray(values)
    return array if array.dtype in (np.int32, np.int64) else array.astype(np.int64)


@dataclass(frozen=True, slots=True)
class FeatureCounts:
    """Counts of one feature, as integers, so that merging is exact."""

    lookups: int = 0  # Ids read by the feature.
    bags: int = 0  # Samples whose bag was not empty.

    def __add__(self, other: "FeatureCounts") -> "FeatureCounts":
        return FeatureCounts(self.lookups + other.lookups, self.bags + other.bags)

    def measured(self, feature: Feature, samples: int) -> Feature:
        """Return the feature with the pooling factor and coverage counted over `samples`."""
        return replace(
            feature,
            pooling_factor=self.lookups / self.bags if self.bags else 0.0,
            coverage=self.bags / samples if samples else 0.0,
        )


@dataclass(frozen=True, slots=True)
class UnknownIds:
    """Counts of ids that a vocabulary does not list. They share row 0."""

    lookups: int = 0
    # Distinct ids: exact below 16,384, else within about 2%. None if it is unknown after merging.
    ids: int | None = 0

    def __add__(self, other: "UnknownIds") -> "UnknownIds":
        # Nobody knows how many of these ids two parts share.
        alone = [one.ids for one in (self, other) if one.lookups]
        ids = 0 if not alone else alone[0] if len(alone) == 1 else None
        return UnknownIds(self.lookups + other.lookups, ids)


@dataclass(frozen=True, slots=True, eq=False)
class TableProfile:
    """A table, how often its rows are read, and other measurements of its lookups.

    Attributes
    ----------
    table : Table
        The table. Its features have the pooling factor and coverage of the log.
    cdf : AccessCdf
        Share of lookups in the k hottest rows.
    counts : RowCounts or None
        Exact access counts by id. They give the row order and can be merged. None for
        published workloads: their ids are taken to be ranks.
    features : mapping of feature name to FeatureCounts
        Empty for published workloads.
    zipf_exponent : float or None
        The exponent assumed for a published workload, else None.
    locality : tuple of WindowCounts
        Distinct rows in windows of consecutive samples; empty if they were not counted.
    unknown : UnknownIds or None
        Ids that the vocabulary does not list; None without a vocabulary.
    hit_rates : tuple of HitRate
        Measured hit rates if the table grew, with fewer rows than ids; empty if not measured.

    Examples
    --------
    >>> from placer import Feature
    >>> counts = RowCounts.from_dense([0, 5, 0, 5])
    >>> table = Table("C3", rows=4, dim=16, features=(Feature("C3"),))
    >>> profile = TableProfile.counted(table, counts, {"C3": FeatureCounts(10, 10)})
    >>> profile.lookups, round(profile.expected_unique(samples=100), 3)
    (10, 2.0)
    """

    table: Table
    cdf: AccessCdf
    counts: RowCounts | None = None
    features: dict[str, FeatureCounts] = field(default_factory=dict)
    zipf_exponent: float | None = None
    locality: Locality = ()
    unknown: UnknownIds | None = None
    hit_rates: tuple[HitRate, ...] = ()
    _in_order: DistinctRows = field(init=False, repr=False)
    _draws: dict[float, float] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.cdf.rows != self.table.rows:
            raise ProfileError(
                f"table {self.table.name!r} has {self.table.rows} rows "
                f"but an access CDF of {self.cdf.rows}"
            )
        object.__setattr__(self, "_in_order", DistinctRows.of(self.locality))

    @classmethod
    def counted(
        cls, table: Table, counts: RowCounts, features: dict[str, FeatureCounts]
    ) -> "TableProfile":
        """Return a table's profile from exact counts. The CDF is computed from them."""
        return cls(table, AccessCdf.from_counts(counts.counts, counts.rows), counts, features)

    @classmethod
    def zipf(cls, table: Table, exponent: float) -> "TableProfile":
        """Return the profile of a table with accesses by Zipf's law. Its ids are ranks."""
        return cls(table, zipf_cdf(table.rows, exponent), zipf_exponent=exponent)

    @property
    def name(self) -> str:
        """Name of the table."""
        return self.table.name

    @property
    def lookups(self) -> int:
        """Number of lookups that were counted; 0 without counts."""
        return self.counts.total if self.counts is not None else 0

    @property
    def unknown_share(self) -> float | None:
        """Share of lookups with ids that the vocabulary does not list; None if unknown."""
        if self.unknown is None or not self.lookups:
            return None
        return self.unknown.lookups / self.lookups

    @property
    def unknown_id_share(self) -> float | None:
        """Share of distinct ids that the vocabulary does not list; None if unknown."""
        if self.unknown is None or self.unknown.ids is None or self.counts is None:
            return None
        listed = int(np.count_nonzero(self.counts.ids))
        every = listed + self.unknown.ids
        return self.unknown.ids / every if every else None

    def expected_unique(self, samples: int) -> float:
        """Return the expected number of unique rows of a step of `samples` samples."""
        return self.unique(samples * self.table.lookups_per_sample)

    def draws_of(self, lookups: float) -> float:
        """Return the number of independent draws with the unique rows of `lookups` in a row.

        In logs with locality it is smaller than `lookups`: a row that is read is soon read again.
        """
        known = self._draws.get(lookups)
        if known is None:
            known = self._draws[lookups] = self._in_order.draws(lookups, self.cdf)
        return known

    def unique_at_ranks(self, lookups: float) -> Float:
        """Return the expected unique rows before each rank of the CDF in a step; shape (m + 1,).

        A row of probability p is touched with probability 1 − (1 − p)^d, with d = `draws_of`
        `lookups`, but at most with its expected number of reads.
        """
        draws = self.draws_of(lookups)
        touched = self.cdf.unique_at_ranks(draws)
        if draws <= lookups:
            return touched
        most = np.minimum(1.0, lookups * self.cdf.row_share) * self.cdf.widths
        return np.concatenate(([0.0], np.cumsum(np.minimum(np.diff(touched), most))))

    def unique(self, lookups: float) -> float:
        """Return the expected number of unique rows in a step of `lookups` lookups."""
        return float(self.unique_at_ranks(lookups)[-1])
