"""The least that a shard costs at prices of HBM, on a GPU with so much of it."""

import numpy as np

from cost_models import CostCurve
from solvers.model.knapsack import BYTES, GPU_S, Float, costs_of


def least(curve: CostCurve, hbm_bytes: float, prices: Float) -> tuple[float, Float]:
    """Least time, and least time + price × bytes, of a shard within `hbm_bytes`, in seconds.

    All or no rows in HBM are compared without the cost of a split. Infinite if not even the
    shard's buffers fit.

    Parameters
    ----------
    prices : float64, shape (m,)

    Returns
    -------
    float, and float64 of shape (m,)
    """
    points = costs_of(curve)
    points, inner = points[: GPU_S + 1], np.stack((curve.hbm_bytes, curve.gpu_s))
    fits = points[BYTES] <= hbm_bytes
    if not fits.any() and not (inner[BYTES] <= hbm_bytes).any():
        return float("inf"), np.full(prices.shape, np.inf)
    # Between a point that fits and a next one that does not, up to the last byte. (The other
    # way round, the point that fits is better: it has less time and fewer bytes.)
    inside = inner[BYTES] <= hbm_bytes
    edges = np.flatnonzero(inside[:-1] & ~inside[1:])
    part = (hbm_bytes - inner[BYTES, edges]) / (inner[BYTES, edges + 1] - inner[BYTES, edges])
    at_limit = inner[GPU_S, edges] + part * (inner[GPU_S, edges + 1] - inner[GPU_S, edges])
    # The ends with a split beside none of it stand for what is just beside them.
    split = inner[:, inside] + np.array([[curve.split_hbm_bytes], [curve.split_s]])
    limit = np.stack((np.full(at_limit.shape, hbm_bytes), at_limit + curve.split_s))
    every = np.concatenate((points[:, fits], split, limit), axis=1)
    cost = every[GPU_S] + prices[:, None] * every[BYTES]
    return float(every[GPU_S].min()), cost.min(axis=1)
