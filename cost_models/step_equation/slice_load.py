"""Lookups and distinct rows of a step that fall in slices of ranks, from a table's access CDF."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from placer.plan.buffers import STEPS_IN_FLIGHT, slice_members
from placer.profile.table_profile import TableProfile

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


def slice_load(
    profile: TableProfile, rows: tuple[int, int, int], step_lookups: float
) -> tuple[float, float]:
    """Lookups and expected distinct rows of a slice of ranks in a step."""
    cdf = profile.cdf
    members = slice_members(cdf.ranks, rows)
    touched = _row_load(profile, step_lookups)
    return float(members @ cdf.row_share) * step_lookups, float(members @ touched)


@lru_cache(maxsize=32)
def _row_load(profile: TableProfile, step_lookups: float) -> Float:
    """Probability that a step touches a row of each segment of the CDF, shape (m,)."""
    touched: Float = np.diff(profile.cdf.unique_at_ranks(step_lookups)) / np.diff(profile.cdf.ranks)
    return touched


@lru_cache(maxsize=32)
def cumulative_load(
    profile: TableProfile, rows: tuple[int, int, int], step_lookups: float
) -> tuple[Int, Float, Float]:
    """Hot rows of a slice, and the lookups and distinct rows that fall in them, shape (m,).

    Cached, as a solver asks for all column slices of a slice in a row.
    """
    members = slice_members(profile.cdf.ranks, rows)
    touched = _row_load(profile, step_lookups)
    hot = np.concatenate(([0.0], np.cumsum(members)))
    lookups = np.concatenate(([0.0], np.cumsum(members * profile.cdf.row_share))) * step_lookups
    unique = np.concatenate(([0.0], np.cumsum(members * touched)))
    # A thin slice has no member in some segments.
    first = np.concatenate(([True], np.diff(hot) > 0))
    return hot[first].astype(np.int64), lookups[first], unique[first]


def rows_in_flight(
    profile: TableProfile, rows: tuple[int, int, int], step_lookups: float, hot_rows: Int
) -> Float:
    """Distinct rows of all steps in flight that fall in the hot rows of a slice, shape (m,)."""
    hot, _, unique = cumulative_load(profile, rows, STEPS_IN_FLIGHT * step_lookups)
    return np.interp(hot_rows, hot, unique)


def with_steps_at_ends(hot: Int, lookups: Float, unique: Float) -> tuple[Int, Float, Float]:
    """The same curves with points at one row, and at all but one."""
    rows = int(hot[-1])
    more = np.unique(np.concatenate((hot, [min(1, rows), max(0, rows - 1)])))
    return more, np.interp(more, hot, lookups), np.interp(more, hot, unique)
