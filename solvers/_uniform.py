"""Packings in which all pieces of a table have the same share of their rows in HBM.

For cost models with `uniform_splits`. Each GPU by itself would choose another share; tables
in several pieces get one after the other a common one, the best of a few between the least
and the most that their GPUs chose, and the GPUs are filled around it.
"""

from dataclasses import replace

import numpy as np

from solvers._fill import Filling, Float, Ladder, costs_of
from solvers._instance import Piece
from solvers._packing import Packing

_SHARES = 9


def uniform(packing: Packing) -> Packing | None:
    """The packing with common shares; None if no common share fits."""
    tables: dict[int, list[tuple[int, Piece, int]]] = {}
    for placed in packing.placements():
        tables.setdefault(placed.piece.table, []).append(
            (placed.gpu, placed.piece, placed.hot_rows)
        )
    fixed: dict[tuple[int, Piece], Float] = {}
    fillings = packing.fillings
    for pieces in tables.values():
        if len(pieces) < 2:
            continue
        best: tuple[float, dict[tuple[int, Piece], Float], list[Filling]] | None = None
        for share in _shares(packing, pieces):
            trial = fixed | _points(packing, pieces, share)
            filled = _filled(packing, trial)
            if filled is None:
                continue
            slowest = max(filling.gpu_s for filling in filled)
            if best is None or slowest < best[0]:
                best = slowest, trial, filled
        if best is None:
            return None
        _, fixed, fillings = best
    return replace(packing, fillings=fillings)


def _shares(packing: Packing, pieces: list[tuple[int, Piece, int]]) -> list[float]:
    """Shares to try: points of the largest piece's curve, none and all among them."""
    curves = [packing.instance.curve(piece, gpu) for gpu, piece, _ in pieces]
    rows = [int(curve.hot_rows[-1]) for curve in curves]
    chosen = [hot / n for (_, _, hot), n in zip(pieces, rows, strict=True) if n]
    points = curves[rows.index(max(rows))].hot_rows / max(1, *rows)
    inside = points[(points >= min(chosen, default=0.0)) & (points <= max(chosen, default=0.0))]
    at = np.unique(np.linspace(0, inside.size - 1, min(_SHARES, inside.size)).round().astype(int))
    below = points[points < min(chosen, default=0.0)][-2:]
    return sorted({0.0, 1.0, *below.tolist(), *inside[at].tolist()})


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
