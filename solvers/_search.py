"""Iterated local search over packings: shake a few GPUs, improve, keep what is not worse."""

import random

import numpy as np

from solvers._clock import Clock
from solvers._fill import GPU_S, least_times
from solvers._instance import Piece
from solvers._moves import improve, with_cut
from solvers._packing import Packing, replicated, total

_NORM = 8
_SHAKEN_GPUS = 3
_PATIENCE = 400
"""Shakes without a gain after which the search starts again from the best packing."""

_KICK = 6
"""Shakes away from the best packing at which it starts again."""

_RESTARTS = 8
"""Times that it does so in a row before it ends: small problems need no more."""

_MOST_PIECES = 4


def iterated_search(start: Packing, *, target_s: float, seed: int, clock: Clock) -> Packing:
    """The best packing found until the clock is spent, or `target_s` seconds are reached.

    Ends before that when it has started again a few times without a gain.

    Each shake takes the slowest GPU and others at random, cuts one of their tables anew,
    deals their pieces out again in a random order, and improves the result (Lourenço et
    al. 2003, doi:10.1007/0-306-48056-5_11).
    """
    rng = random.Random(seed)
    best = current = start
    idle = restarts = 0
    while not clock.spent and best.step_time_s > target_s:
        clock.step()
        trial = _shaken(current, rng)
        idle += 1
        if trial is not None:
            improve(trial, clock, recuts=False)
            if load_key(trial) <= load_key(current):
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


def load_key(packing: Packing) -> float:
    """The GPUs' times as one number: nearly the largest, but lower with fewer slow GPUs.

    Their p-norm: the maximum alone would not tell a packing with one slow GPU from one with
    several, and see no way out of a tie.
    """
    times = packing.times_s
    slowest = packing.step_time_s
    return slowest * float(((times / slowest) ** _NORM).sum() ** (1 / _NORM)) if slowest else 0.0


def _shaken(packing: Packing, rng: random.Random) -> Packing | None:
    instance = packing.instance
    if instance.gpus == 1:
        return None
    slow = int(packing.times_s.argmax())
    others = [gpu for gpu in range(instance.gpus) if gpu != slow]
    touched = [slow, *rng.sample(others, min(len(others), rng.randint(1, _SHAKEN_GPUS - 1)))]
    trial = packing.copy()
    if rng.random() < 0.5:
        recut = _recut(trial, touched, rng)
        if recut is not None:
            trial, touched = recut
    blocks = instance.blocks(piece for gpu in touched for piece in trial.pieces[gpu])
    if not blocks:
        return None
    noise = {block: _time(trial, block) * rng.uniform(0.6, 1.0) for block in blocks}
    base = replicated(instance, trial.replicas)
    sums = np.array([base[instance.kind_of_gpu[gpu]] for gpu in touched])
    hbm_bytes = instance.hbm_bytes[touched]
    dealt: list[list[Piece]] = [[] for _ in touched]
    for block in sorted(blocks, key=lambda b: (-noise[b], b)):
        # Where would the GPU that takes it be done first, its HBM filled anew?
        added = np.array([total(instance, block, gpu) for gpu in touched])
        after = least_times(sums + added, hbm_bytes)
        tables = {piece.table for piece in block}
        for at, gpu in enumerate(touched):
            if any(p.table in tables for p in dealt[at]) or not all(
                instance.may_serve(piece, gpu) for piece in block
            ):
                after[at] = np.inf
        at = int(after.argmin())
        if not np.isfinite(after[at]):
            return None
        dealt[at].extend(block)
        sums[at] += added[at]
    return trial.changed({gpu: sorted(mine) for gpu, mine in zip(touched, dealt, strict=True)})


def _recut(
    packing: Packing, touched: list[int], rng: random.Random
) -> tuple[Packing, list[int]] | None:
    """Cut one table anew; GPUs that hold its other pieces are shaken too."""
    instance = packing.instance
    shaken = [piece.table for gpu in touched for piece in packing.pieces[gpu]]
    tables = [t for t in shaken if not instance.in_group(t)]
    tables += [piece.table for piece in packing.replicas]
    if not tables:
        return None
    table = rng.choice(tables)
    before = packing.holders(table)
    most = min(_MOST_PIECES, instance.gpus)
    cuts = [cut for cut in instance.cuts_of(table) if cut.pieces <= most]
    changed = with_cut(packing, table, rng.choice(cuts)) if cuts else None
    if changed is None:
        return None
    return changed, sorted({*touched, *before, *changed.holders(table)})


def _time(packing: Packing, block: tuple[Piece, ...]) -> float:
    """GPU time of pieces with all their rows in HBM."""
    gpu = packing.instance.kinds[0]
    return sum(float(packing.instance.ladder(p, gpu).values[GPU_S, -1]) for p in block)
