"""Cold rows that are narrow, or lie on a drive, train like those in host memory."""

import gc
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from executor_cases import (
    assert_same_bits,
    contents,
    placed,
    plan_of,
    random_batch,
    shard,
    take_over,
    train_step,
    two_features,
)
from fast_and_full import combinations, examples, fewer, mostly_slow
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import with_drives
from torch import Tensor, nn

from placer import apply_plan
from placer.errors import PlacerError, PlanMismatchError
from placer.executor import PlacedEmbeddings, look_ahead
from placer.executor.cold_store import ColdStore, HostRecords, Records, StoredRows
from placer.executor.drive import BlockQueue, DriveRecords
from placer.executor.memory.layout import has_records
from placer.plan.fields import Lookup, Shard
from placer.plan.plan import Plan
from placer.storage.checkpoint import load_model, save_model
from placer.tables import OPTIMIZERS, ColdDType, Feature, OptimizerName, Table

ROWS, COLD = 61, 20
HOT = list(range(ROWS - 1, 30, -1))
NARROW: tuple[ColdDType, ...] = ("float16", "bfloat16", "int8")
STEPS = range(10)


def cold_plan(
    table: Table,
    lookup: Lookup = "staged",
    entries: int = 9,
    dtype: ColdDType | None = None,
    memory: str = "dram",
    staged: int = 0,
) -> Plan:
    """Rows in HBM, in place in DRAM, pooled by the host, staged, and cold ones of some kind."""
    shards = [
        shard(table, (0, 8, 1)),
        shard(table, (8, 12, 1), memory="dram"),
        shard(table, (12, 16, 1), memory="dram", lookup="host"),
        replace(shard(table, (16, COLD, 1), memory="dram", lookup="staged"), staging_rows=2),
    ]
    shards.append(cold(table, lookup, entries, dtype, memory))
    return with_drives(plan_of([table], shards, {"t": HOT}))


def cold(table: Table, lookup: Lookup, entries: int, dtype: ColdDType | None, memory: str) -> Shard:
    """The last rows of the table."""
    part = shard(table, (COLD, table.rows, 1), memory="dram", lookup=lookup)
    given = {"staging_rows": entries} if lookup == "staged" else {"cache_rows": entries}
    return replace(part, **{"staging_rows": 0, **given}, dtype=dtype, memory=memory)  # type: ignore[arg-type]


def train(model: PlacedEmbeddings, steps: Iterable[int] = STEPS, *, ahead: bool = False) -> None:
    """Train on batches, some of them with weights."""
    steps = list(steps)
    batches = [random_batch(model.plan.tables, seed=n, weighted=n % 3 == 1) for n in steps]
    for number, batch in zip(steps, look_ahead(batches, model) if ahead else batches, strict=True):
        train_step(model, batch, number)


def equal(actual: PlacedEmbeddings, expected: PlacedEmbeddings) -> None:
    ours, theirs = contents(actual), contents(expected)
    assert ours.keys() == theirs.keys() | (ours.keys() & {"updates"})
    assert_same_bits(theirs, ours)


def trained(
    plan: Plan, backend: str = "tiered", *, ahead: bool = False, **options: object
) -> PlacedEmbeddings:
    model = placed(plan, backend=backend, **options)
    train(model, ahead=ahead)
    return model


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    mostly_slow([*product(OPTIMIZERS, NARROW)], ("rowwise_adagrad", "int8"), ("adam", "float16")),
)
def test_narrow_rows_do_not_depend_on_the_row_cache(optimizer: str, dtype: ColdDType) -> None:
    table = two_features(optimizer)
    expected = trained(cold_plan(table, entries=41, dtype=dtype))
    assert expected.hit_rates().row_cache.in_place_rows == 0  # type: ignore[union-attr]
    for lookup, entries, ahead in (("staged", 0, False), ("cached", 5, True), ("staged", 9, True)):
        model = trained(cold_plan(table, lookup, entries, dtype), ahead=ahead)  # type: ignore[arg-type]
        assert model.hit_rates().row_cache.in_place_rows > 0  # type: ignore[union-attr]
        equal(model, expected)


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_rows_train_like_wide_ones(dtype: ColdDType) -> None:
    table = two_features("adagrad")
    wide, narrow = trained(cold_plan(table)), trained(cold_plan(table, dtype=dtype))
    drift = (wide.state_dict()["t.weight"] - narrow.state_dict()["t.weight"]).abs()
    tolerance = {"float16": 0.004, "bfloat16": 0.03, "int8": 0.06}[dtype]
    assert 0 < float(drift.max()) < tolerance
    assert float(drift.mean()) < tolerance / 8


