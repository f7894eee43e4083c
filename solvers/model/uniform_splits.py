"""Assignments in which all shards of a table have the same share of their rows in HBM.

For cost models with `uniform_splits`. Each GPU by itself would choose another share; tables
in several shards get one after the other a common one, the best of a few between the least
and the most that their GPUs chose, and the GPUs are filled around it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from solvers.model.assignment import Assignment
from solvers.model.instance import Placement, TableShard
from solvers.model.knapsack import Float, Knapsack, costs_of

_SHARES = 9
_PASSES = 4
"""Rounds over the tables: in later ones, each share moves a little around the others'."""

_Points = dict[tuple[int, TableShard], Float]
"""Costs of shards on GPUs whose share of rows in HBM is fixed."""


def common_shares(assignment: Assignment) -> Assignment | None:
    """Return the assignment with common shares; None if no common share fits."""
    placed_of: dict[int, list[Placement]] = {}
    for placed in assignment.placements():
        placed_of.setdefault(placed.shard.table, []).append(placed)
    sharded = {table: placed for table, placed in placed_of.items() if len(placed) > 1}
    share_of: dict[int, float] = {}
    knapsacks = assignment.knapsacks
    for _ in range(_PASSES):
        for table, shards in sharded.items():
            others: _Points = {}
            for other, share in share_of.items():
                if other != table:
                    others |= _points(assignment, sharded[other], share)
            best: tuple[float, float, list[Knapsack]] | None = None
            for share in _shares(assignment, shards, share_of.get(table)):
                filled = _filled(assignment, others | _points(assignment, shards, share))
                if filled is None:
                    continue
                slowest = max(knapsack.gpu_s for knapsack in filled)
                if best is None or slowest < best[0]:
                    best = slowest, share, filled
            if best is None:
                return None
            share_of[table], knapsacks = best[1:]
    return replace(assignment, knapsacks=knapsacks)


def fixed_shares(common: Assignment) -> Assignment | None:
    """Return the assignment with its common shares fixed in the options, so that shards can move.

    None if it does not fit, for rounding.
    """
    pairs: list[tuple[TableShard, int]] = []
    share_of: dict[int, float] = {}
    for placed in common.placements():
        shard = placed.shard
        if shard.option.shard_count > 1:
            rows = int(common.instance.curve(shard, placed.gpu).hot_rows[-1])
            share = placed.hot_rows / rows if rows else 0.0
            first = share_of.setdefault(shard.table, share)
            # Shares of row slices are equal but for rounding: the first one's is the table's.
            share = first if shard.row_slice else share
            shard = shard._replace(option=shard.option._replace(share=share))
        pairs.append((shard, placed.gpu))
    return Assignment.of(common.instance, pairs, common.replicas)


def _shares(
    assignment: Assignment, shards: Sequence[Placement], current: float | None
) -> list[float]:
    """Shares to try: points of the largest shard's curve, none and all among them.

    At first between the least and the most that the GPUs chose, then around the current one.
    """
    curves = [assignment.instance.curve(placed.shard, placed.gpu) for placed in shards]
    rows = [int(curve.hot_rows[-1]) for curve in curves]
    points = curves[rows.index(max(rows))].hot_rows / max(1, *rows)
    if current is not None:
        at = int(np.abs(points - current).argmin())
        near = points[max(0, at - _SHARES // 2) : at + 1 + _SHARES // 2]
        return sorted({0.0, 1.0, current, *near.tolist()})
    chosen = [placed.hot_rows / n for placed, n in zip(shards, rows, strict=True) if n]
    low, high = min(chosen, default=0.0), max(chosen, default=0.0)
    inside = points[(points >= low) & (points <= high)]
    picked = np.unique(
        np.linspace(0, inside.size - 1, min(_SHARES, inside.size)).round().astype(int)
    )
    below = points[points < low][-2:]
    return sorted({0.0, 1.0, *below.tolist(), *inside[picked].tolist()})


def _points(assignment: Assignment, shards: Sequence[Placement], share: float) -> _Points:
    """Return costs of the shards with so large a share of their rows in HBM."""
    points = {}
    for placed in shards:
        curve = assignment.instance.curve(placed.shard, placed.gpu)
        hot = round(share * int(curve.hot_rows[-1]))
        points[placed.gpu, placed.shard] = np.array(
            [np.interp(hot, curve.hot_rows, row) for row in costs_of(curve)]
        )
    return points


def _filled(assignment: Assignment, points: _Points) -> list[Knapsack] | None:
    """Return the GPUs filled around shards whose rows in HBM are fixed; None if they do not fit."""
    prices = assignment.instance.prices.size
    knapsacks = list(assignment.knapsacks)
    for gpu, shards in enumerate(assignment.shards):
        fixed = {
            shard: np.repeat(points[gpu, shard][:, None], prices, axis=1)
            for shard in shards
            if (gpu, shard) in points
        }
        if fixed:
            knapsack = assignment.knapsack(gpu, shards, fixed=fixed)
            if knapsack is None:
                return None
            knapsacks[gpu] = knapsack
    return knapsacks
