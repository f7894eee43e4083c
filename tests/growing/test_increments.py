"""Increments between checkpoints: a server that takes them answers as the whole export does."""

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_cases import load
from cli_cases import fail, invoke, succeed
from growing_cases import CONFIG, click_samples, growing_log, growing_plan
from safetensors.torch import load_file, save_file
from torch import Tensor

from placer import Plan
from placer.errors import CheckpointError, PlanMismatchError
from placer.executor import BagBatch
from placer.growing import Growing, KeyMap
from placer.storage.serving import ReadOnlyTables, load_read_only
from placer.storage.table_files import write_increment, write_tables
from placer.training.checkpoint import open_checkpoint
from placer.training.config import CheckpointPolicy
from placer.training.loop import train
from placer.training.reading import batches

STEPS = 10, 20, 30, 36
HOW = Growing(60, ttl=3)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's checkpoints, the whole export of each, and the increments between them."""
    folder = tmp_path_factory.mktemp("exports")
    log = growing_log(how=HOW)
    plan = growing_plan(log, how=HOW)
    plan.save(folder / "plan.json")
    policy = CheckpointPolicy(folder / "runs", every_steps=10, keep=9)
    assert train(plan, log, CONFIG, checkpoints=policy).steps == STEPS[-1]
    for before, step in zip((None, *STEPS), STEPS, strict=False):
        opened = open_checkpoint(_run(folder, step))
        write_tables(plan, opened, _whole(folder, step))
        if before:
            earlier = open_checkpoint(_run(folder, before))
            assert write_increment(plan, earlier, opened, _increment(folder, step)) > 0
    return folder


def _run(folder: Path, step: int) -> Path:
    return folder / "runs" / f"step-{step:012d}"


def _whole(folder: Path, step: int) -> Path:
    return folder / f"whole-{step}.safetensors"


def _increment(folder: Path, step: int) -> Path:
    return folder / f"increment-{step}.safetensors"


def _plan(placement: str) -> Plan:
    return growing_plan(growing_log(how=HOW), placement, HOW)


def _loaded(exports: Path, step: int, placement: str = "hbm", backend: str = "torch") -> Any:
    return load_read_only(_plan(placement), _whole(exports, step), backend=backend)


def _answers(tables: ReadOnlyTables) -> dict[str, Tensor]:
    """Pooled rows of the whole log, whose early keys were evicted, and of keys nobody has read."""
    answers: dict[str, list[Tensor]] = {}
    for chunk in batches(growing_log(click_samples(), HOW), 64):
        bags = {
            name: tuple(
                None if one is None else torch.tensor(one) for one in (own.ids, own.offsets, None)
            )
            for name, own in chunk.features.items()
        }
        for name, pooled in tables(BagBatch.from_features(bags, tables.feature_names)).items():
            answers.setdefault(name, []).append(pooled)
    return {name: torch.cat(parts) for name, parts in answers.items()}


def _assert_equal(one: ReadOnlyTables, other: ReadOnlyTables) -> None:
    ours, theirs = _answers(one), _answers(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), theirs.keys()


@pytest.mark.parametrize(
    ("placement", "backend"),
    [("hbm", "numba"), ("cached", "tiered"), ("staged", "tiered"), ("dram", "torch")],
)
def test_a_server_of_increments_answers_as_the_whole_export(
    exports: Path, placement: str, backend: str
) -> None:
    tables = _loaded(exports, STEPS[0], placement, backend)
    before = _answers(tables)
    for step in STEPS[1:]:
        tables.apply_increment(_increment(exports, step))
        whole = _loaded(exports, step, placement)
        _assert_equal(tables, whole)
        for table in _plan(placement).growing:
            ours, theirs = (one._embeddings[0].live_keys(table) for one in (tables, whole))
            assert [values.tolist() for values in ours] == [values.tolist() for values in theirs]
    assert not torch.equal(before["item"], _answers(tables)["item"])


