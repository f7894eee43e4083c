"""Candidates of tables on ranks: what is searched, and a plan that can be changed table by table.

A candidate is one way to place a table. Its shards come in units that are placed as a whole: a
shard on any rank, the row blocks of a host on the ranks of any host in their order, or the shards
of all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from solvers.model.knapsack import Bool, Float, Int

_NORM, _MOST = 64.0, 1e4
"""Power of the norm of the ranks' times: close to the maximum, and it tells equal ones apart. Times
beyond so many lower limits, whose powers are no numbers, are taken as equal."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Candidates of a table whose shards are placed in the same way."""

    span: int  # Ranks of a unit: 1, those of a host or several, or all.
    same_host: bool  # Whether all units must be on the ranks of one host.
    distinct: bool  # Whether all units must be on different ranks.
    seconds: Float  # Shape (candidates, units, span): time of each shard, in any unit.
    tier_bytes: Float  # Shape (candidates, units, span, tiers).
    sources: list[Any]  # What each candidate was made of.
    # Shape (ranks,): ranks that units of one shard may be on; all by default.
    allowed: Bool | None = None

    @property
    def units(self) -> int:
        """Units of a candidate."""
        return int(self.seconds.shape[1])

    @property
    def is_loose(self) -> bool:
        """Whether each unit is one shard that may be on any rank, whatever the others are on."""
        bound = self.same_host or self.distinct or self.allowed is not None
        return self.span == 1 and not bound

    def worthwhile(self, memory: Float) -> "Group | None":
        """Return the candidates that fit and that no other one is as good as; None if none fits.

        `memory`, shape (ranks, tiers): bytes of each rank.
        """
        fitting = self._only(self._fitting(memory))
        return fitting._only(fitting._undominated()) if fitting.sources else None

    def _only(self, kept: Bool) -> "Group":
        return replace(
            self,
            seconds=self.seconds[kept],
            tier_bytes=self.tier_bytes[kept],
            sources=[self.sources[number] for number in np.flatnonzero(kept).tolist()],
        )

    def _fitting(self, memory: Float) -> Bool:
        """Return which candidates have all units fit on some ranks, each by itself."""
        slots = len(memory) // self.span
        room = memory[: slots * self.span].reshape(slots, 1, 1, self.span, -1)
        fits = (self.tier_bytes <= room).all(axis=(3, 4)).any(axis=0)
        return np.asarray(np.all(fits, axis=1))

    def _undominated(self) -> Bool:
        """Return which candidates no other one is as good as in time and all memory."""
        values = np.concatenate(
            (
                self.seconds.sum((1, 2))[:, None],
                self.seconds.max((1, 2))[:, None],
                self.tier_bytes.sum((1, 2)),
                self.tier_bytes.max((1, 2)),
            ),
            axis=1,
        )
        values, first = np.unique(values, axis=0, return_index=True)
        as_good = np.asarray((values[:, None] <= values[None]).all(axis=2))
        np.fill_diagonal(as_good, False)
        kept = np.zeros(len(self.sources), dtype=bool)
        kept[first[~as_good.any(axis=0)]] = True
        return kept


@dataclass(frozen=True, eq=False)
class Space:
    """What is searched."""

    tables: list[list[Group]]  # Candidates of each table.
    # All tables, those together that must be on the ranks of one host.
    bundles: list[tuple[int, ...]]
    memory: Float  # Shape (ranks, tiers).
    local_ranks: int  # Ranks of a host.
    limit_s: float  # A lower limit of the time, by which times are compared.

    @cached_property
    def bundle_of(self) -> dict[int, tuple[int, ...]]:
        """The bundle of each table."""
        return {table: bundle for bundle in self.bundles for table in bundle}

    def norm(self, seconds: Float) -> Float:
        """Return a norm of the ranks' times, the last axis: the longest count most."""
        powers: Float = np.minimum(seconds / self.limit_s, _MOST) ** _NORM
        return np.asarray(powers.sum(axis=-1))


class Place(NamedTuple):
    """A table placed: the number of its group, of the candidate there, and a slot for each unit.

    Slot j of a unit of span n is the ranks j·n … j·n + n − 1.
    """

    group: int
    candidate: int
    slots: tuple[int, ...]


def ranks_of(group: Group, slots: Sequence[int]) -> Int:
    """Return the rank of each shard, shape (units, span)."""
    return np.asarray(slots)[:, None] * group.span + np.arange(group.span)


