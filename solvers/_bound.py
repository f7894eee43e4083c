"""A lower bound of the step time by pooling all HBM at one price.

For any price λ ≥ 0 of a byte of HBM, any placement of step time T satisfies on each GPU

    Σ over its pieces of (time + λ · bytes)  ≤  T + λ · HBM

Summed over GPUs, the left side is at least what the tables cost when each takes its
cheapest cut, among those whose every piece can finish within T, and each piece its cheapest
number of hot rows that one GPU can hold. The smallest T for which that sum is at most
GPUs × T + λ × all HBM is therefore a lower bound (Lagrangian duality; Geoffrion 1974,
doi:10.1007/BFb0120690). The price is chosen to make it large. The hosts' memory gives a
second one: what must be staged whatever is in the pooled HBM.

Both hold for the whole search space of `solvers._instance`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models import PieceCurve
from solvers._fill import Hull, hull
from solvers._instance import Cut, Instance, Piece

Float = npt.NDArray[np.float64]

_PRICE_STEPS = 8
"""Evaluations of the price; the bound is flat near its best."""


@dataclass(frozen=True, slots=True)
class CutWork:
    """One way to cut a table, at the best for each of its pieces.

    `longest_s` is the least time of the slowest piece; `priced_s` the least time plus price
    times bytes, summed over pieces.
    """

    cut: Cut
    longest_s: float
    priced_s: float


@dataclass(frozen=True, slots=True)
class PooledBound:
    """The bound, and what it was made of.

    Attributes
    ----------
    step_time_s : float
    price_s_per_byte : float
        The price λ: GPU seconds that one more byte of HBM saves, about.
    pool_s : float
        λ × all HBM.
    cuts : tuple of tuples of CutWork
        Per table, every cut in the search space.
    dram_s : float
        The part that the hosts' memory alone enforces.
    """

    step_time_s: float
    price_s_per_byte: float
    pool_s: float
    cuts: tuple[tuple[CutWork, ...], ...]
    dram_s: float

    def cut_for(self, table: int, step_time_s: float) -> CutWork | None:
        """The cheapest cut whose pieces can each take at most `step_time_s`."""
        allowed = [cut for cut in self.cuts[table] if cut.longest_s <= step_time_s]
        return min(allowed, key=lambda cut: (cut.priced_s, cut.cut), default=None)

    def work_s(self, step_time_s: float) -> float:
        """GPU seconds that any placement of that step time needs; infinite if there is none."""
        total = -self.pool_s
        for table in range(len(self.cuts)):
            cut = self.cut_for(table, step_time_s)
            if cut is None:
                return float("inf")
            total += cut.priced_s
        return total


def pooled_bound(instance: Instance) -> PooledBound:
    """The bound of this module's docstring."""
    pool = float(instance.hbm_bytes.sum())
    gpu_hulls, dram_hulls = [], []
    for table in range(instance.tables):
        curves = [instance.curve(Piece(table), gpu) for gpu in instance.kinds]
        gpu_hulls.append(hull(curves[0], curves[0].gpu_s))
        dram = [hull(curve, curve.dram_s) for curve in curves]
        dram_hulls.append(min(dram, key=lambda h: float(h.time_s[0])))
    left_s, _ = _pooled_fill(dram_hulls, pool)
    staged_s = left_s + sum(float(h.time_s[-1]) for h in dram_hulls)
    dram_s = staged_s / len(instance.dram_bytes)
    _, price = _pooled_fill(gpu_hulls, pool)
    pieces = _Pieces(instance)
    best = _bound_at(instance, pieces, price, dram_s)
    if price == 0:
        return best
    # The bound is concave in the price: search by golden sections between generous ends.
    low, high = price / 8, price * 8
    ratio = (5**0.5 - 1) / 2
    for _ in range(_PRICE_STEPS):
        left, right = high * (low / high) ** ratio, low * (high / low) ** ratio
        a, b = (_bound_at(instance, pieces, p, dram_s) for p in (left, right))
        best = max(best, a, b, key=lambda bound: bound.step_time_s)
        low, high = (low, right) if a.step_time_s > b.step_time_s else (left, high)
    return best


def _bound_at(instance: Instance, pieces: "_Pieces", price: float, dram_s: float) -> PooledBound:
    """The bound at one price."""
    cuts = pieces.at(price)
    pool_s = price * float(instance.hbm_bytes.sum())

    def passes(step_time_s: float) -> bool:
        return bound.work_s(step_time_s) <= instance.gpus * step_time_s

    bound = PooledBound(0.0, price, pool_s, cuts, dram_s)
    low = max(dram_s, max(min(cut.longest_s for cut in table) for table in cuts))
    if not passes(low):
        # Work falls in steps as T grows: find where it crosses GPUs × T.
        high = max(low, bound.work_s(float("inf")) / instance.gpus)
        high = max(high, *(cut.longest_s for table in cuts for cut in table))
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if passes(middle) else (middle, high)
    return PooledBound(low, price, pool_s, cuts, dram_s)


