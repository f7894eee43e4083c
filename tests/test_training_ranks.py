"""Training over two ranks: the result of one process, checkpoints, and what becomes of failures."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_cases import Workbench, succeed
from safetensors.torch import load_file, save_file
from torch import nn
from training_cases import QUICK, ArrayLog, plan_for, small_log

sys.path.append(str(Path(__file__).resolve().parent / "ranks"))
from ranks_launcher import Job, Outcomes, run

from placer.data.log import Chunk
from placer.errors import CheckpointError, DataError, PlacerError
from placer.plan.plan import Plan
from placer.training import tensor_file
from placer.training.checkpoint import Checkpoint, Position, load, save
from placer.training.config import CheckpointPolicy, TrainConfig
from placer.training.loop import TrainResult, train
from placer.training.run import Progress
from placer.training.tensor_file import TensorRows

LOG = small_log(650)  # 21 batches of 32, of which two are held out; the last one has 10 samples
CONFIG = replace(QUICK, report_every=1, activation="gelu")
"""Of one process; of two each has half the batch. GELU, because ReLU's kink amplifies rounding."""


def sparsely_labelled() -> ArrayLog:
    """Where most lack a label: batches of odd sizes, of one sample, and of none."""
    labels = LOG.chunk.labels.copy()
    labels[np.random.default_rng(1).random(labels.size) < 0.4] = np.nan
    labels[33:64] = np.nan
    labels[96:128] = np.nan
    return replace(LOG, chunk=replace(LOG.chunk, labels=labels))


@dataclass(frozen=True)
class Case:
    plan: Plan
    log: ArrayLog
    config: TrainConfig = CONFIG


CASES = {
    "hot rows on one rank, cold ones on the other": Case(plan_for(LOG, "split"), LOG),
    "strided": Case(
        plan_for(LOG, "strided", optimizer="adam"), LOG, replace(CONFIG, optimizer="adam")
    ),
    "sparsely labelled": Case(
        plan_for(LOG, "split", optimizer="adagrad"), sparsely_labelled(), replace(CONFIG, epochs=2)
    ),
    "staged": Case(
        plan_for(LOG, "staged"), LOG, replace(CONFIG, backend="tiered", look_ahead=False)
    ),
    "bfloat16": Case(
        plan_for(LOG, "hbm", optimizer="sgd"), LOG, replace(CONFIG, optimizer="sgd", amp="bfloat16")
    ),
}


def halved(config: TrainConfig) -> TrainConfig:
    """Of each of two ranks."""
    return replace(config, batch_size=config.batch_size // 2)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {
        f"{file}/{name}": tensor
        for file, held in load(path).tensors.items()
        for name, tensor in held.items()
        if file != "random"
    }


def close(one: Path, two: Path, tolerance: float = 2e-5) -> None:
    first, second = tensors(one), tensors(two)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-4, atol=tolerance, msg=name)


# What runs on each rank -------------------------------------------------------------------------


def trains(rank: int, world: int, case: Case, folder: Path) -> TrainResult:
    return train(case.plan, case.log, halved(case.config), checkpoints=CheckpointPolicy(folder))


def stops_and_goes_on(rank: int, world: int, case: Case, folder: Path) -> tuple[TrainResult, ...]:
    """Ctrl-C reaches one rank alone."""
    policy = CheckpointPolicy(folder)

    def interrupt(progress: Progress) -> None:
        if rank == 1 and progress.step == 5:
            signal.raise_signal(signal.SIGINT)

    config = halved(case.config)
    stopped = train(case.plan, case.log, config, checkpoints=policy, on_progress=interrupt)
    rest = train(case.plan, case.log, config, checkpoints=policy, resume=folder)
    return stopped, rest


def goes_on(rank: int, world: int, case: Case, folder: Path) -> TrainResult:
    policy = CheckpointPolicy(folder)
    return train(case.plan, case.log, halved(case.config), checkpoints=policy, resume=folder)


