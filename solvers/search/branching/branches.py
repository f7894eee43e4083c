"""Divide a part of the search space by servers, by arenas, or by how tables are cut and served."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from solvers.search.branching.formulation import REPLICATED, Formulation, Layout
from solvers.search.branching.nodes import (
    Node,
    Relaxed,
    Way,
    bounds_of_ways,
    divided_layouts,
    layouts_of,
    ways_to_serve,
    within_layouts,
)

_NEARLY_WHOLE = 0.02
"""Take a number of GPUs for whole if it is this near, and a table for decided."""

_FIRST_PARTS = 8.0
"""Before its first division, the heaviest table counts as if it had closed a gap with this many
parts."""

_PLACEMENTS = 100
"""Leave open how a table's shards are served if there are more ways than this."""


class Examined(NamedTuple):
    """A node with its bound, and with its relaxation if it was solved."""

    node: Node
    found: Relaxed | None


class _Cut(NamedTuple):
    """A layout of a table, the node with only this layout, and its relaxation if known."""

    layout: Layout
    node: Node
    found: Relaxed | None = None


class Scores:
    """Choose which table to divide next.

    A table has a high score if its divisions closed most of the gap and left few parts to examine:
    the sum of the closed shares of gaps, divided by the number of parts. This is a pseudocost
    (Achterberg, Koch and Martin 2005, doi:10.1016/j.orl.2004.04.002). Before the first division,
    heavier tables have higher scores.

    Attributes
    ----------
    order : list of int
        Tables, the heaviest first.
    """

    def __init__(self, formulation: Formulation) -> None:
        self.order = formulation.heaviest_first()
        costs = formulation.table_costs
        self._closed = costs / (max(costs[self.order].tolist(), default=0.0) or 1.0)
        self._parts = np.full(costs.size, _FIRST_PARTS)

    def best(self, node: Node) -> int | None:
        """Return the table to divide next by how it is cut; None if all are divided.

        Tables that servers share with GPUs come first, then those that servers hold alone: servers
        are few and their shards long, so a relaxation is most wrong there. Scores decide among
        equals. Without servers the heaviest table is next.
        """
        left = [table for table in self.order if table not in node.cut]
        if not node.sides or not left:
            return next(iter(left), None)
        scores = self._closed / self._parts
        on_gpus = (True, False)

        def rank(table: int) -> tuple[bool, bool, float]:
            gpus, servers = node.sides.get(table, on_gpus)
            return servers, gpus, float(scores[table])

        return max(left, key=rank)

    def note(self, table: int, node: Node, parts: Sequence[Node], target: float) -> None:
        """Note that dividing a table left these parts of a node."""
        least = min((part.bound for part in parts), default=target)
        gap = max(target - node.bound, 1e-9)
        self._closed[table] += min(1.0, (least - node.bound) / gap)
        self._parts[table] += 1 + len(parts)


