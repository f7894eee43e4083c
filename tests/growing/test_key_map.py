"""Key maps beside a slow one of dictionaries and lists, and with hostile keys."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from fast_and_full import combinations
from hypothesis import example, given
from hypothesis import strategies as st

from placer.errors import BackendError, CheckpointError, PlanMismatchError
from placer.growing import Growing, KeyCounts, KeyMap
from placer.growing.hashes import digest_of, parts_of
from placer.growing.options import SKETCH_CELLS, Eviction, Int
from placer.growing.saved_state import sketch_of

_WINDOW = 16


@dataclass
class _Row:
    key: int
    step: int
    reads: int = 0


def loaded(growing: Growing, state: dict[str, Int], part: int = 0, parts: int = 1) -> KeyMap:
    """A map of those options that goes on from a state."""
    keys = KeyMap(growing, part, parts)
    keys.load_state(state)
    return keys


class SlowKeyMap:
    """What `KeyMap` promises, in the most obvious way."""

    def __init__(self, growing: Growing) -> None:
        self.growing = growing
        self.rows: dict[int, _Row] = {}
        self.free: list[int] = []
        self.step = self.used = self.hand = self.sweep = self.refused = 0

    def row_of(self) -> dict[int, int]:
        return {known.key: row for row, known in self.rows.items()}

    def read(self, keys: Sequence[int], open_steps: int) -> list[int]:
        self.step += 1
        growing, kept = self.growing, self.step - open_steps
        for _ in range(min(self.used, len(keys) + 1024) if growing.ttl else 0):
            self.sweep = self.sweep % self.used + 1
            known = self.rows.get(self.sweep)
            if known is not None and known.step < min(self.step - growing.ttl, kept):
                self._release(self.sweep)
        return [self._read(key, kept) for key in keys]

    def _read(self, key: int, kept: int) -> int:
        row = self.row_of().get(key)
        if row is not None:
            known = self.rows[row]
            known.reads = min(255, known.reads + (known.step != self.step))
            known.step = self.step
            return row
        if not self.free and self.used < self.growing.capacity:
            self.used += 1
            self.free.append(self.used)
        if not self.free:
            self._evict(kept)
        if not self.free:
            self.refused += 1
            return 0
        row = self.free.pop()
        self.rows[row] = _Row(key, self.step)
        return row

    def _evict(self, kept: int) -> None:
        seen: list[tuple[int, int, int]] = []
        for looked_at in range(self.used):
            is_unread = self.growing.eviction == "lfu" and seen and seen[-1][0] == 0
            if is_unread or (seen and looked_at >= _WINDOW):
                break
            self.hand = self.hand % self.used + 1
            known = self.rows[self.hand]
            if known.step < kept:
                reads = known.reads if self.growing.eviction == "lfu" else 0
                seen.append((reads, known.step, self.hand))
                known.reads //= 2
        if seen:
            # The first of those that are equal in both.
            self._release(min(seen, key=lambda one: one[:2])[2])

    def _release(self, row: int) -> None:
        del self.rows[row]
        self.free.append(row)


_KEYS = st.integers(0, 30) | st.sampled_from([-(2**63), 2**63 - 1, -1, 2**40])


@pytest.mark.parametrize("eviction", ["lfu", "lru"])
@given(
    capacity=st.integers(1, 20),
    ttl=st.integers(0, 3),
    open_steps=st.integers(0, 3),
    steps=st.lists(st.lists(_KEYS, max_size=12), max_size=25),
    repeats=st.integers(1, 30),
)
def test_rows_are_those_of_a_slow_map(
    eviction: Eviction,
    capacity: int,
    ttl: int,
    open_steps: int,
    steps: list[list[int]],
    repeats: int,
) -> None:
    growing = Growing(capacity, eviction=eviction, ttl=ttl)
    fast, slow = KeyMap(growing), SlowKeyMap(growing)
    for keys in steps * repeats:
        rows = fast.read(np.array(keys, np.int64), open_steps).rows
        assert rows.tolist() == slow.read(keys, open_steps)
    live, rows = fast.live()
    assert dict(zip(live.tolist(), rows.tolist(), strict=True)) == slow.row_of()
    assert fast.find(live).tolist() == rows.tolist()
    counts = fast.counts
    assert counts.admitted - counts.evicted - counts.expired == len(slow.rows)
    assert counts.refused == slow.refused
    lookups = repeats * sum(map(len, steps))
    assert counts.hits + counts.misses == lookups
    assert counts.hit_rate == counts.hits / (lookups or 1)


def test_a_key_gets_a_row_when_it_is_read_for_the_nth_time() -> None:
    keys = KeyMap(Growing(1000, admission=3))
    assert keys.read(np.array([7, 8, 7])).rows.tolist() == [0, 0, 0]
    assert keys.read(np.array([7, 8])).rows.tolist() == [1, 0]
    assert keys.read(np.array([8])).rows.tolist() == [2]
    assert keys.counts.waiting == 4


def test_what_is_read_once_does_not_push_out_what_is_read_often() -> None:
    often, keys = np.arange(50), KeyMap(Growing(100))
    for step in range(200):
        keys.read(np.concatenate([often, 1000 + 40 * step + np.arange(40)]))
    assert (keys.find(often) > 0).all()
    recent = KeyMap(Growing(100, eviction="lru"))
    for step in range(200):
        recent.read(often if step == 0 else 1000 + 40 * step + np.arange(40))
    assert (recent.find(often) == 0).all()


def test_a_look_halves_reads_and_every_step_adds_one() -> None:
    """By hand: keys 1, 2 and 3 have one read each, and 3 is the oldest."""
    keys = KeyMap(Growing(3, eviction="lfu"))
    for read, rows in (([1, 2, 3], [1, 2, 3]), ([3, 3], [3, 3]), ([1, 2], [1, 2])):
        assert keys.read(np.array(read), 0).rows.tolist() == rows
    assert keys.read(np.array([4]), 0).rows.tolist() == [3]  # All have one, and then none.
    assert keys.read(np.array([5]), 0).rows.tolist() == [1]  # The first that has none.
    assert keys.live()[0].tolist() == [5, 2, 4]


def test_keys_that_fall_out_of_use_go_though_they_were_read_often() -> None:
    keys = KeyMap(Growing(100))
    for _ in range(50):
        keys.read(np.arange(100))
    for step in range(1000):
        keys.read(1000 + np.arange(100) + 10 * step)
    assert (keys.find(np.arange(100)) == 0).all()


def _same_tag(count: int) -> Int:
    """Keys whose search begins at one slot, where the bits of their hashes are alike, too."""
    hashes = (0xABCDEF12 << 32) + np.arange(count, dtype=np.uint64)
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):  # `mix`, backwards.
        hashes = (hashes ^ (hashes >> np.uint64(33))) * np.uint64(pow(factor, -1, 2**64))
    return (hashes ^ (hashes >> np.uint64(33))).view(np.int64)


@pytest.mark.parametrize("kind", ["same tag", "any", "one after the other"])
@pytest.mark.parametrize(("capacity", "eviction"), [(5, "lfu"), (130, "lru"), (400, "lfu")])
def test_large_batches_are_read_key_by_key(kind: str, capacity: int, eviction: Eviction) -> None:
    """Keys of one block change hands within it, and are read again."""
    random = np.random.default_rng(capacity)
    pool = {
        "same tag": _same_tag(600),
        "any": np.append(random.integers(-(2**63), 2**63 - 1, 597), [0, 2**63 - 1, -(2**63)]),
        "one after the other": np.arange(600) - 300,
    }[kind]
    growing = Growing(capacity, eviction=eviction, ttl=3)
    fast, slow = KeyMap(growing), SlowKeyMap(growing)
    for size in (300, 128, 129, 0, 1, 400, 300, 257):
        keys = pool[(pool.size * random.random(size) ** 2).astype(int)]
        assert fast.read(keys, 0).rows.tolist() == slow.read(keys.tolist(), 0)
        assert fast.find(pool).tolist() == [slow.row_of().get(key, 0) for key in pool.tolist()]
    assert fast.counts.evicted > 0
    again = loaded(growing, fast.state())
    assert again.find(pool).tolist() == fast.find(pool).tolist()


_MEMORY = """
import sys
import numpy as np
from placer.growing import Growing, KeyMap
def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
how = Growing(8_000_000)
KeyMap(Growing(9)).read(np.arange(70_000))  # What compiling takes is none of it.
before, keys = held(), KeyMap(how)
for first in range(0, 9_000_000, 65_536):
    keys.read(np.arange(first, first + 65_536) * 1_000_003**2)
