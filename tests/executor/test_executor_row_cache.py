"""The pool against a directory of dicts, and against what a cache is for."""

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch
from executor_cases import DEVICE, counted_host_reads
from fast_and_full import examples
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from placer.executor.memory.layout import SlotRange
from placer.executor.memory.row_cache import (
    DECAY,
    EXPECTED_LOOKUPS,
    Policy,
    RowCache,
    RowCacheStats,
)

CPU = torch.device("cpu")
SENTINEL = torch.iinfo(torch.int64).max  # No row has this slot.


def ints(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


@dataclass
class PlainPool:
    """The same rules one row at a time; an entry is an index into lists."""

    parts: list[SlotRange]
    policy: Policy
    slot: list[int | None] = field(init=False)
    used: list[int] = field(init=False)
    priority: list[np.float32] = field(init=False)
    dirty: set[int] = field(default_factory=set)
    stats: RowCacheStats = field(default_factory=RowCacheStats)

    def __post_init__(self) -> None:
        entries = sum(part.staging_rows + part.cache_rows for part in self.parts)
        warm = [
            slot for part in self.parts for slot in range(part.start, part.stop)[: part.cache_rows]
        ]
        self.slot = [*warm, *[None] * (entries - len(warm))]
        self.used = [-1] * entries
        self.priority = [self.first_priority(slot) for slot in warm]
        self.priority += [np.float32(0)] * (entries - len(warm))

    def part_of(self, slot: int) -> SlotRange | None:
        return next((part for part in self.parts if part.start <= slot < part.stop), None)

    def rank_priority(self, slot: int) -> np.float32:
        part = self.part_of(slot)
        quota = np.float32(max(part.cache_rows, 1))
        return np.float32(1) / (np.float32(1) + np.float32(slot - part.start) / quota)

    def first_priority(self, slot: int) -> np.float32:
        priority = self.rank_priority(slot)
        if self.policy == "rank":
            return priority
        part = self.part_of(slot)
        expected = priority > 0.5 and part is not None and part.is_ordered
        return np.float32(EXPECTED_LOOKUPS) * priority if expected else np.float32(0)

    def directory(self) -> dict[int, int]:
        return {slot: entry for entry, slot in enumerate(self.slot) if slot is not None}

    def eviction_order(self, oldest_open: int) -> list[int]:
        def key(entry: int) -> tuple[int, float, int]:
            slot = self.slot[entry]
            if slot is None:
                return 0, 0, entry
            part = self.part_of(slot)
            if not part.cache_rows:
                return 1, self.used[entry], entry
            return 2, float(self.priority[entry]), entry

        closed = (
            entry
            for entry, slot in enumerate(self.slot)
            if slot is None or self.used[entry] < oldest_open
        )
        return sorted(closed, key=key)

    def resolve(
        self, counts: dict[int, int], ticket: int, oldest_open: int
    ) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
        """Entry of each pooled slot, and entry → (incoming, outgoing or −1)."""
        counts = {slot: count for slot, count in counts.items() if self.part_of(slot)}
        before = self.directory()
        if self.policy == "lfu":
            self.priority = [priority * np.float32(DECAY) for priority in self.priority]
        for slot in counts.keys() & before.keys():
            self.used[before[slot]] = ticket
            if self.policy == "lfu":
                self.priority[before[slot]] += np.float32(counts[slot])
        taken = self.eviction_order(oldest_open)[: len(counts.keys() - before.keys())]
        held = {entry: math.inf if (old := self.slot[entry]) is None else old for entry in taken}
        free = iter(sorted(taken, key=lambda entry: held[entry]))
        entries, moves = {}, {}
        for slot in sorted(counts):
            entry = before.get(slot)
            if entry is None and (entry := next(free, None)) is not None:
                old = self.slot[entry]
                moves[entry] = slot, -1 if old is None or entry not in self.dirty else old
                self.dirty.discard(entry)
                self.slot[entry], self.used[entry] = slot, ticket
                read = np.float32(counts[slot] if self.policy == "lfu" else 0)
                self.priority[entry] = self.first_priority(slot) + read
            entries[slot] = -1 if entry is None else entry
        hits = counts.keys() & before.keys()
        self.stats += RowCacheStats(
            lookups=sum(counts.values()),
            hit_lookups=sum(counts[slot] for slot in hits),
            rows=len(counts),
            hit_rows=len(hits),
            in_place_rows=sum(entry < 0 for entry in entries.values()),
            written_back_rows=sum(old >= 0 for _, old in moves.values()),
        )
        return entries, moves


@dataclass(frozen=True)
class Trial:
    """A pool, and the rows that steps read, update and leave open."""

    parts: list[SlotRange]
    home: int
    policy: Policy
    window: int
    steps: list[dict[int, int]]
    updates: list[bool]

    @property
    def stop(self) -> int:
        return self.parts[-1].stop if self.parts else self.home

    def oldest_open(self, ticket: int) -> int:
        return max(0, ticket - self.window + 1)


@st.composite
def trials(draw: st.DrawFn) -> Trial:
    # Slots from 2³¹ on do not fit the narrow directory.
    home = draw(st.sampled_from([0, 3, 2**31 - 4, 2**33]))
    parts: list[SlotRange] = []
    for cached in sorted(draw(st.lists(st.booleans(), max_size=4))):
        start = parts[-1].stop if parts else home
        rows = draw(st.integers(0, 7))
        staging = draw(st.integers(0, 3))
        part = SlotRange(
            start,
            start + rows,
            staging,
            draw(st.integers(1, 4)) if cached else 0,
            is_ordered=draw(st.booleans()),
        )
        parts.append(part)
    stop = parts[-1].stop if parts else home
    # Some rows around are not pooled.
    slots = st.integers(max(home - 2, 0), stop + 2)
    step = st.dictionaries(slots, st.integers(1, 5), max_size=8)
    steps = draw(st.lists(step, max_size=12))
    updates = draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps)))
    policy: Policy = draw(st.sampled_from(["lfu", "rank"]))
    return Trial(parts, home, policy, draw(st.integers(1, 2)), steps, updates)


