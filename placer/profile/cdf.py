"""How a table's lookups spread over its rows: the access CDF over ranks."""

import math
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from placer.errors import DataError, ProfileError

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]

_GRID_PER_DECADE = 64
_EXACT_HEAD = 256
_BLOCK_ROWS = 1 << 20
_FEW = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class AccessCdf:
    """Share of a table's lookups that fall in its k hottest rows.

    The CDF is piecewise linear over ranks: between two neighbouring `ranks` every row is
    read equally often. From exact counts this loses nothing, because rows of equal count
    form one segment and n lookups have at most √(2n) distinct counts.

    Attributes
    ----------
    ranks : int64, shape (m + 1,)
        Ends of the segments, from 0 to the table's number of rows, strictly increasing.
    shares : float64, shape (m + 1,)
        Share of lookups in the rows before each rank; from 0 to 1, concave. A table that
        nobody read has shares that are all 0.

    Examples
    --------
    Of four rows the hottest takes 6 of 10 lookups:

    >>> cdf = AccessCdf.from_counts([1, 6, 2, 1])
    >>> float(cdf.share(1)), cdf.hot_rows_for(0.8)
    (0.6, 2)
    """

    ranks: Int
    shares: Float

    def __post_init__(self) -> None:
        ranks = np.ascontiguousarray(self.ranks, dtype=np.int64)
        shares = np.ascontiguousarray(self.shares, dtype=np.float64)
        if ranks.ndim != 1 or ranks.shape != shares.shape or ranks.size == 0 or ranks[0] != 0:
            raise ProfileError(
                "an access CDF needs equally many ranks and shares, starting at rank 0; "
                f"got shapes {ranks.shape} and {shares.shape}"
            )
        widths = np.diff(ranks)
        if (widths <= 0).any() or shares[0] != 0 or not np.isfinite(shares).all():
            raise ProfileError("an access CDF's ranks must increase and its shares start at 0")
        slopes = np.diff(shares) / widths
        if slopes.size and (slopes[-1] < 0 or (np.diff(slopes) > 1e-12 + 1e-9 * slopes[:-1]).any()):
            raise ProfileError("an access CDF must be concave: ranks run from hottest to coldest")
        if slopes.size and not (shares[-1] == 0 or abs(shares[-1] - 1) < 1e-9):
            raise ProfileError(f"an access CDF must end at 1, not at {shares[-1]}")
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "shares", shares)

    @classmethod
    def from_counts(cls, counts: npt.ArrayLike, rows: int | None = None) -> "AccessCdf":
        """Return the exact CDF of access `counts` in any order; `rows` adds rows never read."""
        observed = np.asarray(counts)
        rows = observed.size if rows is None else rows
        if observed.size > rows:
            raise ProfileError(f"{observed.size} counts for a table of {rows} rows")
        values, repeats = _histogram(observed)
        return cls.from_histogram(values[::-1], repeats[::-1], rows)

    @classmethod
    def from_histogram(
        cls, weights: npt.ArrayLike, repeats: npt.ArrayLike, rows: int
    ) -> "AccessCdf":
        """Return the CDF of `repeats[i]` rows read with frequency `weights[i]`, hottest first."""
        weight = np.asarray(weights, dtype=np.float64)
        repeat = np.asarray(repeats, dtype=np.int64)
        ranks = np.concatenate(([0], np.cumsum(repeat)))
        mass = np.concatenate(([0.0], np.cumsum(weight * repeat)))
        if ranks[-1] < rows:
            ranks, mass = np.append(ranks, rows), np.append(mass, mass[-1])
        shares = mass / mass[-1] if mass[-1] > 0 else mass
        if mass[-1] > 0:
            shares[mass == mass[-1]] = 1.0
        return cls(ranks, shares)

    @classmethod
    def zipf(cls, rows: int, exponent: float, shift: float = 0.0) -> "AccessCdf":
        """Return the CDF of rows read in proportion to ``1 / (rank + 1 + shift) ** exponent``.

        A Zipf–Mandelbrot law. The first ranks are kept one by one; further ones share a
        segment with their neighbours within 1/64 of a decade.
        """
        if rows == 0:
            return cls(np.zeros(1, np.int64), np.zeros(1))
        edges = _rank_grid(rows)
        # Within a wide segment the sum is the integral of the density to well under 0.1%
        # (midpoint rule over unit cells), so that 40 million terms need not be added.
        head = min(rows, _EXACT_HEAD)
        ends = edges[head:].astype(np.float64) + 0.5 + shift
        if abs(exponent - 1) < 1e-9:
            # As `_powers`, by Python's `math`.
            tail = np.array(list(map(math.log, (ends[1:] / ends[:-1]).tolist())))
        else:
            tail = np.diff(_powers(ends, 1 - exponent)) / (1 - exponent)
        mass = np.concatenate((np.zeros(head), tail))
        narrow = np.diff(edges) == 1
        mass[narrow] = _powers(edges[:-1][narrow] + 1.0 + shift, -exponent)
        # Below the seam ranks are exact, above it the midpoint rule holds:
        # keep the slopes in order there.
        slopes = np.minimum.accumulate(mass / np.diff(edges))
        shares = np.concatenate(([0.0], np.cumsum(slopes * np.diff(edges))))
        shares /= shares[-1]
        shares[-1] = 1.0
        return cls(edges, shares)

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return int(self.ranks[-1])

    @property
    def row_share(self) -> Float:
        """Probability that a lookup reads a given row of each segment, shape (m,)."""
        return np.diff(self.shares) / np.diff(self.ranks)

    def share(self, hot_rows: npt.ArrayLike) -> Float:
        """Return the share of lookups that fall in the `hot_rows` hottest rows (any shape)."""
        return np.asarray(
            np.interp(np.asarray(hot_rows, dtype=np.float64), self.ranks, self.shares)
        )

    def hot_rows_for(self, share: float) -> int:
        """Return the fewest hottest rows that take at least `share` of the lookups."""
        if not 0 <= share <= 1:
            raise ProfileError(f"a share must lie within 0..1, not {share}")
        if self.shares[-1] < share:
            return self.rows
        right = int(np.searchsorted(self.shares, share, side="left"))
        if right == 0:
            return 0
        fraction = (share - self.shares[right - 1]) / (self.shares[right] - self.shares[right - 1])
        width = self.ranks[right] - self.ranks[right - 1]
        return int(self.ranks[right - 1] + np.ceil(fraction * width - 1e-9))

    def over(self, rows: int) -> "AccessCdf":
        """Return the CDF of a table of another number of rows that takes the same lookups.

        Rows that are added are not read. Of fewer rows the hottest are read as before, and the
        others share the rest of the lookups evenly.

        >>> AccessCdf.from_counts([4, 2, 2, 2]).over(3).shares.tolist()
        [0.0, 0.4, 1.0]
        """
        ranks, shares = self.ranks[self.ranks < rows], self.shares[self.ranks < rows]
        if rows < self.rows:
            slopes = (self.shares[-1] - shares) / (rows - ranks)
            # As many as leave the others no hotter than themselves.
            before = np.append(np.inf, np.diff(shares) / np.diff(ranks))
            kept = 1 + int(np.flatnonzero(slopes <= before)[-1])
            ranks, shares = ranks[:kept], shares[:kept]
        return AccessCdf(np.append(ranks, rows), np.append(shares, self.shares[-1]))

    def unique_at_ranks(self, lookups: float) -> Float:
        """Return expected distinct rows before each of `ranks` in a step of `lookups` lookups.

        Lookups are taken as independent draws: a row of probability p is touched with
        1 − (1 − p)^n. Piecewise linear and concave over ranks, like the CDF.
        Shape (m + 1,).
        """
        p = np.minimum(self.row_share, 1.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            touched = -np.expm1(lookups * np.log1p(-p))
        if lookups == 0:
            touched = np.zeros_like(p)
        return np.concatenate(([0.0], np.cumsum(touched * np.diff(self.ranks))))

    def unique(self, lookups: float, start: float = 0, stop: float | None = None) -> float:
        """Return expected distinct rows of ranks start..stop in a step of `lookups` lookups."""
        ends = np.array([start, self.rows if stop is None else stop], dtype=np.float64)
        low, high = np.interp(ends, self.ranks, self.unique_at_ranks(lookups))
        return float(high - low)


def _histogram(counts: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Int]:
    """Return the distinct positive `counts`, ascending, and how many rows have each."""
    if counts.dtype.kind not in "iu" or counts.size < _FEW:
        return np.unique(counts[counts > 0], return_counts=True)
    # Nearly all rows of a log are read a few times: those are counted in place, so that a
    # table of 40 million rows is neither copied nor sorted.
    few = np.zeros(_FEW, dtype=np.int64)
    many = [np.zeros(0, dtype=counts.dtype)]
    for start in range(0, counts.size, _BLOCK_ROWS):
        block = counts[start : start + _BLOCK_ROWS]
        is_many = block >= _FEW
        many.append(block[is_many])
        few += np.bincount(block[(block > 0) & ~is_many], minlength=_FEW)
    values, repeats = np.unique(np.concatenate(many), return_counts=True)
    present = np.flatnonzero(few)
    return np.concatenate((present, values)), np.concatenate((few[present], repeats))


# By Python's `math`: NumPy's own have other last bits where a processor has AVX-512, and hashes of
# problems are over all bits. A plan is to know its problem on another machine too.
def _powers(bases: Float, exponent: float) -> Float:
    return np.array(list(map(math.pow, bases.tolist(), repeat(exponent))), dtype=np.float64)


def _rank_grid(rows: int) -> Int:
    """0, 1, 2, … one by one, then geometrically, to `rows`."""
    hottest = np.arange(min(rows, _EXACT_HEAD) + 1, dtype=np.int64)
    if rows <= _EXACT_HEAD:
        return hottest
    decades = np.log10(rows / _EXACT_HEAD)
    colder = np.geomspace(_EXACT_HEAD, rows, int(np.ceil(decades * _GRID_PER_DECADE)) + 1)
    return np.unique(np.concatenate((hottest, np.rint(colder).astype(np.int64))))


# Ranks up to here have a probability of their own; beyond, ranks share geometric bins that
# are half a percent wide, in which the true density differs by less than `exponent` × 0.5%.
_DRAWN_ONE_BY_ONE = 4096
_DRAWN_BIN_GROWTH = 1.005


@cache
def zipf_cdf(rows: int, exponent: float) -> AccessCdf:
    """`AccessCdf.zipf`, shared by tables of equal size, of which workloads have many."""
    return AccessCdf.zipf(rows, exponent)


@dataclass(frozen=True)
class ZipfMandelbrot:
    """Access frequencies that fall as a shifted power of the rank.

    P(rank = k) ∝ (k + 1 + shift)^−exponent for k = 0..rows − 1 (Mandelbrot 1953). Shift 0 is
    Zipf's law; a larger one evens out the hottest ranks, as in logs whose hottest ids are alike.

    Raises DataError if there is no row, or the exponent or the shift is negative.
    """

    rows: int
    exponent: float
    shift: float = 0.0

    def __post_init__(self) -> None:
        if self.rows < 1 or self.exponent < 0 or self.shift < 0:
            raise DataError(
                f"a Zipf–Mandelbrot law needs at least 1 row and no negative exponent or shift, "
                f"not rows={self.rows}, exponent={self.exponent}, shift={self.shift}"
            )

    @cached_property
    def _edges(self) -> npt.NDArray[np.int64]:
        """First rank of each bin, and the number of rows at the end."""
        exact = np.arange(min(self.rows, _DRAWN_ONE_BY_ONE), dtype=np.int64)
        bins = int(np.ceil(np.log(self.rows / exact.size) / np.log(_DRAWN_BIN_GROWTH)))
        tail = np.geomspace(exact.size, self.rows, bins + 1).round().astype(np.int64)
        return np.concatenate([exact, tail])

    @cached_property
    def _cumulative(self) -> npt.NDArray[np.float64]:
        """Probability of the bins up to and including each."""
        edges, s, q = self._edges, self.exponent, self.shift
        mass = np.diff(edges).astype(np.float64)
        exact = min(self.rows, _DRAWN_ONE_BY_ONE)
        mass[:exact] = (edges[:exact] + 1.0 + q) ** -s
        # The sum over a bin is the integral between its outer half ranks (midpoint rule).
        bounds = edges[exact:] + 0.5 + q
        if abs(s - 1) < 1e-9:
            mass[exact:] = np.diff(np.log(bounds))
        else:
            mass[exact:] = np.diff(bounds ** (1 - s)) / (1 - s)
        cumulative = np.cumsum(mass)
        return np.asarray(cumulative / cumulative[-1])

    def draw(self, rng: np.random.Generator, size: int) -> npt.NDArray[np.int64]:
        """Return ranks of `size` independent accesses; int64, shape (size,)."""
        return self.ranks_at(rng.random(size))

    def ranks_at(self, quantiles: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return the inverse of the cumulative distribution at quantiles within [0, 1)."""
        edges, cumulative = self._edges, self._cumulative
        bins = np.minimum(np.searchsorted(cumulative, quantiles, side="right"), cumulative.size - 1)
        below = np.concatenate([[0.0], cumulative])[bins]
        inside = (quantiles - below) / (cumulative[bins] - below)
        width = edges[bins + 1] - edges[bins]
        ranks = edges[bins] + np.minimum((inside * width).astype(np.int64), width - 1)
        return np.asarray(ranks, dtype=np.int64)
