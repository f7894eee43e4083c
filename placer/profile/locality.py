"""Measure locality: the number of distinct rows that a step reads in a log's own order.

Users come in sessions and items are popular for a while, so consecutive samples read fewer distinct
rows than random samples. A step of n samples reads a window of n consecutive samples. So distinct
rows are counted in windows of a few sizes, at a few places of the log.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from placer.data.log import Bags
from placer.profile.cdf import AccessCdf, Float

STRETCH_SAMPLES = 65536
"""Length of a stretch: consecutive samples held in memory, in which windows are counted."""

WINDOWS = {256: 8, 1024: 8, 4096: 4, 8192: 2, 16384: 2, 32768: 1, 65536: 1}
"""By samples of a window, the most windows of this size to count in a stretch."""

_STRETCH_LOOKUPS = 1 << 23
"""A stretch ends early after this many lookups, which take 64 MB."""

_MOST_STRETCHES = 8


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """Counts over windows of one size, as integers, so that merging is exact."""

    samples: int  # Samples of each window.
    windows: int  # Number of windows.
    # Sums over windows: lookups of the table, and distinct rows within each window.
    lookups: int
    distinct: int

    def __add__(self, other: "WindowCounts") -> "WindowCounts":
        return WindowCounts(
            self.samples,
            self.windows + other.windows,
            self.lookups + other.lookups,
            self.distinct + other.distinct,
        )


Locality = tuple[WindowCounts, ...]
"""Counts of a table by size of the window, smallest first; empty if nothing was counted."""


def added(parts: list[Locality]) -> Locality:
    """Add the counts of several parts of a log.

    >>> added([(WindowCounts(256, 2, 512, 90),), (WindowCounts(256, 1, 256, 60),)])
    (WindowCounts(samples=256, windows=3, lookups=768, distinct=150),)
    """
    sums: dict[int, WindowCounts] = {}
    for counts in (counts for part in parts for counts in part):
        known = sums.get(counts.samples)
        sums[counts.samples] = counts if known is None else known + counts
    return tuple(sums[samples] for samples in sorted(sums))


@dataclass(frozen=True, slots=True, eq=False)
class DistinctRows:
    """Distinct rows of a step in a log's order, as a function of the step's lookups.

    Between measured sizes it is linear in logarithms of both, starting with one row for one lookup.
    Beyond the largest size, the last line continues.
    """

    # Shape (sizes + 1,)
    log_lookups: Float
    log_distinct: Float

    @classmethod
    def of(cls, locality: Locality) -> "DistinctRows":
        """Return the function from measured windows."""
        read = [one for one in locality if one.distinct and one.lookups > one.windows]
        lookups = [one.lookups / one.windows for one in read]
        distinct = np.maximum.accumulate([1.0, *(one.distinct / one.windows for one in read)])
        return cls(np.log([1.0, *lookups]), np.log(distinct))

    def draws(self, lookups: float, cdf: AccessCdf) -> float:
        """Return the number of independent draws with the distinct rows of `lookups` in a row.

        Without measurements it is `lookups`. It may be more than `lookups` if windows are a large
        part of the log: rows that the log reads once do not come again.
        """
        if self.log_lookups.size == 1 or lookups <= 1:
            return lookups
        at, known, distinct = float(np.log(lookups)), self.log_lookups, self.log_distinct
        if at <= known[-1]:
            return _draws_for(float(np.exp(np.interp(at, known, distinct))), lookups, cdf)
        slope = (distinct[-1] - distinct[-2]) / (known[-1] - known[-2])
        further = float(np.exp(distinct[-1] + slope * (at - known[-1])))
        largest = float(np.exp(known[-1]))
        most = max(1.0, _draws_for(float(np.exp(distinct[-1])), largest, cdf) / largest)
        return min(_draws_for(further, lookups, cdf), most * lookups)


_MOST_DRAWS = 16.0
"""Limit of draws, as a multiple of lookups: if nearly all rows are read, more hardly matter."""


def _draws_for(distinct: float, lookups: float, cdf: AccessCdf) -> float:
    """Return the number of independent draws with an expectation of `distinct` rows."""
    low, high = 0.0, lookups
    while cdf.unique(high) < distinct:
        low, high = high, 2 * high
        if high > _MOST_DRAWS * lookups:
            return low
    # The Illinois variant of false position takes a few steps on a concave function.
    at_low, at_high = cdf.unique(low) - distinct, cdf.unique(high) - distinct
    for _ in range(40):
        between = high - at_high * (high - low) / (at_high - at_low)
        found = cdf.unique(between) - distinct
        if abs(found) <= 1e-6 * distinct:
            return between
        if found < 0:
            low, at_low, at_high = between, found, at_high / 2
        else:
            high, at_high, at_low = between, found, at_low / 2
    return between


@dataclass(slots=True)
class _Stretch:
    """Consecutive samples: chunks with the bags of each feature."""

    number: int
    chunks: list[tuple[int, Mapping[str, Bags]]] = field(default_factory=list)
    samples: int = 0
    lookups: int = 0

    def ids(self, feature: str, start: int, stop: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield ids of samples ``start..stop``, one array per chunk."""
        first = 0
        for samples, features in self.chunks:
            low, high = max(start - first, 0), min(stop - first, samples)
            if low < high:
                yield features[feature].of_samples(slice(low, high)).ids
            first += samples