print((held() - before) / how.nbytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells what a process has")
def test_a_process_takes_what_the_options_say() -> None:
    printed = subprocess.check_output([sys.executable, "-c", _MEMORY], text=True)
    assert float(printed) == pytest.approx(1, abs=0.05)


@given(
    seed=st.integers(0, 999),
    admission=st.integers(1, 3),
    eviction=st.sampled_from(["lfu", "lru"]),
    saved=st.integers(1, 30),  # After a few steps there are free rows.
)
def test_a_saved_map_goes_on_as_it_would_have(
    seed: int, admission: int, eviction: Eviction, saved: int
) -> None:
    random = np.random.default_rng(seed)
    steps = [random.integers(0, 90, random.integers(0, 60)) for _ in range(60)]
    growing = Growing(37, admission, eviction, ttl=9)
    one, other = KeyMap(growing), KeyMap(growing)
    for keys in steps[:saved]:
        one.read(keys)
    other.read(np.arange(500))  # What it had before is gone.
    other.load_state(one.state())
    for keys in steps[saved:]:
        mine, theirs = one.read(keys), other.read(keys)
        assert np.array_equal(mine.rows, theirs.rows)
        assert np.array_equal(mine.reused, theirs.reused)
    assert one.counts == other.counts


@given(
    seed=st.integers(0, 999),
    admission=st.integers(1, 4),
    ahead=st.integers(0, 2),
    is_given_up=st.booleans(),
)
@example(seed=3, admission=2, ahead=2, is_given_up=True)  # Step 28 gives rows later than it reads.
def test_steps_that_come_again_find_what_they_got(
    seed: int, admission: int, ahead: int, is_given_up: bool
) -> None:
    """Also where the first lookups of a key came before it got its row."""
    random = np.random.default_rng(seed)
    steps = [random.zipf(1.3, random.integers(0, 80)).clip(max=99) for _ in range(60)]
    keys = KeyMap(Growing(37, admission, ttl=9))
    given = [keys.read(step, 2).rows for step in steps[:30]]
    whole = loaded(keys.growing, keys.state())
    if is_given_up:
        keys.give_up(ahead)
    else:
        keys = loaded(keys.growing, keys.state(ahead))
    for number in range(30 - ahead, 30):
        step = keys.read(steps[number], 2)
        assert step.rows.tolist() == given[number].tolist()
        assert not step.reused.size
        if number == 28:  # Saved once more, when one step has come again and another has not.
            keys = loaded(keys.growing, keys.state(1))
            assert keys.read(steps[number], 2).rows.tolist() == given[number].tolist()
    for step in steps[30:]:
        assert keys.read(step, 2).rows.tolist() == whole.read(step, 2).rows.tolist()
    assert keys.counts == whole.counts


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (3, 1), (2, 3)])
@pytest.mark.parametrize("repeats", [True, False])
def test_maps_know_whether_the_steps_come_again_that_others_have_saved(
    before: int, after: int, repeats: bool
) -> None:
    """The same number of keys with the same sum are other keys."""
    growing, keys = Growing(90), np.array([4, 5, 9, 90])
    read = keys if repeats else np.array([3, 6, 9, 90])
    saved = [KeyMap(growing, part, before) for part in range(before)]
    for part, own in enumerate(saved):
        own.read(keys[parts_of(keys, before) == part], digest=digest_of(keys))
    states = [own.state(ahead=1) for own in saved]
    joined = {name: np.concatenate([state[name] for state in states]) for name in states[0]}
    admitted = 0
    for part in range(after):
        own = loaded(growing, joined, part, after)
        step = own.read(read[parts_of(read, after) == part], digest=digest_of(read))
        assert step.rows.all()
        admitted += own.counts.admitted
    assert admitted == (4 if repeats else 6)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 1), (3, 4), (4, 2)])