@combinations("backend, dtype", ["numba", "torch", "auto"], NARROW)
def test_other_backends_take_tiers_where_rows_are_records(backend: str, dtype: ColdDType) -> None:
    plan = cold_plan(two_features(), dtype=dtype)
    model = placed(plan, backend=backend)
    assert model.backend == "tiered"
    train(model)
    equal(model, trained(plan))


@pytest.mark.parametrize(
    ("dtype", "entries"),
    mostly_slow([*product([None, *NARROW], [0, 9, 41])], (None, 9), ("int8", 0)),
)
def test_triton_trains_alike(dtype: ColdDType | None, entries: int) -> None:
    plan = cold_plan(two_features(), "staged", entries, dtype)
    ours, theirs = (placed(plan, backend=backend) for backend in ("triton", "tiered"))
    for model in (ours, theirs):
        train(model, range(3), ahead=True)
    assert ours.backend == "triton"
    for name, values in contents(theirs).items():
        torch.testing.assert_close(
            contents(ours)[name], values, rtol=1e-5, atol=0.02 if dtype else 1e-6
        )


def test_wide_rows_need_no_number_of_updates(tmp_path: Path) -> None:
    """Narrow rows are rounded by the number of updates, which is saved with them."""
    narrow = trained(cold_plan(two_features("adagrad"), dtype="bfloat16"))
    assert narrow.optimizer_state_dict()["updates"] > 0
    save_model(tmp_path / "model", narrow)
    wide = placed(cold_plan(two_features("adagrad")), seed=None)
    load_model(tmp_path / "model", wide)
    equal(narrow, wide)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_resumed_run_is_equal_to_the_bit(dtype: ColdDType) -> None:
    table = two_features("adam")
    expected = trained(cold_plan(table, "cached", 7, dtype))
    first = placed(cold_plan(table, "cached", 7, dtype), backend="tiered")
    train(first, range(5))
    then = placed(cold_plan(table, "staged", 11, dtype), backend="tiered", seed=None)
    take_over(then, first)
    train(then, range(5, 10))
    equal(then, expected)


@pytest.mark.parametrize("dtype", NARROW)
def test_rows_that_are_written_are_rounded_in_their_copies_too(dtype: ColdDType) -> None:
    plan = cold_plan(two_features(), "cached", 30, dtype)
    model = placed(plan, backend="tiered")
    train(model)
    weights = {name: torch.randn_like(values) for name, values in model.state_dict().items()}
    model.load_state_dict(weights)
    fresh = placed(plan, backend="tiered", weights={"t": weights["t.weight"]})
    assert torch.equal(model.state_dict()["t.weight"], fresh.state_dict()["t.weight"])


def test_columns_of_a_table_may_be_narrow_each_by_itself() -> None:
    table = two_features("rowwise_adagrad")
    left = [
        shard(table, (0, COLD, 1), (0, 3)),
        replace(cold(table, "staged", 5, "int8", "dram"), cols=(0, 3)),
    ]
    right = [
        shard(table, (0, COLD, 1), (3, 8), on="gpu:1"),
        replace(cold(table, "cached", 3, "float16", "dram"), cols=(3, 8)),
    ]
    small = plan_of([table], [*left, *right], {"t": HOT})
    large = replace(
        small,
        shards=tuple(
            replace(part, staging_rows=41) if part.lookup == "staged" else part
            for part in small.shards
        ),
    )
    equal(trained(small, ahead=True), trained(large))


