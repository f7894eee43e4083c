"""Distinct rows of a batch, and which slice of ranks each of them is in."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

import numpy as np
import numpy.typing as npt

from placer.errors import PlanMismatchError

Selector = slice | npt.NDArray[np.intp]

_DENSE = 4
"""Tables of up to so many rows for each lookup are counted in an array of all rows."""

_LONGEST_PERIOD = 1 << 22

_NOBODY = -1


def distinct_counts(
    ids: npt.NDArray[np.integer], rows: int
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]:
    """The different ones of `ids` within 0..rows − 1, ascending, and how often each comes."""
    if rows <= _DENSE * ids.size:
        counts = np.bincount(ids, minlength=rows)
        distinct = np.flatnonzero(counts)
        return distinct, counts[distinct]
    # Half as many bytes are sorted about twice as fast.
    ordered = np.sort(ids.astype(np.int32) if rows <= np.iinfo(np.int32).max else ids)
    first = np.ones(ordered.size, dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    return ordered[starts], np.diff(starts, append=ordered.size)


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """Ranks ``low..high``, whose owners repeat: rank r is of ``pattern[(r − low) % period]``."""

    low: int
    high: int
    pattern: npt.NDArray[np.int32]


class Slices:
    """Disjoint slices of a table's ranks, none of them empty; not necessarily of all of them.

    Raises PlanMismatchError if strides are mixed so that their pattern hardly repeats.
    """

    def __init__(self, slices: Sequence[tuple[int, int, int]], rows: int) -> None:
        self.slices = tuple(slices)
        ends = {0, rows, *(end for start, stop, _ in slices for end in (start, stop))}
        edges = sorted(ends)
        self._segments: list[_Segment] = []
        for low, high in pairwise(edges):
            active = [
                (number, part)
                for number, part in enumerate(slices)
                if part[0] <= low and high <= part[1]
            ]
            period = min(lcm(*(step for _, (_, _, step) in active)), high - low)
            if period > _LONGEST_PERIOD:
                raise PlanMismatchError(
                    f"shards with strides {sorted({s[2] for _, s in active})} repeat every "
                    f"{period} rows only; use the same stride for all shards of a table"
                )
            pattern = np.full(period, _NOBODY, dtype=np.int32)
            for number, (start, _, step) in active:
                pattern[(start - low) % step :: step] = number
            self._segments.append(_Segment(low, high, pattern))

    def owners(self, ranks: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """Return the number of the slice of each rank, in any order; −1 where there is none."""
        owners = np.full(ranks.size, _NOBODY, dtype=np.int32)
        for segment in self._segments:
            here: npt.NDArray[np.bool_] | slice = slice(None)
            if len(self._segments) > 1:
                here = (ranks >= segment.low) & (ranks < segment.high)
            owners[here] = segment.pattern[(ranks[here] - segment.low) % segment.pattern.size]
        return owners

    def select(self, ascending: npt.NDArray[np.integer]) -> list[Selector]:
        """Return where the members of each slice are among ranks that ascend."""
        if all(step == 1 for _, _, step in self.slices):
            ends = [end for start, stop, _ in self.slices for end in (start, stop)]
            places = np.searchsorted(ascending, ends).tolist()
            return [slice(*places[at : at + 2]) for at in range(0, len(places), 2)]
        owners = self.owners(ascending)
        # Of few values of 16 bits a stable sort is a radix sort.
        kind = np.int16 if len(self.slices) < np.iinfo(np.int16).max else np.int32
        order = np.argsort(owners.astype(kind), kind="stable")
        places = np.searchsorted(owners[order], np.arange(len(self.slices) + 1)).tolist()
        return [order[low:high] for low, high in pairwise(places)]
