"""How long steps of a plan take on this machine: prefetch, forward, backward and update."""

import contextlib
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from placer.errors import BackendError
from placer.executor import (
    BagBatch,
    Embeddings,
    PlacedEmbeddings,
    ShardedEmbeddings,
    keep_freed_memory,
    look_ahead,
)
from placer.executor.backends import make_backend
from placer.executor.optimizers.rule import STATE
from placer.measurement.batches import drawn_batches
from placer.plan.plan import Plan
from placer.profile.profile import Profile

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

Clock = Literal["wall", "cpu"]
"""Time that passes, or time of the processors; the same on a quiet machine with one thread."""

NOISY_SPREAD = 0.15
"""Half of the steps lie further apart than this share of their median: not to be trusted."""

NOISY_WAIT = 0.15
"""So much longer on the clock than on the processor: somebody else had it."""

_WARM_UP = 4
_GPU_BLOCK = 8
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure.

    Attributes
    ----------
    least_steps, most_steps : int
        Steps that are timed, after a few that warm up.
    least_s, most_s : float
        Timing ends after `least_s`, but not before `least_steps`; and after `most_s` anyway.
    batches : int
        Batches that the steps cycle through.
    """

    least_steps: int = 8
    most_steps: int = 100
    least_s: float = 0.25
    most_s: float = 2.0
    batches: int = 12


QUICK = Effort(least_steps=4, most_steps=8, least_s=0.02, most_s=0.5, batches=6)


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of steps, each prefetch of the next batch, forward, backward and update.

    Attributes
    ----------
    wall_s : tuple of float
        By the clock. With several ranks, of the slowest.
    cpu_s : tuple of float
        Of all the process's threads; with several ranks, of the busiest.
    """

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]

    def seconds(self, clock: Clock = "wall") -> float:
        """Time of a step: the lower quartile, as whatever else runs only ever adds time."""
        times = self.wall_s if clock == "wall" else self.cpu_s
        return statistics.quantiles(times, n=4)[0] if len(times) > 1 else times[0]

    def spread(self, clock: Clock = "wall") -> float:
        """Interquartile range of the times, over their median."""
        times = self.wall_s if clock == "wall" else self.cpu_s
        if len(times) < 2:
            return 0.0
        low, _, high = statistics.quantiles(times, n=4)
        return (high - low) / statistics.median(times)

    @property
    def noisy(self) -> bool:
        """Whether something else ran on the machine, or the steps differ too much."""
        waited = self.seconds("wall") > (1 + NOISY_WAIT) * self.seconds("cpu")
        return waited or self.spread() > NOISY_SPREAD


def step_s(measured: Iterable[Measured], clock: Clock = "wall") -> float:
    """Step time of what was measured several times: the least, as other load comes in bursts."""
    return min(times.seconds(clock) for times in measured)


@dataclass(frozen=True, slots=True)
class Setting:
    """What measures: part of what a measurement means.

    Attributes
    ----------
    backend : str
        Of the executor; see `PlacedEmbeddings`.
    device : str
    ranks : int
        Processes that train together over gloo, as many as the plan has GPUs.
    threads : int
        Of each process.
    pinned : bool
        Whether each process stays on cores of its own.
    """

    backend: str = "auto"
    device: str = "cpu"
    ranks: int = 1
    threads: int = 1
    pinned: bool = True

    @property
    def tiers(self) -> bool:
        """Whether the backend keeps HBM and DRAM apart."""
        return self.backend not in ("numba", "torch")


def resolved(setting: Setting) -> Setting:
    """The same with the backend that ``auto`` means here.

    Raises
    ------
    BackendError
        If the backend is not there.
    """
    backend = make_backend(setting.backend, torch.device(setting.device))
    return replace(setting, backend=backend.name)


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
    """Measures plans one after the other, in this process or in ranks that it keeps.

    As `placer train` does, the process that measures keeps memory that it has freed
    (`placer.executor.keep_freed_memory`).

    Parameters
    ----------
    setting : Setting
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._ranks: _Ranks | None = None

    def __enter__(self) -> "Measurer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

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
        job = _Job(plan, profile, samples, seed, effort or Effort())
        if self.setting.ranks == 1:
            with _quiet(self.setting, 0):
                return _run(job, self.setting)
        if self._ranks is None:
            self._ranks = _Ranks(self.setting)
        try:
            return _slowest(self._ranks.run(job))
        except BaseException:
            self._ranks.close()
            self._ranks = None
            raise


@dataclass(frozen=True, slots=True)
class _Job:
    plan: Plan
    profile: Profile
    samples: int
    seed: int
    effort: Effort


def _slowest(of_ranks: Sequence[Measured]) -> Measured:
    """Step by step the slowest rank's time."""
    return Measured(
        tuple(map(max, zip(*(found.wall_s for found in of_ranks), strict=True))),
        tuple(map(max, zip(*(found.cpu_s for found in of_ranks), strict=True))),
    )


