"""Kills a training with tables that grow at random times, until it is through: nothing is lost.

    python tests/growing/kills_run.py 60

Each process of the training is a fork of this one, which has imported all. After every kill the
newest checkpoint is whole, and no older than the one before; in the end the run is to the bit one
that nothing befell.
"""

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import numba  # noqa: E402
import torch  # noqa: E402
from checkpoint_cases import load  # noqa: E402
from growing_cases import CONFIG, growing_log, growing_plan  # noqa: E402

from placer.training.checkpoint import exist  # noqa: E402
from placer.training.config import CheckpointPolicy  # noqa: E402
from placer.training.loop import train  # noqa: E402

EPOCHS = 2


def run(folder: Path, looks_ahead: bool = False) -> None:
    """Train to the end, from the newest checkpoint if there is one."""
    log = growing_log()
    policy = CheckpointPolicy(folder, every_steps=2)
    resume = folder if folder.is_dir() and exist(folder) else None
    config = replace(CONFIG, epochs=EPOCHS, look_ahead=looks_ahead, threads=1)
    train(growing_plan(log), log, config, checkpoints=policy, resume=resume)


def forked(work: Callable[[], None], kill_after_s: float | None = None) -> int:
    """Do something in a process of its own, kill it after a time, and return its exit code."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(kills: int) -> None:
    """Kill so often, and compare."""
    numba.njit(lambda: 0)()  # Before the first fork: the first call takes seconds to import.
    delays = random.Random(0)
    done, lost, round_number = 0, 0, 0
    with tempfile.TemporaryDirectory() as name:
        for whole in (Path(name) / "first", Path(name) / "whole"):  # The first may have to compile.
            began = time.monotonic()
            assert forked(partial(run, whole)) == 0
            took_s = time.monotonic() - began
        while done < kills:
            round_number += 1
            parts, step = Path(name) / f"parts-{round_number}", 0
            while done < kills:
                code = forked(partial(run, parts, done % 3 > 0), delays.uniform(0, took_s))
                if code == 0:
                    break
                assert code == -signal.SIGKILL, code
                done += 1
                if exist(parts):
                    newest = load(parts).position.step
                    lost += newest < step
                    step = newest
                print(f"kill {done}: the newest checkpoint is of step {step}", flush=True)
            assert forked(partial(run, parts)) == 0
            first, second = load(whole), load(parts)
            assert first.position == second.position
            for group, tensors in first.tensors.items():
                for key, values in tensors.items():
                    lost += not torch.equal(values, second.tensors[group][key])
    print(f"{done} kills in {round_number} runs, {lost} lost")
    sys.exit(lost > 0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