def padded(step: dict[int, int]) -> tuple[Tensor, Tensor]:
    """Slots in order and their counts, with more of both behind."""
    order = sorted(step)
    return ints([*order, SENTINEL, SENTINEL]), ints([*(step[slot] for slot in order), 7, 0])


ONE, TWO = [SlotRange(0, 4, 1, 0)], [SlotRange(0, 9, 0, 2), SlotRange(9, 30, 0, 6)]


# A row that was written back comes and goes unchanged; shares of caches count, not ranks alone.
@example(Trial(ONE, 0, "lfu", 1, [{2: 1}, {3: 1}, {2: 1}, {1: 1}], [True, False, False, False]))
@example(Trial(TWO, 0, "rank", 3, [{20: 1}, {21: 1}, {22: 1}], [False] * 3))
# The hottest row of a plan comes back with the lookups that are expected of it.
@example(
    Trial([SlotRange(0, 9, 0, 2)], 0, "lfu", 1, [{1: 40}, {2: 1}, {0: 40}, {2: 40}], [False] * 4)
)
@given(trials())
@examples(300)
def test_entries_moves_and_counts_are_those_of_a_directory_of_dicts(trial: Trial) -> None:
    pool = RowCache(trial.parts, trial.home, CPU, trial.policy)
    plain = PlainPool(trial.parts, trial.policy)
    assert pool.entries == len(plain.slot)
    for ticket, (step, updated) in enumerate(zip(trial.steps, trial.updates, strict=True)):
        slots, counts = padded(step)
        own, own_moves = pool.resolve(slots, counts, ticket, trial.oldest_open(ticket))
        entries, moves = plain.resolve(step, ticket, trial.oldest_open(ticket))
        assert own.tolist() == [entries.get(slot, -1) for slot in slots.tolist()]
        moved = own_moves.entries >= 0
        named = (own_moves.entries, own_moves.incoming, own_moves.outgoing)
        columns = [column[moved].tolist() for column in named]
        assert {entry: pair for entry, *pair in zip(*columns, strict=True)} == {
            entry: list(pair) for entry, pair in moves.items()
        }
        assert own_moves.outgoing[~moved].eq(-1).all()
        assert moved.tolist() == [j < int(own_moves.count) for j in range(moved.numel())]
        if updated:
            pool.mark_dirty(own)
            plain.dirty |= {entry for entry in entries.values() if entry >= 0}
        everywhere = range(max(trial.home - 3, 0), trial.stop + 3)
        held = plain.directory()
        assert pool.find(ints(everywhere)).tolist() == [held.get(slot, -1) for slot in everywhere]
    assert pool.stats() == plain.stats


