"""Runs functions on several processes that talk over gloo."""

import atexit
import contextlib
import gc
import io
import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

Job = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""A name, and what to call on each rank with (rank, world, ...)."""


class Failed(str):
    """A traceback."""


class Outcomes(dict[str, list[Any]]):
    """What each job gave on each rank, by its name."""

    def of(self, name: str) -> list[Any]:
        """A job's results by rank; raises what was raised there."""
        failures = [result for result in self[name] if isinstance(result, Failed)]
        if failures:
            raise AssertionError("\n\n".join(failures))
        if None in self[name]:
            raise AssertionError(f"{name} was not run: a job before it failed")
        return [result[0] for result in self[name]]


class _Ranks:
    """Processes that do jobs until nobody has any more for them."""

    def __init__(self, world: int, timeout_s: float) -> None:
        context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (rank, world, self._folder.name, theirs, timeout_s)
            self._processes.append(context.Process(target=_rank, args=arguments))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)

    def results(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """What the jobs gave on each rank."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps(list(jobs)))
        return [torch.load(io.BytesIO(p.recv_bytes()), weights_only=False) for p in self._pipes]

    def end(self, *, kill: bool = False) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            if kill:
                process.kill()
            process.join()
        self._folder.cleanup()


_WAITING: dict[int, _Ranks] = {}
"""Processes for the next jobs, by their number: a start takes seconds."""


@atexit.register
def _end_waiting() -> None:
    for ranks in _WAITING.values():
        ranks.end()


def run(world: int, jobs: Sequence[Job], timeout_s: float | None = None) -> Outcomes:
    """Run jobs one after the other in one set of processes.

    After a failure ranks may be out of step, so that the rest is not run, and nothing more in these
    processes. With a timeout of their own jobs have processes of their own.
    """
    shares = timeout_s is None
    ranks = _WAITING.pop(world, None) if shares else None
    ranks = ranks or _Ranks(world, timeout_s or 60)
    goes_on = False
    try:
        results = ranks.results(jobs)
        goes_on = shares and all(len(theirs) == len(jobs) for theirs in results)
        goes_on &= not any(isinstance(one, Failed) for by in results for one in by.values())
    finally:
        if goes_on:
            _WAITING[world] = ranks
        else:
            ranks.end(kill=True)
    return Outcomes({name: [theirs.get(name) for theirs in results] for name, _, _ in jobs})


def join_group(rank: int, world: int, folder: str, timeout_s: float) -> None:
    """Meet the other ranks in a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )


def leave_group() -> None:
    """Part from the other ranks; called where no model lives any more.

    A model holds the process group, and with it gloo's threads. One that lets go of the last
    tensor that it sent when Python ends aborts the process ("terminate called without an active
    exception"): it asks for the interpreter's lock, which then ends the thread.
    """
    gc.collect()
    dist.destroy_process_group()


def _rank(rank: int, world: int, folder: str, pipe: Connection, timeout_s: float) -> None:
    gc.freeze()  # So that collections of garbage leave alone what was imported before the fork.
    join_group(rank, world, folder, timeout_s)
    with contextlib.suppress(EOFError):  # Nobody has more jobs.
        while True:
            jobs = pickle.loads(pipe.recv_bytes())
            results: dict[str, Any] = {}
            for name, job, arguments in jobs:
                try:
                    results[name] = (job(rank, world, *arguments),)
                except Exception:
                    results[name] = Failed(traceback.format_exc())
                    break
            said = io.BytesIO()
            torch.save(results, said)
            del results, jobs
            pipe.send_bytes(said.getbuffer())
    leave_group()
