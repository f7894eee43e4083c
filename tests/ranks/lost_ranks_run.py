"""Trainings over two ranks, one of which is lost at a phase of a step or of a checkpoint.

python tests/ranks/lost_ranks_run.py [--cell PHASE/FAULT]

Each cell trains until its fault, then once more from the newest checkpoint, and is compared with a
training that nothing befalls: all ranks end, the others name the phase and the lost rank, the
checkpoints are whole, and the losses and all tensors at the end are the same to the bit.
"""

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))
import numba
import torch
import torch._dynamo  # Before any rank is forked: DDP takes seconds to import it.
import torch.distributed as dist
from checkpoint_cases import load
from training_ranks_cases import CASES, halved

from placer.errors import PlacerError
from placer.executor.distributed.collectives import Communicator
from placer.executor.distributed.distributed_id_order import DistributedIdOrder
from placer.executor.distributed.serving import Served
from placer.files.atomic import HashedFile
from placer.files.folders import HiddenFolder
from placer.training import checkpoint
from placer.training.config import CheckpointPolicy
from placer.training.loop import train

EVERY = 4
"""Steps between checkpoints."""
HANG_TIMEOUT_S = 8.0
"""That of the trainings with a hang; others wait as long as PyTorch does."""
END_S = 100
"""After so long a rank counts as one that never ends."""


def _exchange(kind: str) -> tuple[type, str, str | None]:
    return Communicator, "exchange", kind


PHASES: dict[str, tuple[Any, str, str | None]] = {
    "ids": _exchange("ids"),
    "lookup": (Served, "look_up", None),
    "pooled rows": _exchange("outputs"),
    "gradients": _exchange("gradients"),
    "update": (Served, "update", None),
    "writing": (HashedFile, "write", None),
    "rows of a checkpoint": (DistributedIdOrder, "fetch", None),
    "agreeing on files": (dist, "all_gather_object", None),
    "publishing": (HiddenFolder, "publish", None),
    "published": (HiddenFolder, "publish", None),
}
"""The method before which a rank is lost, and the kind of exchange; ``published`` is after it."""
OF_CHECKPOINTS = tuple(PHASES)[5:]
PASSED_ON = ("writing", "publishing", "published")
"""Phases in which a rank that meets an error tells the others."""
FAULTS = ("killed", "stopped", "error", "clock ahead", "clock back")
_DAYS_S = 3 * 86400.0


def victim_of(phase: str) -> int:
    """The rank that is lost: it must be one that does the phase."""
    return 0 if phase in ("publishing", "published") else 1


def strike(fault: str) -> None:
    """What befalls a rank."""
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "error":
        raise ValueError("a fault that nobody expected")
    else:
        jump_s = _DAYS_S if fault == "clock ahead" else -_DAYS_S
        now, now_ns = time.time, time.time_ns
        time.time = lambda: now() + jump_s
        time.time_ns = lambda: now_ns() + int(jump_s * 1e9)


class Fault:
    """Strikes once, at a phase of the step or of the checkpoint that follows `arm`."""

    def __init__(self, phase: str, fault: str) -> None:
        self._phase, self._fault, self._armed = phase, fault, False
        owner, name, kind = PHASES[phase]
        method = getattr(owner, name)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            if phase == "published":
                result = method(*arguments, **options)
                self._strike()
                return result
            if kind is None or arguments[1] == kind:
                self._strike()
            return method(*arguments, **options)

        setattr(owner, name, wrapped)

    def arm(self, step: int) -> None:
        """After step 6, or after step 7, whose next one is saved."""
        # With checkpoints, what steps use too is waited for until the save itself has begun.
        if step == 6 and self._phase not in OF_CHECKPOINTS:
            self._armed = True

    def arm_checkpoint(self, number: int) -> None:
        """At the beginning of a checkpoint."""
        if number == 2 and self._phase in OF_CHECKPOINTS:
            self._armed = True

    def _strike(self) -> None:
        if self._armed:
            self._armed = False
            if self._fault == "error" and self._phase in ("gradients", "update"):
                # In backward DDP sends gradients of its own, sooner or later than this one.
                dist.all_reduce(torch.ones(1), async_op=True)
            strike(self._fault)


