"""Where rows are changes nothing: staging, caches, look-ahead and reading in place, to the bit."""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from executor_cases import (
    DEVICE,
    assert_same_bits,
    backward,
    contents,
    counted_host_reads,
    placed,
    plan_of,
    random_batch,
    random_gradients,
    shard,
    train_step,
    train_steps,
    two_features,
)
from fast_and_full import combinations, examples, fewer
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from placer.executor import BagBatch, PlacedEmbeddings, look_ahead
from placer.plan.fields import Shard
from placer.plan.plan import Plan
from placer.tables import Feature, Table

BACKENDS = ["tiered", "triton"]


def tables(optimizer: str = "adagrad") -> list[Table]:
    """Two tables of one width, one of another."""
    first = two_features(optimizer)
    return [
        first,
        Table("u", 23, first.dim, "float32", optimizer, (Feature("u"),)),
        Table("v", 31, 4, "float32", optimizer, (Feature("v", pooling="max"),)),
    ]


def split_plan(lookup: str, entries: int, hot: int = 5, optimizer: str = "adagrad") -> Plan:
    """All tables with `hot` rows in HBM, and `entries` of the pool for the others of each."""
    shards: list[Shard] = []
    for table in tables(optimizer):
        cold = shard(table, (hot, table.rows, 1), memory="dram", lookup=lookup)  # type: ignore[arg-type]
        held = min(entries, table.rows - hot)
        if lookup == "staged":
            cold = replace(cold, staging_rows=held)
        elif lookup == "cached":
            cold = replace(cold, cache_rows=max(held, 1), staging_rows=min(held, 3))
        shards += [shard(table, (0, hot, 1)), cold]
    return plan_of(tables(optimizer), shards)


def model_of(plan: Plan, backend: str, **options: object) -> PlacedEmbeddings:
    return placed(plan, backend=backend, device=DEVICE, **options)


def train(model: PlacedEmbeddings, batches: Sequence[BagBatch], ahead: bool = False) -> None:
    train_steps(model, look_ahead(batches, model) if ahead else batches)


def equal(model: PlacedEmbeddings, other: PlacedEmbeddings) -> None:
    expected = contents(other)
    assert_same_bits(contents(model), expected)


@combinations(
    "backend, lookup, entries, ahead, optimizer",
    BACKENDS,
    ["staged", "cached"],
    [0, 2, 9, 60],
    [False, True],
    ["adagrad", "rowwise_adagrad"],
)
def test_pooled_rows_train_as_those_in_hbm(
    backend: str, lookup: str, entries: int, ahead: bool, optimizer: str
) -> None:
    steps = 6 if backend == "tiered" else fewer(3, 2)
    batches = [random_batch(tables(), seed=seed) for seed in range(steps)]
    expected = model_of(plan_of(tables(optimizer)), backend)
    train(expected, batches)
    policy = "rank" if entries == 9 else "lfu"
    model = model_of(split_plan(lookup, entries, 5, optimizer), backend, cache_policy=policy)
    train(model, batches, ahead)
    equal(model, expected)
    rates = model.hit_rates()
    assert rates is not None
    if entries == 60:  # Enough for all rows of two steps.
        assert rates.row_cache.in_place_rows == 0
        assert rates.row_cache.hit_rows > 0
    elif entries == 0 and lookup == "staged":
        assert rates.row_cache.rows == rates.row_cache.in_place_rows
    else:
        assert rates.row_cache.in_place_rows > 0


