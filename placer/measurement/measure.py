"""Time steps of a plan on this machine: prefetch, forward, backward and update."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

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
from placer.measurement.cases import Effort, Measured, Setting
from placer.plan.plan import Plan, Ranks
from placer.profile.profile import Profile
from placer.workloads.batches import drawn_batches

_TIMEOUT_S = 120.0
_WARM_UP = 4  # Steps, or blocks of steps, that are not timed.
_GPU_BLOCK = 8  # Steps that are timed together on a GPU.

Job = tuple[Plan, Profile, int, int, Effort]
"""A plan to time, with its profile, samples of a rank's batch, seed and effort."""


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
    """Time steps of a plan, with lookups drawn from a profile.

    For several plans, one `Measurer` is faster. `batch_size` has the samples of a rank, by default
    the plan's.

    Raises BackendError if the backend is not available, or a rank fails.
    """
    with Measurer(Setting(backend, device, ranks, threads)) as measurer:
        return measurer.measure(plan, profile, batch_size, seed=seed, effort=effort)


class Measurer:
    """Measures plans one after the other, in this process or in several processes that it keeps.

    Like `placer train`, it keeps freed memory (`placer.executor.keep_freed_memory`).
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._processes: _Processes | None = None

    def __enter__(self) -> "Measurer":
        return self

    def __exit__(self, *_: object) -> None:
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
        job = plan, profile, samples, seed, effort or Effort()
        if self.setting.ranks == 1:
            with quiet(self.setting, 0):
                return run(job, self.setting)
        if self._processes is None:
            self._processes = _Processes(self.setting)
        try:
            of_ranks = self._processes.run(job)
        except BaseException:
            self._processes.close()
            self._processes = None
            raise
        # Steps take as long as on the slowest rank.
        return Measured(
            tuple(map(max, zip(*(times.wall_s for times in of_ranks), strict=True))),
            tuple(map(max, zip(*(times.cpu_s for times in of_ranks), strict=True))),
        )


class _Processes:
    """Processes that train together, and wait for plans to measure."""

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


def run(job: Job, setting: Setting, rank: int = 0) -> Measured:
    """Time the steps of a job in this process."""
    plan, profile, samples, seed, effort = job
    weights = {t.name: torch.full((1, 1), 0.01).expand(t.rows, t.dim) for t in plan.tables}
    kind = PlacedEmbeddings if setting.ranks == 1 else ShardedEmbeddings
    model: Embeddings = kind(plan, weights=weights, backend=setting.backend, device=setting.device)
    for held in (model, *model.children()):
        if isinstance(held, PlacedEmbeddings):
            _touch_state(held)
    orders = {table.name: Ranks.in_plan(plan, table.name) for table in plan.tables}
    seed = seed * setting.ranks + rank
    chunks = drawn_batches(profile, samples, effort.batches, seed=seed, orders=orders)
    batches = [BagBatch.from_chunk(chunk, model.feature_names) for chunk in chunks]
    if setting.device.startswith("cuda"):
        batches = [batch.pin_memory() for batch in batches]
    try:
        return _timed(model, batches, effort, setting)
    finally:
        model.close()


def _touch_state(model: PlacedEmbeddings) -> None:
    """Write all optimizer state, so timed steps do not allocate its pages."""
    order = model.id_order()
    for tensor in order.states():
        values = torch.full(tensor.shape[:1] if tensor.is_per_row else (1, 1), 0.01)
        order.overwrite(tensor, values.expand(tensor.shape))


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
        stream = look_ahead(itertools.cycle(batches), model)
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
    if together:  # All ranks must stop at the same step.
        return steps >= 2 * effort.least_steps
    if steps >= effort.most_steps or seconds >= effort.most_s:
        return True
    return steps >= effort.least_steps and seconds >= effort.least_s


@contextlib.contextmanager
def quiet(setting: Setting, rank: int) -> Iterator[None]:
    """Use the threads and cores of a setting within a ``with`` block."""
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