def _run(job: _Job, setting: Setting, rank: int = 0) -> Measured:
    """This process's times."""
    plan, effort = job.plan, job.effort
    weights = {t.name: torch.full((1, 1), 0.01).expand(t.rows, t.dim) for t in plan.tables}
    model: Embeddings
    if setting.ranks == 1:
        model = PlacedEmbeddings(
            plan, weights=weights, backend=setting.backend, device=setting.device
        )
        _touch_state(model)
    else:
        model = ShardedEmbeddings(
            plan, weights=weights, backend=setting.backend, device=setting.device
        )
        for held in model.children():
            if isinstance(held, PlacedEmbeddings):
                _touch_state(held)
    source = drawn_batches(plan, job.profile, job.samples, job.seed * setting.ranks + rank)
    batches = list(islice(source, effort.batches))
    if setting.device.startswith("cuda"):
        batches = [batch.pin_memory() for batch in batches]
    try:
        return _timed(model, batches, effort, setting)
    finally:
        model.close()


def _touch_state(model: PlacedEmbeddings) -> None:
    """Write optimizer state everywhere: pages that nobody wrote yet would come in the steps."""
    for table in model.plan.tables:
        for name in STATE[table.optimizer]:
            shape = (table.rows,) if table.optimizer == "rowwise_adagrad" else (1, 1)
            values = torch.full(shape, 0.01)
            if values.dim() == 2:
                values = values.expand(table.rows, table.dim)
            model.rows.write(table, name, values)


def _timed(
    model: Embeddings,
    batches: Sequence[BagBatch],
    effort: Effort,
    setting: Setting,
) -> Measured:
    block = _GPU_BLOCK if setting.device.startswith("cuda") else 1
    together = setting.ranks > 1
    gradients: list[Tensor] = []
    wall: list[float] = []
    cpu: list[float] = []
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        started, start, start_cpu = time.perf_counter(), 0.0, 0.0
        stream = look_ahead(_endless(batches), model)
        with contextlib.closing(stream):
            for number, batch in enumerate(stream):
                outputs = list(model(batch).values())
                if not gradients:
                    gradients = [torch.randn_like(out) / len(out) for out in outputs]
                torch.autograd.backward(outputs, gradients)
                if (number + 1) % block:
                    continue
                if block > 1:
                    torch.cuda.synchronize()
                now, now_cpu = time.perf_counter(), time.process_time()
                if number < _WARM_UP * block:
                    started = now
                else:
                    wall.append((now - start) / block)
                    cpu.append((now_cpu - start_cpu) / block)
                    if _enough(len(wall), now - started, effort, together):
                        break
                start, start_cpu = time.perf_counter(), time.process_time()
    finally:
        if collecting:
            gc.enable()
    return Measured(tuple(wall), tuple(cpu))


def _enough(steps: int, seconds: float, effort: Effort, together: bool) -> bool:
    if together:  # All ranks have to stop at the same step.
        return steps >= 2 * effort.least_steps
    if steps >= effort.most_steps or seconds >= effort.most_s:
        return True
    return steps >= effort.least_steps and seconds >= effort.least_s


def _endless(batches: Sequence[BagBatch]) -> Iterator[BagBatch]:
    while True:
        yield from batches


@contextlib.contextmanager
def _quiet(setting: Setting, rank: int) -> Iterator[None]:
    """The threads and cores of a setting, for a while."""
    threads = torch.get_num_threads()
    cores: set[int] | None = None
    if hasattr(os, "sched_getaffinity"):
        cores = os.sched_getaffinity(0)
    torch.set_num_threads(setting.threads)
    keep_freed_memory()  # As `placer train` does.
    try:
        if setting.pinned and cores and len(cores) >= setting.ranks * setting.threads:
            first = rank * setting.threads
            os.sched_setaffinity(0, sorted(cores)[first : first + setting.threads])
        yield
    finally:
        torch.set_num_threads(threads)
        if cores:
            os.sched_setaffinity(0, cores)


class _Ranks:
    """Processes that train together, and wait for plans."""

    def __init__(self, setting: Setting) -> None:
        import multiprocessing

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

    def run(self, job: _Job) -> list[Measured]:
        """Times of each rank."""
        for pipe in self._pipes:
            pipe.send(job)
        found: list[Measured] = []
        for rank, pipe in enumerate(self._pipes):
            try:
                answer = pipe.recv() if pipe.poll(_TIMEOUT_S) else "it gave no answer in time"
            except EOFError:
                answer = "it died"
            if not isinstance(answer, Measured):
                raise BackendError(f"rank {rank} of {len(self._pipes)} failed: {answer}")
            found.append(answer)
        return found

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
    with _quiet(setting, rank):
        while (job := pipe.recv()) is not None:
            try:
                pipe.send(_run(job, setting, rank))
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()
