"""Which rows of the shards of one GPU are in its HBM: a fractional knapsack."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models import CostCurve

Float = npt.NDArray[np.float64]

BYTES, GPU_S, DRAM_S, DRAM_BYTES, HOT = range(5)
"""Rows of a priced_costs's values."""


def costs_of(curve: CostCurve) -> Float:
    """All points of a curve as an array, shape (5, m), split costs included.

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


def priced_costs(curve: CostCurve, prices: Float) -> Float:
    """Costs of a shard at falling prices of HBM, shape (5, prices).

    At each price, the HBM bytes, GPU seconds, DRAM seconds, DRAM bytes and hot rows of the
    point of the curve that is cheapest there, the cost of a split included. All shards have
    the same prices, so that the sum of their costs is cheapest for all of them together.

    Parameters
    ----------
    curve : CostCurve
    prices : float64
        Seconds per byte, falling strictly from infinity to 0.
    """
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
    return points[:, np.concatenate(([cheapest], at, [smallest]))]


@dataclass(frozen=True, slots=True)
class Knapsack:
    """Hot rows of each shard of one GPU, and the time and memory of the GPU with them."""

    hot_rows: tuple[int, ...]
    gpu_s: float
    dram_s: float
    hbm_bytes: float
    dram_bytes: float


def least_times(sums: Float, hbm_bytes: Float | float) -> Float:
    """A lower limit of the GPU time of any choice of hot rows, close to that of the best.

    Parameters
    ----------
    sums : float64, shape (..., 5, prices) or (..., 2, prices)
        Sums of priced costs; only bytes and GPU seconds are read.
    hbm_bytes : float64, shape (...) or scalar

    Returns
    -------
    float64, shape (...)
        Infinite where not even the first price fits. Linear between prices, as if each shard
        could be anywhere between two points of its convex hull.
    """
    prices = sums.shape[-1]
    bytes_ = sums[..., BYTES, :].reshape(-1, prices)
    time_s = sums[..., GPU_S, :].reshape(-1, prices)
    room = np.broadcast_to(hbm_bytes, sums.shape[:-2]).reshape(-1)
    price_index = (bytes_ <= room[:, None]).sum(axis=1) - 1
    every = np.arange(price_index.size)
    here, above = np.maximum(price_index, 0), np.minimum(price_index + 1, prices - 1)
    low, slow = bytes_[every, here], time_s[every, here]
    more = bytes_[every, above] - low
    # Where the last price fits there is nothing more; bytes are whole, so half a byte is none.
    part = np.clip((room - low) / np.maximum(more, 0.5), 0.0, 1.0)
    times: Float = slow + part * (time_s[every, above] - slow)
    times[price_index < 0] = np.inf
    return times.reshape(sums.shape[:-2])


def solve_knapsack(
    priced: Sequence[Float],
    hbm_bytes: float,
    curve_of: Callable[[int], CostCurve],
) -> Knapsack | None:
    """Put the rows that save most time per byte into `hbm_bytes`; None if nothing fits.

    All shards climb their priced together until HBM is full. Between the last two price_indices,
    those climb on that still fit, the most worth first, and one as far as there is room.

    Parameters
    ----------
    priced : sequence of Float
    hbm_bytes : float
    curve_of : callable
        The curve of the shard with that number in `priced`.
    """
    if not priced:
        return Knapsack((), 0.0, 0.0, 0.0, 0.0) if hbm_bytes >= 0 else None
    values = np.stack(priced)
    total = values[:, BYTES].sum(axis=0)
    price_index = int(np.searchsorted(total, hbm_bytes, side="right")) - 1
    # Bytes rise along each priced_costs, so their sums do, up to rounding.
    while price_index >= 0 and total[price_index] > hbm_bytes:
        price_index -= 1
    if price_index < 0:
        return None
    chosen = values[:, :, price_index]
    if price_index + 1 < total.size:
        chosen = chosen.copy()
        _climb(chosen, values[:, :, price_index + 1 :], hbm_bytes, curve_of)
    bytes_, gpu_s, dram_s, dram_bytes, _ = chosen.sum(axis=0).tolist()
    hot = tuple(int(rows) for rows in chosen[:, HOT].tolist())
    return Knapsack(hot, gpu_s, dram_s, bytes_, dram_bytes)


_PRICES_BELOW = 6
"""Rungs above the last that all reach which single shards are tried on."""


def _climb(
    chosen: Float, above: Float, hbm_bytes: float, curve_of: Callable[[int], CostCurve]
) -> None:
    """Raise the shards of `chosen`, shape (shards, 5), that still fit, in place."""
    room = hbm_bytes - float(chosen[:, BYTES].sum())
    split = set[int]()
    for price_index in range(min(_PRICES_BELOW, above.shape[2])):
        target = above[:, :, price_index]
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
    """The point of a curve between two prices that takes `room` more bytes, if it is faster."""
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
