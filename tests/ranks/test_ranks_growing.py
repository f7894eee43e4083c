"""Tables that grow over several ranks, beside fixed ones and beside key maps by themselves."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from executor_cases import (
    assert_equal_states,
    assert_same_bits,
    contents,
    load_contents,
    plan_of,
    take_over,
)
from fast_and_full import fewer, is_fast, mostly_slow, some
from ranks_cases import (
    backward_of_squares,
    batches_of,
    close,
    every_placement,
    sharded,
    table_with,
    train_step,
)
from ranks_launcher import Job, Outcomes, run
from torch import Tensor

from placer.errors import CheckpointError, PlanMismatchError
from placer.executor import BagBatch, PlacedEmbeddings, look_ahead
from placer.executor.memory.arena import weights_of_keys
from placer.growing import Growing, KeyCounts, KeyMap
from placer.growing.hashes import parts_of
from placer.growing.options import Int
from placer.plan.plan import Plan
from placer.storage import table_files
from placer.storage.checkpoint import load_model, save_model
from placer.storage.manifest import Checkpoint, Position
from placer.storage.tensor_rows import TensorRows
from placer.tables import OPTIMIZERS
from placer.training.growing import grown, resized_keys

CAPACITY = 60
STEPS = 6
SOME = ("hbm", "hot, then row-wise", "crossing cuts", "replicas", "cold rows staged")
MANY = {
    "lfu": Growing(CAPACITY),
    "lru": Growing(CAPACITY, eviction="lru"),
    "ttl": Growing(CAPACITY, ttl=3),
    "admission": Growing(CAPACITY, admission=2),
}
LOADED = {(2, 1): [*MANY], (1, 4): ["ttl", "admission"], (4, 2): ["lfu", "lru"]}
"""Of the numbers of ranks that save and load a state, each with every table or with some."""
RESIZED = {(1, 2, 35): [*MANY], (2, 2, 90): ["lfu", "lru"], (2, 4, 90): ["ttl", "admission"]}
"""The same for another capacity."""
REUSED, SAVED = some(MANY, "lru"), some(MANY)
AHEAD = some(MANY, "admission")


def keys_of(count: int, world: int) -> Int:
    """Any int64 that are keys, as many of each rank's part."""
    drawn = np.random.default_rng(5).integers(-(2**63), 2**63 - 1, 40 * count)
    parts = parts_of(drawn, world)
    own = [drawn[parts == part][: count // world] for part in range(world)]
    return np.concatenate(own)[np.random.default_rng(6).permutation(count)]


def some_placements(
    optimizer: str, poolings: Sequence[str] = ("sum", "none"), capacity: int = CAPACITY
) -> Plan:
    return every_placement(optimizer, poolings, capacity + 1).of_tables(SOME)


def key_batches(plan: Plan, world: int, step: int, keys: Int) -> list[BagBatch]:
    """The batch of each rank."""
    batches = batches_of(plan.tables, world, step)
    random = np.random.default_rng(step)
    for batch in batches:
        drawn = (keys.size * random.random(batch.ids.numel()) ** 2).astype(int)
        batch.ids.copy_(torch.from_numpy(keys[drawn]))
    return batches


def spans_by_table(plan: Plan, batch: BagBatch) -> dict[str, slice]:
    """The lookups of each table, whose features follow each other."""
    spans, bag = {}, 0
    for table in plan.tables:
        last = bag + batch.batch_size * len(table.features)
        spans[table.name] = slice(int(batch.offsets[bag]), int(batch.offsets[last]))
        bag = last
    return spans


class Maps:
    """The key maps of all ranks, read by one process."""

    def __init__(self, plan: Plan, growing: Mapping[str, Growing], world: int) -> None:
        self.plan = plan
        self.maps = {
            name: [KeyMap(how, part, world) for part in range(world)]
            for name, how in growing.items()
        }
        self.new_keys: dict[str, list[int]] = {}  # The keys that got these rows of the last step.

    def read(self, batches: Sequence[BagBatch]) -> tuple[list[BagBatch], dict[str, list[int]]]:
        """Batches with rows for keys, and the rows of each table that had another key before."""
        rows = [batch.ids.clone() for batch in batches]
        reused: dict[str, list[int]] = {}
        for name, maps in self.maps.items():
            parts = [own.ids[spans_by_table(self.plan, own)[name]] for own in batches]
            keys = torch.cat(parts).numpy()
            found, owners = np.empty(keys.size, np.int64), parts_of(keys, len(maps))
            reused[name], self.new_keys[name] = [], []
            for part, own in enumerate(maps):
                step = own.read(keys[owners == part], 2)
                found[owners == part] = step.rows
                reused[name] += step.reused.tolist()
                self.new_keys[name] += step.new_keys.tolist()
            by_rank = torch.split(torch.from_numpy(found), [part.numel() for part in parts])
            for batch, own_rows, values in zip(batches, rows, by_rank, strict=True):
                own_rows[spans_by_table(self.plan, batch)[name]] = values
        return [replace(batch, ids=own) for batch, own in zip(batches, rows, strict=True)], reused

    def counts(self, name: str) -> KeyCounts:
        return KeyCounts(*np.sum([own.counts for own in self.maps[name]], 0).tolist())


def growing_of(plan: Plan, how: Growing) -> dict[str, Growing]:
    return {table.name: how for table in plan.tables}


def like_a_vocabulary(rank: int, world: int, optimizer: str) -> None:
    """With rows enough: to the bit, whatever the plan, as the order of first reading says."""
    plan = every_placement(optimizer)
    growing = sharded(plan, growing=growing_of(plan, Growing(CAPACITY)))
    fixed = sharded(plan)
    keys = keys_of(40, world)
    rows_of: dict[str, dict[int, int]] = {table.name: {} for table in plan.tables}
    given = {table.name: [0] * world for table in plan.tables}
    for step in range(8 // max(world, 2)):
        batches = key_batches(plan, world, step, keys)
        rows = [batch.ids.clone() for batch in batches]
        for table, place in itertools.product(plan.tables, range(world)):
            span = spans_by_table(plan, batches[place])[table.name]
            read = batches[place].ids[span].tolist()
            for key in read:
                if key not in rows_of[table.name]:
                    (part,) = parts_of(np.array([key]), world).tolist()
                    rows_of[table.name][key] = 1 + part + world * given[table.name][part]
                    given[table.name][part] += 1
            rows[place][span] = torch.tensor([rows_of[table.name][key] for key in read]).long()
        as_rows = [replace(b, ids=own) for b, own in zip(batches, rows, strict=True)]
        mine, _ = train_step(growing, rank, batches, step)
        theirs, _ = train_step(fixed, rank, as_rows, step)
        assert_same_bits(mine, theirs)
    assert_same_bits(contents(fixed), contents(growing))
    for name, expected in rows_of.items():
        live, rows_live = growing.live_keys(name)
        assert dict(zip(live.tolist(), rows_live.tolist(), strict=True)) == expected
    for name, counts in growing.key_counts().items():
        assert counts.admitted == len(rows_of[name]) > CAPACITY // 2
    growing.close(), fixed.close()


def reused_rows(rank: int, world: int, optimizer: str, how: Growing) -> int:
    """Beside a fixed table with a row for each time that a key got one."""
    plan = some_placements(optimizer)
    model = sharded(plan, growing=growing_of(plan, how))
    maps, keys = Maps(plan, growing_of(plan, how), world), keys_of(240, world)
    names = [table.name for table in plan.tables]
    weights = model.state_dict()
    beginnings = {name: [weights[f"{name}.weight"][0]] for name in names}
    life_of = {name: {0: 0} for name in names}
    lives, found = [], []
    for step in range(24 // world):
        batches = key_batches(plan, world, step, keys)
        as_rows, reused = maps.read(batches)
        before = model.state_dict()
        outputs = model(batches[rank])
        after = model.state_dict()
        for name in names:
            read = torch.cat([b.ids[spans_by_table(plan, b)[name]] for b in as_rows]).tolist()
            for row in dict.fromkeys(read):
                if row not in life_of[name] or row in reused[name]:
                    life_of[name][row] = len(beginnings[name])
                    beginnings[name].append(after[f"{name}.weight"][row])
            changed = (before[f"{name}.weight"] != after[f"{name}.weight"]).any(1)
            assert set(changed.nonzero().flatten().tolist()) == set(reused[name])
            drawn = weights_of_keys(
                plan.tables_by_name[name], 3, np.array(maps.new_keys[name], int)
            )
            assert torch.equal(after[f"{name}.weight"][reused[name]], drawn)
        for batch in as_rows:
            for name, span in spans_by_table(plan, batch).items():
                lives_read = [life_of[name][row] for row in batch.ids[span].tolist()]
                batch.ids[span] = torch.tensor(lives_read).long()
        lives.append(as_rows)
        backward_of_squares(outputs)
        found.append({name: output.detach() for name, output in outputs.items()})
    counts = model.key_counts()
    assert counts == {name: maps.counts(name) for name in names}
    model.close()
    tables = [replace(table, rows=len(beginnings[table.name])) for table in plan.tables]
    start = {name: torch.stack(rows) for name, rows in beginnings.items()}
    fixed = sharded(plan_of(tables), weights=start)
    for step, as_lives in enumerate(lives):
        outputs = fixed(as_lives[rank])
        backward_of_squares(outputs)
        for name, output in outputs.items():
            close(found[step][name], output.detach(), f"step {step}, feature {name!r}")
    fixed.close()
    return min(count.evicted + count.expired for count in counts.values())


def ahead(rank: int, world: int, how: Growing, steps: int) -> None:
    """Looking ahead changes nothing, and a state that is saved meanwhile has all that was sent."""
    plan = some_placements("adagrad")
    keys, found = keys_of(240, world), []
    state: dict[str, Tensor] = {}
    for looks, first in ((False, 0), (True, 0), (True, 5), (False, 5)):
        model = sharded(plan, growing=growing_of(plan, how))
        if first:  # Where the run that looked ahead has saved.
            load_contents(model, state)
        batches = [key_batches(plan, world, step, keys)[rank] for step in range(steps)][first:]
        for step, batch in enumerate(look_ahead(batches, model) if looks else batches, first):
            backward_of_squares(model(batch))
            if step % 5 == 4:
                saved_now = contents(model) | model.state_dict()
                state = saved_now if looks and step == 4 else state
        counts = model.key_counts()
        found.append(contents(model) | {"counts": torch.tensor(list(counts.values()))})
        assert min(count.evicted + count.expired for count in counts.values()) > 10
        model.close()
    for other in found[1:]:
        assert_equal_states(found[0], other)


def other_batches(rank: int, world: int, how: Growing) -> None:
    """A state that is saved behind a loop goes on with other batches as the run itself does."""
    plan, keys = some_placements("adagrad"), keys_of(240, world)
    first, second = (sharded(plan, growing=growing_of(plan, how)) for _ in range(2))
    batches = [key_batches(plan, world, step, keys) for step in range(5)]
    for step, batch in enumerate(look_ahead([own[rank] for own in batches], first)):
        backward_of_squares(first(batch))
        if step == 2:
            break
    take_over(second, first)
    admitted = [counts.admitted for counts in first.key_counts().values()]
    for step in range(5, 9):
        others = key_batches(plan, world, step, keys)
        for model in (first, second):
            train_step(model, rank, others, step)
        if step == 5:
            counts = list(first.key_counts().values())
            assert any(one.admitted > was for one, was in zip(counts, admitted, strict=True))
    assert_same_bits(contents(first), contents(second))
    assert first.key_counts() == second.key_counts()
    first.close(), second.close()


def saved(rank: int, world: int, how: Growing) -> tuple[dict[str, Tensor], list[KeyCounts]]:
    """A run goes on from its state as if nothing had been; the state."""
    plan = some_placements("adam", ("sum",))
    keys = keys_of(240, world)
    first, second = (sharded(plan, growing=growing_of(plan, how), seed=seed) for seed in (3, 3))
    half = 3 * STEPS // world
    for step in range(half):
        train_step(first, rank, key_batches(plan, world, step, keys), step)
    state = contents(first)
    counts = list(first.key_counts().values())
    take_over(second, first)
    for step in range(half, 2 * half):
        batches = key_batches(plan, world, step, keys)
        mine, _ = train_step(first, rank, batches, step)
        theirs, _ = train_step(second, rank, batches, step)
        assert_same_bits(mine, theirs)
    assert_same_bits(contents(first), contents(second))
    assert first.key_counts() == second.key_counts()
    first.close(), second.close()
    return state, counts


def loaded(
    rank: int, world: int, how: Growing, state: dict[str, Tensor], counts: list[KeyCounts]
) -> None:
    """What another number of ranks has saved: every key has its row, and trains on in it."""
    plan = some_placements("adam", ("sum",), how.capacity)
    grows = growing_of(plan, how)
    model = sharded(plan, growing=grows, seed=8)
    load_contents(model, state)
    assert_same_bits(
        {key: value for key, value in contents(model).items() if ".keys." not in key}, state
    )
    assert list(model.key_counts().values()) == counts
    alone = PlacedEmbeddings(plan, growing=grows, lr=0.1, eps=1e-6, seed=8, backend="torch")
    take_over(alone, model)
    live = {name: model.live_keys(name) for name in grows}
    for name, (keys, rows) in live.items():
        assert all(map(torch.equal, alone.live_keys(name), (keys, rows)))
        assert keys.unique().numel() == keys.numel() > 10
    known = torch.stack([keys[:10] for keys, _ in live.values()])
    (batch,) = batches_of(plan.tables, 1, 0)
    for number, span in enumerate(spans_by_table(plan, batch).values()):
        batch.ids[span] = known[number][batch.ids[span] % known.shape[1]]
    with torch.no_grad():  # What keys have learned is there.
        outputs, theirs = model(batch), alone(batch)
    for name, output in outputs.items():
        close(output, theirs[name], f"feature {name!r}")
    again, keys = sharded(plan, growing=grows, seed=8), keys_of(240, world)
    take_over(again, model)
    for step in range(STEPS):
        batches = key_batches(plan, world, step, keys)
        for each in (model, again):
            train_step(each, rank, batches, step)
    assert_same_bits(contents(model), contents(again))
    model.close(), again.close()


def with_capacity(state: dict[str, Tensor], how: Growing, other: Growing) -> dict[str, Tensor]:
    """A state with another capacity: to the bit, by key; the hottest keys if there is no room."""
    plans = [
        replace(plan, growing=growing_of(plan, one))
        for one in (how, other)
        for plan in [some_placements("adam", ("sum",), one.capacity)]
    ]
    groups = {
        "key_maps": lambda name: ".keys." in name,
        "embeddings": lambda name: name.endswith(".weight"),
        "embedding_optimizer": lambda name: ".exp_avg" in name or name == "updates",
    }
    tensors = {
        group: {name: values for name, values in state.items() if has(name)}
        for group, has in groups.items()
    }
    assert sum(map(len, tensors.values())) == len(state)
    before = Checkpoint(Position(), {}, tensors)
    keys = resized_keys(before, *plans)
    after = grown(before, *plans, keys)
    found = {
        name: TensorRows.of(tensor).whole()
        for group in after.tensors.values()
        for name, tensor in group.items()
    }
    for name, one in keys.items():
        was = table_files.keys_of(before, name, how)
        live, rows = one.keys.live()
        assert live.size == min(was.live()[0].size, other.capacity)
        assert one.dropped == was.live()[0].size - live.size == (was.counts.live - live.size)
        assert np.isin(live, was.live()[0]).all()
        for what in ("weight", "exp_avg", "exp_avg_sq"):
            tensor = f"{name}.{what}"
            assert torch.equal(found[tensor][rows], state[tensor][was.find(live)])
            assert torch.equal(found[tensor][0], state[tensor][0])
    return found


def loaded_as_it_was(
    rank: int, world: int, how: Growing, state: dict[str, Tensor], resized: dict[str, Tensor]
) -> None:
    """A module makes of a state of another capacity what `placer grow` does."""
    plan = some_placements("adam", ("sum",), how.capacity)
    one, other = (sharded(plan, growing=growing_of(plan, how), seed=0) for _ in range(2))
    for model, source in ((one, state), (other, resized)):
        load_contents(model, source)
    assert_same_bits(contents(one), contents(other))
    assert one.key_counts() == other.key_counts()
    one.close(), other.close()


def evaluates(rank: int, world: int) -> None:
    """Without gradients keys are found, unknown ones read row 0, and nothing changes."""
    plan = plan_of([table_with("adagrad", ("sum",))])
    model = sharded(plan, growing={"t": Growing(CAPACITY)})
    keys = torch.arange(10, 26, 2) * 2**40
    batch = BagBatch.from_features({"t.sum": (keys, None, None)}, ["t.sum"])
    model(batch)["t.sum"].sum().backward()
    before, counts = model.state_dict(), model.key_counts()
    strange = BagBatch.from_features({"t.sum": (keys + 1, None, None)}, ["t.sum"])
    with torch.no_grad():
        known, unknown = model(batch)["t.sum"], model(strange)["t.sum"]
        for prepared in look_ahead([batch, strange], model) if world > 1 else ():
            model(prepared)
    live = dict(zip(*(values.tolist() for values in model.live_keys("t")), strict=True))
    weight = before["t.weight"]
    assert torch.equal(known, weight[[live[key] for key in keys.tolist()]])
    assert torch.equal(unknown, weight[[0] * 8])
    assert_same_bits(before, model.state_dict())
    assert model.key_counts() == counts
    model.close()


def dropped(rank: int, world: int) -> None:
    """What one rank may still train on keeps its rows; what all have dropped does not."""
    how = Growing(6 * world)
    model = sharded(plan_of([table_with("sgd", ("sum",), rows=how.rows)]), growing={"t": how})
    drawn = keys_of(10 * world, world)
    by_part = torch.from_numpy(drawn[parts_of(drawn, world).argsort()]).view(world, 5, 2)

    def look_up(step: int) -> Tensor:
        keys = by_part[:, step].reshape(-1), None, None
        return model(BagBatch.from_features({"t.sum": keys}, ["t.sum"]))["t.sum"]

    def has_rows(step: int) -> bool:
        return bool(torch.isin(by_part[:, step], model.live_keys("t")[0]).all())

    kept = [look_up(0)] if rank == 0 else [look_up(0).detach()]
    for step in (1, 2, 3):
        look_up(step).sum().backward()
    assert [has_rows(step) for step in range(4)] == [True, True, True, False]
    kept.clear()
    look_up(4).sum().backward()
    assert has_rows(4)
    model.close()


def parts_by_themselves(rank: int, world: int, how: Growing) -> None:
    """Some of the tables train by themselves as they do with all others."""
    plan, keys = some_placements("adagrad"), keys_of(240, world)
    whole, cut = (sharded(plan, growing=growing_of(plan, how)) for _ in range(2))
    parts = [cut.part(SOME[:2]), cut.part(SOME[2:])]
    for step in range(8):
        batch = key_batches(plan, world, step, keys)[rank]
        bounds = [batch.batch_size * 2 * tables for tables in (0, 2, len(SOME))]
        for model, (first, last) in [
            (whole, (0, bounds[-1])),
            (parts[0], (0, bounds[1])),
            (parts[1], (bounds[1], bounds[2])),
        ]:
            offsets = batch.offsets[first : last + 1]
            ids = batch.ids[offsets[0] : offsets[-1]]
            backward_of_squares(model(BagBatch(ids, offsets - offsets[0], batch.batch_size)))
    assert_same_bits(contents(whole), contents(cut))
    assert whole.key_counts() == cut.key_counts()
    assert min(counts.evicted for counts in whole.key_counts().values()) > 0
    _ahead = model.prefetch(BagBatch(ids, offsets - offsets[0], batch.batch_size))
    assert [each.keys.ahead for each in (cut, *parts)] == [0, 0, 1]
    whole.close(), cut.close()


def in_a_folder(rank: int, world: int, folder: str, how: Growing) -> None:
    """A model saved by `save_model` has its keys in another process."""
    plan = some_placements("adagrad")
    model = sharded(plan, growing=growing_of(plan, how))
    save_model(f"{folder}/empty", model)
    for step in range(STEPS):
        train_step(model, rank, key_batches(plan, world, step, keys_of(240, world)), step)
    save_model(f"{folder}/trained", model)
    other = PlacedEmbeddings(plan, growing=growing_of(plan, how), seed=8)
    again = sharded(plan, growing=growing_of(plan, how), seed=8)
    for name in ("trained", "empty"):
        load_model(f"{folder}/{name}", other)
        load_model(f"{folder}/{name}", again)
        for table in growing_of(plan, how):
            live = again.live_keys(table)
            assert all(map(torch.equal, other.live_keys(table), live))
            assert bool(live[0].numel()) == (name == "trained")
        if name == "trained":
            assert_same_bits(contents(again), contents(model))
    fixed = sharded(plan)
    with pytest.raises(CheckpointError, match=r"keys\.rows is of no table"):
        load_model(f"{folder}/trained", fixed)
    save_model(f"{folder}/fixed", fixed)
    with pytest.raises(CheckpointError, match=r"keys\.rows is missing"):
        load_model(f"{folder}/fixed", again)
    for each in (model, again, fixed):
        each.close()


def refused(rank: int, world: int) -> list[str]:
    """Faults of one rank or of all are errors on all."""
    plan, said = plan_of([table_with("adagrad", ("sum",), rows=2)]), []
    mine = {"t": Growing(CAPACITY, ttl=rank)}
    for one, growing in (
        (plan, {"t": Growing(1)}),
        (plan, {"u": Growing(1)}),
        (plan_of([table_with("adagrad", ("sum",))]), mine),
    ):
        with pytest.raises(PlanMismatchError) as error:
            sharded(one, growing=growing)
        said.append(str(error.value))
    return said


def jobs_of(world: int) -> list[Job]:
    jobs: list[Job] = [("evaluates", evaluates, ())]
    vocabularies = some(OPTIMIZERS, "adam")
    jobs += [(f"vocabulary {name}", like_a_vocabulary, (name,)) for name in vocabularies]
    jobs += [
        (f"reused {name}", reused_rows, (optimizer, how))
        for (name, how), optimizer in zip(MANY.items(), OPTIMIZERS, strict=True)
        if name in REUSED
    ]
    jobs += [(f"saved {name}", saved, (MANY[name],)) for name in SAVED]
    if world > 1:
        jobs += [(f"ahead {name}", ahead, (MANY[name], fewer(10, 8))) for name in AHEAD]
        if not is_fast():
            jobs += [("other batches", other_batches, (MANY["lru"],))]
        jobs += [("dropped", dropped, ())]
        jobs += [("parts", parts_by_themselves, (MANY["lru"],)), ("refused", refused, ())]
    left_out = {"vocabulary sgd", "vocabulary adagrad", "vocabulary rowwise_adagrad"}
    left_out |= {f"{kind} {name}" for kind in ("reused", "ahead") for name in MANY}
    left_out -= {"reused lru", "ahead admission"}
    left_out |= {f"saved {name}" for name in MANY if world == 4 and name not in LOADED[4, 2]}
    return [job for job in jobs if world == 2 or job[0] not in left_out]


@functools.cache
def done_by(world: int) -> Outcomes:
    return run(world, jobs_of(world))


@functools.cache
def saved_by(world: int, name: str) -> tuple[dict[str, Tensor], list[KeyCounts]]:
    """What "saved" gave on the first rank; the fast tests leave this job to the slow ones."""
    job = f"saved {name}"
    done = done_by(world)
    return (done if job in done else run(world, [(job, saved, (MANY[name],))])).of(job)[0]


def on_ranks(names: Callable[[int], list[str]]) -> list[object]:
    """Each number of ranks with the names of its jobs; slow, but for two ranks."""
    return [
        pytest.param(world, name, marks=[pytest.mark.slow] if world != 2 else [])
        for world in (1, 2, 4)
        for name in names(world)
    ]


@pytest.mark.parametrize(
    ("world", "name"), on_ranks(lambda world: [name for name, *_ in jobs_of(world)])
)
def test_on_many_ranks(world: int, name: str) -> None:
    outcome = done_by(world).of(name)
    if name.startswith("reused"):
        assert min(outcome) > 10  # Rows that changed hands.


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_saved_model_has_its_keys(tmp_path: Path, world: int) -> None:
    run(world, [("saves", in_a_folder, (str(tmp_path), MANY["admission"]))]).of("saves")


@pytest.mark.parametrize("world", mostly_slow((2, 4), 2))
def test_what_does_not_fit_is_named_on_every_rank(world: int) -> None:
    for few, unknown, other in done_by(world).of("refused"):
        assert "capacity 1 is less than the" in few
        assert "'u' grows and the plan lacks it" in unknown
        assert "have another plan than rank 0, or other growing tables" in other


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), LOADED)
def test_every_key_has_its_row_again_on_another_number_of_ranks(source: int, target: int) -> None:
    jobs: list[Job] = [
        (name, loaded, (MANY[name], *saved_by(source, name))) for name in LOADED[source, target]
    ]
    after = run(target, jobs)
    for name, _, _ in jobs:
        after.of(name)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target", "capacity"), RESIZED)
def test_keys_go_on_with_another_capacity(source: int, target: int, capacity: int) -> None:
    jobs: list[Job] = []
    for name in RESIZED[source, target, capacity]:
        how = MANY[name]
        other = replace(how, capacity=capacity)
        state, counts = saved_by(source, name)
        resized = with_capacity(state, how, other)
        evicted = [
            one._replace(evicted=one.evicted + max(0, one.live - capacity)) for one in counts
        ]
        jobs += [
            (name, loaded, (other, resized, evicted)),
            (f"{name} by itself", loaded_as_it_was, (other, state, resized)),
        ]
    after = run(target, jobs)
    for name, _, _ in jobs:
        after.of(name)
