"""Iterated local search over packings: shake a few GPUs, improve, keep what is not worse."""

import random
import time

from solvers._instance import Piece
from solvers._packing import Packing

_NORM = 8
_SHAKEN_GPUS = 3
_PATIENCE = 400
"""Shakes without a gain after which the search starts again from the best packing."""

_KICK = 6
"""Shakes away from the best packing at which it starts again."""

_RESTARTS = 8
"""Times that it does so in a row before it ends: small problems need no more."""


def iterated_search(
    start: Packing, *, target_s: float, seed: int, deadline: float, shakes: int
) -> Packing:
    """The best packing found within `deadline`, `shakes` shakes, or at `target_s` seconds.

    Ends before that when it has started again a few times without a gain.

    Each shake takes the slowest GPU and others at random, cuts one of their tables anew,
    deals their pieces out again in a random order, and improves the result (Lourenço et
    al. 2003, doi:10.1007/0-306-48056-5_11).
    """
    rng = random.Random(seed)
    best = current = start
    idle = restarts = 0
    for _ in range(shakes):
        if time.monotonic() > deadline or best.step_time_s <= target_s:
            break
        trial = _shaken(current, rng)
        idle += 1
        if trial is None:
            continue
        trial.improve(deadline)
        if _load_key(trial) <= _load_key(current):
            current = trial
        if trial.step_time_s < best.step_time_s * (1 - 1e-9):
            best, idle, restarts = trial, 0, 0
        if idle > _PATIENCE:
            current, idle, restarts = _kicked(best, rng), 0, restarts + 1
            if restarts > _RESTARTS:
                break
    return best


def _kicked(packing: Packing, rng: random.Random) -> Packing:
    """A packing some shakes away, good or bad: the way out of a valley."""
    for _ in range(_KICK):
        packing = _shaken(packing, rng) or packing
    return packing


def _load_key(packing: Packing) -> float:
    """The GPUs' times as one number: nearly the largest, but lower with fewer slow GPUs.

    Their p-norm: the maximum alone would not tell a packing with one slow GPU from one with
    several, and see no way out of a tie.
    """
    slowest = packing.step_time_s
    powers = sum((filling.gpu_s / slowest) ** _NORM for filling in packing.fillings)
    return slowest * float(powers ** (1 / _NORM))


def _shaken(packing: Packing, rng: random.Random) -> Packing | None:
    instance = packing.instance
    times = [filling.gpu_s for filling in packing.fillings]
    slow = times.index(max(times))
    others = [gpu for gpu in range(instance.gpus) if gpu != slow]
    touched = [slow, *rng.sample(others, min(len(others), rng.randint(1, _SHAKEN_GPUS - 1)))]
    pieces = [piece for gpu in touched for piece in packing.pieces[gpu]]
    if not pieces:
        return None
    if rng.random() < 0.5:
        pieces, touched = _recut(packing, pieces, touched, rng)
    result = [list(mine) for mine in packing.pieces]
    for gpu in touched:
        result[gpu] = []
    noise = {piece: _time(packing, piece) * rng.uniform(0.6, 1.0) for piece in pieces}
    for piece in sorted(pieces, key=lambda p: (-noise[p], p)):
        # Where would the GPU that takes it be done first, its HBM filled anew?
        after = {}
        for gpu in touched:
            if all(p.table != piece.table for p in result[gpu]):
                filling = packing.filling(gpu, [*result[gpu], piece])
                if filling is not None:
                    after[gpu] = filling.gpu_s
        if not after:
            return None
        gpu = min(after, key=lambda g: (after[g], g))
        result[gpu].append(piece)
    return packing.rearranged(result, touched)


def _recut(
    packing: Packing, pieces: list[Piece], touched: list[int], rng: random.Random
) -> tuple[list[Piece], list[int]]:
    """Cut one table anew; GPUs that hold its other pieces are shaken too."""
    instance = packing.instance
    table = rng.choice(pieces).table
    holders = [
        gpu for gpu, mine in enumerate(packing.pieces) if any(p.table == table for p in mine)
    ]
    cuts = [cut for cut in instance.cuts_of(table) if cut.pieces <= min(4, instance.gpus)]
    everyone = sorted({*touched, *holders})
    cut = rng.choice(cuts) if cuts else None
    if cut is None or cut.pieces > len(everyone):
        return pieces, touched
    kept = [p for gpu in everyone for p in packing.pieces[gpu] if p.table != table]
    return kept + instance.pieces(table, cut), everyone


def _time(packing: Packing, piece: Piece) -> float:
    """GPU time of a piece with all its rows in HBM."""
    return float(packing.instance.ladder(piece, packing.instance.kinds[0]).values[1, -1])
