"""Tables that grow beside fixed ones: the same bits, whatever the placement."""

import itertools
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from executor_cases import (
    assert_alike,
    assert_same_bits,
    backward,
    machine,
    placed,
    placements,
    plan_of,
    random_gradients,
    take_over,
    train_step,
    train_steps,
)
from fast_and_full import combinations, covering, mostly_slow
from plan_cases import with_drives
from torch import Tensor

from placer.errors import CheckpointError, DataError, PlanMismatchError
from placer.executor import BagBatch, PlacedEmbeddings, look_ahead
from placer.executor.growing_keys import GrowingKeys, KeyStep
from placer.growing import Growing, KeyMap
from placer.tables import OPTIMIZERS, Feature, Table

CAPACITY = 60


def _table(optimizer: str = "adagrad", rows: int = CAPACITY + 1) -> Table:
    features = (Feature("sum"), Feature("mean", pooling="mean"), Feature("none", pooling="none"))
    return Table("t", rows, 8, "float32", optimizer, features)


def _key_batches(steps: int, distinct: int, seed: int = 0, longest: int = 3) -> list[BagBatch]:
    """Batches of 6 samples, whose keys are any int64; common ones come more often."""
    random = np.random.default_rng(seed)
    keys = random.integers(-(2**63), 2**63 - 1, distinct)
    batches = []
    for _ in range(steps):
        features = {}
        for feature in ("sum", "mean", "none"):
            lengths = random.integers(0, longest + 1, 6)
            drawn = (distinct * random.random(lengths.sum()) ** 2).astype(int)
            offsets = torch.from_numpy(np.append(0, lengths.cumsum()))
            features[feature] = torch.from_numpy(keys[drawn]), offsets, None
        batches.append(BagBatch.from_features(features, list(features)))
    return batches


def _with_ids(batch: BagBatch, ids: Tensor) -> BagBatch:
    return BagBatch(ids, batch.offsets, batch.batch_size)


def test_steps_that_are_dropped_are_not_counted_as_open() -> None:
    table = _table()
    own = GrowingKeys({"t": Growing(CAPACITY)}, {"t": table}, None)

    def opened(*, begins: bool = False) -> KeyStep:
        step = own.open_step()
        own.maps["t"].read(np.array([1]), max(1, step.open_before))
        own.found(step)
        if begins:
            own.begin(step)
        return step

    first, *ahead = opened(begins=True), opened(), opened()
    assert [step.open_before for step in (first, *ahead)] == [0, 1, 2]
    assert own.ahead == 2
    own.drop_ahead()
    assert own.ahead == 0
    again = opened()
    assert (again.number, again.open_before) == (ahead[0].number, 1)


def _rows_of(model: PlacedEmbeddings, keys: Tensor) -> list[int]:
    known = dict(zip(*(values.tolist() for values in model.live_keys("t")), strict=True))
    return [known.get(key, 0) for key in keys.tolist()]


@pytest.mark.parametrize("home", [{"memory": "ssd"}, {"dtype": "int8"}])
def test_rows_that_are_records_are_given_anew(home: dict[str, str], tmp_path: Path) -> None:
    """As in memory; narrow ones with few entries of a row cache as with enough."""
    plan = with_drives(placements(_table("adam"))["cold rows staged"])

    def trained(entries: int, **home: str) -> PlacedEmbeddings:
        shards = tuple(
            replace(part, staging_rows=entries, **home) if part.lookup == "staged" else part
            for part in plan.shards
        )
        growing = {"t": Growing(CAPACITY)}
        changed = replace(plan, shards=shards)
        model = placed(changed, backend="tiered", growing=growing, drive=tmp_path)
        batches = look_ahead(_key_batches(25, 4 * CAPACITY), model)
        train_steps(model, batches)
        assert model.key_counts()["t"].evicted > 20
        return model

    other = trained(30) if "memory" in home else trained(30, **home)
    assert_alike(other, trained(4, **home))