@given(trials())
@examples(300)
def test_every_step_reads_what_the_last_one_wrote(trial: Trial) -> None:
    """Rows are moved as told, and steps update them at the places that they were given."""
    pool = RowCache(trial.parts, trial.home, CPU, trial.policy)
    hbm: dict[int, int] = dict.fromkeys(range(pool.entries), 0)
    dram: dict[int, int] = dict.fromkeys(range(trial.home, trial.stop), 0)
    truth = dict(dram)
    open_steps: list[tuple[dict[int, int], bool]] = []
    late: list[tuple[int, int, int]] = []
    written: list[int] = []

    def exchange(moves: list[tuple[int, int, int]]) -> None:
        for entry, incoming, outgoing in moves:
            if outgoing >= 0:
                dram[outgoing] = hbm[entry]
                written.append(outgoing)
            hbm[entry] = dram[incoming]

    def train() -> None:
        """The oldest open step reads and updates its rows."""
        entries, updated = open_steps.pop(0)
        for slot, entry in entries.items():
            memory, place = (hbm, entry) if entry >= 0 else (dram, slot)
            assert memory[place] == truth[slot]
            if updated:
                memory[place] += 1
                truth[slot] += 1
        exchange(late)
        late.clear()

    for ticket, (step, updated) in enumerate(zip(trial.steps, trial.updates, strict=True)):
        if len(open_steps) == trial.window:
            train()
        slots, counts = padded(step)
        protected = {entry for held, _ in open_steps for entry in held.values() if entry >= 0}
        found, own = pool.resolve(slots, counts, ticket, ticket - len(open_steps))
        if updated:
            pool.mark_dirty(found)
        named = (own.entries, own.incoming, own.outgoing)
        moves = [
            (entry, incoming, outgoing)
            for entry, incoming, outgoing in zip(*(item.tolist() for item in named), strict=True)
            if entry >= 0
        ]
        assert not protected & {entry for entry, _, _ in moves}
        entries = {
            slot: entry
            for slot, entry in zip(slots.tolist(), found.tolist(), strict=True)
            if slot in dram
        }
        kept = [entry for entry in entries.values() if entry >= 0]
        assert len(set(kept)) == len(kept)
        if -1 in entries.values():
            assert protected | set(kept) == set(range(pool.entries))
        # What an open step updates in place is read after it.
        in_place = any(entry < 0 for held, _ in open_steps for entry in held.values())
        if in_place:
            late.extend(moves)
        else:
            exchange(moves)
        open_steps.append((entries, updated))
    while open_steps:
        train()
    assert len(written) == pool.stats().written_back_rows
    # Whoever asks between steps finds the newest copy of each row.
    everywhere = ints(truth)
    for slot, entry in zip(truth, pool.find(everywhere).tolist(), strict=True):
        assert (hbm[entry] if entry >= 0 else dram[slot]) == truth[slot]


def test_what_is_not_pooled_or_not_there_has_no_entry() -> None:
    pool = RowCache([SlotRange(4, 8, 0, 4)], 4, CPU)
    asked = ints([SENTINEL, -1, 0, 3, 8, 5])
    assert pool.find(asked).tolist() == [-1, -1, -1, -1, -1, 1]
    assert pool.find(asked[1:].int().view(1, 5)).tolist() == [[-1, -1, -1, -1, 1]]
    assert pool.find(ints([])).tolist() == []
    nothing, _ = RowCache([], 4, CPU).resolve(asked, torch.ones_like(asked), 0, 0)
    assert nothing.tolist() == [-1] * 6


