"""The row cache: HBM copies of cold rows, and the directory that says which row is where.

Staging and caching are one mechanism. An arena has a number of *entries* in HBM, and a step
takes one for each staged or cached row that it reads and that has none yet. What the two differ in
is which rows make room: first staged ones, which are only kept by chance, then cached ones, the
least frequent first. Rows that find no entry are read and updated where they are.

The cache is that of J. Fang et al., "A Frequency-aware Software Cache for Large Recommendation
System Embeddings", 2022 (arXiv:2208.05321), which orders rows by their frequency in the data
set and never again: policy ``"rank"``. Policy ``"lfu"`` counts lookups as they come, and lets
old counts fade.

This is the cache in plain PyTorch, which waits for the device; Triton's kernels keep the same
directory by the same rules.
"""

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from placer.errors import PlanMismatchError
from placer.executor.memory.directory import Directory, Moves, Resolution, RowCacheStats
from placer.executor.memory.slot_range import SlotRange, warm_slots
from placer.executor.names import Policy

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
    parts : sequence of SlotRange
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
        If there are too many entries.

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
        parts: Sequence[SlotRange],
        home: int,
        device: torch.device | str,
        policy: Policy = "lfu",
    ) -> None:
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
            Distinct; those that are neither staged nor cached are passed over.
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
        hit = entries >= 0
        miss = (slots >= self._start) & (slots < self._stop) & ~hit
        held, own = self.directory, entries[hit]
        self.fade()
        if self.policy == "lfu":
            held.priority[own] += counts[hit]
        held.last_used[own] = ticket
        order = self._evictable(ticket, oldest_open)
        wanted = torch.nonzero(miss if barred is None else miss & ~barred).squeeze(1)
        admitted = wanted[: order.numel()]
        # By the slots that they hold, so that both rows that come and rows that go are read from
        # host memory, or written to it, in its order.
        taken = order[: admitted.numel()]
        taken = taken[torch.sort(self.slots_at(taken), stable=True).indices]
        moves = self._admit(slots[admitted], counts[admitted], taken, ticket)
        entries[admitted] = taken
        read, in_place = hit | miss, miss.sum() - admitted.numel()
        written_back = (moves.outgoing >= 0).sum()
        lookups = counts[read].sum(), counts[hit].sum()
        counted = [*lookups, read.sum(), hit.sum(), in_place, written_back]
        held.counters.add_(torch.stack(counted))
        self._sort()
        return Resolution(entries, moves)

    def fade(self) -> None:
        """Let lookups count less than a step ago, where they are counted."""
        if self.policy == "lfu":
            self.directory.priority.mul_(DECAY)

    def _evictable(self, ticket: int, oldest_open: int) -> Tensor:
        """Return entries that can be taken, in that order, int32.

        The order of one int32 key: free entries first; staged rows below 0 by minus their age;
        cached rows from 0 on by the bits of their priority, which rise with it as it is never
        negative.
        """
        held = self.directory
        is_free = held.slots == self.vacant
        may = is_free | (held.last_used < oldest_open)
        entries = torch.nonzero(may[: self.entries]).squeeze(1)
        age = (ticket - held.last_used).clamp_(min=1)
        key = torch.where(held.slots < self.cached_start, -age, held.priority.view(torch.int32))
        key = torch.where(is_free, _FREE, key)
        return entries[torch.sort(key[entries], stable=True).indices].int()

    def _admit(self, incoming: Tensor, lookups: Tensor, entries: Tensor, ticket: int) -> Moves:
        """Give entries to rows; `_sort` comes after it."""
        held = self.directory
        outgoing = torch.where(held.dirty[entries], held.slots[entries], -1)
        held.priority[entries] = self.first_priority(incoming, lookups).float()
        held.last_used[entries] = ticket
        held.dirty[entries] = False
        held.slots[entries] = incoming.to(self._kind)
        count = torch.full((1,), entries.numel(), dtype=torch.int32, device=entries.device)
        return Moves(entries, incoming, outgoing, count)

    def first_priority(self, incoming: Tensor, lookups: Tensor) -> Tensor:
        """Return the priority of rows that enter; slots of −1 get any."""
        if self.policy == "rank":
            return self._rank_priority(incoming.to(self._kind))
        if self._has_order:
            return lookups + self._expected_lookups(incoming.to(self._kind))
        return lookups

    def _sort(self) -> None:
        """Bring the directory in order, in the same memory."""
        slots, entries = torch.sort(self.directory.slots)
        self.directory.sorted_slots.copy_(slots)
        self.directory.sorted_entries.copy_(torch.where(slots == self.vacant, -1, entries))

    def mark_dirty(self, entries: Tensor) -> None:
        """Note that rows in entries are newer than their originals; −1 is nobody."""
        self.directory.dirty[entries[entries >= 0]] = True

    def slots_at(self, entries: Tensor) -> Tensor:
        """Return the slot that each entry holds; the largest there is where it holds none."""
        return self.directory.slots.index_select(0, entries)

    def stats(self) -> RowCacheStats:
        """Return counts so far. Waits for the device."""
        return RowCacheStats(*self.directory.counters.tolist())

    def reset_stats(self) -> None:
        """Count from nothing again."""
        self.directory.counters.zero_()

    def _warm_up(self, cached: list[SlotRange]) -> None:
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
        self._sort()

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
