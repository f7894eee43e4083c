"""Curves of bytes as a few straight lines, for proofs that nothing fits."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cost_models.base import CostCurve


class Line(NamedTuple):
    """Bytes that a shard takes at least, from one number of hot rows to another.

    Attributes
    ----------
    rows : int
        Rows that may be hot beyond those of the line's start.
    hbm_bytes, dram_bytes : int
        At its start.
    hbm_bytes_a_row, dram_bytes_a_row : int
        What each further hot row adds, in DRAM mostly less than nothing.
    """

    rows: int
    hbm_bytes: int
    dram_bytes: int
    hbm_bytes_a_row: int
    dram_bytes_a_row: int


def some_points(curve: CostCurve, most: int) -> list[int]:
    """The places of at most so many of a curve's points, its first and last among them."""
    last = curve.hot_rows.size - 1
    places = np.linspace(0, last, min(last + 1, most)).round().astype(int)
    return [int(place) for place in np.unique(places)]


def lines_below(curve: CostCurve, places: Sequence[int]) -> Iterator[Line]:
    """A line from each of these points to the next, above the curve's bytes nowhere.

    Bytes are straight between two points of a curve, as all rows there are read alike: a line that
    is not above the points is not above what lies between them.
    """
    for first, end in pairwise(places):
        rows = curve.hot_rows[first : end + 1] - curve.hot_rows[first]
        starts, slopes = [], []
        for used in (curve.hbm_bytes, curve.dram_bytes):
            part = used[first : end + 1]
            slope = round(float(part[-1] - part[0]) / int(rows[-1]))
            starts.append(int(np.floor((part - slope * rows).min())))
            slopes.append(slope)
        yield Line(int(rows[-1]), *starts, *slopes)
