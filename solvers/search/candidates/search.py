"""Search over candidates: remove tables and place them again at prices of memory.

The prices come with a lower limit of the slowest rank's time.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from solvers.model.clock import Clock
from solvers.model.knapsack import Float, Int
from solvers.result import Limit
from solvers.search.candidates.placement import Group, Place, Space, State, ranks_of

_STEPS = 40
"""Halvings of an interval of prices or times."""

_SHARES = (1.0, 0.98, 0.94, 0.85, 0.6, 0.3)
"""Make starting plans at the prices of these shares of the memory."""

_GOOD_START = 5
"""Make no further start if a plan's gap is within this multiple of the gap asked for."""

_PRICES = (0.0, 0.3, 1.0, 3.0)
"""Prices of memory in a round, as multiples of the bound's. At 0 the first tables take it all."""

_SLACK = 0.1
"""Continue from plans that are at most this share slower than the best one."""

_TRIED = 4
"""Place this many tables of a rank in another way, those with the most time there."""

_RESIZED = 2
"""Give a table on several ranks this many smaller and larger shares of their memory."""

_GAIN = 1e-9
"""Least relative gain of a move."""

_ROUNDS_APART = 30
"""Return to the best plan after this many rounds."""

_PATIENCE, _PATIENCE_OF_TABLES, _LEAST_GAIN = 60, 6000, 5e-4
"""Stop if this many rounds, plus the second number divided by the tables, gain less than this
share: rounds of few tables take little time."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Result of a search: best state or None, lower bound, rounds, and why it ended."""

    state: State | None
    limit_s: float
    steps: int
    ended_by: Limit | None


def search(
    tables: list[list[Group]],
    bundles: Sequence[tuple[int, ...]],
    memory: Float,
    local_ranks: int,
    clock: Clock,
) -> Found:
    """Place all tables so that the slowest rank is fast.

    - `tables`: candidates of each table, at least one.
    - `bundles`: all tables; tables of a tuple must be on one host.
    - `memory`, shape (ranks, tiers).
    """
    # Ignore tiers that no candidate uses.
    tiers = np.any([(g.tier_bytes > 0).any(axis=(0, 1, 2)) for own in tables for g in own], axis=0)
    tables = [[replace(g, tier_bytes=g.tier_bytes[..., tiers]) for g in own] for own in tables]
    memory = memory[:, tiers]
    pool = Pool(tables, memory)
    limit_s = lower_limit_s(pool)
    space = Space(tables, list(bundles), memory, local_ranks, max(limit_s, 1e-12))
    best: State | None = None
    for state in _started(space, pool, clock):
        _descend(state, clock)
        _refine(state, clock)
        state = State(space, state.places)  # Recompute to drop the rounding errors of many changes.
        if state.fits and (best is None or state.step_s < best.step_s):
            best = state
        good_s = limit_s * (1 + _GOOD_START * clock.limits.gap)
        if clock.spent or (best is not None and best.step_s <= good_s):
            break
    if best is None:
        return Found(None, limit_s, 0, clock.limit_hit)
    return _improve(best, pool, clock)


def _started(space: Space, pool: "Pool", clock: Clock) -> Iterator[State]:
    """Yield start states, constructed at prices of memory."""
    for share in _SHARES:
        for longer in (1.0, 1.1, math.inf):
            longest_s = space.limit_s * longer
            state = _constructed(space, pool, prices_of(pool, share, longest_s), longest_s)
            if state is not None:
                yield state
                break
            if clock.spent:
                return


def _constructed(space: Space, pool: "Pool", prices: Float, longest_s: float) -> State | None:
    """Place tables one by one by their cheapest candidate that fits; None if a table has none.

    Tables on all ranks come first, then those of whole hosts, then the rest, the longest first.
    """
    costs_of = pool.costs_of(space.tables, prices, longest_s)
    memory = np.maximum(1.0, space.memory.mean(axis=0))

    def order(bundle: tuple[int, ...]) -> tuple[int, float]:
        span, size = 0, 0.0
        for table in bundle:
            number = int(np.argmin([own.min() for own in costs_of[table]]))
            group, candidate = space.tables[table][number], costs_of[table][number].argmin()
            span = max(span, group.span)
            size += float(group.seconds[candidate].max()) / space.limit_s
            size += float((group.tier_bytes[candidate] / memory).max())
        return -span, -size

    state = State(space)
    placed = (
        state.place(bundle, costs_of) or state.place(bundle)
        for bundle in sorted(space.bundles, key=order)
    )
    return state if all(placed) else None