class _Pieces:
    """Times and bytes of all pieces of all cuts, at the hot-row counts that one GPU can hold."""

    def __init__(self, instance: Instance) -> None:
        self._of: list[list[tuple[Cut, list[list[PieceCurve]]]]] = []
        self._most_of = [
            max(
                float(h)
                for h, k in zip(instance.hbm_bytes, instance.kind_of_gpu, strict=True)
                if k == kind
            )
            for kind in range(len(instance.kinds))
        ]
        for table in range(instance.tables):
            self._of.append(
                [
                    (
                        cut,
                        [
                            [instance.curve(piece, gpu) for gpu in instance.kinds]
                            for piece in _representatives(instance.pieces(table, cut))
                        ],
                    )
                    for cut in instance.cuts_of(table)
                ]
            )

    def at(self, price: float) -> tuple[tuple[CutWork, ...], ...]:
        """Every cut of every table at a price."""
        return tuple(
            tuple(self._work(cut, curves, price) for cut, curves in table) for table in self._of
        )

    def _work(self, cut: Cut, pieces: list[list[PieceCurve]], price: float) -> CutWork:
        best = [
            [least(curve, most, price) for curve, most in zip(kinds, self._most_of, strict=True)]
            for kinds in pieces
        ]
        times = [min(time_s for time_s, _ in kinds) for kinds in best]
        priced = [min(priced_s for _, priced_s in kinds) for kinds in best]
        # Thin slices differ only in which of the hottest ranks they hold; the last one has
        # the least work and stands for those that were not looked at.
        rest = cut.pieces - len(pieces)
        return CutWork(cut, max(times), sum(priced) + rest * priced[-1])


def least(curve: PieceCurve, hbm_bytes: float, price: float = 0.0) -> tuple[float, float]:
    """Least time, and least time + price × bytes, of a piece within `hbm_bytes`, in seconds.

    All or no rows in HBM are compared without the cost of a split. Infinite if not even the
    piece's buffers fit.
    """
    fits = curve.hbm_bytes <= hbm_bytes
    if not fits.any():
        return float("inf"), float("inf")
    times, priced = [], []
    split_priced = curve.split_s + price * curve.split_hbm_bytes
    for end in (0, -1):
        if fits[end]:
            times.append(float(curve.gpu_s[end]))
            priced.append(float(curve.gpu_s[end] + price * curve.hbm_bytes[end]))
    # Between a point that fits and a next one that does not, up to the last byte. (The other
    # way round, the point that fits is better: it has less time and fewer bytes.)
    for i in np.flatnonzero(fits[:-1] & ~fits[1:]) + 1:
        part = (hbm_bytes - curve.hbm_bytes[i - 1]) / (curve.hbm_bytes[i] - curve.hbm_bytes[i - 1])
        at_limit = float(curve.gpu_s[i - 1] + part * (curve.gpu_s[i] - curve.gpu_s[i - 1]))
        times.append(at_limit + curve.split_s)
        priced.append(at_limit + price * hbm_bytes + split_priced)
    times.append(float(curve.gpu_s[fits].min()) + curve.split_s)
    priced.append(float((curve.gpu_s + price * curve.hbm_bytes)[fits].min()) + split_priced)
    return min(times), min(priced)


def _pooled_fill(hulls: Sequence[Hull], hbm_bytes: float) -> tuple[float, float]:
    """Fill `hbm_bytes` fractionally with what saves most per byte.

    Returns the seconds beyond all-in-HBM that remain, and what one more byte would save.
    """
    extra = np.concatenate([np.diff(h.hbm_bytes) for h in hulls])
    saved = np.concatenate([-np.diff(h.time_s) for h in hulls])
    room = hbm_bytes - sum(float(h.hbm_bytes[0]) for h in hulls)
    order = np.argsort(-saved / extra, kind="stable")
    before = np.concatenate(([0.0], np.cumsum(extra[order])))
    taken = np.clip((room - before[:-1]) / extra[order], 0, 1)
    partial = int(np.searchsorted(before, room, side="right")) - 1
    price = saved[order[partial]] / extra[order[partial]] if 0 <= partial < order.size else 0.0
    return float(saved.sum() - saved[order] @ taken), float(price)


def _representatives(pieces: list[Piece]) -> list[Piece]:
    """The first pieces, which hold the hottest ranks, and the last."""
    return pieces if len(pieces) <= 5 else [*pieces[:4], pieces[-1]]
