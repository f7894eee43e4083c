"""Which rows of the pieces of one GPU are in its HBM: a fractional knapsack."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models import CostCurve

Float = npt.NDArray[np.float64]

BYTES, GPU_S, DRAM_S, DRAM_BYTES, HOT = range(5)
"""Rows of a ladder's values."""


def costs_of(curve: CostCurve) -> Float:
    """All points of a curve as an array, shape (5, m): a ladder's rows, split costs included.

    With all rows or none in HBM there is no split, and no cost of one.
    """
    values = np.stack(
        [
            curve.hbm_bytes,
            curve.gpu_s,
            curve.dram_s,
            curve.dram_bytes,
            curve.hot_rows.astype(np.float64),
        ]
    )
    values[BYTES, 1:-1] += curve.split_hbm_bytes
    values[GPU_S, 1:-1] += curve.split_s
    return values


@dataclass(frozen=True, slots=True, eq=False)
class Ladder:
    """A piece at falling prices of HBM: at each, the rows in HBM that are worth it.

    Attributes
    ----------
    values : float64, shape (5, prices)
        HBM bytes, GPU seconds, DRAM seconds, DRAM bytes and hot rows of the point of the
        curve that is cheapest at each of a list of prices falling from infinity to 0, the
        cost of a split included. The list is the same for all pieces, so that ladders can
        be added up: the sum is cheapest for all pieces together.
    """

    values: Float


def ladder(curve: CostCurve, prices: Float) -> Ladder:
    """The ladder of a curve; `prices` fall strictly, in seconds per byte."""
    points = costs_of(curve)
    finite = prices[1:-1]
    # In bytes instead of seconds where prices are high: the first price is infinite.
    with np.errstate(invalid="ignore"):
        scaled = points[GPU_S] + finite[:, None] * points[BYTES]
    # The last point of equal ones: with more rows in HBM at the same cost.
    last = points.shape[1] - 1
    at = last - np.argmin(scaled[:, ::-1], axis=1)
    fewest = np.flatnonzero(points[BYTES] == points[BYTES].min())
    cheapest = int(fewest[np.argmin(points[GPU_S, fewest])])
    fastest = np.flatnonzero(points[GPU_S] == points[GPU_S].min())
    smallest = int(fastest[np.argmin(points[BYTES, fastest])])
    return Ladder(points[:, np.concatenate(([cheapest], at, [smallest]))])


@dataclass(frozen=True, slots=True)
class Filling:
    """Hot rows of each piece of one GPU, and what the GPU then costs."""

    hot_rows: tuple[int, ...]
    gpu_s: float
    dram_s: float
    hbm_bytes: float
    dram_bytes: float


def least_times(sums: Float, hbm_bytes: Float | float) -> Float:
    """A lower limit of the GPU time of any filling, close to that of the best.

    Parameters
    ----------
    sums : float64, shape (..., 5, prices) or (..., 2, prices)
        Sums of ladders; only bytes and GPU seconds are read.
    hbm_bytes : float64, shape (...) or scalar

    Returns
    -------
    float64, shape (...)
        Infinite where not even the first rung fits. Linear between rungs, as if each piece
        could be anywhere between two points of its convex hull.
    """
    prices = sums.shape[-1]
    bytes_ = sums[..., BYTES, :].reshape(-1, prices)
    time_s = sums[..., GPU_S, :].reshape(-1, prices)
    room = np.broadcast_to(hbm_bytes, sums.shape[:-2]).reshape(-1)
    rung = (bytes_ <= room[:, None]).sum(axis=1) - 1
    every = np.arange(rung.size)
    here, above = np.maximum(rung, 0), np.minimum(rung + 1, prices - 1)
    low, slow = bytes_[every, here], time_s[every, here]
    more = bytes_[every, above] - low
    # Where the last rung fits there is nothing more; bytes are whole, so half a byte is none.
    part = np.clip((room - low) / np.maximum(more, 0.5), 0.0, 1.0)
    times: Float = slow + part * (time_s[every, above] - slow)
    times[rung < 0] = np.inf
    return times.reshape(sums.shape[:-2])


