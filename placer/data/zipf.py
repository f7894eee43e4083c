"""Zipf–Mandelbrot ranks: drawing them, and fitting them to the counts of a sample."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from placer.errors import DataError

# Ranks up to here have a probability of their own; beyond, ranks share geometric bins that
# are half a percent wide, in which the true density differs by less than `exponent` × 0.5%.
_EXACT_RANKS = 4096
_BIN_GROWTH = 1.005

_SHIFTS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_MAX_EXPONENT = 6.0
_EXPONENT_TOLERANCE = 0.002


@dataclass(frozen=True)
class ZipfMandelbrot:
    """Access frequencies that fall as a shifted power of the rank.

    P(rank = k) ∝ (k + 1 + shift)^−exponent for k = 0..rows − 1 (Mandelbrot 1953). Shift 0 is
    Zipf's law; a larger one flattens the head, as logs do whose hottest ids are alike.

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
        exact = np.arange(min(self.rows, _EXACT_RANKS), dtype=np.int64)
        if self.rows <= _EXACT_RANKS:
            return np.append(exact, self.rows)
        bins = int(np.ceil(np.log(self.rows / _EXACT_RANKS) / np.log(_BIN_GROWTH)))
        tail = np.geomspace(_EXACT_RANKS, self.rows, bins + 1).round().astype(np.int64)
        return np.concatenate([exact, tail])

    @cached_property
    def _cumulative(self) -> npt.NDArray[np.float64]:
        """Probability of the bins up to and including each."""
        edges, s, q = self._edges, self.exponent, self.shift
        mass = np.diff(edges).astype(np.float64)
        exact = min(self.rows, _EXACT_RANKS)
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


def fit_zipf_mandelbrot(counts: npt.ArrayLike, rows: int, seed: int = 0) -> ZipfMandelbrot:
    """The law of `rows` ids whose samples look most like a sample with these counts.

    A sample orders ids by their luck, and has seen but some of them, so that a line through
    its counts is biased. This compares samples with samples instead (simulated moments,
    McFadden 1989, doi:10.2307/1913621): draw as many accesses as the sample has from a
    candidate, sort the candidate's counts, and minimise the squared difference of the shares
    of the k hottest ids over k = 1, 2, 4, … The same random numbers serve all candidates.

    Shares weigh every lookup alike, so that the hot ids of small tables fit too.
    `placer.profile.zipf` fits the same law by likelihood, which weighs every row alike and
    tells how sure its exponent is.

    Parameters
    ----------
    counts : int array
        Accesses of each id that the sample saw, in any order.
    rows : int
        Ids that the full log has, those that the sample did not see included.

    Raises
    ------
    DataError
        If the sample is empty or has more ids than `rows`.
    """
    observed = np.sort(np.asarray(counts, dtype=np.int64))[::-1]
    accesses = int(observed.sum())
    if not accesses or observed.size > rows:
        raise DataError(
            f"cannot fit the skew of {rows} rows to {accesses} accesses of {observed.size} ids; "
            "give at least one access, and as many rows as there are ids"
        )
    # One point past the last id seen makes too few distinct ids as costly as too many.
    tops = np.unique(np.append(2 ** np.arange(int(observed.size).bit_length() + 1), observed.size))
    target = _top_shares(observed, tops)
    quantiles = np.random.default_rng(seed).random(accesses)

    def distance(exponent: float, shift: float) -> float:
        ranks = ZipfMandelbrot(rows, exponent, shift).ranks_at(quantiles)
        simulated = np.sort(np.unique(ranks, return_counts=True)[1])[::-1]
        return float(np.square(_top_shares(simulated, tops) - target).sum())

    fits = []
    for shift in _SHIFTS:
        if shift and shift > rows / 4:
            break  # a shift as large as the table makes all exponents alike
        exponent = _golden_section(partial(distance, shift=shift))
        fits.append((distance(exponent, shift), exponent, shift))
    _, exponent, shift = min(fits)
    return ZipfMandelbrot(rows, round(exponent, 3), shift)


def _top_shares(
    counts: npt.NDArray[np.int64], tops: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Share of the accesses that fall on the k hottest ids, for each k of `tops`."""
    cumulative = np.cumsum(counts)
    return np.asarray(cumulative[np.minimum(tops, counts.size) - 1] / cumulative[-1])


def _golden_section(distance: Callable[[float], float]) -> float:
    """The exponent of least distance within 0..`_MAX_EXPONENT` (Kiefer 1953)."""
    ratio = (np.sqrt(5.0) - 1) / 2
    low, high = 0.0, _MAX_EXPONENT
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = distance(left), distance(right)
    while high - low > _EXPONENT_TOLERANCE:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = distance(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = distance(right)
    return (low + high) / 2
