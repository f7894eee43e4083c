"""Whether shards cover a table exactly once, found without listing its rows.

The table is divided at the columns where a shard begins or ends, and each part at such ranks. What
is over a part then is one shard, or row slices that share their ranks by strides. It takes
n log n for n shards of a solver's plan.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
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


def coverage_fault(table: Table, shards: Sequence[Shard]) -> str | None:
    """Return what is wrong with how well-formed shards cover a table, or None.

    >>> halves = [Shard("t", (i, 10, 2), (0, 4), ("gpu:0",), "hbm", "device") for i in (0, 1)]
    >>> coverage_fault(Table("t", 10, 4), halves)
    >>> coverage_fault(Table("t", 10, 4), halves[:1])
    "table 't', columns 0..4: rank 1 is covered 0 times; every row must be covered once"
    """
    if table.rows == 0:
        return None
    work = 0
    by_columns = _bands(_slices(shards, table.rows), "left", "right", table.dim)
    for left, right, columns in by_columns:
        for low, high, active in _bands(columns, "low", "high", table.rows):
            work += len(active) + 1
            if work > _MOST_WORK:
                fault = "its shards lie over each other in too many ways to check"
                return f"table {table.name!r}: {fault}"
            found = _classes_fault([(one.step, one.residue) for one in active], low, high)
            if found is not None:
                fault = found if isinstance(found, str) else _covered(left, right, *found)
                return f"table {table.name!r}, {fault}"
    return None


def _slices(shards: Sequence[Shard], rows: int) -> list[_Slice]:
    """Return shards as residue classes, whose ends are moved to as few ranks as there can be.

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
    """Return a number within each range (both ends included), of as few as suffice."""
    places: dict[tuple[int, int], int] = {}
    last = -1
    for first, end in sorted(set(ranges), key=lambda each: each[1]):
        if first > last:
            last = end
        places[first, end] = last
    return places


def _bands(
    slices: Sequence[_Slice], first: str, last: str, end: int
) -> Iterator[tuple[int, int, list[_Slice]]]:
    """Divide 0..end where a slice begins or ends; yield each part with the slices over it.

    `first` and `last` name the attributes that say where a slice begins and ends.
    """
    begins, ends = defaultdict(list), defaultdict(list)
    for one in slices:
        begins[getattr(one, first)].append(one)
        ends[getattr(one, last)].append(one)
    active: dict[int, _Slice] = {}
    for low, high in pairwise(sorted({0, end, *begins, *ends})):
        for one in ends.get(low, ()):
            del active[id(one)]
        active |= {id(one): one for one in begins.get(low, ())}
        yield low, high, list(active.values())


def _classes_fault(
    active: Sequence[tuple[int, int]], low: int, high: int
) -> tuple[int, int] | str | None:
    """Return a rank of low..high that is not in exactly one class, and its class count."""
    if len(active) == 1 and active[0][0] == 1:
        return None
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
