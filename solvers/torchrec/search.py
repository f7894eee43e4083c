"""A search over the options that TorchRec's enumerator made of a model."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from solvers.torchrec.bound import Pool, lower_limit_s, prices_of
from solvers.torchrec.candidates import Float, Group
from solvers.torchrec.descent import bundle_places, descend
from solvers.torchrec.placement import Place, Space, State, place_of

_GOOD_START = 5
"""No other start is made from a plan whose gap is within so many times the one asked for."""

_ROUNDS_OF_TABLES = 4000
"""Rounds of patience, divided by tables."""

_ROUNDS_APART = 10
"""After so many rounds the search goes on from the best plan."""

_MOST_ROUNDS = 200
"""The most that this adds."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to search.

    Attributes
    ----------
    time_limit_s : float
    gap : float
        Relative gap to the bound at which the search ends.
    seed : int
    max_steps : int or None
        Rounds of taking tables away and placing them anew.
    shares : tuple of float
        Of the memory, for which the starting plans are made.
    least_gain : float
        Relative gain that `patience` rounds must have, or the search ends.
    patience : int
        Such rounds: so many, and more where tables are few.
    """

    time_limit_s: float = 20.0
    gap: float = 1e-3
    seed: int = 0
    max_steps: int | None = None
    shares: tuple[float, ...] = (1.0, 0.98, 0.94, 0.85, 0.6, 0.3)
    least_gain: float = 5e-4
    patience: int = 20


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The best state, if there is one, the limit that none is below, rounds, and why it ended."""

    state: State | None
    limit_s: float
    steps: int
    ended_by: str


def search(
    tables: list[list[Group]],
    bundles: Sequence[tuple[int, ...]],
    memory: Float,
    local_ranks: int,
    effort: Effort,
    starts: Sequence[dict[int, Place]] = (),
) -> Found:
    """Place all tables so that the slowest rank is fast.

    Parameters
    ----------
    tables : list of list of Group
        Candidates of each table, at least one.
    bundles : sequence of tuple of int
        All tables, those together that must be on one host.
    memory : float64, shape (ranks, tiers)
    starts : sequence of dict
        Places of all tables, of plans that are known.
    """
    began = time.perf_counter()

    def over() -> bool:
        return time.perf_counter() - began > effort.time_limit_s

    # Tiers that no candidate uses are not looked at.
    tiers = np.any([(g.tier_bytes > 0).any(axis=(0, 1, 2)) for own in tables for g in own], axis=0)
    tables = [[replace(g, tier_bytes=g.tier_bytes[..., tiers]) for g in own] for own in tables]
    memory = memory[:, tiers]
    pool = Pool.of(tables, memory)
    limit_s, _ = lower_limit_s(pool)
    space = Space(tables, list(bundles), memory, local_ranks, max(limit_s, 1e-12))
    best: State | None = None
    for state in _started(space, pool, limit_s, effort, starts, over):
        descend(state, over)
        state.recount()
        if state.fits and (best is None or state.step_s < best.step_s):
            best = state
        if over() or (best is not None and best.step_s <= limit_s * (1 + _GOOD_START * effort.gap)):
            break
    if best is None:
        return Found(None, limit_s, 0, "time" if over() else "")
    return _improve(best, limit_s, effort, over)


def _started(
    space: Space,
    pool: Pool,
    limit_s: float,
    effort: Effort,
    starts: Sequence[dict[int, Place]],
    over: Callable[[], bool],
) -> Iterator[State]:
    """States to start from: known plans, and plans made at prices of memory."""
    for places in starts:
        known = State(space)
        for table, place in places.items():
            known.put(table, place)
        if known.fits:
            yield known
    for share in effort.shares:
        for longer in (1.0, 1.1, math.inf):
            if over():
                return
            longest_s = limit_s * longer
            state = constructed(space, pool, prices_of(pool, share, longest_s), longest_s)
            if state is not None:
                yield state
                break