def test_keys_that_wait_are_not_counted_anew_by_other_maps(before: int, after: int) -> None:
    growing, keys = Growing(20_000, admission=3), np.arange(300) * 2**40 - 2**45
    maps = [KeyMap(growing, part, before) for part in range(before)]
    for _ in range(2):
        assert not _read(maps, keys).any()
    state = _joined(maps)
    others = [loaded(growing, state, part, after) for part in range(after)]
    assert not _read(others, keys + 1).any()  # Others are not taken for them.
    assert (_read(others, keys) > 0).mean() > 0.95  # Some have a cell that was halved.


PATTERNS = {
    "consecutive": np.arange(200_000),
    "from far on": 2**40 + np.arange(200_000),
    "negative": -np.arange(200_000),
    "multiples of 8": 8 * np.arange(200_000),
    "multiples of 1,000": 1000 * np.arange(200_000),
    "one residue of 7": 3 + 7 * np.arange(200_000),
    "high bits alone": np.arange(200_000) << 45,
    "two fields": (np.arange(2000)[:, None] * 2**32 + np.arange(100)).ravel(),
}


@combinations("pattern, parts", PATTERNS, [2, 3, 4, 7, 8, 16])
def test_parts_are_even_whatever_pattern_keys_have(pattern: str, parts: int) -> None:
    sizes = np.bincount(parts_of(PATTERNS[pattern], parts), minlength=parts)
    assert sizes.size == parts
    assert sizes.max() < 1.03 * sizes.mean()


