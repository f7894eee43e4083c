"""How the laws of `placer.workloads.synthetic_log` were fitted: to the head of a log."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from placer.errors import DataError
from placer.profile.cdf import ZipfMandelbrot

_SHIFTS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_GOLDEN = (np.sqrt(5.0) - 1) / 2


def fit_zipf_to_sample(counts: npt.ArrayLike, rows: int, seed: int = 0) -> ZipfMandelbrot:
    """The law of `rows` ids whose samples look most like a sample with these counts.

    A sample orders ids by their luck, and has seen but some of them, so that a line through
    its counts is biased. This compares samples with samples instead (simulated moments,
    McFadden 1989, doi:10.2307/1913621): draw as many accesses as the sample has from a
    candidate, sort the candidate's counts, and minimise the squared difference of the shares
    of the k hottest ids over k = 1, 2, 4, … The same random numbers serve all candidates.

    Shares weigh every lookup alike, so that the hot ids of small tables fit too.

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
        exponent = golden_section(
            lambda candidate, shift=shift: -distance(candidate, shift), 0.0, 6.0, 0.002
        )
        fits.append((distance(exponent, shift), exponent, shift))
    _, exponent, shift = min(fits)
    return ZipfMandelbrot(rows, round(exponent, 3), shift)


def _top_shares(
    counts: npt.NDArray[np.int64], tops: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Share of the accesses that fall on the k hottest ids, for each k of `tops`."""
    cumulative = np.cumsum(counts)
    return np.asarray(cumulative[np.minimum(tops, counts.size) - 1] / cumulative[-1])


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
