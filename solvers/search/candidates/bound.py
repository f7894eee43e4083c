"""A lower limit of the slowest rank's time, and the prices of memory behind it."""

from collections.abc import Sequence

import numpy as np

from solvers.search.candidates.placement import Float, Group, Int

_STEPS = 40
"""Halvings of an interval of prices or times."""


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


def prices_of(pool: Pool, share: float = 1.0, longest_s: float = np.inf) -> Float:
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
