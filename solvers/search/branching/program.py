"""The linear relaxation of the integer program over groups of GPUs alike; see the package.

The program has only the options and points that were nearly the cheapest at the last program's
prices. Its own dual prices give a bound over all options and points. At any prices, a solution
costs at least the worth of the rows plus each table's cheapest option (Lagrangian duality; Neumaier
and Shcherbina 2004, doi:10.1007/s10107-003-0433-3, make bounds safe against rounding in this way).
The cheapest options and points at these prices join the next program (column generation: Dantzig
and Wolfe 1960, doi:10.1287/opre.8.1.101).
"""

from typing import Any

import numpy as np

from solvers.model.knapsack import Float, Int
from solvers.search.branching.formulation import UNITS, Formulation, least_of_each
from solvers.search.branching.nodes import Node, Relaxed, undecided_sides
from solvers.search.branching.rows import Rows, linear_model, solution

_LACKING = 100 * UNITS
"""Cost of lacking as many bytes as the largest GPU has."""

_NEAR = 3.0
"""Keep points for the next program that cost at most this more than their part's cheapest."""

_TRIED = 0.3
"""Give a program the options whose cost beyond their table's cheapest is at most this share of what
a placement may cost beyond the node's bound."""


_TRIED_OF_TABLE = 0.1
"""The cost beyond the table's cheapest must also be at most this share of the table's cost. Small
tables have many options, which all cost little and hardly move a bound."""


