"""Key maps that a device has too, in Triton's interpreter: beside the host's, to the bit."""

import copy
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from fast_and_full import combinations, fewer
from torch import Tensor

from placer.executor import device_key_map, device_keys
from placer.executor.backends import make_backend
from placer.executor.backends.triton.triton_backend import TritonBackend
from placer.executor.device_keys import DeviceKeys
from placer.executor.growing_keys import GrowingKeys, KeyStep
from placer.executor.id_order import IdOrder
from placer.executor.lookups.bag_batch import BagBatch
from placer.executor.lookups.batch_reads import feature_reads
from placer.growing import Growing
from placer.growing.hashes import parts_of
from placer.growing.options import Eviction
from placer.tables import Feature, Table

SPREAD = 1_000_003 * 1_000_003
Begun = list[tuple[str, list[int], list[int]]]


class _HostKeys(GrowingKeys):
    """Notes which rows begin again."""

    begun: Begun
    steps: deque[KeyStep | None]

    def _begin_again(self, again: Mapping[str, tuple[Tensor, np.ndarray]], order: object) -> None:
        for name, (rows, keys) in again.items():
            self.begun.append((name, rows.tolist(), keys.tolist()))


class _BothKeys(_HostKeys, DeviceKeys):
    pass


def _no_order() -> IdOrder:
    return cast(IdOrder, None)


class _Maps:
    """The same tables, with maps on the host and with a copy on the device."""

    def __init__(self, *growing: Growing) -> None:
        self.tables = {
            name: Table(name, how.rows, 8, features=tuple(map(Feature, features)))
            for name, how, features in zip("ab", growing, (["a", "c"], ["b"]), strict=False)
        }
        self.fixed = Table("f", 10, 8, features=(Feature("f"),))
        self.features = feature_reads([*self.tables.values(), self.fixed], {})
        backend = make_backend("triton", torch.device("cpu"))
        assert isinstance(backend, TritonBackend)
        arguments = dict(zip(self.tables, growing, strict=True)), self.tables, None
        self.both = _BothKeys(*arguments, torch.device("cpu"), backend.run), _HostKeys(*arguments)
        for keys_of in self.both:
            keys_of.steps = deque()
        copy = self.both[0]._copy
        held = copy.slots, copy.keys, copy.last, copy.reads
        assert sum(one.nbytes for one in held) == sum(how.copy_nbytes for how in growing)

    def step(self, keys: list[np.ndarray], training: bool = True) -> list[int]:
        """Look up the keys of each feature, and compare all that comes of it."""
        counts = np.cumsum([0, *map(len, keys)])
        ids = torch.from_numpy(np.concatenate(keys).astype(np.int64))
        batch = BagBatch(ids, torch.from_numpy(counts), 1)
        rows: list[list[int]] = []
        for keys_of in self.both:
            keys_of.begun = []
            step = keys_of.open_step() if training else None
            open_before = None if step is None else step.open_before
            found = keys_of.rows_of(batch, self.features, open_before, _no_order)
            keys_of.found(step)
            keys_of.steps.append(step)
            rows.append(found.ids.tolist())
        assert rows[0] == rows[1]
        assert self.both[0].begun == self.both[1].begun
        assert self.both[0].counts() == self.both[1].counts()
        for own in map(self.both[0]._map, self.tables):
            assert np.array_equal(own._copy.slots.numpy().view(np.uint32), own._slots)
        return rows[0]

    def assert_alike(self) -> None:
        for keys_of in self.both:
            for step in keys_of.steps:
                keys_of.begin(step)
        for name, values in self.both[0].state().items():
            assert torch.equal(values, self.both[1].state()[name]), name


def _drawn(random: np.random.Generator, counts: list[int], spread: int) -> list[np.ndarray]:
    drawn = [(spread * random.random(count) ** 2).astype(np.int64) * SPREAD for count in counts]
    return [*drawn, np.arange(5)]


@combinations(
    "eviction, admission, ttl, rows_at_a_time",
    ("lfu", "lru"), (1, 2), (0, 2), ((1024, 32), (24, 1), (1, 1)),
)  # fmt: skip
def test_rows_and_evictions_are_those_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
    eviction: Eviction,
    admission: int,
    ttl: int,
    rows_at_a_time: tuple[int, int],
) -> None:
    """Full tables, of which many rows are read in the very step that takes others back."""
    monkeypatch.setattr(device_key_map, "LEAST_ROWS", rows_at_a_time[0])
    monkeypatch.setattr(device_key_map, "ROWS_PER_KEY", rows_at_a_time[1])
    monkeypatch.setattr(device_keys, "FIRST", rows_at_a_time[0])  # More lookups take two rounds.
    how = Growing(100, admission, eviction, ttl)
    maps, random = _Maps(how, replace(how, capacity=37)), np.random.default_rng(ttl)
    for number in range(fewer(24, 16)):
        # Of a few changed slots each is sent to the device, of many all slots.
        counts = random.integers(
            0, [120, 40, 90] if number < 7 or number % 4 == 0 else 6, 3
        ).tolist()
        maps.step(_drawn(random, counts, 300 if number % 5 else 60))
        for keys in maps.both if random.random() < 0.8 else ():
            keys.end_step(keys.steps.popleft())
    maps.step(_drawn(random, [50, 0, 50], 300), training=False)
    maps.assert_alike()
    counted = maps.both[0].counts()
    assert sum(counts.evicted + counts.expired for counts in counted.values()) > 50
    assert counted["a"].expired > 20 or not ttl


def test_a_state_of_other_ranks_and_steps_that_come_again() -> None:
    """Rows then have other numbers than in the map, and the first steps are only found."""
    how = Growing(60, eviction="lru", ttl=5)
    first, second, random = _Maps(how), _Maps(how), np.random.default_rng(0)
    parts = [GrowingKeys({"a": how}, first.tables, None, part, 2) for part in range(2)]
    coming = [_drawn(random, [60, 20], 150) for _ in range(8)]
    for drawn in coming[:3]:
        keys = np.concatenate(drawn[:2])
        for part, keys_of in enumerate(parts):
            keys_of.maps["a"].read(keys[parts_of(keys, 2) == part])
    states = [keys_of.state() for keys_of in parts]
    joined = {name: torch.cat([state[name] for state in states]) for name in states[0]}
    for keys_of in first.both:
        keys_of.load_state(joined)
    for drawn in coming[3:6]:
        first.step(drawn)
    for keys_of, other in zip(second.both, first.both, strict=True):
        keys_of.load_state(other.state())
    assert second.both[0].maps["a"].known_steps == 3
    for drawn in coming[3:]:
        second.step(drawn)
    second.assert_alike()
    assert second.both[0].counts()["a"].evicted > 20


def test_a_deep_copy_goes_on_by_itself() -> None:
    maps = _Maps(Growing(8), Growing(8))
    twin = copy.deepcopy(maps)
    random = np.random.default_rng(0)
    drawn = [_drawn(random, [9, 3, 6], 20) for _ in range(4)]
    assert [maps.step(keys) for keys in drawn] == [twin.step(keys) for keys in drawn]
    twin.assert_alike()
