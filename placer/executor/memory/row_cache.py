"""The row cache: HBM copies of cold rows, and the directory that says which row is where.

Staging and caching are one mechanism. An arena has a number of *entries* in HBM, and a step
takes one for each staged or cached row that it reads and that has none yet. What the two differ in
is which rows make room: first staged ones, which are only kept by chance, then cached ones, the
least frequent first. Rows that find no entry are read and updated where they are.

The cache is that of J. Fang et al., "A Frequency-aware Software Cache for Large Recommendation
System Embeddings", 2022 (arXiv:2208.05321), which orders rows by their frequency in the data
set and never again: policy ``"rank"``. Policy ``"lfu"`` counts lookups as they come, and lets
old counts fade.

All but the constructor and `RowCache.stats` are operations of fixed size that never wait for
the device, so that a host can run ahead of it.
"""

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from placer.errors import PlanMismatchError
from placer.executor.memory.cache_range import CacheRange, check_ranges, warm_slots
from placer.executor.memory.directory import Directory, Moves, Resolution, RowCacheStats
from placer.executor.names import Policy

SENTINEL = torch.iinfo(torch.int64).max
"""Pads arrays of sorted slots at their end; no row has this slot."""

HALF_LIFE_STEPS = 100
"""Steps after which a lookup counts half.

With a shorter one, chance decides between the rows at the edge of the cache, which are read
now and then. With a longer one, a row that was read once while it was cold takes another's room for
as long, and the cache follows a drift of the data late.
"""

EXPECTED_LOOKUPS = 24.0
"""Lookups that the hottest row of a plan counts for when it enters, and half as many the last that
the entries of its shard can hold.

Without them, rows that are read once push out rows that the log reads now and then, and of what a
plan counts on a part is missed. They fade as lookups do.
"""

DECAY = 0.5 ** (1 / HALF_LIFE_STEPS)

IN_PLACE, WRITTEN_BACK = 4, 5
"""Counters that are kept in the order of `RowCacheStats`."""

_FREE = torch.iinfo(torch.int32).min
_PROTECTED = torch.iinfo(torch.int32).max


