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
    corners = [first]
    for i in range(first + 1, len(bytes_)):
        if time_s[i] >= time_s[corners[-1]] or bytes_[i] <= bytes_[corners[-1]]:
            if time_s[i] < time_s[corners[-1]]:
                corners[-1] = i
            continue
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            slope = (time_s[b] - time_s[a]) * (bytes_[i] - bytes_[a])
            if slope < (time_s[i] - time_s[a]) * (bytes_[b] - bytes_[a]):
                break
            corners.pop()
        corners.append(i)
    return Hull(bytes_[corners], time_s[corners], hot[corners])


@dataclass(frozen=True, slots=True, eq=False)
class Filling:
    """Hot rows of each piece of one GPU, and what the GPU then costs.

    `price_s_per_byte` is the time that one more byte of HBM would save.
    """

    hot_rows: tuple[int, ...]
    gpu_s: float
    dram_s: float
    hbm_bytes: float
    dram_bytes: float
    price_s_per_byte: float


def fill(curves: Sequence[PieceCurve], hulls: Sequence[Hull], hbm_bytes: float) -> Filling | None:
    """Put the rows that save most time per byte into `hbm_bytes`; None if not even none fits.

    `hulls` are those of the curves' total times. The steps of all hulls are taken in order
    of saving per byte; the first step that does not fit is taken in part. Then each split
    whose extra cost exceeds what it saves is undone.
    """
    if not hulls:
        return Filling((), 0.0, 0.0, 0.0, 0.0, 0.0)
    base = sum(float(h.hbm_bytes[0]) for h in hulls)
    if base > hbm_bytes:
        return None
    extra = np.concatenate([np.diff(h.hbm_bytes) for h in hulls])
    saved = np.concatenate([-np.diff(h.time_s) for h in hulls])
    owner = np.repeat(np.arange(len(hulls)), [h.hbm_bytes.size - 1 for h in hulls])
    corner = np.concatenate([np.arange(h.hbm_bytes.size - 1) for h in hulls])
    split_bytes = sum(c.split_hbm_bytes for c in curves)
    room = hbm_bytes - base
    if split_bytes and float(extra.sum()) > room:
        # Row maps of tables that end up split; few bytes, so all are kept in hand.
        room = max(0.0, room - split_bytes)
    order = np.argsort(-saved / extra, kind="stable")
    before = np.concatenate(([0.0], np.cumsum(extra[order])))
    whole = int(np.searchsorted(before, room, side="right")) - 1
    hot = np.array([float(h.hot_rows[0]) for h in hulls])
    price = 0.0
    for step in order[:whole]:
        hot[owner[step]] = hulls[owner[step]].hot_rows[corner[step] + 1]
    if whole < order.size:
        step = order[whole]
        part = (room - before[whole]) / extra[step]
        h, c = hulls[owner[step]], corner[step]
        hot[owner[step]] = h.hot_rows[c] + part * (h.hot_rows[c + 1] - h.hot_rows[c])
        price = float(saved[step] / extra[step])
    rows = [_without_idle_split(c, int(k)) for c, k in zip(curves, hot, strict=True)]
    costs = [cost_at(c, k) for c, k in zip(curves, rows, strict=True)]
    gpu_s, dram_s, hbm, dram = (float(sum(column)) for column in zip(*costs, strict=True))
    if hbm > hbm_bytes:
        return None
    return Filling(tuple(rows), gpu_s, dram_s, hbm, dram, price)


def cost_at(curve: PieceCurve, hot_rows: int) -> tuple[float, float, float, float]:
    """GPU seconds, DRAM seconds, HBM bytes and DRAM bytes of a piece, split costs included."""
    at = [
        float(np.interp(hot_rows, curve.hot_rows, values))
        for values in (curve.gpu_s, curve.dram_s, curve.hbm_bytes, curve.dram_bytes)
    ]
    if 0 < hot_rows < curve.hot_rows[-1]:
        at[0] += curve.split_s
        at[2] += curve.split_hbm_bytes
    return at[0], at[1], at[2], at[3]


def _without_idle_split(curve: PieceCurve, hot_rows: int) -> int:
    """No hot rows at all where a split saves less than it costs."""
    if not 0 < hot_rows < curve.hot_rows[-1]:
        return hot_rows
    split = cost_at(curve, hot_rows)
    whole = cost_at(curve, 0)
    return 0 if whole[0] <= split[0] and whole[2] <= split[2] else hot_rows
