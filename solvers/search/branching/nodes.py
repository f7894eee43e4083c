"""Parts of the search space: which tables are cut how, and which GPUs serve their shards.

GPUs that cost the same, and serve shards of the same widths of the tables that are decided, are a
group: which of them a further shard goes to makes no difference, so that it is decided once.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from solvers.model.knapsack import Float
from solvers.search.branching.formulation import Formulation, Int, Layout

_ENOUGH = 1e-4
"""A program whose value is so near its bound needs no more options and points."""


_NEVER = 1e9
"""What it costs where a shard may not be, in units of the formulation."""


@dataclass(frozen=True, slots=True)
class Group:
    """GPUs alike.

    Attributes
    ----------
    gpus : int
    kind : int
        GPUs of one kind cost the same.
    hbm : float
        Of each, in units of the formulation.
    widths : dict of int to int
        The columns that each of them serves of tables that are decided; 0 for none.
    """

    gpus: int
    kind: int
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
    extra : float64, shape (options of the node,)
        What an option costs beyond its table's cheapest at the prices of the last program.
    points : int64
        Points of curves that the node's first program has.
    arenas : dict of int to (int, int)
        On how many GPUs an arena is, at least and at most, where that is decided.
    needed : float64, shape (arenas,)
        On how many each one is in the node's relaxation; empty where tables are decided.
    sides : dict of int to (bool, bool)
        Whether GPUs and whether servers hold rows of a table, where that is decided.
    undecided : float64, shape (tables,)
        How far the relaxation is from deciding that for each table, from 0 to 0.25; empty where
        tables are decided, or no servers are there for lack of DRAM.
    """

    bound: float
    depth: int
    number: int
    groups: tuple[Group, ...] = field(compare=False)
    layouts: dict[int, Layout] = field(compare=False)
    options: Int = field(compare=False)
    extra: Float = field(compare=False)
    points: Int = field(compare=False)
    arenas: dict[int, tuple[int, int]] = field(compare=False, default_factory=dict)
    needed: Float = field(compare=False, default_factory=lambda: np.zeros(0))
    sides: dict[int, tuple[bool, bool]] = field(compare=False, default_factory=dict)
    undecided: Float = field(compare=False, default_factory=lambda: np.zeros(0))

    def within(self, kept: npt.NDArray[np.bool_]) -> "Node":
        """Return the node with some of its options only, one level below."""
        options, extra = self.options[kept], self.extra[kept]
        return replace(self, depth=self.depth - 1, options=options, extra=extra)

    def with_relaxation(self, found: "Relaxed") -> "Node":
        """Return the node with its bound, and with what is left of its options."""
        return replace(
            self,
            bound=max(self.bound, found.bound),
            options=found.options,
            extra=found.extra,
            points=found.points,
            needed=found.needed,
            undecided=found.undecided,
        )


@dataclass(frozen=True, slots=True)
class Relaxed:
    """A node's relaxation.

    Attributes
    ----------
    bound : float
        No placement of the node is faster; or none is as fast as the limit, where it is above that.
    value : float
        Of the program, which has not all points: the bound or above it.
    options : int64
        Options that a placement as fast as the limit can use.
    extra : float64
        What each of them costs beyond its table's cheapest, at the prices of the bound.
    points : int64
        Points that are cheapest, or nearly, at the prices of the bound.
    chosen : float64, shape (options of the node,)
        Shares of a table's options.
    served : float64, shape (parts, groups)
        Shards of a part that each group serves.
    of_groups : float64, shape (parts, groups)
        What a shard of a part costs at least in each group, at the prices of the bound.
    needed : float64, shape (arenas,)
        On how many GPUs each arena has to be for what is served; empty where tables are decided.
    undecided : float64, shape (tables,)
        As in `Node`.
    is_solved : bool
        Otherwise the solver stopped early, and nothing is known.
    """

    bound: float
    value: float
    options: Int
    extra: Float
    points: Int
    chosen: Float
    served: Float
    of_groups: Float
    needed: Float
    undecided: Float
    is_solved: bool = True

    @property
    def is_exact(self) -> bool:
        """Whether more options and points would hardly change it."""
        return self.value - self.bound <= _ENOUGH * self.value

    @classmethod
    def unknown(cls, node: Node) -> "Relaxed":
        """Of a node that was not looked at."""
        none = np.zeros(0)
        known = node.options, node.extra, node.points
        return cls(0.0, 0.0, *known, none, none, none, none, none, is_solved=False)


