"""Tables that grow, with another capacity: what is lost, and that a run goes on."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_cases import load
from cli_cases import succeed
from executor_cases import assert_same_bits
from fast_and_full import mostly_slow
from growing_cases import CONFIG, HOW, growing_log, growing_plan
from hypothesis import given
from hypothesis import strategies as st

from placer.errors import CheckpointError, PlanMismatchError
from placer.executor.id_order import rows_from, tensors_of
from placer.executor.memory.arena import initial_weights
from placer.growing import Growing, KeyMap
from placer.growing.options import Eviction
from placer.plan.plan import Plan
from placer.storage.manifest import Checkpoint
from placer.storage.table_files import keys_of
from placer.tables import OPTIMIZERS, OptimizerName, Table
from placer.training.checkpoint import open_checkpoint
from placer.training.config import CheckpointPolicy
from placer.training.growing import grow_checkpoint, resized_keys
from placer.training.loop import train


@given(
    seed=st.integers(0, 999),
    capacity=st.integers(1, 80),
    admission=st.integers(1, 2),
    eviction=st.sampled_from(["lfu", "lru"]),
    steps=st.integers(0, 30),
)
def test_the_hottest_keys_stay(
    seed: int, capacity: int, admission: int, eviction: Eviction, steps: int
) -> None:
    random = np.random.default_rng(seed)
    before = KeyMap(Growing(37, admission, eviction, ttl=9))
    for _ in range(steps):
        before.read(random.zipf(1.3, 20).clip(max=99))
    after, earlier, dropped = before.resized(replace(before.growing, capacity=capacity))
    (keys, rows), (live, now) = before.live(), after.live()
    assert live.size == min(keys.size, capacity)
    assert dropped == keys.size - live.size
    assert after.counts == before.counts._replace(evicted=before.counts.evicted + dropped)
    assert after.find(live).tolist() == now.tolist()
    assert earlier[now].tolist() == before.find(live).tolist()
    assert earlier[0] == 0
    # A larger table has the rows that wait for keys, too.
    assert (earlier >= 0).sum() == (38 if capacity >= 37 else 1 + live.size)
    stay = now[before.find(live) <= capacity]
    assert stay.tolist() == before.find(live)[before.find(live) <= capacity].tolist()
    # As eviction would: none that is gone is hotter than one that stays.
    heat = {
        int(record["key"]): ((eviction == "lfu") * int(record["reads"]), int(record["step"]))
        for record in before._rows[rows]
    }
    gone = set(keys.tolist()) - set(live.tolist())
    if gone and live.size:
        assert max(heat[key] for key in gone) <= min(heat[key] for key in live.tolist())
    for _ in range(6):  # All rows can be had: keys of old ones are gone after `ttl` steps.
        after.read(10_000 + np.arange(2 * capacity))
        after.read(10_000 + np.arange(2 * capacity))
    assert sorted(after.live()[1].tolist()) == list(range(1, capacity + 1))


@pytest.mark.parametrize("capacity", [25, 90])
@pytest.mark.parametrize("admission", [1, 2])
def test_steps_that_come_again_find_their_keys_in_another_capacity(
    capacity: int, admission: int
) -> None:
    random = np.random.default_rng(capacity)
    before = KeyMap(Growing(37, admission))
    for _ in range(20):
        read = random.zipf(1.3, 24).clip(max=99)
        rows = before.read(read).rows
    before.give_up(1)
    after, earlier, _ = before.resized(Growing(capacity, admission))
    assert earlier[after.read(read).rows].tolist() == rows.tolist()
    assert (rows == 0).any() == (admission > 1)
    assert after.counts.hits == before.counts.hits


@given(seed=st.integers(0, 999), steps=st.integers(0, 9), ttl=st.integers(0, 4))
def test_a_larger_map_goes_on_as_the_smaller_until_that_is_full(
    seed: int, steps: int, ttl: int
) -> None:
    random = np.random.default_rng(seed)
    before = KeyMap(Growing(400, ttl=ttl))
    for _ in range(steps):
        before.read(random.integers(0, 150, 20))
    after, earlier, dropped = before.resized(Growing(random.integers(400, 900), ttl=ttl))
    assert dropped == 0
    assert earlier[:401].tolist() == list(range(401))
    assert (earlier[401:] == -1).all()
    for _ in range(12):
        read = random.integers(0, 300, 20)
        one, other = before.read(read), after.read(read)
        assert [values.tolist() for values in one] == [values.tolist() for values in other]
    assert before.counts == after.counts
    assert before.counts.live < 400


@pytest.mark.parametrize("block", [200, 64, 2])
def test_rows_come_from_where_they_were(block: int) -> None:
    """In blocks whose earlier rows are near each other, and in others."""
    table = Table("t", 200, 4, optimizer="sgd")
    (weight,) = tensors_of(table, "sgd")
    old = torch.arange(400 * 4.0).view(400, 4)
    earlier = np.random.default_rng(1).permutation(400)[:200]
    earlier[[5, 150]], earlier[[7, 8, 199]] = (399, 0), -1
    read = rows_from(weight, lambda start, stop: old[start:stop], earlier, 3)
    found = torch.cat([read(start, min(200, start + block)) for start in range(0, 200, block)])
    drawn = torch.cat([values for _, values in initial_weights(table, 3)])
    for row, was in enumerate(earlier.tolist()):
        assert torch.equal(found[row], drawn[row] if was < 0 else old[was])


def test_keys_that_wait_are_not_counted_anew_with_another_capacity() -> None:
    keys = np.arange(200) * 2**40
    before = KeyMap(Growing(20_000, admission=3))
    for _ in range(2):
        assert not before.read(keys).rows.any()
    for capacity in (5_000, 90_000):
        after = before.resized(Growing(capacity, admission=3)).keys
        assert (after.read(keys + 1).rows > 0).mean() < 0.02
        assert (after.read(keys).rows > 0).mean() > 0.95  # Some have a cell that was halved.
    assert not before.resized(Growing(9)).keys._sketch.size


def _plan(capacity: int, optimizer: OptimizerName = "adagrad", how: Growing = HOW) -> Plan:
    how = replace(how, capacity=capacity)
    plan = growing_plan(growing_log(how=how), "cached", how)
    tables = tuple(replace(table, optimizer=optimizer) for table in plan.tables)
    return replace(plan, tables=tables)


def _saved(plans: list[Plan], folder: Path) -> tuple[Path, Path]:
    files = folder / "a.json", folder / "b.json"
    for plan, file in zip(plans, files, strict=True):
        plan.save(file)
    return files


def _by_key(saved: Checkpoint, plan: Plan, table: str) -> dict[int, list[torch.Tensor]]:
    """What each key has learned: its weights and optimizer state."""
    keys, rows = keys_of(saved, table, plan.growing[table]).live()
    tensors = [
        tensor
        for group in ("embeddings", "embedding_optimizer")
        for name, tensor in saved.tensors.get(group, {}).items()
        if name.startswith(f"{table}.")
    ]
    return {
        key: [tensor[row] for tensor in tensors]
        for key, row in zip(keys.tolist(), rows.tolist(), strict=True)
    }


def _assert_same(one: dict[int, list[torch.Tensor]], other: dict[int, list[torch.Tensor]]) -> None:
    assert one.keys() == other.keys()
    for key, tensors in one.items():
        assert all(map(torch.equal, tensors, other[key])), key


@pytest.mark.parametrize("optimizer", mostly_slow(OPTIMIZERS, "sgd", "adam"))
def test_a_larger_table_trains_to_the_same_bits(optimizer: OptimizerName, tmp_path: Path) -> None:
    """As long as no key is new."""
    how = Growing(1)
    config = replace(CONFIG, holdout_every=0)
    plans = [_plan(capacity, optimizer, how) for capacity in (400, 700)]
    logs = [growing_log(how=plan.growing["item"]) for plan in plans]
    files = _saved(plans, tmp_path)
    first = CheckpointPolicy(tmp_path / "first", keep=1)
    known = train(plans[0], logs[0], replace(config, epochs=1), checkpoints=first)
    assert known.keys["item"].evicted == 0
    done = grow_checkpoint((plans[0], plans[1]), files, tmp_path / "first", tmp_path / "larger")
    kept = {one.table: one.kept_rows for one in done}
    assert {one.table: one.dropped_rows for one in done} == dict.fromkeys(kept, 0)
    assert kept["item"] == 401 > 1 + known.keys["item"].live
    folders, losses = [tmp_path / "first", tmp_path / "larger"], []
    for plan, log, folder in zip(plans, logs, folders, strict=True):
        policy = CheckpointPolicy(folder, keep=1)
        result = train(plan, log, config, checkpoints=policy, resume=folder)
        losses.append(result.losses)
        assert result.keys["item"].admitted == known.keys["item"].admitted
    assert losses[0] == losses[1]
    one, other = (load(folder) for folder in folders)
    for group in ("dense", "random"):
        assert_same_bits(one.tensors[group], other.tensors[group])
    for table in ("item", "tag"):
        _assert_same(_by_key(one, plans[0], table), _by_key(other, plans[1], table))


_KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[3:]
from pathlib import Path
import placer.training.run as run
take = run.Run._take
def kill(self, *item):
    if self.position.step == 23:
        os.kill(os.getpid(), signal.SIGKILL)
    return take(self, *item)
run.Run._take = kill
from test_resized_tables import resume
resume(Path(sys.argv[1]), int(sys.argv[2]))
"""