def constructed(space: Space, pool: Pool, prices: Float, longest_s: float) -> State | None:
    """Tables placed one by one, each by its cheapest candidate that fits; None if one has none.

    Tables on all ranks come first, then those of hosts, then the rest, the longest first.
    """
    costs = pool.priced(prices, longest_s)
    cheapest = (pool.cheapest(costs) - pool.starts).tolist()
    chosen = [_in_groups(own, number) for own, number in zip(space.tables, cheapest, strict=True)]
    counts = [len(group.sources) for groups in space.tables for group in groups]
    every = iter(np.split(costs, np.cumsum(counts)))
    penalty = [[next(every) for _ in groups] for groups in space.tables]
    memory = np.maximum(1.0, space.memory.mean(axis=0))

    def order(bundle: tuple[int, ...]) -> tuple[int, float]:
        span, size = 0, 0.0
        for table in bundle:
            number, candidate = chosen[table]
            group = space.tables[table][number]
            span = max(span, group.span)
            size += float(group.seconds[candidate].max()) / space.limit_s
            size += float((group.tier_bytes[candidate] / memory).max())
        return -span, -size

    state = State(space)
    for bundle in sorted(space.bundles, key=order):
        if len(bundle) > 1:
            together = bundle_places(state, bundle, {t: penalty[t] for t in bundle})
            if together is None:
                return None
            for table, own in together[1].items():
                state.put(table, own)
            continue
        (table,) = bundle
        place = place_of(space, table, *chosen[table], state.loads)
        if place is None:
            best = state.best_place(table, penalty=penalty[table]) or state.best_place(table)
            if best is None:
                return None
            place = best[1]
        state.put(table, place)
    return state


def _in_groups(groups: Sequence[Group], number: int) -> tuple[int, int]:
    """The group, and the number there, of a candidate of a table."""
    for at, group in enumerate(groups):
        if number < len(group.sources):
            return at, number
        number -= len(group.sources)
    raise IndexError(number)


def _improve(best: State, limit_s: float, effort: Effort, over: Callable[[], bool]) -> Found:
    """Take a few tables away, place them anew and descend, as long as that gains."""
    draw = np.random.default_rng(effort.seed)
    patience = effort.patience + min(_MOST_ROUNDS, _ROUNDS_OF_TABLES // len(best.space.tables))
    current, idle, steps, mark_s = best.copy(), 0, 0, best.step_s
    while True:
        if best.step_s <= limit_s * (1 + effort.gap):
            return Found(best, limit_s, steps, "gap")
        if effort.max_steps is not None and steps >= effort.max_steps:
            return Found(best, limit_s, steps, "steps")
        if over():
            return Found(best, limit_s, steps, "time")
        if idle >= patience:
            return Found(best, limit_s, steps, "")
        steps, idle = steps + 1, idle + 1
        trial = _kicked(current, draw)
        if trial is None:
            continue
        descend(trial, over, patience=1)
        if trial.norm <= current.norm:
            current = trial
        if trial.step_s < best.step_s:
            trial.recount()
            if trial.fits:
                best = trial.copy()
        if best.step_s < mark_s * (1 - effort.least_gain):
            mark_s, idle = best.step_s, 0
        if steps % _ROUNDS_APART == 0:
            current = best.copy()


def _kicked(state: State, draw: np.random.Generator) -> State | None:
    """A copy with a few tables of the slowest rank and of others placed anew, at random."""
    trial = state.copy()
    bundles = state.space.bundles
    bundle_of = {table: bundle for bundle in bundles for table in bundle}
    slowest = int(trial.loads.seconds.argmax())
    near = trial.on_rank(slowest)
    picked = {bundle_of[near[int(draw.integers(len(near)))]]} if near else set()
    for _ in range(int(draw.integers(1, 4))):
        picked.add(bundles[int(draw.integers(len(bundles)))])
    for bundle in picked:
        for table in bundle:
            trial.take(table)
    order = sorted(picked)
    draw.shuffle(order)
    for bundle in order:
        if len(bundle) > 1:
            together = bundle_places(trial, bundle)
            if together is None:
                return None
            for table, place in together[1].items():
                trial.put(table, place)
            continue
        best = trial.best_place(bundle[0])
        if best is None:
            return None
        trial.put(bundle[0], best[1])
    return trial


__all__ = ["Effort", "Found", "search"]
