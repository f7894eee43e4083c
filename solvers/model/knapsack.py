"""Choose which rows of a GPU's shards are in its HBM: a fractional knapsack."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cost_models import CostCurve

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

BYTES, GPU_S, DRAM_S, DRAM_BYTES, HOT = 0, 1, -3, -2, -1
"""Rows of costs: HBM bytes, GPU seconds, `PHASES`, host's seconds and bytes, and hot rows."""

PHASES = slice(2, -3)
"""GPU seconds of each phase. The knapsack weighs them into `GPU_S`."""

OF_GPU = slice(0, -3)
"""HBM bytes, GPU seconds and phases, which a search sums for each GPU."""


def costs_of(curve: CostCurve) -> Float:
    """Return all points of a curve as an array, shape (5 + phases, m), split costs included.

    With all rows or no rows in HBM there is no split.
    """
    phase_s = curve.phase_s
    values = np.empty((5 + len(phase_s), curve.hot_rows.size))
    values[BYTES], values[GPU_S], values[PHASES] = curve.hbm_bytes, curve.gpu_s, phase_s
    values[DRAM_S], values[DRAM_BYTES], values[HOT] = curve.dram_s, curve.dram_bytes, curve.hot_rows
    values[BYTES, 1:-1] += curve.split_hbm_bytes
    values[GPU_S, 1:-1] += curve.split_s
    values[PHASES, 1:-1] += curve.split_phase_s[:, None]
    return values


def costs_with(curve: CostCurve, hot_rows: float) -> Float:
    """Return the costs with this number of hot rows, shape (5 + phases,), a split included."""
    rows = curve.hbm_bytes, curve.gpu_s, *curve.phase_s, curve.dram_s, curve.dram_bytes
    costs = np.array([np.interp(hot_rows, curve.hot_rows, of) for of in (*rows, curve.hot_rows)])
    if 0 < hot_rows < curve.hot_rows[-1]:
        costs[BYTES] += curve.split_hbm_bytes
        costs[GPU_S] += curve.split_s
        costs[PHASES] += curve.split_phase_s
    return costs


def priced_costs(curve: CostCurve, prices: Float) -> Float:
    """Return costs of a shard at falling prices of HBM, shape (5 + phases, prices).

    At each price these are the costs of the curve's cheapest point, the cost of a split included.
    All shards have the same prices, so the sum of their costs is cheapest for them together.

    `prices`: seconds per byte, falling strictly from infinity to 0.
    """
    points = costs_of(curve)
    # Count in bytes instead of seconds at high prices: the first price is infinite.
    with np.errstate(invalid="ignore"):
        # Search backwards to take the last of equal points: more rows in HBM at the same cost.
        scaled = np.multiply.outer(prices[1:-1], points[BYTES, ::-1])
        scaled += points[GPU_S, ::-1]
    at = points.shape[1] - 1 - scaled.argmin(axis=1)
    smallest, fastest = _least(points, BYTES, GPU_S), _least(points, GPU_S, BYTES)
    return points[:, np.concatenate(([smallest], at, [fastest]))]


def _least(points: Float, first: int, second: int) -> int:
    """Return the point with the least value in row `first`; row `second` decides between ties."""
    least = np.flatnonzero(points[first] == points[first].min())
    return int(least[points[second, least].argmin()])


@dataclass(frozen=True, slots=True)
class Knapsack:
    """Hot rows of each shard of one GPU, and the time and memory of the GPU with them.

    `gpu_s` is the weighted sum of `phase_s`, shape (phases,). `arena_s` is the part of `phase_s`
    that arenas take besides launches (`cost_models.CostModel.arena_costs`).
    """

    hot_rows: tuple[int, ...]
    gpu_s: float
    phase_s: Float
    dram_s: float
    hbm_bytes: float
    dram_bytes: float
    arena_s: Float | float = 0.0


def phases_at(sums: Float, hbm_bytes: Float | float) -> Float:
    """Estimate the seconds of each phase with the best choice of hot rows.

    `sums`, shape (..., 2 + phases, prices): sums of priced costs. `hbm_bytes`, shape (...) or
    scalar.

    The result, shape (..., phases), is infinite where not even the first price fits. It is linear
    between prices, as if each shard could be anywhere between two points of its convex hull. So
    what the phases weigh together is a close lower bound of any choice of hot rows.
    """
    here, above, part, unfit = _point_between(sums[..., BYTES, :], hbm_bytes)
    at = np.ix_(*map(np.arange, here.shape))
    rows = np.moveaxis(sums[..., GPU_S + 1 :, :], -2, -1)
    low, high = rows[(*at, here)], rows[(*at, above)]
    times: Float = low + part[..., None] * (high - low)
    times[unfit] = np.inf
    return times


