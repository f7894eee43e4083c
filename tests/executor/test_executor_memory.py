"""A step needs as much memory as the plan says, in either tier."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from executor_cases import backward
from torch.profiler import ProfilerActivity, profile
from triton.runtime.interpreter import GridExecutor

from placer import AccessCdf, Feature, Plan, Table, TableProfile
from placer.executor import BagBatch, PlacedEmbeddings, look_ahead
from placer.executor.lookups.batch_reads import tensors_of
from placer.executor.lookups.steps import CHUNK
from placer.plan.fields import Lookup, RowOrder, Shard
from placer.plan.memory import (
    ENTRY_BYTES_PASSING,
    INDEX_BYTES_HELD_PER_LOOKUP,
    INDEX_BYTES_PASSING_PER_LOOKUP,
    SORT_BYTES_PER_LOOKUP,
    SUM_BYTES_PER_LOOKUP_AND_COLUMN,
    device_memory,
    with_buffers,
)
from placer.profile.table_profile import RowCounts
from placer.topology.devices import Gpu, Host, Link
from placer.topology.topology import Topology

ROWS, DIM, SAMPLES, LOOKUPS = 15_000, 32, 64, 8


@pytest.fixture
def launches_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's interpreter leaves what a launch used in cycles: they are collected at once."""
    launch = GridExecutor.__call__

    def launch_and_collect(self: GridExecutor, *args: object, **options: object) -> None:
        launch(self, *args, **options)
        gc.collect()

    monkeypatch.setattr(GridExecutor, "__call__", launch_and_collect)
    gc.collect()
    gc.freeze()  # each collection looks at what came since then alone
    yield
    gc.unfreeze()


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes that PyTorch's CPU allocator gave out at a time beyond those at the start."""
    with profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as recorded:
        work()
    events = recorded.profiler.kineto_results.events()  # type: ignore[union-attr]
    size = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            size += event.nbytes()
            most = max(most, size)
    return most


def frequencies() -> dict[str, npt.NDArray[np.int64]]:
    """How often two tables' rows are read: by a Zipf law, hottest rows first, and in any order."""
    counts = np.floor(1e6 / np.arange(1, ROWS + 1) ** 1.05).astype(np.int64) + 1
    return {"t": counts, "u": np.random.default_rng(0).permutation(counts)}


def tables() -> list[TableProfile]:
    """The two tables as a log of these reads describes them."""
    result = []
    for name, counts in frequencies().items():
        table = Table(name, ROWS, DIM, features=(Feature(name, LOOKUPS),))
        cdf = AccessCdf.from_counts(counts, ROWS)
        result.append(TableProfile(table, cdf, RowCounts.from_dense(counts)))
    return result


def plan_with(lookup: Lookup, hot: int) -> Plan:
    """One GPU; of each table `hot` rows in HBM, or in a cache."""
    gpu = Gpu("gpu:0", "host:0", 2**30, 1e12)
    links = (Link("gpu:0", "host:0", "pcie", 1e10),)
    topology = Topology("test", (gpu,), (Host("host:0", 2**31, 1e11),), links)
    shards, hot_ids = [], {}
    for profiled in tables():
        table = profiled.table
        whole = Shard(table.name, (0, ROWS, 1), (0, DIM), ("gpu:0",), "dram", "cached", hot)
        parts = [whole]
        if lookup != "cached":
            parts = [
                replace(whole, rows=(0, hot, 1), memory="hbm", lookup="device", cache_rows=0),
                replace(whole, rows=(hot, ROWS, 1), lookup=lookup, cache_rows=0),
            ]
        parts = [part for part in parts if part.row_count]
        shards += [
            with_buffers(profiled, part, samples=SAMPLES, returns_bags=number == 0)
            for number, part in enumerate(parts)
        ]
        hot_ids[table.name] = profiled.counts.hottest(hot)
    return Plan(
        tuple(profiled.table for profiled in tables()),
        topology,
        tuple(shards),
        {name: RowOrder("profile") for name in hot_ids},
        hot_ids,
        SAMPLES,
    )