BACKENDS = ("numba", "torch", "tiered", "triton")


@pytest.mark.parametrize(
    ("backend", "optimizer", "placement"),
    covering(
        (backend, optimizer, placement)
        for backend in ("numba", "tiered")
        for placement, optimizer in zip(placements(_table()), itertools.cycle(OPTIMIZERS))
    ),
)
def test_with_rows_enough_it_trains_like_a_vocabulary(
    backend: str, optimizer: str, placement: str
) -> None:
    plan = placements(_table(optimizer))[placement]
    growing = placed(plan, backend=backend, growing={"t": Growing(CAPACITY)})
    fixed = placed(plan, backend=backend)
    vocabulary: dict[int, int] = {}
    for number, batch in enumerate(_key_batches(6, CAPACITY)):
        rows = [vocabulary.setdefault(key, len(vocabulary) + 1) for key in batch.ids.tolist()]
        mine = train_step(growing, batch, number)
        theirs = train_step(fixed, _with_ids(batch, torch.tensor(rows, dtype=torch.int64)), number)
        assert_same_bits(theirs, mine)
    assert_alike(growing, fixed)
    keys, rows_of_keys = growing.live_keys("t")
    assert dict(zip(keys.tolist(), rows_of_keys.tolist(), strict=True)) == vocabulary


@pytest.mark.parametrize(
    ("backend", "optimizer", "options"),
    [
        ("numba", "sgd", Growing(CAPACITY)),
        ("numba", "adam", Growing(CAPACITY, eviction="lru")),
        ("torch", "adagrad", Growing(CAPACITY, ttl=2)),
        ("tiered", "rowwise_adagrad", Growing(CAPACITY, admission=2)),
        pytest.param("triton", "adam", Growing(CAPACITY), marks=pytest.mark.slow),
    ],
)
def test_a_key_that_gets_a_used_row_trains_as_in_a_new_one(
    backend: str, optimizer: str, options: Growing
) -> None:
    """Beside a fixed table with a row for each time that a key got one: weights begin again."""
    plan = placements(_table(optimizer))["cold rows staged"]
    growing = placed(plan, backend=backend, growing={"t": options})
    beginnings, lives, outputs = [growing.state_dict()["t.weight"][0]], [], []
    life_of_row, keys = {0: 0}, KeyMap(options)
    for number, batch in enumerate(_key_batches(18, 4 * CAPACITY)):
        result = growing(batch)
        weight = growing.state_dict()["t.weight"]
        step = keys.read(batch.ids.numpy())
        for row in dict.fromkeys(step.rows.tolist()):
            if row not in life_of_row or row in step.reused:
                life_of_row[row] = len(beginnings)
                beginnings.append(weight[row])
        ids = [life_of_row[row] for row in step.rows.tolist()]
        lives.append(_with_ids(batch, torch.tensor(ids, dtype=torch.int64)))
        backward(result, random_gradients(result, number))
        outputs.append(result)
    assert growing.key_counts()["t"] == keys.counts
    assert len(beginnings) == 1 + keys.counts.admitted > CAPACITY + 20
    table = _table(optimizer, rows=len(beginnings))
    weights = {"t": torch.stack(beginnings)}
    fixed = placed(plan_of([table], topology=machine()), backend=backend, weights=weights)
    for number, batch in enumerate(lives):
        theirs = train_step(fixed, batch, number)
        assert_same_bits(theirs, outputs[number])


@pytest.mark.parametrize("backend", mostly_slow(BACKENDS, "numba", "tiered"))
def test_looking_ahead_changes_nothing(backend: str) -> None:
    plan = placements(_table())["cold rows staged"]
    how = {"t": Growing(CAPACITY, eviction="lru")}
    ahead, plain = (placed(plan, backend=backend, growing=how) for _ in range(2))
    batches = _key_batches(14, 4 * CAPACITY)
    for number, batch in enumerate(look_ahead(batches, ahead)):
        train_step(ahead, batch, number)
        train_step(plain, batches[number], number)
    assert_alike(ahead, plain)
    assert ahead.key_counts() == plain.key_counts()
    assert plain.key_counts()["t"].evicted > 20