class LocalityCounter:
    """Counts distinct rows in windows of consecutive samples, at a few places of a log.

    It counts in up to 16 stretches of `STRETCH_SAMPLES` samples, spaced evenly over the log so far.
    If there are more, it drops every second one and doubles the spacing from there on.
    """

    def __init__(self, tables: Mapping[str, int], feature_tables: Mapping[str, str]) -> None:
        self._rows = dict(tables)
        self._features: dict[str, list[str]] = {name: [] for name in tables}
        for feature, table in feature_tables.items():
            self._features[table].append(feature)
        self._spacing = 1
        self._stretch = _Stretch(0)
        self._counted: dict[int, dict[str, Locality]] = {}

    def add(self, samples: int, features: Mapping[str, Bags]) -> None:
        """Add the next samples. Do not change their arrays afterwards."""
        stretch = self._stretch
        if stretch.number % self._spacing == 0:
            stretch.chunks.append((samples, features))
            stretch.lookups += sum(bags.ids.size for bags in features.values())
        stretch.samples += samples
        if stretch.samples >= STRETCH_SAMPLES or stretch.lookups >= _STRETCH_LOOKUPS:
            self.gap()

    def gap(self) -> None:
        """Say that the next samples are from another place in the log."""
        stretch, self._stretch = self._stretch, _Stretch(self._stretch.number + 1)
        if stretch.chunks and stretch.samples >= min(WINDOWS):
            self._counted[stretch.number] = {
                table: self._count(stretch, table) for table in self._features
            }
        if len(self._counted) > 2 * _MOST_STRETCHES:
            self._spacing *= 2
            kept = [number for number in self._counted if number % self._spacing == 0]
            self._counted = {number: self._counted[number] for number in kept}

    def localities(self) -> dict[str, Locality]:
        """Return the counts so far, by table. This ends the current stretch."""
        self.gap()
        return {
            table: added([counted[table] for counted in self._counted.values()])
            for table in self._features
        }

    def _count(self, stretch: _Stretch, table: str) -> Locality:
        counts = []
        for samples, most in WINDOWS.items():
            number = min(most, stretch.samples // samples)
            starts = np.linspace(0, max(stretch.samples - samples, 0), number).astype(int)
            lookups = distinct = 0
            for start in starts.tolist():
                ids = [
                    part
                    for feature in self._features[table]
                    for part in stretch.ids(feature, start, start + samples)
                ]
                read = np.concatenate([np.zeros(0, dtype=np.int64), *ids])
                lookups += read.size
                distinct += _distinct(read, self._rows[table])
            if number:
                counts.append(WindowCounts(samples, number, lookups, distinct))
        return tuple(counts)


def _distinct(ids: npt.NDArray[np.int64], rows: int) -> int:
    if rows <= 4 * ids.size:
        return int(np.count_nonzero(np.bincount(ids, minlength=rows)))
    ordered = np.sort(ids.astype(np.int32) if rows <= np.iinfo(np.int32).max else ids)
    return int(np.count_nonzero(ordered[1:] != ordered[:-1])) + bool(ordered.size)