class RowCache:
    """Entries of HBM, and which staged or cached row each holds.

    Parameters
    ----------
    parts : sequence of CacheRange
        One after the other from slot `home` on; those that are cached behind the others.
    home : int
        Slots of the arena before the first staged or cached one.
    device : torch.device
        Where lookups are.
    policy : {"lfu", "rank"}
        Which cached rows make room first: those looked up least, where a lookup counts half
        after `HALF_LIFE_STEPS` steps; or those last in the plan's order of rows, relative to
        the `cache_rows` of their shard.

    Raises
    ------
    PlanMismatchError
        If the ranges leave gaps or are out of order, or have too many entries.

    Notes
    -----
    The row cache starts with the first `cache_rows` rows of each cached shard in the directory,
    unchanged: whoever sets their first values writes the copies too.

    Counts that fade by a factor a step order rows by "combined recency and frequency":
    D. Lee et al., "LRFU", IEEE Transactions on Computers 50(12), 2001,
    doi:10.1109/TC.2001.970573, with λ = 1 / `HALF_LIFE_STEPS`.
    """

    def __init__(
        self,
        parts: Sequence[CacheRange],
        home: int,
        device: torch.device | str,
        policy: Policy = "lfu",
    ) -> None:
        check_ranges(parts, home)
        self.entries = sum(part.staging_rows + part.cache_rows for part in parts)
        if self.entries >= _PROTECTED:
            raise PlanMismatchError(
                f"a row cache of {self.entries} entries: they are numbered in 32 bits, so that one "
                f"has fewer than {_PROTECTED}; plan the tables on more GPUs"
            )
        self.policy: Policy = policy
        self._start, self._stop = home, parts[-1].stop if parts else home
        cached = [part for part in parts if part.cache_rows]
        self.cached_start = cached[0].start if cached else self._stop

        # Narrow slots halve the directory and what is sorted at each step.
        self._kind = torch.int32 if self._stop < torch.iinfo(torch.int32).max else torch.int64
        self.vacant = torch.iinfo(self._kind).max

        def fixed(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=self._kind, device=device)

        self._part_starts = fixed([part.start for part in cached] or [self._stop])
        self._part_quotas = fixed([part.cache_rows for part in cached] or [1])
        self._part_ordered = fixed([part.is_ordered for part in cached] or [0]).bool()
        self._part_listed = fixed([part.warm is not None for part in cached] or [0]).bool()
        self._has_order = any(part.is_ordered for part in cached)
        size = self.entries + 1
        vacant = torch.full((size,), self.vacant, dtype=self._kind, device=device)
        none = torch.full((size,), -1, dtype=torch.int32, device=device)
        self.directory = Directory(
            slots=vacant,
            last_used=none,
            priority=torch.zeros(size, dtype=torch.float32, device=device),
            dirty=torch.zeros(size, dtype=torch.bool, device=device),
            sorted_slots=vacant.clone(),
            sorted_entries=none.clone(),
            counters=torch.zeros(len(fields(RowCacheStats)), dtype=torch.int64, device=device),
        )
        self._warm_up(cached)

    def find(self, slots: Tensor) -> Tensor:
        """Return the entry of each slot, int32 of the same shape; −1 for rows that have none.

        Slots may be any, in any order, staged, cached or neither.
        """
        # The last slot of the directory is the largest of all: no position is behind the end.
        if slots.dtype != self._kind:
            slots = slots.long().clamp(max=self.vacant).to(self._kind)
        flat, held = slots.flatten(), self.directory
        position = torch.searchsorted(held.sorted_slots, flat, out_int32=True)
        missing = held.sorted_slots.index_select(0, position) != flat
        entries = held.sorted_entries.index_select(0, position)
        return entries.masked_fill_(missing, -1).view(slots.shape)

    def resolve(
        self,
        slots: Tensor,
        counts: Tensor,
        ticket: int,
        oldest_open: int,
        barred: Tensor | None = None,
    ) -> Resolution:
        """Give an entry to each row of a step, as far as there are any.

        An entry is taken from, in this order: nobody; the staged row that was used longest
        ago; the cached row of lowest priority. Rows that a step reads which is still open keep
        theirs.

        Parameters
        ----------
        slots : int32 or int64, shape (rows,)
            Distinct; `SENTINEL` and slots of other rows are passed over, wherever.
        counts : integer, shape (rows,)
            Lookups of each.
        ticket : int
            Number of the step, from 0 on, never falling, below 2³¹.
        oldest_open : int
            The first step that may still read or update rows: this one or one before it.
        barred : bool, shape (rows,), or None
            Rows without an entry that must not get one.

        Returns
        -------
        Resolution
            Holds once its moves are done. Until then entries that change hold the old rows.
        """
        entries = self.find(slots)
        self.fade()
        self._touch(entries, counts, ticket)
        order, available = self.evictable(ticket, oldest_open)
        miss = (slots >= self._start) & (slots < self._stop) & (entries < 0)
        self._count_lookups(counts, entries, miss)
        wanted = miss if barred is None else miss & ~barred
        turn = torch.cumsum(wanted, 0, dtype=torch.int32).sub_(1)
        admitted = wanted & (turn < available)
        self._count_in_place(miss, admitted)
        del miss, wanted
        turn = torch.where(admitted, turn, self.entries)
        most, number = min(slots.numel(), self.entries), admitted.count_nonzero()
        order = self.by_slot(order, number)
        row_of = _rows_by_turn(turn, most)
        incoming, lookups = (of.index_select(0, row_of) for of in (slots, counts))
        del row_of
        moves = self.admit(incoming, lookups, order, number, ticket)
        del incoming, lookups
        entries = torch.where(admitted, order.index_select(0, turn), entries)
        del turn, admitted, order
        self.sort()
        return Resolution(entries, moves)

    def fade(self) -> None:
        """Let lookups count less than a step ago, where they are counted."""
        if self.policy == "lfu":
            self.directory.priority.mul_(DECAY)

    def evictable(self, ticket: int, oldest_open: int) -> tuple[Tensor, Tensor]:
        """Return all entries in the order in which they are taken, int32, and how many can be, 0-d.

        The order of one int32 key, because a sort is most of a resolve's work: free entries
        first; staged rows below 0 by minus their age; cached rows from 0 on by the bits of
        their priority, which rise with it as it is never negative; protected entries last.
        """
        held = self.directory
        age = (ticket - held.last_used).clamp_(min=1)
        key = torch.where(held.slots < self.cached_start, -age, held.priority.view(torch.int32))
        key = torch.where(held.last_used < oldest_open, key, _PROTECTED)
        key = torch.where(held.slots == self.vacant, _FREE, key)
        key[self.entries :].fill_(_PROTECTED)
        return torch.sort(key, stable=True).indices.int(), (key < _PROTECTED).count_nonzero()

    def by_slot(self, order: Tensor, number: Tensor) -> Tensor:
        """Return the first `number` entries of an order by the slots that they hold, then the rest.

        So both rows that come and rows that go are read from host memory, or written to it, in
        its order. Rows at random take a GPU far longer, as it translates the addresses of few of
        the host's pages at once.
        """
        leaves = torch.arange(order.numel(), dtype=torch.int32, device=order.device) < number
        slots = torch.where(leaves, self.slots_at(order), self.vacant)
        return order.index_select(0, torch.sort(slots, stable=True).indices)

    def admit(
        self, incoming: Tensor, lookups: Tensor, order: Tensor, number: Tensor, ticket: int
    ) -> Moves:
        """Give the first entries of an order to rows; `sort` comes after it.

        Parameters
        ----------
        incoming, lookups : shape (most,)
            Slots of the rows, at most as many as there are entries, and their lookups.
        order : Tensor
            What `evictable` returned.
        number : Tensor
            How many rows there are; what is behind them means nothing. 0-d, on the device.
        ticket : int
            Number of the step.
        """
        held, most = self.directory, incoming.numel()
        victims = order[:most]
        here = torch.arange(most, dtype=torch.int32, device=order.device) < number
        incoming.masked_fill_(~here, -1)
        leaves = here & held.dirty.index_select(0, victims)
        moves = Moves(
            entries=torch.where(here, victims, -1),
            incoming=incoming,
            outgoing=held.slots.index_select(0, victims).masked_fill_(~leaves, -1),
            count=number.int().reshape(1),
        )
        entered = torch.where(here, victims, self.entries).long()
        priority = self.first_priority(incoming, lookups).float()
        held.priority.scatter_(0, entered, priority)
        held.last_used.scatter_(0, entered, ticket)
        held.dirty.scatter_(0, entered, False)
        held.slots.scatter_(0, entered, torch.where(here, incoming, self.vacant).to(self._kind))
        held.counters[WRITTEN_BACK] += leaves.count_nonzero()
        return moves

    def first_priority(self, incoming: Tensor, lookups: Tensor) -> Tensor:
        """Return the priority of rows that enter; slots of −1 get any."""
        if self.policy == "rank":
            return self._rank_priority(incoming.to(self._kind))
        if self._has_order:
            return lookups + self._expected_lookups(incoming.to(self._kind))
        return lookups

    def sort(self) -> None:
        """Bring the directory in order, in the same memory: captured graphs go on reading it."""
        slots, entries = torch.sort(self.directory.slots)
        self.directory.sorted_slots.copy_(slots)
        self.directory.sorted_entries.copy_(torch.where(slots == self.vacant, -1, entries))

    def mark_dirty(self, entries: Tensor) -> None:
        """Note that rows in entries are newer than their originals; −1 is nobody."""
        held = torch.where(entries < 0, self.entries, entries)
        self.directory.dirty.scatter_(0, held.long(), True)

    def slots_at(self, entries: Tensor) -> Tensor:
        """Return the slot that each entry holds; the largest there is where it holds none."""
        return self.directory.slots.index_select(0, entries)

    def stats(self) -> RowCacheStats:
        """Return counts so far. Waits for the device."""
        return RowCacheStats(*self.directory.counters.tolist())

    def reset_stats(self) -> None:
        """Count from nothing again."""
        self.directory.counters.zero_()

    def _warm_up(self, cached: list[CacheRange]) -> None:
        """Give entries to the rows of cached shards that the plan calls the hottest."""
        none = torch.empty(0, dtype=torch.int64)
        warm = [warm_slots(part) for part in cached]
        slots = torch.cat([none, *warm]).to(self.directory.slots)
        listed = [w for part, w in zip(cached, warm, strict=True) if part.warm is not None]
        ranks = torch.cat([none, *(torch.arange(one.numel()) for one in listed)])
        known, order = torch.sort(torch.cat([none, *listed]))
        self._listed = known.to(self.directory.slots)
        self._listed_ranks = ranks[order].to(self.directory.slots)
        self.directory.slots[: slots.numel()] = slots
        first = self._rank_priority if self.policy == "rank" else self._expected_lookups
        self.directory.priority[: slots.numel()] = first(slots)
        self.sort()

    def _expected_lookups(self, slots: Tensor) -> Tensor:
        """Return what a row counts for when it enters, beside its lookups."""
        priority = self._rank_priority(slots)
        expected = self._part_ordered.index_select(0, self._part_of(slots)) & (priority > 0.5)
        return priority.mul_(EXPECTED_LOOKUPS).mul_(expected)

    def _part_of(self, slots: Tensor) -> Tensor:
        """Return numbers of the cached shards that slots are in."""
        part = torch.searchsorted(self._part_starts, slots, right=True, out_int32=True)
        return part.sub_(1).clamp_(min=0)

    def _rank_priority(self, slots: Tensor) -> Tensor:
        """1 / (1 + rank / cache_rows): ½ at the edge of what the shard's entries can hold."""
        part = self._part_of(slots)
        rank = (slots - self._part_starts.index_select(0, part)).clamp_(min=0)
        quota = self._part_quotas.index_select(0, part)
        if self._listed.numel():
            # Of a listed shard, all other rows come behind those that its entries can hold.
            behind = self._part_listed.index_select(0, part)
            rank = torch.where(behind, torch.maximum(rank, quota), rank)
            at = torch.searchsorted(self._listed, slots, out_int32=True)
            at.clamp_(max=self._listed.numel() - 1)
            listed = self._listed.index_select(0, at) == slots
            rank = torch.where(listed, self._listed_ranks.index_select(0, at), rank)
        return rank.float().div_(quota).add_(1).reciprocal_()

    def _touch(self, entries: Tensor, counts: Tensor, ticket: int) -> None:
        """Note that a step reads the rows in entries, −1 being nobody."""
        held, holder = self.directory, torch.where(entries >= 0, entries, self.entries).long()
        held.last_used.scatter_(0, holder, ticket)
        if self.policy == "lfu":
            # Rows are distinct: reading, adding and writing needs no atomics, of which all those
            # of rows without an entry would meet at one address.
            held.priority.scatter_(0, holder, held.priority[holder].add_(counts))

    def _count_lookups(self, counts: Tensor, entries: Tensor, miss: Tensor) -> None:
        """Count lookups and rows that were read, and those that had an entry."""
        hit = entries >= 0
        lookups, missed = (counts * hit).sum(), (counts * miss).sum()
        rows, misses = hit.count_nonzero(), miss.count_nonzero()
        self.directory.counters[:4] += torch.stack([lookups + missed, lookups, rows + misses, rows])

    def _count_in_place(self, miss: Tensor, admitted: Tensor) -> None:
        self.directory.counters[IN_PLACE] += (miss & ~admitted).count_nonzero()


def _rows_by_turn(turn: Tensor, most: int) -> Tensor:
    """Return the row of each turn below `most`, int32; rows of other turns are left out.

    Added to zeros, for which indices need not be int64. The others add zeros, each at a place of
    its own as far as there are any.
    """
    if not most:
        return torch.zeros(0, dtype=torch.int32, device=turn.device)
    row = torch.arange(turn.numel(), dtype=torch.int32, device=turn.device)
    here = turn < most
    place = row.remainder(most)
    torch.where(here, turn, place, out=place)
    return torch.zeros(most, dtype=torch.int32, device=turn.device).index_add_(
        0, place, row.masked_fill_(~here, 0)
    )
