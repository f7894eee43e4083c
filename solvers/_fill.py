"""Which rows of the pieces of one GPU are in its HBM: a fractional knapsack."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models import PieceCurve

Float = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Hull:
    """The lower convex hull of a curve's times over its HBM bytes.

    Attributes
    ----------
    hbm_bytes, time_s, hot_rows : float64, shape (m,)
        Corners: bytes increase, times decrease, and each further byte saves less.
    """

    hbm_bytes: Float
    time_s: Float
    hot_rows: Float


def hull(curve: PieceCurve, time_s: Float) -> Hull:
    """The lower hull of `time_s` (of a curve's GPU or DRAM) over the curve's HBM bytes.

    Rows that are staged every step take as many bytes in DRAM's staging buffer as in HBM,
    so bytes may even fall at first: such points are dominated, and the hull starts at the
    smallest number of bytes.
    """
    bytes_, hot = curve.hbm_bytes, curve.hot_rows.astype(np.float64)
    first = len(bytes_) - 1 - int(np.argmin(bytes_[::-1]))
    bytes_, time_s, hot = bytes_[first:], time_s[first:], hot[first:]
    extra, falls = np.diff(bytes_), -np.diff(time_s)
    if (extra > 0).all() and (falls > 0).all() and (np.diff(falls / extra) <= 0).all():
        return Hull(bytes_, time_s, hot)
    corners = [0]
    for i in range(1, len(bytes_)):
        if time_s[i] >= time_s[corners[-1]]:
            continue
        # Buffers are whole rows and spare ones, so bytes may fall a little here and there.
        while corners and bytes_[i] <= bytes_[corners[-1]]:
            corners.pop()
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            slope = (time_s[b] - time_s[a]) * (bytes_[i] - bytes_[a])
            if slope < (time_s[i] - time_s[a]) * (bytes_[b] - bytes_[a]):
                break
            corners.pop()
        corners.append(i)
    return Hull(bytes_[corners], time_s[corners], hot[corners])


@dataclass(frozen=True, slots=True, eq=False)
class Ladder:
    """A piece at falling prices of HBM: at each, all rows in HBM that are worth it.

    Costs are rows of an array: HBM bytes, GPU seconds, DRAM seconds, DRAM bytes, hot rows.

    Attributes
    ----------
    values : float64, shape (5, prices)
        Costs at each of a list of prices that falls from infinity to 0; the list is the same
        for all pieces, so that ladders can be added up. Without the cost of a split.
    cold, full : float64, shape (5,)
        Costs with no row and with all rows in HBM.
    split : float64, shape (5,)
        What is added when there are rows in both tiers.
    """

    values: Float
    cold: Float
    full: Float
    split: Float


def ladder(curve: PieceCurve, prices: Float) -> Ladder:
    """The ladder of a curve; `prices` fall strictly, in seconds per byte."""
    corners = hull(curve, curve.gpu_s)
    worth = np.diff(corners.time_s) / np.diff(corners.hbm_bytes)  # Negative, rising to 0.
    at = np.searchsorted(worth, -prices, side="left")
    hot = corners.hot_rows[at]
    values = np.stack(
        [
            corners.hbm_bytes[at],
            corners.time_s[at],
            np.interp(hot, curve.hot_rows, curve.dram_s),
            np.interp(hot, curve.hot_rows, curve.dram_bytes),
            hot,
        ]
    )
    cold, full = (
        np.array(
            [
                curve.hbm_bytes[end],
                curve.gpu_s[end],
                curve.dram_s[end],
                curve.dram_bytes[end],
                curve.hot_rows[end],
            ]
        )
        for end in (0, -1)
    )
    split = np.array([curve.split_hbm_bytes, curve.split_s, 0.0, 0.0, 0.0])
    return Ladder(values, cold, full, split)


@dataclass(frozen=True, slots=True)
class Filling:
    """Hot rows of each piece of one GPU, and what the GPU then costs."""

    hot_rows: tuple[int, ...]
    gpu_s: float
    dram_s: float
    hbm_bytes: float
    dram_bytes: float


def fill(ladders: Sequence[Ladder], hbm_bytes: float) -> Filling | None:
    """Put the rows that save most time per byte into `hbm_bytes`; None if nothing fits.

    All pieces climb down their ladders together until HBM is full; that gives a price of
    HBM. Pieces for which all rows or none in HBM are cheaper at that price than a split,
    its cost included, are taken so; the others share what is left.
    """
    if not ladders:
        return Filling((), 0.0, 0.0, 0.0, 0.0)
    _, price = _descend(ladders, hbm_bytes)
    wanted = _better_whole(ladders, price)
    whole = {number: ends[0] for number, ends in enumerate(wanted) if ends}
    # What does not fit in its tier after all goes to the other one or is split, largest first.
    filling = _fill_around(ladders, whole, hbm_bytes)
    for number in sorted(whole, key=lambda n: -whole[n][0]):
        if filling is not None:
            break
        smaller = [end for end in wanted[number][1:] if end[0] < whole[number][0]]
        if smaller:
            whole[number] = smaller[0]
        else:
            del whole[number]
        filling = _fill_around(ladders, whole, hbm_bytes)
    if filling is None:
        return _fill_around(ladders, {}, hbm_bytes)
    return _with_what_is_left(ladders, whole, filling, hbm_bytes)


def _with_what_is_left(
    ladders: Sequence[Ladder], whole: dict[int, Float], filling: Filling, hbm_bytes: float
) -> Filling:
    """A filling, or one that puts the HBM that it leaves to use.

    Of a piece whose rows are all alike a price tells only whether none or all are worth
    their HBM. The one of which a part is worth most is split.
    """
    left = hbm_bytes - filling.hbm_bytes
    best, most = None, 0.0
    for number, cost in whole.items():
        piece = ladders[number]
        room = cost[0] + left - piece.split[0]
        if cost is not piece.cold or room <= piece.values[0, 0]:
            continue
        gain = cost[1] - piece.split[1] - np.interp(room, piece.values[0], piece.values[1])
        if gain > most:
            best, most = number, float(gain)
    if best is None:
        return filling
    others = {number: cost for number, cost in whole.items() if number != best}
    return _fill_around(ladders, others, hbm_bytes) or filling


def _better_whole(ladders: Sequence[Ladder], price: float) -> list[list[Float]]:
    """No row or all rows of each piece in HBM where that beats any split at a price, best first."""
    values = np.array([piece.values[:2] for piece in ladders])
    splits = np.array([piece.split[:2] for piece in ladders])
    best_split = (values[:, 1] + price * values[:, 0]).min(axis=1)
    best_split += splits[:, 1] + price * splits[:, 0]
    wanted = []
    for piece, limit in zip(ladders, best_split.tolist(), strict=True):
        cold = float(piece.cold[1]) + price * float(piece.cold[0])
        full = float(piece.full[1]) + price * float(piece.full[0])
        ends = [piece.cold] if cold <= limit else []
        if full <= limit:
            ends.insert(0 if full < cold else len(ends), piece.full)
        wanted.append(ends)
    return wanted


def _descend(ladders: Sequence[Ladder], hbm_bytes: float) -> tuple[float, float]:
    """The rung, in fractions, where HBM is full, and the price of HBM there."""
    bytes_ = np.add.reduce([piece.values[0] for piece in ladders])
    rung = int(np.searchsorted(bytes_, hbm_bytes, side="right")) - 1
    if rung < 0 or rung + 1 >= bytes_.size:
        return float(rung), 0.0
    time_s = [sum(float(piece.values[1, r]) for piece in ladders) for r in (rung, rung + 1)]
    step = bytes_[rung + 1] - bytes_[rung]
    return rung + float((hbm_bytes - bytes_[rung]) / step), (time_s[0] - time_s[1]) / float(step)


def _fill_around(
    ladders: Sequence[Ladder], whole: dict[int, Float], hbm_bytes: float
) -> Filling | None:
    """Fill with some pieces in one tier as given, and the others split."""
    costs = dict(whole)
    split = [number for number in range(len(ladders)) if number not in whole]
    if split:
        room = hbm_bytes - sum(float(cost[0]) for cost in whole.values())
        room -= sum(float(ladders[number].split[0]) for number in split)
        position, _ = _descend([ladders[number] for number in split], room)
        if position < 0:
            return None
        rung = int(position)
        part = position - rung
        for number in split:
            values = ladders[number].values
            at = values[:, rung]
            if part:
                at = at + part * (values[:, rung + 1] - at)
            costs[number] = at + ladders[number].split
    total = sum(costs.values(), start=np.zeros(5))
    if total[0] > hbm_bytes + 1:  # Rounding; the plan is checked to the byte in the end.
        return None
    hot = tuple(int(costs[number][4]) for number in range(len(ladders)))
    return Filling(hot, float(total[1]), float(total[2]), float(total[0]), float(total[3]))
