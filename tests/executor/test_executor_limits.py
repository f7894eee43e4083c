"""Slots, places and lookups beside and above 32 bits: kept apart, or refused."""

import mmap
from dataclasses import replace

import numpy as np
import pytest
import torch
from executor_cases import plan_of

from placer import Feature, Table
from placer.errors import BackendError, DataError, PlanMismatchError
from placer.executor import BagBatch, PlacedEmbeddings
from placer.executor.backends import numba_kernels as kernels
from placer.executor.backends.backend import Backend
from placer.executor.backends.numba_backend import NumbaBackend
from placer.executor.backends.torch_kernels import places_of
from placer.executor.lookups import batch_reads, steps
from placer.executor.lookups.batch_reads import ArenaReads
from placer.executor.lookups.steps import ArenaStep, Window
from placer.executor.memory.arena import Arena, TieredRows
from placer.executor.memory.layout import ArenaKey, ArenaSpec, SlotRange, lay_out
from placer.executor.memory.row_cache import RowCache
from placer.executor.optimizers import Rule

FAR = 2**32


def sparse_matrix(rows: int) -> np.ndarray:  # type: ignore[type-arg]
    """A zeroed column of so many rows, of which those that are touched take memory."""
    no_reserve = 0x4000  # Which the module names since Python 3.13.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return np.frombuffer(mmap.mmap(-1, 4 * rows, flags), np.float32).reshape(rows, 1)


def spec_of(rows: int, *shares: SlotRange, optimizer: str = "sgd") -> ArenaSpec:
    key = ArenaKey("float32", 1, optimizer, False, stored=False)  # type: ignore[arg-type]
    return ArenaSpec(key, rows, shares, torch.empty(0, dtype=torch.int64))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("optimizer", [kernels.SGD, kernels.ADAGRAD])
def test_compiled_updates_keep_rows_apart_above_32_bits(threads: int, optimizer: int) -> None:
    rows, state = sparse_matrix(2 * FAR + 8), sparse_matrix(2 * FAR + 8)
    slots = np.array([FAR + 5, 2 * FAR + 5, 5, FAR + 5, 7, FAR - 1])
    gradients = np.array([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]], np.float32)
    constants = tuple(np.float32(value) for value in (1.0, 0.0, 0.0, 0.0))
    for thread in range(threads):
        kernels.update(
            rows, state, slots, np.arange(7), gradients, np.empty(0, np.float32),
            optimizer, constants, thread, threads,
        )  # fmt: skip
    read = {int(slot): float(rows[slot, 0]) for slot in slots}
    if optimizer == kernels.SGD:
        expected = {FAR + 5: -9.0, 2 * FAR + 5: -2.0, 5: -4.0, 7: -16.0, FAR - 1: -32.0}
        assert read == expected
    else:
        assert float(state[FAR + 5, 0]) == 81.0
        assert set(read.values()) == {-1.0}


def test_compiled_sums_read_rows_above_32_bits() -> None:
    rows = sparse_matrix(FAR + 8)
    rows[5], rows[FAR + 5] = 1.0, 2.0
    out = np.empty((2, 1), np.float32)
    slots, offsets = np.array([FAR + 5, 5, FAR + 5]), np.array([0, 1, 3])
    kernels.pool(rows, slots, offsets, np.empty(0, np.float32), out, 0, 1)
    assert out.ravel().tolist() == [2.0, 3.0]


def test_what_does_not_fit_a_key_goes_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.sorts(2**40, 2**20, 2**20)
    assert not kernels.sorts(2**40, 2**24, 2**20)
    assert not kernels.sorts(2**20, 2**20, 2**31)
    monkeypatch.setattr(kernels, "sorts", lambda *_: False)
    monkeypatch.setattr(kernels, "update", None)
    rows = torch.zeros(4, 1)
    arena = Arena(spec_of(4), TieredRows(rows, rows[:0], 4), None)
    reads = ArenaReads(torch.tensor([0, 2]), 2, ())
    rule = Rule("sgd", torch.tensor(1.0), 0.0, torch.tensor(1))
    step = ArenaStep(reads, slots := torch.tensor([1, 3]), slots)
    NumbaBackend().update(arena, step, torch.tensor([[2.0]]), None, rule)
    assert rows.ravel().tolist() == [0.0, -2.0, 0.0, -2.0]