def _improve(best: State, pool: "Pool", clock: Clock) -> Found:
    """Remove a few tables, place them again and descend, while that gains."""
    draw = np.random.default_rng(clock.limits.seed)
    limit_s, tables = best.space.limit_s, best.space.tables
    patience = _PATIENCE + _PATIENCE_OF_TABLES // max(10, len(tables))
    prices = [scale * prices_of(pool, 1.0, limit_s) for scale in _PRICES]
    # Rate by the ranks' times, or by the sum of all work.
    ways: list[dict[str, Any]] = [{"prices": own} for own in prices]
    ways += [{"costs": pool.costs_of(tables, own)} for own in prices]
    current, idle, steps, mark_s = best.copy(), 0, 0, best.step_s
    while True:
        if clock.spent or idle >= patience or best.step_s <= limit_s * (1 + clock.limits.gap):
            return Found(best, limit_s, steps, clock.limit_hit)
        trial = current.copy()
        steps, idle = steps + 1, idle + 1
        clock.step()
        if not _kick(trial, draw, ways[int(draw.integers(len(ways)))]):
            continue
        _descend(trial, clock)
        if trial.norm <= current.norm or trial.step_s <= best.step_s * (1 + _SLACK * draw.random()):
            current = trial
        if trial.step_s < best.step_s:
            _refine(trial, clock)
            exact = State(best.space, trial.places)
            best = exact if exact.fits else best
        if best.step_s < mark_s * (1 - _LEAST_GAIN):
            mark_s, idle = best.step_s, 0
        if steps % _ROUNDS_APART == 0:
            current = best.copy()


def _kick(state: State, draw: np.random.Generator, way: dict[str, Any]) -> bool:
    """Place a few tables of the slowest and other ranks again in random order; whether they fit."""
    bundles = state.space.bundles
    near = [*state.seconds_on(int(state.seconds.argmax()))]
    table = near[int(draw.integers(len(near)))]
    picked = {state.space.bundle_of[table]}
    for _ in range(int(draw.integers(1, 4))):
        picked.add(bundles[int(draw.integers(len(bundles)))])
    order = sorted(picked)
    for bundle in order:
        for table in bundle:
            state.take(table)
    draw.shuffle(order)
    return all(state.place(bundle, **way) for bundle in order)


def _descend(state: State, clock: Clock) -> None:
    """Relieve the slowest rank until nothing gains or time is over."""
    slowest = int(state.seconds.argmax())
    while not clock.spent and (
        _exchange(state, slowest) or _fill(state, slowest) or _place_anew(state, slowest)
    ):
        slowest = int(state.seconds.argmax())


def _fill(state: State, rank: int) -> bool:
    """Choose the candidates of a rank's whole tables again, to use its memory best."""
    trial = state.copy()
    return _filled(trial, rank, state.step_s) and _accepted(state, trial)


def _refine(state: State, clock: Clock) -> None:
    """Resize tables and descend until nothing gains or time is over."""
    while not clock.spent and _resize(state):
        _descend(state, clock)


def _resize(state: State) -> bool:
    """Give a table on several ranks more or less of their memory, and their whole tables the rest.

    A descent changes one rank at a time, so it cannot do this.
    """
    shared = [one for one in state.places.items() if state.group(one[0]).span > 1]
    for table, (number, candidate, slots) in shared:
        group = state.space.tables[table][number]
        order = np.argsort(group.tier_bytes[..., 0].sum(axis=(1, 2)), kind="stable").tolist()
        at = order.index(candidate)
        ranks = np.unique(ranks_of(group, slots))
        ranks = ranks[np.argsort(-state.seconds[ranks])]  # Most trials end at the slowest one.
        for other in order[max(0, at - _RESIZED) : at + _RESIZED + 1]:
            trial = state.copy()
            trial.take(table)
            trial.put(table, Place(number, other, slots))
            fits = all(_filled(trial, rank, state.step_s) for rank in ranks.tolist())
            if fits and _accepted(state, trial):
                return True
    return False