class GroupProgram:
    """The linear program of a node, with some of its options and points.

    `most`: step time that a placement has to beat, in units of the formulation.
    """

    def __init__(self, formulation: Formulation, node: Node, most: float) -> None:
        f = formulation
        self.formulation, self.node, self.most = f, node, most
        self.sizes = np.array([group.gpus for group in node.groups], dtype=np.float64)
        self.kinds = np.array([group.kind for group in node.groups])
        groups, options = self.sizes.size, node.options.size
        self.at_option = np.full(len(f.options), -1)
        self.at_option[node.options] = np.arange(options)
        self.parts = np.flatnonzero(self.at_option[f.option_of] >= 0)
        # The shards that each part stands for, and one part of each.
        found = np.unique(f.shard_of[self.parts], return_index=True, return_inverse=True)
        self.firsts, self.shard_at = self.parts[found[1]], found[2]
        tables = f.table_of[node.options]
        least = np.full(f.instance.tables, np.inf)
        np.minimum.at(least, tables, node.extra)
        extra = node.extra - least[tables]
        of_tables = _TRIED_OF_TABLE * f.table_costs[tables] / f.devices
        self.tried = extra <= np.minimum(_TRIED * (most - node.bound), of_tables)
        self.part_tried = self.tried[self.at_option[f.option_of[self.parts]]]
        self._pair()
        # Columns: T, T[f], arenas of groups, launches and lacking bytes of groups, options, points.
        self.phase_at, self.arena_at = 1, 1 + f.phases
        self.launch_at = self.arena_at + groups * f.arenas
        self.lack_at = self.launch_at + groups
        self.option_at = self.lack_at + groups
        self.point_at = self.option_at + options
        self.columns = self.point_at + self.points.shape[1]
        self.rows = Rows()
        self.counted: list[tuple[Int, float]] = []  # Rows of pairs, and their factors: `_count`.
        self._add_chains()
        self._add_tables()
        self._add_arenas()
        self._add_decided()
        self._add_together()
        self._add_loads()
        self._add_dram()
        self._add_singles()

    def _pair(self) -> None:
        """Pair parts with the groups that may serve them, and choose their points."""
        f, node = self.formulation, self.node
        allowed = f.kind_of[self.parts, None] == self.kinds
        tables = f.part_table[self.parts]
        allowed &= f.pins[[group.pins for group in node.groups]][:, tables].T
        for table in node.layouts:
            of_table = np.flatnonzero(tables == table)
            widths = np.array([group.widths[table] for group in node.groups])
            allowed[of_table] &= f.width_of[self.parts[of_table], None] == widths
        self.serves = np.isin(self.kinds, f.server_kinds)
        for table, (gpus, servers) in node.sides.items():
            allowed[tables == table] &= np.where(self.serves, servers, gpus)
        self.part_at, self.group = np.nonzero(allowed)
        self.part = self.parts[self.part_at]
        self.table = f.part_table[self.part]
        chosen, drives = node.points, f.drives
        part_of_chosen = f.part_of_point[chosen // drives.number]
        counts = np.bincount(part_of_chosen, minlength=f.sizes.size)
        counts[self.parts[~self.part_tried]] = 0
        firsts = np.searchsorted(part_of_chosen, np.arange(f.sizes.size))
        of_pair = counts[self.part]
        self.pair = np.repeat(np.arange(self.part.size), of_pair)
        within = np.arange(self.pair.size) - np.repeat(np.cumsum(of_pair) - of_pair, of_pair)
        chosen = chosen[firsts[self.part][self.pair] + within]
        self.points = f.points[:, chosen // drives.number]
        if drives.number > 1:
            self.points = self.points + drives.costs[:, chosen % drives.number]

    def _add_chains(self) -> None:
        """Phases of a chain together take at most the step."""
        f, rows = self.formulation, self.rows
        first = rows.block(len(f.members), -np.inf, -f.fixed)
        chain, phase = np.nonzero(f.members)
        rows.add(first + chain, self.phase_at + phase, 1.0)
        rows.add(first + np.arange(len(f.members)), 0, -1.0)

    def _add_tables(self) -> None:
        """A table takes one option; each of its shards is served, at most one on a GPU."""
        f, rows, options = self.formulation, self.rows, self.node.options
        first = rows.block(f.instance.tables, 1.0, 1.0)
        every = self.option_at + np.arange(options.size)
        rows.add(first + f.table_of[options], every, 1.0)
        # At a high cost, the program may leave out all tables. So it always has a solution, whose
        # prices prove it if no plan of the node is possible.
        rows.add(first + np.arange(f.instance.tables), self.lack_at, 1.0)
        self.serve_row = rows.block(self.firsts.size, 0.0, 0.0)
        self._count(self.serve_row + self.shard_at[self.part_at])
        used = self.option_at + self.at_option[f.option_of[self.firsts]]
        numbers = self.serve_row + np.arange(self.firsts.size)
        rows.add(numbers, used, -f.times[self.firsts])
        groups = self.sizes.size
        keys, apart_of = np.unique(self.table * groups + self.group, return_inverse=True)
        self._count(rows.block(keys.size, -np.inf, self.sizes[keys % groups]) + apart_of)

    def _count(self, of_rows: Int, value: float = 1.0) -> None:
        """Add the number of shards that each pair serves, times `value`, to its row.

        `of_rows`, shape (pairs of part and group,): the row of each pair, or -1.
        """
        self.counted.append((of_rows, value))
        mine = np.flatnonzero(of_rows[self.pair] >= 0)
        self.rows.add(of_rows[self.pair[mine]], self.point_at + mine, value)

    def _add_arenas(self) -> None:
        """A group has an arena on at least as many GPUs as it serves shards of a table in it.

        Replicas are on all GPUs. A GPU that serves nothing waits for one that launches something.
        """
        f, rows, groups = self.formulation, self.rows, self.sizes.size
        options = self.node.options
        arena = f.arena_of[self.part]
        counted = np.flatnonzero(f.replica_arena[f.option_of[self.part]] != arena)
        keys = (self.table * f.arenas + arena) * groups + self.group
        replicated = np.flatnonzero(f.replica_arena[options] >= 0)
        of_options = f.table_of[options[replicated]] * f.arenas
        of_options = (of_options + f.replica_arena[options[replicated]])[:, None] * groups
        of_options = of_options + np.arange(groups)
        of_tried = counted[self.part_tried[self.part_at[counted]]]
        known = np.unique(np.concatenate((keys[of_tried], of_options.ravel())))
        self.arena_row = rows.block(known.size, -np.inf, 0.0)
        of_rows = np.full(self.part.size, -1)
        counted = counted[np.isin(keys[counted], known)]
        of_rows[counted] = self.arena_row + np.searchsorted(known, keys[counted])
        self._count(of_rows)
        at = self.arena_row + np.searchsorted(known, of_options)
        rows.add(at, self.option_at + replicated[:, None], self.sizes)
        held = self.arena_at + (known % groups) * f.arenas + known // groups % f.arenas
        rows.add(self.arena_row + np.arange(known.size), held, -1.0)
        self.held = held - self.arena_at
        first = rows.block(groups, -np.inf, 0.0)
        every = np.arange(groups * f.arenas)
        rows.add(first + every // f.arenas, self.arena_at + every, 1.0)
        rows.add(first + np.arange(groups), self.launch_at + np.arange(groups), -1.0)
        for number, limits in self.node.arenas.items():
            row = rows.block(1, *limits)
            rows.add(row, self.arena_at + np.arange(groups) * f.arenas + number, 1.0)
            # With few options, the program may need the arena.
            rows.add(row, self.lack_at, -1.0)

    def _add_decided(self) -> None:
        """Groups serve what the node decided. Sides that share a table each have a shard of it."""
        f, node, rows = self.formulation, self.node, self.rows
        decided_of, side_of = np.full((2, self.part.size), -1)
        for table in node.layouts:
            for number, group in enumerate(node.groups):
                if group.widths[table]:
                    row = rows.block(1, group.gpus, group.gpus)
                    rows.add(row, self.lack_at, group.gpus)
                    decided_of[(self.table == table) & (self.group == number)] = row
        for table in (table for table, sides in node.sides.items() if all(sides)):
            options = np.flatnonzero(f.table_of[node.options] == table)
            each = np.arange(2 * options.size)
            row = rows.block(each.size, 0.0, np.inf)
            rows.add(row + each, self.option_at + options[each // 2], -1.0)
            mine = np.flatnonzero(self.table == table)
            at = np.searchsorted(options, self.at_option[f.option_of[self.part[mine]]])
            side_of[mine] = row + 2 * at + self.serves[self.group[mine]]
        self._count(decided_of)
        self._count(side_of)

    def _add_together(self) -> None:
        """A group serves both tables of a pair that has to stay together, or none of them."""
        for pair in self.formulation.together:
            rows = self.rows.block(self.sizes.size, 0.0, 0.0) + self.group
            for table, value in zip(pair, (1.0, -1.0), strict=True):
                self._count(np.where(self.table == table, rows, -1), value)

    def _add_loads(self) -> None:
        """Limit the bytes of a group and its seconds in each phase, with replicas and launches."""
        f, rows, groups = self.formulation, self.rows, self.sizes.size
        number, options = np.arange(groups), self.node.options
        hbm = np.array([group.hbm for group in self.node.groups])
        self.load_row = rows.block(groups, -np.inf, self.sizes * hbm)
        rows.block(f.phases * groups, -np.inf, 0.0)
        # A phase in no chain delays nothing.
        for row in (0, *(1 + np.flatnonzero(f.members.any(axis=0))).tolist()):
            first = self.load_row + row * groups
            some = np.flatnonzero(self.points[row])
            of_group = first + self.group[self.pair[some]]
            rows.add(of_group, self.point_at + some, self.points[row, some])
            some = np.flatnonzero(f.replicas[:, options, row].any(axis=0))
            replicas = self.sizes * f.replicas[self.kinds, options[some, None], row]
            rows.add(first + number, self.option_at + some[:, None], replicas)
            if not row:
                # With few points, nothing may fit that fits with all points.
                rows.add(first + number, self.lack_at + number, -1.0)
            else:
                rows.add(first + number, self.phase_at + row - 1, -self.sizes)
                launches = f.launches[self.kinds, row - 1]
                if launches.any():
                    rows.add(first + number, self.launch_at + number, launches)

    def _add_dram(self) -> None:
        """Limit the bytes of cold rows in all hosts' DRAM, if it has a price."""
        f, rows = self.formulation, self.rows
        self.dram_row = rows.block(int(f.unit_dram > 0), -np.inf, 1.0)
        if f.unit_dram:
            some = np.flatnonzero(self.points[-1])
            rows.add(self.dram_row, self.point_at + some, self.points[-1, some])
            rows.add(self.dram_row, self.lack_at + np.arange(self.sizes.size), -1.0)

    def _add_singles(self) -> None:
        """No phase is shorter than its longest shard with all replicas.

        Shards of the same number in their options share their rows.
        """
        f, rows, options = self.formulation, self.rows, self.node.options
        most = int(f.number_of.max(initial=0)) + 1
        keys = f.part_table[self.parts] * most + f.number_of[self.parts]
        long = f.is_long[self.parts]
        known = np.unique(keys[long & self.part_tried])
        self.single_of = np.full(self.part.size, -1)
        mine = (long & np.isin(keys, known))[self.part_at]
        self.single_of[mine] = np.searchsorted(known, keys[self.part_at[mine]])
        of_point = self.single_of[self.pair]
        self.single_rows: dict[int, int] = {}
        every = np.arange(known.size)
        for phase in np.flatnonzero(f.members.any(axis=0)).tolist():
            seconds = self.points[1 + phase] / f.times[self.part[self.pair]]
            some = np.flatnonzero((seconds > 0) & (of_point >= 0))
            if not some.size:
                continue
            launch = f.launches[:, phase].min()
            row = self.single_rows[phase] = rows.block(known.size, -np.inf, -launch)
            rows.add(row + of_point[some], self.point_at + some, seconds[some])
            least = f.replicas[:, options, 1 + phase].min(axis=0)
            some = np.flatnonzero(least)
            replicas = least[some, None]
            rows.add(row + every, self.option_at + some[:, None], replicas)
            rows.add(row + every, self.phase_at + phase, -1.0)

    def solve(self, time_limit_s: float) -> Relaxed:
        """Solve the program and return the relaxation."""
        f, groups = self.formulation, self.sizes.size
        low, high = self.rows.limits
        least: Any = np.zeros(self.columns)
        most: Any = np.full(self.columns, np.inf)
        most[self.arena_at : self.launch_at] = np.repeat(self.sizes, f.arenas)
        if not f.instance.servers:  # With servers, it may be that no GPU serves anything.
            # A GPU that serves nothing may wait for one that launches faster.
            fastest, slower = f.launches.min(axis=0), f.launches > f.launches.min(axis=0)
            shares = np.divide(fastest, f.launches, np.ones_like(f.launches), where=slower)
            least[self.launch_at : self.lack_at] = self.sizes * shares.min(axis=1)[self.kinds]
        most[self.launch_at : self.lack_at] = self.sizes * f.arenas
        most[self.option_at : self.point_at] = 1.0
        aim: Any = np.eye(1, self.columns)[0]
        aim[self.lack_at : self.option_at] = _LACKING
        # Leave out columns and rows of options that are not tried.
        columns, rows = np.ones(self.columns, dtype=bool), np.ones(self.rows.count, dtype=bool)
        columns[self.option_at : self.point_at] = self.tried
        rows[self.serve_row + self.shard_at[~self.part_tried]] = False
        model = linear_model(self.rows, aim, least, most, (rows, columns))
        if (found := solution(model, time_limit_s)) is None:
            return Relaxed.unknown(self.node)
        values, prices = np.zeros(self.columns), np.zeros(self.rows.count)
        values[columns], prices[rows] = found
        # The bound is about placements that fit and beat the limit.
        most[: self.arena_at] = self.most
        most[self.lack_at : self.option_at] = 0.0
        due = aim - self.rows.priced(prices, self.columns)
        bound, extra, points, of_groups = self._bound(prices, due, low, high, least, most)
        options, chosen = self.node.options, values[self.option_at : self.point_at]
        served = np.zeros((f.sizes.size, groups))
        np.add.at(served, (self.part[self.pair], self.group[self.pair]), values[self.point_at :])
        useful = extra <= self.most - bound
        return Relaxed(
            bound,
            float(aim @ values),
            options[useful],
            extra[useful],
            points,
            chosen,
            served,
            of_groups,
            np.zeros(0) if self.node.depth else self._needed(values),
            undecided_sides(f, self.node, chosen, served),
        )

    def _needed(self, values: Float) -> Float:
        """Return how many GPUs each arena needs for a solution's shards, shape (arenas,)."""
        f, groups = self.formulation, self.sizes.size
        rows, columns, entries = self.rows.entries
        mine = (columns < self.arena_at) | (columns >= self.launch_at)
        served = np.bincount(rows[mine], entries[mine] * values[columns[mine]], self.rows.count)
        needed = np.zeros(groups * f.arenas)
        np.maximum.at(needed, self.held, served[self.arena_row :][: self.held.size])
        of_arenas: Float = needed.reshape(groups, f.arenas).sum(axis=0)
        return of_arenas

    def _bound(
        self, prices: Float, due: Float, low: Float, high: Float, least: Float, most: Float
    ) -> tuple[float, Float, Int, Float]:
        """Return the bound at prices of rows, extra costs of options, near columns, shard costs.

        Shard costs have shape (parts of the formulation, groups), `prices` (rows,), and `due`, the
        reduced costs of columns, (columns,).
        """
        f, options, groups = self.formulation, self.node.options, self.sizes.size
        # The price of an absent limit is a rounding error: set it to 0.
        wrong = (prices > 0) & np.isinf(low) | (prices < 0) & np.isinf(high)
        if wrong.any():
            due = due + self.rows.priced(np.where(wrong, prices, 0.0), self.columns)
            prices = np.where(wrong, 0.0, prices)
        paid = prices != 0
        bound = float((prices[paid] * np.where(prices > 0, low, high)[paid]).sum())
        head = due[: self.option_at]
        ends = np.where(head < 0, most[: self.option_at], least[: self.option_at])
        bound += float((head * ends).sum())
        of_groups, points = self._cheapest(prices, groups)
        costs = due[self.option_at : self.point_at].copy()
        of_shards = np.full(self.firsts.size, np.inf)
        np.minimum.at(of_shards, self.shard_at, of_groups.min(axis=1))
        used = self.at_option[f.option_of[self.firsts]]
        np.add.at(costs, used, of_shards * f.times[self.firsts])
        of_table = np.full(f.instance.tables, np.inf)
        np.minimum.at(of_table, f.table_of[options], costs)
        finite = np.where(np.isinf(of_table), 0.0, of_table)  # inf - inf is no number.
        every = np.full((f.sizes.size, groups), np.inf)
        every[self.parts] = of_groups
        return bound + float(of_table.sum()), costs - finite[f.table_of[options]], points, every

    def _cheapest(self, prices: Float, groups: int) -> tuple[Float, Int]:
        """Return the least cost of each part's shard in each group, at prices of rows.

        And the columns of this cost, and the program's columns that cost little more.
        """
        f = self.formulation
        fixed = np.zeros(self.part.size)
        for of_rows, value in self.counted:
            fixed -= value * np.where(of_rows >= 0, prices[of_rows], 0.0)
        weights = np.empty((len(f.points), self.part.size))
        for row in range(1 + f.phases):
            weights[row] = -prices[self.load_row + row * groups + self.group]
        weights[1 + f.phases :] = -prices[self.dram_row] if f.unit_dram else 0.0
        for phase, row in self.single_rows.items():
            mine = np.flatnonzero(self.single_of >= 0)
            weights[1 + phase, mine] -= (
                prices[row + self.single_of[mine]] / f.times[self.part[mine]]
            )
        sizes = f.sizes[self.parts]
        starts, numbers, points = f.points_of_parts(self.parts)
        cheapest = np.full((self.parts.size, groups), np.inf)
        near, found = np.zeros(f.points.shape[1], dtype=bool), []
        of_parts = np.zeros((len(f.points), f.sizes.size))
        for group in range(groups):
            mine = np.flatnonzero(self.group == group)
            of_parts[:, self.part[mine]] = weights[:, mine]
            extra = np.full(self.parts.size, np.inf)
            extra[self.part_at[mine]] = fixed[mine]
            costs = np.repeat(extra, sizes)
            for row in np.flatnonzero(of_parts.any(axis=1)).tolist():
                costs += np.repeat(of_parts[row, self.parts], sizes) * points[row]
            more, columns = f.drives.least(of_parts, numbers)
            costs += more
            least, at = least_of_each(costs, starts, sizes)
            found.append(columns[at[np.isfinite(least)]])
            near[numbers[costs <= _NEAR]] = True
            cheapest[:, group] = least
        known = self.node.points[near[self.node.points // f.drives.number]]
        return cheapest, np.unique(np.concatenate((*found, known)))
