"""Training with hosts that have no GPU: the result of one process, checkpoints and lost ranks."""

import multiprocessing
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_cases import load
from cli_cases import Workbench, json_of
from executor_cases import machine
from fast_and_full import some
from ranks_launcher import Job, Outcomes, run
from torch.distributed import TCPStore
from training_cases import losses_of
from training_ranks_cases import (
    CASES,
    LOG,
    Case,
    assert_same_training,
    close,
    goes_on,
    halved,
    shortened,
    trained_alone,
    trains,
)

from placer.__main__ import main
from placer.errors import PlacerError
from placer.plan.fields import Shard
from placer.plan.plan import Plan
from placer.training.config import CheckpointPolicy
from placer.training.distributed import batch_size_per_process
from placer.training.loop import TrainResult, train


def with_server(plan: Plan, *moved: str) -> Plan:
    """Shards of these devices on a host without a GPU, host:1; all of them on a test's machine."""

    def at_home(shard: Shard) -> Shard:
        if shard.devices[0] not in moved:
            return shard
        return Shard(shard.table, shard.rows, shard.cols, ("host:1",), "dram", "host")

    shards = tuple(map(at_home, plan.shards))
    return replace(plan, topology=machine(2, servers=1), shards=shards)


NAMES = ("hot rows on one rank, cold ones on the other", "strided", "sparsely labelled")
SERVED = {
    NAMES[0]: with_server(CASES[NAMES[0]].plan, "gpu:0"),
    NAMES[1]: with_server(CASES[NAMES[1]].plan, "gpu:1"),
    NAMES[2]: with_server(CASES[NAMES[2]].plan, "gpu:0", "gpu:1"),  # All tables.
}
TRAINED = some(NAMES, NAMES[0], NAMES[2])


def test_a_server_has_no_part_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    plan = SERVED[NAMES[0]]
    assert batch_size_per_process(plan) == plan.batch_size * 2 // 2
    assert batch_size_per_process(CASES[NAMES[0]].plan) == plan.batch_size * 2 // 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, TrainResult]:
    return trained_alone({name: CASES[name] for name in TRAINED}, folder)


@pytest.fixture(scope="module")
def outcomes(folder: Path, alone: dict[str, TrainResult]) -> Outcomes:
    cases = {name: replace(CASES[name], plan=SERVED[name]) for name in TRAINED}
    first = cases[NAMES[0]]
    jobs: list[Job] = [
        (name, trains, (case, folder / "three" / name)) for name, case in cases.items()
    ]
    short = replace(first, config=replace(first.config, max_steps=7))
    jobs.append(("early", trains, (short, folder / "from three")))
    jobs.append(("from one", goes_on, (first, folder / "from one")))
    jobs.append(("shorter", refuses_shorter, (first,)))
    jobs.append(("other log", refuses_other_log, (first,)))
    jobs.append(("not there", refuses_resuming, (first, folder / "none")))
    return run(3, jobs)


def ends_with(case: Case, folder: Path | None = None) -> str:
    """How a training ends: what is wrong, or that nothing is."""
    try:
        result = train(case.plan, case.log, halved(case.config), resume=folder)
    except PlacerError as error:
        return f"{type(error).__name__}: {error}"
    return f"{result.steps} steps"


def refuses_shorter(rank: int, world: int, case: Case) -> str:
    log = shortened(LOG, 600) if rank == 1 else LOG
    return ends_with(replace(case, log=log))


def refuses_other_log(rank: int, world: int, case: Case) -> str:
    """Before there are tables: all ranks say it, servers too."""
    return ends_with(replace(case, log=replace(LOG, feature_tables={})))


def refuses_resuming(rank: int, world: int, case: Case, folder: Path) -> str:
    return ends_with(case, folder)


@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks_and_a_server_train_as_one_process(
    name: str, folder: Path, alone: dict[str, TrainResult], outcomes: Outcomes
) -> None:
    expected, (*found, server) = alone[name], outcomes.of(name)
    for result in found:
        assert_same_training(result, expected)
    assert (server.losses, server.steps) == ((), 0)
    close(folder / "one" / name, folder / "three" / name)


