"""The row cache: HBM copies of cold rows, and a directory of which entry has which row.

Staging and caching use one mechanism. An arena has *entries* in HBM. Each staged or cached row that
a step reads gets an entry, if it has none yet. The two kinds differ in eviction: staged rows are
evicted first, the longest unused first, then cached rows, the least frequent first. Rows that get
no entry are read and updated in place.

This is the cache in plain PyTorch, which waits for the device. Triton's kernels keep the same
directory by the same rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from placer.errors import PlanMismatchError
from placer.executor import Policy
from placer.executor.memory.layout import SlotRange


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Rows to copy into and out of cache entries before a step."""

    # Int32, shape (most,): the entry of each move; −1 after the last move. Entries are distinct.
    entries: Tensor
    incoming: Tensor  # Int32 or int64, shape (most,): slot of the row to copy into the entry.
    # Int32 or int64, shape (most,): slot of the row to write back first; −1 if the entry was free
    # or its row is unchanged.
    outgoing: Tensor
    count: Tensor  # Int32, shape (1,): number of moves.


@dataclass(frozen=True, slots=True, eq=False)
class Directory:
    """The state of each cache entry, and of an extra entry that takes writes for no entry."""

    # Int32 or int64, shape (entries + 1,): the slot in each entry; the dtype's largest value if the
    # entry is free.
    slots: Tensor
    last_used: Tensor  # Int32, shape (entries + 1,): the last step that read the entry.
    # Float32, shape (entries + 1,): cached rows of lowest priority are evicted first.
    priority: Tensor
    dirty: Tensor  # Bool, shape (entries + 1,): whether the copy is newer than the row itself.
    # Shape (entries + 1,): the slots in ascending order, for searches, and their entries; −1 if
    # free.
    sorted_slots: Tensor
    sorted_entries: Tensor
    counters: Tensor  # Int64: counts in the order of `RowCacheStats`.

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors without the counters."""
        parts = (self.slots, self.last_used, self.priority, self.dirty)
        return sum(part.nbytes for part in (*parts, self.sorted_slots, self.sorted_entries))


@dataclass(frozen=True, slots=True)
class RowCacheStats:
    """Counts of a row cache since the last reset."""

    # Lookups of staged and cached rows, and lookups of rows with an entry before the step.
    lookups: int = 0
    hit_lookups: int = 0
    # The same with each row counted once per step.
    rows: int = 0
    hit_rows: int = 0
    in_place_rows: int = 0  # Rows that got no entry.
    written_back_rows: int = 0  # Evicted rows that had been updated.

    def __add__(self, other: "RowCacheStats") -> "RowCacheStats":
        """Return the sums of two row caches' counts."""
        return RowCacheStats(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )

    @property
    def hit_rate(self) -> float | None:
        """Share of lookups that hit; None without lookups."""
        return self.hit_lookups / self.lookups if self.lookups else None

    @property
    def in_place_share(self) -> float | None:
        """Share of the steps' distinct rows that got no entry; None without rows."""
        return self.in_place_rows / self.rows if self.rows else None


HALF_LIFE_STEPS = 100
"""Steps after which a lookup counts half.

If it is shorter, chance decides between rows that are read now and then. If it is longer, a cold
row that was read once keeps its entry for long, and the cache follows changes of the data late.
"""

EXPECTED_LOOKUPS = 24.0
"""Lookups credited to the hottest row of a plan when it gets an entry; half as many to the last row
that fits into the entries of its shard.

Without them, rows that are read once evict rows that the log reads now and then, and the cache
misses part of the hits that the plan expects. They fade as lookups do.
"""

DECAY = 0.5 ** (1 / HALF_LIFE_STEPS)

IN_PLACE, WRITTEN_BACK = 4, 5
"""Indices of two counters in `RowCacheStats`."""

_FREE = torch.iinfo(torch.int32).min
_PROTECTED = torch.iinfo(torch.int32).max


