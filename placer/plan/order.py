"""Convert between ids and row ranks by a plan's row order, which lists only hot ids."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from placer.plan.plan import Plan

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """A row order: listed ids come first, and all others follow in id order."""

    listed: Int  # Listed ids by rank, shape (n,).
    ascending: Int  # The same ids, sorted, shape (n,).
    rank_of_ascending: Int  # The rank of each of them, shape (n,).

    @classmethod
    def of(cls, listed: npt.ArrayLike) -> "Ranks":
        """Return the row order that lists these ids."""
        ids = np.asarray(listed, dtype=np.int64)
        order = np.argsort(ids, kind="stable")
        return cls(ids, ids[order], order.astype(np.int64))

    @classmethod
    def in_plan(cls, plan: Plan, table: str) -> "Ranks":
        """Return the row order of a plan's table."""
        return cls.of(listed_ids(plan, table))

    def ranks(self, ids: Int) -> Int:
        """Return the row ranks of `ids`, listed or not, shape (n,)."""
        below = np.searchsorted(self.ascending, ids)
        ranks = ids + self.listed.size - below
        if self.listed.size:
            at = np.minimum(below, self.listed.size - 1)
            known = self.ascending[at] == ids
            ranks[known] = self.rank_of_ascending[at[known]]
        return ranks

    def offsets(self, ids: Int) -> Int:
        """Return rank − id for ids that are not listed, shape (n,)."""
        offset: Int = self.listed.size - np.searchsorted(self.ascending, ids)
        return offset.astype(np.int64)

    def ids(self, ranks: Int) -> Int:
        """Return the ids at `ranks`, listed or not, shape (n,)."""
        hot = ranks < self.listed.size
        ids = np.empty_like(ranks)
        ids[hot] = self.listed[ranks[hot]]
        ids[~hot] = self.unlisted_ids(ranks[~hot])
        return ids

    def unlisted_ids(self, ranks: npt.ArrayLike) -> Int:
        """Return the ids at `ranks`, which must all be ranks of unlisted ids, shape (n,)."""
        number = np.asarray(ranks, dtype=np.int64) - self.listed.size
        # Number of unlisted ids below each listed id.
        before = self.ascending - np.arange(self.listed.size)
        ids: Int = number + np.searchsorted(before, number, side="right")
        return ids.astype(np.int64)


def distinct(ids: Int) -> Int:
    """Return the distinct ids, ascending. Sorting is faster than hashing for millions of ids."""
    ascending = np.sort(ids)
    first = np.ones(ascending.size, dtype=bool)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    return ascending[first]


def listed_ids(plan: Plan, table: str) -> Int:
    """Return the ids that a table's row order lists, hottest first."""
    if plan.order_of(table).kind == "id":
        return np.zeros(0, dtype=np.int64)
    return plan.hot_ids[table]


def warm_members(plan: Plan, table: str, rows: tuple[int, int, int]) -> Int | None:
    """Return the members of a slice of ids that its cache begins with, hottest first.

    Members are numbered from 0. Returns None if the plan lists none: with a row order, the first
    members are the hottest.
    """
    if plan.order_of(table).kind != "id" or table not in plan.hot_ids:
        return None
    start, stop, step = rows
    ids = plan.hot_ids[table]
    within: Int = ids[(ids >= start) & (ids < stop) & ((ids - start) % step == 0)]
    return (within - start) // step


def knows_hot_rows(plan: Plan, table: str) -> bool:
    """Return whether a plan knows a table's hot rows, by its row order or by a list."""
    return plan.order_of(table).kind != "id" or table in plan.hot_ids