@combinations(
    "saves, goes_on_ahead, admission",
    ["in the loop", "behind a break", "before a step"],
    [False, True],
    [1, 2, 3],
)
def test_a_run_that_saves_while_it_looks_ahead_goes_on_to_the_same_bits(
    saves: str, goes_on_ahead: bool, admission: int
) -> None:
    how = {"t": Growing(CAPACITY, admission, eviction="lru", ttl=6)}
    plan = placements(_table())["cold rows staged"]
    first, plain, second = (placed(plan, growing=how) for _ in range(3))
    batches, stop = _key_batches(30, 4 * CAPACITY), 14
    train_steps(plain, batches)
    state: dict[str, Tensor] = {}
    trained: dict[str, Tensor] = {}
    for number, batch in enumerate(look_ahead(batches, first)):
        if saves == "before a step" and number == stop:
            break
        train_step(first, batch, number)
        if number == stop - 1:
            state, trained = first.state_dict(), first.optimizer_state_dict()
            if saves == "behind a break":
                break
    if saves != "in the loop":
        state, trained = first.state_dict(), first.optimizer_state_dict()
    begun = [second(batch) for batch in batches[:3]]  # Loading forgets open steps.
    second.load_state_dict(state)
    second.load_optimizer_state_dict(trained)
    rest = [second] if saves == "in the loop" else [first, second]
    for model in rest:
        coming = look_ahead(batches[stop:], model) if goes_on_ahead else batches[stop:]
        train_steps(model, coming, stop)
    for model in (first, second):
        assert_alike(model, plain)
        assert model.key_counts() == plain.key_counts()
    counts = plain.key_counts()["t"]
    assert begun
    assert counts.evicted + counts.expired > 20


@pytest.mark.parametrize("backend", mostly_slow(BACKENDS, "numba"))
@pytest.mark.parametrize("stop", [5, 6])
def test_a_run_that_leaves_its_loop_goes_on_with_other_batches_to_the_same_bits(
    backend: str, stop: int
) -> None:
    """As if it had never looked ahead at the batches that did not come; so does its saved state."""
    how, plan = {"t": Growing(CAPACITY, eviction="lru")}, placements(_table())["hbm"]
    first, second, third = (placed(plan, backend=backend, growing=how) for _ in range(3))
    batches = _key_batches(8, 4 * CAPACITY)
    others = [_with_ids(batch, batch.ids + 1) for batch in batches]
    for number, batch in enumerate(look_ahead(batches, first)):
        if number == stop:
            break
        train_step(first, batch, number)
    take_over(second, first)
    # A state that is saved again before the next step still knows what it expects.
    take_over(third, second)
    admitted = first.key_counts()["t"].admitted
    for number, batch in enumerate(others):
        pooled = [train_step(model, batch, number) for model in (first, second, third)]
        for other in pooled[1:]:
            assert_same_bits(other, pooled[0])
    assert first.key_counts()["t"].admitted > admitted + 20
    for model in (second, third):
        assert_alike(first, model)
        assert first.key_counts() == model.key_counts()


