"""Whether shards cover a table exactly once, found without listing its rows.

The table is divided at ranks, and then at columns, where no shard lies on both sides, and each
part again, until a part cannot be divided: row slices that share their ranks by strides, or shards
in a pattern that no straight line divides. Sound plans of a solver are divided down to single
shards or strides, in n log n.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from placer.plan.shard import Shard
from placer.tables import Table

_MOST_SPAN = 50_000_000
"""Longest common period of strides that is looked at, in ranks."""
_MOST_WORK = 20_000_000
"""Most visits of a shard, over all parts of a table."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """The ranks of a residue class modulo `step` within low..high, in columns left..right."""

    low: int
    high: int
    left: int
    right: int
    step: int
    residue: int

    def fills(self, part: "_Part") -> bool:
        """Whether it is all ranks and columns of a part."""
        own = (self.low, self.high, self.left, self.right)
        return self.step == 1 and own == (part.low, part.high, part.left, part.right)


@dataclass(frozen=True, slots=True)
class _Part:
    """Ranks low..high and columns left..right of a table, and the slices within."""

    low: int
    high: int
    left: int
    right: int
    slices: list[_Slice]


def coverage_fault(table: Table, shards: Sequence[Shard]) -> str | None:
    """What is wrong with how shards cover a table, or None.

    Parameters
    ----------
    table : Table
    shards : sequence of Shard
        Well formed.

    Examples
    --------
    >>> halves = [Shard("t", (i, 10, 2), (0, 4), ("gpu:0",), "hbm", "device") for i in (0, 1)]
    >>> coverage_fault(Table("t", 10, 4), halves)
    >>> coverage_fault(Table("t", 10, 4), halves[:1])
    "table 't', columns 0..4: rank 1 is covered 0 times; every row must be covered once"
    """
    if table.rows == 0:
        return None
    parts = [_Part(0, table.rows, 0, table.dim, _slices(shards, table.rows))]
    work = 0
    while parts:
        part = parts.pop()
        work += len(part.slices) + 1
        if work > _MOST_WORK:
            return f"table {table.name!r}: its shards lie over each other in too many ways to check"
        if not part.slices:
            return f"table {table.name!r}, {_covered(part.left, part.right, part.low, 0)}"
        if len(part.slices) == 1 and part.slices[0].fills(part):
            continue
        divided = _divided(part)
        if divided is None:
            fault = _undivided_fault(part, _MOST_WORK - work)
            if fault:
                return f"table {table.name!r}, {fault}"
            continue
        parts += [_Part(*one) for one in divided]
    return None


def _slices(shards: Sequence[Shard], rows: int) -> list[_Slice]:
    """Shards as residue classes, whose ends are moved to as few ranks as there can be.

    Between two members of a class its end may be anywhere: strides that begin one after the
    other then begin together.
    """
    held = [(shard, range(*shard.rows)) for shard in shards]
    held = [(shard, ranks) for shard, ranks in held if ranks]
    begins = [(max(ranks[0] - ranks.step + 1, 0), ranks[0]) for _, ranks in held]
    ends = [(ranks[-1] + 1, min(ranks[-1] + ranks.step, rows)) for _, ranks in held]
    place = _common_places([*begins, *ends])
    return [
        _Slice(place[begin], place[end], *shard.cols, ranks.step, ranks[0] % ranks.step)
        for (shard, ranks), begin, end in zip(held, begins, ends, strict=True)
    ]


def _common_places(ranges: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """A number within each range (both ends included), of as few as suffice."""
    places: dict[tuple[int, int], int] = {}
    last = -1
    for first, end in sorted(set(ranges), key=lambda each: each[1]):
        if first > last:
            last = end
        places[first, end] = last
    return places


def _divided(part: _Part) -> list[tuple[int, int, int, int, list[_Slice]]] | None:
    """A part at the ranks, or else the columns, that no slice crosses; gaps have no slices."""
    bands = _bands(part.slices, lambda one: (one.low, one.high), part.low, part.high)
    if len(bands) > 1:
        return [(low, high, part.left, part.right, slices) for low, high, slices in bands]
    bands = _bands(part.slices, lambda one: (one.left, one.right), part.left, part.right)
    if len(bands) > 1:
        return [(part.low, part.high, left, right, slices) for left, right, slices in bands]
    return None


def _bands(
    slices: Sequence[_Slice], extent: Callable[[_Slice], tuple[int, int]], first: int, last: int
) -> list[tuple[int, int, list[_Slice]]]:
    bands: list[tuple[int, int, list[_Slice]]] = []
    end = first
    for start, stop, one in sorted(((*extent(one), one) for one in slices), key=lambda it: it[:2]):
        if start < end:
            begin, _, inside = bands[-1]
            inside.append(one)
            end = max(end, stop)
            bands[-1] = (begin, end, inside)
            continue
        if start > end:
            bands.append((end, start, []))
        bands.append((start, stop, [one]))
        end = stop
    if end < last:
        bands.append((end, last, []))
    return bands


def _undivided_fault(part: _Part, most_work: int) -> str | None:
    """What is wrong with a part that no straight line divides, or None."""
    work = 0
    for left, right in pairwise(sorted({edge for s in part.slices for edge in (s.left, s.right)})):
        work += len(part.slices)
        inside = [one for one in part.slices if one.left <= left and right <= one.right]
        edges = sorted({part.low, part.high, *(e for s in inside for e in (s.low, s.high))})
        for low, high in pairwise(edges):
            work += len(inside)
            if work > most_work:
                return "its shards lie over each other in too many ways to check"
            active = [
                (one.step, one.residue) for one in inside if one.low <= low and high <= one.high
            ]
            fault = _classes_fault(active, low, high)
            if isinstance(fault, str):
                return fault
            if fault is not None:
                return _covered(left, right, *fault)
    return None


def _classes_fault(
    active: Sequence[tuple[int, int]], low: int, high: int
) -> tuple[int, int] | str | None:
    """A rank within low..high that is not in one class alone, and the number of its classes."""
    # All is covered once if, over one full period of the strides (or all ranks between, if those
    # are fewer), each rank has one owner.
    span = _period(active, high - low)
    if span > _MOST_SPAN:
        return f"strides {sorted({step for step, _ in active})[:9]} have too long a common period"
    owners = np.zeros(span, dtype=np.int32)
    for step, residue in active:
        owners[(residue - low) % step :: step] += 1
    if (owners != 1).any():
        rank = int(np.flatnonzero(owners != 1)[0])
        return low + rank, int(owners[rank])
    return None


def _period(active: Sequence[tuple[int, int]], most: int) -> int:
    """Common period of strides, or the number of ranks if that is less."""
    period = 1
    for step in {step for step, _ in active}:
        period = math.lcm(period, step)
        if period >= most:
            return most
    return period


def _covered(left: int, right: int, rank: int, times: int) -> str:
    return (
        f"columns {left}..{right}: rank {rank} is covered {times} times; every row must be "
        "covered once"
    )