def resume(folder: Path, capacity: int) -> None:
    """Go on with the newest checkpoint, and save every few steps."""
    plan = _plan(capacity, "adam")
    log = growing_log(how=plan.growing["item"])
    policy = CheckpointPolicy(folder, every_steps=5)
    config = replace(CONFIG, optimizer="adam", look_ahead=True)
    train(plan, log, config, checkpoints=policy, resume=folder)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [25, 90])
def test_a_killed_run_of_a_resized_table_resumes_bit_equal(capacity: int, tmp_path: Path) -> None:
    plans = [_plan(one, "adam") for one in (60, capacity)]
    files = _saved(plans, tmp_path)
    policy = CheckpointPolicy(tmp_path / "first", every_steps=9, keep=1)
    config = replace(CONFIG, optimizer="adam", max_steps=13)
    train(plans[0], growing_log(), config, checkpoints=policy)
    made = succeed("grow", *files, "--checkpoint", tmp_path / "first",
                   "-o", tmp_path / "whole", "--format", "json")  # fmt: skip
    assert '"dropped_rows": ' in made.stdout
    before, after = load(tmp_path / "first"), load(tmp_path / "whole")
    for table in ("item", "tag"):
        was, now = (_by_key(*one, table) for one in zip((before, after), plans, strict=True))
        assert len(now) == min(len(was), capacity)
        _assert_same(now, {key: was[key] for key in now})
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    resume(tmp_path / "whole", capacity)
    here = Path(__file__).parent
    folders = [str(path) for path in (here.parent, here.parent / "executor", here)]
    command = [sys.executable, "-c", _KILLED, tmp_path / "parts", str(capacity), *folders]
    killed = subprocess.run(command, env=os.environ, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert load(tmp_path / "parts").position.step == 20
    resume(tmp_path / "parts", capacity)
    one, other = load(tmp_path / "whole"), load(tmp_path / "parts")
    for group, tensors in one.tensors.items():
        assert_same_bits(tensors, other.tensors[group])


def test_what_cannot_be_resized_is_named(tmp_path: Path) -> None:
    plan = _plan(60)
    policy = CheckpointPolicy(tmp_path / "runs")
    train(plan, growing_log(), replace(CONFIG, max_steps=2), checkpoints=policy)
    larger = _plan(90)
    with pytest.raises(CheckpointError, match="placer grow OLD NEW --checkpoint"):
        train(larger, growing_log(how=larger.growing["item"]), CONFIG, resume=tmp_path / "runs")
    fixed = replace(plan, growing={"tag": plan.growing["tag"]})
    saved = open_checkpoint(tmp_path / "runs")
    for plans in ((plan, fixed), (fixed, plan)):
        with pytest.raises(PlanMismatchError, match="table 'item' grows in one of the plans"):
            resized_keys(saved, *plans)
    new = resized_keys(saved, plan.of_tables(["tag"]), plan)["item"]
    assert (new.keys.counts.live, new.dropped, set(new.earlier.tolist())) == (0, 0, {-1})
