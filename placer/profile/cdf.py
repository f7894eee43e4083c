"""Access CDFs over ranks: how a table's lookups spread over its rows."""

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


@dataclass(frozen=True, eq=False)
class AccessCdf:
    """Share of a table's lookups that fall in its k hottest rows.

    The CDF is piecewise linear over ranks: all rows between neighbouring `ranks` are read equally
    often. For exact counts this is lossless: rows of equal count form one segment, and n lookups
    have at most √(2n) distinct counts.

    Attributes
    ----------
    ranks : int64, shape (m + 1,)
        Ends of the segments, from 0 to the table's number of rows, strictly increasing.
    shares : float64, shape (m + 1,)
        Share of lookups in the rows before each rank; from 0 to 1, concave. All are 0 for a
        table that was never read.

    Examples
    --------
    The hottest of four rows has 6 of 10 lookups:

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
        """Return the exact CDF of access `counts` in any order. `rows` also counts unread rows."""
        observed = np.asarray(counts)
        rows = observed.size if rows is None else rows
        if observed.size > rows:
            raise ProfileError(f"{observed.size} counts for a table of {rows} rows")
        values, repeats = (array[::-1] for array in _histogram(observed))
        ranks = np.concatenate(([0], np.cumsum(repeats)))
        mass = np.concatenate(([0.0], np.cumsum(values.astype(np.float64) * repeats)))
        if ranks[-1] < rows:
            ranks, mass = np.append(ranks, rows), np.append(mass, mass[-1])
        shares = mass / mass[-1] if mass[-1] > 0 else mass
        if mass[-1] > 0:
            shares[mass == mass[-1]] = 1.0
        return cls(ranks, shares)

    @classmethod
    def zipf(cls, rows: int, exponent: float, shift: float = 0.0) -> "AccessCdf":
        """Return the CDF of rows read in proportion to ``1 / (rank + 1 + shift) ** exponent``.

        A Zipf–Mandelbrot law. The first 256 ranks have segments of their own; each further
        segment spans 1/64 of a decade.
        """
        if rows == 0:
            return cls(np.zeros(1, np.int64), np.zeros(1))
        edges = _rank_grid(rows)
        single = int(np.count_nonzero(np.diff(edges) == 1))
        mass = _zipf_mass(edges, single, exponent, shift)
        # Exact ranks are followed by ranks of the midpoint rule: keep slopes decreasing there.
        slopes = np.minimum.accumulate(mass / np.diff(edges))
        shares = np.concatenate(([0.0], np.cumsum(slopes * np.diff(edges))))
        shares /= shares[-1]
        shares[-1] = 1.0
        return cls(edges, shares)

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return int(self.ranks[-1])

    # These are kept, because solvers ask for expected unique rows very often.
    @cached_property
    def widths(self) -> Int:
        """Number of rows of each segment, shape (m,)."""
        return np.diff(self.ranks)

    @cached_property
    def row_share(self) -> Float:
        """Probability that a lookup reads a given row of each segment, shape (m,)."""
        return np.diff(self.shares) / self.widths

    @cached_property
    def _log_unread(self) -> Float:
        """Logarithm of the probability that a lookup does not read a given row, shape (m,)."""
        with np.errstate(divide="ignore"):
            return np.log1p(-np.minimum(self.row_share, 1.0))

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
        """Return the CDF for the same lookups on a table with another number of rows.

        Added rows are not read. With fewer rows, the hottest keep their share, and the others
        evenly share the remaining lookups.

        >>> AccessCdf.from_counts([4, 2, 2, 2]).over(3).shares.tolist()
        [0.0, 0.4, 1.0]
        """
        ranks, shares = self.ranks[self.ranks < rows], self.shares[self.ranks < rows]
        if rows < self.rows:
            slopes = (self.shares[-1] - shares) / (rows - ranks)
            # Keep as many of the hottest as possible with the others no hotter than they are.
            before = np.append(np.inf, np.diff(shares) / np.diff(ranks))
            kept = 1 + int(np.flatnonzero(slopes <= before)[-1])
            ranks, shares = ranks[:kept], shares[:kept]
        return AccessCdf(np.append(ranks, rows), np.append(shares, self.shares[-1]))

    def unique_at_ranks(self, lookups: float) -> Float:
        """Return the expected unique rows before each of `ranks` in a step; shape (m + 1,).

        Lookups are taken as independent draws: a row of probability p is touched with
        probability 1 − (1 − p)^lookups. Like the CDF, it is piecewise linear and concave.
        """
        unique = np.zeros(self.ranks.size)
        if lookups:  # Else rows that every lookup reads would have 0 times infinity.
            touched = -np.expm1(lookups * self._log_unread)
            np.cumsum(touched * self.widths, out=unique[1:])
        return unique

    def unique(self, lookups: float) -> float:
        """Return the expected unique rows in a step of `lookups` lookups."""
        return float(self.unique_at_ranks(lookups)[-1])


def _histogram(counts: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Int]:
    """Return the distinct positive `counts`, ascending, and how many rows have each."""
    if counts.dtype.kind not in "iu" or counts.size < _FEW:
        return np.unique(counts[counts > 0], return_counts=True)
    # Most rows have small counts: count these with bincount, so that a table of 40 million rows is
    # neither copied nor sorted.
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


# Use Python's `math`: NumPy's results differ in the last bit on processors with AVX-512. Problems
# are hashed with all bits, and a plan must recognize its problem on other machines.
def _powers(bases: npt.NDArray[np.floating[Any]], exponent: float) -> Float:
    return np.array(list(map(math.pow, bases.tolist(), repeat(exponent))), dtype=np.float64)


def _zipf_mass(edges: Int, single: int, exponent: float, shift: float) -> Float:
    """Return the sums of ``1 / (rank + 1 + shift) ** exponent`` over the ranks between edges.

    The first `single` segments have one rank each. The integral of the density is within 0.1% of
    the sum over a wide segment (midpoint rule over unit cells), so 40 million terms need not be
    added.
    """
    ends = edges[single:] + 0.5 + shift
    if abs(exponent - 1) < 1e-9:
        # Use Python's `math` for the reason given at `_powers`.
        tail = np.array(list(map(math.log, (ends[1:] / ends[:-1]).tolist())))
    else:
        tail = np.diff(_powers(ends, 1 - exponent)) / (1 - exponent)
    return np.concatenate((_powers(edges[:single] + 1.0 + shift, -exponent), tail))


def _rank_grid(rows: int) -> Int:
    """Return ends of segments: 0, 1, 2, …, then geometrically spaced, up to `rows`."""
    hottest = np.arange(min(rows, _EXACT_HEAD) + 1, dtype=np.int64)
    if rows <= _EXACT_HEAD:
        return hottest
    decades = np.log10(rows / _EXACT_HEAD)
    colder = np.geomspace(_EXACT_HEAD, rows, int(np.ceil(decades * _GRID_PER_DECADE)) + 1)
    return np.unique(np.concatenate((hottest, np.rint(colder).astype(np.int64))))


def ranks_at(ranks: Int, shares: Float, quantiles: Float) -> Int:
    """Return the ranks at quantiles within [0, 1) of a CDF with these `ranks` and `shares`."""
    segment = np.searchsorted(shares, quantiles, side="right") - 1
    np.minimum(segment, ranks.size - 2, out=segment)
    start, below = ranks[segment], shares[segment]
    width = ranks[segment + 1] - start
    within = (quantiles - below) / (shares[segment + 1] - below)
    found: Int = start + np.minimum((within * width).astype(np.int64), width - 1)
    return found


# Ranks up to here have exact probabilities. Further ranks share geometric bins that are half a
# percent wide: within a bin, the true density differs by less than `exponent` × 0.5%.
_DRAWN_ONE_BY_ONE = 4096
_DRAWN_BIN_GROWTH = 1.005


@cache
def zipf_cdf(rows: int, exponent: float) -> AccessCdf:
    """Return `AccessCdf.zipf`, cached: workloads have many tables of equal size."""
    return AccessCdf.zipf(rows, exponent)


@dataclass(frozen=True)
class ZipfMandelbrot:
    """Access frequencies that fall as a shifted power of the rank.

    P(rank = k) ∝ (k + 1 + shift)^−exponent for k = 0..rows − 1 (Mandelbrot 1953). Shift 0 is
    Zipf's law; a larger shift makes the hottest ranks more alike, as in some logs.

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
    def _edges(self) -> Int:
        """First rank of each bin, and the number of rows at the end."""
        exact = np.arange(min(self.rows, _DRAWN_ONE_BY_ONE), dtype=np.int64)
        bins = int(np.ceil(np.log(self.rows / exact.size) / np.log(_DRAWN_BIN_GROWTH)))
        tail = np.geomspace(exact.size, self.rows, bins + 1).round().astype(np.int64)
        return np.concatenate([exact, tail])

    @cached_property
    def _shares(self) -> Float:
        """Probability of the ranks before each of `_edges`."""
        single = min(self.rows, _DRAWN_ONE_BY_ONE)
        cumulative = np.cumsum(_zipf_mass(self._edges, single, self.exponent, self.shift))
        return np.concatenate(([0.0], cumulative / cumulative[-1]))

    def draw(self, rng: np.random.Generator, size: int) -> Int:
        """Return ranks of `size` independent accesses; int64, shape (size,)."""
        return self.ranks_at(rng.random(size))

    def ranks_at(self, quantiles: Float) -> Int:
        """Return the ranks at quantiles within [0, 1)."""
        return ranks_at(self._edges, self._shares, quantiles)