class RowCache:
    """Cache entries in HBM, and the staged or cached row of each.

    Raises PlanMismatchError if there are too many entries.

    - `parts`: contiguous ranges from slot `home` on, cached ranges after staged ones.
    - `home`: number of the arena's slots before the first staged or cached slot.
    - `device`: device of the lookups.
    - `policy`, {"lfu", "rank"}: which cached rows are evicted first: the least looked up, with
      counts that halve in `HALF_LIFE_STEPS` steps; or the last in the plan's row order, relative to
      the `cache_rows` of their shard, as in J. Fang et al., "A Frequency-aware Software Cache for
      Large Recommendation System Embeddings", 2022 (arXiv:2208.05321).

    Notes
    -----
    The directory starts with the hottest `cache_rows` rows of each cached shard. Writes of initial
    weights also write these copies.

    Counts that fade by a factor per step order rows by "combined recency and frequency":
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

        # int32 slots halve the directory and the memory that each step sorts.
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
        """Return the entry of each slot, int32 of the same shape; −1 for rows without an entry.

        Slots may be in any order, and of any kind.
        """
        # The directory's last slot is the largest value, so no position is after the end.
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
    ) -> tuple[Tensor, Moves]:
        """Give entries to the rows of a step, as far as entries are available.

        Take free entries first, then entries of the staged rows unused for longest, then of the
        cached rows of lowest priority. Rows that an open step reads keep their entries.

        - `slots`: distinct; those that are neither staged nor cached are ignored.
        - `counts`: lookups of each slot.
        - `ticket`: number of the step: at least 0, below 2³¹, never decreasing.
        - `oldest_open`: the oldest open step: this step or an earlier one.
        - `barred`, bool by slot: rows without an entry that must not get one.

        Return the entry of each row, int32, −1 for none; and the moves after which it has the row.
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
        # Sort entries by their slots, so that copies from and to host memory run in its order.
        taken = order[: admitted.numel()]
        taken = taken[torch.sort(held.slots[taken], stable=True).indices]
        moves = self._admit(slots[admitted], counts[admitted], taken, ticket)
        entries[admitted] = taken
        read, in_place = hit | miss, miss.sum() - admitted.numel()
        written_back = (moves.outgoing >= 0).sum()
        lookups = counts[read].sum(), counts[hit].sum()
        counted = [*lookups, read.sum(), hit.sum(), in_place, written_back]
        held.counters.add_(torch.stack(counted))
        self.sort()
        return entries, moves

    def fade(self) -> None:
        """Multiply all counts of lookups by `DECAY`, if the policy counts them."""
        if self.policy == "lfu":
            self.directory.priority.mul_(DECAY)

    def _evictable(self, ticket: int, oldest_open: int) -> Tensor:
        """Return the entries that can be taken, int32, in the order of eviction.

        One int32 key gives the order. Free entries have the least key, and staged rows have minus
        their age. Cached rows have the bits of their priority, which increase with it because it
        is never negative.
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
        """Give entries to rows. Call `sort` afterwards."""
        held = self.directory
        outgoing = torch.where(held.dirty[entries], held.slots[entries], -1)
        held.priority[entries] = self.first_priority(incoming, lookups).float()
        held.last_used[entries] = ticket
        held.dirty[entries] = False
        held.slots[entries] = incoming.to(self._kind)
        count = torch.full((1,), entries.numel(), dtype=torch.int32, device=entries.device)
        return Moves(entries, incoming, outgoing, count)

    def first_priority(self, incoming: Tensor, lookups: Tensor) -> Tensor:
        """Return the initial priority of rows in the cache; arbitrary for slots of −1."""
        if self.policy == "rank":
            return self._rank_priority(incoming.to(self._kind))
        if self._has_order:
            return lookups + self._expected_lookups(incoming.to(self._kind))
        return lookups

    def sort(self) -> None:
        """Sort the directory by slot, in place."""
        slots, entries = torch.sort(self.directory.slots)
        self.directory.sorted_slots.copy_(slots)
        self.directory.sorted_entries.copy_(torch.where(slots == self.vacant, -1, entries))

    def mark_dirty(self, entries: Tensor) -> None:
        """Note that the copies in entries are newer than the rows themselves; −1 is ignored."""
        self.directory.dirty[entries[entries >= 0]] = True

    def stats(self) -> RowCacheStats:
        """Return the counts so far; waits for the device."""
        return RowCacheStats(*self.directory.counters.tolist())

    def reset_stats(self) -> None:
        """Set all counts to zero."""
        self.directory.counters.zero_()

    def _warm_up(self, cached: list[SlotRange]) -> None:
        """Give entries to the hottest rows of cached shards in the plan."""
        warm = [torch.empty(0, dtype=torch.int64)]
        listed = warm.copy()
        for part in cached:
            if part.warm is None:
                last = min(part.start + part.cache_rows, part.stop)
                warm.append(torch.arange(part.start, last))
            else:
                listed.append(torch.from_numpy(part.start + part.warm[: part.cache_rows]))
                warm.append(listed[-1])
        slots = torch.cat(warm).to(self.directory.slots)
        ranks = torch.cat([torch.arange(one.numel()) for one in listed])
        known, order = torch.sort(torch.cat(listed))
        self._listed = known.to(self.directory.slots)
        self._listed_ranks = ranks[order].to(self.directory.slots)
        self.directory.slots[: slots.numel()] = slots
        first = self._rank_priority if self.policy == "rank" else self._expected_lookups
        self.directory.priority[: slots.numel()] = first(slots)
        self.sort()

    def _expected_lookups(self, slots: Tensor) -> Tensor:
        """Return the lookups credited to rows that get an entry, besides actual lookups."""
        priority = self._rank_priority(slots)
        expected = self._part_ordered.index_select(0, self._part_of(slots)) & (priority > 0.5)
        return priority.mul_(EXPECTED_LOOKUPS).mul_(expected)

    def _part_of(self, slots: Tensor) -> Tensor:
        """Return the number of each slot's cached shard."""
        part = torch.searchsorted(self._part_starts, slots, right=True, out_int32=True)
        return part.sub_(1).clamp_(min=0)

    def _rank_priority(self, slots: Tensor) -> Tensor:
        """Return 1 / (1 + rank / cache_rows): ½ for the last row that fits into the entries."""
        part = self._part_of(slots)
        rank = (slots - self._part_starts.index_select(0, part)).clamp_(min=0)
        quota = self._part_quotas.index_select(0, part)
        if self._listed.numel():
            # In a shard with a list, other rows rank after the rows that fit into the entries.
            behind = self._part_listed.index_select(0, part)
            rank = torch.where(behind, torch.maximum(rank, quota), rank)
            at = torch.searchsorted(self._listed, slots, out_int32=True)
            at.clamp_(max=self._listed.numel() - 1)
            listed = self._listed.index_select(0, at) == slots
            rank = torch.where(listed, self._listed_ranks.index_select(0, at), rank)
        return rank.float().div_(quota).add_(1).reciprocal_()