def test_rates_of_a_pool_that_nobody_asked_are_unknown() -> None:
    pool = RowCache([SlotRange(0, 8, 1, 1)], 0, CPU)
    empty = pool.stats()
    assert empty.hit_rate is empty.in_place_share is None
    pool.resolve(ints([0, 4, 7]), ints([6, 1, 1]), 0, 0)
    stats = pool.stats()
    assert astuple(stats) == (8, 6, 3, 1, 1, 0)
    assert stats.hit_rate == 0.75
    assert stats.in_place_share == pytest.approx(1 / 3)
    assert astuple(stats + stats) == (16, 12, 6, 2, 2, 0)
    pool.reset_stats()
    assert pool.stats() == RowCacheStats()


@pytest.mark.parametrize("policy", ["lfu", "rank"])
def test_what_the_triton_backend_calls_waits_for_no_device(policy: Policy) -> None:
    pool = RowCache([SlotRange(2, 9, 2, 0), SlotRange(9, 20, 1, 3)], 2, DEVICE, policy)
    slots = ints([1, 4, 9, 12, 13, 14, SENTINEL]).to(DEVICE)
    counts = ints([1, 2, 3, 4, 5, 6, 0]).to(DEVICE)
    found, _ = pool.resolve(slots, counts, 0, 0)
    with counted_host_reads() as waits:
        pool.fade()
        pool.first_priority(slots, counts)
        entries = pool.find(slots)
        pool.reset_stats()
    assert waits == []
    assert torch.equal(entries, found)


RANKS, CACHE, LOOKUPS, STEPS = 40_000, 1_200, 1_000, 200


def zipf_steps(seed: int) -> npt.NDArray[np.int64]:
    """Ranks that each step looks up, drawn with an exponent of 1.05."""
    weights = np.arange(1, RANKS + 1) ** -1.05
    draws = np.random.default_rng(seed).random((STEPS, LOOKUPS))
    cdf = np.cumsum(weights) / weights.sum()
    return np.minimum(np.searchsorted(cdf, draws), RANKS - 1)


def hit_rates(policy: Policy, steps: npt.NDArray[np.int64], is_ordered: bool = True) -> list[float]:
    """Hit rate of each step of a cache, whose rows were warmed by their number."""
    parts = [SlotRange(0, RANKS, 0, CACHE, is_ordered=is_ordered)]
    pool = RowCache(parts, 0, CPU, policy)
    rates = []
    for ticket, step in enumerate(steps):
        slots, counts = np.unique(step, return_counts=True)
        pool.reset_stats()
        pool.resolve(torch.from_numpy(slots), torch.from_numpy(counts), ticket, ticket)
        rates.append(pool.stats().hit_rate or 0.0)
    return rates


def test_hit_rates_are_near_the_best_fixed_choice_of_rows() -> None:
    steps = zipf_steps(seed=1)
    best = np.mean(steps < CACHE)
    assert np.mean(hit_rates("rank", steps)) > 0.97 * best
    assert np.mean(hit_rates("lfu", steps)) > 0.95 * best
    # Also where the rows that it starts with are the coldest, if no plan counts on them.
    backwards = RANKS - 1 - steps
    assert np.mean(hit_rates("lfu", backwards, is_ordered=False)[STEPS // 2 :]) > 0.95 * best
    assert np.mean(hit_rates("lfu", backwards)[STEPS // 2 :]) > 0.85 * best


def test_counts_follow_a_drift_and_ranks_do_not() -> None:
    steps = zipf_steps(seed=2)
    half = STEPS // 2
    # Half of the hottest rows change places with rows that the plan holds cold.
    generator = np.random.default_rng(3)
    hot = generator.permutation(CACHE)[: CACHE // 2]
    cold = CACHE + generator.permutation(RANKS - CACHE)[: CACHE // 2]
    row_of = np.arange(RANKS)
    row_of[hot], row_of[cold] = cold, hot
    best = np.mean(steps[-half // 2 :] < CACHE)
    steps[half:] = row_of[steps[half:]]
    assert np.mean(hit_rates("lfu", steps)[-half // 2 :]) > 0.9 * best
    assert np.mean(hit_rates("rank", steps)[-half // 2 :]) < 0.89 * best
