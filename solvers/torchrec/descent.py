"""Moves that make the slowest rank faster, until none does."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from solvers.torchrec.candidates import Float, Int
from solvers.torchrec.placement import Place, State

_GAIN = 1e-9
"""Relative gain below which a move is none."""

_TRIALS = 12
"""Moves without room that are tried with the memory of their ranks shared out anew."""


def descend(state: State, over: Callable[[], bool], patience: int = 3) -> None:
    """Improve a state until no move does, or time is over.

    The slowest rank is relieved first; where it cannot be, the next ones are tried.
    """
    while not over():
        order = np.argsort(-state.loads.seconds, kind="stable")[:patience].tolist()
        if not any(_relieve(state, rank) for rank in order):
            return


def _relieve(state: State, rank: int) -> bool:
    return refill(state, rank) or _move_units(state, rank) or _place_anew(state, rank)


def _place_anew(state: State, rank: int) -> bool:
    """Place a table of a rank, or its bundle, in another way."""
    bundle_of = {}
    if state.space.bound:
        bundle_of = {t: b for b in state.space.bundles for t in b if len(b) > 1}
    before = state.norm
    share = {t: _seconds_on(state, t, rank) for t in state.on_rank(rank)}
    for table in sorted(share, key=lambda t: -share[t]):
        if table in bundle_of:
            if _place_bundle(state, bundle_of[table], before):
                return True
            continue
        old = state.take(table)
        best = state.best_place(table)
        if best is not None and best[0] < before * (1 - _GAIN):
            state.put(table, best[1])
            return True
        state.put(table, old)
    return False


def _seconds_on(state: State, table: int, rank: int) -> float:
    place = state.places[table]
    group = state.space.tables[table][place.group]
    return sum(
        float(group.seconds[place.candidate, unit, rank - slot * group.span])
        for unit, slot in enumerate(place.slots)
        if 0 <= rank - slot * group.span < group.span
    )


def _place_bundle(state: State, bundle: tuple[int, ...], before: float) -> bool:
    old = {table: state.take(table) for table in bundle}
    best = bundle_places(state, bundle)
    places = old if best is None or best[0] >= before * (1 - _GAIN) else best[1]
    for table, place in places.items():
        state.put(table, place)
    return places is not old


def bundle_places(
    state: State, bundle: tuple[int, ...], penalty: dict[int, list[Float]] | None = None
) -> tuple[float, dict[int, Place]] | None:
    """The best host for tables that must be together, none of them placed, and their places."""
    best: tuple[float, dict[int, Place]] | None = None
    for host in range(state.space.hosts):
        trial = state.copy()
        places = {}
        for table in bundle:
            found = trial.best_place(table, host, None if penalty is None else penalty[table])
            if found is None:
                break
            places[table] = found[1]
            trial.put(table, found[1])
        else:
            if best is None or trial.norm < best[0]:
                best = trial.norm, places
    return best


class _Units(NamedTuple):
    """Shards that may be on any rank: table, unit, rank, time, bytes."""

    tables: Int
    units: Int
    ranks: Int
    seconds: Float
    tier_bytes: Float


def _move_units(state: State, rank: int) -> bool:
    """Move a shard of a rank to another, or exchange it with one from there.

    Where none fits, the memory of both ranks is shared out anew after the most promising moves.
    """
    units = _loose_units(state)
    mine, others = np.flatnonzero(units.ranks == rank), np.flatnonzero(units.ranks != rank)
    if not mine.size:
        return False
    gains, blocked = _gains(state, rank, units, mine, others)

    def shifts(at: int) -> list[tuple[int, int, int]]:
        """Table, unit and new rank of what a move moves."""
        row, column = divmod(at, gains.shape[1])
        one, other = mine[row], column - state.loads.seconds.size
        to_rank = column if other < 0 else int(units.ranks[others[other]])
        moved = [(int(units.tables[one]), int(units.units[one]), to_rank)]
        if other >= 0:
            back = others[other]
            moved.append((int(units.tables[back]), int(units.units[back]), rank))
        return moved

    enough = -_GAIN * state.norm
    free_gains = np.where(blocked, np.inf, gains)
    best = int(free_gains.argmin())
    if free_gains.flat[best] < enough:
        for table, unit, to_rank in shifts(best):
            _relocate(state, table, unit, to_rank)
        return True
    promising = np.argsort(np.where(blocked, gains, np.inf), axis=None)[:_TRIALS]
    return any(
        gains.flat[at] < enough and _moved_and_filled(state, shifts(int(at)), rank)
        for at in promising.tolist()
    )


def _gains(
    state: State, rank: int, units: _Units, mine: Int, others: Int
) -> tuple[Float, npt.NDArray[np.bool_]]:
    """How the norm changes with each move, and whether there is no room for it.

    Shape (mine, ranks + others): to move to each rank, and to change places with each other shard.
    """
    norm, load, free = state.space.norm, state.loads.seconds, state.loads.free
    alone = norm(load[:, None])
    own_s, own_bytes = units.seconds[mine], units.tier_bytes[mine]
    to = norm((load[None] + own_s[:, None])[..., None]) - alone[None]
    to += (norm((load[rank] - own_s)[:, None]) - alone[rank])[:, None]
    to[:, rank] = np.inf
    short = (own_bytes[:, None] > free[None]).any(axis=2)
    homes = units.ranks[others]
    more = units.seconds[others][None] - own_s[:, None]
    here = norm((load[rank] + more)[..., None]) - alone[rank]
    there = norm((load[homes][None] - more)[..., None]) - alone[homes][None]
    bytes_more = units.tier_bytes[others][None] - own_bytes[:, None]
    no_room = (bytes_more > free[rank]).any(axis=2) | (-bytes_more > free[homes][None]).any(axis=2)
    return np.concatenate((to, here + there), axis=1), np.concatenate((short, no_room), axis=1)


def _moved_and_filled(state: State, shifts: list[tuple[int, int, int]], rank: int) -> bool:
    """Make moves that need the memory of their ranks shared out anew; whether they gain."""
    trial = state.copy()
    for table, unit, to_rank in shifts:
        _relocate(trial, table, unit, to_rank)
    for touched in {rank, shifts[0][2]}:
        refill(trial, touched)
    if not trial.fits or not trial.norm < state.norm * (1 - _GAIN):
        return False
    state.become(trial)
    return True


def _loose_units(state: State) -> _Units:
    """The shards of a state that may be on any rank."""
    single = np.flatnonzero(state.rank_of >= 0)
    rows, sizes = [], []
    for table, (number, candidate, slots) in state.places.items():
        if state.rank_of[table] >= 0 or len(slots) == 1 or table in state.space.bound:
            continue
        group = state.space.tables[table][number]
        if group.is_loose:
            for unit, slot in enumerate(slots):
                rows.append((table, unit, slot, group.seconds[candidate, unit, 0]))
                sizes.append(group.tier_bytes[candidate, unit, 0])
    found = _Units(
        single,
        np.zeros(single.size, dtype=np.int64),
        state.rank_of[single],
        state.seconds_of[single],
        state.bytes_of[single],
    )
    if not rows:
        return found
    more = np.array(rows)
    columns = (*more[:, :3].astype(np.int64).T, more[:, 3], np.array(sizes))
    return _Units(*(np.concatenate(both) for both in zip(found, columns, strict=True)))


def _relocate(state: State, table: int, unit: int, rank: int) -> None:
    old = state.take(table)
    slots = list(old.slots)
    slots[unit] = rank
    state.put(table, old._replace(slots=tuple(slots)))


def refill(state: State, rank: int) -> bool:
    """Share the memory of a rank anew among its tables that have no other rank.

    A knapsack with a choice for each table: the price of HBM at which all fit, and then what
    still fits, the best first.
    """
    held = np.flatnonzero(state.rank_of == rank).tolist()
    if not held or state.is_filled[rank]:
        return False
    groups = [state.space.tables[table][state.places[table].group] for table in held]
    seconds = np.concatenate([group.seconds[:, 0, 0] for group in groups])
    sizes = np.concatenate([group.tier_bytes[:, 0, 0] for group in groups])
    counts = np.array([len(group.sources) for group in groups])
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    chosen = starts + np.array([state.places[table].candidate for table in held])
    room = state.loads.free[rank] + sizes[chosen].sum(axis=0)
    found = _knapsack(seconds, sizes, starts, counts, room)
    state.is_filled[rank] = True
    if found is None:
        return False
    short = (state.loads.free[rank] < 0).any()
    if not short and not seconds[found].sum() < seconds[chosen].sum() * (1 - _GAIN):
        return False
    for table, number in zip(held, (found - starts).tolist(), strict=True):
        place = state.places[table]
        if number != place.candidate:
            state.take(table)
            state.put(table, place._replace(candidate=number))
    state.is_filled[rank] = True
    return True


def _knapsack(seconds: Float, sizes: Float, starts: Int, counts: Int, room: Float) -> Int | None:
    """The candidate of each table; None if none was found to fit."""
    found: Int | None = None
    low, high = 1e-18, 1.0
    table_of = np.repeat(np.arange(counts.size), counts)
    for step in range(20):
        price = 0.0 if not step else math.sqrt(low * high)
        costs = seconds + price * sizes[:, 0]
        least = np.repeat(np.minimum.reduceat(costs, starts), counts)
        numbers = np.minimum.reduceat(
            np.where(costs <= least, np.arange(costs.size), costs.size), starts
        )
        if (sizes[numbers].sum(axis=0) <= room).all():
            found, high = numbers, price
            if not step:
                return found
        else:
            low = max(low, price)
    if found is None:
        return None
    left = room - sizes[found].sum(axis=0)
    for _ in range(2 * counts.size):
        saved = seconds[found][table_of] - seconds
        more = sizes - sizes[found][table_of]
        saved[(more > left).any(axis=1)] = 0.0
        best = int(saved.argmax())
        if not saved[best] > 0:
            break
        left = left - more[best]
        found[table_of[best]] = best
    return found