@dataclass(frozen=True)
class BrokenLog(ArrayLog):
    """A disk that fails at the second chunk."""

    def chunks(self, samples: int = 65536, skip: int = 0) -> Iterator[Chunk]:
        yield from ArrayLog.chunks(replace_chunk(self, 64), samples, skip)
        raise DataError("the disk of this rank is broken")


def replace_chunk(log: ArrayLog, samples: int) -> ArrayLog:
    from placer.training.batches import cut

    return ArrayLog(cut(log.chunk, 0, samples), log.tables, log.feature_tables, log.dense_names)


def refuses(rank: int, world: int, what: str) -> str:
    """An error that one rank meets is one of all."""
    log, plan = LOG, plan_for(LOG, "split")
    labels = LOG.chunk.labels.copy()
    match what:
        case "broken disk" if rank == 1:
            log = BrokenLog(LOG.chunk, LOG.tables, LOG.feature_tables, LOG.dense_names)
        case "shorter log" if rank == 1:
            log = replace_chunk(LOG, 600)
        case "bad label":
            labels[100] = 3  # In the part of one of them.
            log = replace(LOG, chunk=replace(LOG.chunk, labels=labels))
        case "other plan" if rank == 1:
            plan = plan_for(LOG, "hbm")
    with pytest.raises(PlacerError) as error:
        train(plan, log, halved(CONFIG))
    return f"{error.type.__name__}: {error.value}"