def test_batches_that_are_prepared_far_ahead_come_again_to_the_same_bits() -> None:
    how = {"t": Growing(CAPACITY, admission=2)}
    first, second = (placed(placements(_table())["hbm"], growing=how) for _ in range(2))
    batches = _key_batches(30, 4 * CAPACITY)
    train_steps(first, batches[:20])
    prepared = [first.prefetch(batch) for batch in batches[20:25]]
    take_over(second, first)
    train_steps(first, [*prepared, *batches[25:]], 20)
    train_steps(second, batches[20:], 20)
    assert_alike(first, second)
    assert first.key_counts() == second.key_counts()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_goes_on_from_a_checkpoint_under_another_plan(optimizer: str) -> None:
    plans = placements(_table(optimizer))
    how = {"t": Growing(CAPACITY, admission=2, ttl=8)}
    first = placed(plans["cold rows staged"], growing=how)
    batches = _key_batches(40, 4 * CAPACITY)
    train_steps(first, batches[:20])
    second = placed(plans["column-wise"], growing=how, seed=3)
    take_over(second, first)
    for number, batch in enumerate(batches[20:]):
        mine, theirs = train_step(first, batch, number), train_step(second, batch, number)
        for name in theirs:
            assert torch.allclose(mine[name], theirs[name], atol=1e-6)
    assert first.key_counts() == second.key_counts()
    assert first.key_counts()["t"].evicted > 20


@combinations("optimizer, saves", OPTIMIZERS, ["whole", "ahead"])
def test_a_larger_table_loads_a_state_and_goes_on_to_the_same_bits(
    optimizer: str, saves: str
) -> None:
    small, large = (
        placed(placements(_table(optimizer, capacity + 1))[where], growing={"t": Growing(capacity)})
        for capacity, where in (
            (CAPACITY, "cold rows staged"),
            (2 * CAPACITY, "hot, then row-wise"),
        )
    )
    batches = _key_batches(24, CAPACITY)
    coming = look_ahead(batches, small) if saves == "ahead" else batches
    for number, batch in enumerate(coming):
        train_step(small, batch, number)
        if number == 3:
            state, trained = small.state_dict(), small.optimizer_state_dict()
    assert CAPACITY - 10 < small.key_counts()["t"].admitted <= CAPACITY
    for number, batch in enumerate(batches[:3]):  # It has other keys, and they go.
        train_step(large, _with_ids(batch, batch.ids + 1), number)
    with warnings.catch_warnings(action="error"):
        large.load_state_dict(state)
    large.load_optimizer_state_dict(trained)
    assert large.key_counts()["t"].live < small.key_counts()["t"].live
    train_steps(large, batches[4:], 4)
    assert large.key_counts() == small.key_counts()
    for mine, theirs in (
        (large.state_dict(), small.state_dict()),
        (large.optimizer_state_dict(), small.optimizer_state_dict()),
    ):
        for name in theirs:
            if ".keys." not in name:
                own = mine[name][: CAPACITY + 1] if mine[name].dim() else mine[name]
                assert torch.equal(own, theirs[name]), name
    fresh = placed(large.plan, growing={"t": Growing(2 * CAPACITY)}).state_dict()["t.weight"]
    assert torch.equal(large.state_dict()["t.weight"][CAPACITY + 1 :], fresh[CAPACITY + 1 :])
    large.load_optimizer_state_dict(large.optimizer_state_dict())  # Of its own rows again.


def test_a_smaller_table_loads_the_hottest_rows_and_says_how_many_are_evicted() -> None:
    large, small = (
        placed(placements(_table("adam", rows + 1))["hbm"], growing={"t": Growing(rows)})
        for rows in (CAPACITY, 25)
    )
    train_steps(large, _key_batches(20, 4 * CAPACITY))
    state = large.state_dict() | {"t.keys.rows": large.state_dict()["t.keys.rows"][:50]}
    with pytest.raises(PlanMismatchError, match=r"shape \(61, 8\), the plan says \(51, 8\)"):
        small.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"t.exp_avg has shape \(61, 8\), not \(26, 8\)"):
        small.load_optimizer_state_dict(large.optimizer_state_dict())
    live = large.key_counts()["t"].live
    with pytest.warns(match=f"'t': {live - 25} of {live} keys .* evicted.* its capacity is 25"):
        small.load_state_dict(large.state_dict())
    small.load_optimizer_state_dict(large.optimizer_state_dict())
    keys, rows = small.live_keys("t")
    assert keys.numel() == 25
    theirs = _rows_of(large, keys)
    assert min(theirs) > 0
    for one, other in (
        (small.state_dict(), large.state_dict()),
        (small.optimizer_state_dict(), large.optimizer_state_dict()),
    ):
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            if f"t.{name}" in one:
                assert torch.equal(one[f"t.{name}"][rows], other[f"t.{name}"][theirs])
                assert torch.equal(one[f"t.{name}"][0], other[f"t.{name}"][0])


