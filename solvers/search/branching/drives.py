"""Rows on drives in the integer program: any number of a shard's coldest rows.

A point of a curve says which rows are in HBM. A drive point says from which row on they are on the
drive, with the drive's time and the DRAM that it frees. A column of a linear program has a point
and a drive point behind it. Their costs add up, so the cheapest pair is found without trying all.
"""

from collections.abc import Sequence

import numpy as np

from cost_models import ANY_SHARE, CostCurve
from solvers.model.instance import ShardingOption
from solvers.model.knapsack import Float, Int


class DrivePoints:
    """Drive points of all parts.

    `costs`, shape (rows of points, 1 + drive points): what each adds to a point of its part; the
    first stands for no rows on a drive. `number`: number of drive points. The column of point k and
    drive point m is `k * number + m`.
    """

    def __init__(
        self, rows: int, costs: Sequence[Float], part_of_point: Int, first: Sequence[Int]
    ) -> None:
        """Take the costs of each part's drive points, and the first one behind each point."""
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
        """Return the least that a drive adds to each of some points, and the columns' numbers.

        `prices` has shape (rows of points, parts).
        """
        if not self._part.size:
            return np.zeros(points.size), points
        costs = np.einsum("rd,rd->d", prices[:, self._part], self.costs[:, 1:])
        # The least cost from each drive point on, within its part: lift later parts above it.
        lifted = costs + self._part * (1.0 + float(np.ptp(costs)))
        least = np.flatnonzero(lifted <= np.minimum.accumulate(lifted[::-1])[::-1])
        at = least[np.searchsorted(least, self._first[points])]
        pays = (costs[at] < 0) & ~self._none[points]
        return np.where(pays, costs[at], 0.0), points * self.number + np.where(pays, 1 + at, 0)


def drive_points(curve: CostCurve, members: Float, most_s: float) -> Float:
    """Return what rows on the drive add to a shard, shape (phases + 3, m).

    These are bytes of HBM (0), seconds of phases, bytes of DRAM (negative), and minus the point's
    number. Points at which a chain of phases takes much longer than `most_s` are left out.
    """
    seconds = curve.drive_s_of_phases
    if seconds is None:
        return np.zeros((len(members[0]) + 3, 0))
    seconds = np.pad(seconds, ((0, len(members[0]) - len(seconds)), (0, 0)))
    # Keep one point more, as rows between two points may be on the drive.
    first = max(0, int(((members @ seconds).max(axis=0) > most_s).sum()) - 1)
    points = np.arange(seconds.shape[1])
    every: Float = np.vstack((0.0 * points, seconds, -curve.dram_bytes, -points))
    return every[:, first:]


def without_settled(options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """Leave out options that fix a share of rows on drives which another option leaves open.

    Examples
    --------
    >>> none = ShardingOption()
    >>> some = none._replace(home=none.home._replace(drive_share=ANY_SHARE))
    >>> without_settled([none, some]) == [some]
    True
    """
    given = set(options)
    opened = [o._replace(home=o.home._replace(drive_share=ANY_SHARE)) for o in options]
    return [o for o, same in zip(options, opened, strict=True) if o == same or same not in given]
