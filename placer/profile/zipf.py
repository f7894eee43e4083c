"""The Zipf–Mandelbrot law, and drawing from it.

Row k of M (from 0, hottest first) is read with probability p_k ∝ (k + 1 + q)^−s. Its CDF is
`AccessCdf.zipf`.
"""

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from placer.errors import DataError
from placer.profile.cdf import AccessCdf

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
