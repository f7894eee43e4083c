"""Tables on ranks: the state of a search over TorchRec's options."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from solvers.torchrec.candidates import Float, Group, Int

Bool = npt.NDArray[np.bool_]

_NORM = 64.0
"""Power of the norm of the ranks' times: close to the maximum, and it tells equal ones apart."""


@dataclass(frozen=True, eq=False)
class Space:
    """What is searched.

    Attributes
    ----------
    tables : list of list of Group
        Candidates of each table.
    bundles : list of tuple of int
        Tables that must be on the ranks of one host; most are alone.
    memory : float64, shape (ranks, tiers)
    local_ranks : int
        Ranks of a host.
    limit_s : float
        A lower limit of the time, by which times are compared.
    """

    tables: list[list[Group]]
    bundles: list[tuple[int, ...]]
    memory: Float
    local_ranks: int
    limit_s: float

    @cached_property
    def bound(self) -> frozenset[int]:
        """Tables that have to be together with others."""
        return frozenset(t for bundle in self.bundles if len(bundle) > 1 for t in bundle)

    @property
    def hosts(self) -> int:
        """Hosts of the machine."""
        return len(self.memory) // self.local_ranks

    def norm(self, seconds: Float) -> Float:
        """A number that grows with the times of ranks, the last axis, most with the longest."""
        with np.errstate(over="ignore"):
            powers: Float = (seconds / self.limit_s) ** _NORM
        return np.asarray(powers.sum(axis=-1))


class Place(NamedTuple):
    """A table placed: the number of its group, of the candidate there, and a slot for each unit.

    Slot j of a unit of span n is the ranks j·n … j·n + n − 1.
    """

    group: int
    candidate: int
    slots: tuple[int, ...]


class Loads(NamedTuple):
    """Time and free memory of each rank, shapes (ranks,) and (ranks, tiers)."""

    seconds: Float
    free: Float


def ranks_of(group: Group, slots: Sequence[int]) -> Int:
    """The rank of each shard, shape (units, span)."""
    return np.asarray(slots)[:, None] * group.span + np.arange(group.span)


def changed(space: Space, loads: Loads, table: int, place: Place, sign: int) -> Loads:
    """Loads with a table placed (`sign` 1) or taken away (−1)."""
    group = space.tables[table][place.group]
    ranks = ranks_of(group, place.slots)
    seconds, free = loads.seconds.copy(), loads.free.copy()
    np.add.at(seconds, ranks, sign * group.seconds[place.candidate])
    np.add.at(free, ranks, -sign * group.tier_bytes[place.candidate])
    return Loads(seconds, free)


class Fit(NamedTuple):
    """Where the candidates of a group would go: slots, the ranks' times then, whether it fits."""

    slots: Int
    seconds: Float
    fits: Bool