def _accepted(state: State, trial: State) -> bool:
    """Replace a state's places by a trial's if those are better; return whether they are."""
    if not trial.norm < state.norm * (1 - _GAIN):
        return False
    state.become(trial)
    return True


def _filled(state: State, rank: int, step_s: float) -> bool:
    """Choose candidates of a rank's whole tables again; return whether memory and time suffice."""
    mine = [
        (table, place.group)
        for table, place in state.places.items()
        if place.slots == (rank,) and state.group(table).span == 1
    ]
    if not mine:
        return bool((state.free[rank] >= 0).all() and state.seconds[rank] <= step_s)
    for table, _ in mine:
        state.take(table)
    groups = [state.space.tables[table][number] for table, number in mine]
    pool = Pool([[group] for group in groups], state.free[rank][None])
    chosen = pool.cheapest(pool.priced(prices_of(pool)))
    table_of = np.repeat(np.arange(len(mine)), [len(group.sources) for group in groups])
    while True:  # Each table in turn takes memory that is left.
        left = pool.capacity - pool.tier_bytes[chosen].sum(axis=0)
        gains = pool.seconds[chosen][table_of] - pool.seconds
        gains[(pool.tier_bytes - pool.tier_bytes[chosen][table_of] > left).any(axis=1)] = 0.0
        best = int(gains.argmax())
        if not gains[best] > 0:
            break
        chosen[table_of[best]] = best
    for (table, number), candidate in zip(mine, (chosen - pool.starts).tolist(), strict=True):
        state.put(table, Place(number, candidate, (rank,)))
    return bool((left >= 0).all() and state.seconds[rank] <= step_s)


def _place_anew(state: State, rank: int) -> bool:
    """Find a better place for a table of a rank and the tables bundled with it."""
    share, bundle_of = state.seconds_on(rank), state.space.bundle_of
    for table in sorted(share, key=lambda table: -share[table])[:_TRIED]:
        trial = state.copy()
        for own in bundle_of[table]:
            trial.take(own)
        if trial.place(bundle_of[table]) and _accepted(state, trial):
            return True
    return False


def _exchange(state: State, rank: int) -> bool:
    """Move a shard of a rank to another rank, or swap it with a shard there."""
    loose = [
        (table, unit, slot, group.seconds[candidate, unit, 0], group.tier_bytes[candidate, unit, 0])
        for table, (number, candidate, slots) in state.places.items()
        if (group := state.space.tables[table][number]).is_loose
        and state.space.bundle_of[table] == (table,)
        for unit, slot in enumerate(slots)
    ]
    mine, others = ([own for own in loose if (own[2] == rank) == here] for here in (True, False))
    # A swap with an empty slot is a move.
    ranks, nothing = len(state.seconds), np.zeros(state.free.shape[1])
    others += [(-1, 0, other, 0.0, nothing) for other in range(ranks) if other != rank]
    if not mine or not others:
        return False
    norm, load, free = state.space.norm, state.seconds, state.free
    homes = np.array([own[2] for own in others])
    more_s = np.array([own[3] for own in others]) - np.array([own[3] for own in mine])[:, None]
    more = np.array([own[4] for own in others]) - np.array([own[4] for own in mine])[:, None]
    norms = norm((load[rank] + more_s)[..., None]) + norm((load[homes] - more_s)[..., None])
    alone = norm(load[:, None])
    gains = alone[rank] + alone[homes] - norms
    gains[(more > free[rank]).any(axis=2) | (-more > free[homes]).any(axis=2)] = 0.0
    row, column = np.unravel_index(int(gains.argmax()), gains.shape)
    if not gains[row, column] > _GAIN * state.norm:
        return False
    for (table, unit, *_), to_rank in ((mine[row], homes[column]), (others[column], rank)):
        if table >= 0:
            slots = [*state.places[table].slots]
            slots[unit] = int(to_rank)
            state.put(table, state.take(table)._replace(slots=tuple(slots)))
    return True


