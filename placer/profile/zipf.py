"""The Zipf–Mandelbrot law: drawing from it, and the one that explains access counts best.

Row k of M (from 0, hottest first) is read with probability p_k ∝ (k + 1 + q)^−s. Its CDF is
`AccessCdf.zipf`.

To fit it: ranks are not observed. A log shows counts, and the row of the largest count need not
be the hottest. Fitting a line to counts over *observed* ranks, or the likelihood of lookups whose
ranks were assigned by the counts themselves, makes the law too steep, since the luckiest of
many alike rows come first; dropping the rows that were never read biases the same way.
Instead, the counts of all M rows, the zeros included, are taken as an unordered collection:
of n lookups, row k is read Poisson(n p_k) times, so that a row picked blindly has count c
with probability

    P(c) = 1/M Σ_k Poisson(c; n p_k),

and s and q maximise the multinomial likelihood of how many rows have which count,
Σ_b n_b log P(b), over bins b: one per count up to 256, then geometric ones, within which
Poisson noise is narrower than the bin. Maximum likelihood over binned values, and the
Kolmogorov–Smirnov distance as the measure of fit, follow Clauset, Shalizi and Newman 2009
(doi:10.1137/070710111) and Virkar and Clauset 2014 (doi:10.1214/13-AOAS710).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from placer.errors import DataError, ProfileError
from placer.profile.cdf import AccessCdf
from placer.profile.counts import RowCounts
from placer.profile.table_profile import TableProfile

_Float = npt.NDArray[np.float64]

_SINGLE_COUNTS = 256
_BIN_GROWTH = 1.25
_RANKS_PER_DECADE = 64
_EXACT_RANKS = 256
_MAX_EXPONENT = 4.0
_MAX_SHIFT = 1000.0
# A bin that the law leaves empty holds at least this many rows, so that one outlier, such
# as a default id that stands for all missing values, costs a bounded amount.
_FLOOR_ROWS = 0.01

# Ranks up to here have a probability of their own; beyond, ranks share geometric bins that
# are half a percent wide, in which the true density differs by less than `exponent` × 0.5%.
_DRAWN_ONE_BY_ONE = 4096
_DRAWN_BIN_GROWTH = 1.005
_GOLDEN = (np.sqrt(5.0) - 1) / 2


@cache
def zipf_cdf(rows: int, exponent: float) -> AccessCdf:
    """`AccessCdf.zipf`, shared by tables of equal size, of which workloads have many."""
    return AccessCdf.zipf(rows, exponent)


@dataclass(frozen=True)
class ZipfMandelbrot:
    """Access frequencies that fall as a shifted power of the rank.

    P(rank = k) ∝ (k + 1 + shift)^−exponent for k = 0..rows − 1 (Mandelbrot 1953). Shift 0 is
    Zipf's law; a larger one evens out the hottest ranks, as in logs whose hottest ids are alike.

    Raises
    ------
    DataError
        If there is no row, or the exponent or the shift is negative.
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
        if self.rows <= _DRAWN_ONE_BY_ONE:
            return np.append(exact, self.rows)
        bins = int(np.ceil(np.log(self.rows / _DRAWN_ONE_BY_ONE) / np.log(_DRAWN_BIN_GROWTH)))
        tail = np.geomspace(_DRAWN_ONE_BY_ONE, self.rows, bins + 1).round().astype(np.int64)
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
        """Ranks of `size` independent accesses; int64, shape (size,)."""
        return self.ranks_at(rng.random(size))

    def ranks_at(self, quantiles: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """The inverse of the cumulative distribution at quantiles within [0, 1)."""
        edges, cumulative = self._edges, self._cumulative
        bins = np.minimum(np.searchsorted(cumulative, quantiles, side="right"), cumulative.size - 1)
        below = np.concatenate([[0.0], cumulative])[bins]
        inside = (quantiles - below) / (cumulative[bins] - below)
        width = edges[bins + 1] - edges[bins]
        ranks = edges[bins] + np.minimum((inside * width).astype(np.int64), width - 1)
        return np.asarray(ranks, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ZipfFit:
    """A fitted law.

    Attributes
    ----------
    rows : int
        Rows that the law is over, those never read included.
    exponent, shift : float
        s and q; a shift of 0 is Zipf's law proper.
    exponent_error : float
        Standard error of the exponent at the fitted shift, from the curvature of the
        likelihood. It holds if the law does; see `distance` for whether it does.
    distance : float
        Kolmogorov–Smirnov distance between the counts of the rows and the law's: the
        largest difference in the share of rows that are read at most c times.
    """

    rows: int
    exponent: float
    shift: float
    exponent_error: float
    distance: float

    @property
    def cdf(self) -> AccessCdf:
        """The law as an access CDF."""
        return AccessCdf.zipf(self.rows, self.exponent, self.shift)


def fit_zipf(
    counts: TableProfile | RowCounts | npt.ArrayLike,
    rows: int | None = None,
    *,
    shift: float | None = 0.0,
) -> ZipfFit:
    """The law of greatest likelihood.

    Parameters
    ----------
    counts : TableProfile, RowCounts or array of int
        Access counts, in any order.
    rows : int, optional
        Rows that could have been read; by default the table's, or the array's size. Worth
        giving for a vocabulary, whose table has just the rows that the log showed.
    shift : float or None
        Fixed shift, 0 for Zipf's law; None fits it too.

    Raises
    ------
    ProfileError
        If there are no counts, or fewer rows than counts.
    """
    if isinstance(counts, TableProfile):
        if counts.counts is None:
            raise ProfileError(
                f"table {counts.name!r} has no counts to fit; its exponent was assumed"
            )
        counts = counts.counts
    if isinstance(counts, RowCounts):
        observed: npt.NDArray[np.int64] = counts.counts.astype(np.int64)
        rows = counts.rows if rows is None else rows
    else:
        dense = np.asarray(counts, dtype=np.int64).ravel()
        observed = dense[dense > 0]
        rows = dense.size if rows is None else rows
    if not observed.size:
        raise ProfileError("no row was read; a law needs at least one lookup")
    if rows < observed.size:
        raise ProfileError(f"{observed.size} rows were read, more than the {rows} given")
    model = _BinnedCounts(observed, rows)
    if shift is None:
        low, high = np.log(0.01), np.log(max(0.02, min(_MAX_SHIFT, rows / 4)))
        best = float(
            np.exp(golden_section(lambda x: model.best(float(np.exp(x)))[1], low, high, 0.02))
        )
        # Zipf's law proper lies outside the logarithmic range.
        shift = best if model.best(best)[1] > model.best(0.0)[1] else 0.0
    exponent = model.best(shift)[0]
    return ZipfFit(
        rows=rows,
        exponent=exponent,
        shift=shift,
        exponent_error=model.error(exponent, shift),
        distance=model.distance(exponent, shift),
    )


class _BinnedCounts:
    """How many rows have a count in each bin, and the likelihood of that under a law."""

    def __init__(self, observed: npt.NDArray[np.int64], rows: int) -> None:
        self.rows = rows
        self.lookups = int(observed.sum())
        largest = max(int(observed.max()), _SINGLE_COUNTS)
        bins = int(np.ceil(np.log(largest / _SINGLE_COUNTS) / np.log(_BIN_GROWTH))) + 1
        # Bins 0..256 hold one count each; later ones the counts edges[i] < c <= edges[i + 1].
        self._edges = (_SINGLE_COUNTS + 0.5) * _BIN_GROWTH ** np.arange(bins + 1.0)
        few = observed[observed <= _SINGLE_COUNTS]
        single = np.bincount(few, minlength=_SINGLE_COUNTS + 1).astype(np.float64)
        single[0] = rows - observed.size
        wide, _ = np.histogram(observed[observed > _SINGLE_COUNTS], self._edges)
        self.observed: _Float = np.concatenate((single, wide))
        self._ranks = _rank_edges(rows)
        count = np.arange(_SINGLE_COUNTS + 1.0)
        self._count = count
        self._log_factorial = np.concatenate(([0.0], np.cumsum(np.log(count[1:]))))

    def expected(self, exponent: float, shift: float) -> _Float:
        """Rows in each bin that a law expects, at least `_FLOOR_ROWS`."""
        cdf = AccessCdf.zipf(self.rows, exponent, shift)
        rates = self.lookups * np.diff(cdf.share(self._ranks)) / np.diff(self._ranks)
        # Rows read far more often than 256 times do not reach the bins of single counts.
        near = (rates < 2 * _SINGLE_COUNTS) & (rates > 0)
        rate, weight = rates[near], np.diff(self._ranks)[near]
        log_chance = self._count * np.log(rate)[:, None] - rate[:, None] - self._log_factorial
        single = weight @ np.exp(log_chance)
        # Rows whose rate exceeds each edge: the law solved for the rank.
        middle = (self._ranks[:-1] + self._ranks[1:]) / 2
        # Of a steep law the coldest ranks have a share of 0 in floating-point numbers.
        rarity = -np.log(np.maximum(rates, np.finfo(np.float64).tiny))
        level = np.interp(-np.log(self._edges), rarity, middle, left=0.0, right=self.rows)
        wide = -np.diff(level)
        expected: _Float = np.maximum(np.concatenate((single, wide)), _FLOOR_ROWS)
        return expected

    def likelihood(self, exponent: float, shift: float) -> float:
        """Multinomial log-likelihood, up to a constant."""
        expected = self.expected(exponent, shift)
        return float(self.observed @ np.log(expected / expected.sum()))

    def best(self, shift: float) -> tuple[float, float]:
        """The exponent of greatest likelihood at a shift, and that likelihood."""
        exponent = golden_section(lambda s: self.likelihood(s, shift), 0.0, _MAX_EXPONENT, 1e-4)
        return exponent, self.likelihood(exponent, shift)

    def error(self, exponent: float, shift: float) -> float:
        """Standard error of the exponent from the curvature of the likelihood."""
        step = 0.01
        low, middle, high = (
            self.likelihood(exponent + offset, shift) for offset in (-step, 0.0, step)
        )
        curvature = (2 * middle - low - high) / step**2
        return float(1 / np.sqrt(curvature)) if curvature > 0 else float("inf")

    def distance(self, exponent: float, shift: float) -> float:
        """Kolmogorov–Smirnov distance between observed and expected counts."""
        expected = self.expected(exponent, shift)
        difference = np.cumsum(self.observed) / self.rows - np.cumsum(expected) / expected.sum()
        return float(np.abs(difference).max())


def _rank_edges(rows: int) -> npt.NDArray[np.int64]:
    """Edges of rank bins: one rank each at first, then geometric to `rows`."""
    hottest = np.arange(min(rows, _EXACT_RANKS) + 1)
    if rows <= _EXACT_RANKS:
        return hottest
    bins = int(np.ceil(np.log10(rows / _EXACT_RANKS) * _RANKS_PER_DECADE)) + 1
    colder = np.rint(np.geomspace(_EXACT_RANKS, rows, bins + 1)).astype(np.int64)
    return np.unique(np.concatenate((hottest, colder)))


def golden_section(
    function: Callable[[float], float], low: float, high: float, within: float
) -> float:
    """Where a function of one maximum has it: golden-section search (Kiefer 1953)."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > within:
        if at_left >= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
    return float(low + high) / 2