@combinations("backend, ahead", BACKENDS, [False, True])
def test_rows_pooled_by_the_host_train_alike(backend: str, ahead: bool) -> None:
    batches = [random_batch(tables(), seed=seed, weighted=True) for seed in range(fewer(3, 2))]
    expected = model_of(plan_of(tables()), backend)
    model = model_of(split_plan("host", 0), backend)
    for number, batch in enumerate(batches):
        results = []
        for each in (model, expected):
            weighted = replace(batch, weights=batch.weights.clone().requires_grad_())  # type: ignore[union-attr]
            outputs = train_step(each, each.prefetch(weighted) if ahead else weighted, number)
            results.append((outputs, weighted.weights.grad))  # type: ignore[union-attr]
        for name, output in results[0][0].items():
            torch.testing.assert_close(output, results[1][0][name])
        torch.testing.assert_close(results[0][1], results[1][1])
    for name, tensor in contents(expected).items():
        torch.testing.assert_close(contents(model)[name], tensor)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_an_open_step_reads_in_place_stay_there(backend: str) -> None:
    """There are entries for them again before it has updated them."""
    table = Table("t", 10, 4, features=(Feature("t"),))
    cold = replace(shard(table, memory="dram", lookup="staged"), staging_rows=4)
    models = [model_of(plan_of([table], shards), backend) for shards in ([cold], None)]

    def prefetch(*ids: int) -> list[object]:
        lookups = (torch.tensor(ids), torch.arange(len(ids) + 1), None)
        batch = BagBatch.from_features({"t": lookups}, ["t"])
        return [model.prefetch(batch) for model in models]

    def train(prepared: Sequence[object]) -> None:
        for model, batch in zip(models, prepared, strict=True):
            train_step(model, batch, 0)

    first = prefetch(0, 1, 2, 3)
    second = prefetch(4, 5)
    train(first)
    third = prefetch(4, 5)
    train(second)
    train(third)
    equal(*models)
    assert models[0].hit_rates().row_cache.in_place_rows == 4  # type: ignore[union-attr]


def test_a_row_of_a_closed_step_is_written_back_when_others_need_its_entry() -> None:
    model = model_of(split_plan("staged", 9), "tiered")
    train(model, [random_batch(tables(), seed=seed) for seed in range(8)])
    rates = model.hit_rates()
    assert rates.row_cache.written_back_rows > 0
    assert rates.lookups == rates.home_lookups + rates.row_cache.lookups
    model.reset_hit_rates()
    assert model.hit_rates().lookups == 0  # type: ignore[union-attr]


@combinations("backend, lookup", BACKENDS, ["uva", "staged", "host"])
def test_lookups_of_rows_in_hbm_are_counted(backend: str, lookup: str) -> None:
    table = Table("t", 10, 4, features=(Feature("t"),))
    cold = shard(table, (5, 10, 1), memory="dram", lookup=lookup)  # type: ignore[arg-type]
    shards = [shard(table, (0, 5, 1)), replace(cold, staging_rows=5 * (lookup == "staged"))]
    model = model_of(plan_of([table], shards), backend)
    model.count_by_table()
    ids = torch.tensor([5, 4, 0, 9, 4, 5, 6, 7])
    with torch.no_grad():
        model(BagBatch.from_features({"t": (ids, torch.tensor([0, 3, 3, 8]), None)}, ["t"]))
    rates = model.hit_rates()
    assert (rates.lookups, rates.home_lookups, rates.tables) == (8, 3, {"t": 3 / 8})
    assert rates.hbm_hit_rate == 3 / 8


def test_lookups_by_table_are_counted_in_64_steps_and_then_in_one_of_eight() -> None:
    table = Table("t", 10, 4, features=(Feature("t"),))
    shards = [shard(table, (0, 5, 1)), shard(table, (5, 10, 1), memory="dram")]
    model = model_of(plan_of([table], shards), "tiered")
    model.count_by_table()
    for step in range(1, 73):  # The last one stands for eight.
        lookups = torch.tensor([7 if step == 72 else 0]), torch.arange(2), None
        model(BagBatch.from_features({"t": lookups}, ["t"]))
    assert model.hit_rates().tables == {"t": 64 / 72}  # type: ignore[union-attr]


@pytest.mark.parametrize("lookup", ["staged", "cached"])
def test_several_threads_may_look_rows_up(lookup: str) -> None:
    """As those of a server do."""
    model = model_of(split_plan(lookup, 9), "tiered")
    batches = [random_batch(tables(), seed=seed) for seed in range(40)]
    with torch.no_grad():
        expected = [model(batch) for batch in batches]

    def is_right(number: int) -> bool:
        with torch.no_grad():
            found = model(batches[number])
        return all(torch.equal(found[name], rows) for name, rows in expected[number].items())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(is_right, 10 * list(range(40))))
    finally:
        sys.setswitchinterval(interval)


def test_what_is_only_read_is_not_written_back() -> None:
    model = model_of(split_plan("staged", 9), "tiered")
    before = contents(model)
    with torch.no_grad():
        for seed in range(8):
            model(random_batch(tables(), seed=seed))
    rates = model.hit_rates()
    assert rates.row_cache.written_back_rows == 0
    assert_same_bits(contents(model), before)