def test_keys_of_a_part_are_found_as_quickly_as_others() -> None:
    """The bits that choose a part are not those that choose a slot: slots would be crowded."""
    from placer.growing.kernels import mix

    slots = Growing(50_000).slot_count
    keys = np.arange(400_000)
    own = keys[parts_of(keys, 8) == 3]
    homes = np.array([(int(mix(key)) >> 32) * slots >> 32 for key in own])
    assert np.bincount(homes * 16 // slots, minlength=16).max() < 1.1 * own.size / 16


def _joined(maps: Sequence[KeyMap]) -> dict[str, Int]:
    states = [own.state() for own in maps]
    return {name: np.concatenate([state[name] for state in states]) for name in KeyMap.STATE}


def _read(maps: Sequence[KeyMap], keys: Int) -> Int:
    rows, parts = np.empty(keys.size, np.int64), parts_of(keys, len(maps))
    for part, own in enumerate(maps):
        rows[parts == part] = own.read(keys[parts == part]).rows
    return rows


def _rows_of(maps: Sequence[KeyMap]) -> dict[int, int]:
    live = [np.stack(own.live()).tolist() for own in maps]
    rows = {key: row for keys, rows in live for key, row in zip(keys, rows, strict=True)}
    assert len(set(rows.values())) == len(rows)
    return rows


@given(
    seed=st.integers(0, 999),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    admission=st.integers(1, 2),
    drawn=st.integers(20, 200),
)
def test_maps_of_parts_go_on_as_one_or_as_many(
    seed: int, before: int, after: int, admission: int, drawn: int
) -> None:
    """No key loses its row when other maps go on, and no row is lost or had twice."""
    random, growing = np.random.default_rng(seed), Growing(97, admission, ttl=5)
    maps = [KeyMap(growing, part, before) for part in range(before)]
    for _ in range(12):
        _read(maps, random.integers(0, drawn, 30))
    state, rows = _joined(maps), _rows_of(maps)
    same = [loaded(growing, state, part, before) for part in range(before)]
    others = [loaded(growing, state, part, after) for part in range(after)]
    assert _rows_of(same) == _rows_of(others) == rows
    keys = np.array(list(rows), np.int64)
    parts = parts_of(keys, after)
    for part, own in enumerate(others):
        mine = keys[parts == part]
        assert own.find(mine).tolist() == [rows[key] for key in mine.tolist()]
    total = [KeyCounts(*np.sum([own.counts for own in each], 0)) for each in (maps, same, others)]
    assert total[0] == total[1] == total[2]
    for _ in range(12):
        keys = random.integers(0, drawn, 30)
        assert np.array_equal(_read(maps, keys), _read(same, keys))
        _read(others, keys)
    for _ in range(6):  # All rows can be had: keys of old ones are gone after `ttl` steps.
        _read(others, 10_000 + np.arange(600))
        _read(others, 10_000 + np.arange(600))
    assert sorted(_rows_of(others).values()) == list(range(1, 98))


def test_only_rows_that_there_are_take_keys_and_each_takes_one() -> None:
    own = KeyMap(Growing(4))
    listed = np.array([7, 8, 9])
    own.check(listed, np.array([1, 4, 0]))
    own.check(listed, np.zeros(3, np.int64))
    for rows in ([1, 5, 0], [-1, 2, 0], [2, 2, 0], [1, 2]):
        with pytest.raises(CheckpointError, match="capacity 4 are damaged"):
            own.check(listed, np.array(rows))
    for keys in ([7, 8, 7], [7.0, 8.0, 9.0]):
        with pytest.raises(CheckpointError, match="capacity 4 are damaged"):
            own.check(np.array(keys), np.array([1, 2, 0]))


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (5, 4), (4, 2)])
@pytest.mark.parametrize("maps", [1, 2])
def test_counts_of_a_resized_sketch_are_never_too_low(before: int, after: int, maps: int) -> None:
    was, how = (Growing(blocks * SKETCH_CELLS, admission=2) for blocks in (before, after))
    held = [block for part in range(maps) for block in was.sketch_blocks(part, maps)]
    saved = np.random.default_rng(0).integers(0, 255, (len(held), 2, 3), np.uint8)
    parts = [(part, 2, how.sketch_blocks(part, 2)) for part in range(2)]
    for part, count, blocks in [(0, 1, how.sketch_blocks()), *parts]:
        found = sketch_of(saved, was, maps, how, part, count)
        assert len(found) == len(blocks)
        for number, block in enumerate(blocks):
            # Old blocks with any of its keys: blocks are equal ranges of the keys' hashes.
            alike = [
                own
                for own, old in zip(saved, held, strict=True)
                if old * after < (block + 1) * before and block * before < (old + 1) * after
            ]
            assert np.array_equal(found[number], np.max(alike, axis=0))


