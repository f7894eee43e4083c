"""What one table can do: its cuts, their pieces, and all numbers of hot rows of these.

A curve is linear between its points, so that the least of a price-weighted sum over all
numbers of hot rows is at one of them, or at the edge of what a GPU has room or time for.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models import PieceCurve
from solvers._fill import BYTES, DRAM_BYTES, DRAM_S, GPU_S, costs_of
from solvers._instance import Cut, Instance, Piece
from solvers._lp_pools import Pools

Float = npt.NDArray[np.float64]

_INSIDE = 1 + 1e-9
"""What is full may be so much fuller, for rounding: it makes bounds lower."""

_SLICES = 4
"""Row slices that are looked at besides the last."""


@dataclass(frozen=True, slots=True)
class Part:
    """Pieces that cost the same: how many, and their points, shape (4, m), on each pool.

    Pools that cannot serve them are left out.
    """

    times: int
    points: dict[int, Float]


@dataclass(frozen=True, slots=True)
class Option:
    """A cut of a table: its longest piece, replicas on one GPU of each pool, and pieces."""

    longest_s: float
    replica_s: Float
    replica_bytes: Float
    parts: tuple[Part, ...]

    @property
    def points(self) -> int:
        """How many points its pieces have."""
        return sum(mine.shape[1] for part in self.parts for mine in part.points.values())


class Options:
    """The cuts of a table that a plan faster than `upper_s` can use."""

    def __init__(self, instance: Instance, pools: Pools, table: int, upper_s: float) -> None:
        self.instance = instance
        self.pools = pools
        self.table = table
        self.upper_s = upper_s
        allowed = instance.allowed(table)
        self.serving = {
            pool: number
            for pool, members in enumerate(pools.gpus)
            if (number := sum(allowed is None or bool(allowed[gpu]) for gpu in members))
        }

    def of_cuts(self, cuts: Iterable[Cut]) -> list[Option]:
        """Those cuts as they are."""
        found = [self._option(cut) for cut in cuts]
        return [option for option in found if option is not None]

    def whole_suffices(self, least_s: float) -> bool:
        """Whether whole tables may stand for cuts, and one GPU can serve this one in time."""
        cuts = self.instance.cuts_of(self.table)
        whole = [cut for cut in cuts if cut.pieces == 1]
        if {(c.head, c.cold) for c in cuts} - {(c.head, c.cold) for c in whole}:
            return False
        # Of pieces with caches one may be read in place, another be all in HBM.
        if any(cut.cold == "cached" and cut.pieces > 1 for cut in cuts):
            return False
        # Pieces that have to be in one tier are not a part of the whole table in one.
        if any(not np.isfinite(self._curve(Piece(self.table, cut)).split_s) for cut in whole):
            return False
        return any(option.longest_s <= least_s for option in self.of_cuts(whole))

    def of_wholes(self, extra_s: float) -> list[Option]:
        """Uncut placements, and for each one that stands for all those cut finer.

        That is the whole table with its rows split freely, and as large as can be. At prices
        that are the same on all GPUs, pieces on several do not do better together.
        """
        cuts = self.instance.cuts_of(self.table)
        finer = {(cut.head, cut.cold) for cut in cuts if cut.pieces > 1}
        whole = [cut for cut in cuts if cut.pieces == 1]
        found = self.of_cuts(whole)
        for cut in whole:
            if (cut.head, cut.cold) in finer:
                replica_s, replica_bytes = self._replicas(cut)
                points = _stacked(self._curve(Piece(self.table, cut)))
                points[GPU_S] += extra_s
                parts = (Part(1, {0: points}),)
                found.append(Option(float(replica_s.max()), replica_s, replica_bytes, parts))
        return found

    def _option(self, cut: Cut) -> Option | None:
        """A cut; None if a plan that is fast enough cannot use it."""
        replica_s, replica_bytes = self._replicas(cut)
        longest_s = float(replica_s.max())
        parts, least_s = [], []
        for piece, times in _distinct(self.instance.pieces(self.table, cut)):
            points = {
                pool: found
                for pool in self.serving
                if (found := self._points(piece, pool, replica_s, replica_bytes)).size
            }
            if not points:
                return None
            parts.append(Part(times, points))
            least_s.append(
                {pool: found[GPU_S].min() + replica_s[pool] for pool, found in points.items()}
            )
        if parts:
            times_of = [part.times for part in parts]
            longest_s = max(longest_s, _longest_s(least_s, times_of, self.serving))
        if not longest_s <= self.upper_s or not np.isfinite(longest_s):
            return None
        return Option(longest_s, replica_s, replica_bytes, tuple(parts))

    def _points(self, piece: Piece, pool: int, replica_s: Float, replica_bytes: Float) -> Float:
        """The points of a piece that a GPU of a pool has room and time for, replicas included."""
        limits = np.full(4, np.inf)
        limits[BYTES] = self.pools.most_hbm_bytes[pool] - replica_bytes[pool]
        limits[GPU_S] = self.upper_s - replica_s[pool]
        limits[DRAM_S] = self.upper_s
        limits[DRAM_BYTES] = self.pools.most_dram_bytes[self.pools.host_of[pool]]
        return within(self._curve(piece, pool), limits)

    def _curve(self, piece: Piece, pool: int = 0) -> PieceCurve:
        return self.instance.curve(piece, self.pools.gpus[pool][0])

    def _replicas(self, cut: Cut) -> tuple[Float, Float]:
        """Time and bytes of replicas on one GPU of each pool."""
        replica = self.instance.replica(self.table, cut)
        if replica is None:
            return np.zeros(len(self.pools.gpus)), np.zeros(len(self.pools.gpus))
        curves = [self._curve(replica, pool) for pool in range(len(self.pools.gpus))]
        return np.array([c.gpu_s[0] for c in curves]), np.array([c.hbm_bytes[0] for c in curves])


def _distinct(pieces: Sequence[Piece]) -> list[tuple[Piece, int]]:
    """Pieces that cost different amounts, and how many cost as much, or more.

    Strips of one width are alike. Thin row slices differ only in which of the hottest ranks
    they hold; the last one has the least work and stands for those that are not looked at.
    """
    if not pieces:
        return []
    cut = pieces[0].cut
    strips = Counter(cut.widths or (0,))
    slices = [(offset, 1) for offset in range(min(cut.ways, _SLICES))]
    if cut.ways > _SLICES:
        slices.append((cut.ways - 1, cut.ways - _SLICES))
    return [
        (Piece(pieces[0].table, cut, offset, cut.widths.index(width) if width else 0), times * same)
        for width, same in strips.items()
        for offset, times in slices
    ]


def _longest_s(
    least_s: Sequence[dict[int, float]], times: Sequence[int], servers: dict[int, int]
) -> float:
    """A lower limit of the slowest piece's time, as pieces of a table need a GPU each.

    Parameters
    ----------
    least_s : sequence of dict
        Time of a piece on each pool that can serve it.
    times : sequence of int
        How many such pieces there are.
    servers : dict
        GPUs of each pool.
    """
    lowest = max(min(mine.values()) for mine in least_s)
    if len(servers) == 1:
        return lowest if sum(times) <= sum(servers.values()) else float("inf")
    for step_s in sorted({t for mine in least_s for t in mine.values() if t >= lowest}):
        # Pieces that only some pools serve in time must not be more than their GPUs (Hall).
        able = [frozenset(pool for pool, t in mine.items() if t <= step_s) for mine in least_s]
        if all(
            sum(n for n, mine in zip(times, able, strict=True) if mine <= some)
            <= sum(servers[pool] for pool in some)
            for some in {*able, frozenset(servers)}
        ):
            return step_s
    return float("inf")


def _stacked(curve: PieceCurve) -> Float:
    """The points of a curve without the costs of splits, shape (4, m)."""
    found = np.empty((4, curve.hot_rows.size))
    found[BYTES], found[GPU_S] = curve.hbm_bytes, curve.gpu_s
    found[DRAM_S], found[DRAM_BYTES] = curve.dram_s, curve.dram_bytes
    return found


def within(curve: PieceCurve, limits: Float) -> Float:
    """The corners of the part of a curve that is within limits, shape (4, m), m may be 0.

    The least of any price-weighted sum over that part, for prices of at least 0, is at one of
    them. All or no rows in HBM are without the cost of a split.

    Parameters
    ----------
    limits : float64, shape (4,)
        Of HBM bytes, GPU seconds, DRAM seconds and DRAM bytes.
    """
    loose = (limits * _INSIDE)[:, None]
    points = costs_of(curve)[:4]
    fits = (points <= loose).all(axis=0)
    if fits.all() or curve.hot_rows.size == 1 or not np.isfinite(curve.split_s):
        return points[:, fits]
    # Where the curve, with the cost of a split, crosses a limit between two of its points.
    # (Just beside an end it costs more than there, and crosses no limit that the end meets.)
    inner = _stacked(curve)
    inner[BYTES] += curve.split_hbm_bytes
    inner[GPU_S] += curve.split_s
    edge = [points[:, fits]]
    inside = inner <= limits[:, None]
    for row, limit in enumerate(limits):
        crossed = np.flatnonzero(inside[row, :-1] != inside[row, 1:])
        low, high = inner[:, crossed], inner[:, crossed + 1]
        at = low + (limit - low[row]) / (high[row] - low[row]) * (high - low)
        edge.append(at[:, (at <= loose).all(axis=0)])
    return np.concatenate(edge, axis=1)