def rank_trains(rank: int, folder: Path, phase: str, fault: str) -> int:
    """A rank's training; its exit status. The result goes to a file."""
    case = next(iter(CASES.values()))
    resume = folder if checkpoint.exist(folder) else None
    progress: Callable[[Any], None] | None = None
    if fault and resume is None and rank == victim_of(phase):
        struck, saves, write = Fault(phase, fault), 0, checkpoint.write_folder

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal saves
            saves += 1
            struck.arm_checkpoint(saves)
            return write(*arguments, **options)

        checkpoint.write_folder = counted
        progress = lambda now: struck.arm(now.step)  # noqa: E731
    config = replace(halved(case.config), timeout_s=HANG_TIMEOUT_S if fault == "stopped" else None)
    policy = CheckpointPolicy(folder, every_steps=EVERY)
    try:
        result = train(
            case.plan, case.log, config, checkpoints=policy, resume=resume, on_progress=progress
        )
    except PlacerError as error:
        print(f"placer: {error}", file=sys.stderr)
        return 1
    end = {"losses": result.losses, "auc": result.auc, "log_loss": result.log_loss}
    folder.with_name(f"{folder.name} {rank}.json").write_text(json.dumps(end))
    return 0


def launched(rank: int, world: int, port: int, log: Path, work: Callable[[], int]) -> int:
    """The process of a rank: forked, because a start takes seconds and only imports have run."""
    child = os.fork()
    if child:
        return child
    os.environ.update(
        WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    signal.alarm(END_S)  # None may be left behind.
    torch.set_num_threads(1)
    code = 70
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 2)
        code = work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)


def free_port() -> int:
    """Below those that systems give to outgoing connections, of which other jobs make many."""
    for port in random.SystemRandom().sample(range(20000, 30000), 100):
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")


def trained(folder: Path, phase: str, fault: str) -> list[tuple[int, str]]:
    """Exit status and words of each of two ranks."""
    port = free_port()
    logs = [folder.with_name(f"{folder.name} {rank}.log") for rank in range(2)]
    ranks = [
        launched(
            rank, 2, port, logs[rank], lambda rank=rank: rank_trains(rank, folder, phase, fault)
        )
        for rank in range(2)
    ]
    victim = victim_of(phase)
    codes = {1 - victim: os.waitstatus_to_exitcode(os.waitpid(ranks[1 - victim], 0)[1])}
    if fault == "stopped":  # As torchrun does when a rank has failed.
        os.kill(ranks[victim], signal.SIGKILL)
    codes[victim] = os.waitstatus_to_exitcode(os.waitpid(ranks[victim], 0)[1])
    return [(codes[rank], logs[rank].read_text()) for rank in range(2)]


def results(folder: Path) -> list[Any]:
    """What the ranks ended with."""
    return [json.loads(folder.with_name(f"{folder.name} {r}.json").read_text()) for r in range(2)]


def same_tensors(one: Path, other: Path) -> bool:
    """Whether the newest checkpoints of two folders are equal to the bit."""
    first, second = (load(folder) for folder in (one, other))
    return first.position == second.position and all(
        torch.equal(tensor, second.tensors[group][name])
        for group, held in first.tensors.items()
        for name, tensor in held.items()
    )


