"""Thin out curves and bound their bytes by straight lines, for proofs that nothing fits."""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cost_models.base import CostCurve, Float
from solvers.model.curves import curve_at
from solvers.model.knapsack import BYTES, DRAM_BYTES, costs_of

ROUNDING_BYTES = 1e-6
"""Bytes that are none, but a rounding error."""


class Line(NamedTuple):
    """A lower bound of a shard's bytes between two numbers of hot rows."""

    rows: int  # Hot rows at the end of the line minus hot rows at its start.
    # Bytes at the start.
    hbm_bytes: int
    dram_bytes: int
    # Bytes that each further hot row adds; mostly negative in DRAM.
    hbm_bytes_a_row: int
    dram_bytes_a_row: int


Piece = tuple[Float, Line | None]
"""Costs of a shard at a point, or at the start of the line beside them."""


def some_points(curve: CostCurve, most: int) -> list[int]:
    """Return indices of at most this many points of a curve, including the first and the last."""
    last = curve.hot_rows.size - 1
    places = np.linspace(0, last, min(last + 1, most)).round().astype(int)
    return [int(place) for place in np.unique(places)]


def with_every_row(curve: CostCurve, most: int) -> CostCurve:
    """Return a curve with a point for every number of hot rows, if these are at most `most`."""
    rows = curve.hot_rows
    if curve.only_points or not np.isfinite(curve.split_s) or rows[-1] >= most:
        return curve
    return curve_at(curve, np.arange(rows[0], rows[-1] + 1))


def part_of(curve: CostCurve, low: int, high: int) -> CostCurve:
    """Return the part of a curve between two numbers of hot rows, bytes of a split included."""
    rows = curve.hot_rows
    inner = rows[(rows > low) & (rows < high)]
    part = curve_at(curve, np.unique(np.concatenate(([low], inner, [high]))))
    return replace(part, hbm_bytes=part.hbm_bytes + curve.split_hbm_bytes)


def pieces_of(curve: CostCurve, most: int, room: tuple[float, float]) -> list[Piece]:
    """Return at most this many points of a curve, and lines between them.

    Between points, what needs more than `room`, bytes of HBM and DRAM, is left out. Without that,
    CP-SAT did not find the only assignment of a tight problem in 35 s that it finds in 3 s.
    """
    curve = with_every_row(curve, most)
    at, points = some_points(curve, most), costs_of(curve)
    pieces: list[Piece] = [(costs, None) for costs in points[:, at].T]
    if curve.only_points or not np.isfinite(curve.split_s):
        return pieces
    for first, last in pairwise(curve.hot_rows[at].tolist()):
        if last - first < 2:
            continue
        part = part_of(curve, first + 1, last - 1)
        if part.hbm_bytes.min() > room[0] or part.dram_bytes.min() > room[1]:
            continue
        line = line_below(part)
        least = np.zeros(points.shape[0])
        least[[BYTES, DRAM_BYTES]] = line.hbm_bytes, line.dram_bytes
        least[-1] = part.hot_rows[0]
        pieces.append((least, line))
    return pieces


def line_below(curve: CostCurve) -> Line:
    """Return a line from a curve's first point to its last that is nowhere above its bytes.

    A curve's bytes are linear between two points, as all rows there are read alike. So a line that
    is not above the points is not above the curve.
    """
    rows = curve.hot_rows - curve.hot_rows[0]
    starts, slopes = [], []
    for used in (curve.hbm_bytes, curve.dram_bytes):
        slope = round(float(used[-1] - used[0]) / max(1, int(rows[-1])))
        starts.append(int(np.ceil((used - slope * rows).min() - ROUNDING_BYTES)))
        slopes.append(slope)
    return Line(int(rows[-1]), *starts, *slopes)