@dataclass(frozen=True, slots=True)
class Branches:
    """Divides nodes into parts."""

    formulation: Formulation
    scores: Scores
    are_arenas_first: bool  # Whether the number of GPUs of each arena is decided before any table.
    # Yields the nodes that may hold plans of interest, with their bounds and relaxations.
    examined: Callable[[Sequence[Node]], Iterator[Examined]]
    # Returns the step time, in units of the formulation, that a plan of interest must beat.
    target: Callable[[], float]

    def kept(self, nodes: Sequence[Node]) -> list[Node]:
        """Return nodes that may hold plans of interest, with their bounds and remaining options."""
        return [found.node for found in self.examined(nodes)]

    def of(self, node: Node) -> list[Node] | None:
        """Return parts of a node that hold all its plans of interest; None if all is decided."""
        f = self.formulation
        by_side = self.by_side(node)
        if by_side is not None:
            return by_side
        by_arena = self._by_arena(node)
        if by_arena is not None:
            return self.kept(by_arena)
        table = self.scores.best(node)
        if table is not None:
            parts = self._layouts(node, table)
            self.scores.note(table, node, parts, self.target())
            return parts
        tables, counts = np.unique(f.table_of[node.options], return_counts=True)
        several = set(tables[counts > 1].tolist())
        table = next((table for table in self.scores.order if table in several), None)
        if table is None:
            return None
        of_table = f.table_of[node.options] == table
        each = node.options[of_table].tolist()
        return self.kept([node.within(~of_table | (node.options == one)) for one in each])

    def by_side(self, node: Node) -> list[Node] | None:
        """Divide a node by whether a table is on GPUs, on servers, or on both.

        Take the table that the relaxation is farthest from deciding. Return None if it decides all.
        """
        if node.depth or not node.undecided.size:
            return None
        undecided = node.undecided.copy()
        undecided[list(node.sides)] = 0.0
        if undecided.max() < _NEARLY_WHOLE:
            return None
        table, f = int(undecided.argmax()), self.formulation
        gpus, servers = f.instance.gpus - f.instance.servers, f.instance.servers
        shards = np.array([f.layouts[option].shards for option in node.options.tolist()])
        others = f.table_of[node.options] != table
        sides = (True, False), (False, True), (True, True)
        may = shards <= gpus, shards <= servers, shards > 1
        return self.kept(
            [
                replace(node.within(others | fits), depth=0, sides={**node.sides, table: each})
                for each, fits in zip(sides, may, strict=True)
            ]
        )

    def _is_allowed(self, node: Node, table: int, way: Way) -> bool:
        """Return whether all groups that serve the table may do so, and on its decided sides."""
        if not way.counts:
            return True
        used = np.sum(way.counts, axis=0) > 0
        may_serve = self.formulation.pins[[group.pins for group in node.groups], table]
        if (used & ~may_serve).any():
            return False
        if table not in node.sides:
            return True
        serves = np.isin([group.kind for group in node.groups], self.formulation.server_kinds)
        return (bool(used[~serves].any()), bool(used[serves].any())) == node.sides[table]

    def _by_arena(self, node: Node) -> list[Node] | None:
        """Divide a node by whether an arena is on fewer or on more GPUs than in its relaxation.

        Take the arena whose number of GPUs is farthest from a whole number. Return None if all are
        whole or launches cost little.
        """
        if node.depth or not node.needed.size or not self.are_arenas_first:
            return None
        needed = node.needed.copy()
        for arena, limits in node.arenas.items():
            needed[arena] = min(max(needed[arena], limits[0]), limits[1])
        from_whole = np.abs(needed - np.round(needed))
        arena = int(from_whole.argmax())
        if from_whole[arena] < _NEARLY_WHOLE:
            return None
        fewer = math.floor(needed[arena])
        least, most = node.arenas.get(arena, (0, self.formulation.instance.gpus))
        parts = ((least, fewer), (fewer + 1, most))
        return [replace(node, arenas={**node.arenas, arena: each}) for each in parts]

    def _layouts(self, node: Node, table: int) -> list[Node]:
        """Divide a node by the layouts of a table, and by the ways to serve its shards."""
        f, most = self.formulation, _PLACEMENTS
        ways: dict[Layout, list[Way]] = {}
        for layout in layouts_of(f, node, table):
            possible = ways_to_serve(node.groups, table, layout)
            allowed = (way for way in possible if self._is_allowed(node, table, way))
            every = list(islice(allowed, most + 1))
            if every:
                ways[layout] = every
        one_way = [layout for layout, every in ways.items() if len(every) == 1]
        several = [layout for layout, every in ways.items() if len(every) > 1]
        cuts = [_Cut(layout, within_layouts(f, node, table, [layout])) for layout in one_way]
        cuts += self._possible(node, table, several)
        undecided, served = [], []
        for layout, cut, found in cuts:
            left = ways[layout]
            below = replace(cut, depth=node.depth - 1, cut=node.cut | {table})
            if len(left) > most:
                undecided.append(below)
                continue
            if found is not None:
                useful = bounds_of_ways(f, found, table, layout, left) < self.target()
                left = [way for way, is_useful in zip(left, useful, strict=True) if is_useful]
            layouts = {**node.layouts, table: layout}
            served += [replace(below, groups=way.groups, layouts=layouts) for way in left]
        # If a table can only be replicated, nothing was decided.
        return undecided + (served if [*ways] == [REPLICATED] else self.kept(served))

    def _possible(self, node: Node, table: int, layouts: Sequence[Layout]) -> list[_Cut]:
        """Return the layouts of a table that may be of use, each with the node of this layout.

        Most layouts are too slow however they are served. So examine similar layouts together, and
        divide a set of them only if it may be of use.
        """
        f = self.formulation
        found: list[_Cut] = []
        whole = [(node, layouts)] if layouts else []
        while whole:
            parts = [
                within_layouts(f, within, table, part)
                for within, layouts in whole
                for part in divided_layouts(layouts)
            ]
            whole = []
            for left in self.examined(parts):
                known = layouts_of(f, left.node, table)
                if len(known) == 1:
                    found.append(_Cut(known[0], *left))
                elif known:
                    whole.append((left.node, known))
        return found