def phases_of_swaps(kept: Float, arriving: Float, hbm_bytes: Float | float) -> Float:
    """Return `phases_at` of GPUs after one block has left and another one has arrived.

    - `kept`, shape (m, 2 + phases, prices): sums of a GPU once each of m blocks has left it.
    - `arriving`, shape (n, 2 + phases, prices).
    - `hbm_bytes`, shape (m, 1), or scalar.

    The result has shape (m, n, phases).
    """
    here, above, part, unfit = _point_between(kept[:, None, BYTES] + arriving[:, BYTES], hbm_bytes)
    row, column = np.ogrid[: here.shape[0], : here.shape[1]]
    low, high = (
        kept[row, GPU_S + 1 :, at] + arriving[column, GPU_S + 1 :, at] for at in (here, above)
    )
    times: Float = low + part[..., None] * (high - low)
    times[unfit] = np.inf
    return times


def _point_between(bytes_: Float, hbm_bytes: Float | float) -> tuple[Int, Int, Float, Bool]:
    """Return the two prices between which HBM is full, the point between them, and what never fits.

    Each has shape (...), if `bytes_` has shape (..., prices). The point is from 0 to 1.
    """
    flat = bytes_.reshape(-1, bytes_.shape[-1])
    room = np.full(bytes_.shape[:-1], hbm_bytes).reshape(-1)
    price_index = np.count_nonzero(flat <= room[:, None], axis=1) - 1
    every, last = np.arange(price_index.size), flat.shape[1] - 1
    here, above = np.maximum(price_index, 0), np.minimum(price_index + 1, last)
    low = flat[every, here]
    more = flat[every, above] - low
    # If the last price fits, so do all rows. Bytes are whole, so half a byte is none.
    part = np.minimum(np.maximum((room - low) / np.maximum(more, 0.5), 0.0), 1.0)
    shape = bytes_.shape[:-1]
    here, above, unfit = (of.reshape(shape) for of in (here, above, price_index < 0))
    return here, above, part.reshape(shape), unfit


def solve_knapsack(
    priced: Sequence[Float],
    hbm_bytes: float,
    curve_of: Callable[[int], CostCurve],
) -> Knapsack | None:
    """Put the rows that save most time per byte into `hbm_bytes`; None if nothing fits.

    Lower the price for all shards together until HBM is full. Then raise single shards to the next
    price while they fit, the most valuable first, and one of them as far as there is room.

    `curve_of`: returns the curve of a shard by its number in `priced`.
    """
    if not priced:
        return Knapsack((), 0.0, np.zeros(1), 0.0, 0.0, 0.0) if hbm_bytes >= 0 else None
    values = np.stack(priced)
    total = values[:, BYTES].sum(axis=0)
    price_index = int(np.searchsorted(total, hbm_bytes, side="right")) - 1
    # Bytes rise with falling prices, and so do their sums, up to rounding.
    while price_index >= 0 and total[price_index] > hbm_bytes:
        price_index -= 1
    if price_index < 0:
        return None
    chosen = values[:, :, price_index].copy()
    _climb(chosen, values[:, :, price_index + 1 :], hbm_bytes, curve_of)
    total = chosen.sum(axis=0)
    bytes_, gpu_s, dram_s, dram_bytes = total[[BYTES, GPU_S, DRAM_S, DRAM_BYTES]].tolist()
    hot = tuple(int(rows) for rows in chosen[:, HOT].tolist())
    return Knapsack(hot, gpu_s, total[PHASES], dram_s, bytes_, dram_bytes)


_PRICES_BELOW = 6
"""Number of prices below the common one that single shards are tried at."""


def _climb(
    chosen: Float, above: Float, hbm_bytes: float, curve_of: Callable[[int], CostCurve]
) -> None:
    """Raise the shards of `chosen`, shape (shards, rows), that still fit, in place."""
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
    """Return the curve's point between two prices with `room` more bytes, if it is faster."""
    limit = float(here[BYTES]) + room - curve.split_hbm_bytes
    first, last = np.searchsorted(curve.hot_rows, (here[HOT], above[HOT]))
    bytes_ = curve.hbm_bytes[first : last + 1]
    fits = np.flatnonzero(bytes_ <= limit)
    if not fits.size:
        return None
    at = int(fits[-1])
    hot = float(curve.hot_rows[first + at])
    if at + 1 < bytes_.size and not curve.only_points:
        step = (limit - bytes_[at]) / (bytes_[at + 1] - bytes_[at])
        hot = np.floor(hot + step * float(curve.hot_rows[first + at + 1] - hot))
    if not 0 < hot < curve.hot_rows[-1]:
        return None
    point = costs_with(curve, hot)
    return point if point[GPU_S] < here[GPU_S] and point[BYTES] <= here[BYTES] + room else None
