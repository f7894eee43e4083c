"""Modules of a model whose tables grow: any int64 is an id, in one process and over ranks."""

import copy
import io
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from apply_plan_cases import plan_for, table
from executor_cases import assert_equal_states
from fast_and_full import combinations
from ranks_launcher import run
from torch import Tensor, nn

from placer import Plan, apply_plan, remove_plan
from placer.adapters.pytorch import AppliedPlan
from placer.errors import CheckpointError, PlanMismatchError
from placer.growing import Growing
from placer.storage.checkpoint import load_model, load_tables, save_model, save_tables

WORLD = 2
TABLES = (
    table("item", 61, 8, "none"),
    table("pages", 41, 8, "mean"),
    table("words", 51, 4, "sum"),
)
HOW = {one.name: Growing(one.rows - 1) for one in TABLES}
PADDING = 0


class Model(nn.Module):
    """Items are looked up twice in a step; pages have padding, words have weights."""

    def __init__(self, seed: int = 0, more: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.item = nn.Embedding(61 + more, 8)
        self.pages = nn.EmbeddingBag(41 + more, 8, mode="mean", padding_idx=PADDING)
        self.words = nn.EmbeddingBag(51 + more, 4, mode="sum")
        self.scale, self.out = nn.Linear(1, 1), nn.Linear(28, 1)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        scores = self.scale(batch["scores"].unsqueeze(2)).squeeze(2)
        parts = [
            self.item(batch["history"]).mean(1),
            self.item(batch["item"]),
            self.pages(batch["pages"]),
            self.words(batch["words"], per_sample_weights=scores),
        ]
        return self.out(torch.cat(parts, 1)).squeeze(1)


SIZES = {"history": ("item", 3), "item": ("item", 1), "pages": ("pages", 4), "words": ("words", 2)}
"""Ids of each input in the order in which the model looks them up: their table, ids a sample."""


def ids_of(seed: int, share: float) -> dict[str, Tensor]:
    """Ids of a batch, of so many times as many as there are rows; 0 is padding."""
    random = torch.Generator().manual_seed(seed)
    batch = {}
    for name, (of, length) in SIZES.items():
        count = int(share * HOW[of].capacity)
        drawn = torch.rand((8, length), generator=random) ** 2 * count
        batch[name] = drawn.long() if name != "item" else drawn.long().squeeze(1)
    return batch | {"scores": torch.rand((8, 2), generator=random)}


def as_keys(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Any int64 in the place of ids, but for the padding; the ends of the range are among them."""
    keys = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, 400)
    keys[:3] = PADDING, 2**63 - 1, -(2**63)
    known = torch.from_numpy(keys)
    return {name: known[ids] if name in SIZES else ids for name, ids in batch.items()}


def train(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    out: Tensor = model(batch)
    out.tanh().square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return out.detach()


def grown(
    placement: str = "staged",
    optimizer: str = "adagrad",
    seed: int = 0,
    more: int = 0,
    **how: object,
) -> tuple[Model, AppliedPlan]:
    growing = {name: replace(one, capacity=one.capacity + more, **how) for name, one in HOW.items()}
    tables = tuple(replace(one, rows=one.rows + more) for one in TABLES)
    plan = plan_for(placement, tables, optimizer)
    model = Model(seed, more)
    return model, apply_plan(model, plan, lr=0.1, growing=growing)


@pytest.mark.parametrize(
    ("placement", "optimizer"), [("staged", "adam"), ("hbm", "sgd"), ("columns", "rowwise_adagrad")]
)
def test_with_rows_enough_it_trains_like_a_vocabulary(placement: str, optimizer: str) -> None:
    ours, applied = grown(placement, optimizer)
    theirs = Model()
    apply_plan(theirs, plan_for(placement, TABLES, optimizer), lr=0.1)
    rows: dict[str, dict[int, int]] = {name: {} for name in HOW}
    for step in range(8):
        batch = as_keys(ids_of(step, 0.9))
        as_rows = dict(batch)
        for name, (of, _) in SIZES.items():
            known = rows[of]
            found = [
                PADDING
                if of == "pages" and key == PADDING
                else known.setdefault(key, len(known) + 1)
                for key in batch[name].flatten().tolist()
            ]
            as_rows[name] = torch.tensor(found).view(batch[name].shape)
        assert torch.equal(train(ours, batch), train(theirs, as_rows))
    for name, known in rows.items():
        live = applied.live_keys(name)
        assert dict(zip(*(values.tolist() for values in live), strict=True)) == known
        assert torch.equal(applied.tables[name].weight(), theirs.state_dict()[f"{name}.weight"])
    assert {2**63 - 1, -(2**63)} < set(rows["item"])


def test_evaluation_gives_no_rows_and_padding_reads_zeros() -> None:
    model, applied = grown()
    train(model, as_keys(ids_of(0, 1.0)))
    counts, state = applied.key_counts(), model.state_dict()
    with torch.no_grad():
        unknown = model.item(torch.tensor([[10**17, -5]]))
        assert torch.equal(unknown[0], state["item.weight"][[0, 0]])
        assert not model.pages(torch.tensor([[PADDING, PADDING]])).any()
    assert torch.equal(model.item.weight, state["item.weight"])
    assert applied.key_counts() == counts
    plan = plan_for("hbm", [replace(TABLES[0], name="0")])
    for padding in (3, -1):
        padded = nn.Sequential(nn.Embedding(61, 8), nn.Linear(8, 1))
        padded[0].padding_idx = padding  # torch's argument makes 60 of -1.
        apply_plan(padded, plan, growing={"0": HOW["item"]})
        for _ in range(2):
            out = padded[0](torch.tensor([9, padding, 8, 60]))
            out.sum().backward()
        assert out.any(1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("together", [False, True])
def test_rows_of_calls_that_are_not_updated_yet_keep_their_keys(together: bool) -> None:
    model, applied = grown(eviction="lru")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if together:
        handle = applied.update_with(optimizer)
    first = as_keys(ids_of(0, 5.0))

    def rows() -> list[int]:
        live = applied.live_keys("item")
        known = dict(zip(*(values.tolist() for values in live), strict=True))
        return [known.get(key, 0) for key in first["item"].tolist()]

    held = [model(first)]
    before = rows()
    assert all(before)
    for step in range(1, 70):  # More steps than `make_embeddings` takes to be open.
        out = model(as_keys(ids_of(step, 5.0)))
        if together:
            out.sum().backward()
        else:
            held.append(out)
        assert rows() == before
    assert applied.key_counts()["item"].refused > 0
    if together:
        held[0].sum().backward()
        optimizer.step()
        handle.remove()
    else:
        del out, held
    refused = applied.key_counts()["item"].refused
    for step in range(70, 75):
        train(model, as_keys(ids_of(step, 5.0)))
    assert rows() != before
    assert applied.key_counts()["item"].refused == refused


def _trained(steps: int, **how: object) -> tuple[Model, AppliedPlan]:
    model, applied = grown(**how)
    for step in range(steps):
        train(model, as_keys(ids_of(step, 4.0)))
    return model, applied


def _assert_same_run(one: Model, other: Model, applied: tuple[AppliedPlan, AppliedPlan]) -> None:
    """Both go on to the same bits."""
    for step in range(20, 30):
        batch = as_keys(ids_of(step, 4.0))
        assert torch.equal(train(one, batch), train(other, batch))
    assert_equal_states(one.state_dict(), other.state_dict())
    assert_equal_states(applied[0].state_dict(), applied[1].state_dict())
    assert applied[0].key_counts() == applied[1].key_counts()
    assert min(counts.evicted for counts in applied[0].key_counts().values()) > 5


@pytest.mark.parametrize("way", ["dicts", "tables", "model", "dcp", "copy", "pickle"])
def test_a_run_goes_on_to_the_same_bits(way: str, tmp_path: Path) -> None:
    first, applied = _trained(20, admission=2)
    if way == "copy":
        second = copy.deepcopy(first)
    elif way == "pickle":
        file = io.BytesIO()
        torch.save(first, file)
        file.seek(0)
        second = torch.load(file, weights_only=False)
    else:
        # Under another plan; of another start, and with keys of its own.
        second, other = grown("hbm", seed=5, admission=2)
        train(second, as_keys(ids_of(99, 4.0)))
    if way == "dicts":
        second.load_state_dict(first.state_dict())
        other.load_state_dict(applied.state_dict())
    elif way == "tables":
        for each in (applied, other):
            each.leave_state_dict()
        assert not any("item" in name for name in first.state_dict())
        save_tables(tmp_path / "tables", applied)
        second.load_state_dict(first.state_dict())
        load_tables(tmp_path / "tables", other)
        for each in (applied, other):
            for one in each.tables.values():
                one.in_state_dict = True
    elif way == "model":
        save_model(tmp_path / "model", first)
        load_model(tmp_path / "model", second)
    elif way == "dcp":
        dcp.save({"model": first, "tables": applied}, checkpoint_id=tmp_path)
        dcp.load({"model": second, "tables": other}, checkpoint_id=tmp_path)
    else:
        other = AppliedPlan({name: getattr(second, name).table for name in HOW})
    _assert_same_run(first, second, (applied, other))


@combinations("way, more", ["dicts", "tables", "model"], [30, -20])
def test_a_model_with_other_capacities_loads_a_state(way: str, more: int, tmp_path: Path) -> None:
    first, applied = grown(optimizer="adam")
    for step in range(6):
        train(first, as_keys(ids_of(step, 0.9)))
    second, other = grown("columns", "adam", seed=5, more=more)
    states = first.state_dict(), applied.state_dict()
    save_tables(tmp_path / "tables", applied)
    save_model(tmp_path / "model", first)
    with warnings.catch_warnings(record=True) as said:
        if way == "model":
            load_model(tmp_path / "model", second)
        else:
            second.load_state_dict(states[0])
        if way == "tables":
            load_tables(tmp_path / "tables", other)
        if way == "dicts":
            other.load_state_dict(states[1])
    evicted = {one for one in HOW for each in said if f"table {one!r}: " in str(each.message)}
    assert evicted == (set(HOW) if more < 0 else set())
    for name, how in HOW.items():
        live = applied.live_keys(name)
        keys, rows = other.live_keys(name)
        assert keys.numel() == min(live[0].numel(), how.capacity + more)
        known = dict(zip(*(values.tolist() for values in live), strict=True))
        before = [known[key] for key in keys.tolist()]
        for what in ("weight", "exp_avg", "exp_avg_sq"):
            one, two = (
                model.state_dict()[f"{name}.weight"]
                if what == "weight"
                else tables.optimizer_state_dict()[f"{name}.{what}"]
                for model, tables in ((first, applied), (second, other))
            )
            assert torch.equal(two[rows], one[before]), (name, what)
    if more > 0:
        for step in range(6, 9):
            batch = as_keys(ids_of(step, 0.9))
            assert torch.equal(train(first, batch), train(second, batch))


def test_the_folder_of_a_model_has_the_names_of_its_state_dict(tmp_path: Path) -> None:
    first, _ = _trained(3)
    save_model(tmp_path / "model", first)
    second, _ = grown(seed=5)
    dcp.load({"model": second}, checkpoint_id=tmp_path / "model")
    assert_equal_states(second.state_dict(), first.state_dict())


def test_what_has_no_keys_is_refused(tmp_path: Path) -> None:
    model, applied = _trained(3)
    state, plain = model.state_dict(), Model(seed=8).state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*item\.keys\.rows"):
        model.load_state_dict(plain)
    for name in HOW:  # Not even in part: rows without keys are nobody's.
        assert torch.equal(model.state_dict()[f"{name}.weight"], state[f"{name}.weight"])
    fixed = Model()
    placed = apply_plan(fixed, plan_for("hbm", TABLES))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*item\.keys\.rows"):
        fixed.load_state_dict(state)
    save_tables(tmp_path / "fixed", placed)
    with pytest.raises(CheckpointError, match=r"tables\.item\.keys\.rows is missing"):
        load_tables(tmp_path / "fixed", applied)
    other, _ = grown(admission=3)
    with pytest.raises(CheckpointError, match="admission 3"):
        other.load_state_dict(state)


def test_removing_the_plan_gives_rows_and_keys() -> None:
    model, _ = _trained(3)
    before = model.state_dict()
    state = remove_plan(model)
    assert torch.equal(model.item.weight, before["item.weight"])
    assert torch.equal(state["item.keys.rows"], before["item.keys.rows"])


@pytest.mark.parametrize(
    ("growing", "rows", "message"),
    [
        ({"item": Growing(60)}, 70, "the model 70 × 8; make the module with 61 rows, its capacity"),
        ({"item": Growing(50)}, 61, "has 61 rows; a capacity of 50 keys takes 51"),
        ({"user": Growing(60)}, 61, "table 'user' grows but is not listed"),
    ],
)
def test_what_does_not_fit_is_named(growing: dict[str, Growing], rows: int, message: str) -> None:
    model = nn.ModuleDict({"item": nn.Embedding(rows, 8)})
    with pytest.raises(PlanMismatchError, match=message):
        apply_plan(model, plan_for("hbm", TABLES[:1]), growing=growing)


def _alike(model: Model) -> None:
    """Let all rows of a table begin alike, so that it does not matter which a key gets."""
    for name in HOW:
        getattr(model, name).weight.data[:] = torch.linspace(
            -1, 1, getattr(model, name).weight.shape[1]
        )


def _by_key(applied: AppliedPlan) -> dict[str, dict[int, Tensor]]:
    found = {}
    for name in HOW:
        keys, rows = applied.live_keys(name)
        weight = applied.tables[name].weight()
        found[name] = dict(zip(keys.tolist(), weight[rows], strict=True))
    return found


def _start(more: int = 0, **how: object) -> tuple[Model, AppliedPlan, Plan]:
    plan = plan_for("columns", [replace(one, rows=one.rows + more) for one in TABLES], "adagrad")
    model = Model(more=more)
    _alike(model)
    growing = {name: replace(one, capacity=one.capacity + more, **how) for name, one in HOW.items()}
    return model, apply_plan(model, plan, lr=0.1, growing=growing, backend="torch"), plan


def _work(rank: int, world: int, folder: Path) -> object:
    model, applied, _ = _start()
    outputs = []
    for step in range(6):
        outputs.append(_rank_step(model, as_keys(ids_of(step * WORLD + rank, 0.5))))
    learned = _by_key(applied)
    save_tables(folder, applied)
    # With few rows: a run goes on to the same bits, also where gradients accumulate.
    first, one, _ = _start(eviction="lru")
    second, other, _ = _start(eviction="lru")
    optimizer = torch.optim.SGD(first.parameters(), lr=0.0)
    handle = one.update_with(optimizer)
    for step in range(12):
        first(as_keys(ids_of(step * WORLD + rank, 4.0))).sum().backward()
        if step % 3 == 2:
            optimizer.step()
    handle.remove()
    state, trained = first.state_dict(), one.state_dict()
    second.load_state_dict(state)
    other.load_state_dict(trained)
    third, larger, _ = _start(30, eviction="lru")
    third.load_state_dict(state)
    larger.load_state_dict(trained)
    sums = larger.optimizer_state_dict()
    for name, rows in _by_key(other).items():
        assert_equal_states(_by_key(larger)[name], rows)
        live = larger.live_keys(name)[1]
        assert torch.equal(sums[f"{name}.sum"][live], trained[f"{name}.sum"][live])
    _rank_step(third, as_keys(ids_of(rank, 4.0)))
    for step in range(12, 18):
        batch = as_keys(ids_of(step * WORLD + rank, 4.0))
        assert torch.equal(_rank_step(first, batch), _rank_step(second, batch))
    assert_equal_states(first.state_dict(), second.state_dict())
    assert min(counts.evicted for counts in one.key_counts().values()) > 5
    return outputs, learned, applied.key_counts()


def _rank_step(model: Model, batch: Mapping[str, Tensor]) -> Tensor:
    """Dense layers stay as they are."""
    out: Tensor = model(batch)
    out.square().mean().backward()
    return out.detach() + 0.0


@pytest.mark.slow
def test_ranks_train_as_one_process(tmp_path: Path) -> None:
    outcomes = run(WORLD, [("work", _work, (tmp_path / "tables",))])
    model, applied, _ = _start()
    expected: list[list[Tensor]] = []
    for step in range(6):
        outs = [model(as_keys(ids_of(step * WORLD + rank, 0.5))) for rank in range(WORLD)]
        (sum(out.square().mean() for out in outs) / WORLD).backward()
        expected.append([out.detach() for out in outs])
    learned = _by_key(applied)
    for rank, (outputs, theirs, counts) in enumerate(outcomes.of("work")):
        for step, out in enumerate(outputs):
            torch.testing.assert_close(out, expected[step][rank])
        torch.testing.assert_close(theirs, learned)
        assert counts["item"].admitted == len(learned["item"]) > 15
    _, one, _ = _start()
    load_tables(tmp_path / "tables", one)  # What two ranks wrote.
    torch.testing.assert_close(_by_key(one), learned)