def test_a_checkpoint_without_keys_or_of_another_admission_is_refused() -> None:
    plan = placements(_table())["hbm"]
    growing, fixed = placed(plan, growing={"t": Growing(CAPACITY)}), placed(plan)
    before = growing.state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*t\.keys\.rows"):
        growing.load_state_dict(fixed.state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*t\.keys\.rows"):
        fixed.load_state_dict(growing.state_dict())
    with pytest.raises(CheckpointError, match=r"table 't': .* admission 1"):
        growing.load_state_dict(placed(plan, growing={"t": Growing(CAPACITY, 2)}).state_dict())
    some = {**before, "t.weight": before["t.weight"] + 1}
    del some["t.keys.rows"]
    assert growing.load_state_dict(some, strict=False).missing_keys == ["t.keys.rows"]
    assert_same_bits(before, growing.state_dict())


def test_evaluation_gives_no_rows_and_reads_row_0_for_unknown_keys() -> None:
    growing = placed(placements(_table())["hbm"], growing={"t": Growing(CAPACITY)})
    train_step(growing, _key_batches(1, 5)[0], 0)
    counts = growing.key_counts()
    strange = BagBatch.from_features(
        {name: (torch.tensor([10**17]), None, None) for name in growing.feature_names},
        growing.feature_names,
    )
    with torch.no_grad():
        outputs = growing(strange)
        for prepared in look_ahead([*_key_batches(3, 5), strange], growing):
            growing(prepared)
    row_0 = growing.state_dict()["t.weight"][:1]
    assert all(torch.equal(output, row_0) for output in outputs.values())
    assert growing.key_counts() == counts


def test_padding_is_no_key() -> None:
    table = _table()
    growing = placed(
        plan_of([table]), growing={"t": Growing(CAPACITY)}, padding_idx={"sum": -1, "none": -1}
    )
    ids = torch.tensor([5, -1, -1, 9])
    features = dict.fromkeys(growing.feature_names, (ids, None, None))
    outputs = growing(BagBatch.from_features(features, growing.feature_names))
    assert not outputs["sum"][1:3].any()
    assert growing.live_keys("t")[0].tolist() == [5, 9, -1]  # Of the feature without padding.


def test_gradients_of_several_forward_passes_go_to_the_rows_that_were_read() -> None:
    growing = placed(plan_of([_table()]), growing={"t": Growing(CAPACITY, eviction="lru")})
    batches = _key_batches(8, 4 * CAPACITY)
    held = [growing(batch) for batch in batches[:4]]
    rows = [_rows_of(growing, batch.ids) for batch in batches[:4]]
    for outputs in held:
        assert [_rows_of(growing, batch.ids) for batch in batches[:4]] == rows
        backward(outputs, random_gradients(outputs))
    growing(batches[4])
    assert [_rows_of(growing, batch.ids) for batch in batches[:4]] != rows


def test_a_step_keeps_its_rows_until_its_own_backward_pass() -> None:
    """Also where a later step ends first."""
    growing, (first, second, third) = _full_after_two_steps()
    outputs = growing(first)
    backward(held := growing(second), random_gradients(held))
    growing(third)
    assert set(first.ids.tolist()) <= set(growing.live_keys("t")[0].tolist())
    backward(outputs, random_gradients(outputs))


def test_batches_that_are_dropped_hold_no_rows() -> None:
    """Such as a hundred that are evaluated without `torch.no_grad`."""
    growing, (first, second, third) = _full_after_two_steps()
    for _ in range(100):
        growing(first)
    for batch in (second, third):
        train_step(growing, batch, 0)
    assert growing.key_counts()["t"].refused == 0
    assert set(third.ids.tolist()) <= set(growing.live_keys("t")[0].tolist())


def _full_after_two_steps() -> tuple[PlacedEmbeddings, list[BagBatch]]:
    """A table with four rows for keys, and steps of two keys each."""
    growing = placed(plan_of([_table(rows=5)]), growing={"t": Growing(4)})
    names = growing.feature_names
    ids = [torch.tensor([2 * step, 2 * step + 1]) for step in range(3)]
    return growing, [BagBatch.from_features(dict.fromkeys(names, (own, None, None)), names)
        for own in ids]  # fmt: skip


def test_other_batches_than_those_that_were_ahead_are_new() -> None:
    growing = placed(plan_of([_table()]), growing={"t": Growing(CAPACITY)})
    batches = _key_batches(5, CAPACITY)
    for prepared in look_ahead(batches[:3], growing):
        growing(prepared)["sum"].sum().backward()
        break
    train_step(growing, batches[3], 1)
    assert set(batches[3].ids.tolist()) <= set(growing.live_keys("t")[0].tolist())
    assert growing.key_counts()["t"].waiting == 0


@pytest.mark.parametrize("fault", ["another table's id", "a batch that nobody looks up"])
def test_a_checkpoint_after_a_batch_that_never_came_goes_on_to_the_same_bits(fault: str) -> None:
    tables = [_table(), Table("u", 5, 8, "float32", "adagrad", (Feature("fixed"),))]
    growing, again = (placed(plan_of(tables), growing={"t": Growing(CAPACITY)}) for _ in "ab")
    names = growing.feature_names

    def batch(first: int, fixed: int = 0) -> BagBatch:
        keys = torch.tensor([first, first + 1]), None, None
        features = {**dict.fromkeys(names, keys), "fixed": (torch.full((2,), fixed), None, None)}
        return BagBatch.from_features(features, names)

    train_step(growing, batch(0), 0)
    if fault == "another table's id":
        with pytest.raises(DataError, match="id 9 is not a row of table 'u'"):
            growing(batch(10, fixed=9))
    else:
        growing.prefetch(batch(10))
    train_step(growing, batch(20), 1)
    take_over(again, growing)
    for model in (growing, again):
        train_step(model, batch(30), 2)
    assert_alike(growing, again)
    assert again.live_keys("t")[0].tolist() == growing.live_keys("t")[0].tolist()


@pytest.mark.parametrize(
    ("growing", "named"),
    [
        ({"u": Growing(CAPACITY)}, "'u' grows and the plan lacks it; there are t"),
        ({"t": Growing(9)}, "'t' has 61 rows in the plan; a capacity of 9 keys takes 10"),
    ],
)
def test_what_does_not_fit_the_plan_is_named(growing: dict[str, Growing], named: str) -> None:
    with pytest.raises(PlanMismatchError, match=named):
        placed(plan_of([_table()]), growing=growing)


def test_rows_of_two_tables_begin_again_with_weights_of_their_own() -> None:
    tables = [Table(name, 3, 8, "float32", "sgd", (Feature(name),)) for name in ("a", "b")]
    how = {table.name: Growing(2) for table in tables}
    growing = placed(plan_of(tables), growing=how)
    for keys in ([1, 2], [3], [4], [5]):
        features = dict.fromkeys("ab", (torch.tensor(keys), None, None))
        growing(BagBatch.from_features(features, "ab"))  # A step that is dropped.
    weights = growing.state_dict()
    assert growing.key_counts()["a"].evicted > 0
    assert not torch.equal(weights["a.weight"], weights["b.weight"])
    assert len(set(weights["a.weight"][1:].flatten().tolist())) == 16
