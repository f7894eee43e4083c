"""The linear relaxation of the integer program over groups of GPUs alike; see the package.

The program has some points of each curve. Its dual prices give the bound, over all points: for any
prices of rows, no solution costs less than what the rows are worth and each table's cheapest option
(Lagrangian duality; Neumaier and Shcherbina 2004, doi:10.1007/s10107-003-0433-3, make a bound safe
against rounding in the same way). The points that are cheapest at these prices join the next
program (Dantzig and Wolfe 1960, doi:10.1287/opre.8.1.101).
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from solvers.model.knapsack import Float
from solvers.search.branching.formulation import UNITS, Formulation, Int
from solvers.search.branching.nodes import Node

_LACKING = 100 * UNITS
"""What it costs if a GPU lacks as much HBM as it has."""

_ENOUGH = 1e-4
"""A program whose value is so near its bound needs no more points."""


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
    chosen : float64, shape (options of the node,)
        Shares of a table's options.
    served : float64, shape (parts, groups)
        Shards of a part that each group serves.
    is_solved : bool
        Otherwise the solver stopped early, and nothing is known.
    """

    bound: float
    value: float
    options: Int
    chosen: Float
    served: Float
    is_solved: bool = True

    @classmethod
    def unknown(cls, node: Node) -> "Relaxed":
        """Of a node that was not looked at."""
        none = np.zeros(0)
        return cls(0.0, 0.0, node.options, none, none, is_solved=False)


class _Rows:
    """Rows of a sparse program, collected block by block."""

    def __init__(self) -> None:
        self.count = 0
        self._entries: list[tuple[Any, ...]] = []
        self._limits: list[tuple[Float, Float]] = []

    def block(self, count: int, low: Any, high: Any) -> int:
        """So many further rows; the first one's number."""
        first = self.count
        self._limits.append((np.broadcast_to(low, count), np.broadcast_to(high, count)))
        self.count += count
        return first

    def add(self, rows: Any, columns: Any, values: Any) -> None:
        """Entries, of which any may be one for all."""
        self._entries.append(tuple(np.broadcast_arrays(rows, columns, values)))

    @property
    def limits(self) -> tuple[Any, Any]:
        """Lower and upper limits, shapes (rows,)."""
        low, high = (np.concatenate(each) for each in zip(*self._limits, strict=True))
        return low.astype(np.float64), high.astype(np.float64)

    def matrix(self, columns: int) -> Any:
        """All entries, those of one place summed."""
        from scipy import sparse

        rows, at, values = (
            np.concatenate([np.ravel(entry[number]) for entry in self._entries])
            for number in range(3)
        )
        shape = self.count, columns
        return sparse.csr_matrix((values.astype(np.float64), (rows, at)), shape)