def test_a_run_goes_on_with_a_server_or_without(
    folder: Path, alone: dict[str, TrainResult], outcomes: Outcomes
) -> None:
    name = NAMES[0]
    expected = losses_of(alone[name])
    for found in outcomes.of("from one")[:2]:
        assert losses_of(found) == pytest.approx(expected[7:], abs=2e-5)
    close(folder / "one" / name, folder / "from one")
    outcomes.of("early")
    case, policy = CASES[name], CheckpointPolicy(folder / "back")
    rest = train(case.plan, LOG, case.config, checkpoints=policy, resume=folder / "from three")
    assert losses_of(rest) == pytest.approx(expected[7:], abs=2e-5)
    close(folder / "one" / name, folder / "back")


def test_what_trainers_refuse_ends_the_server_too(outcomes: Outcomes) -> None:
    one, two, server = outcomes.of("shorter")
    assert one == two
    assert one.startswith("DataError: ranks read different logs: ")
    assert server == "0 steps"
    one, two, server = outcomes.of("not there")
    assert one == two
    assert one.startswith("CheckpointError: there is no checkpoint in ")
    assert server == "0 steps"
    said = outcomes.of("other log")
    assert said[0].startswith("PlanMismatchError: the plan reads feature 'a', which the log lacks")
    assert said == said[:1] * 3


# As commands ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(workbench: Workbench, folder: Path) -> Path:
    """The workbench's plan with all that its first GPU serves on a host without a GPU."""
    plan = Plan.load(workbench.plan)
    served = with_server(plan, "gpu:0")
    assert any(shard.devices == ("host:1",) for shard in served.shards)
    served.save(workbench.folder / "served.json")
    return workbench.folder / "served.json"


def as_rank(rank: int, port: int, errors: Path, arguments: list[str]) -> None:
    """The command as torchrun starts it; no one ends it when another one is lost."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # Which outlives them all.
    }  # fmt: skip
    for path, descriptor in ((Path(os.devnull), 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = ["placer", *arguments]
    main()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_lost_server_or_trainer_ends_all_with_a_line_and_the_run_goes_on(
    victim: int, workbench: Workbench, served: Path, tmp_path: Path
) -> None:
    """Rank 2 is the server, and follows rank 0: of the end of rank 1 it hears through that."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = (
        *("train", "--data", workbench.log, "--plan", served, "--batch-size", "32"),
        *("--checkpoints", tmp_path / "saved", "--every", "5", "--epochs", "1000"),
    )
    arguments, errors = list(map(str, common)), [tmp_path / f"{rank}.txt" for rank in range(3)]
    forked = multiprocessing.get_context("forkserver")  # A start of Python takes seconds.
    ranks = [
        forked.Process(target=as_rank, args=(rank, store.port, errors[rank], arguments))
        for rank in range(3)
    ]
    for process in ranks:
        process.start()
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("saved/step-*")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ranks[victim].kill()
        for process in ranks:
            process.join(60)
    finally:
        for process in ranks:
            process.kill()
    for rank in {0, 1, 2} - {victim}:
        assert ranks[rank].exitcode == 1
        [line] = errors[rank].read_text().splitlines()
        # Who hears of it last may find that the other has ended, too.
        died = rf"Ranks? (?:\d, )*{victim}(?:, \d)* died, or"
        assert re.search(rf"rank {rank} of \d: .*failed: .*\. {died}", line), line
    saved = load(tmp_path / "saved").position.step
    assert saved % 5 == 0
    result = json_of(
        *workbench.training(), "--checkpoints", tmp_path / "saved", "--resume",
        "--epochs", "1000", "--steps", str(saved + 3),
    )  # fmt: skip
    assert [step for step, _ in result["losses"]] == [saved + i for i in (1, 2, 3)]