def test_an_increment_has_what_changed(exports: Path) -> None:
    moved = 0
    for before, step in pairwise(STEPS):
        old, new = (load_file(_whole(exports, each)) for each in (before, step))
        found = load_file(_increment(exports, step))
        for table in ("item", "tag", "city"):
            changed = (old[f"{table}.weight"] != new[f"{table}.weight"]).any(1)
            if table != "city":
                pairs = [
                    set(zip(own[f"{table}.keys"].tolist(), own[f"{table}.rows"].tolist()))  # noqa: B905
                    for own in (old, new)
                ]
                known = [{key for key, _ in own} for own in pairs]
                assert set(found[f"{table}.deleted"].tolist()) == known[0] - known[1] != set()
                moved += len(known[0] & known[1]) - len(pairs[0] & pairs[1])
                read = torch.zeros_like(changed)
                read[new[f"{table}.rows"]] = read[0] = True
                changed &= read
                changed[[row for _, row in pairs[1] - pairs[0]]] = True
                rows = found[f"{table}.rows"].tolist()
                given = zip(found[f"{table}.keys"].tolist(), rows, strict=True)
                assert pairs[1] - pairs[0] <= set(given) <= pairs[1] | {(0, 0)}
            assert torch.equal(found[f"{table}.rows"], changed.nonzero()[:, 0])
            values = new[f"{table}.weight"][found[f"{table}.rows"]]
            assert torch.equal(found[f"{table}.weight"], values)
    assert moved  # Keys that lost their rows, and had others by then.