def test_memory_in_use_counts_records() -> None:
    table = Table("t", 100, 8, "float32", "adagrad", (Feature("t"),))
    part = replace(shard(table, memory="dram", lookup="staged"), dtype="int8")
    model = placed(plan_of([table], [part]), backend="tiered")
    assert model.memory_use()["host:0", "dram"] == 100 * (8 + 8 + 4 * 8)
    store = model._runtime.arenas[0].store
    assert isinstance(store._parts[0].medium, HostRecords)


def test_rows_that_cannot_be_records_are_refused() -> None:
    table = two_features()
    uva = replace(shard(table, memory="dram"), dtype="int8")
    with pytest.raises(PlanMismatchError, match="'t': rows of int8 are staged or cached"):
        placed(plan_of([table], [uva]))
    half = replace(table, dtype="float16")
    staged = replace(shard(half, memory="dram", lookup="staged"), dtype="int8")
    with pytest.raises(PlanMismatchError, match="of tables of float32 alone"):
        placed(plan_of([half], [staged]))


def test_a_plan_with_records_is_saved_and_loaded(tmp_path: Path) -> None:
    plan = cold_plan(two_features(), dtype="int8", memory="ssd")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").shards == plan.shards
    cold_plan(two_features()).save(tmp_path / "plain.json")
    assert '"dtype": null' not in (tmp_path / "plain.json").read_text()


@combinations("optimizer, lookup, entries", OPTIMIZERS, ["staged", "cached"], [0, 9, 41])
def test_rows_on_a_drive_are_equal_to_the_bit(
    tmp_path: Path, optimizer: str, lookup: Lookup, entries: int
) -> None:
    lookup = lookup if entries else "staged"
    table = two_features(optimizer)
    expected = trained(cold_plan(table, lookup, entries))
    assert has_records(cold_plan(table, lookup, entries, memory="ssd"))
    assert not has_records(expected.plan)
    for ahead in (False, True):
        plan = cold_plan(table, lookup, entries, memory="ssd")
        equal(trained(plan, ahead=ahead, drive=tmp_path), expected)


@pytest.mark.parametrize("optimizer", mostly_slow(OPTIMIZERS, "adam"))
def test_runs_go_on_between_drive_and_memory(tmp_path: Path, optimizer: str) -> None:
    table = two_features(optimizer)
    plans = [cold_plan(table), cold_plan(table, "cached", 7, memory="ssd"), plan_of([table])]
    for at, plan in enumerate(plans):  # What the host pools has other roundings.
        shards = [
            replace(part, lookup="uva") if part.lookup == "host" else part for part in plan.shards
        ]
        plans[at] = replace(plan, shards=tuple(shards))
    expected = trained(plans[0])
    for first, then in ((0, 1), (1, 0), (1, 2), (2, 1)):
        before = placed(plans[first], backend="tiered", drive=tmp_path)
        train(before, range(5))
        after = placed(plans[then], backend="tiered", drive=tmp_path, seed=9)
        take_over(after, before)
        train(after, range(5, 10))
        equal(after, expected)


