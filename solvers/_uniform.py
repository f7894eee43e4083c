"""Packings in which all pieces of a table have the same share of their rows in HBM.

For cost models with `uniform_splits`. Each GPU by itself would choose another share; tables
in several pieces get one after the other a common one, the best of a few between the least
and the most that their GPUs chose, and the GPUs are filled around it. Tables in one piece then
move between GPUs as the new fillings suit them.
"""

from dataclasses import replace

import numpy as np

from solvers._clock import Clock
from solvers._fill import Filling, Float, Ladder, costs_of
from solvers._instance import Piece
from solvers._moves import improve
from solvers._packing import Packing

_SHARES = 9
_PASSES = 4
"""Rounds over the tables: in later ones, each share moves a little around the others'."""


def settled(packing: Packing | None, clock: Clock) -> Packing | None:
    """A packing with common shares, fixed, and what can move moved; the same if it may be.

    None if no common shares fit.
    """
    if packing is None or not packing.instance.cost_model.uniform_splits:
        return packing
    common = uniform(packing)
    if common is None:
        return None
    several = {piece.table for mine in packing.pieces for piece in mine if piece.cut.pieces > 1}
    pairs: list[tuple[Piece, int]] = []
    for placed in common.placements():
        piece, gpu = placed.piece, placed.gpu
        if piece.table in several:
            rows = int(packing.instance.curve(piece, gpu).hot_rows[-1])
            share = placed.hot_rows / rows if rows else 0.0
            if piece.offset:  # Equal but for rounding: the first piece's is the table's.
                share = next(p.cut.share for p, _ in pairs if p.table == piece.table)
            piece = piece._replace(cut=piece.cut._replace(share=share))
        pairs.append((piece, gpu))
    fixed = Packing.of(packing.instance, pairs, packing.replicas)
    if fixed is None:
        return common
    improve(fixed, clock, recuts=False)
    return fixed


def uniform(packing: Packing) -> Packing | None:
    """The packing with common shares; None if no common share fits."""
    tables: dict[int, list[tuple[int, Piece, int]]] = {}
    for placed in packing.placements():
        tables.setdefault(placed.piece.table, []).append(
            (placed.gpu, placed.piece, placed.hot_rows)
        )
    cut = {table: pieces for table, pieces in tables.items() if len(pieces) > 1}
    share_of: dict[int, float] = {}
    fillings = packing.fillings
    for _ in range(_PASSES):
        for table, pieces in cut.items():
            fixed: dict[tuple[int, Piece], Float] = {}
            for other, share in share_of.items():
                if other != table:
                    fixed |= _points(packing, cut[other], share)
            best: tuple[float, float, list[Filling]] | None = None
            for share in _shares(packing, pieces, share_of.get(table)):
                filled = _filled(packing, fixed | _points(packing, pieces, share))
                if filled is None:
                    continue
                slowest = max(filling.gpu_s for filling in filled)
                if best is None or slowest < best[0]:
                    best = slowest, share, filled
            if best is None:
                return None
            share_of[table], fillings = best[1:]
    return replace(packing, fillings=fillings)


def _shares(
    packing: Packing, pieces: list[tuple[int, Piece, int]], current: float | None
) -> list[float]:
    """Shares to try: points of the largest piece's curve, none and all among them.

    At first between the least and the most that the GPUs chose, then around the current one.
    """
    curves = [packing.instance.curve(piece, gpu) for gpu, piece, _ in pieces]
    rows = [int(curve.hot_rows[-1]) for curve in curves]
    points = curves[rows.index(max(rows))].hot_rows / max(1, *rows)
    if current is not None:
        at = int(np.abs(points - current).argmin())
        near = points[max(0, at - _SHARES // 2) : at + 1 + _SHARES // 2]
        return sorted({0.0, 1.0, current, *near.tolist()})
    chosen = [hot / n for (_, _, hot), n in zip(pieces, rows, strict=True) if n]
    low, high = min(chosen, default=0.0), max(chosen, default=0.0)
    inside = points[(points >= low) & (points <= high)]
    picked = np.unique(
        np.linspace(0, inside.size - 1, min(_SHARES, inside.size)).round().astype(int)
    )
    below = points[points < low][-2:]
    return sorted({0.0, 1.0, *below.tolist(), *inside[picked].tolist()})


def _points(
    packing: Packing, pieces: list[tuple[int, Piece, int]], share: float
) -> dict[tuple[int, Piece], Float]:
    """Costs of the pieces with so large a share of their rows in HBM."""
    points = {}
    for gpu, piece, _ in pieces:
        curve = packing.instance.curve(piece, gpu)
        costs = costs_of(curve)
        hot = round(share * int(curve.hot_rows[-1]))
        points[gpu, piece] = np.array([np.interp(hot, curve.hot_rows, row) for row in costs])
    return points


def _filled(packing: Packing, fixed: dict[tuple[int, Piece], Float]) -> list[Filling] | None:
    """The GPUs filled around pieces whose rows in HBM are given; None if they do not fit."""
    instance = packing.instance
    fillings = []
    for gpu, pieces in enumerate(packing.pieces):
        filling = packing.fillings[gpu]
        if any((gpu, piece) in fixed for piece in pieces):
            ladders = {
                piece: Ladder(np.repeat(costs[:, None], instance.prices.size, axis=1))
                for piece in pieces
                if (costs := fixed.get((gpu, piece))) is not None
            }
            filled = packing.filling(gpu, pieces, given=ladders)
            if filled is None:
                return None
            filling = filled
        fillings.append(filling)
    return fillings
