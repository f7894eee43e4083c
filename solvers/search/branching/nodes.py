"""Parts of the search space: which tables are cut how, and which GPUs serve their shards.

GPUs that cost the same, and serve shards of the same widths of the tables that are decided, are a
group: which of them a further shard goes to makes no difference, so that it is decided once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from solvers.search.branching.formulation import Formulation, Int, Layout


@dataclass(frozen=True, slots=True)
class Group:
    """GPUs alike.

    Attributes
    ----------
    gpus : int
    hbm : float
        Of each, in units of the formulation.
    widths : dict of int to int
        The columns that each of them serves of tables that are decided; 0 for none.
    """

    gpus: int
    hbm: float
    widths: dict[int, int]


@dataclass(order=True, slots=True)
class Node:
    """A part of the search space, and a bound of all its placements.

    Attributes
    ----------
    bound : float
        Step time in units of the formulation.
    depth : int
        Negative, so that of equal bounds the deepest comes first.
    """

    bound: float
    depth: int
    number: int
    groups: tuple[Group, ...] = field(compare=False)
    layouts: dict[int, Layout] = field(compare=False)
    options: Int = field(compare=False)


def first_groups(formulation: Formulation) -> tuple[Group, ...]:
    """All GPUs, by their HBM."""
    return tuple(Group(gpus, hbm, {}) for hbm, gpus in sorted(formulation.gpus_of_hbm.items()))


def divided(groups: Sequence[Group], table: int, layout: Layout) -> Iterator[tuple[Group, ...]]:
    """All ways to serve a table's shards with these groups, each shard by another GPU."""
    for counts in _distributions([group.gpus for group in groups], layout.widths):
        parts = []
        for number, group in enumerate(groups):
            left = group.gpus
            for (width, _), of_width in zip(layout.widths, counts, strict=True):
                if of_width[number]:
                    widths = {**group.widths, table: width}
                    parts.append(Group(of_width[number], group.hbm, widths))
                    left -= of_width[number]
            if left:
                parts.append(Group(left, group.hbm, {**group.widths, table: 0}))
        yield tuple(parts)


def _distributions(
    room: Sequence[int], widths: Sequence[tuple[int, int]]
) -> Iterator[list[list[int]]]:
    """For each width, how many of its shards each group serves."""
    if not widths:
        yield []
        return
    (_, shards), *others = widths
    for counts in _shared(room, shards):
        left = [most - count for most, count in zip(room, counts, strict=True)]
        for rest in _distributions(left, others):
            yield [counts, *rest]


def _shared(room: Sequence[int], shards: int) -> Iterator[list[int]]:
    """All ways to share out some shards."""
    if not room:
        if not shards:
            yield []
        return
    for count in range(min(room[0], shards), -1, -1):
        for rest in _shared(room[1:], shards - count):
            yield [count, *rest]