class GroupProgram:
    """The linear program of a node, with the points that are chosen so far.

    Parameters
    ----------
    formulation : Formulation
    node : Node
    most : float
        A step time that a placement is to be below, in units of the formulation.
    """

    def __init__(self, formulation: Formulation, node: Node, most: float) -> None:
        f = formulation
        self.formulation, self.node, self.most = f, node, most
        self.sizes = np.array([group.gpus for group in node.groups], dtype=np.float64)
        groups, options = self.sizes.size, node.options.size
        self.at_option = np.full(len(f.options), -1)
        self.at_option[node.options] = np.arange(options)
        self.parts = np.flatnonzero(self.at_option[f.option_of] >= 0)
        self._pair()
        # Columns: T, T[f], arenas of groups, launches and lacking bytes of groups, options, points.
        self.phase_at, self.arena_at = 1, 1 + f.phases
        self.launch_at = self.arena_at + groups * f.arenas
        self.lack_at = self.launch_at + groups
        self.option_at = self.lack_at + groups
        self.point_at = self.option_at + options
        self.columns = self.point_at + self.points.shape[1]
        self.rows = _Rows()
        self._add_chains()
        self._add_tables()
        self._add_arenas()
        self._add_decided()
        self._add_loads()
        self._add_singles()

    def _pair(self) -> None:
        """Parts with the groups that may serve them, and their points that are chosen."""
        f, node = self.formulation, self.node
        allowed = np.ones((self.parts.size, self.sizes.size), dtype=bool)
        tables = f.part_table[self.parts]
        for table in node.layouts:
            of_table = np.flatnonzero(tables == table)
            widths = np.array([group.widths[table] for group in node.groups])
            allowed[of_table] = f.width_of[self.parts[of_table], None] == widths
        self.part_at, self.group = np.nonzero(allowed)
        self.part = self.parts[self.part_at]
        self.table = f.part_table[self.part]
        chosen = np.flatnonzero(f.chosen)
        counts = np.bincount(f.part_of_point[chosen], minlength=f.sizes.size)
        firsts = np.cumsum(counts) - counts
        of_pair = counts[self.part]
        self.pair = np.repeat(np.arange(self.part.size), of_pair)
        within = np.arange(self.pair.size) - np.repeat(np.cumsum(of_pair) - of_pair, of_pair)
        self.points = f.points[:, chosen[firsts[self.part][self.pair] + within]]

    def _add_chains(self) -> None:
        """Phases of a chain, one after another, are within the step."""
        f, rows = self.formulation, self.rows
        first = rows.block(len(f.members), -np.inf, -f.fixed)
        chain, phase = np.nonzero(f.members)
        rows.add(first + chain, self.phase_at + phase, 1.0)
        rows.add(first + np.arange(len(f.members)), 0, -1.0)

    def _add_tables(self) -> None:
        """A table takes one option, each shard of it is served, and by another GPU."""
        f, rows, options = self.formulation, self.rows, self.node.options
        first = rows.block(f.instance.tables, 1.0, 1.0)
        every = self.option_at + np.arange(options.size)
        rows.add(first + f.table_of[options], every, 1.0)
        self.serve_row = rows.block(self.parts.size, 0.0, 0.0)
        at = self.point_at + np.arange(self.pair.size)
        rows.add(self.serve_row + self.part_at[self.pair], at, 1.0)
        used = self.option_at + self.at_option[f.option_of[self.parts]]
        numbers = self.serve_row + np.arange(self.parts.size)
        rows.add(numbers, used, -f.times[self.parts])
        groups = self.sizes.size
        keys, self.apart_of = np.unique(self.table * groups + self.group, return_inverse=True)
        self.apart_row = rows.block(keys.size, -np.inf, self.sizes[keys % groups])
        rows.add(self.apart_row + self.apart_of[self.pair], at, 1.0)

    def _add_arenas(self) -> None:
        """An arena is on as many GPUs of a group as there are shards of one table in it.

        Replicas are on all GPUs; and what serves nothing waits for one that launches something.
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
        known = np.unique(np.concatenate((keys[counted], of_options.ravel())))
        self.arena_row = rows.block(known.size, -np.inf, 0.0)
        self.arena_of = np.full(self.part.size, -1)
        self.arena_of[counted] = np.searchsorted(known, keys[counted])
        mine = np.flatnonzero(self.arena_of[self.pair] >= 0)
        rows.add(self.arena_row + self.arena_of[self.pair[mine]], self.point_at + mine, 1.0)
        at = self.arena_row + np.searchsorted(known, of_options)
        rows.add(at, self.option_at + replicated[:, None], self.sizes)
        held = self.arena_at + (known % groups) * f.arenas + known // groups % f.arenas
        rows.add(self.arena_row + np.arange(known.size), held, -1.0)
        first = rows.block(groups, -np.inf, 0.0)
        every = np.arange(groups * f.arenas)
        rows.add(first + every // f.arenas, self.arena_at + every, 1.0)
        rows.add(first + np.arange(groups), self.launch_at + np.arange(groups), -1.0)

    def _add_decided(self) -> None:
        """Groups serve what their node says."""
        node, rows = self.node, self.rows
        self.decided_of = np.full(self.part.size, -1)
        for table in node.layouts:
            for number, group in enumerate(node.groups):
                if group.widths[table]:
                    row = rows.block(1, group.gpus, group.gpus)
                    self.decided_of[(self.table == table) & (self.group == number)] = row
        mine = np.flatnonzero(self.decided_of[self.pair] >= 0)
        rows.add(self.decided_of[self.pair[mine]], self.point_at + mine, 1.0)

    def _add_loads(self) -> None:
        """Seconds of each phase and bytes of a group, with replicas, and launches in phases."""
        f, rows, groups = self.formulation, self.rows, self.sizes.size
        number, options = np.arange(groups), self.node.options
        hbm = np.array([group.hbm for group in self.node.groups])
        self.load_row = rows.block(groups, -np.inf, self.sizes * hbm)
        rows.block(f.phases * groups, -np.inf, 0.0)
        # Nothing waits for a phase that is in no chain.
        for row in (0, *(1 + np.flatnonzero(f.members.any(axis=0))).tolist()):
            first = self.load_row + row * groups
            some = np.flatnonzero(self.points[row])
            of_group = first + self.group[self.pair[some]]
            rows.add(of_group, self.point_at + some, self.points[row, some])
            some = np.flatnonzero(f.replicas[options, row])
            replicas = self.sizes * f.replicas[options[some], row, None]
            rows.add(first + number, self.option_at + some[:, None], replicas)
            if not row:
                # With few points there may be no way to fit, and yet one with all.
                rows.add(first + number, self.lack_at + number, -1.0)
            else:
                rows.add(first + number, self.phase_at + row - 1, -self.sizes)
                if f.launches[row - 1]:
                    rows.add(first + number, self.launch_at + number, f.launches[row - 1])

    def _add_singles(self) -> None:
        """No phase is shorter than its longest shard with all replicas.

        Shards of the same number in their options share their rows.
        """
        f, rows, options = self.formulation, self.rows, self.node.options
        most = int(f.number_of.max(initial=0)) + 1
        keys = f.part_table[self.parts] * most + f.number_of[self.parts]
        long = f.is_long[self.parts]
        known = np.unique(keys[long])
        self.single_of = np.full(self.part.size, -1)
        mine = long[self.part_at]
        self.single_of[mine] = np.searchsorted(known, keys[self.part_at[mine]])
        of_point = self.single_of[self.pair]
        self.single_rows: dict[int, int] = {}
        every = np.arange(known.size)
        for phase in np.flatnonzero(f.members.any(axis=0)).tolist():
            seconds = self.points[1 + phase] / f.times[self.part[self.pair]]
            some = np.flatnonzero((seconds > 0) & (of_point >= 0))
            if not some.size:
                continue
            row = self.single_rows[phase] = rows.block(known.size, -np.inf, -f.launches[phase])
            rows.add(row + of_point[some], self.point_at + some, seconds[some])
            some = np.flatnonzero(f.replicas[options, 1 + phase])
            replicas = f.replicas[options[some], 1 + phase, None]
            rows.add(row + every, self.option_at + some[:, None], replicas)
            rows.add(row + every, self.phase_at + phase, -1.0)

    def solve(self, time_limit_s: float) -> Relaxed:
        """The relaxation, of placements that are as fast as the limit."""
        from ortools.linear_solver.python import model_builder_helper as linear

        f, groups = self.formulation, self.sizes.size
        matrix = self.rows.matrix(self.columns)
        low, high = self.rows.limits
        least, most = np.zeros(self.columns), np.full(self.columns, np.inf)
        most[self.arena_at : self.launch_at] = np.repeat(self.sizes, f.arenas)
        least[self.launch_at : self.lack_at] = self.sizes
        most[self.launch_at : self.lack_at] = self.sizes * f.arenas
        most[self.option_at : self.point_at] = 1.0
        aim = np.eye(1, self.columns)[0]
        aim[self.lack_at : self.option_at] = _LACKING
        model = linear.ModelBuilderHelper()
        model.fill_model_from_sparse_data(least, most, aim, low, high, matrix)
        solver = linear.ModelSolverHelper("GLOP")
        solver.set_time_limit_in_seconds(max(0.01, time_limit_s))
        solver.solve(model)
        if solver.status() != linear.SolveStatus.OPTIMAL:
            return Relaxed.unknown(self.node)
        values, prices = np.array(solver.variable_values()), np.array(solver.dual_values())
        # Of no interest are placements that are slower, or do not fit.
        most[: self.arena_at] = self.most
        most[self.lack_at : self.option_at] = 0.0
        bound, extra = self._bound(prices, aim - matrix.T @ prices, low, high, least, most)
        options, served = self.node.options, np.zeros((f.sizes.size, groups))
        np.add.at(served, (self.part[self.pair], self.group[self.pair]), values[self.point_at :])
        return Relaxed(
            bound,
            float(values[0]),
            options[extra <= self.most - bound],
            values[self.option_at : self.point_at],
            served,
        )

    def _bound(
        self, prices: Float, due: Float, low: Float, high: Float, least: Float, most: Float
    ) -> tuple[float, Float]:
        """The bound at any prices of rows, and what each option costs beyond its table's cheapest.

        Parameters
        ----------
        prices : float64, shape (rows,)
        due : float64, shape (columns,)
            What is left of a column's cost beside its prices.
        low, high : float64, shape (rows,)
        least, most : float64, shape (columns,)
        """
        f, options, groups = self.formulation, self.node.options, self.sizes.size
        # A price of a limit that is not there is a rounding error: nothing is lost by leaving it.
        wrong = (prices > 0) & np.isinf(low) | (prices < 0) & np.isinf(high)
        if wrong.any():
            due = due + self.rows.matrix(self.columns).T @ np.where(wrong, prices, 0.0)
            prices = np.where(wrong, 0.0, prices)
        paid = prices != 0
        bound = float((prices * np.where(prices > 0, low, high))[paid].sum())
        head = due[: self.option_at]
        ends = np.where(head < 0, most[: self.option_at], least[: self.option_at])
        bound += float((head * ends)[head != 0].sum())
        cheapest = self._cheapest(prices, groups)
        costs = due[self.option_at : self.point_at].copy()
        of_part = self.at_option[f.option_of[self.parts]]
        np.add.at(costs, of_part, cheapest[self.parts] * f.times[self.parts])
        of_table = np.full(f.instance.tables, np.inf)
        np.minimum.at(of_table, f.table_of[options], costs)
        return bound + float(of_table.sum()), costs - of_table[f.table_of[options]]

    def _cheapest(self, prices: Float, groups: int) -> Float:
        """What a shard of each part costs at least at prices of rows: of all points and groups."""
        f = self.formulation
        fixed = -prices[self.serve_row + self.part_at] - prices[self.apart_row + self.apart_of]
        for of, first in ((self.arena_of, self.arena_row), (self.decided_of, 0)):
            fixed -= np.where(of >= 0, prices[np.maximum(first + of, 0)], 0.0)
        weights = np.empty((1 + f.phases, self.part.size))
        for row in range(1 + f.phases):
            weights[row] = -prices[self.load_row + row * groups + self.group]
        for phase, row in self.single_rows.items():
            mine = np.flatnonzero(self.single_of >= 0)
            weights[1 + phase, mine] -= (
                prices[row + self.single_of[mine]] / f.times[self.part[mine]]
            )
        cheapest: Float = np.full(f.sizes.size, np.inf)
        for group in range(groups):
            mine = np.flatnonzero(self.group == group)
            of_parts = np.zeros((1 + f.phases, f.sizes.size))
            of_parts[:, self.part[mine]] = weights[:, mine]
            extra = np.full(f.sizes.size, np.inf)
            extra[self.part[mine]] = fixed[mine]
            costs = np.zeros(f.points.shape[1])
            for row in np.flatnonzero(of_parts.any(axis=1)).tolist():
                costs += np.repeat(of_parts[row], f.sizes) * f.points[row]
            cheapest = np.minimum(cheapest, f.choose(costs) + extra)
        return cheapest


def relaxed(
    formulation: Formulation, node: Node, most: float, time_limit_s: float, rounds: int
) -> Relaxed:
    """A node's relaxation, after so many programs at most, each with more points."""
    best: Relaxed | None = None
    deadline = time.monotonic() + time_limit_s
    for _ in range(rounds):
        found = GroupProgram(formulation, node, most).solve(deadline - time.monotonic())
        if not found.is_solved:
            return best or found
        if best is None or found.bound >= best.bound:
            best = found
        if found.bound >= most or found.value - found.bound <= _ENOUGH * found.value:
            break
    assert best is not None, "there is at least one round"
    return best
