"""Lookups and distinct rows of a step that fall in slices of ranks, from a table's access CDF."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from placer.plan.buffers import STEPS_IN_FLIGHT, slice_members
from placer.profile.table_profile import TableProfile

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


@lru_cache(maxsize=4096)
def slice_load(
    profile: TableProfile, rows: tuple[int, int, int], step_lookups: float
) -> tuple[float, float]:
    """Return lookups and expected distinct rows of a slice of ranks in a step."""
    cdf = profile.cdf
    members = slice_members(cdf.ranks, rows)
    touched = _row_load(profile, step_lookups)
    return float(members @ cdf.row_share) * step_lookups, float(members @ touched)


@lru_cache(maxsize=4096)
def _row_load(profile: TableProfile, step_lookups: float) -> Float:
    """Return probability that a step touches a row of each segment of the CDF, shape (m,)."""
    touched: Float = np.diff(profile.unique_at_ranks(step_lookups)) / np.diff(profile.cdf.ranks)
    return touched


class Load(NamedTuple):
    """What a step does in a slice of ranks, as a function of how many of them are in HBM."""

    hot_rows: Int  # Shape (m,): from none to all, strictly increasing.
    # Shape (5, m): lookups, and expected distinct rows, that fall in the hot rows and in the
    # others; ones.
    counts: Float
    # Shape (m,): distinct rows of all steps in flight that fall in the others.
    cold_in_flight: Float

    def with_points(self, rows: Sequence[int]) -> "Load":
        """Return the load with points at some more numbers of rows in HBM."""
        more = np.union1d(self.hot_rows, rows)
        values = np.vstack((self.counts, self.cold_in_flight))
        of_rows = np.stack([np.interp(more, self.hot_rows, row) for row in values])
        return Load(more, of_rows[:-1], of_rows[-1])

    @property
    def all_counts(self) -> tuple[float, float]:
        """Lookups and expected distinct rows of the whole slice."""
        lookups, unique = self.counts[:2, -1] + self.counts[2:4, -1]
        return float(lookups), float(unique)


@lru_cache(maxsize=1024)
def load_of(
    profile: TableProfile,
    rows: tuple[int, int, int],
    step_lookups: float,
    steps_at_ends: bool = False,
) -> Load:
    """Return the load of a slice of ranks; with `steps_at_ends`, also one row from each end.

    Cached, as a solver asks for all column slices of a slice in a row, and machines of as many GPUs
    have the same. Not to be written to.
    """
    if steps_at_ends:
        load = load_of(profile, rows, step_lookups)
        last = int(load.hot_rows[-1])
        return load.with_points([min(1, last), max(0, last - 1)])
    members = slice_members(profile.cdf.ranks, rows)
    loads = _row_loads(profile, step_lookups)
    if not members.all():  # A thin slice has no member in some segments.
        kept = members > 0
        members, loads = members[kept], loads[:, kept]
    sums = np.zeros((4, members.size + 1))
    np.cumsum(members * loads, axis=1, out=sums[:, 1:])
    sums[1] *= step_lookups  # The last: so that all rows have all lookups, to the bit.
    left = sums[1:, -1:] - sums[1:]
    counts = np.concatenate((sums[1:3], left[:2], np.ones((1, left.shape[1]))))
    return Load(sums[0].astype(np.int64), counts, left[2])


@lru_cache(maxsize=2048)
def _row_loads(profile: TableProfile, step_lookups: float) -> Float:
    """Return what each row of a segment of the CDF counts, shape (4, m).

    One row, its share of lookups, and the probabilities that a step and all steps in flight touch
    it.
    """
    share, once = profile.cdf.row_share, _row_load(profile, step_lookups)
    in_flight = _row_load(profile, STEPS_IN_FLIGHT * step_lookups)
    return np.stack((np.ones_like(share), share, once, in_flight))
