"""Parts of the search space: how some tables are cut, and which GPUs serve their shards.

GPUs form a group if they cost the same and serve shards of the same widths of all decided tables.
Which GPU of a group serves a further shard makes no difference.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from solvers.model.assignment import Assignment
from solvers.model.instance import Instance, TableShard
from solvers.model.knapsack import Bool, Float, Int
from solvers.search.branching.formulation import Formulation, Layout

_ENOUGH = 1e-4
"""Stop adding options and points if a program's value is this near its bound."""


_NEVER = 1e9
"""Cost of a shard where it may not be, in units of the formulation."""


@dataclass(frozen=True, slots=True)
class Group:
    """GPUs that are alike."""

    gpus: int
    kind: int  # GPUs of one kind cost the same.
    hbm: float  # HBM of each GPU, in units of the formulation.
    pins: int  # The set of tables that each GPU may serve, of the formulation's `pins`.
    widths: dict[int, int]  # Columns that each GPU serves of each decided table; 0 for none.


@dataclass(order=True, slots=True)
class Node:
    """A part of the search space, with a bound of all its placements."""

    bound: float  # Step time in units of the formulation.
    depth: int  # Minus the number of decisions: of equal bounds, the deepest node comes first.
    number: int
    groups: tuple[Group, ...] = field(compare=False)
    layouts: dict[int, Layout] = field(compare=False)
    options: Int = field(compare=False)
    # Shape (options of the node,): cost of an option beyond its table's cheapest at the last
    # program's prices.
    extra: Float = field(compare=False)
    points: Int = field(compare=False)  # Columns of the node's first program.
    # Least and largest number of GPUs of each decided arena.
    arenas: dict[int, tuple[int, int]] = field(compare=False, default_factory=dict)
    # Shape (arenas,): GPUs of each arena in the node's relaxation; empty once tables are decided.
    needed: Float = field(compare=False, default_factory=lambda: np.zeros(0))
    # Tables that were divided by how they are cut.
    cut: frozenset[int] = field(compare=False, default=frozenset())
    # For decided tables, whether GPUs and whether servers hold their rows.
    sides: dict[int, tuple[bool, bool]] = field(compare=False, default_factory=dict)
    # Shape (tables,): how far the relaxation is from deciding `sides` of each table, from 0 to
    # 0.25; empty once tables are cut, or without servers for lack of DRAM.
    undecided: Float = field(compare=False, default_factory=lambda: np.zeros(0))

    def within(self, kept: Bool) -> "Node":
        """Return the node with only some of its options, one level deeper."""
        options, extra = self.options[kept], self.extra[kept]
        return replace(self, depth=self.depth - 1, options=options, extra=extra)

    def with_relaxation(self, found: "Relaxed") -> "Node":
        """Return the node with its bound and its remaining options."""
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
    """A node's relaxation."""

    # No placement of the node is faster. If above the limit, no placement beats the limit.
    bound: float
    # Value of the program, with the cost of tables that it leaves out. It is not below the bound,
    # as the program lacks some options and points.
    value: float
    options: Int  # Options that a placement as fast as the limit can use.
    extra: Float  # Cost of each option beyond its table's cheapest, at the bound's prices.
    points: Int  # Columns that are cheapest, or nearly, at the bound's prices.
    chosen: Float  # Shape (options of the node,): share of its table that each option takes.
    served: Float  # Shape (parts, groups): number of a part's shards that each group serves.
    # Shape (parts, groups): least cost of a part's shard in each group, at the bound's prices.
    of_groups: Float
    # Shape (arenas,): GPUs that each arena needs for what is served; empty once tables are decided.
    needed: Float
    undecided: Float  # Shape (tables,): as in `Node`.
    is_solved: bool = True  # If false, the solver stopped early and nothing is known.

    @property
    def is_exact(self) -> bool:
        """Whether more options and points would hardly change the value."""
        return self.value - self.bound <= _ENOUGH * self.value

    @classmethod
    def unknown(cls, node: Node) -> "Relaxed":
        """Return the relaxation of a node about which nothing is known."""
        none = np.zeros(0)
        known = node.options, node.extra, node.points
        return cls(0.0, 0.0, *known, none, none, none, none, none, is_solved=False)


def first_groups(formulation: Formulation) -> tuple[Group, ...]:
    """Return the groups of all GPUs, by kind, HBM and pins."""
    of_kind = sorted(formulation.gpus_of_kind.items())
    return tuple(Group(gpus, *kind, {}) for kind, gpus in of_kind)