def full_disk(rank: int, world: int, folder: Path) -> str:
    """The first rank cannot write; the second learns of it, and both can go on."""
    plan = plan_for(LOG, "split", dim=256)
    config = halved(replace(CONFIG, max_steps=4))
    train(plan, LOG, config, checkpoints=CheckpointPolicy(folder))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    with pytest.raises(CheckpointError) as error:
        train(plan, LOG, halved(CONFIG), checkpoints=CheckpointPolicy(folder), resume=folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert train(plan, LOG, config, resume=folder).steps == 4
    return str(error.value)


REFUSALS = ("broken disk", "shorter log", "bad label", "other plan")

DEATHS = """
import json, os, signal, socket, sys
from pathlib import Path
from dataclasses import replace
import torch
torch.set_num_threads(1)
tests, folder, *places = sys.argv[1:]
sys.path.insert(0, tests)
from test_training_ranks import CASES, halved
from placer.errors import BackendError
from placer.training import checkpoint, tensor_file
from placer.training.config import CheckpointPolicy
from placer.training.loop import train

def killed_at(number, function):
    calls = 0
    def wrapped(*arguments):
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return wrapped

def main(rank, where):
    progress = lambda now: None
    if where == "hanging" and rank == 1:
        progress = lambda now: signal.pause() if now.step == 7 else None
    if where == "training" and rank == 1:
        progress = killed_at(7, progress)
    if where == "bringing rows" and rank == 1:  # The second of four files of the second checkpoint.
        tensor_file.write = killed_at(6, tensor_file.write)
    if where == "writing" and rank == 0:  # The second one's files are there, its manifest is not.
        checkpoint._flush = killed_at(11, checkpoint._flush)
    case = next(iter(CASES.values()))
    config = replace(halved(case.config), timeout_s=8 if where == "hanging" else None)
    policy = CheckpointPolicy(Path(folder, where), every_steps=4)
    try:
        train(case.plan, case.log, config, checkpoints=policy, on_progress=progress)
    except BackendError as error:
        print(f"placer: {error}", file=sys.stderr)
        return 1
    return 0

def launched(rank, where, port):
    # Forked, because a start takes seconds; nothing but imports has run here.
    child = os.fork()
    if child:
        return child
    os.environ.update(
        WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )
    code = 70
    try:
        with open(f"{folder}/{where} {rank}.log", "w") as log:
            os.dup2(log.fileno(), 2)
        code = main(rank, where)
    finally:
        sys.stderr.flush()
        os._exit(code)

def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]

children = {}
for where in places:
    port = free_port()
    children[where] = [launched(rank, where, port) for rank in range(2)]
ends = {}
for where, (first, second) in children.items():
    codes = [os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])]
    if where == "hanging":
        os.kill(second, signal.SIGKILL)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]))
    logs = [Path(folder, f"{where} {rank}.log") for rank in range(2)]
    ends[where] = [(code, log.read_text()) for code, log in zip(codes, logs)]
print(json.dumps(ends))
"""
KILLS = {"training": 1, "bringing rows": 1, "writing": 0}
"""Where a rank is killed, and which."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def killed(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """Exit status and output of each rank, where one is killed."""
    tests = str(Path(__file__).parent)
    result = subprocess.run(
        [sys.executable, "-c", DEATHS, tests, folder, *KILLS, "hanging"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    ends: dict[str, list[tuple[int, str]]] = json.loads(result.stdout)
    return ends


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, TrainResult]:
    """The cases in one process, with the whole batch; one is saved early, to go on with two."""
    case = next(iter(CASES.values()))
    early = CheckpointPolicy(folder / "from one")
    train(case.plan, case.log, replace(case.config, max_steps=7), checkpoints=early)
    return {
        name: train(
            case.plan, case.log, case.config, checkpoints=CheckpointPolicy(folder / "one" / name)
        )
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def outcomes(
    folder: Path, alone: dict[str, TrainResult], killed: dict[str, list[tuple[int, str]]]
) -> Outcomes:
    first = next(iter(CASES.values()))
    jobs: list[Job] = [
        (name, trains, (case, folder / "two" / name)) for name, case in CASES.items()
    ]
    jobs.append(("stop", stops_and_goes_on, (first, folder / "stopped")))
    jobs.append(("from one", goes_on, (first, folder / "from one")))
    jobs += [(what, refuses, (what,)) for what in REFUSALS]
    jobs += [(f"after {where}", goes_on, (first, folder / where)) for where in KILLS]
    jobs.append(("full disk", full_disk, (folder / "full",)))
    return run(2, jobs)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process_with_their_batch(
    name: str, folder: Path, alone: dict[str, TrainResult], outcomes: Outcomes
) -> None:
    expected = alone[name]
    loose = 3e-3 if CASES[name].config.amp else 2e-5
    for found in outcomes.of(name):
        assert [step for step, _ in found.losses] == [step for step, _ in expected.losses]
        assert [loss for _, loss in found.losses] == pytest.approx(
            [loss for _, loss in expected.losses], abs=loose
        )
        assert found.auc == pytest.approx(expected.auc, abs=1e-3 if loose < 1e-3 else 1e-2)
        assert found.log_loss == pytest.approx(expected.log_loss, abs=loose)
        for figure in ("eval_samples", "steps", "samples", "unlabelled_samples"):
            assert getattr(found, figure) == getattr(expected, figure)
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


@pytest.mark.parametrize("where", KILLS)
def test_a_killed_rank_ends_the_job_and_its_checkpoint_goes_on(
    where: str, folder: Path, killed: dict[str, list[tuple[int, str]]], outcomes: Outcomes
) -> None:
    victim = KILLS[where]
    assert killed[where][victim][0] == -signal.SIGKILL
    code, message = killed[where][1 - victim]
    assert code == 1, message
    assert f"placer: rank {1 - victim} of 2: exchanging " in message
    assert "Another rank died" in message
    whole = outcomes.of(next(iter(CASES)))[0]
    for rest in outcomes.of(f"after {where}"):
        assert rest.losses == whole.losses[4:]
        assert rest.auc == whole.auc
    assert same(tensors(folder / where), uninterrupted(folder))


def test_a_rank_that_hangs_ends_the_job_after_the_timeout(
    killed: dict[str, list[tuple[int, str]]],
) -> None:
    code, message = killed["hanging"][0]
    assert code == 1, message
    assert "Another rank died, or did not come within 8 s" in message


def test_a_run_goes_on_with_more_ranks_or_fewer(
    folder: Path, alone: dict[str, TrainResult], outcomes: Outcomes, tmp_path: Path
) -> None:
    name, case = next(iter(CASES.items()))
    expected = [loss for _, loss in alone[name].losses]
    for found in outcomes.of("from one"):
        assert [loss for _, loss in found.losses] == pytest.approx(expected[7:], abs=2e-5)
        assert found.auc == pytest.approx(alone[name].auc, abs=1e-3)
    close(folder / "one" / name, folder / "from one")
    # And back, under another plan.
    other = plan_for(LOG, "strided")
    more = replace(case.config, epochs=2)
    whole = train(case.plan, LOG, more, resume=folder / "one" / name)
    rest = train(other, LOG, more, resume=folder / "two" / name)
    assert len(rest.losses) == len(whole.losses) == 19
    assert [loss for _, loss in rest.losses] == pytest.approx(
        [loss for _, loss in whole.losses], abs=1e-4
    )


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


def test_a_full_disk_is_told_by_all_and_harms_no_checkpoint(
    folder: Path, outcomes: Outcomes
) -> None:
    found = outcomes.of("full disk")
    assert found[0] == found[1]
    assert "cannot write checkpoint" in found[0]
    assert "File too large" in found[0]
    assert [path.name for path in (folder / "full").iterdir()] == ["step-000000000004"]


def test_no_more_than_a_chunk_of_a_table_is_in_memory(tmp_path: Path) -> None:
    asked: list[int] = []
    values = torch.arange(200_000 * 3, dtype=torch.float32).reshape(-1, 3)

    def read(start: int, stop: int) -> torch.Tensor:
        asked.append(stop - start)
        return values[start:stop]

    rows = TensorRows((200_000, 3), torch.bfloat16, read)
    path = save(tmp_path, Checkpoint(Position(1), {}, {"t": {"big": rows}}))
    assert max(asked) == tensor_file.CHUNK_ROWS < 200_000
    assert sum(asked) == 200_000
    found = load(path).tensors["t"]["big"]
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, values.to(torch.bfloat16))


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    given = {
        "b": torch.arange(6, dtype=torch.uint8).reshape(2, 3),
        "a": torch.randn(3, 2),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(7),
        "half": torch.randn(5).to(torch.float16),
    }
    tensor_file.write(tmp_path / "ours", given)
    save_file(given, tmp_path / "theirs")
    assert load_file(tmp_path / "ours").keys() == given.keys()
    assert all(torch.equal(load_file(tmp_path / "ours")[name], given[name]) for name in given)
    for written in ("ours", "theirs"):
        read = tensor_file.read(tmp_path / written)
        assert all(torch.equal(read[name].whole(), given[name]) for name in given)
    assert torch.equal(tensor_file.read(tmp_path / "ours")["a"].read(1, 3), given["a"][1:])


def test_a_plain_model_loads_a_checkpoint(folder: Path, outcomes: Outcomes) -> None:
    newest = max((folder / "two" / next(iter(CASES))).iterdir())
    model = nn.ModuleDict({"a": nn.EmbeddingBag(50, 4), "bc": nn.EmbeddingBag(40, 4)})
    model.load_state_dict(load_file(newest / "embeddings.safetensors"))
    assert torch.equal(model["a"].weight, uninterrupted(folder)["embeddings/a.weight"])


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
PLACER = Path(sys.executable).parent / "placer"


def torchrun(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TORCHRUN, "--no-python", PLACER, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_runs_under_torchrun(workbench: Workbench, tmp_path: Path) -> None:
    common = ("train", "--plan", workbench.plan, "--data", workbench.log)
    saved = ("--checkpoints", tmp_path)
    process = torchrun(*common, *saved, "--batch-size", "32", "--every", "5", "--epochs", "1000")
    try:
        deadline = time.monotonic() + 60
        while process.poll() is None and not list(tmp_path.glob("step-*")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert output.count("samples per s") == 1, errors
    [steps] = re.findall(r"interrupted after step (\d+); --resume goes on", errors)
    assert load(tmp_path).position.step == int(steps)
    # One process goes on with the batch of both.
    one = ("--batch-size", "64", "--steps", str(int(steps) + 3), "--epochs", "1000")
    result = json.loads(succeed(*common, *saved, *one, "--resume", "--format", "json").stdout)
    assert [step for step, _ in result["losses"]] == [int(steps) + 1 + i for i in range(3)]