def fill(
    ladders: Sequence[Ladder],
    hbm_bytes: float,
    curve_of: Callable[[int], CostCurve],
) -> Filling | None:
    """Put the rows that save most time per byte into `hbm_bytes`; None if nothing fits.

    All pieces climb their ladders together until HBM is full. Between the last two rungs,
    those climb on that still fit, the most worth first, and one as far as there is room.

    Parameters
    ----------
    ladders : sequence of Ladder
    hbm_bytes : float
    curve_of : callable
        The curve of the piece with that number in `ladders`.
    """
    if not ladders:
        return Filling((), 0.0, 0.0, 0.0, 0.0) if hbm_bytes >= 0 else None
    values = np.stack([shard.values for shard in ladders])
    total = values[:, BYTES].sum(axis=0)
    rung = int(np.searchsorted(total, hbm_bytes, side="right")) - 1
    # Bytes rise along each ladder, so their sums do, up to rounding.
    while rung >= 0 and total[rung] > hbm_bytes:
        rung -= 1
    if rung < 0:
        return None
    chosen = values[:, :, rung]
    if rung + 1 < total.size:
        chosen = chosen.copy()
        _climb(chosen, values[:, :, rung + 1 :], hbm_bytes, curve_of)
    bytes_, gpu_s, dram_s, dram_bytes, _ = chosen.sum(axis=0).tolist()
    hot = tuple(int(rows) for rows in chosen[:, HOT].tolist())
    return Filling(hot, gpu_s, dram_s, bytes_, dram_bytes)


_RUNGS_ABOVE = 6
"""Rungs above the last that all reach which single pieces are tried on."""


def _climb(
    chosen: Float, above: Float, hbm_bytes: float, curve_of: Callable[[int], CostCurve]
) -> None:
    """Raise the pieces of `chosen`, shape (pieces, 5), that still fit, in place."""
    room = hbm_bytes - float(chosen[:, BYTES].sum())
    split = set[int]()
    for rung in range(min(_RUNGS_ABOVE, above.shape[2])):
        target = above[:, :, rung]
        extra = target[:, BYTES] - chosen[:, BYTES]
        saved = chosen[:, GPU_S] - target[:, GPU_S]
        wanted = np.flatnonzero((saved > 0) & (extra > 0))
        if not wanted.size or room <= 0:
            continue
        for number in wanted[np.argsort(-saved[wanted] / extra[wanted], kind="stable")].tolist():
            if extra[number] <= room:
                chosen[number] = target[number]
                room -= float(extra[number])
            elif number not in split:
                split.add(number)
                part = _part(chosen[number], target[number], room, curve_of(number))
                if part is not None:
                    room -= float(part[BYTES] - chosen[number, BYTES])
                    chosen[number] = part


def _part(here: Float, above: Float, room: float, curve: CostCurve) -> Float | None:
    """The point of a curve between two rungs that takes `room` more bytes, if it is faster."""
    limit = float(here[BYTES]) + room - curve.split_hbm_bytes
    first, last = np.searchsorted(curve.hot_rows, (here[HOT], above[HOT]))
    bytes_ = curve.hbm_bytes[first : last + 1]
    fits = np.flatnonzero(bytes_ <= limit)
    if not fits.size:
        return None
    at = int(fits[-1])
    hot = float(curve.hot_rows[first + at])
    if at + 1 < bytes_.size:
        step = (limit - bytes_[at]) / (bytes_[at + 1] - bytes_[at])
        hot = np.floor(hot + step * float(curve.hot_rows[first + at + 1] - hot))
    if not 0 < hot < curve.hot_rows[-1]:
        return None
    point = np.array(
        [
            np.interp(hot, curve.hot_rows, of)
            for of in (curve.hbm_bytes, curve.gpu_s, curve.dram_s, curve.dram_bytes)
        ]
        + [hot]
    )
    point[BYTES] += curve.split_hbm_bytes
    point[GPU_S] += curve.split_s
    return point if point[GPU_S] < here[GPU_S] and point[BYTES] <= here[BYTES] + room else None