def test_increments_out_of_order_are_refused(exports: Path) -> None:
    first, second, third = (_increment(exports, step) for step in STEPS[1:])
    tables = _loaded(exports, 10)

    def refused(increment: Path, since: int, now: int) -> None:
        words = rf"from the checkpoint of step {since} .* of step {now}: "
        with pytest.raises(CheckpointError, match=words):
            tables.apply_increment(increment)

    refused(second, 20, 10)
    _assert_equal(tables, _loaded(exports, 10))
    tables.apply_increment(first)
    refused(first, 10, 20)
    refused(third, 30, 20)
    tables.apply_increment(second)
    _assert_equal(tables, _loaded(exports, 30))
    with pytest.raises(CheckpointError, match=r"whole-20.safetensors is no increment"):
        tables.apply_increment(_whole(exports, 20))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _as_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _changed(
    forgets: str = "", **tensors: Callable[[Tensor], Tensor] | None
) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        from safetensors import safe_open

        with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
            says = file.metadata()
        says.pop(forgets, None)
        held = load_file(path)
        for name, how in tensors.items():
            name = name.replace("_", ".")
            values = held.pop(name)
            if how is not None:
                held[name] = how(values)
        save_file(held, path, says)

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "cannot read .*: No such file"),
        (_cut, "is cut short, or no file of tables"),
        (_as_a_pipe, "cannot read .*: it is a device, a pipe or a folder, and no file"),
        (_changed("since_step"), "is no increment"),
        (_changed("step"), "is no increment"),
        (_changed(tag_keys=None), "does not fit the tables: tag.keys is missing"),
        (_changed(city_weight=lambda rows: rows[:, :2].clone()), r"city.weight has shape \(\d+, 2"),
        (_changed(city_weight=Tensor.double), "city.weight is torch.float64, not torch.float32"),
        (_changed(city_rows=lambda rows: rows.flip(0)), "rows of table 'city' do not ascend"),
        (_changed(city_rows=lambda rows: rows - rows[0] - 1), "'city' do not ascend"),
        (_changed(item_rows=lambda rows: rows + 60), "'item' do not ascend, or it has only 61"),
        (_changed(tag_keys=torch.zeros_like), "60 are damaged: a key or a row is there twice"),
    ],
)
def test_damaged_increments_change_nothing(
    exports: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    tables = _loaded(exports, STEPS[0])
    path = tmp_path / "increment.safetensors"
    path.write_bytes(_increment(exports, STEPS[1]).read_bytes())
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        tables.apply_increment(path)
    tables.apply_increment(_increment(exports, STEPS[1]))
    _assert_equal(tables, _loaded(exports, STEPS[1]))


def test_the_command_writes_increments(exports: Path, tmp_path: Path) -> None:
    file = tmp_path / "increment.safetensors"
    command = "export", str(exports / "plan.json"), "-o", str(file), "--to"
    runs = "--checkpoint", str(_run(exports, 20)), "--since", str(_run(exports, 10))
    said = succeed(*command, "safetensors", *runs)
    assert f"changed rows of steps 10 to 20 written to {file}" in said.stdout
    assert file.read_bytes() == _increment(exports, 20).read_bytes()
    missing = fail(*command, "safetensors", *runs[:3], str(exports / "none"))
    assert "none" in missing
    removed = _run(exports, 10).with_name("step-000000000001")
    missing = fail(*command, "safetensors", *runs[:3], str(removed))
    assert f"there is no checkpoint {removed}; {removed.parent} has step-0" in missing
    for given in (("torchrec", *runs[2:]), ("safetensors", *runs, "--with-optimizer")):
        answer = invoke(*command[:2], "-o", tmp_path / "new", "--to", *given)
        assert answer.exit_code == 2
        assert "--since goes with --to safetensors, without --with-optimizer" in answer.stderr


def test_what_has_no_checkpoint_has_no_increments(exports: Path, tmp_path: Path) -> None:
    plan, opened = _plan("hbm"), load(_run(exports, 20))
    made = replace(opened, sha256="")
    with pytest.raises(CheckpointError, match="between two checkpoints in files"):
        write_increment(plan, made, opened, tmp_path / "increment.safetensors")
    write_tables(plan, made, tmp_path / "tables.safetensors")
    tables = load_read_only(plan, tmp_path / "tables.safetensors", backend="torch")
    with pytest.raises(CheckpointError, match="the tables were not loaded from one"):
        tables.apply_increment(_increment(exports, 30))
    with pytest.raises(PlanMismatchError, match="a folder of tables does not have"):
        load_read_only(plan, tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no .*/none$"):
        load_read_only(plan, tmp_path / "none")
    for folder in (exports / "runs", _run(exports, 20)):
        with pytest.raises(CheckpointError, match="give the file of `placer export --to safete"):
            load_read_only(plan, folder)
    fixed = replace(plan, growing={})
    write_tables(fixed, opened, tmp_path / "fixed.safetensors")
    with pytest.raises(CheckpointError, match="lacks the keys of table 'item', which grows"):
        load_read_only(plan, tmp_path / "fixed.safetensors")


@pytest.mark.parametrize("seed", range(5))
def test_a_map_follows_another_by_assigning(seed: int) -> None:
    """Against a dictionary: keys come, go, and change their rows, all in one slot's reach."""
    random = np.random.default_rng(seed)
    how = Growing(40)
    found, rows_of = KeyMap.of(how, np.empty(0, np.int64), np.empty(0, np.int64)), {}
    pool = np.append(random.integers(-(2**63), 2**63 - 1, 58), [0, 2**63 - 1])
    for _ in range(60):
        keys = random.choice(pool, random.integers(0, 30), replace=False)
        rows = random.permutation(np.arange(1, how.rows))[: keys.size]
        rows[random.random(keys.size) < 0.3] = 0
        found.assign(keys, rows)
        rows_of = {key: row for key, row in rows_of.items() if key not in keys and row not in rows}
        rows_of |= {key: row for key, row in zip(keys, rows, strict=True) if row}
        assert found.find(pool).tolist() == [rows_of.get(key, 0) for key in pool]
        assert dict(zip(*found.live(), strict=True)) == rows_of
