"""Work that several processes share, one job each at a time."""

import itertools
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from placer.errors import BackendError, PlacerError

_ASKED_EVERY_S = 0.1
"""How often it is asked whether to stop, in seconds."""

Stop = Callable[[], bool]
Job = TypeVar("Job")
Result = TypeVar("Result")


def in_processes(
    function: Callable[[Job, Stop], Result], jobs: Sequence[Job], workers: int, stop: Stop
) -> Iterator[tuple[Job, Result]]:
    """Yield results of jobs in the order in which they end; each is begun in the order of `jobs`.

    The processes are new ones, so that neither threads nor locks of this one are copied. They end
    with the last job, with an error, and when this process ends or no longer wants results.
    Ctrl-C is this process's own to answer, by `stop`.

    Parameters
    ----------
    function : callable
        Of a job, and of what tells it whether to stop. It is pickled once for each process, jobs
        and results once for each job.
    jobs : sequence
    workers : int
        Processes.
    stop : callable
        Asked now and then; what it answers is passed on to the jobs. It stays here.

    Raises
    ------
    PlacerError
        The first that a job raises.
    BackendError
        If a process dies.
    """
    context = multiprocessing.get_context("spawn")
    stopping = context.Event()
    if stop():
        stopping.set()
    processes: dict[Connection, BaseProcess] = {}
    busy: dict[Connection, Job] = {}
    left = iter(jobs)
    try:
        for job in itertools.islice(left, workers):
            pipe, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, function, stopping), daemon=True)
            process.start()
            theirs.close()  # So that its death ends the pipe.
            processes[pipe], busy[pipe] = process, job
            pipe.send(job)
        while busy:
            ready = wait(list(busy), _ASKED_EVERY_S)
            if stop():
                stopping.set()
            for idle in [pipe for pipe in busy if pipe in ready]:
                job, result = busy.pop(idle), _received(idle)
                for following in itertools.islice(left, 1):
                    busy[idle] = following
                    idle.send(following)
                yield job, result
    finally:
        for used, running in processes.items():
            used.close()
            running.terminate()
            running.join()


def _received(pipe: Connection) -> Any:
    try:
        is_error, result = pipe.recv()
    except (EOFError, OSError) as error:
        raise BackendError("a process that searched died; its memory may have run out") from error
    if is_error:
        raise result
    return result


def _serve(pipe: Connection, function: Callable[[Any, Stop], Any], stopping: Any) -> None:
    """Answer jobs until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            pipe.send((False, function(job, stopping.is_set)))
        except PlacerError as error:
            pipe.send((True, error))
        except BrokenPipeError:  # Nobody wants it any more.
            return
