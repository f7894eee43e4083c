"""The least that a shard costs at prices of HBM, on a GPU with so much of it."""

import numpy as np

from cost_models import CostCurve
from solvers.model.knapsack import Float


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
    bytes_, gpu_s = curve.hbm_bytes, curve.gpu_s
    fits = bytes_ <= hbm_bytes
    # All points with a split, as what is just beside the ends has one; then the ends without.
    ends = [end for end in (0, -1) if fits[end]]
    every_bytes = [bytes_[fits] + curve.split_hbm_bytes, bytes_[ends]]
    every_s = [gpu_s[fits] + curve.split_s, gpu_s[ends]]
    if not fits.all():
        if not fits.any():
            return float("inf"), np.full(prices.shape, np.inf)
        # Between a point that fits and a next one that does not, up to the last byte. (The other
        # way round, the point that fits is better: it has less time and fewer bytes.)
        edges = np.flatnonzero(fits[:-1] & ~fits[1:])
        part = (hbm_bytes - bytes_[edges]) / (bytes_[edges + 1] - bytes_[edges])
        at_limit = gpu_s[edges] + part * (gpu_s[edges + 1] - gpu_s[edges])
        every_bytes.append(np.full(edges.size, hbm_bytes))
        every_s.append(at_limit + curve.split_s)
    times, spent = np.concatenate(every_s), np.concatenate(every_bytes)
    return float(times.min()), (times + prices[:, None] * spent).min(axis=1)