@pytest.mark.parametrize("capacity", [4, 5])
def test_a_map_without_a_row_is_refused(capacity: int) -> None:
    keys = KeyMap(Growing(capacity))
    own = np.arange(100)[parts_of(np.arange(100), 2) == 0][:4]
    keys.read(own)  # A fifth row would be rank 0's, too: rows 1, 3 and 5 are, if they are free.
    other = KeyMap(Growing(capacity), 1, 2)
    with pytest.raises(CheckpointError, match="no row for the keys of rank 1 of 2"):
        other.load_state(keys.state())
    with pytest.raises(PlanMismatchError, match="capacity 1 is less than the 2 ranks"):
        KeyMap(Growing(1), 0, 2)


@pytest.mark.parametrize("other", [Growing(9), Growing(10, admission=2)])
def test_a_state_of_another_capacity_or_admission_is_refused(other: Growing) -> None:
    keys, fits = KeyMap(other), KeyMap(Growing(10))
    fits.read(np.arange(10))
    keys.read(np.arange(5))
    before = keys.state()
    with pytest.raises(CheckpointError, match=f"capacity {other.capacity} and admission"):
        keys.load_state(fits.state())
    assert all(np.array_equal(keys.state()[name], before[name]) for name in KeyMap.STATE)


def test_a_larger_map_goes_on_with_the_keys_of_a_smaller_one() -> None:
    small = KeyMap(Growing(10))
    small.read(np.arange(10))
    large = loaded(Growing(20), small.state())
    assert large.read(np.arange(15)).rows.tolist() == list(range(1, 16))


def test_a_damaged_state_is_refused() -> None:
    keys = KeyMap(Growing(10, admission=2))
    keys.read(np.arange(5))
    for name in KeyMap.STATE:
        for damaged in (keys.state()[name][:-1], np.zeros(3, np.int64)):
            with pytest.raises(CheckpointError, match="saved keys"):
                keys.load_state({**keys.state(), name: damaged})


def test_a_state_whose_numbers_lead_nowhere_is_refused() -> None:
    keys = KeyMap(Growing(10, ttl=1))
    keys.read(np.arange(5))
    for _ in range(3):
        keys.read(np.array([7]))
    state = keys.state()
    counts, rows = state["counts"], state["rows"].copy()
    rows[1:, 0] = 2**40  # Keys, and the links of free rows.
    twice, beyond = state["rows"].copy(), state["rows"].copy()
    twice[:, 2], beyond[0, 2] = 1, 11
    damages = [{"rows": one} for one in (rows, twice, beyond)]
    for damaged in ({"counts": np.full_like(counts, 2**40)}, *damages):
        with pytest.raises(CheckpointError, match="saved keys"):
            keys.load_state({**state, **damaged})


def test_a_map_whose_last_row_is_free_goes_on() -> None:
    one = KeyMap(Growing(2, ttl=1))
    for key in (1, 2, 1, 1, 1):
        one.read(np.array([key]))
    assert loaded(one.growing, one.state()).read(np.array([1, 3])).rows.tolist() == [1, 2]


def test_keys_that_wait_are_held_for_the_open_steps_alone() -> None:
    keys = KeyMap(Growing(100, admission=3))
    for step in range(70):
        keys.read(np.arange(1000) + 1000 * step, open_steps=2)
    assert sum(one.nbytes for one in keys._without) <= 3 * 8 * 1000


def test_memory_is_what_the_options_say() -> None:
    for growing in (Growing(10_000), Growing(10_000, admission=2), Growing(3)):
        keys = KeyMap(growing)
        arrays = (keys._slots, keys._rows, keys._sketch if growing.admission > 1 else None)
        held = sum(array.nbytes for array in arrays if array is not None)
        assert held == growing.nbytes


@pytest.mark.parametrize(("name", "value"), [
    ("capacity", 0), ("capacity", 2**31), ("admission", 0), ("admission", 256), ("ttl", -1),
    ("eviction", "fifo"),
])  # fmt: skip
def test_options_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(PlanMismatchError, match=f"{name} {value!r}"):
        Growing(**{"capacity": 5, name: value})  # type: ignore[arg-type]


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("placer.growing.kernels", raising=False)
    monkeypatch.setitem(sys.modules, "placer.growing.kernels", None)
    with pytest.raises(BackendError, match=r"embedding-placer\[cpu\]"):
        KeyMap(Growing(5))