class Pool:
    """All candidates of all tables in one list, table by table, as if all memory were one.

    - `starts`, int64, shape (tables,): the first candidate of each table, which has at least one.
    - `seconds`, `longest_s`, shape (candidates,): time of all shards together, and of the longest.
    - `tier_bytes`, shape (candidates, tiers).
    - `capacity`, shape (tiers,): of all ranks together.
    """

    def __init__(self, tables: Sequence[Sequence[Group]], memory: Float) -> None:
        counts = [sum(len(group.sources) for group in groups) for groups in tables]
        every = [group for groups in tables for group in groups]
        self.starts: Int = np.concatenate(([0], np.cumsum(counts)[:-1])).astype(np.int64)
        self.seconds: Float = np.concatenate([group.seconds.sum((1, 2)) for group in every])
        self.longest_s: Float = np.concatenate([group.seconds.max((1, 2)) for group in every])
        self.tier_bytes: Float = np.concatenate([g.tier_bytes.sum((1, 2)) for g in every])
        self.capacity, self.ranks = memory.sum(axis=0), len(memory)

    def priced(self, prices: Float, longest_s: float = np.inf) -> Float:
        """Return time plus price of memory per candidate; infinite for those with longer shards."""
        costs = self.seconds + self.tier_bytes @ prices
        return np.where(self.longest_s <= longest_s, costs, np.inf)

    def costs_of(
        self, tables: Sequence[Sequence[Group]], prices: Float, longest_s: float = np.inf
    ) -> list[list[Float]]:
        """Return the same for each candidate of each group of each table."""
        ends = np.cumsum([len(group.sources) for groups in tables for group in groups])
        every = iter(np.split(self.priced(prices, longest_s), ends))
        return [[next(every) for _ in groups] for groups in tables]

    def used(self, costs: Float) -> Float:
        """Return bytes of the cheapest candidate of each table, shape (tiers,)."""
        return np.asarray(self.tier_bytes[self.cheapest(costs)].sum(axis=0))

    def cheapest(self, costs: Float) -> Int:
        """Return the number of the cheapest candidate of each table."""
        least = np.minimum.reduceat(costs, self.starts)
        counts = np.diff(np.append(self.starts, costs.size))
        is_least = costs <= np.repeat(least, counts)
        numbers = np.where(is_least, np.arange(costs.size), costs.size)
        return np.minimum.reduceat(numbers, self.starts)

    def limit_s(self, prices: Float, longest_s: float = np.inf) -> float:
        """Return the Lagrangian bound at prices of memory, of plans with no longer shard."""
        least = np.minimum.reduceat(self.priced(prices, longest_s), self.starts)
        return float((least.sum() - self.capacity @ prices) / self.ranks)


def prices_of(pool: "Pool", share: float = 1.0, longest_s: float = np.inf) -> Float:
    """Return prices at which the cheapest candidates take that share of all memory at most.

    One tier after the other has its price raised until it is no longer short.
    """
    prices = np.zeros(pool.capacity.size)
    capacity = pool.capacity * share
    scale = float(pool.seconds.max(initial=0.0)) + 1e-9
    for _ in range(2 * prices.size):
        short = pool.used(pool.priced(prices, longest_s)) > capacity
        if not short.any():
            break
        tier = int(np.argmax(short))
        low, high = 1e-12 * scale / max(1.0, pool.capacity[tier]), scale * 1e3
        for _ in range(_STEPS + 20):
            prices[tier] = np.sqrt(low * high)
            if pool.used(pool.priced(prices, longest_s))[tier] > capacity[tier]:
                low = prices[tier]
            else:
                high = prices[tier]
            if high < low * 1.0001:
                break
        prices[tier] = high
    return prices


def lower_limit_s(pool: Pool) -> float:
    """Return a limit that no plan is below.

    The memory of all ranks is taken as one, and their work as shared evenly. A plan of time T has
    no shard longer than T, so the limit is where T is the bound of plans without longer shards.
    """
    prices = prices_of(pool)
    low = max(0.0, pool.limit_s(prices), pool.limit_s(np.zeros_like(prices)))
    high = low
    while pool.limit_s(prices_of(pool, 1.0, high), high) > high and high < 1e12:
        low, high = high, max(2 * high, 1e-12)
    for _ in range(_STEPS // 2):
        if high <= low * (1 + 1e-6):
            break
        middle = (low + high) / 2
        if pool.limit_s(prices_of(pool, 1.0, middle), middle) > middle:
            low = middle
        else:
            high = middle
    return low