def batches(count: int) -> list[BagBatch]:
    """Bags of `LOOKUPS` ids, drawn as often as the profile says."""
    generator = np.random.default_rng(1)
    offsets = torch.arange(0, SAMPLES * LOOKUPS + 1, LOOKUPS)
    drawn = []
    for _ in range(count):
        features = {}
        for profiled in tables():
            counts = frequencies()[profiled.name]
            ids = generator.choice(ROWS, SAMPLES * LOOKUPS, p=counts / counts.sum())
            features[profiled.name] = (torch.from_numpy(ids), offsets, None)
        drawn.append(BagBatch.from_features(features, list(features)))
    return drawn


@pytest.mark.slow
@pytest.mark.usefixtures("launches_keep_nothing")
@pytest.mark.parametrize(
    ("lookup", "hot", "spare"),
    [
        ("staged", ROWS, 0.01),
        ("staged", ROWS // 10, 0.03),
        ("cached", ROWS // 10, 0.05),
        ("uva", ROWS // 2, 0.01),
    ],
)
def test_a_step_peaks_just_below_the_plan(lookup: Lookup, hot: int, spare: float) -> None:
    """On a GPU lookups and cache entries can be sorted at once, which a plan has room for."""
    plan = plan_with(lookup, hot)
    model = PlacedEmbeddings(plan, backend="triton")

    steps = batches(3)
    # Plans count outputs, and their gradients in one piece: not those that a model hands over.
    gradients = {table.name: torch.randn(SAMPLES, DIM) for table in plan.tables}

    def train(steps: list[BagBatch]) -> None:
        for batch in look_ahead(steps, model):
            backward(model(batch), gradients)

    train(steps[:1])
    transient = peak_bytes(lambda: train(steps[1:]))
    held = model.memory_use()
    hbm = sum(size for (device, _), size in held.items() if device == "gpu:0")
    planned = device_memory(plan)
    most = planned["gpu:0"].total_bytes
    assert (1 - spare) * most <= hbm + transient <= most
    assert held.get(("host:0", "dram"), 0) == pytest.approx(planned["host:0"].total_bytes, rel=0.03)


@pytest.mark.slow
@pytest.mark.usefixtures("launches_keep_nothing")
@pytest.mark.parametrize(
    ("lookup", "rows", "passing"),
    [("device", 1_000, 8.5), ("staged", 1_000, 8.5), ("staged", 128_000, 22.5)],
)
def test_the_integers_of_a_lookup(lookup: Lookup, rows: int, passing: float) -> None:
    """Tables that are small beside what is read of them, and one whose rows are read once."""
    lookups, row_entries = 32_000, min(rows, 32_000) if lookup == "staged" else 0
    memory = "dram" if lookup == "staged" else "hbm"
    shard = Shard("t", (0, rows, 1), (0, 4), ("gpu:0",), memory, lookup, 0, row_entries)
    table = Table("t", rows, 4, features=(Feature("t", lookups / 64),))
    plan = replace(plan_with("uva", ROWS), tables=(table,), shards=(shard,), row_order={})
    model = PlacedEmbeddings(replace(plan, hot_ids={}), backend="triton")
    generator = torch.Generator().manual_seed(0)

    def batch() -> BagBatch:
        ids = torch.randint(rows, (lookups,), generator=generator)
        offsets = torch.arange(0, lookups + 1, lookups // 64)
        return BagBatch.from_features({"t": (ids, offsets, None)}, ["t"])

    first, second = batch(), batch()
    prepared = [model.prefetch(first)]
    peak = peak_bytes(lambda: prepared.append(model.prefetch(second)))
    arrays = {id(tensor): tensor.nbytes for tensor in tensors_of(prepared[1])}
    held = sum(size for size in arrays.values() if size > 1_000)
    assert held / lookups == pytest.approx(INDEX_BYTES_HELD_PER_LOOKUP, rel=0.01)
    # An entry of the row cache takes 31 bytes in passing on a CPU, which plans charge to its row.
    most = (peak - held - 31 * row_entries) / lookups
    assert passing - 3 < most <= passing
    # A plan has room for what a GPU takes, where entries of the row cache need more.
    room = SORT_BYTES_PER_LOOKUP + INDEX_BYTES_PASSING_PER_LOOKUP + 4
    assert passing <= room + (ENTRY_BYTES_PASSING - 31) * row_entries / lookups


def test_sums_of_long_runs_take_two_rows_for_each_chunk() -> None:
    assert 2 * torch.float32.itemsize / CHUNK == SUM_BYTES_PER_LOOKUP_AND_COLUMN