def fit(group: Group, loads: Loads, open_ranks: slice | None = None) -> Fit:
    """Place the units of each candidate, each where it is done first."""
    if group.same_host and open_ranks is None:
        raise ValueError("units of one host are placed host by host")
    count, ranks = len(group.sources), loads.seconds.size
    slots = ranks // group.span
    span, width = group.span, slots * group.span
    closed = np.zeros(slots, dtype=bool)
    if open_ranks is not None and span < ranks:
        closed[:] = True
        closed[open_ranks.start // span : open_ranks.stop // span] = False
    seconds = np.repeat(loads.seconds[None], count, axis=0)
    free = np.repeat(loads.free[None], count, axis=0) if group.units > 1 else loads.free[None]
    taken = np.zeros((count, slots), dtype=bool)
    chosen = np.empty((count, group.units), dtype=np.int64)
    fits = np.ones(count, dtype=bool)
    rows = np.arange(count)
    for unit in range(group.units):
        extra, more = group.seconds[:, None, unit], group.tier_bytes[:, None, unit]
        ends = (seconds[:, :width].reshape(count, slots, span) + extra).max(axis=2)
        room = free[:, :width].reshape(len(free), slots, span, -1)
        ends[(more > room).any(axis=(2, 3)) | closed | taken] = np.inf
        slot = ends.argmin(axis=1)
        chosen[:, unit] = slot
        fits &= np.isfinite(ends[rows, slot])
        at = slot[:, None] * span + np.arange(span)
        seconds[rows[:, None], at] += group.seconds[:, unit]
        if group.units > 1:
            free[rows[:, None], at] -= group.tier_bytes[:, unit]
            if group.distinct:
                taken[rows, slot] = True
    return Fit(chosen, seconds, fits)


def place_of(space: Space, table: int, number: int, candidate: int, loads: Loads) -> Place | None:
    """Where one candidate of a table goes, if it fits; tables of one host only are left out."""
    group = space.tables[table][number]
    if group.same_host:
        return None
    found = fit(group.only(np.array([candidate])), loads)
    return Place(number, candidate, tuple(found.slots[0].tolist())) if found.fits[0] else None


def fits_of(space: Space, group: Group, loads: Loads, host: int | None = None) -> list[Fit]:
    """The ways to place a group's candidates that are tried: one, or one for each host."""
    local = space.local_ranks
    if host is not None:
        return [fit(group, loads, slice(host * local, (host + 1) * local))]
    if not group.same_host:
        return [fit(group, loads)]
    return [fit(group, loads, slice(h * local, (h + 1) * local)) for h in range(space.hosts)]


class State:
    """Places of tables, and what the ranks have left. Mutable.

    Attributes
    ----------
    places : dict of int to Place
        Of each table that is placed.
    loads : Loads
    rank_of, seconds_of, bytes_of : arrays, shapes (tables,), (tables,) and (tables, tiers)
        Rank, time and bytes of tables of one shard that may be on any rank; of others, the
        rank is −1.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.places: dict[int, Place] = {}
        self.loads = Loads(np.zeros(len(space.memory)), space.memory.copy())
        tables = len(space.tables)
        self.rank_of: Int = np.full(tables, -1)
        self.seconds_of: Float = np.zeros(tables)
        self.bytes_of: Float = np.zeros((tables, space.memory.shape[1]))
        self.is_filled: Bool = np.zeros(len(space.memory), dtype=bool)

    def copy(self) -> "State":
        """A copy that can be changed."""
        other = State(self.space)
        other.places = dict(self.places)
        other.loads = Loads(self.loads.seconds.copy(), self.loads.free.copy())
        other.rank_of = self.rank_of.copy()
        other.seconds_of = self.seconds_of.copy()
        other.bytes_of = self.bytes_of.copy()
        other.is_filled = self.is_filled.copy()
        return other

    def become(self, other: "State") -> None:
        """Take over another state of the same space, which is not to be used any more."""
        self.places, self.loads = other.places, other.loads
        self.rank_of, self.seconds_of = other.rank_of, other.seconds_of
        self.bytes_of, self.is_filled = other.bytes_of, other.is_filled

    @property
    def step_s(self) -> float:
        """Time of the slowest rank."""
        return float(self.loads.seconds.max())

    @property
    def norm(self) -> float:
        """What is made small."""
        return float(self.space.norm(self.loads.seconds))

    def put(self, table: int, place: Place) -> None:
        """Place a table."""
        self.places[table] = place
        self.loads = changed(self.space, self.loads, table, place, 1)
        group = self.space.tables[table][place.group]
        self.is_filled[ranks_of(group, place.slots)] = False
        if group.is_loose and group.units == 1 and table not in self.space.bound:
            self.rank_of[table] = place.slots[0]
            self.seconds_of[table] = group.seconds[place.candidate, 0, 0]
            self.bytes_of[table] = group.tier_bytes[place.candidate, 0, 0]

    def take(self, table: int) -> Place:
        """Take a table away."""
        place = self.places.pop(table)
        self.loads = changed(self.space, self.loads, table, place, -1)
        self.is_filled[ranks_of(self.space.tables[table][place.group], place.slots)] = False
        self.rank_of[table] = -1
        return place

    def recount(self) -> None:
        """Count the loads anew, without the rounding of many changes."""
        self.loads = Loads(np.zeros(len(self.space.memory)), self.space.memory.copy())
        for table, place in self.places.items():
            self.loads = changed(self.space, self.loads, table, place, 1)

    @property
    def fits(self) -> bool:
        """Whether no rank has more than it has memory for."""
        return bool((self.loads.free >= 0).all())

    def on_rank(self, rank: int) -> list[int]:
        """The tables with a shard on a rank."""
        found = []
        for table, place in self.places.items():
            span = self.space.tables[table][place.group].span
            if any(slot * span <= rank < (slot + 1) * span for slot in place.slots):
                found.append(table)
        return found

    def best_place(
        self,
        table: int,
        host: int | None = None,
        penalty: "list[Float] | None" = None,
        exclude: Place | None = None,
    ) -> tuple[float, Place] | None:
        """The best place of a table that is not placed, and the norm then; None if none fits.

        `penalty` has a number for each candidate of each group, which decides instead.
        """
        best: tuple[float, Place] | None = None
        for number, group in enumerate(self.space.tables[table]):
            for found in fits_of(self.space, group, self.loads, host):
                norms = self.space.norm(found.seconds)
                values = norms if penalty is None else penalty[number].copy()
                values[~found.fits] = np.inf
                at = int(values.argmin())
                if np.isfinite(values[at]) and (best is None or values[at] < best[0]):
                    place = Place(number, at, tuple(found.slots[at].tolist()))
                    if place != exclude:
                        best = float(values[at]), place
        return best
