"""How long steps of a plan take on this machine: prefetch, forward, backward and update."""

import contextlib
import multiprocessing
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from placer.errors import BackendError
from placer.measurement.timed_steps import Job, quiet, run
from placer.measurement.times import Effort, Measured, Setting
from placer.plan.plan import Plan
from placer.profile.profile import Profile

_TIMEOUT_S = 120.0


def measure_plan(
    plan: Plan,
    profile: Profile,
    batch_size: int | None = None,
    backend: str = "auto",
    *,
    device: str = "cpu",
    ranks: int = 1,
    threads: int = 1,
    seed: int = 0,
    effort: Effort | None = None,
) -> Measured:
    """Time steps of a plan whose lookups are drawn from a profile.

    Several plans are measured faster by one `Measurer`.

    Parameters
    ----------
    batch_size : int, optional
        Samples per rank; the plan's by default.

    Raises
    ------
    BackendError
        If the backend is not there, or a rank fails.
    """
    with Measurer(Setting(backend, device, ranks, threads)) as measurer:
        return measurer.measure(plan, profile, batch_size, seed=seed, effort=effort)


class Measurer:
    """Measures plans one after the other, in this process or in several that it keeps.

    As `placer train` does, the process that measures keeps memory that it has freed
    (`placer.executor.keep_freed_memory`).
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._processes: _Processes | None = None

    def __enter__(self) -> "Measurer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def measure(
        self,
        plan: Plan,
        profile: Profile,
        batch_size: int | None = None,
        *,
        seed: int = 0,
        effort: Effort | None = None,
    ) -> Measured:
        """See `measure_plan`."""
        samples = plan.batch_size if batch_size is None else batch_size
        job = Job(plan, profile, samples, seed, effort or Effort())
        if self.setting.ranks == 1:
            with quiet(self.setting, 0):
                return run(job, self.setting)
        if self._processes is None:
            self._processes = _Processes(self.setting)
        try:
            return _slowest(self._processes.run(job))
        except BaseException:
            self._processes.close()
            self._processes = None
            raise


def _slowest(of_ranks: Sequence[Measured]) -> Measured:
    """Take the time of the slowest rank, step by step."""
    return Measured(
        tuple(map(max, zip(*(times.wall_s for times in of_ranks), strict=True))),
        tuple(map(max, zip(*(times.cpu_s for times in of_ranks), strict=True))),
    )


class _Processes:
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
        """Return times of each rank."""
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
