"""Assignments in which all shards of a table have the same share of their rows in HBM.

For cost models with `uniform_splits`. Each GPU by itself would choose another share; tables
in several shards get one after the other a common one, the best of a few between the least
and the most that their GPUs chose, and the GPUs are filled around it. Tables in one shard then
move between GPUs as the new knapsacks suit them.
"""

from dataclasses import replace

import numpy as np

from solvers.model.assignment import Assignment
from solvers.model.clock import Clock
from solvers.model.instance import TableShard
from solvers.model.knapsack import Float, Knapsack, costs_of
from solvers.search.moves import improve

_SHARES = 9
_PASSES = 4
"""Rounds over the tables: in later ones, each share moves a little around the others'."""


def with_common_shares(assignment: Assignment | None, clock: Clock) -> Assignment | None:
    """An assignment with common shares, fixed, and what can move moved; the same if it may be.

    None if no common shares fit.
    """
    if assignment is None or not assignment.instance.cost_model.uniform_splits:
        return assignment
    common = common_shares(assignment)
    if common is None:
        return None
    several = {
        shard.table for mine in assignment.shards for shard in mine if shard.option.shard_count > 1
    }
    pairs: list[tuple[TableShard, int]] = []
    for placed in common.placements():
        shard, gpu = placed.shard, placed.gpu
        if shard.table in several:
            rows = int(assignment.instance.curve(shard, gpu).hot_rows[-1])
            share = placed.hot_rows / rows if rows else 0.0
            if shard.row_slice:  # Equal but for rounding: the first shard's is the table's.
                share = next(p.option.share for p, _ in pairs if p.table == shard.table)
            shard = shard._replace(option=shard.option._replace(share=share))
        pairs.append((shard, gpu))
    fixed = Assignment.of(assignment.instance, pairs, assignment.replicas)
    if fixed is None:
        return common
    improve(fixed, clock, reshard_tables=False)
    return fixed


def common_shares(assignment: Assignment) -> Assignment | None:
    """The assignment with common shares; None if no common share fits."""
    tables: dict[int, list[tuple[int, TableShard, int]]] = {}
    for placed in assignment.placements():
        tables.setdefault(placed.shard.table, []).append(
            (placed.gpu, placed.shard, placed.hot_rows)
        )
    option = {table: shards for table, shards in tables.items() if len(shards) > 1}
    share_of: dict[int, float] = {}
    knapsacks = assignment.knapsacks
    for _ in range(_PASSES):
        for table, shards in option.items():
            fixed: dict[tuple[int, TableShard], Float] = {}
            for other, share in share_of.items():
                if other != table:
                    fixed |= _points(assignment, option[other], share)
            best: tuple[float, float, list[Knapsack]] | None = None
            for share in _shares(assignment, shards, share_of.get(table)):
                filled = _filled(assignment, fixed | _points(assignment, shards, share))
                if filled is None:
                    continue
                slowest = max(knapsack.gpu_s for knapsack in filled)
                if best is None or slowest < best[0]:
                    best = slowest, share, filled
            if best is None:
                return None
            share_of[table], knapsacks = best[1:]
    return replace(assignment, knapsacks=knapsacks)


def _shares(
    assignment: Assignment, shards: list[tuple[int, TableShard, int]], current: float | None
) -> list[float]:
    """Shares to try: points of the largest shard's curve, none and all among them.

    At first between the least and the most that the GPUs chose, then around the current one.
    """
    curves = [assignment.instance.curve(shard, gpu) for gpu, shard, _ in shards]
    rows = [int(curve.hot_rows[-1]) for curve in curves]
    points = curves[rows.index(max(rows))].hot_rows / max(1, *rows)
    if current is not None:
        at = int(np.abs(points - current).argmin())
        near = points[max(0, at - _SHARES // 2) : at + 1 + _SHARES // 2]
        return sorted({0.0, 1.0, current, *near.tolist()})
    chosen = [hot / n for (_, _, hot), n in zip(shards, rows, strict=True) if n]
    low, high = min(chosen, default=0.0), max(chosen, default=0.0)
    inside = points[(points >= low) & (points <= high)]
    picked = np.unique(
        np.linspace(0, inside.size - 1, min(_SHARES, inside.size)).round().astype(int)
    )
    below = points[points < low][-2:]
    return sorted({0.0, 1.0, *below.tolist(), *inside[picked].tolist()})


def _points(
    assignment: Assignment, shards: list[tuple[int, TableShard, int]], share: float
) -> dict[tuple[int, TableShard], Float]:
    """Costs of the shards with so large a share of their rows in HBM."""
    points = {}
    for gpu, shard, _ in shards:
        curve = assignment.instance.curve(shard, gpu)
        costs = costs_of(curve)
        hot = round(share * int(curve.hot_rows[-1]))
        points[gpu, shard] = np.array([np.interp(hot, curve.hot_rows, row) for row in costs])
    return points


def _filled(
    assignment: Assignment, fixed: dict[tuple[int, TableShard], Float]
) -> list[Knapsack] | None:
    """The GPUs filled around shards whose rows in HBM are given; None if they do not fit."""
    instance = assignment.instance
    knapsacks = []
    for gpu, shards in enumerate(assignment.shards):
        knapsack = assignment.knapsacks[gpu]
        if any((gpu, shard) in fixed for shard in shards):
            priced = {
                shard: np.repeat(costs[:, None], instance.prices.size, axis=1)
                for shard in shards
                if (costs := fixed.get((gpu, shard))) is not None
            }
            filled = assignment.knapsack(gpu, shards, fixed=priced)
            if filled is None:
                return None
            knapsack = filled
        knapsacks.append(knapsack)
    return knapsacks
