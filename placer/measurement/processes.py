"""Processes that train together over gloo, and time the plans that they are sent."""

import contextlib
import multiprocessing
import tempfile
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from placer.errors import BackendError
from placer.measurement.timed_steps import Job, quiet, run
from placer.measurement.times import Measured, Setting

_TIMEOUT_S = 120.0


class Processes:
    """Processes that train together, and wait for plans."""

    def __init__(self, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        for rank in range(setting.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, setting, self._folder.name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(self, job: Job) -> list[Measured]:
        """Times of each rank."""
        for pipe in self._pipes:
            pipe.send(job)
        times: list[Measured] = []
        for rank, pipe in enumerate(self._pipes):
            try:
                answer = pipe.recv() if pipe.poll(_TIMEOUT_S) else "it gave no answer in time"
            except EOFError:
                answer = "it died"
            if not isinstance(answer, Measured):
                raise BackendError(f"rank {rank} of {len(self._pipes)} failed: {answer}")
            times.append(answer)
        return times

    def close(self) -> None:
        """Let them go."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(rank: int, setting: Setting, folder: str, pipe: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(folder) / 'meet'}",
        rank=rank,
        world_size=setting.ranks,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    with quiet(setting, rank):
        while (job := pipe.recv()) is not None:
            try:
                pipe.send(run(job, setting, rank))
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()
