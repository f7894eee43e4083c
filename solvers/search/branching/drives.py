"""Rows on drives in the integer program: any number of a shard's coldest ones.

A point of a curve says which rows are in HBM, and a point here from which row on they are on the
drive: what that takes of the drive, and what it leaves of DRAM. A column of a linear program is one
of each, the second from the first one's rows on. What a shard costs at least at any prices is so
found without looking at all pairs.
"""

from collections.abc import Sequence

import numpy as np

from cost_models import CostCurve
from solvers.model.knapsack import Float, Int


class DrivePoints:
    """First rows on drives of all parts.

    Attributes
    ----------
    costs : float64, shape (rows of points, 1 + drive points)
        What each adds to a point of the same part, after a first one without rows on a drive.
    number : int
        How many these are. A column of point k and drive point m has number `k * number + m`.
    """

    def __init__(
        self, rows: int, costs: Sequence[Float], part_of_point: Int, first: Sequence[Int]
    ) -> None:
        """Take costs of each part's drive points, and the first one for each point of its curve."""
        sizes = np.array([of_part.shape[1] for of_part in costs], dtype=np.int64)
        self._part = np.repeat(np.arange(sizes.size), sizes)
        self.costs = np.hstack([np.zeros((rows, 1)), *costs])
        self.number = self.costs.shape[1]
        ends = np.cumsum(sizes)
        begins = (ends - sizes)[part_of_point]
        begins = begins + np.concatenate([*first, np.zeros(0, dtype=np.int64)])
        self._none = begins >= ends[part_of_point]
        self._first = np.where(self._none, 0, begins)

    def least(self, prices: Float, points: Int) -> tuple[Float, Int]:
        """Return the least that a drive adds to some points, and numbers of columns with it.

        `prices` has shape (rows of points, parts).
        """
        if not self._part.size:
            return np.zeros(points.size), points
        costs = np.einsum("rd,rd->d", prices[:, self._part], self.costs[:, 1:])
        # The least from each on, of its part: later parts are lifted above it.
        lifted = costs + self._part * (1.0 + float(np.ptp(costs)))
        least = np.flatnonzero(lifted <= np.minimum.accumulate(lifted[::-1])[::-1])
        at = least[np.searchsorted(least, self._first[points])]
        pays = (costs[at] < 0) & ~self._none[points]
        return np.where(pays, costs[at], 0.0), points * self.number + np.where(pays, 1 + at, 0)


def drive_points(curve: CostCurve, members: Float, most_s: float) -> Float:
    """Return bytes of HBM, seconds of phases, bytes that are not in DRAM, and less the point.

    Of shape (phases + 3, m). The drive may take `most_s` of a chain of phases, or a little more.
    """
    seconds = curve.drive_s_of_phases
    if seconds is None:
        return np.zeros((len(members[0]) + 3, 0))
    seconds = np.pad(seconds, ((0, len(members[0]) - len(seconds)), (0, 0)))
    # As rows between two points may be on the drive, one point more.
    first = max(0, int(((members @ seconds).max(axis=0) > most_s).sum()) - 1)
    points = np.arange(seconds.shape[1])
    every: Float = np.vstack((0.0 * points, seconds, -curve.dram_bytes, -points))
    return every[:, first:]