class State:
    """Places of tables, and the time and free memory of each rank. Mutable.

    `seconds`, shape (ranks,). `free`, shape (ranks, tiers).
    """

    def __init__(self, space: Space, places: dict[int, Place] | None = None) -> None:
        self.space = space
        self.places: dict[int, Place] = {}
        self.seconds, self.free = np.zeros(len(space.memory)), space.memory.copy()
        for table, place in (places or {}).items():
            self.put(table, place)

    def copy(self) -> "State":
        """Return a copy that can be changed."""
        other = State(self.space)
        other.become(self)
        return other

    def become(self, other: "State") -> None:
        """Take over the places of another state of the same space."""
        self.places = dict(other.places)
        self.seconds, self.free = other.seconds.copy(), other.free.copy()

    @property
    def step_s(self) -> float:
        """Time of the slowest rank."""
        return float(self.seconds.max())

    @property
    def norm(self) -> float:
        """What is made small."""
        return float(self.space.norm(self.seconds))

    @property
    def fits(self) -> bool:
        """Whether no rank has more than it has memory for."""
        return bool((self.free >= 0).all())

    def group(self, table: int) -> Group:
        """Return the group of a placed table's candidate."""
        return self.space.tables[table][self.places[table].group]

    def seconds_on(self, rank: int) -> dict[int, float]:
        """Return the tables with a shard on a rank, and the time of their shards there."""
        found = {}
        for table, place in self.places.items():
            group = self.group(table)
            at, shard = divmod(rank, group.span)
            if at in place.slots:
                units = [unit for unit, slot in enumerate(place.slots) if slot == at]
                found[table] = float(group.seconds[place.candidate, units, shard].sum())
        return found

    def put(self, table: int, place: Place) -> None:
        """Place a table."""
        self.places[table] = place
        self._count(table, 1)

    def take(self, table: int) -> Place:
        """Take a table away."""
        self._count(table, -1)
        return self.places.pop(table)

    def _count(self, table: int, sign: int) -> None:
        group, (_, candidate, slots) = self.group(table), self.places[table]
        ranks = ranks_of(group, slots)
        np.add.at(self.seconds, ranks, sign * group.seconds[candidate])
        np.add.at(self.free, ranks, -sign * group.tier_bytes[candidate])

    def place(
        self,
        bundle: Sequence[int],
        costs: list[list[Float]] | None = None,
        prices: Float | None = None,
    ) -> bool:
        """Place tables that must be together where the norm is least then; whether they fit.

        `costs` of each candidate of each group of each table decide instead of the norm, or
        `prices` of a byte of each tier count as times.
        """
        hosts = range(len(self.seconds) // self.space.local_ranks) if len(bundle) > 1 else (None,)
        best: State | None = None
        for host in hosts:
            trial = self.copy()
            for table in bundle:
                place = trial._best_place(table, host, costs, prices)
                if place is None:
                    break
                trial.put(table, place)
            else:
                if best is None or trial.norm < best.norm:
                    best = trial
        if best is not None:
            self.become(best)
        return best is not None

    def _best_place(
        self, table: int, host: int | None, costs: list[list[Float]] | None, prices: Float | None
    ) -> Place | None:
        local, ranks = self.space.local_ranks, len(self.seconds)
        best, least = None, np.inf
        for number, group in enumerate(self.space.tables[table]):
            hosts = [host] if host is not None or not group.same_host else range(ranks // local)
            for here in hosts:
                slots, seconds, fits = self._fit(
                    group, here if group.span < ranks else None, prices
                )
                values = self.space.norm(seconds) if costs is None else costs[table][number]
                values = np.where(fits, values, np.inf)
                at = int(values.argmin())
                if values[at] < least:
                    best, least = Place(number, at, tuple(slots[at].tolist())), values[at]
        return best

    def _fit(
        self, group: Group, host: int | None, prices: Float | None
    ) -> tuple[Int, Float, Float]:
        """Place the units of each candidate, each where it is done first.

        Returns the slots, the ranks' times then, and which candidates fit.
        """
        count, span, ranks = len(group.sources), group.span, self.seconds.size
        slots = ranks // span
        width, rows = slots * span, np.arange(count)
        closed = np.zeros((count, slots), dtype=bool)
        if host is not None:
            of_host = np.arange(slots) * span // self.space.local_ranks
            closed |= of_host != host
        if group.allowed is not None:
            closed |= ~group.allowed
        seconds = np.repeat(self.seconds[None], count, axis=0)
        free = np.repeat(self.free[None], count if group.units > 1 else 1, axis=0)
        extras = group.seconds if prices is None else group.seconds + group.tier_bytes @ prices
        chosen, fits = np.empty((count, group.units), dtype=np.int64), np.ones(count, dtype=bool)
        for unit in range(group.units):
            extra, more = extras[:, None, unit], group.tier_bytes[:, None, unit]
            ends = (seconds[:, :width].reshape(count, slots, span) + extra).max(axis=2)
            room = free[:, :width].reshape(len(free), slots, span, -1)
            ends[(more > room).any(axis=(2, 3)) | closed] = np.inf
            slot = ends.argmin(axis=1)
            chosen[:, unit] = slot
            fits &= np.isfinite(ends[rows, slot])
            at = slot[:, None] * span + np.arange(span)
            seconds[rows[:, None], at] += extras[:, unit]
            if group.units > 1:
                free[rows[:, None], at] -= group.tier_bytes[:, unit]
                closed[rows, slot] |= group.distinct
        return chosen, seconds, fits