def first_groups(formulation: Formulation) -> tuple[Group, ...]:
    """Return all GPUs, by their kind and HBM."""
    of_kind = sorted(formulation.gpus_of_kind.items())
    return tuple(Group(gpus, kind, hbm, {}) for (kind, hbm), gpus in of_kind)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to serve a table's shards.

    Attributes
    ----------
    groups : tuple of Group
        What it makes of the node's groups.
    counts : list of list of int, shape (widths of the layout, groups of the node)
        Shards of each width that each group of the node serves.
    """

    groups: tuple[Group, ...]
    counts: list[list[int]]


def ways_to_serve(groups: Sequence[Group], table: int, layout: Layout) -> Iterator[Way]:
    """Yield all ways to serve a table's shards with these groups, each shard by another GPU."""
    for counts in _distributions([group.gpus for group in groups], layout.widths):
        parts = []
        for number, group in enumerate(groups):
            left = group.gpus
            for (width, _), of_width in zip(layout.widths, counts, strict=True):
                if of_width[number]:
                    widths = {**group.widths, table: width}
                    parts.append(replace(group, gpus=of_width[number], widths=widths))
                    left -= of_width[number]
            if left:
                parts.append(replace(group, gpus=left, widths={**group.widths, table: 0}))
        yield Way(tuple(parts), counts)


def bounds_of_ways(
    formulation: Formulation, relaxation: "Relaxed", table: int, layout: Layout, ways: Sequence[Way]
) -> Float:
    """Return bounds of a node with each way to serve a table's shards, shape (ways,).

    They are those of the node's relaxation, at its prices: a group that is divided has the same
    prices as before, so that what other tables cost stays.

    Parameters
    ----------
    relaxation : Relaxed
        Of the node with this layout of the table alone.
    """
    f = formulation
    counts = np.array([way.counts for way in ways], dtype=np.float64)
    least = np.full(len(ways), np.inf)
    for at in np.flatnonzero(f.table_of[relaxation.options] == table).tolist():
        parts = np.flatnonzero(f.option_of == relaxation.options[at])
        costs = relaxation.of_groups[parts]
        # Parts that differ in the kind of GPUs alone stand for the same shards.
        cheapest = np.full(int(f.shard_of[parts].max(initial=0)) + 1, np.inf)
        np.minimum.at(cheapest, f.shard_of[parts], costs.min(axis=1))
        dearer = np.minimum(costs - cheapest[f.shard_of[parts], None], _NEVER)
        of_widths = [dearer[f.width_of[parts] == width].min(axis=0) for width, _ in layout.widths]
        least = np.minimum(least, relaxation.extra[at] + (counts * of_widths).sum(axis=(1, 2)))
    return relaxation.bound + least


def layouts_of(formulation: Formulation, node: Node, table: int) -> list[Layout]:
    """Layouts of a table's options in a node, each once."""
    options = node.options[formulation.table_of[node.options] == table]
    return list(dict.fromkeys(formulation.layouts[number] for number in options.tolist()))


def within_layouts(
    formulation: Formulation, node: Node, table: int, layouts: Collection[Layout]
) -> Node:
    """Return a node in which a table has one of some layouts."""
    f = formulation
    kept = f.table_of[node.options] != table
    for at in np.flatnonzero(~kept).tolist():
        kept[at] = f.layouts[node.options[at]] in layouts
    return replace(node, options=node.options[kept], extra=node.extra[kept])


def divided_layouts(layouts: Iterable[Layout]) -> list[list[Layout]]:
    """Return parts of some layouts: those of whole tables, then by shard count, then halves.

    >>> whole, halves = Layout(1, ((128, 1),)), Layout(1, ((64, 2),))
    >>> divided_layouts([halves, whole]) == [[whole], [halves]]
    True
    """
    layouts = sorted(layouts, key=lambda layout: (layout.shards, layout.row_slices, layout.widths))
    of_shards: dict[tuple[int, int], list[Layout]] = {}
    for layout in layouts:
        of_shards.setdefault((layout.shards, layout.row_slices), []).append(layout)
    whole = [layout for layout in layouts if layout.shards <= 1]
    if 0 < len(whole) < len(layouts):
        return [whole, layouts[len(whole) :]]
    if len(of_shards) > 1:
        return list(of_shards.values())
    half = (len(layouts) + 1) // 2
    return [part for part in (layouts[:half], layouts[half:]) if part]


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
    """Yield all ways to share out some shards."""
    if not room:
        if not shards:
            yield []
        return
    for count in range(min(room[0], shards), -1, -1):
        for rest in _shared(room[1:], shards - count):
            yield [count, *rest]
