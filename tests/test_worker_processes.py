"""Processes that share work: each result once, errors and stops passed on, nothing left behind."""

import multiprocessing

import pytest
from process_jobs import work

from placer.errors import BackendError, ProblemError
from solvers.analysis.worker_processes import in_processes

pytestmark = pytest.mark.slow


def never() -> bool:
    return False


def test_each_job_is_done_once_by_no_more_processes_than_asked_for() -> None:
    jobs = ["a", "b", "c", "d", "e"]
    done = list(in_processes(work, jobs, 2, never))
    assert sorted(job for job, _ in done) == jobs
    assert all(answered == job for job, (answered, _) in done)
    assert len({process for _, (_, process) in done}) <= 2
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("job", "error", "words"),
    [("raise", ProblemError, "no such machine"), ("die", BackendError, "died")],
)
def test_an_error_ends_all_processes(job: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        list(in_processes(work, [job, "wait", "a"], 2, never))
    assert not multiprocessing.active_children()


def test_jobs_are_told_to_stop() -> None:
    done = dict(in_processes(work, ["wait", "wait too"], 2, lambda: True))
    assert done.keys() == {"wait", "wait too"}


def test_whoever_wants_no_more_results_leaves_no_process() -> None:
    results = in_processes(work, ["a", "wait"], 2, never)
    next(iter(results))
    results.close()  # type: ignore[attr-defined]  # A generator.
    assert not multiprocessing.active_children()