def open_files(folder: Path) -> int:
    """How many files in the folder this process has open, those without a name too."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(str(folder) in str(link.readlink()) for link in links)


def test_files_on_a_drive_are_gone_with_the_model(tmp_path: Path) -> None:
    plan = cold_plan(two_features(), memory="ssd")
    model = trained(plan, drive=tmp_path / "new" / "folder")
    assert list(tmp_path.rglob("*.rows")) == []
    assert model.memory_use()["host:0 ssd", "ssd"] == 41 * (8 * 4 + 4)
    assert open_files(tmp_path) == 1
    del model
    gc.collect()
    assert open_files(tmp_path) == 0
    (tmp_path / "file").touch()
    with pytest.raises(PlacerError, match="file"):
        placed(plan, drive=tmp_path / "file")


def test_narrow_rows_may_lie_on_a_drive(tmp_path: Path) -> None:
    table = two_features("adam")
    plan = cold_plan(table, "cached", 7, "int8", "ssd")
    equal(trained(plan, drive=tmp_path, ahead=True), trained(cold_plan(table, dtype="int8")))


def test_a_model_whose_tables_are_replaced_has_rows_on_a_drive(tmp_path: Path) -> None:
    table = Table("0", ROWS, 8)
    results = []
    for memory in ("dram", "ssd"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(ROWS, 8), nn.Linear(8, 1))
        shards = [shard(table, (0, COLD, 1)), cold(table, "staged", 5, None, memory)]
        plan = with_drives(plan_of([table], shards))
        apply_plan(model, plan, lr=0.1, backend="tiered", drive=tmp_path / "new")
        for step in range(5):
            ids = torch.randint(0, ROWS, (6, 3), generator=torch.Generator().manual_seed(step))
            model(ids).square().sum().backward()
        results.append(model.state_dict()["0.weight"])
    assert torch.equal(*results)
    assert (tmp_path / "new").exists()


def test_a_batch_that_was_prepared_in_vain_changes_nothing(tmp_path: Path) -> None:
    plan = cold_plan(two_features("adam"), "cached", 9, memory="ssd")
    model = placed(plan, backend="tiered", drive=tmp_path)
    train(model, range(5))
    for seed in (50, 51):
        model.prefetch(random_batch(plan.tables, seed=seed))
    train(model, range(5, 10))
    equal(model, trained(plan, drive=tmp_path))


@pytest.mark.parametrize("optimizer", mostly_slow(OPTIMIZERS, "adam"))
def test_a_checkpoint_reads_each_block_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: OptimizerName
) -> None:
    """Weights and optimizer state together, of several blocks of a checkpoint."""
    table = Table("t", fewer(150_000, 40_000), 8, "float32", optimizer, (Feature("t.sum"),))
    part = replace(cold(table, "staged", 9, None, "ssd"), rows=(0, table.rows, 1))
    model = placed(with_drives(plan_of([table], [part])), backend="tiered", drive=tmp_path)
    train(model, range(3))
    store, reads = model._runtime.arenas[0].store, 0
    store.wait()
    submit = BlockQueue.submit

    def counted(queue, operation, file, size, addresses, offsets) -> None:
        nonlocal reads
        reads += len(offsets)
        submit(queue, operation, file, size, addresses, offsets)

    monkeypatch.setattr(BlockQueue, "submit", counted)
    save_model(tmp_path / "model", model)
    per_block = 4092 // store._parts[0].records.nbytes
    pieces = -(-table.rows // 8192)  # Each begins and ends within a block.
    assert reads <= -(-table.rows // per_block) + pieces
    monkeypatch.undo()
    other = placed(model.plan, backend="tiered", drive=tmp_path, seed=None)
    load_model(tmp_path / "model", other)
    equal(other, model)


def test_a_write_beside_a_read_of_weights_is_seen_in_the_state() -> None:
    records = Records("float32", torch.float32, width=2, state_shape=())
    medium = HostRecords(torch.zeros(5, records.nbytes, dtype=torch.uint8))
    store = ColdStore([StoredRows(0, 5, records, medium)])
    rows = torch.tensor([3, 1])
    for turn in range(1, 4):
        store.read_weights(rows)
        store.write(rows[:1], state=torch.tensor([float(turn)]))
        assert store.read_state(rows).tolist() == [turn, 0.0]
    store.read_weights(rows)
    assert store.read_state(rows[:1]).tolist() == [3.0]  # Other rows than those of the weights.
    # Writes that end, or begin, while the weights are read.
    read, write = store.read, store._write

    def writing(rows: Tensor) -> tuple[Tensor, Tensor | None]:
        held = read(rows)
        store.write(rows[:1], state=torch.tensor([4.0]))
        return held

    with mock.patch.object(store, "read", writing):
        store.read_weights(rows)
    assert store.read_state(rows).tolist() == [4.0, 0.0]

    def reading(*written: Any) -> None:
        store.read_weights(rows)
        write(*written)

    with mock.patch.object(store, "_write", reading):
        store.write(rows[:1], state=torch.tensor([5.0]))
    assert store.read_state(rows).tolist() == [5.0, 0.0]


def test_a_drive_that_fails_ends_the_training(tmp_path: Path) -> None:
    plan = cold_plan(two_features(), memory="ssd")
    model = placed(plan, backend="tiered", drive=tmp_path)
    train(model, range(3))
    (store,) = (arena.store for arena in model._runtime.arenas)
    drive = store._parts[-1].medium
    assert isinstance(drive, DriveRecords)
    descriptor = drive._file.descriptor
    with Path(f"/proc/self/fd/{descriptor}").open("rb") as read_only:
        os.dup2(read_only.fileno(), descriptor)  # As a drive that refuses writes from here on.
    says = "asynchronous I/O of .* failed: Bad file descriptor"
    for _ in range(2):
        with pytest.raises(PlacerError, match=says):
            train(model, range(3, 6), ahead=True)
    with pytest.raises(PlacerError, match=says):
        model.state_dict()


@st.composite
def plans_on_drives(draw: st.DrawFn, dtypes: Sequence[ColdDType] = ()) -> Plan:
    """Two tables, whose columns and rows are divided anyhow, some of them on a drive."""
    tables, shards = [], []
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    for name in ("t", "u"):
        table = Table(name, ROWS, 8, "float32", optimizer, (Feature(f"{name}.sum"),))
        tables.append(table)
        middle = draw(st.sampled_from([8, 4, 3]))
        for cols in ((0, middle), (middle, 8)):
            edges = sorted({0, ROWS, *draw(st.lists(st.integers(1, ROWS - 1), max_size=4))})
            for start, stop in pairwise(edges):
                how: Lookup = draw(st.sampled_from(["device", "uva", "staged", "cached"]))
                part = shard(
                    table,
                    (start, stop, 1),
                    cols,
                    memory="hbm" if how == "device" else "dram",
                    lookup=how,
                )
                if how in ("staged", "cached") and draw(st.booleans()):
                    part = replace(part, memory="ssd")
                    part = replace(part, dtype=draw(st.sampled_from([None, *dtypes])))
                if how == "staged":
                    part = replace(part, staging_rows=draw(st.integers(0, part.row_count)))
                shards += [part] if cols[0] < cols[1] else []
    hot = {"t": HOT} if draw(st.booleans()) else {}
    return with_drives(plan_of(tables, shards, hot))


@given(plans_on_drives(), st.booleans())
@examples(30)
def test_any_rows_may_lie_on_a_drive(plan: Plan, ahead: bool) -> None:
    shards = [
        replace(part, memory="dram") if part.memory == "ssd" else part for part in plan.shards
    ]
    expected = trained(replace(plan, shards=tuple(shards)))
    equal(trained(plan, ahead=ahead), expected)


@given(plans_on_drives(NARROW), st.booleans())
@examples(25)
def test_any_rows_may_be_narrow(plan: Plan, ahead: bool) -> None:
    """Whether the row cache has entries enough or not."""
    shards = [
        replace(part, lookup="staged", staging_rows=part.row_count, cache_rows=0)
        if part.lookup in ("staged", "cached")
        else part
        for part in plan.shards
    ]
    expected = trained(replace(plan, shards=tuple(shards)))
    equal(trained(plan, ahead=ahead), expected)
