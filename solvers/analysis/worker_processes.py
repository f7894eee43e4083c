"""Work that several processes share, one job each at a time."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from placer.errors import BackendError

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
    with the last job, with an error, and when this process ends or no longer wants results; jobs
    are told to stop then. Ctrl-C is this process's own to answer, by `stop`.

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
    pool = ProcessPoolExecutor(workers, context, _begin, (function, stopping))
    try:
        running = {pool.submit(_run, job): job for job in jobs}
        while running:
            if stop():
                stopping.set()
            for done in wait(running, _ASKED_EVERY_S, FIRST_COMPLETED).done:
                yield running.pop(done), done.result()
    except BrokenProcessPool as error:
        raise BackendError("a process that searched died; its memory may have run out") from error
    finally:
        stopping.set()
        pool.shutdown(cancel_futures=True)


_work: Callable[[Any], Any]
"""Of a worker: the function with what tells it whether to stop."""


def _begin(function: Callable[[Any, Stop], Any], stopping: Any) -> None:
    global _work
    _work = lambda job: function(job, stopping.is_set)  # noqa: E731
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _run(job: Any) -> Any:
    return _work(job)


def _end_with_parent() -> None:
    """End this process when the one that began it is gone, even if it was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "it was begun by another process"
    parent.join()
    os._exit(1)