def test_places_are_above_slots_by_the_entries_of_a_cache() -> None:
    """Slots fit 32 bits, and the places behind the row cache do not."""
    rows, entries = 2**31 - 10, 100
    spec = spec_of(rows, SlotRange(5, rows, entries, 0))
    assert spec.kind == torch.int64
    assert replace(spec, rows=rows - entries).kind == torch.int32
    backend = Backend(torch.device("cpu"), host=NumbaBackend())
    slots = backend._slots(torch.empty(0), spec, ArenaReads(torch.zeros(1), 0, ()), None)
    assert slots.dtype == torch.int64
    last = torch.tensor([rows - 1], dtype=spec.kind)
    assert places_of(spec, entries, last).tolist() == [rows - 1 + entries]


def test_entries_lie_behind_the_rows_in_hbm_above_31_bits() -> None:
    home = 2**31 - 4
    hbm = torch.empty((home + 8, 1), device="meta")

    class Found(TieredRows):
        def at(self, places: torch.Tensor) -> torch.Tensor:
            return places

    class Cache:
        def find(self, slots: torch.Tensor) -> torch.Tensor:
            return torch.tensor([6, -1], dtype=torch.int32)

    rows = Found(hbm, torch.empty((0, 1)), home, Cache())  # type: ignore[arg-type]
    slots = torch.tensor([home + 3, home + 2], dtype=torch.int32)
    assert rows.read(slots).tolist() == [home + 6, home + 2 + 8]


def test_slots_are_wide_where_an_arena_has_more_rows_than_31_bits() -> None:
    tables = [Table("large", 2**31, 1), Table("small", 3, 1)]
    plan = plan_of(tables, hot_ids={"small": [2, 0]})
    layout = lay_out(plan, dict.fromkeys(("large", "small"), "sgd"), torch.device("cpu"))
    assert layout.arenas[0].slot_map.tolist() == [2**31 + 1, 2**31 + 2, 2**31]


def test_rows_move_to_entries_above_31_bits() -> None:
    from placer.executor.backends.triton.staging import Resolved
    from placer.executor.backends.triton.triton_backend import TritonBackend

    device, home = torch.device("cpu"), 2**31 - 4
    backend = TritonBackend(device)
    places = torch.tensor([home + 100, home + 101])
    ends = torch.tensor([0, 2], dtype=torch.int32)
    resolved = Resolved(places, ends[0], ends[1], 2)
    cache = RowCache([SlotRange(home, home + 4, 8, 0)], home, device)
    entries = torch.tensor([7, -1], dtype=torch.int32)
    backend._move_to_entries(resolved, entries, cache, home, True)
    assert resolved.run_places.tolist() == [home + 7, home + 101]


def test_staged_rows_are_found_in_entries_above_31_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    device, home = torch.device("cpu"), 2**31 - 4
    backend = Backend(device, host=NumbaBackend())
    monkeypatch.setattr(backend, "_move", lambda *_: None)
    part = SlotRange(home, home + 8, 8, 0)
    spec = spec_of(home + 8, SlotRange(0, home, 0, 0, memory="hbm", lookup="device"), part)
    nothing = torch.empty((0, 1))
    cache = RowCache([part], home, device)
    arena = Arena(spec, TieredRows(nothing, nothing, home, cache), None, cache)
    slots = torch.tensor([home + 5, home + 1, home + 5])
    places, *_ = backend.stage(0, arena, cache, [slots], backend.window.open(), training=True)
    assert places.tolist() == [home + 1, home, home + 1]


def test_more_than_can_be_numbered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanMismatchError, match=r"2147483647 entries.*more GPUs"):
        RowCache([SlotRange(0, 2**32, 2**31 - 1, 0)], 0, "meta")
    monkeypatch.setattr(steps, "MOST_STEPS", 2)
    window = Window()
    window.open(), window.open()
    with pytest.raises(BackendError, match="save a checkpoint"):
        window.open()


def test_a_step_of_too_many_lookups_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_reads, "MOST_LOOKUPS", 3)
    table = Table("t", 9, 2, features=(Feature("t"),))
    model = PlacedEmbeddings(plan_of([table]), backend="torch")

    def batch(lookups: int) -> BagBatch:
        bags = {"t": (torch.zeros(lookups, dtype=torch.int64), torch.tensor([0, lookups]), None)}
        return BagBatch.from_features(bags, model.feature_names)

    model(batch(3))
    with pytest.raises(DataError, match=r"4 lookups or bags.*smaller batches"):
        model(batch(4))
