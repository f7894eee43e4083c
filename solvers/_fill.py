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

    All arrays have shape (prices,), and follow one list of prices that falls from infinity
    to 0, so that ladders of several pieces can be added up.

    Attributes
    ----------
    values : float64, shape (5, prices)
        HBM bytes, GPU seconds, DRAM seconds, DRAM bytes and hot rows.
    rows : int
        Rows of the piece.
    split_s, split_hbm_bytes : float
        Cost of having rows in both tiers.
    """

    values: Float
    rows: int
    split_s: float
    split_hbm_bytes: float


def ladder(curve: PieceCurve, prices: Float) -> Ladder:
    """The ladder of an exact curve; `prices` fall strictly, in seconds per byte."""
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
    return Ladder(values, int(curve.hot_rows[-1]), curve.split_s, curve.split_hbm_bytes)


@dataclass(frozen=True, slots=True)
class Filling:
    """Hot rows of each piece of one GPU, and what the GPU then costs."""

    hot_rows: tuple[int, ...]
    gpu_s: float
    dram_s: float
    hbm_bytes: float
    dram_bytes: float


def fill(ladders: Sequence[Ladder], hbm_bytes: float) -> Filling | None:
    """Put the rows that save most time per byte into `hbm_bytes`; None if not even none fits.

    All pieces climb down their ladders together until HBM is full, and the last rung is
    taken in part. Rows that end up split pay for it.
    """
    if not ladders:
        return Filling((), 0.0, 0.0, 0.0, 0.0)
    total = ladders[0].values.copy()
    for other in ladders[1:]:
        total += other.values
    needed = total[0]
    if needed[0] > hbm_bytes:
        return None
    room = hbm_bytes
    if needed[-1] > room:
        # Row maps of what ends up split: few bytes, so they are kept in hand for all.
        room = max(float(needed[0]), room - sum(piece.split_hbm_bytes for piece in ladders))
    rung = int(np.searchsorted(needed, room, side="right")) - 1
    part = 0.0
    if rung + 1 < needed.size:
        part = (room - needed[rung]) / (needed[rung + 1] - needed[rung])
    hot_rows, split_s, split_bytes = [], 0.0, 0.0
    for piece in ladders:
        hot = piece.values[4, rung]
        if part:
            hot += part * (piece.values[4, rung + 1] - hot)
        if 0 < hot < piece.rows:
            split_s += piece.split_s
            split_bytes += piece.split_hbm_bytes
        hot_rows.append(int(hot))
    at = total[:4, rung]
    if part:
        at = at + part * (total[:4, rung + 1] - at)
    if at[0] + split_bytes > hbm_bytes:
        return None
    return Filling(
        tuple(hot_rows),
        float(at[1]) + split_s,
        float(at[2]),
        float(at[0]) + split_bytes,
        float(at[3]),
    )