@examples(16)
@given(data=st.data())
def test_any_order_of_steps_gives_what_hbm_alone_gives(data: st.DataObject) -> None:
    """Prefetched and plain steps, steps side by side, evaluation, and state saved and loaded.

    Triton sums in another order, and gives the same rows the same entries.
    """
    lookup = data.draw(st.sampled_from(["staged", "cached", "uva"]))
    plan = split_plan(lookup, data.draw(st.integers(0, 15)), data.draw(st.integers(0, 8)))
    policy = data.draw(st.sampled_from(["lfu", "rank"]))
    models = [model_of(plan_of(tables()), "tiered")]
    models += [model_of(plan, backend, cache_policy=policy) for backend in BACKENDS]
    ready: list[tuple[int, list[object]]] = []
    for number in range(data.draw(st.integers(1, fewer(10, 4)))):
        batch = random_batch(tables(), 4, seed=data.draw(st.integers(0, 5)), longest=3)
        action = data.draw(
            st.sampled_from(["step", "prefetch", "use", "two", "evaluate", "drop", "load"])
        )
        if action == "prefetch":
            ready.append((number, [model.prefetch(batch) for model in models]))
        elif action == "use" and ready:
            number, prepared = ready.pop(0)
            _step(models, [prepared], number)
        elif action == "two" and ready:
            _, prepared = ready.pop(0)
            _step(models, [prepared, [batch] * len(models)], number)
        elif action == "evaluate":
            with torch.no_grad():
                outputs = [model(batch) for model in models]
            _same(*outputs)
        elif action == "drop":
            _same(*(model(batch) for model in models))  # Its backward pass never comes.
        elif action == "load":
            for model in models:
                saved, state = model.state_dict(), model.optimizer_state_dict()
                model.load_state_dict({name: tensor + 1 for name, tensor in saved.items()})
                model.load_optimizer_state_dict(state)
        else:
            _step(models, [[batch] * len(models)], number)
    equal(models[1], models[0])
    same_row_caches(*models[1:])


def same_row_caches(model: PlacedEmbeddings, other: PlacedEmbeddings) -> None:
    """The same rows have the same entries, and as much is known of them."""
    assert model.hit_rates() == other.hit_rates()
    for arena, another in zip(model._runtime.arenas, other._runtime.arenas, strict=True):
        if arena.row_cache is not None:
            held = another.row_cache.entries  # The one behind them holds what was meant for none.
            for name in ("slots", "last_used", "priority", "dirty", "sorted_slots"):
                mine, theirs = (
                    getattr(each.row_cache.directory, name)[:held] for each in (arena, another)
                )
                assert torch.equal(mine, theirs), name


def _step(
    models: Sequence[PlacedEmbeddings], batches: Sequence[Sequence[object]], seed: int
) -> None:
    """Forward passes of all batches, then their backward passes."""
    found = []
    for index, model in enumerate(models):
        outputs = [model(batch[index]) for batch in batches]
        for each in outputs:
            backward(each, random_gradients(each, seed))
        found.append(outputs)
    for first, second, third in zip(*found, strict=True):
        _same(first, second, third)


def _same(
    first: dict[str, Tensor], second: dict[str, Tensor], by_triton: dict[str, Tensor]
) -> None:
    for name, output in first.items():
        assert torch.equal(output, second[name]), name
        torch.testing.assert_close(output, by_triton[name])


@pytest.mark.parametrize("lookup", ["device", "staged", "cached", "uva"])
def test_a_step_never_waits_for_the_device(lookup: str) -> None:
    plan = plan_of(tables()) if lookup == "device" else split_plan(lookup, 9)
    model = model_of(plan, "triton")
    batches = [random_batch(tables(), seed=seed) for seed in range(2)]
    outputs = model(batches[0])
    gradients = random_gradients(outputs)
    with counted_host_reads() as found:
        backward(outputs, gradients)
        backward(model(model.prefetch(batches[1])), gradients)
    # On a CPU bad ids are looked for at once; on a GPU the answer is fetched by an event.
    assert found == (["_local_scalar_dense"] if DEVICE == "cpu" else [])