def faults_of(cell: tuple[str, str], base: Path, whole: Path) -> Iterator[str]:
    """What is not as promised where a rank is lost; nothing if all is well."""
    phase, fault = cell
    folder = base / f"{phase}, {fault}".replace(" ", "-")
    victim = victim_of(phase)
    ends = trained(folder, phase, fault)
    code, words = ends[1 - victim]
    if fault.startswith("clock"):
        if [code for code, _ in ends] != [0, 0]:
            yield f"a clock's jump ended the ranks: {ends}"
            return
    else:
        # An error that `torch.distributed.checkpoint` meets is passed on to all ranks.
        passed_on = fault == "error" and phase in PASSED_ON
        pattern = rf"^placer: rank {1 - victim} of 2: [^\n]*failed: [^\n]*\. Rank {victim} died, or"
        named = code == 1 and re.search(pattern, words)
        told = all("a fault that nobody expected" in words for _, words in ends)
        if not (told if passed_on else named):
            yield f"rank {1 - victim} ended with {code}: {words}"
        if words.count("\n") > 1 or "Traceback" in words:
            yield f"more than a line: {words}"
        expected = 70 if fault == "error" else -signal.SIGKILL
        if ends[victim][0] != expected:
            yield f"rank {victim} ended with {ends[victim]}"
        if fault == "error" and "a fault that nobody expected" not in ends[victim][1]:
            yield f"rank {victim} does not say what it met: {ends[victim][1]}"
        saved = load(folder).position.step
        if saved != (2 * EVERY if phase == "published" else EVERY):
            yield f"the newest checkpoint is of step {saved}"
        print(f"{phase}, {fault}: {words.strip()}")
        ends = trained(folder, phase, "")
        if [code for code, _ in ends] != [0, 0]:
            yield f"does not go on: {ends}"
            return
    for found, expected in zip(results(folder), results(whole), strict=True):
        rest = expected["losses"][-len(found["losses"]) :]
        if found["losses"] != rest or found["auc"] != expected["auc"]:
            yield "ends with other losses than without a fault"
    if not same_tensors(folder, whole):
        yield "ends with other weights than without a fault"
    hidden = [path.name for path in folder.iterdir() if not re.fullmatch(r"step-\d{12}", path.name)]
    if set(hidden) - {".lock"}:
        yield f"leaves {hidden}"


def run(cells: Sequence[tuple[str, str]], base: Path) -> dict[str, list[str]]:
    """What is wrong in each cell, by its name."""
    numba.njit(lambda: 0)()  # Before any rank is forked: the first call takes seconds to import.
    whole = base / "whole"
    ends = trained(whole, "ids", "")
    assert [code for code, _ in ends] == [0, 0], ends
    return {
        f"{phase}/{fault}": list(faults_of((phase, fault), base, whole)) for phase, fault in cells
    }


def elastic_restart(base: Path, number: int) -> list[str]:
    """What is wrong where torchrun starts the ranks again after one is killed."""
    folder = base / f"restarted {number}"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--max-restarts", "1", "--monitor-interval", "0.2", "--standalone"),
            *(__file__, "--under-torchrun", folder, "--cell", "gradients/killed"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=5 * END_S,
    )
    if result.returncode:
        return [result.stderr]
    wrong = []
    if "exitcode: -9" not in result.stderr:  # torchrun may end the other before it has a word.
        wrong.append(f"no rank was lost: {result.stderr}")
    for found, expected in zip(results(folder), results(base / "whole"), strict=True):
        if found["losses"][0][0] != EVERY + 1:
            wrong.append("the run did not go on from its checkpoint")
        if found["losses"] != expected["losses"][EVERY:] or found["auc"] != expected["auc"]:
            wrong.append("ends with other losses than without a fault")
    return wrong + ["other weights"] * (not same_tensors(folder, base / "whole"))


def main() -> None:
    """All cells, or those that are named; ends with 1 if something is wrong."""
    every = {f"{phase}/{fault}": (phase, fault) for phase in PHASES for fault in FAULTS}
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--cell", action="append", choices=list(every))
    options.add_argument(
        "--under-torchrun", type=Path, metavar="FOLDER", help="be one of its ranks"
    )
    options.add_argument(
        "--elastic", type=int, metavar="TIMES", help="restarts by torchrun (10, or with --cell 0)"
    )
    given = options.parse_args()
    chosen = given.cell or list(every)
    if given.under_torchrun is not None:
        torch.set_num_threads(1)
        sys.exit(rank_trains(int(os.environ["RANK"]), given.under_torchrun, *every[chosen[0]]))
    with tempfile.TemporaryDirectory() as folder:
        found = run([every[name] for name in chosen], Path(folder))
        times = given.elastic if given.elastic is not None else 0 if given.cell else 10
        for number in range(times):
            found[f"elastic restart {number + 1}"] = elastic_restart(Path(folder), number)
    wrong = 0
    for name, faults in found.items():
        wrong += bool(faults)
        print(f"{name}: {'; '.join(faults) or 'as promised'}")
    used = os.times()
    print(f"{len(found)} cells, {wrong} wrong, {used.children_user + used.children_system:.0f} s")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