def undecided_sides(formulation: Formulation, node: Node, chosen: Float, served: Float) -> Float:
    """Return `Relaxed.undecided` of a solution's `chosen` and `served`."""
    f = formulation
    if node.depth or not f.server_kinds.size:
        return np.zeros(0)
    serves = np.isin([group.kind for group in node.groups], f.server_kinds)
    of_options = np.zeros((len(f.options), 2))
    np.add.at(of_options, f.option_of, served @ np.column_stack((~serves, serves)))
    shares = np.zeros((f.instance.tables, 2))
    of_sides = np.minimum(of_options[node.options], chosen[:, None])
    np.add.at(shares, f.table_of[node.options], of_sides)
    far: Float = (shares * (1 - shares)).max(axis=1)
    return far


@dataclass(frozen=True, slots=True)
class Way:
    """A way to serve a table's shards."""

    groups: tuple[Group, ...]  # The node's groups, divided by what they serve of the table.
    # Shape (widths of the layout, groups of the node): number of shards of each width that each
    # group of the node serves.
    counts: list[list[int]]


def ways_to_serve(groups: Sequence[Group], table: int, layout: Layout) -> Iterator[Way]:
    """Yield all ways to serve a table's shards with these groups, at most one shard a GPU."""
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

    They use the prices of the node's relaxation. Parts of a divided group keep its prices, so that
    the costs of other tables stay.

    `relaxation`: relaxation of the node in which the table has only this layout.
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
    """Return the distinct layouts of a table's options in a node."""
    options = node.options[formulation.table_of[node.options] == table]
    return list(dict.fromkeys(formulation.layouts[number] for number in options.tolist()))


def within_layouts(
    formulation: Formulation, node: Node, table: int, layouts: Collection[Layout]
) -> Node:
    """Return the node with only some layouts of a table."""
    f = formulation
    kept = f.table_of[node.options] != table
    for at in np.flatnonzero(~kept).tolist():
        kept[at] = f.layouts[node.options[at]] in layouts
    return replace(node, options=node.options[kept], extra=node.extra[kept])


def divided_layouts(layouts: Iterable[Layout]) -> list[list[Layout]]:
    """Divide layouts: whole tables from others, then by shard count, then into halves.

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
    """Yield how many shards of each width each group serves, in every possible way."""
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


def rounded(
    instance: Instance, formulation: Formulation, node: Node, relaxation: Relaxed
) -> Assignment | None:
    """Give each table the option of its largest share, and each shard its main group.

    Within a group, the GPU with the fewest shards serves the next one. Return None if that does not
    fit or violates constraints. The assignment is of `instance`.
    """
    f = formulation
    gpus = _gpus_of_groups(formulation, node)
    left, shards_on = relaxation.served.copy(), np.zeros(instance.gpus)
    pairs: list[tuple[TableShard, int]] = []
    replicas: list[TableShard] = []
    # Tables that stay together are on the GPU of the first of them.
    before, at_gpu = {other: one for one, other in f.together}, dict[int, int]()
    for table in range(instance.tables):
        at = np.flatnonzero(f.table_of[node.options] == table)
        number = int(node.options[at[relaxation.chosen[at].argmax()]])
        option, used = f.options[number], set[int]()
        replicas += instance.replicas(table, option)
        parts = np.flatnonzero(f.option_of == number)
        for shard in instance.shards(table, option):
            if shard.home_gpu is not None:
                pairs.append((shard, shard.home_gpu))
                continue
            mine = parts[f.width_of[parts] == instance.arena_of(shard)[2]]
            wanted = np.argsort(-left[mine].sum(axis=0), kind="stable").tolist()
            group = next((g for g in wanted if set(gpus[g]) - used), None)
            if group is None:
                return None
            gpu = min(set(gpus[group]) - used, key=lambda gpu: (shards_on[gpu], gpu))
            gpu = at_gpu[table] = at_gpu.get(before.get(table, -1), gpu)
            of_group = mine[f.kind_of[mine] == node.groups[group].kind]
            left[of_group, group] -= 1 / max(1, of_group.size)
            shards_on[gpu] += 1
            used.add(gpu)
            pairs.append((shard, gpu))
    for shard, gpu in pairs:
        if not instance.may_serve(shard, gpu):
            return None
    return Assignment.of(instance, pairs, replicas)


def _gpus_of_groups(formulation: Formulation, node: Node) -> list[list[int]]:
    """Return the GPUs of each of a node's groups."""
    instance = formulation.instance
    hbm = (instance.hbm_bytes / formulation.unit_bytes).tolist()
    free: dict[tuple[int, float, int], list[int]] = {}
    for gpu, of in enumerate(zip(instance.kind_of_gpu, hbm, formulation.pins_of_gpu, strict=True)):
        free.setdefault(of, []).append(gpu)
    return [
        [free[group.kind, group.hbm, group.pins].pop(0) for _ in range(group.gpus)]
        for group in node.groups
    ]
