"""Training over two ranks: the result of one process, checkpoints, and what becomes of failures."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_cases import load
from cli_cases import Workbench, json_of
from fast_and_full import some
from ranks_launcher import Job, Outcomes, run
from torch import nn
from training_cases import losses_of, plan_for
from training_ranks_cases import (
    CASES,
    LOG,
    REFUSALS,
    assert_same_training,
    close,
    full_disk,
    goes_on,
    refuses,
    stops_and_goes_on,
    tensors,
    trained_alone,
    trains,
)

from placer.training.loop import TrainResult, train

NAMES = some(CASES, *(name for name in CASES if name not in ("strided", "staged")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, TrainResult]:
    return trained_alone({name: CASES[name] for name in NAMES}, folder)


@pytest.fixture(scope="module")
def outcomes(folder: Path, alone: dict[str, TrainResult]) -> Outcomes:
    first = next(iter(CASES.values()))
    jobs: list[Job] = [(name, trains, (CASES[name], folder / "two" / name)) for name in NAMES]
    jobs.append(("stop", stops_and_goes_on, (first, folder / "stopped")))
    jobs.append(("from one", goes_on, (first, folder / "from one")))
    jobs += [(what, refuses, (what,)) for what in REFUSALS]
    return run(2, jobs)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_train_as_one_process_with_their_batch(
    name: str, folder: Path, alone: dict[str, TrainResult], outcomes: Outcomes
) -> None:
    expected = alone[name]
    loose = 3e-3 if CASES[name].config.amp else 2e-5
    for found in outcomes.of(name):
        assert_same_training(found, expected, loose)
        assert (found.hit_rates is None) == (expected.hit_rates is None)
        if found.hit_rates is not None and expected.hit_rates is not None:
            assert found.hit_rates.lookups == expected.hit_rates.lookups
    close(folder / "one" / name, folder / "two" / name, loose)


def uninterrupted(folder: Path) -> dict[str, torch.Tensor]:
    return tensors(folder / "two" / next(iter(CASES)))


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_ctrl_c_on_one_rank_stops_all_and_saves(folder: Path, outcomes: Outcomes) -> None:
    whole = outcomes.of(next(iter(CASES)))[0]
    ends = set()
    for stopped, rest in outcomes.of("stop"):
        assert stopped.interrupted
        assert 5 <= stopped.steps <= 8
        assert stopped.auc is None
        assert stopped.losses + rest.losses == whole.losses
        assert (rest.auc, rest.log_loss) == (whole.auc, whole.log_loss)
        ends.add(stopped.steps)
    assert len(ends) == 1
    assert same(tensors(folder / "stopped"), uninterrupted(folder))


def test_a_run_goes_on_with_more_ranks_or_fewer(
    folder: Path, alone: dict[str, TrainResult], outcomes: Outcomes, tmp_path: Path
) -> None:
    name, case = next(iter(CASES.items()))
    expected = losses_of(alone[name])
    for found in outcomes.of("from one"):
        assert losses_of(found) == pytest.approx(expected[7:], abs=2e-5)
        assert found.auc == pytest.approx(alone[name].auc, abs=1e-3)
    close(folder / "one" / name, folder / "from one")
    # And back, under another plan.
    other = plan_for(LOG, "strided")
    more = replace(case.config, epochs=2)
    whole = train(case.plan, LOG, more, resume=folder / "one" / name)
    rest = train(other, LOG, more, resume=folder / "two" / name)
    assert len(rest.losses) == len(whole.losses) == 19
    assert losses_of(rest) == pytest.approx(losses_of(whole), abs=1e-4)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("broken disk", "DataError: the disk of this rank is broken"),
        ("shorter log", "DataError: ranks read different logs: rank 0 .* samples, rank 1 "),
        ("bad label", "DataError: a label is 3.0, which is neither 0 nor 1"),
        ("other plan", r"PlanMismatchError: ranks \[1\] have another plan than rank 0"),
    ],
)
def test_what_one_rank_meets_is_told_by_all(what: str, message: str, outcomes: Outcomes) -> None:
    found = outcomes.of(what)
    assert found[0] == found[1]
    assert re.match(message, found[0]), found[0]


@pytest.mark.slow
def test_a_full_disk_is_told_by_all_and_harms_no_checkpoint(tmp_path: Path) -> None:
    # In new processes: shared ones meet in a file that may have passed the limit of files' sizes.
    found = run(2, [("full disk", full_disk, (tmp_path / "full",))], timeout_s=60).of("full disk")
    assert found[0] == found[1]
    assert "cannot write checkpoint" in found[0]
    assert "File too large" in found[0]
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["step-000000000004"]


def test_a_plain_model_loads_a_checkpoint(folder: Path, outcomes: Outcomes) -> None:
    newest = max((folder / "two" / next(iter(CASES))).iterdir())
    model = nn.ModuleDict({"a": nn.EmbeddingBag(50, 4), "bc": nn.EmbeddingBag(40, 4)})
    dcp.load({"embeddings": model}, checkpoint_id=newest, no_dist=True)
    assert torch.equal(model["a"].weight, uninterrupted(folder)["embeddings/a.weight"])


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
PLACER = Path(sys.executable).parent / "placer"


def torchrun(ranks: int, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TORCHRUN, str(ranks), "--no-python", PLACER, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_the_command_runs_under_torchrun(workbench: Workbench, tmp_path: Path) -> None:
    common = ("train", "--plan", workbench.plan, "--data", workbench.log)
    saved = ("--checkpoints", tmp_path)
    process = torchrun(2, *common, *saved, "--batch-size", "32", "--every", "5", "--epochs", "1000")
    try:
        deadline = time.monotonic() + 300
        while process.poll() is None and not list(tmp_path.glob("step-*")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert output.count("samples per s") == 1, errors
    [steps] = re.findall(r"interrupted after step (\d+); --resume goes on", errors)
    assert load(tmp_path).position.step == int(steps)
    # One process goes on with the batch of both.
    one = ("--batch-size", "64", "--steps", str(int(steps) + 3), "--epochs", "1000")
    result = json_of(*common, *saved, *one, "--resume")
    assert [step for step, _ in result["losses"]] == [int(steps) + 1 + i for i in range(3)]
